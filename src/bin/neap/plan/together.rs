//! `neap plan` of several jobs: one plan for all that share a device.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use neap::contract::Figures;
use neap::job::Graph;
use neap::plan::overlap::{self, Overlapped};
use neap::plan::together::{self, Job, Jobs, Memo, Together};
use neap::plan::{Planned, Share};
use neap::report::table::Table;
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use super::{Events, Flags, does_not_fit, graph_path, prove_and_write};
use crate::accounting::Accounting;
use crate::output::{self, Answer, note};
use crate::progress;
use crate::settings::{self, Budget};

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    settings::none_given(
        [
            (flags.noise.is_some(), "--noise"),
            (flags.accounting != Accounting::Physical, "--accounting paper"),
            (flags.allocator.is_pytorch(), "--allocator pytorch"),
        ],
        "is for a plan of one job; leave it out or plan each job by itself",
    )?;
    let mut graphs = settings::graphs(&flags.graphs)?;
    let sites = flags.device.resolve_all(&mut graphs)?;
    let Some(device) = sites.first().map(|s| s.device.clone()) else { bail!("no graph is given") };
    let peak = together::unplanned_peak(&graphs.iter().collect::<Vec<_>>());
    let budget =
        flags.budget.unwrap_or(Budget::Bytes(device.available())).resolve(peak, &device)?;
    let (method, mut recorded_options) = flags.switches.resolve(&flags.planner)?;
    let mut jobs = Vec::with_capacity(graphs.len());
    for (index, ((arg, graph), site)) in flags.graphs.iter().zip(&graphs).zip(&sites).enumerate() {
        recorded_options.extend(arg.record(Some(index)));
        jobs.push(Job {
            graph,
            file: (graph_path(flags, &arg.path)?, site.sha256.clone()),
            latencies: &site.latencies,
            method: arg.limited(method.clone())?,
            priority: arg.share.priority(),
            swap_limit: arg.swap_limit,
        });
    }
    if flags.overlap {
        if let Some(job) = flags.graphs.iter().find(|job| job.swap_limit != Share::ALL) {
            bail!(
                "{job}: --overlap has no limit on a job's part of all swaps; leave one of them out"
            );
        }
        recorded_options.insert("overlap".to_owned(), "true".to_owned());
    }
    let bytes = budget.unwrap_or_else(|| device.available());
    let asked = Jobs { jobs, device: &device, budget: bytes, recorded_options };
    let started = Instant::now();
    let apart = |together| (together, None);
    let shared = |overlapped: Overlapped| (overlapped.together.clone(), Some(overlapped));
    let working = progress::working(&format!("planning {} jobs", graphs.len()));
    let memo = Memo::on_all_cores();
    let made = match (flags.overlap, budget.is_some()) {
        (false, true) => together::make(&asked, &memo).map(apart),
        (false, false) => together::minimum(&asked, &memo).map(apart),
        (true, true) => overlap::make(&asked, &memo).map(shared),
        (true, false) => overlap::minimum(&asked, &memo).map(shared),
    };
    working.finish_and_clear();
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
    output::report(&Report::of(&together, overlapped.as_ref(), &graphs, peak), as_json)?;
    flags.output.iter().for_each(|path| output::written(path));
    Ok(Answer::Yes)
}

/// Figures of a plan of several jobs.
#[derive(Serialize)]
struct Report {
    fits: bool,
    planner: String,
    device: String,
    #[serde(flatten)]
    figures: Figures,
    budget_bytes: Bytes,
    jobs: Vec<JobReport>,
    #[serde(flatten)]
    overlap: Option<OverlapReport>,
    /// Sum of the jobs' unplanned peaks.
    #[serde(skip)]
    unplanned_peak: Bytes,
}

/// One of the jobs, as if it ran alone.
#[derive(Serialize)]
struct JobReport {
    name: String,
    #[serde(flatten)]
    figures: Figures,
    #[serde(flatten)]
    events: Events,
    #[serde(flatten)]
    beside: Option<BesideReport>,
}

/// A job's times beside the others, where bytes may be shared.
#[derive(Serialize)]
struct BesideReport {
    /// How long it holds the window in an iteration alone.
    window_held_ns: Nanos,
    beside_ns: Nanos,
    /// Its time beside the others if each job has a sub-arena; `None` where these don't fit.
    beside_apart_ns: Option<Nanos>,
}

/// The window that jobs hold in turn.
#[derive(Serialize)]
struct OverlapReport {
    window_bytes: Bytes,
    window_offset_bytes: Bytes,
    fits_apart: bool,
}

impl Report {
    fn of(
        together: &Together,
        overlapped: Option<&Overlapped>,
        graphs: &[Graph],
        unplanned_peak: Bytes,
    ) -> Self {
        let plan = &together.plan;
        let beside = |index: usize| {
            overlapped.map(|o| BesideReport {
                window_held_ns: o.held[index],
                beside_ns: o.beside[index],
                beside_apart_ns: o.apart.as_ref().map(|apart| apart[index]),
            })
        };
        let job = |(index, (part, graph)): (usize, (&Arc<Planned>, &Graph))| JobReport {
            name: graph.name.clone(),
            figures: part.plan.figures,
            events: Events::of(&part.plan.jobs[0]),
            beside: beside(index),
        };
        Self {
            fits: true,
            planner: plan.planner.clone(),
            device: plan.device.name.clone(),
            figures: plan.figures,
            budget_bytes: plan.budget,
            jobs: together.parts.iter().zip(graphs).enumerate().map(job).collect(),
            overlap: overlapped.map(|o| OverlapReport {
                window_bytes: plan.window().map_or(Bytes::ZERO, |w| w.bytes),
                window_offset_bytes: plan.window().map_or(Bytes::ZERO, |w| w.offset),
                fits_apart: o.apart.is_some(),
            }),
            unplanned_peak,
        }
    }

    /// The jobs' times, as one list.
    fn times(&self, of: impl Fn(&BesideReport) -> Option<Nanos>) -> String {
        let beside = self.jobs.iter().filter_map(|job| job.beside.as_ref());
        beside.filter_map(of).map(|t| t.to_string()).collect::<Vec<_>>().join(", ")
    }

    /// The effect of sharing bytes, as text.
    fn shared(&self, overlap: &OverlapReport) -> String {
        let beside = self.times(|b| Some(b.beside_ns));
        if overlap.window_bytes == Bytes::ZERO {
            return format!(
                "no bytes are shared, because that would be no quicker; beside each other the \
                 iterations take {beside}"
            );
        }
        let apart = match overlap.fits_apart {
            true => format!("with a sub-arena for each {}", self.times(|b| b.beside_apart_ns)),
            false => "with a sub-arena for each they don't fit".to_owned(),
        };
        format!(
            "window {} ({} bytes) at offset {}, held in turn: in an iteration alone for {}\n\
             beside each other the iterations take {beside}; {apart}",
            overlap.window_bytes,
            overlap.window_bytes.0,
            overlap.window_offset_bytes.0,
            self.times(|b| Some(b.window_held_ns)),
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::headed(
            "<job|unplanned peak|sub-arena|alone, unplanned|alone, planned|swap-outs|swap-ins|\
             recomputes",
        );
        for (index, job) in self.jobs.iter().enumerate() {
            table.row([
                format!("{index} {}", job.name),
                job.figures.unplanned_peak_bytes.to_string(),
                job.figures.arena_bytes.to_string(),
                job.figures.unplanned_iteration_ns.to_string(),
                job.figures.iteration_ns.to_string(),
                job.events.swap_outs.to_string(),
                job.events.swap_ins.to_string(),
                job.events.recomputes.to_string(),
            ]);
        }
        writeln!(
            f,
            "{table}\narena {} ({} bytes) of a budget of {} ({} bytes); the unplanned peaks add up \
             to {}; pinned {}",
            self.figures.arena_bytes,
            self.figures.arena_bytes.0,
            self.budget_bytes,
            self.budget_bytes.0,
            self.unplanned_peak,
            self.figures.pinned_bytes,
        )?;
        match &self.overlap {
            Some(overlap) => writeln!(f, "{}", self.shared(overlap)),
            None => Ok(()),
        }
    }
}
