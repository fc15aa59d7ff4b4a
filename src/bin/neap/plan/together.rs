//! `neap plan` of several jobs: one plan for all that share a device.

use std::time::Instant;

use anyhow::bail;
use neap::job::Graph;
use neap::plan::Share;
use neap::plan::overlap::{self, Overlapped};
use neap::plan::together::{self, Jobs, Memo, Together};
use neap::report::table::Table;
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use super::{Events, Flags, does_not_fit, graph_path, prove_and_write};
use crate::accounting::Accounting;
use crate::output::{self, Answer, Ending, note};
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
        let path = graph_path(flags, &arg.path)?;
        jobs.push(arg.job(graph, site, path, arg.limited(method.clone())?));
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
    let shared = |made: Overlapped| (made.together.clone(), Some(made));
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
    let printed = report(&together, overlapped.as_ref(), &graphs, peak);
    let answer = Ending::printing(&printed, as_json).with(Answer::Yes)?;
    flags.output.iter().for_each(|path| output::written(path));
    Ok(answer)
}

/// What is printed: figures of a plan of several jobs, and text. `peak` is the sum of the jobs'
/// unplanned peaks.
fn report(
    together: &Together,
    overlapped: Option<&Overlapped>,
    graphs: &[Graph],
    peak: Bytes,
) -> (Value, String) {
    let (plan, f) = (&together.plan, &together.plan.figures);
    let mut table = Table::headed(
        "<job|unplanned peak|sub-arena|alone, unplanned|alone, planned|swap-outs|swap-ins|\
         recomputes",
    );
    let mut jobs = Vec::with_capacity(graphs.len());
    for (index, (part, graph)) in together.parts.iter().zip(graphs).enumerate() {
        let (own, events) = (&part.plan.figures, Events::new(&part.plan.jobs[0]));
        table.row([
            format!("{index} {}", graph.name),
            own.unplanned_peak_bytes.to_string(),
            own.arena_bytes.to_string(),
            own.unplanned_iteration_ns.to_string(),
            own.iteration_ns.to_string(),
            events.swap_outs.to_string(),
            events.swap_ins.to_string(),
            events.recomputes.to_string(),
        ]);
        let mut job = json!(own);
        job["name"] = json!(graph.name);
        job["swap_outs"] = json!(events.swap_outs);
        job["swap_ins"] = json!(events.swap_ins);
        job["recomputes"] = json!(events.recomputes);
        if let Some(shared) = overlapped {
            job["window_held_ns"] = json!(shared.held[index]);
            job["beside_ns"] = json!(shared.beside[index]);
            job["beside_apart_ns"] = json!(shared.apart.as_ref().map(|apart| apart[index]));
        }
        jobs.push(job);
    }
    let mut text = format!(
        "{table}\narena {} ({} bytes) of a budget of {} ({} bytes); the unplanned peaks add up to \
         {peak}; pinned {}\n",
        f.arena_bytes, f.arena_bytes.0, plan.budget, plan.budget.0, f.pinned_bytes,
    );
    let mut figures = json!(f);
    figures["fits"] = json!(true);
    figures["planner"] = json!(plan.planner);
    figures["device"] = json!(plan.device.name);
    figures["budget_bytes"] = json!(plan.budget);
    figures["jobs"] = json!(jobs);
    if let Some(shared) = overlapped {
        let window = plan.window();
        figures["window_bytes"] = json!(window.map_or(Bytes::ZERO, |w| w.bytes));
        figures["window_offset_bytes"] = json!(window.map_or(Bytes::ZERO, |w| w.offset));
        figures["fits_apart"] = json!(shared.apart.is_some());
        text += &effect(shared);
    }
    (figures, text)
}

/// The effect of sharing bytes, as text.
fn effect(of: &Overlapped) -> String {
    let times = |all: &[Nanos]| all.iter().map(Nanos::to_string).collect::<Vec<_>>().join(", ");
    let beside = times(&of.beside);
    let Some(window) = of.together.plan.window() else {
        return format!(
            "no bytes are shared, because that would be no quicker; beside each other the \
             iterations take {beside}\n"
        );
    };
    let apart = match &of.apart {
        Some(apart) => format!("with a sub-arena for each {}", times(apart)),
        None => "with a sub-arena for each they don't fit".to_owned(),
    };
    format!(
        "window {} ({} bytes) at offset {}, held in turn: in an iteration alone for {}\n\
         beside each other the iterations take {beside}; {apart}\n",
        window.bytes,
        window.bytes.0,
        window.offset.0,
        times(&of.held),
    )
}
