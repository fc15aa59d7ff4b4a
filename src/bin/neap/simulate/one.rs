//! `neap simulate` of one job, with or without a plan.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, bail};
use neap::contract::{Latency, Plan};
use neap::device::Profile;
use neap::device::library::Chosen;
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::report::table::{Side, Table};
use neap::sim::accounting::{Extra, paper};
use neap::sim::allocator::Config;
use neap::sim::engine::{self, Durations, Run};
use neap::sim::noise::{Noise, percentile};
use neap::sim::passive::{self, Passive};
use neap::sim::program::Program;
use neap::sim::reserved::{self, Framework};
use neap::units::{Bytes, Nanos, OpId};
use serde::Serialize;

use super::{Flags, files};
use crate::accounting::{Accounting, ExtraReport, PaperReport, Shares, ratio};
use crate::output::{Answer, Ending, note};
use crate::settings::allocator::{BesideReport, ReservedReport};
use crate::settings::{self, Budget, Site};
use crate::timeline;

/// The job to simulate, with everything that the reports need.
pub struct Case {
    pub graph: Graph,
    pub device: Profile,
    pub latencies: Vec<Latency>,
    pub libraries: BTreeMap<OpId, Chosen>,
    pub plan: Option<Plan>,
    pub liveness: Liveness,
}

/// Simulates a graph without a plan.
pub fn graph(flags: &Flags, mut graph: Graph, as_json: bool) -> anyhow::Result<Answer> {
    let Site { device, latencies, libraries, .. } = flags.device.resolve(&mut graph)?;
    if flags.real.is_some() {
        bail!(
            "--real: {} is a graph; give its latencies with --latencies",
            flags.subject().display()
        );
    }
    let liveness = Liveness::new(&graph);
    simulate(flags, &Case { graph, device, latencies, libraries, plan: None, liveness }, as_json)
}

/// Simulates a checked plan of one job.
pub fn plan(
    flags: &Flags,
    mut plan: Plan,
    mut graphs: Vec<Graph>,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let graph = graphs.remove(0);
    if flags.real.is_some() {
        // The plan's proof holds for any latencies.
        plan.jobs[0].latencies = settings::latencies(&graph, &plan.device, flags.real.as_deref())?;
    }
    let case = Case {
        liveness: Liveness::new(graph.framework()),
        graph,
        device: plan.device.clone(),
        latencies: plan.jobs[0].latencies.clone(),
        libraries: plan.jobs[0].libraries.clone(),
        plan: Some(plan),
    };
    simulate(flags, &case, as_json)
}

fn simulate(flags: &Flags, case: &Case, as_json: bool) -> anyhow::Result<Answer> {
    let framework = flags.allocator.resolve(&case.device)?;
    let program = match &case.plan {
        Some(plan) => Program::placed(&case.graph, &plan.jobs[0])?,
        None => Program::new(&case.graph, &case.latencies, &[])?,
    };
    let link = &case.device.link;
    let nominal = Durations::nominal(&program, link);
    let run = engine::run(&program, link, &nominal)?;
    let mut curve = engine::memory(&program, &run);
    // Residencies that end with the iteration continue in the next one.
    curve.retain(|point| point.0 < run.iteration);
    let mut report = Report::new(case, &run, &curve);
    report.extra = ExtraReport::new(&Extra::new(&program, link, run.iteration)?);
    if let Some(share) = flags.noise {
        let noise = Noise { share, seed: flags.seed };
        report.noise = Some(noisy(&program, case, &nominal, noise, flags.runs)?);
    }
    let counted = framework.is_some();
    let mut framework = framework.unwrap_or_else(|| Framework::on(&case.device, Config::default()));
    if let Some(plan) = &case.plan {
        let of = flags.subject();
        framework = framework
            .for_plan(plan)
            .with_context(|| format!("{}: options.{}", of.display(), reserved::FIRST_BLOCK))?;
    }
    let requests = match &case.plan {
        Some(_) => reserved::planned(&case.graph, &program, &run, &framework),
        None => reserved::unplanned(&case.graph, &run, &framework),
    };
    let beside = requests.settle(&framework);
    report.pytorch = BesideReport::new(&beside, &requests, &framework);
    let reserved = counted.then_some(&beside);
    report.reserved = reserved.map(ReservedReport::new);
    if flags.accounting == Accounting::Paper {
        let papers = paper(&case.graph, &case.liveness, &program, link)?;
        report.paper = Some(PaperReport::new(&papers, report.unplanned_iteration_ns));
    }
    if let Some(budget) = flags.passive {
        let Some(passive) = on_demand(case, budget, report.unplanned_iteration_ns)? else {
            return Ok(Answer::No);
        };
        report.passive = Some(passive);
    }
    let mut ending = Ending::reporting(&report, as_json);
    if let Some(path) = &flags.plot {
        let of = flags.subject();
        ending.then(|| files::plot(path, of, case, &run, &curve, reserved));
    }
    ending.file(flags.html.as_deref(), |path| {
        files::page(path, case, (&program, &run), &curve, serde_json::to_value(&report)?)
    });
    if let Some(path) = &flags.latencies_out {
        ending.then(|| files::latencies(path, case));
    }
    if let Some(path) = &flags.snapshot {
        let conf = flags.allocator.alloc_conf();
        ending.then(|| files::snapshot(path, case, &requests, &framework, conf, beside.iterations));
    }
    if let Some(path) = &flags.timeline {
        let budget = case.plan.as_ref().map(|plan| plan.budget);
        ending.then(|| timeline::write(path, &case.graph, &program, &run, &curve, budget));
    }
    ending.with(Answer::yes_if(reserved.is_none_or(|r| r.stats.ooms == 0)))
}

fn noisy(
    program: &Program,
    case: &Case,
    nominal: &Durations,
    noise: Noise,
    runs: u32,
) -> anyhow::Result<NoiseReport> {
    let link = &case.device.link;
    let (mut times, mut peak, mut late) = (Vec::with_capacity(runs as usize), Bytes::ZERO, 0);
    for index in 0..runs {
        let run = engine::run(program, link, &noise.apply(nominal, u64::from(index)))?;
        peak = peak.max(engine::peak(&engine::memory(program, &run)));
        late += u64::from(run.late_copies);
        times.push(run.iteration);
    }
    times.sort_unstable();
    if let Some(plan) = case.plan.as_ref().filter(|plan| peak > plan.budget) {
        bail!(
            "a noisy run reached {peak} of a budget of {}; this is a defect of neap, please report \
             it",
            plan.budget
        );
    }
    Ok(NoiseReport {
        runs: times.len(),
        p50_ns: percentile(&times, 50),
        p95_ns: percentile(&times, 95),
        p99_ns: percentile(&times, 99),
        peak_bytes: peak,
        late_copies: late,
    })
}

/// One iteration in passive mode. `None` if one operator alone exceeds the budget, which is then
/// printed.
fn on_demand(
    case: &Case,
    budget: Budget,
    unplanned: Nanos,
) -> anyhow::Result<Option<PassiveReport>> {
    let budget = budget.resolve(case.liveness.peak, &case.device)?.unwrap_or(case.liveness.floor);
    match passive::run(&case.graph, &case.latencies, &case.device.link, budget) {
        Ok(passive) => Ok(Some(PassiveReport::new(budget, &passive, unplanned))),
        Err(small) => {
            let name = &case.graph.operator(small.operator).name;
            note(&format!(
                "--passive: {budget} is too small: `{name}` needs {} ({} bytes) at once",
                small.needed, small.needed.0
            ));
            Ok(None)
        }
    }
}

/// Iteration times and the largest peak of the noisy runs.
#[derive(Serialize)]
struct NoiseReport {
    runs: usize,
    p50_ns: Nanos,
    p95_ns: Nanos,
    p99_ns: Nanos,
    peak_bytes: Bytes,
    late_copies: u64,
}

/// An iteration in passive mode.
#[derive(Serialize)]
struct PassiveReport {
    budget_bytes: Bytes,
    peak_bytes: Bytes,
    iteration_ns: Nanos,
    eor: f64,
    swap_out_stall_ns: Nanos,
    swap_in_stall_ns: Nanos,
    evictions: u64,
    evicted_bytes: Bytes,
    fetched_bytes: Bytes,
}

impl PassiveReport {
    fn new(budget: Bytes, passive: &Passive, unplanned: Nanos) -> Self {
        Self {
            budget_bytes: budget,
            peak_bytes: passive.peak,
            iteration_ns: passive.iteration,
            eor: ratio(passive.iteration.0, unplanned.0),
            swap_out_stall_ns: passive.out,
            swap_in_stall_ns: passive.back,
            evictions: passive.evictions,
            evicted_bytes: passive.evicted,
            fetched_bytes: passive.fetched,
        }
    }
}

/// The figures of a plan.
#[derive(Serialize)]
struct PlanReport {
    budget_bytes: Bytes,
    arena_bytes: Bytes,
    pinned_bytes: Bytes,
    first_iteration_ns: Nanos,
}

/// Figures of a simulation of one job.
#[derive(Serialize)]
struct Report {
    peak_bytes: Bytes,
    iteration_ns: Nanos,
    unplanned_peak_bytes: Bytes,
    unplanned_iteration_ns: Nanos,
    no_free_bytes: Bytes,
    floor_bytes: Bytes,
    late_copies: u32,
    swap_in_stall_ns: Nanos,
    swap_out_stall_ns: Nanos,
    tail_stall_ns: Nanos,
    #[serde(flatten)]
    shares: Shares,
    extra: ExtraReport,
    /// The bytes that PyTorch's allocator would reserve for it.
    pytorch: BesideReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    paper: Option<PaperReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    passive: Option<PassiveReport>,
    #[serde(flatten)]
    plan: Option<PlanReport>,
    #[serde(flatten)]
    reserved: Option<ReservedReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    noise: Option<NoiseReport>,
}

impl Report {
    fn new(case: &Case, run: &Run, curve: &[(Nanos, Bytes)]) -> Self {
        let liveness = &case.liveness;
        let peak = if case.plan.is_some() { engine::peak(curve) } else { liveness.peak };
        let unplanned: Nanos = match &case.plan {
            Some(plan) => plan.jobs[0].framework_latencies(&case.graph),
            None => case.latencies.clone(),
        }
        .iter()
        .map(|l| l.time)
        .sum();
        Self {
            peak_bytes: peak,
            iteration_ns: run.iteration,
            unplanned_peak_bytes: liveness.peak,
            unplanned_iteration_ns: unplanned,
            no_free_bytes: liveness.no_free,
            floor_bytes: liveness.floor,
            late_copies: run.late_copies,
            swap_in_stall_ns: run.stalls.swap_in,
            swap_out_stall_ns: run.stalls.swap_out,
            tail_stall_ns: run.stalls.tail,
            shares: Shares::new(
                (peak, run.iteration),
                (liveness.peak, liveness.no_free),
                unplanned,
            ),
            extra: ExtraReport::default(),
            pytorch: BesideReport::default(),
            paper: None,
            passive: None,
            plan: case.plan.as_ref().map(|plan| PlanReport {
                budget_bytes: plan.budget,
                arena_bytes: plan.figures.arena_bytes,
                pinned_bytes: plan.figures.pinned_bytes,
                first_iteration_ns: plan.figures.first_iteration_ns,
            }),
            reserved: None,
            noise: None,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = [("", Side::Left), ("without a plan", Side::Right), ("with", Side::Right)];
        let mut table = Table::new(&heads);
        let row = |name: &str, without: &dyn fmt::Display, with: &dyn fmt::Display| {
            [name.to_owned(), without.to_string(), with.to_string()]
        };
        table.row(row("peak", &self.unplanned_peak_bytes, &self.peak_bytes));
        table.row(row("iteration", &self.unplanned_iteration_ns, &self.iteration_ns));
        let Shares { msr, msr_no_free, eor, cbr, cbr_no_free } = self.shares;
        writeln!(
            f,
            "{table}\nmemory saving MSR {msr:.4} against liveness, {msr_no_free:.4} against \
             freeing nothing; time ratio EOR {eor:.4}; CBR {cbr:.4} and {cbr_no_free:.4}"
        )?;
        if let Some(paper) = &self.paper {
            write!(f, "{paper}")?;
        }
        writeln!(
            f,
            "waiting: {} for swap-ins, {} for swap-outs, {} at the end; {} late copies",
            self.swap_in_stall_ns, self.swap_out_stall_ns, self.tail_stall_ns, self.late_copies
        )?;
        write!(f, "{}", self.extra)?;
        if let Some(p) = &self.passive {
            writeln!(
                f,
                "passive within {}: {}, of that {} for {} evictions ({} copied) and {} for fetches \
                 ({})",
                p.budget_bytes,
                p.iteration_ns,
                p.swap_out_stall_ns,
                p.evictions,
                p.evicted_bytes,
                p.swap_in_stall_ns,
                p.fetched_bytes
            )?;
        }
        match &self.reserved {
            Some(reserved) => write!(f, "{reserved}")?,
            None => write!(f, "{}", self.pytorch)?,
        }
        if let Some(n) = &self.noise {
            writeln!(
                f,
                "{} noisy runs: p50 {}, p95 {}, p99 {}; largest peak {}; {} late copies",
                n.runs, n.p50_ns, n.p95_ns, n.p99_ns, n.peak_bytes, n.late_copies
            )?;
        }
        Ok(())
    }
}
