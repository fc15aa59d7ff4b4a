//! `neap compare` of several jobs: each planner plans all of them together, and the jobs run side
//! by side.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use anyhow::bail;
use neap::contract::Plan;
use neap::device::Profile;
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::plan::together::{self, Jobs, Memo, Together, ways};
use neap::plan::{Method, PlanError, Planned};
use neap::report::frontier::Panel;
use neap::report::table::Table;
use neap::sim::beside::busy;
use neap::sim::engine;
use neap::sim::program::Program;
use neap::sim::rounds;
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use super::{Case, Flags, Row, compare, curve, recomputed, shares, write};
use crate::accounting::{Accounting, Shares, ratio};
use crate::output::{Answer, Ending};
use crate::settings::{self, JobArg, Site};

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    if flags.accounting != Accounting::Physical {
        bail!("--accounting paper: is for one job; leave it out or compare each job by itself");
    }
    let methods = flags.methods()?;
    let mut graphs = settings::graphs(&flags.graphs)?;
    let mut resolved = Vec::new();
    for device in flags.devices() {
        resolved.push(device.resolve_all(&mut graphs)?);
    }
    let scenes = resolved.iter().map(|sites| Scene::new(flags, &graphs, sites));
    let scenes = scenes.collect::<anyhow::Result<Vec<_>>>()?;
    let compared = compare(flags, &scenes, &methods)?;
    let graphs = graphs.iter().map(|g| g.name.clone()).collect();
    let report = Report { graphs, rows: compared.rows };
    let mut ending = Ending::reporting(&report, as_json);
    write(flags, CSV, &report.rows, &compared.panels, &mut ending);
    ending.with(Answer::yes_if(compared.all_met))
}

/// All jobs on a device, and figures that hold for all of their plans.
struct Scene<'a> {
    graphs: &'a [Graph],
    /// The jobs, whose planners and budget differ from row to row.
    jobs: Jobs<'a>,
    peak: Bytes,
    no_free: Bytes,
    unplanned: Nanos,
}

#[derive(Serialize)]
struct Base {
    unplanned_round_ns: Nanos,
}

/// Figures of a plan.
#[derive(Serialize)]
struct Figures {
    /// Sum of the jobs' own peaks. No alignment of their iterations has a higher peak.
    peak_bytes: Bytes,
    /// The largest sum of resident bytes in the simulation.
    seen_peak_bytes: Bytes,
    arena_bytes: Bytes,
    round_ns: Nanos,
    /// Sum of the iterations' times alone.
    in_turn_ns: Nanos,
    #[serde(flatten)]
    shares: Shares,
    moved_bytes: Bytes,
    recomputed_bytes: Bytes,
    late_copies: u64,
    h2d_busy: f64,
    d2h_busy: f64,
    overlapping_copies: usize,
    /// The way in which the planner planned, where it has several.
    way: String,
}

impl<'a> Scene<'a> {
    fn new(flags: &Flags, graphs: &'a [Graph], sites: &'a [Site]) -> anyhow::Result<Self> {
        let job = |((arg, graph), site): ((&JobArg, &'a Graph), &'a Site)| {
            arg.job(graph, site, "job.graph.json".to_owned(), Method::default())
        };
        let jobs = flags.graphs.iter().zip(graphs).zip(sites).map(job).collect();
        let (device, recorded_options) = (&sites[0].device, BTreeMap::new());
        let jobs = Jobs { jobs, device, budget: Bytes::ZERO, recorded_options };
        let bare = jobs.jobs.iter().map(|job| Program::new(job.graph, job.latencies, &[]));
        let bare = bare.collect::<Result<Vec<_>, _>>()?;
        let unplanned = ways::round(&jobs, &bare.iter().collect::<Vec<_>>())?.time;
        let lives: Vec<Liveness> = graphs.iter().map(Liveness::new).collect();
        let peak = lives.iter().map(|l| l.peak).sum();
        let no_free = lives.iter().map(|l| l.no_free).sum();
        Ok(Self { graphs, jobs, peak, no_free, unplanned })
    }
}

impl Case for Scene<'_> {
    type Base = Base;
    type Figures = Figures;
    type Made = Together;

    fn device(&self) -> &Profile {
        self.jobs.device
    }

    fn peak(&self) -> Bytes {
        self.peak
    }

    fn make(
        &self,
        methods: &[Method],
        budget: Option<Bytes>,
        memo: &Memo,
    ) -> Result<Together, PlanError> {
        let mut jobs = self.jobs.clone();
        jobs.budget = budget.unwrap_or_else(|| self.device().available());
        jobs.jobs.iter_mut().zip(methods).for_each(|(job, method)| job.method = method.clone());
        match budget {
            Some(_) => together::make(&jobs, memo),
            None => together::minimum(&jobs, memo),
        }
    }

    fn plan<'m>(&'m self, made: &'m Together) -> (&'m Plan, &'m [Graph]) {
        (&made.plan, self.graphs)
    }

    fn base(&self, _: Bytes) -> Base {
        Base { unplanned_round_ns: self.unplanned }
    }

    fn figures(&self, together: &Together) -> anyhow::Result<Figures> {
        let of = &together.plan.figures;
        let programs: Vec<&Program> = together.parts.iter().map(|part| &part.program).collect();
        // It does not depend on the planners.
        let round = ways::round(&self.jobs, &programs)?;
        let again = |(part, graph): (&Arc<Planned>, _)| recomputed(&part.plan.jobs[0], graph);
        let resident =
            |course: &rounds::Course| engine::peak(&rounds::memory(&programs, &course.runs));
        let ends: Nanos = round.courses.iter().map(|c| c.end).sum();
        let [h2d_busy, d2h_busy] = [0, 1].map(|way| {
            let busy: Nanos = round.courses.iter().map(|c| busy(&c.carried)[way]).sum();
            ratio(busy.0, ends.0)
        });
        let runs = round.courses.iter().flat_map(|c| c.runs.iter().flatten());
        let (planned, baselines) = ((of.peak_bytes, round.time), (self.peak, self.no_free));
        let shares = Shares::new(planned, baselines, self.unplanned);
        Ok(Figures {
            peak_bytes: of.peak_bytes,
            seen_peak_bytes: round.courses.iter().map(resident).max().unwrap_or_default(),
            arena_bytes: of.arena_bytes,
            round_ns: round.time,
            in_turn_ns: of.iteration_ns,
            shares,
            moved_bytes: programs.iter().flat_map(|p| &p.copies).map(|c| c.bytes).sum(),
            recomputed_bytes: together.parts.iter().zip(self.graphs).map(again).sum(),
            late_copies: runs.map(|(_, run)| u64::from(run.late_copies)).sum(),
            h2d_busy,
            d2h_busy,
            overlapping_copies: round.courses.iter().map(|c| rounds::overlaps(&c.carried)).sum(),
            way: together.plan.options.get("way").cloned().unwrap_or_default(),
        })
    }

    fn panel(&self, rows: &[Row<Base, Figures>], methods: &[Vec<Method>]) -> Panel {
        let curve = |of: &Vec<Method>| curve(rows, &of[0], |f| (f.peak_bytes, f.round_ns));
        Panel {
            title: format!("{} jobs on {}", self.graphs.len(), self.device().name),
            unplanned: (self.peak, self.unplanned),
            curves: methods.iter().map(curve).collect(),
            bound: Vec::new(),
        }
    }
}

/// The comparison of planners on several jobs.
#[derive(Serialize)]
struct Report {
    graphs: Vec<String>,
    rows: Vec<Row<Base, Figures>>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timing = self.rows.iter().any(|r| r.planning_s.is_some());
        let planning = if timing { "|planning" } else { "" };
        let mut table = Table::headed(&format!("<device|budget|<planner|{FIGURES}{planning}"));
        for row in &self.rows {
            let cells = row.figures.as_ref().map(|of| {
                let mut cells = vec![of.peak_bytes.to_string(), of.seen_peak_bytes.to_string()];
                cells.push(of.round_ns.to_string());
                cells.extend_from_slice(&shares(&of.shares)[..4]);
                cells.extend([of.moved_bytes, of.recomputed_bytes].map(|b| b.to_string()));
                cells.extend([of.h2d_busy, of.d2h_busy].map(|b| format!("{:.1} %", b * 100.0)));
                cells.push(of.way.clone());
                cells
            });
            table.row(row.cells(cells, FIGURES.split('|').count()));
        }
        write!(f, "{table}")
    }
}

/// The table's columns with the figures of a plan.
const FIGURES: &str =
    "peak|seen|round|MSR|MSR no-free|EOR|CBR|moved|recomputed|link up|link down|<way";

/// The columns of `--csv`.
const CSV: &str = "\
    device,planner,budget,budget_bytes,fits,unplanned_peak_bytes,unplanned_round_ns,peak_bytes,\
    seen_peak_bytes,arena_bytes,round_ns,in_turn_ns,msr,msr_no_free,eor,cbr,cbr_no_free,\
    moved_bytes,recomputed_bytes,late_copies,h2d_busy,d2h_busy,overlapping_copies,way,\
    lowest_bytes";
