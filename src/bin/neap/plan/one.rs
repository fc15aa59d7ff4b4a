//! `neap plan` of one job.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use neap::contract::{Chosen, Figures, Source};
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::plan::arrange::{self, Arranged};
use neap::plan::bound::Bounds;
use neap::plan::robust::{self, Robust};
use neap::plan::{PlanError, Planned, Request};
use neap::report::table::{Side, Table};
use neap::sim::accounting::paper;
use neap::sim::allocator::Config;
use neap::sim::reserved::{self, Framework};
use neap::units::{Bytes, Nanos, OpId};
use serde::Serialize;

use super::{Events, Flags, does_not_fit, graph_path, prove_and_write};
use crate::accounting::{Accounting, PaperReport};
use crate::output::{self, Answer, note};
use crate::progress;
use crate::settings::allocator::{BesideReport, ReservedReport};
use crate::settings::{self, Budget, JobArg, Site, values};

pub fn main(flags: &Flags, job: &JobArg, as_json: bool) -> anyhow::Result<Answer> {
    let mut graph = settings::graph(&job.path)?;
    let Site { device, latencies, libraries, sha256 } = flags.device.resolve(&mut graph)?;
    let liveness = Liveness::new(&graph);
    let budget = flags
        .budget
        .unwrap_or(Budget::Bytes(device.available()))
        .resolve(liveness.peak, &device)?;
    let (method, mut recorded_options) = flags.switches.resolve(&flags.planner)?;
    let method = job.limited(method)?;
    recorded_options.extend(job.record(None));
    let framework = flags.allocator.resolve(&device)?;
    recorded_options.extend(flags.allocator.record());
    if let Some(share) = flags.noise {
        recorded_options.insert("noise".to_owned(), values::percent(share));
    }
    let most = device.available().min(Bytes(liveness.peak.0.saturating_mul(2)));
    let request = Request {
        file: (graph_path(flags, &job.path)?, sha256),
        method,
        recorded_options,
        ..Request::new(&graph, &device, &latencies, budget.unwrap_or(most))
    };
    let started = Instant::now();
    let framework = framework.as_ref();
    let working = progress::working(&format!("planning {}", job.path.display()));
    let made = match budget {
        Some(_) => arrange::make_for(&request, framework),
        None => arrange::minimum_for(&request, framework),
    };
    let made = match flags.noise {
        None => made.map(|arranged| (arranged, None)),
        Some(share) => made.and_then(|arranged| noisy(&request, arranged, share, framework)),
    };
    working.finish_and_clear();
    let (Arranged { mut planned, graph: arranged }, noise) = match made {
        Ok(made) => made,
        Err(error) => {
            let of = format!("{}: ", job.path.display());
            return does_not_fit(error, &of, liveness.peak, as_json);
        }
    };
    let took = started.elapsed();
    let graphs = [arranged.unwrap_or(graph)];
    planned.plan.jobs[0].libraries = of_arranged(libraries, &graphs[0]);
    prove_and_write(flags, &planned.plan, &graphs)?;
    note(&format!("planned in {took:.1?}"));
    let (early, of_early) = arrange::early_job(graphs[0].framework(), &latencies);
    let bounds = Bounds::any_order(&early, &of_early, &device.link);
    let mut report = Report::new(&planned, &liveness, &bounds);
    report.noise = noise;
    let default = Framework::on(&device, Config::default());
    let pytorch = &framework.unwrap_or(&default).clone().for_plan(&planned.plan)?;
    let requests = reserved::planned(&graphs[0], &planned.program, &planned.run, pytorch);
    report.pytorch = BesideReport::new(&requests.settle(pytorch), &requests, pytorch);
    if flags.accounting == Accounting::Paper {
        let papers = paper(&graphs[0], &liveness, &planned.program, &device.link)?;
        let unplanned = planned.plan.figures.unplanned_iteration_ns;
        report.paper = Some(PaperReport::new(&papers, unplanned));
    }
    output::report(&report, as_json)?;
    flags.output.iter().for_each(|path| output::written(path));
    Ok(Answer::Yes)
}

/// Plans the chosen order again, for the 95th percentile.
fn noisy(
    request: &Request<'_>,
    arranged: Arranged,
    share: u64,
    framework: Option<&Framework>,
) -> Result<(Arranged, Option<NoiseReport>), PlanError> {
    let job = &arranged.planned.plan.jobs[0];
    let asked = Request {
        graph: arranged.graph.as_ref().unwrap_or(request.graph),
        latencies: &job.latencies,
        whole: job.whole.clone(),
        budget: arranged.planned.plan.budget,
        ..request.clone()
    };
    let (planned, noise) = apart(robust::make_for(&asked, share, framework)?);
    Ok((Arranged { planned, graph: arranged.graph }, noise))
}

/// Algorithms by operator of the arranged graph.
fn of_arranged(libraries: BTreeMap<OpId, Chosen>, graph: &Graph) -> BTreeMap<OpId, Chosen> {
    let Some(origin) = &graph.origin else { return libraries };
    let operators = (0..).map(OpId).zip(&origin.operators);
    operators.filter_map(|(id, (of, _))| Some((id, libraries.get(of)?.clone()))).collect()
}

fn apart(robust: Robust) -> (Planned, Option<NoiseReport>) {
    let noise = NoiseReport {
        runs: robust::RUNS,
        seed: robust::SEED,
        p95_ns: robust.p95,
        p95_without_ns: robust.before,
    };
    (robust.planned, Some(noise))
}

/// Iteration times under noise.
#[derive(Serialize)]
struct NoiseReport {
    runs: u64,
    seed: u64,
    p95_ns: Nanos,
    /// The 95th percentile of a plan that was made without noise.
    p95_without_ns: Option<Nanos>,
}

/// How many operators' latencies come from each source.
#[derive(Serialize)]
struct LatencySources {
    graph: usize,
    measured: usize,
    predicted: usize,
    roofline: usize,
}

/// Figures of a plan of one job.
#[derive(Serialize)]
struct Report {
    fits: bool,
    planner: String,
    device: String,
    #[serde(flatten)]
    figures: Figures,
    budget_bytes: Bytes,
    floor_bytes: Bytes,
    no_free_bytes: Bytes,
    /// The lower bound of the peak of plans that are as fast as the unplanned iteration.
    bound_bytes: Bytes,
    /// The lower bound of the iteration's time within the budget.
    bound_ns: Nanos,
    #[serde(flatten)]
    events: Events,
    swap_in_stall_ns: Nanos,
    swap_out_stall_ns: Nanos,
    tail_stall_ns: Nanos,
    latency_sources: LatencySources,
    /// What PyTorch's allocator, with its default settings, would reserve for it.
    pytorch: BesideReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    paper: Option<PaperReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    noise: Option<NoiseReport>,
    #[serde(flatten)]
    reserved: Option<ReservedReport>,
}

impl Report {
    fn new(planned: &Planned, liveness: &Liveness, bounds: &Bounds<'_>) -> Self {
        let (plan, stalls) = (&planned.plan, &planned.run.stalls);
        let job = &plan.jobs[0];
        let sources = |s: Source| job.latencies.iter().filter(|l| l.source == s).count();
        Self {
            fits: true,
            planner: plan.planner.clone(),
            device: plan.device.name.clone(),
            figures: plan.figures,
            budget_bytes: plan.budget,
            floor_bytes: bounds.floor(),
            no_free_bytes: liveness.no_free,
            bound_bytes: bounds.peak(Nanos::ZERO),
            bound_ns: bounds
                .iteration_for(plan.budget, plan.figures.iteration_ns)
                .unwrap_or_default(),
            events: Events::new(job),
            swap_in_stall_ns: stalls.swap_in,
            swap_out_stall_ns: stalls.swap_out,
            tail_stall_ns: stalls.tail,
            latency_sources: LatencySources {
                graph: sources(Source::Graph),
                measured: sources(Source::Measured),
                predicted: sources(Source::Predicted),
                roofline: sources(Source::Roofline),
            },
            pytorch: BesideReport::default(),
            paper: None,
            noise: None,
            reserved: planned.reserved.as_ref().map(ReservedReport::new),
        }
    }

    fn table(&self) -> Table {
        let heads = [
            ("", Side::Left),
            ("unplanned", Side::Right),
            ("planned", Side::Right),
            ("exact", Side::Right),
        ];
        let mut table = Table::new(&heads);
        let f = &self.figures;
        let bytes = |name: &str, bytes: Bytes| {
            [name.to_owned(), String::new(), bytes.to_string(), bytes.0.to_string()]
        };
        let [name, _, peak, exact] = bytes("peak", f.peak_bytes);
        table.row([name, f.unplanned_peak_bytes.to_string(), peak, exact]);
        table.row(bytes("arena", f.arena_bytes));
        table.row(bytes("budget", self.budget_bytes));
        table.row(bytes("floor", self.floor_bytes));
        table.row(bytes("pinned", f.pinned_bytes));
        let time = |name: &str, unplanned: String, time: Nanos| {
            [name.to_owned(), unplanned, time.to_string(), time.0.to_string()]
        };
        table.row(time("iteration", f.unplanned_iteration_ns.to_string(), f.iteration_ns));
        table.row(bytes("bound, without added time", self.bound_bytes));
        table.row(time("bound, at this budget", String::new(), self.bound_ns));
        table
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sources = &self.latency_sources;
        writeln!(
            f,
            "{}\n{}; waiting {} for swap-ins, {} for swap-outs, {} at the end",
            self.table(),
            self.events,
            self.swap_in_stall_ns,
            self.swap_out_stall_ns,
            self.tail_stall_ns
        )?;
        writeln!(
            f,
            "latencies: {} measured, {} predicted, {} from the graph, {} by roofline on {}",
            sources.measured, sources.predicted, sources.graph, sources.roofline, self.device
        )?;
        if let Some(paper) = &self.paper {
            write!(f, "{paper}")?;
        }
        if let Some(noise) = &self.noise {
            let beside = noise
                .p95_without_ns
                .map_or_else(String::new, |b| format!(", {b} if planned without regard to noise"));
            writeln!(f, "under noise: p95 {} of {} runs{beside}", noise.p95_ns, noise.runs)?;
        }
        match &self.reserved {
            Some(reserved) => write!(f, "{reserved}")?,
            None => write!(f, "{}", self.pytorch)?,
        }
        if let Some(first) = self.pytorch.first_block_bytes {
            writeln!(
                f,
                "for that the script first requests one block, and frees it: torch.empty({}, \
                 dtype=torch.uint8, device=\"cuda\")",
                first.0
            )?;
        }
        Ok(())
    }
}
