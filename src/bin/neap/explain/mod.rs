//! `neap explain`: why a plan swaps, recomputes or keeps each tensor.

pub mod page;

use std::fmt;
use std::path::PathBuf;

use anyhow::bail;
use neap::job::optimizer::is_update;
use neap::job::{Graph, Operator, Role};
use neap::plan::arrange;
use neap::plan::explain::{Choice, Copied, Explained, Gap, Presence, Story, Verdict};
use neap::report::table::{Side, Table};
use neap::units::{Bytes, Nanos, OpId, TensorId};
use serde::Serialize;

use crate::output::{self, Answer, Ending};
use crate::settings::{self, Outputs};

/// Explain why each of the largest tensors at the planned peak is swapped, recomputed or kept, and
/// why it is not treated otherwise.
#[derive(clap::Args)]
pub struct Flags {
    /// The plan.
    plan: PathBuf,
    /// Explain only this tensor, with all decisions about it.
    tensor: Option<String>,
    /// The graph of the plan; by default at the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
    /// How many of the largest tensors at the peak to explain.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Write a page to look at in a browser: memory without and with the plan, copies and waits
    /// below it, and the reasons for each tensor.
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let inputs = settings::subject_files(&flags.plan, &flags.graph);
    let outputs = Outputs::new(&inputs, &[flags.html.as_deref()])?;
    let (plan, graphs) = settings::plan(&flags.plan, &flags.graph)?;
    outputs.apart_from_what_was_read()?;
    if graphs.len() > 1 {
        bail!(
            "{}: has {} jobs; plan the job in question alone, with its sub-arena as --budget, and explain that plan",
            flags.plan.display(),
            graphs.len()
        );
    }
    let wanted = flags.tensor.as_deref().map(|name| named(&graphs[0], name)).transpose()?;
    if !settings::checked(&flags.plan, &plan, &graphs)? {
        return Ok(Answer::No);
    }
    let explained = Explained::new(&plan, &graphs[0]).map_err(anyhow::Error::msg)?;
    let words = Words { graph: &graphs[0], explained: &explained };
    let there = explained.at_peak();
    let chosen: Vec<TensorId> = wanted
        .map_or_else(|| there.iter().take(flags.top).copied().collect(), |tensor| vec![tensor]);
    let stories: Vec<Story> = chosen.into_iter().map(|tensor| explained.story(tensor)).collect();
    let report = Report {
        planner: &plan.planner,
        budget_bytes: plan.budget,
        peak_bytes: explained.peak_bytes,
        peak_at_ns: explained.peak.0,
        peak_operator: words.operator(explained.peak_step),
        workspace_at_peak_bytes: explained.workspace_at_peak(),
        tensors_at_peak: there.len(),
        tensors: stories.iter().map(|s| words.tensor(s)).collect(),
        text: words.text(&stories, wanted.is_some()),
        at: words.at(explained.peak_step),
    };
    let mut ending = Ending::reporting(&report, as_json);
    ending.file(flags.html.as_deref(), |path| {
        let form = serde_json::to_value(&report)?;
        page::write(path, &plan, &graphs[0], words.reasons(&stories), form)
    });
    ending.with(Answer::Yes)
}

/// The explanations of a plan's decisions.
#[derive(Serialize)]
struct Report<'a> {
    planner: &'a str,
    budget_bytes: Bytes,
    peak_bytes: Bytes,
    peak_at_ns: Nanos,
    peak_operator: Option<&'a str>,
    workspace_at_peak_bytes: Bytes,
    tensors_at_peak: usize,
    tensors: Vec<TensorReport<'a>>,
    #[serde(skip)]
    text: String,
    #[serde(skip)]
    at: String,
}

#[derive(Serialize)]
struct TensorReport<'a> {
    tensor: &'a str,
    role: Role,
    bytes: Bytes,
    at_peak: String,
    residencies: Vec<ResidencyReport>,
    gaps: Vec<GapReport<'a>>,
    /// The update that works on it, and what that waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    update: Option<UpdateReport<'a>>,
}

/// An update, and why it runs no earlier.
#[derive(Serialize)]
struct UpdateReport<'a> {
    operator: &'a str,
    /// The last operator that it depends on, and over which tensor.
    waits_for: Option<&'a str>,
    over: Option<&'a str>,
    /// That operator runs later than in the framework.
    waits_for_moved: bool,
    /// The framework runs it elsewhere.
    moved: bool,
}

#[derive(Serialize)]
struct ResidencyReport {
    from_ns: Nanos,
    until_ns: Nanos,
}

/// The time between two uses of a tensor.
#[derive(Serialize)]
struct GapReport<'a> {
    after: Option<&'a str>,
    before: Option<&'a str>,
    /// Whether it goes over the end of the iteration.
    round: bool,
    over_peak: bool,
    length_ns: Nanos,
    plan: &'static str,
    keep: VerdictReport,
    swap: VerdictReport,
    recompute: VerdictReport,
    #[serde(flatten)]
    choice: ChoiceReport<'a>,
}

/// The plan's decision for a gap.
#[derive(Serialize)]
#[serde(untagged)]
enum ChoiceReport<'a> {
    Keep {},
    Swap {
        out_ns: Option<Nanos>,
        out_exposed_ns: Option<Nanos>,
        back_ns: Nanos,
        back_exposed_ns: Nanos,
    },
    Recompute {
        recompute_ns: Nanos,
        operators: Vec<&'a str>,
    },
}

/// A reason for or against one way to treat a tensor.
#[derive(Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
enum VerdictReport {
    Chosen,
    Possible {
        cost_ns: Nanos,
    },
    Against {
        reason: &'static str,
        because: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        needed_ns: Option<Nanos>,
        #[serde(skip_serializing_if = "Option::is_none")]
        available_ns: Option<Nanos>,
    },
}

impl VerdictReport {
    fn new(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Chosen => Self::Chosen,
            Verdict::Possible(cost) => Self::Possible { cost_ns: *cost },
            Verdict::Against(reason) => Self::Against {
                reason: reason.word(),
                because: reason.to_string(),
                needed_ns: reason.times().map(|t| t.0),
                available_ns: reason.times().map(|t| t.1),
            },
        }
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "planned by {}: the peak of {} (budget {}) stands from {} on, at {}: {} tensors and {} \
             of workspace\n\n{}",
            self.planner,
            self.peak_bytes,
            self.budget_bytes,
            self.peak_at_ns,
            self.at,
            self.tensors_at_peak,
            self.workspace_at_peak_bytes,
            self.text
        )
    }
}

/// The tensor with this name, or an error that lists the nearest names.
fn named(graph: &Graph, name: &str) -> anyhow::Result<TensorId> {
    if let Some(at) = graph.tensors.iter().position(|t| t.name == name) {
        return Ok(TensorId::from_index(at));
    }
    let mut near: Vec<(bool, usize, &str)> = graph
        .tensors
        .iter()
        .map(|t| (!t.name.contains(name), edits(&t.name, name), t.name.as_str()))
        .collect();
    near.sort_unstable();
    let names: Vec<String> = near.iter().take(5).map(|n| format!("`{}`", n.2)).collect();
    let near = if names.is_empty() {
        "the graph has no tensors".to_owned()
    } else {
        format!("near it are {}", names.join(", "))
    };
    bail!("no tensor is named `{name}`; {near}")
}

/// The Levenshtein distance: how many characters must change to turn one word into the other. Only
/// the first hundred characters count.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(100).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(100).enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let least = if x == *y { corner } else { 1 + corner.min(row[j]).min(row[j + 1]) };
            corner = std::mem::replace(&mut row[j + 1], least);
        }
    }
    row[b.len()]
}

const fn word(presence: Presence) -> &'static str {
    match presence {
        Presence::Away => "away",
        Presence::InUse => "in use",
        Presence::Leaving => "leaving",
        Presence::Arriving => "arriving",
        Presence::Early => "waiting for its use",
        Presence::Kept => "kept",
    }
}

/// The words for what was explained.
struct Words<'a> {
    graph: &'a Graph,
    explained: &'a Explained<'a>,
}

impl<'a> Words<'a> {
    fn operator(&self, step: usize) -> Option<&'a str> {
        self.explained.step(step).map(|(op, _)| self.graph.operator(op).name.as_str())
    }

    fn at(&self, step: usize) -> String {
        match self.explained.step(step) {
            Some((op, false)) => format!("`{}`", self.graph.operator(op).name),
            Some((op, true)) => format!("the recompute of `{}`", self.graph.operator(op).name),
            None => "the end".to_owned(),
        }
    }

    fn between(&self, gap: &Gap) -> String {
        let round = if gap.round { " of the next iteration" } else { "" };
        format!("from {} to {}{round}, {}", self.at(gap.after), self.at(gap.before), gap.length)
    }

    fn choice(&self, choice: &Choice) -> String {
        let copied = |c: &Copied, way: &str| {
            let hidden = c.time.saturating_sub(c.exposed);
            format!("{way} {} ({hidden} hidden, {} waited for)", c.time, c.exposed)
        };
        match choice {
            Choice::Keep => "kept".to_owned(),
            Choice::Swap { out: Some(out), back } => {
                format!("swapped: {}, {}", copied(out, "out"), copied(back, "back"))
            }
            Choice::Swap { out: None, back } => {
                format!("swapped: no copy out, the host's is valid, {}", copied(back, "back"))
            }
            Choice::Recompute { operators, time } => {
                let names: Vec<String> = operators
                    .iter()
                    .map(|op| format!("`{}`", self.graph.operator(*op).name))
                    .collect();
                format!("recomputed in {time} by {}", names.join(", "))
            }
        }
    }

    fn table(&self, stories: &[Story]) -> String {
        let columns = [
            ("tensor", Side::Left),
            ("role", Side::Left),
            ("size", Side::Right),
            ("at the peak", Side::Left),
            ("plan", Side::Left),
        ];
        let mut table = Table::new(&columns);
        for story in stories {
            let tensor = self.graph.tensor(story.tensor);
            let gap = story.gaps.iter().find(|g| g.at_peak);
            let plan = match (story.presence, gap) {
                (Presence::InUse, _) | (_, None) => "-",
                (_, Some(gap)) => gap.choice.word(),
            };
            table.row([
                tensor.name.clone(),
                output::word(tensor.role),
                story.bytes.to_string(),
                word(story.presence).to_owned(),
                plan.to_owned(),
            ]);
        }
        format!("{table}\n")
    }

    /// All tensors in a table, each with the reason why it is resident at the peak. For one tensor,
    /// everything.
    fn text(&self, stories: &[Story], alone: bool) -> String {
        if alone {
            return stories.iter().map(|story| self.all(story)).collect();
        }
        let why: String = stories.iter().map(|story| self.why(story)).collect();
        self.table(stories) + &why
    }

    /// Why a tensor is resident at the peak.
    fn why(&self, story: &Story) -> String {
        let name = &self.graph.tensor(story.tensor).name;
        match story.gaps.iter().find(|g| g.at_peak) {
            _ if story.presence == Presence::InUse => {
                format!("\n`{name}`: {}\n", self.explained.in_use())
            }
            Some(gap) => format!("\n`{name}`: {}\n{}", self.between(gap), self.ways(gap)),
            None => format!("\n`{name}`: {}\n", word(story.presence)),
        }
    }

    fn ways(&self, gap: &Gap) -> String {
        let mut text = format!("    {}\n", self.choice(&gap.choice));
        for (way, verdict) in
            [("keep", &gap.keep), ("swap", &gap.swap), ("recompute", &gap.recompute)]
        {
            match verdict {
                Verdict::Chosen => {}
                Verdict::Possible(cost) if cost.0 == 0 => {
                    text += &format!("    {way}: possible, but the budget is met without\n")
                }
                Verdict::Possible(cost) => {
                    text +=
                        &format!("    {way}: possible for {cost}, but the budget is met without\n")
                }
                Verdict::Against(reason) => text += &format!("    {way}: {reason}\n"),
            }
        }
        text
    }

    fn all(&self, story: &Story) -> String {
        let name = &self.graph.tensor(story.tensor).name;
        let mut text = format!("`{name}`: {}, {} at the peak", story.bytes, word(story.presence));
        if story.presence == Presence::InUse {
            text += &format!(": {}", self.explained.in_use());
        }
        text += "\non the device";
        for (index, (from, until)) in story.residencies.iter().enumerate() {
            text += &format!("{} from {from} to {until}", if index == 0 { "" } else { "," });
        }
        text += "\n";
        for gap in &story.gaps {
            let peak = if gap.at_peak { ", over the peak" } else { "" };
            text += &format!("\n{}{peak}\n{}", self.between(gap), self.ways(gap));
        }
        if let Some(update) = self.update(story.tensor) {
            let place = if update.moved { "earlier than in the framework" } else { "where listed" };
            text += &format!("\nits update `{}` runs {place}", update.operator);
            if let (Some(operator), Some(over)) = (update.waits_for, update.over) {
                text += &format!("; it can't run before `{operator}`, because of `{over}`");
                if update.waits_for_moved {
                    text += ", which is made later than in the framework";
                }
            }
            text += "\n";
        }
        text
    }

    fn tensor(&self, story: &Story) -> TensorReport<'a> {
        let tensor = self.graph.tensor(story.tensor);
        let residency =
            |&(from_ns, until_ns): &(Nanos, Nanos)| ResidencyReport { from_ns, until_ns };
        TensorReport {
            tensor: &tensor.name,
            role: tensor.role,
            bytes: story.bytes,
            at_peak: word(story.presence).replace(' ', "_"),
            residencies: story.residencies.iter().map(residency).collect(),
            gaps: story.gaps.iter().map(|g| self.gap(g)).collect(),
            update: self.update(story.tensor),
        }
    }

    /// The first update that works on a tensor.
    fn update(&self, tensor: TensorId) -> Option<UpdateReport<'a>> {
        let touches =
            |operator: &Operator| is_update(operator) && operator.touches().contains(&tensor);
        let update = OpId::from_index(self.graph.operators.iter().position(touches)?);
        let held = arrange::held_back(self.graph, update);
        let behind = held.map(|(operator, _)| self.graph.framework_operator(operator));
        let places = |id: OpId| {
            let of = self.graph.framework_operator(id);
            let order = self.graph.origin.iter().flat_map(|o| &o.arrangement.order);
            let entries = order.filter(move |moved| moved.operator == of);
            entries.map(move |moved| (moved.after.map_or(0, |after| after.index() + 1), of.index()))
        };
        let earlier = |id: OpId| {
            // Behind what it waits for is where it is listed, if nothing else lies between.
            let passes = |(from, listed): (usize, usize)| {
                (from..listed).any(|at| behind != Some(OpId::from_index(at))) || from > listed
            };
            places(id).any(passes)
        };
        let made_late = |id: OpId| {
            !is_update(self.graph.operator(id)) && places(id).any(|(from, listed)| from > listed)
        };
        Some(UpdateReport {
            operator: &self.graph.operator(update).name,
            waits_for: held.map(|(operator, _)| self.graph.operator(operator).name.as_str()),
            over: held.map(|(_, tensor)| self.graph.tensor(tensor).name.as_str()),
            waits_for_moved: held.is_some_and(|(operator, _)| made_late(operator)),
            moved: earlier(update),
        })
    }

    fn gap(&self, gap: &Gap) -> GapReport<'a> {
        let choice = match &gap.choice {
            Choice::Keep => ChoiceReport::Keep {},
            Choice::Swap { out, back } => ChoiceReport::Swap {
                out_ns: out.map(|c| c.time),
                out_exposed_ns: out.map(|c| c.exposed),
                back_ns: back.time,
                back_exposed_ns: back.exposed,
            },
            Choice::Recompute { operators, time } => ChoiceReport::Recompute {
                recompute_ns: *time,
                operators: operators
                    .iter()
                    .map(|op| self.graph.operator(*op).name.as_str())
                    .collect(),
            },
        };
        GapReport {
            after: self.operator(gap.after),
            before: self.operator(gap.before),
            round: gap.round,
            over_peak: gap.at_peak,
            length_ns: gap.length,
            plan: gap.choice.word(),
            keep: VerdictReport::new(&gap.keep),
            swap: VerdictReport::new(&gap.swap),
            recompute: VerdictReport::new(&gap.recompute),
            choice,
        }
    }
}
