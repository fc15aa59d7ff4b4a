//! `neap explain`: why a plan treats tensors as it does.

use std::path::PathBuf;

use anyhow::bail;
use neap::job::Graph;
use neap::plan::explain::{Choice, Copied, Explained, Gap, Presence, Story, Verdict};
use neap::report::table::{Side, Table};
use neap::units::TensorId;
use serde_json::{Value, json};

use crate::output::{self, Answer};
use crate::settings;

/// Say why each of the largest tensors at the planned peak is swapped, recomputed or kept, and what forbids the rest.
#[derive(clap::Args)]
pub struct Flags {
    /// The plan.
    plan: PathBuf,
    /// Only this tensor, and all that is decided for it.
    tensor: Option<String>,
    /// Its graph, in place of the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
    /// How many of the tensors at the peak.
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let (plan, graphs) = settings::plan(&flags.plan, &flags.graph)?;
    if graphs.len() > 1 {
        bail!(
            "{}: has {} jobs; plan the one in question alone, with its sub-arena as --budget, and explain that",
            flags.plan.display(),
            graphs.len()
        );
    }
    let wanted = flags.tensor.as_deref().map(|name| named(&graphs[0], name)).transpose()?;
    if !settings::checked(&flags.plan, &plan, &graphs)? {
        return Ok(Answer::No);
    }
    let explained = Explained::new(&plan, &graphs[0]).map_err(anyhow::Error::msg)?;
    let told = Told { graph: &graphs[0], explained };
    let there = told.explained.at_peak();
    let chosen: Vec<TensorId> = wanted
        .map_or_else(|| there.iter().take(flags.top).copied().collect(), |tensor| vec![tensor]);
    let stories: Vec<Story> =
        chosen.into_iter().map(|tensor| told.explained.story(tensor)).collect();
    if as_json {
        output::json(&json!({
            "planner": plan.planner,
            "budget_bytes": plan.budget,
            "peak_bytes": told.explained.peak_bytes,
            "peak_at_ns": told.explained.peak.0,
            "peak_operator": told.operator(told.explained.peak_step),
            "workspace_at_peak_bytes": told.explained.workspace_at_peak(),
            "tensors_at_peak": there.len(),
            "tensors": stories.iter().map(|s| told.json(s)).collect::<Vec<_>>(),
        }))?;
        return Ok(Answer::Yes);
    }
    let mut text = format!(
        "planned by {}: the peak of {} (budget {}) stands from {} on, at {}: {} tensors and {} of workspace\n\n",
        plan.planner,
        told.explained.peak_bytes,
        plan.budget,
        told.explained.peak.0,
        told.at(told.explained.peak_step),
        there.len(),
        told.explained.workspace_at_peak(),
    );
    if wanted.is_some() {
        for story in &stories {
            text += &told.all(story);
        }
    } else {
        text += &told.table(&stories);
        for story in &stories {
            text += &told.why(story);
        }
    }
    output::data(&text)?;
    Ok(Answer::Yes)
}

/// The tensor of a name, or an error with those that are nearest.
fn named(graph: &Graph, name: &str) -> anyhow::Result<TensorId> {
    if let Some(at) = graph.tensors.iter().position(|t| t.name == name) {
        return Ok(TensorId::of(at));
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

/// How many characters must change to make one word of the other (Levenshtein), looking at the first hundred.
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

struct Told<'a> {
    graph: &'a Graph,
    explained: Explained<'a>,
}

impl Told<'_> {
    fn operator(&self, step: usize) -> Option<&str> {
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
            let role = serde_json::to_value(tensor.role)
                .ok()
                .and_then(|v| v.as_str().map(|r| r.replace('_', " ")))
                .unwrap_or_default();
            table.row([
                tensor.name.clone(),
                role,
                story.bytes.to_string(),
                word(story.presence).to_owned(),
                plan.to_owned(),
            ]);
        }
        format!("{table}\n")
    }

    /// Why it stands at the peak.
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
        text
    }

    fn json(&self, story: &Story) -> Value {
        let tensor = self.graph.tensor(story.tensor);
        json!({
            "tensor": tensor.name,
            "role": tensor.role,
            "bytes": story.bytes,
            "at_peak": word(story.presence).replace(' ', "_"),
            "residencies": story.residencies.iter().map(|r| json!({ "from_ns": r.0, "until_ns": r.1 })).collect::<Vec<_>>(),
            "gaps": story.gaps.iter().map(|g| self.gap(g)).collect::<Vec<_>>(),
        })
    }

    fn gap(&self, gap: &Gap) -> Value {
        let mut object = json!({
            "after": self.operator(gap.after),
            "before": self.operator(gap.before),
            "round": gap.round,
            "over_peak": gap.at_peak,
            "length_ns": gap.length,
            "plan": gap.choice.word(),
            "keep": verdict(&gap.keep),
            "swap": verdict(&gap.swap),
            "recompute": verdict(&gap.recompute),
        });
        match &gap.choice {
            Choice::Keep => {}
            Choice::Swap { out, back } => {
                object["out_ns"] = json!(out.map(|c| c.time));
                object["out_exposed_ns"] = json!(out.map(|c| c.exposed));
                object["back_ns"] = json!(back.time);
                object["back_exposed_ns"] = json!(back.exposed);
            }
            Choice::Recompute { operators, time } => {
                object["recompute_ns"] = json!(time);
                object["operators"] =
                    operators.iter().map(|op| json!(self.graph.operator(*op).name)).collect();
            }
        }
        object
    }
}

fn verdict(verdict: &Verdict) -> Value {
    match verdict {
        Verdict::Chosen => json!({ "verdict": "chosen" }),
        Verdict::Possible(cost) => json!({ "verdict": "possible", "cost_ns": cost }),
        Verdict::Against(reason) => {
            let mut object = json!({ "verdict": "against", "reason": reason.word(), "because": reason.to_string() });
            if let Some((needed, available)) = reason.times() {
                object["needed_ns"] = json!(needed);
                object["available_ns"] = json!(available);
            }
            object
        }
    }
}
