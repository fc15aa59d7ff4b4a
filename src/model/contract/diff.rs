//! The differences between two plans by meaning: by names, not by positions or text.
//!
//! Golden plans and `neap diff` use it. Paths of plans and graphs are not compared.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::json::steps;
use super::plan::{Event, JobPlan, Latency, Place, Plan, Trigger};
use crate::job::Graph;
use crate::units::{OpId, TensorId};

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// What differs: `plan`, `device`, or a job by number and name.
    pub subject: String,
    /// The value in the first plan and in the second, in words.
    pub text: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.subject, self.text)
    }
}

/// How many of a long list are named.
const NAMED: usize = 5;

/// All differences between plan `a` of its graphs and plan `b` of its graphs; empty if they mean
/// the same.
///
/// # Panics
/// When the graphs are not those of the plans, one for each job in order.
#[must_use]
pub fn diff(a: &Plan, a_graphs: &[Graph], b: &Plan, b_graphs: &[Graph]) -> Vec<Difference> {
    let mut all = Vec::new();
    let mut note =
        |subject: &str, text: String| all.push(Difference { subject: subject.to_owned(), text });
    leaves("device", &json(&a.device), &json(&b.device), &mut |text| note("device", text));
    leaves("planner", &json(&a.planner), &json(&b.planner), &mut |text| note("plan", text));
    leaves("options", &json(&a.options), &json(&b.options), &mut |text| note("plan", text));
    leaves("budget_bytes", &json(&a.budget), &json(&b.budget), &mut |text| note("plan", text));
    leaves("figures", &json(&a.figures), &json(&b.figures), &mut |text| note("plan", text));
    if a.jobs.len() != b.jobs.len() {
        note("plan", format!("{} jobs, then {}", a.jobs.len(), b.jobs.len()));
    }
    for (index, (a_job, b_job)) in a.jobs.iter().zip(&b.jobs).enumerate() {
        let (a, b) = (Side::new(a_job, &a_graphs[index]), Side::new(b_job, &b_graphs[index]));
        let subject = format!("job {index} (`{}`)", a.graph.name);
        job(&a, &b, &mut |text| note(&subject, text));
    }
    all
}

fn json(value: &impl Serialize) -> Value {
    // These types serialise to plain objects of numbers and text.
    serde_json::to_value(value).unwrap_or(Value::Null)
}

/// Reports each number or text that differs, by its path.
fn leaves(path: &str, a: &Value, b: &Value, note: &mut impl FnMut(String)) {
    let (Value::Object(x), Value::Object(y)) = (a, b) else {
        if a != b {
            note(format!("`{path}` {}", was(a, b)));
        }
        return;
    };
    let mut keys: Vec<_> = x.keys().chain(y.keys()).collect();
    keys.sort();
    keys.dedup();
    for key in keys {
        leaves(
            &format!("{path}.{key}"),
            x.get(key).unwrap_or(&Value::Null),
            y.get(key).unwrap_or(&Value::Null),
            note,
        );
    }
}

fn was(a: impl fmt::Display, b: impl fmt::Display) -> String {
    format!("was {a}, is {b}")
}

/// One of the two jobs, with tables for lookups.
struct Side<'a> {
    job: &'a JobPlan,
    graph: &'a Graph,
    accesses: Vec<Vec<OpId>>,
}

/// An event or placement by name, and its number among those of the same name.
type Key = (String, usize);

impl<'a> Side<'a> {
    fn new(job: &'a JobPlan, graph: &'a Graph) -> Self {
        Self { job, graph, accesses: graph.accesses() }
    }

    fn tensor(&self, id: TensorId) -> &'a str {
        &self.graph.tensor(id).name
    }

    fn operator(&self, id: OpId) -> &'a str {
        &self.graph.operator(id).name
    }

    fn due(&self, trigger: Trigger) -> String {
        trigger
            .after
            .map_or("at the start".to_owned(), |op| format!("after `{}`", self.operator(op)))
    }

    /// The first operator after a trigger that touches a tensor.
    fn before(&self, tensor: TensorId, after: Option<OpId>) -> String {
        let accesses = &self.accesses[tensor.index()];
        match accesses.get(accesses.partition_point(|op| Some(*op) <= after)) {
            Some(op) => format!("before `{}`", self.operator(*op)),
            None => "for the next iteration".to_owned(),
        }
    }

    /// What happens to each tensor that has events, in words.
    fn treatments(&self) -> BTreeMap<&'a str, Vec<String>> {
        let mut all: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        let mut add =
            |tensor: TensorId, text: String| all.entry(self.tensor(tensor)).or_default().push(text);
        for event in &self.job.events {
            let after = event.trigger().after;
            let then = self.due(Trigger { after });
            match event {
                Event::SwapOut { tensor, .. } => add(*tensor, format!("swapped out {then}")),
                Event::SwapIn { tensor, .. } => {
                    add(*tensor, format!("swapped in {}", self.before(*tensor, after)))
                }
                Event::Release { tensor, .. } => add(*tensor, format!("released {then}")),
                Event::Recompute { keep, .. } => {
                    for tensor in keep {
                        add(*tensor, format!("recomputed {}", self.before(*tensor, after)));
                    }
                }
            }
        }
        all
    }

    fn order(&self) -> Vec<(Key, String)> {
        let name = |id: OpId| &self.graph.framework().operator(id).name;
        numbered(self.job.arrangement.order.iter().map(|moved| {
            let behind = moved
                .after
                .map_or("at the start".to_owned(), |after| format!("behind `{}`", name(after)));
            let piece = moved.piece.map_or(String::new(), |piece| format!("#{piece}"));
            (format!("move of `{}{piece}`", name(moved.operator)), behind)
        }))
    }

    fn pieces(&self) -> Vec<(Key, String)> {
        let name = |id: OpId| &self.graph.framework().operator(id).name;
        numbered(self.job.arrangement.pieces.iter().map(|pieces| {
            let size = format!("{} elements each", pieces.elements);
            (format!("pieces of `{}`", name(pieces.operator)), size)
        }))
    }

    fn events(&self) -> Vec<(Key, String)> {
        numbered(self.job.events.iter().map(|event| {
            let due = self.due(event.trigger());
            match event {
                Event::SwapOut { tensor, .. } => {
                    (format!("swap-out of `{}`", self.tensor(*tensor)), due)
                }
                Event::SwapIn { tensor, .. } => {
                    (format!("swap-in of `{}`", self.tensor(*tensor)), due)
                }
                Event::Release { tensor, .. } => {
                    (format!("release of `{}`", self.tensor(*tensor)), due)
                }
                Event::Recompute { operator, keep, .. } => {
                    let keep: Vec<_> =
                        keep.iter().map(|t| format!("`{}`", self.tensor(*t))).collect();
                    (
                        format!("recompute of `{}`", self.operator(*operator)),
                        format!("{due} keeping {}", keep.join(", ")),
                    )
                }
            }
        }))
    }

    fn placements(&self) -> Vec<(Key, String)> {
        let steps = steps(&self.job.events, self.graph.operators.len());
        // A step's number changes with every recompute before it, so the runs of its operator are
        // counted instead.
        let mut runs = BTreeMap::new();
        let run: Vec<_> = steps
            .iter()
            .map(|op| {
                let n = runs.entry(*op).or_insert(0usize);
                *n += 1;
                *n
            })
            .collect();
        let named = self.job.placements.iter().map(|placement| {
            let what = match placement.place {
                Place::Tensor { tensor, residency } => {
                    format!("residency {residency} of `{}`", self.tensor(tensor))
                }
                Place::Workspace { step } => {
                    format!(
                        "workspace of run {} of `{}`",
                        run[step as usize],
                        self.operator(steps[step as usize])
                    )
                }
            };
            (what, placement.offset.0.to_string())
        });
        numbered(named)
    }

    fn window(&self) -> String {
        let Some(window) = &self.job.window else { return "none".to_owned() };
        let after: Vec<_> =
            window.hands_over_after.iter().map(|op| format!("`{}`", self.operator(*op))).collect();
        let after = if after.is_empty() {
            String::new()
        } else {
            format!(", handed over after {}", first_few(&after))
        };
        format!("{} bytes at {}{after}", window.bytes.0, window.offset.0)
    }

    fn slots(&self) -> Vec<(Key, String)> {
        let mut all: Vec<_> = self
            .job
            .host_slots
            .iter()
            .map(|(t, b)| (format!("host slot of `{}`", self.tensor(*t)), b.0.to_string()))
            .collect();
        all.sort();
        numbered(all.into_iter())
    }
}

fn numbered(all: impl Iterator<Item = (String, String)>) -> Vec<(Key, String)> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    all.map(|(what, value)| {
        let n = seen.entry(what.clone()).or_default();
        *n += 1;
        ((what, *n), value)
    })
    .collect()
}

fn job(a: &Side<'_>, b: &Side<'_>, note: &mut impl FnMut(String)) {
    if a.job.graph_sha256 != b.job.graph_sha256 {
        note(format!("the graph's SHA-256 {}", was(&a.job.graph_sha256, &b.job.graph_sha256)));
    }
    lists("order", "moved", &a.order(), &b.order(), note);
    lists("pieces", "resized", &a.pieces(), &b.pieces(), note);
    treatments(a, b, note);
    lists("events", "retimed", &a.events(), &b.events(), note);
    lists("placements", "moved", &a.placements(), &b.placements(), note);
    lists("host slots", "moved", &a.slots(), &b.slots(), note);
    if a.window() != b.window() {
        note(format!("the window {}", was(a.window(), b.window())));
    }
    latencies(a, b, note);
}

fn treatments(a: &Side<'_>, b: &Side<'_>, note: &mut impl FnMut(String)) {
    let (x, y) = (a.treatments(), b.treatments());
    let mut tensors: Vec<_> = x.keys().chain(y.keys()).copied().collect();
    tensors.sort();
    tensors.dedup();
    let words = |all: Option<&Vec<String>>| all.map_or("kept".to_owned(), |all| all.join(", "));
    for tensor in tensors.into_iter().filter(|t| x.get(t) != y.get(t)) {
        note(format!(
            "tensor `{tensor}` was {}; is {}",
            words(x.get(tensor)),
            words(y.get(tensor))
        ));
    }
}

/// Reports entries of only one list, entries with another value, and, if nothing else differs,
/// another order.
fn lists(
    what: &str,
    changed: &str,
    a: &[(Key, String)],
    b: &[(Key, String)],
    note: &mut impl FnMut(String),
) {
    let (x, y) = (by_key(a), by_key(b));
    let name =
        |key: &Key| if key.1 > 1 { format!("{} (number {})", key.0, key.1) } else { key.0.clone() };
    let only = |list: &[(Key, String)], other: &BTreeMap<&Key, &str>| -> Vec<_> {
        list.iter()
            .filter(|(key, _)| !other.contains_key(key))
            .map(|(key, value)| format!("{} {}", name(key), value_words(what, value)))
            .collect()
    };
    let (gone, new) = (only(a, &y), only(b, &x));
    let moved: Vec<_> = a
        .iter()
        .filter_map(|(key, value)| {
            y.get(key)
                .filter(|other| **other != value)
                .map(|other| format!("{} {}", name(key), was(value, other)))
        })
        .collect();
    let same = gone.is_empty() && new.is_empty() && moved.is_empty();
    for (list, how) in
        [(gone, "only in the first plan"), (new, "only in the second plan"), (moved, changed)]
    {
        if !list.is_empty() {
            note(format!("{} {what} {how}: {}", list.len(), first_few(&list)));
        }
    }
    if same && let Some(((key, _), _)) = a.iter().zip(b).find(|(p, q)| p.0 != q.0) {
        note(format!("{what} in another order, from {} on", name(key)));
    }
}

fn value_words(what: &str, value: &str) -> String {
    if what == "events" { value.to_owned() } else { format!("at {value}") }
}

fn by_key(list: &[(Key, String)]) -> BTreeMap<&Key, &str> {
    list.iter().map(|(key, value)| (key, &**value)).collect()
}

fn first_few(list: &[String]) -> String {
    let more = list.len().saturating_sub(NAMED);
    let named = list[..list.len() - more].join("; ");
    if more > 0 { format!("{named}; and {more} more") } else { named }
}

fn latencies(a: &Side<'_>, b: &Side<'_>, note: &mut impl FnMut(String)) {
    let named = |side: &Side<'_>| -> BTreeMap<String, String> {
        let by = |index| {
            side.job.libraries.get(&OpId::from_index(index)).map_or_else(String::new, |chosen| {
                format!(
                    " by algorithm {} in {} bytes of scratch",
                    chosen.text(),
                    chosen.workspace.0
                )
            })
        };
        let all = side.graph.operators.iter().zip(&side.job.latencies).enumerate();
        let words = |index, l: &Latency| {
            format!(
                "{} ns ({}){}",
                l.time.0,
                json(&l.source).as_str().unwrap_or_default(),
                by(index)
            )
        };
        all.map(|(index, (o, l))| (o.name.clone(), words(index, l))).collect()
    };
    let (x, y) = (named(a), named(b));
    let list: Vec<_> = x
        .iter()
        .filter_map(|(operator, value)| {
            y.get(operator)
                .filter(|other| *other != value)
                .map(|other| format!("`{operator}` {}", was(value, other)))
        })
        .collect();
    if !list.is_empty() {
        let total = |side: &Side<'_>| side.job.latencies.iter().map(|l| l.time.0).sum::<u64>();
        note(format!(
            "{} latencies changed, all together {} ns: {}",
            list.len(),
            was(total(a), total(b)),
            first_few(&list)
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::json::tests::sample;
    use super::*;
    use crate::contract::plan::{Placement, Source};
    use crate::units::Bytes;

    fn lines(change: impl FnOnce(&mut Plan)) -> Vec<String> {
        let (a, graphs) = sample();
        let mut b = a.clone();
        change(&mut b);
        diff(&a, &graphs, &b, &graphs).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn equal_plans_differ_in_nothing_wherever_they_lie() {
        assert!(lines(|_| ()).is_empty());
        assert!(lines(|b| b.jobs[0].graph = "/elsewhere/mlp.graph.json".to_owned()).is_empty());
    }

    #[test]
    fn each_part_of_a_plan_is_compared() {
        assert_eq!(
            lines(|b| b.device.link.h2d = 9),
            ["device: `device.link.h2d` was 8589934592, is 9"]
        );
        assert_eq!(lines(|b| b.budget = Bytes(3)), ["plan: `budget_bytes` was 1073741824, is 3"]);
        assert_eq!(
            lines(|b| b.planner = "other".to_owned()),
            ["plan: `planner` was \"none\", is \"other\""]
        );
        assert_eq!(lines(|b| b.options.clear()), ["plan: `options.rate` was \"1/2\", is null"]);
        assert_eq!(
            lines(|b| b.figures.arena_bytes = Bytes(1)),
            ["plan: `figures.arena_bytes` was 0, is 1"]
        );
        assert_eq!(lines(|b| b.jobs.clear()), ["plan: 1 jobs, then 0"]);
        assert!(
            lines(|b| b.jobs[0].graph_sha256.clear())[0]
                .starts_with("job 0 (`mlp`): the graph's SHA-256 was ")
        );
        assert_eq!(
            lines(|b| b.jobs[0].placements[1].offset = Bytes(2048)),
            ["job 0 (`mlp`): 1 placements moved: residency 1 of `z1` was 512, is 2048"]
        );
        assert_eq!(
            lines(|b| b.jobs[0].placements.swap(0, 1)),
            ["job 0 (`mlp`): placements in another order, from residency 0 of `z1` on"]
        );
        assert_eq!(
            lines(|b| b.jobs[0].placements.truncate(2)),
            [
                "job 0 (`mlp`): 1 placements only in the first plan: workspace of run 1 of `linear3.weight` at 1024"
            ]
        );
        assert!(
            lines(|b| b.jobs[0].host_slots.clear())[0]
                .contains("2 host slots only in the first plan")
        );
        let slower = lines(|b| b.jobs[0].latencies[0].time.0 += 1);
        assert!(
            slower[0].contains("1 latencies changed, all together was ")
                && slower[0]
                    .contains("`linear1` was 3435000 ns (graph) by algorithm 1;-1 in 1000 bytes of scratch, is 3435001 ns (graph) by")
        );
        assert!(
            lines(|b| b.jobs[0].libraries.clear())[0]
                .ends_with("1000 bytes of scratch, is 3435000 ns (graph)")
        );
        assert_eq!(lines(|b| b.jobs[0].latencies[0].source = Source::Measured).len(), 1);
    }

    #[test]
    fn events_are_told_by_tensor_and_by_time() {
        let earlier = |b: &mut Plan| {
            let first = b.jobs[0].events[1].trigger().after;
            if let Event::SwapIn { trigger, .. } = &mut b.jobs[0].events[3] {
                trigger.after = first;
            }
        };
        assert_eq!(
            lines(earlier),
            [
                "job 0 (`mlp`): 1 events retimed: swap-in of `z1` was after `linear2`, is after `gelu1`"
            ],
            "an earlier start changes no treatment"
        );
        assert_eq!(lines(|b| b.jobs[0].events.swap(3, 4)).len(), 1);
        let kept = lines(|b| {
            b.jobs[0].events.retain(|event| match event {
                Event::SwapIn { tensor, .. } | Event::SwapOut { tensor, .. } => tensor.0 != 14,
                _ => true,
            });
        });
        assert_eq!(
            kept,
            [
                "job 0 (`mlp`): tensor `z1` was swapped out after `gelu1`, swapped in before `gelu1.backward`; is kept",
                "job 0 (`mlp`): 2 events only in the first plan: swap-out of `z1` after `gelu1`; swap-in of `z1` after `linear2`",
            ]
        );
        // Without the recompute all later steps have other numbers, but their workspaces have not
        // moved.
        let without = lines(|b| {
            drop(b.jobs[0].events.remove(4));
            if let Placement { place: Place::Workspace { step }, .. } = &mut b.jobs[0].placements[2]
            {
                *step -= 1;
            }
        });
        assert_eq!(without.len(), 2);
        assert!(
            without[0]
                .contains("tensor `h1` was released after `linear2`, recomputed before `linear2.weight`; is released after `linear2`")
        );
        assert!(
            without[1].ends_with("recompute of `gelu1` after `linear2` keeping `h1`"),
            "{without:?}"
        );
    }

    #[test]
    fn the_order_of_keys_means_nothing() {
        let (plan, graphs) = sample();
        let text = super::super::json::to_bytes(&plan, &graphs);
        let sorted: Value = serde_json::from_slice(&text).unwrap();
        let file = serde_json::from_str(&serde_json::to_string_pretty(&sorted).unwrap()).unwrap();
        let again = super::super::json::resolve(file, &graphs).unwrap();
        assert_eq!(diff(&plan, &graphs, &again, &graphs), []);
    }
}
