//! `neap plan` with several jobs: one plan for all that share a device.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::bail;
use neap::contract::{Event, JobPlan};
use neap::job::Graph;
use neap::plan::global::{self, Job, Jobs, Together};
use neap::plan::overlap::{self, Overlapped};
use neap::plan::{Method, Share};
use neap::report::table::{Side, Table};
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use crate::accounting::Accounting;
use crate::output::{self, Answer, note};
use crate::plan::{Flags, does_not_fit, graph_path, prove_and_write};
use crate::settings::{self, Budget};

/// A graph, and how much of the job may be swapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobArg {
    /// Its file.
    pub path: PathBuf,
    /// How much of it may be swapped.
    pub share: Share,
}

impl JobArg {
    /// Reads a file's name, with a share behind an @.
    ///
    /// # Errors
    /// When the share is none.
    pub fn read(text: OsString) -> Result<Self, String> {
        // A name may hold an @ itself, or what is not UTF-8.
        let number =
            |tail: &str| tail.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.');
        let parts = text
            .to_str()
            .and_then(|t| t.rsplit_once('@'))
            .filter(|(path, tail)| !path.is_empty() && number(tail));
        let Some((path, share)) = parts else {
            return Ok(Self { path: PathBuf::from(text), share: Share::ALL });
        };
        let share = share.parse().map_err(|()| {
            format!("`@{share}` is not a share of the tensors; give a number from 0 to 1 with at most three decimals, such as {path}@0.5")
        })?;
        Ok(Self { path: PathBuf::from(path), share })
    }

    /// The planner that swaps no more than the job allows.
    ///
    /// # Errors
    /// When the planner has no such limit.
    pub fn limited(&self, method: Method) -> anyhow::Result<Method> {
        if self.share == Share::ALL {
            return Ok(method);
        }
        method.limited(self.share).ok_or_else(|| {
            anyhow::anyhow!(
                "{}@{}: planner {} has no limit on swapping; use neap or tensile, or leave the share away",
                self.path.display(),
                self.share,
                method.name()
            )
        })
    }
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    for (given, flag) in [
        (flags.noise.is_some(), "--noise"),
        (flags.accounting != Accounting::Physical, "--accounting paper"),
        (flags.allocator.is_pytorch(), "--allocator pytorch"),
    ] {
        if given {
            bail!("{flag}: is for a plan of one job; leave it away or plan each job by itself");
        }
    }
    let mut graphs = Vec::with_capacity(flags.graphs.len());
    let mut sites = Vec::with_capacity(flags.graphs.len());
    for job in &flags.graphs {
        let mut graph = settings::graph(&job.path)?;
        sites.push(flags.device.resolve(&mut graph)?);
        graphs.push(graph);
    }
    let Some(device) = sites.first().map(|s| s.device.clone()) else { bail!("no graph is given") };
    let peak = global::unplanned_peak(&graphs.iter().collect::<Vec<_>>());
    let budget =
        flags.budget.unwrap_or(Budget::Bytes(device.available())).resolve(peak, &device)?;
    let (method, mut recorded_options) = flags.switches.resolve(flags.planner)?;
    let mut jobs = Vec::with_capacity(graphs.len());
    for (index, ((arg, graph), site)) in flags.graphs.iter().zip(&graphs).zip(&sites).enumerate() {
        recorded_options.extend(arg.share.record(Some(index)));
        jobs.push(Job {
            graph,
            file: (graph_path(flags, &arg.path)?, site.sha256.clone()),
            latencies: &site.latencies,
            method: arg.limited(method.clone())?,
            priority: arg.share.priority(),
        });
    }
    if flags.overlap {
        recorded_options.insert("overlap".to_owned(), "true".to_owned());
    }
    let asked = Jobs {
        jobs,
        device: &device,
        budget: budget.unwrap_or_else(|| device.available()),
        recorded_options,
    };
    let started = Instant::now();
    let apart = |together| (together, None);
    let shared = |overlapped: Overlapped| (overlapped.together.clone(), Some(overlapped));
    let made = match (flags.overlap, budget.is_some()) {
        (false, true) => global::make(&asked).map(apart),
        (false, false) => global::minimum(&asked).map(apart),
        (true, true) => overlap::make(&asked).map(shared),
        (true, false) => overlap::minimum(&asked).map(shared),
    };
    let (mut together, overlapped) = match made {
        Ok(made) => made,
        Err(error) => return does_not_fit(error, "", peak, as_json),
    };
    let took = started.elapsed();
    for (job, site) in together.plan.jobs.iter_mut().zip(&sites) {
        job.libraries.clone_from(&site.libraries);
    }
    prove_and_write(flags, &together.plan, &graphs)?;
    note(&format!("planned in {took:.1?}"));
    report(&together, overlapped.as_ref(), &graphs, peak, as_json)?;
    if let Some(output) = &flags.output {
        note(&format!("written: {}", output.display()));
    }
    Ok(Answer::Yes)
}

/// Swap-outs, swap-ins and recomputes.
fn events(job: &JobPlan) -> [usize; 3] {
    let count = |f: fn(&Event) -> bool| job.events.iter().filter(|e| f(e)).count();
    [
        count(|e| matches!(e, Event::SwapOut { .. })),
        count(|e| matches!(e, Event::SwapIn { .. })),
        count(|e| matches!(e, Event::Recompute { .. })),
    ]
}

/// What sharing bytes comes to.
fn told_overlap(overlapped: &Overlapped) -> String {
    let times =
        |times: &[Nanos]| times.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let apart = match &overlapped.apart {
        Some(apart) => format!("with a sub-arena for each {}", times(apart)),
        None => "with a sub-arena for each they don't fit".to_owned(),
    };
    let Some(window) = overlapped.window() else {
        return format!(
            "\nno bytes are shared: it would be no quicker; side by side the iterations take {}",
            times(&overlapped.beside)
        );
    };
    format!(
        "\nwindow {} ({} bytes) at offset {}, held in turn: in an iteration alone for {}\nside by side the iterations take {}; {apart}",
        window.bytes,
        window.bytes.0,
        window.offset.0,
        times(&overlapped.held),
        times(&overlapped.beside),
    )
}

fn report(
    together: &Together,
    overlapped: Option<&Overlapped>,
    graphs: &[Graph],
    peak: Bytes,
    as_json: bool,
) -> anyhow::Result<()> {
    let plan = &together.plan;
    if as_json {
        let mut object = serde_json::to_value(plan.figures)?;
        object["fits"] = json!(true);
        object["planner"] = json!(plan.planner);
        object["device"] = json!(plan.device.name);
        object["budget_bytes"] = json!(plan.budget);
        let job = |(part, graph): (&neap::plan::Planned, &Graph)| -> anyhow::Result<Value> {
            let mut object = serde_json::to_value(part.plan.figures)?;
            let [out, back, again] = events(&part.plan.jobs[0]);
            object["name"] = json!(graph.name);
            object["swap_outs"] = json!(out);
            object["swap_ins"] = json!(back);
            object["recomputes"] = json!(again);
            Ok(object)
        };
        object["jobs"] =
            together.parts.iter().zip(graphs).map(job).collect::<anyhow::Result<Value>>()?;
        if let Some(overlapped) = overlapped {
            object["window_bytes"] = json!(overlapped.window().map_or(Bytes::ZERO, |w| w.bytes));
            object["window_offset_bytes"] =
                json!(overlapped.window().map_or(Bytes::ZERO, |w| w.offset));
            object["fits_apart"] = json!(overlapped.apart.is_some());
            for (index, job) in object["jobs"].as_array_mut().into_iter().flatten().enumerate() {
                job["window_held_ns"] = json!(overlapped.held[index]);
                job["beside_ns"] = json!(overlapped.beside[index]);
                job["beside_apart_ns"] = json!(overlapped.apart.as_ref().map(|apart| apart[index]));
            }
        }
        return output::json(&object);
    }
    let heads = [
        "job",
        "unplanned peak",
        "sub-arena",
        "alone, unplanned",
        "alone, planned",
        "swap-outs",
        "swap-ins",
        "recomputes",
    ];
    let mut table =
        Table::new(&heads.map(|head| (head, if head == "job" { Side::Left } else { Side::Right })));
    for (index, (part, graph)) in together.parts.iter().zip(graphs).enumerate() {
        let (figures, [out, back, again]) = (&part.plan.figures, events(&part.plan.jobs[0]));
        table.row([
            format!("{index} {}", graph.name),
            figures.unplanned_peak_bytes.to_string(),
            figures.arena_bytes.to_string(),
            figures.unplanned_iteration_ns.to_string(),
            figures.iteration_ns.to_string(),
            out.to_string(),
            back.to_string(),
            again.to_string(),
        ]);
    }
    let figures = &plan.figures;
    output::data(&format!(
        "{table}\narena {} ({} bytes) of a budget of {} ({} bytes); unplanned the peaks sum up to {}; pinned {}{}",
        figures.arena_bytes,
        figures.arena_bytes.0,
        plan.budget,
        plan.budget.0,
        peak,
        figures.pinned_bytes,
        overlapped.map(told_overlap).unwrap_or_default()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_read() {
        let job = |path: &str, share: &str| {
            Ok(JobArg { path: PathBuf::from(path), share: share.parse().unwrap() })
        };
        let read = |text: &str| JobArg::read(OsString::from(text));
        assert_eq!(read("a.graph.json"), job("a.graph.json", "1"));
        assert_eq!(read("a.graph.json@0.5"), job("a.graph.json", "0.500"));
        assert_eq!(read("a@home.graph.json"), job("a@home.graph.json", "1.0"));
        assert_eq!(read("a@1"), job("a", "1"));
        for bad in ["a@2", "a@-1", "a@0.55555", "a@1e9"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
