//! `neap compare` with several jobs: planners × budgets × devices, each planning all jobs together, and what becomes of them side by side.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::bail;
use neap::contract::{Event, Latency};
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::plan::global::{self, Job, Jobs, Memo, Together, aware};
use neap::plan::{Method, PlanError};
use neap::report::frontier::{self, Curve, Panel};
use neap::report::table::{Side, Table};
use neap::sim::engine;
use neap::sim::joint::{self, Round};
use neap::sim::program::{Direction, Program};
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use crate::accounting::{Accounting, cbr};
use crate::compare::{self, Flags, told};
use crate::output::{self, Answer, note};
use crate::settings::{self, Budget, Site};
use crate::simulate::ratio;

/// All jobs on a device, and what holds for all plans of them.
struct Scene<'a> {
    graphs: &'a [Graph],
    sites: &'a [Site],
    peak: Bytes,
    no_free: Bytes,
    unplanned: Nanos,
}

/// One planner at one budget on one device.
struct Row {
    device: String,
    planner: &'static str,
    /// As the user says it, and in bytes; a minimum's bytes are what was reached.
    asked: Budget,
    budget: Bytes,
    took: Duration,
    unplanned: (Bytes, Nanos),
    plan: Result<Figures, Bytes>,
}

/// What a plan comes to.
struct Figures {
    /// Each job's own, summed: at no alignment is it more.
    peak: Bytes,
    /// The most that was seen.
    resident: Bytes,
    arena: Bytes,
    round: Nanos,
    /// Iterations alone, summed.
    in_turn: Nanos,
    msr: f64,
    msr_no_free: f64,
    eor: f64,
    moved: Bytes,
    recomputed: Bytes,
    late: u64,
    busy: [f64; 2],
    overlaps: usize,
    /// How the planner planned, where it had a choice.
    way: String,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    if flags.accounting != Accounting::Physical {
        bail!("--accounting paper: is for one job; leave it away or compare each job by itself");
    }
    let methods = compare::planners(flags)?;
    let mut graphs = flags
        .graphs
        .iter()
        .map(|job| settings::graph(&job.path))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut resolved = Vec::new();
    for device in flags.devices() {
        resolved.push(
            graphs
                .iter_mut()
                .map(|graph| device.resolve(graph))
                .collect::<anyhow::Result<Vec<_>>>()?,
        );
    }
    let (mut rows, mut panels, mut all_met) = (Vec::new(), Vec::new(), true);
    for sites in &resolved {
        let scene = Scene::new(flags, &graphs, sites)?;
        let device = &sites[0].device;
        let first = rows.len();
        let budgets = compare::budgets(flags, scene.peak, device)?;
        let bar = output::progress(budgets.len() * methods.len(), "plans made");
        let column = |method: usize| {
            // Budgets share what a planner plans on the way down, except where its time is asked for.
            let mut memo = Memo::default();
            let mut next = |&(asked, budget): &(Budget, Option<Bytes>)| {
                if flags.timing {
                    memo = Memo::default();
                }
                let row = row(flags, &scene, &methods[method], (asked, budget), &mut memo);
                bar.inc(1);
                row
            };
            budgets.iter().map(&mut next).collect::<anyhow::Result<Vec<Row>>>()
        };
        let columns = compare::each(flags, methods.len(), column)?;
        bar.finish_and_clear();
        let mut columns: Vec<_> = columns.into_iter().map(Vec::into_iter).collect();
        for _ in &budgets {
            let before = rows.len();
            rows.extend(columns.iter_mut().filter_map(Iterator::next));
            all_met &= rows[before..].iter().any(|r: &Row| r.plan.is_ok());
        }
        if flags.plot.is_some() {
            panels.push(panel(&scene, device.name.clone(), &rows[first..], &methods));
        }
    }
    let objects = || rows.iter().map(|row| row_json(row, flags.timing));
    if let Some(path) = &flags.csv {
        let columns: Vec<&str> =
            CSV.into_iter().chain(flags.timing.then_some("planning_s")).collect();
        compare::write_rows(path, &columns, objects())?;
    }
    if let Some(path) = &flags.plot {
        let drawing = frontier::svg(&panels)?;
        neap::files::write(path, |f| f.write_all(drawing.as_bytes()))?;
    }
    if as_json {
        let names: Vec<&str> = graphs.iter().map(|g| &*g.name).collect();
        output::json(&json!({ "graphs": names, "rows": objects().collect::<Vec<_>>() }))?;
    } else {
        output::data(&table(&rows, flags.timing).to_string())?;
    }
    for path in [&flags.csv, &flags.plot].into_iter().flatten() {
        note(&format!("written: {}", path.display()));
    }
    Ok(if all_met { Answer::Yes } else { Answer::No })
}

impl<'a> Scene<'a> {
    fn new(flags: &Flags, graphs: &'a [Graph], sites: &'a [Site]) -> anyhow::Result<Self> {
        let lives: Vec<Liveness> = graphs.iter().map(Liveness::of).collect();
        let (peak, no_free) =
            (lives.iter().map(|l| l.peak).sum(), lives.iter().map(|l| l.no_free).sum());
        let mut scene = Self { graphs, sites, peak, no_free, unplanned: Nanos::ZERO };
        let bare = |(graph, site): (&Graph, &Site)| Program::new(graph, &site.latencies, &[]);
        let bare = graphs.iter().zip(sites).map(bare).collect::<Result<Vec<_>, _>>()?;
        let asked = scene.jobs(flags, &vec![Method::default(); graphs.len()], Bytes::ZERO);
        scene.unplanned = aware::round(&asked, &bare.iter().collect::<Vec<_>>())?.time;
        Ok(scene)
    }

    fn jobs(&self, flags: &Flags, methods: &[Method], budget: Bytes) -> Jobs<'a> {
        let job = |(((arg, graph), site), method): (
            ((&crate::together::JobArg, &'a Graph), &'a Site),
            &Method,
        )| Job {
            graph,
            file: ("job.graph.json".to_owned(), site.sha256.clone()),
            latencies: &site.latencies as &[Latency],
            method: method.clone(),
            priority: arg.share.priority(),
        };
        let jobs =
            flags.graphs.iter().zip(self.graphs).zip(self.sites).zip(methods).map(job).collect();
        Jobs { jobs, device: &self.sites[0].device, budget, recorded_options: BTreeMap::new() }
    }
}

fn row(
    flags: &Flags,
    scene: &Scene<'_>,
    methods: &[Method],
    (asked, budget): (Budget, Option<Bytes>),
    memo: &mut Memo,
) -> anyhow::Result<Row> {
    let device = &scene.sites[0].device;
    let jobs = scene.jobs(flags, methods, budget.unwrap_or_else(|| device.available()));
    let name = methods[0].name();
    let started = Instant::now();
    let made = if budget.is_some() {
        global::make_with(&jobs, memo)
    } else {
        global::minimum_with(&jobs, memo)
    };
    let took = started.elapsed();
    let (plan, budget) = match made {
        Ok(together) => {
            if let Err(refusals) = neap::contract::check::check(&together.plan, scene.graphs) {
                bail!(
                    "{name}'s plan did not pass the checker; this is a defect of neap, please report it with the graphs: {}",
                    refusals[0]
                );
            }
            let programs: Vec<&Program> = together.parts.iter().map(|part| &part.program).collect();
            let round = aware::round(&jobs, &programs)?;
            (Ok(figures(scene, &together, &programs, &round)), together.plan.budget)
        }
        Err(PlanError::Infeasible(no)) => (Err(no.lowest), no.budget),
        Err(defect) => return Err(defect.into()),
    };
    Ok(Row {
        device: device.name.clone(),
        planner: name,
        asked,
        budget,
        took,
        unplanned: (scene.peak, scene.unplanned),
        plan,
    })
}

fn figures(
    scene: &Scene<'_>,
    together: &Together,
    programs: &[&Program],
    round: &Round,
) -> Figures {
    let of = &together.plan.figures;
    let saving = |baseline: Bytes| ratio(baseline.saturating_sub(of.peak_bytes).0, baseline.0);
    let again = |(part, graph): (&neap::plan::Planned, &Graph)| -> Bytes {
        let keep = part.plan.jobs[0]
            .events
            .iter()
            .flat_map(|e| if let Event::Recompute { keep, .. } = e { &keep[..] } else { &[] });
        keep.map(|t| graph.tensor(*t).bytes).sum()
    };
    let resident = |course: &joint::Course| {
        let runs: Vec<_> = course.runs.iter().map(|r| &r[..]).collect();
        engine::peak(&joint::memory(programs, &runs))
    };
    let busy = |direction| {
        let carried =
            round.courses.iter().flat_map(|c| &c.carried).filter(|c| c.direction == direction);
        ratio(
            carried.map(|c| (c.end - c.start).0).sum(),
            round.courses.iter().map(|c| c.end.0).sum(),
        )
    };
    Figures {
        peak: of.peak_bytes,
        resident: round.courses.iter().map(resident).max().unwrap_or_default(),
        arena: of.arena_bytes,
        round: round.time,
        in_turn: of.iteration_ns,
        msr: saving(scene.peak),
        msr_no_free: saving(scene.no_free),
        eor: ratio(round.time.0, scene.unplanned.0),
        moved: programs.iter().flat_map(|p| &p.copies).map(|c| c.bytes).sum(),
        recomputed: together.parts.iter().zip(scene.graphs).map(again).sum(),
        late: round
            .courses
            .iter()
            .flat_map(|c| c.runs.iter().flatten())
            .map(|(_, run)| u64::from(run.late_copies))
            .sum(),
        busy: [busy(Direction::H2d), busy(Direction::D2h)],
        overlaps: round.courses.iter().map(|c| joint::overlaps(&c.carried)).sum(),
        way: together.plan.options.get("way").cloned().unwrap_or_default(),
    }
}

fn table(rows: &[Row], timing: bool) -> Table {
    let mut columns =
        vec![("device", Side::Left), ("budget", Side::Right), ("planner", Side::Left)];
    let numbers = [
        "peak",
        "seen",
        "round",
        "MSR",
        "MSR no-free",
        "EOR",
        "CBR",
        "moved",
        "recomputed",
        "link up",
        "link down",
        "way",
    ];
    columns.extend(numbers.map(|n| (n, if n == "way" { Side::Left } else { Side::Right })));
    if timing {
        columns.push(("planning", Side::Right));
    }
    let mut table = Table::new(&columns);
    for row in rows {
        let mut cells =
            vec![row.device.clone(), told(row.asked, row.budget), row.planner.to_owned()];
        match &row.plan {
            Ok(f) => cells.extend([
                f.peak.to_string(),
                f.resident.to_string(),
                f.round.to_string(),
                format!("{:.4}", f.msr),
                format!("{:.4}", f.msr_no_free),
                format!("{:.4}", f.eor),
                format!("{:.4}", cbr(f.msr, f.eor)),
                f.moved.to_string(),
                f.recomputed.to_string(),
                format!("{:.1} %", f.busy[0] * 100.0),
                format!("{:.1} %", f.busy[1] * 100.0),
                f.way.clone(),
            ]),
            Err(lowest) => {
                cells.push(format!("no: {lowest}"));
                cells.resize(3 + numbers.len(), String::new());
            }
        }
        if timing {
            cells.push(format!("{:.1?}", row.took));
        }
        table.row(cells);
    }
    table
}

fn row_json(row: &Row, timing: bool) -> Value {
    let mut object = json!({
        "device": row.device,
        "planner": row.planner,
        "budget": told(row.asked, row.budget),
        "budget_bytes": row.budget,
        "fits": row.plan.is_ok(),
        "unplanned_peak_bytes": row.unplanned.0,
        "unplanned_round_ns": row.unplanned.1,
    });
    match &row.plan {
        Ok(f) => {
            let figures = json!({
                "peak_bytes": f.peak,
                "seen_peak_bytes": f.resident,
                "arena_bytes": f.arena,
                "round_ns": f.round,
                "in_turn_ns": f.in_turn,
                "msr": f.msr,
                "msr_no_free": f.msr_no_free,
                "eor": f.eor,
                "cbr": cbr(f.msr, f.eor),
                "cbr_no_free": cbr(f.msr_no_free, f.eor),
                "moved_bytes": f.moved,
                "recomputed_bytes": f.recomputed,
                "late_copies": f.late,
                "h2d_busy": f.busy[0],
                "d2h_busy": f.busy[1],
                "overlapping_copies": f.overlaps,
                "way": f.way,
            });
            if let (Value::Object(all), Value::Object(figures)) = (&mut object, figures) {
                all.extend(figures);
            }
        }
        Err(lowest) => object["lowest_bytes"] = json!(lowest),
    }
    if timing {
        object["planning_s"] = json!(row.took.as_secs_f64());
    }
    object
}

const CSV: [&str; 25] = [
    "device",
    "planner",
    "budget",
    "budget_bytes",
    "fits",
    "unplanned_peak_bytes",
    "unplanned_round_ns",
    "peak_bytes",
    "seen_peak_bytes",
    "arena_bytes",
    "round_ns",
    "in_turn_ns",
    "msr",
    "msr_no_free",
    "eor",
    "cbr",
    "cbr_no_free",
    "moved_bytes",
    "recomputed_bytes",
    "late_copies",
    "h2d_busy",
    "d2h_busy",
    "overlapping_copies",
    "way",
    "lowest_bytes",
];

fn panel(scene: &Scene<'_>, device: String, rows: &[Row], methods: &[Vec<Method>]) -> Panel {
    let curve = |of: &Vec<Method>| {
        let mine = rows.iter().filter(|r| r.planner == of[0].name());
        let mut points: Vec<(Bytes, Nanos)> =
            mine.filter_map(|r| r.plan.as_ref().ok()).map(|f| (f.peak, f.round)).collect();
        points.sort_unstable();
        points.dedup();
        Curve { name: of[0].name().to_owned(), points }
    };
    Panel {
        title: format!("{} jobs on {device}", scene.graphs.len()),
        unplanned: (scene.peak, scene.unplanned),
        curves: methods.iter().map(curve).collect(),
        bound: Vec::new(),
    }
}
