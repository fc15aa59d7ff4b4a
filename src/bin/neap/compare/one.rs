//! `neap compare` of one job.

use std::fmt;

use neap::contract::{Latency, Plan};
use neap::device::Profile;
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::plan::arrange::{self, Arranged};
use neap::plan::bound::Bounds;
use neap::plan::together::Memo;
use neap::plan::{Method, PlanError, Request};
use neap::report::frontier::Panel;
use neap::report::table::{Side, Table};
use neap::sim::accounting::{Extra, paper};
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use super::{Case, Flags, Row, compare, curve, recomputed, shares, write};
use crate::accounting::{Accounting, ExtraReport, PaperReport, Shares, ratio};
use crate::output::{Answer, Ending};
use crate::settings::{self, JobArg};

pub fn main(flags: &Flags, job: &JobArg, as_json: bool) -> anyhow::Result<Answer> {
    let mut graph = settings::graph(&job.path)?;
    let resolved = flags
        .devices()
        .iter()
        .map(|device| device.resolve(&mut graph))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let methods = flags.methods()?;
    let liveness = Liveness::new(&graph);
    let early: Vec<_> = resolved.iter().map(|s| arrange::early_job(&graph, &s.latencies)).collect();
    let bounds: Vec<Bounds<'_>> = resolved
        .iter()
        .zip(&early)
        .map(|(s, (graph, latencies))| Bounds::any_order(graph, latencies, &s.device.link))
        .collect();
    let sites: Vec<Site<'_>> = resolved
        .iter()
        .zip(&bounds)
        .map(|(site, bounds)| Site {
            graph: &graph,
            liveness: &liveness,
            device: &site.device,
            latencies: &site.latencies,
            bounds,
            unplanned: site.latencies.iter().map(|l| l.time).sum(),
            accounting: flags.accounting,
        })
        .collect();
    let papers = if flags.accounting == Accounting::Paper { PAPER } else { "" };
    let columns = format!("{CSV}{papers}");
    let compared = compare(flags, &sites, &methods)?;
    let report = Report {
        graph: graph.name.clone(),
        floor_bytes: bounds.first().map_or(liveness.floor, Bounds::floor),
        no_free_bytes: liveness.no_free,
        rows: compared.rows,
    };
    let mut ending = Ending::reporting(&report, as_json);
    write(flags, &columns, &report.rows, &compared.panels, &mut ending);
    ending.with(Answer::yes_if(compared.all_met))
}

/// The job on a device, and figures that hold for all of its plans there.
struct Site<'a> {
    graph: &'a Graph,
    liveness: &'a Liveness,
    device: &'a Profile,
    latencies: &'a [Latency],
    bounds: &'a Bounds<'a>,
    unplanned: Nanos,
    accounting: Accounting,
}

#[derive(Serialize)]
struct Base {
    unplanned_iteration_ns: Nanos,
    /// The lower bound of the iteration's time within the budget; `None` below the floor.
    bound_ns: Option<Nanos>,
}

/// Figures of a plan.
#[derive(Serialize)]
struct Figures {
    peak_bytes: Bytes,
    arena_bytes: Bytes,
    iteration_ns: Nanos,
    #[serde(flatten)]
    shares: Shares,
    stall_ns: Nanos,
    moved_bytes: Bytes,
    recomputed_bytes: Bytes,
    /// The lower bound of the peak of plans with this iteration time.
    bound_bytes: Bytes,
    extra: ExtraReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    paper: Option<PaperReport>,
}

/// Number of points of the bound's curve.
const LEVELS: u64 = 24;

impl Case for Site<'_> {
    type Base = Base;
    type Figures = Figures;
    type Made = Arranged;

    fn device(&self) -> &Profile {
        self.device
    }

    fn peak(&self) -> Bytes {
        self.liveness.peak
    }

    fn make(
        &self,
        methods: &[Method],
        budget: Option<Bytes>,
        _: &Memo,
    ) -> Result<Arranged, PlanError> {
        let most = || self.device.available().min(Bytes(self.liveness.peak.0.saturating_mul(2)));
        let request = Request {
            file: ("job.graph.json".to_owned(), neap::job::json::sha256(self.graph)),
            method: methods[0].clone(),
            ..Request::new(self.graph, self.device, self.latencies, budget.unwrap_or_else(most))
        };
        match budget {
            Some(_) => arrange::make_for(&request, None),
            None => arrange::minimum_for(&request, None),
        }
    }

    fn plan<'m>(&'m self, made: &'m Arranged) -> (&'m Plan, &'m [Graph]) {
        (&made.planned.plan, std::slice::from_ref(made.graph.as_ref().unwrap_or(self.graph)))
    }

    fn base(&self, budget: Bytes) -> Base {
        let bound_ns = self.bounds.iteration_for(budget, Nanos(u64::MAX));
        Base { unplanned_iteration_ns: self.unplanned, bound_ns }
    }

    fn figures(&self, Arranged { planned, graph }: &Arranged) -> anyhow::Result<Figures> {
        let graph = graph.as_ref().unwrap_or(self.graph);
        let of = &planned.plan.figures;
        let link = &self.device.link;
        let papers = match self.accounting {
            Accounting::Physical => None,
            Accounting::Paper => Some(paper(graph, self.liveness, &planned.program, link)?),
        };
        let stalls = &planned.run.stalls;
        Ok(Figures {
            peak_bytes: of.peak_bytes,
            arena_bytes: of.arena_bytes,
            iteration_ns: of.iteration_ns,
            shares: Shares::new(
                (of.peak_bytes, of.iteration_ns),
                (self.liveness.peak, self.liveness.no_free),
                self.unplanned,
            ),
            stall_ns: stalls.swap_in + stalls.swap_out + stalls.tail,
            moved_bytes: planned.program.copies.iter().map(|c| c.bytes).sum(),
            recomputed_bytes: recomputed(&planned.plan.jobs[0], graph),
            bound_bytes: self.bounds.peak(of.iteration_ns.saturating_sub(self.unplanned)),
            extra: ExtraReport::new(&Extra::new(&planned.program, link, of.iteration_ns)?),
            paper: papers.map(|papers| PaperReport::new(&papers, self.unplanned)),
        })
    }

    fn panel(&self, rows: &[Row<Base, Figures>], methods: &[Vec<Method>]) -> Panel {
        // From the lowest peak of the plans to the unplanned peak.
        let peaks = rows.iter().filter_map(|r| r.figures.as_ref()).map(|f| f.peak_bytes.0);
        let highest = self.liveness.peak.0;
        let lowest = peaks.min().unwrap_or(highest).min(highest);
        let levels = (0..=LEVELS).map(|i| Bytes(lowest + (highest - lowest) / LEVELS * i));
        let curve = |of: &Vec<Method>| curve(rows, &of[0], |f| (f.peak_bytes, f.iteration_ns));
        Panel {
            title: format!("{} on {}", self.graph.name, self.device.name),
            unplanned: (self.liveness.peak, self.unplanned),
            curves: methods.iter().map(curve).collect(),
            bound: levels
                .filter_map(|level| {
                    Some((level, self.bounds.iteration_for(level, Nanos(u64::MAX))?))
                })
                .collect(),
        }
    }
}

/// The comparison of planners on one job.
#[derive(Serialize)]
struct Report {
    graph: String,
    floor_bytes: Bytes,
    no_free_bytes: Bytes,
    rows: Vec<Row<Base, Figures>>,
}

/// How far `value` is above `bound`, as a share of the bound.
fn above(value: u64, bound: u64) -> String {
    format!("{:.2} %", ratio(value.saturating_sub(bound), bound) * 100.0)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timing = self.rows.iter().any(|r| r.planning_s.is_some());
        let papers = self.rows.iter().filter_map(|r| r.figures.as_ref()).any(|f| f.paper.is_some());
        let mut numbers = vec!["peak", "MSR", "MSR no-free", "EOR", "CBR", "CBR no-free"];
        numbers.extend(["stall", "moved", "recomputed", "time over bound", "peak over bound"]);
        if papers {
            numbers.extend(["paper: peak", "MSR", "MSR no-free", "EOR", "CBR", "CBR no-free"]);
        }
        let width = numbers.len();
        numbers.extend(timing.then_some("planning"));
        let mut columns =
            vec![("device", Side::Left), ("budget", Side::Right), ("planner", Side::Left)];
        columns.extend(numbers.iter().map(|n| (*n, Side::Right)));
        let mut table = Table::new(&columns);
        for row in &self.rows {
            let cells = row.figures.as_ref().map(|of| {
                let mut cells = vec![of.peak_bytes.to_string()];
                cells.extend(shares(&of.shares));
                cells.extend([
                    of.stall_ns.to_string(),
                    of.moved_bytes.to_string(),
                    of.recomputed_bytes.to_string(),
                    row.base.bound_ns.map_or(String::new(), |b| above(of.iteration_ns.0, b.0)),
                    above(of.peak_bytes.0, of.bound_bytes.0),
                ]);
                if let Some(paper) = &of.paper {
                    cells.push(paper.peak_bytes.to_string());
                    cells.extend(shares(&paper.shares));
                }
                cells
            });
            table.row(row.cells(cells, width));
        }
        write!(f, "{table}")
    }
}

/// The columns of `--csv`.
const CSV: &str = "\
    device,planner,budget,budget_bytes,fits,unplanned_peak_bytes,unplanned_iteration_ns,\
    peak_bytes,arena_bytes,iteration_ns,msr,msr_no_free,eor,cbr,cbr_no_free,stall_ns,\
    moved_bytes,recomputed_bytes,bound_bytes,bound_ns,lowest_bytes,extra.recompute_ns,\
    extra.swap_in_ns,extra.swap_out_ns,extra.tail_ns,extra.contention_ns";

/// Further columns with `--accounting paper`.
const PAPER: &str = "\
    ,paper.peak_bytes,paper.iteration_ns,paper.unplanned_peak_bytes,paper.no_free_bytes,\
    paper.msr,paper.msr_no_free,paper.eor,paper.cbr,paper.cbr_no_free,paper.extra.recompute_ns,\
    paper.extra.swap_in_ns,paper.extra.swap_out_ns,paper.extra.tail_ns,paper.extra.contention_ns";
