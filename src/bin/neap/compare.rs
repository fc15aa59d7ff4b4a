//! `neap compare`: planners × budgets × devices in one table.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::builder::{OsStringValueParser, TypedValueParser};
use neap::contract::{Event, Latency};
use neap::device::Profile;
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::plan::bound::Bounds;
use neap::plan::{self, Method, PlanError, Planned, Request};
use neap::report::frontier::{self, Curve, Panel};
use neap::report::table::{Side, Table};
use neap::sim::accounting::{Extra, Paper, paper};
use neap::sim::allocator::replay::in_parallel;
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use crate::accounting::{self, Accounting, Shares, cbr};
use crate::compare_jobs;
use crate::output::{self, Answer, note};
use crate::settings::{self, Budget, DeviceFlags};
use crate::simulate::ratio;
use crate::together::JobArg;

/// Compare planners: what each makes of every budget on every device, beside what no plan can beat.
///
/// Several jobs are planned together, against one memory and one link, and compared by what they come to side by side.
///
/// Exits 0 when every budget was met by a planner, 1 when one was met by none.
#[derive(clap::Args)]
pub struct Flags {
    /// The job, or several that share the device. FILE@0.5 swaps at most that share of a job's tensors, and lets it give way later.
    #[arg(required = true, value_name = "FILE.graph.json[@SHARE]", value_parser = OsStringValueParser::new().try_map(JobArg::read))]
    pub graphs: Vec<JobArg>,
    /// Which planners, by name; all if not given.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = method)]
    planners: Vec<Method>,
    /// Bytes (12GiB), shares of the unplanned peak (60%; of several jobs, of the sum of theirs), or `min`. One that the device cuts down to another is skipped.
    #[arg(
        long,
        value_name = "BUDGET,…",
        value_delimiter = ',',
        default_value = "80%,70%,60%,50%,40%"
    )]
    pub budget: Vec<Budget>,
    /// A built-in device (`neap device list`) or a *.device.json file; may be given again. `host` if not given.
    #[arg(long, value_name = "NAME|FILE")]
    pub device: Vec<String>,
    /// A table of measured latencies, used before the roofline.
    #[arg(long, value_name = "FILE.csv")]
    pub latencies: Option<PathBuf>,
    /// Give the papers' peak and time beside the physical ones.
    #[arg(long, value_enum, default_value_t = Accounting::Physical)]
    pub accounting: Accounting,
    /// Write the table for sorting and plotting.
    #[arg(long, value_name = "FILE.csv")]
    pub csv: Option<PathBuf>,
    /// Draw time against memory.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Say how long planning took too, which is not the same twice.
    #[arg(long)]
    pub timing: bool,
}

impl Flags {
    /// Each device with where latencies come from.
    pub fn devices(&self) -> Vec<DeviceFlags> {
        let names = if self.device.is_empty() {
            vec![None]
        } else {
            self.device.iter().cloned().map(Some).collect()
        };
        names
            .into_iter()
            .map(|device| DeviceFlags {
                device,
                latencies: self.latencies.clone(),
                ..DeviceFlags::default()
            })
            .collect()
    }
}

fn method(name: &str) -> Result<Method, String> {
    Method::named(name).ok_or_else(|| {
        let names: Vec<&str> = Method::all().iter().map(Method::name).collect();
        format!("`{name}` is not a planner; there are {}", names.join(", "))
    })
}

/// A device with its latencies, and what holds for all plans on it.
struct Site<'a> {
    device: Profile,
    latencies: Vec<Latency>,
    liveness: &'a Liveness,
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
    plan: Result<Figures, Bytes>,
    unplanned: (Bytes, Nanos),
    /// No plan within the budget is quicker; `None` below the floor.
    bound: Option<Nanos>,
}

/// What a plan comes to.
struct Figures {
    peak: Bytes,
    arena: Bytes,
    time: Nanos,
    msr: f64,
    msr_no_free: f64,
    eor: f64,
    stall: Nanos,
    moved: Bytes,
    recomputed: Bytes,
    /// No plan that takes as long has a lower peak.
    bound: Bytes,
    extra: Extra,
    papers: Option<Paper>,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let mut inputs: Vec<&Path> = flags.graphs.iter().map(|g| &*g.path).collect();
    inputs.extend(flags.device.iter().map(Path::new));
    inputs.extend(flags.latencies.as_deref());
    settings::outputs(&inputs, &[flags.csv.as_deref(), flags.plot.as_deref()])?;
    let [job] = &flags.graphs[..] else { return compare_jobs::main(flags, as_json) };
    let mut graph = settings::graph(&job.path)?;
    let resolved = flags
        .devices()
        .iter()
        .map(|device| device.resolve(&mut graph))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let methods = planners(flags)?;
    let liveness = Liveness::of(&graph);
    let (mut rows, mut panels, mut all_met) = (Vec::new(), Vec::new(), true);
    for settings::Site { device, latencies, .. } in resolved {
        let unplanned = latencies.iter().map(|l| l.time).sum();
        let site = Site { device, latencies, liveness: &liveness, unplanned };
        let bounds = Bounds::new(&graph, &site.latencies, &site.device.link);
        let first = rows.len();
        let budgets = budgets(flags, site.liveness.peak, &site.device)?;
        let bar = output::progress(budgets.len() * methods.len(), "plans made");
        let made = each(flags, budgets.len() * methods.len(), |index| {
            let budget = budgets[index / methods.len()];
            let method = methods[index % methods.len()][0].clone();
            let row = row(&graph, &site, &bounds, budget, method, flags.accounting);
            bar.inc(1);
            row
        })?;
        bar.finish_and_clear();
        let mut made = made.into_iter();
        for &(_, budget) in &budgets {
            let before = rows.len();
            let bound = budget.and_then(|b| bounds.iteration(b));
            rows.extend(made.by_ref().take(methods.len()).map(|mut row: Row| {
                row.bound = if budget.is_some() { bound } else { bounds.iteration(row.budget) };
                row
            }));
            all_met &= rows[before..].iter().any(|r| r.plan.is_ok());
        }
        if flags.plot.is_some() {
            panels.push(panel(&graph, &site, &bounds, &rows[first..], &methods));
        }
    }
    if let Some(path) = &flags.csv {
        write_csv(path, &rows, flags)?;
    }
    if let Some(path) = &flags.plot {
        let drawing = frontier::svg(&panels)?;
        neap::files::write(path, |f| f.write_all(drawing.as_bytes()))?;
    }
    if as_json {
        let rows: Vec<Value> = rows.iter().map(|r| row_json(r, flags.timing)).collect();
        output::json(
            &json!({ "graph": graph.name, "floor_bytes": liveness.floor, "no_free_bytes": liveness.no_free, "rows": rows }),
        )?;
    } else {
        output::data(&table(&rows, flags).to_string())?;
    }
    for path in [&flags.csv, &flags.plot].into_iter().flatten() {
        note(&format!("written: {}", path.display()));
    }
    Ok(if all_met { Answer::Yes } else { Answer::No })
}

/// `work(0)`, … `work(count - 1)` on all cores, or one after the other where planning is timed.
///
/// # Errors
/// The first in order.
pub fn each<T: Send>(
    flags: &Flags,
    count: usize,
    work: impl Fn(usize) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    if flags.timing {
        return (0..count).map(work).collect();
    }
    in_parallel(count, work).into_iter().collect()
}

/// Planners, each as the jobs let it plan them; those that can't keep to a job's share are left out.
///
/// # Errors
/// When none is left.
pub fn planners(flags: &Flags) -> anyhow::Result<Vec<Vec<Method>>> {
    let asked = if flags.planners.is_empty() { Method::all() } else { flags.planners.clone() };
    let mut able = Vec::with_capacity(asked.len());
    for method in asked {
        match flags
            .graphs
            .iter()
            .map(|job| job.limited(method.clone()))
            .collect::<anyhow::Result<Vec<Method>>>()
        {
            Ok(methods) => able.push(methods),
            Err(why) => note(&format!("note: {} is left out: {why}", method.name())),
        }
    }
    if able.is_empty() {
        bail!(
            "--planners: none of them has a limit on swapping; name neap or tensile, or leave the share away"
        );
    }
    Ok(able)
}

/// The budgets in bytes, `None` for the minimum, none twice.
///
/// # Errors
/// As [`Budget::resolve`].
pub fn budgets(
    flags: &Flags,
    peak: Bytes,
    device: &Profile,
) -> anyhow::Result<Vec<(Budget, Option<Bytes>)>> {
    let mut all: Vec<(Budget, Option<Bytes>)> = Vec::new();
    for &asked in &flags.budget {
        let budget = asked.resolve(peak, device)?;
        if all.iter().all(|b| b.1 != budget) {
            all.push((asked, budget));
        }
    }
    Ok(all)
}

fn row(
    graph: &Graph,
    site: &Site<'_>,
    bounds: &Bounds<'_>,
    (asked, budget): (Budget, Option<Bytes>),
    method: Method,
    accounting: Accounting,
) -> anyhow::Result<Row> {
    let name = method.name();
    let request = Request {
        graph,
        file: ("job.graph.json".to_owned(), neap::job::json::sha256(graph)),
        device: &site.device,
        latencies: &site.latencies,
        budget: budget.unwrap_or_else(|| {
            site.device.available().min(Bytes(site.liveness.peak.0.saturating_mul(2)))
        }),
        method,
        recorded_options: BTreeMap::new(),
    };
    let started = Instant::now();
    let planned = if budget.is_some() { plan::make(&request) } else { plan::minimum(&request) };
    let took = started.elapsed();
    let (plan, budget) = match planned {
        Ok(planned) => {
            if let Err(refusals) =
                neap::contract::check::check(&planned.plan, std::slice::from_ref(graph))
            {
                bail!(
                    "{name}'s plan did not pass the checker; this is a defect of neap, please report it with the graph: {}",
                    refusals[0]
                );
            }
            let budget = planned.plan.budget;
            (Ok(figures(graph, site, bounds, &planned, accounting)?), budget)
        }
        Err(PlanError::Infeasible(no)) => (Err(no.lowest), no.budget),
        Err(defect) => return Err(defect.into()),
    };
    let unplanned = (site.liveness.peak, site.unplanned);
    Ok(Row {
        device: site.device.name.clone(),
        planner: name,
        asked,
        budget,
        took,
        plan,
        unplanned,
        bound: None,
    })
}

fn figures(
    graph: &Graph,
    site: &Site<'_>,
    bounds: &Bounds<'_>,
    planned: &Planned,
    accounting: Accounting,
) -> anyhow::Result<Figures> {
    let of = &planned.plan.figures;
    let saving = |baseline: Bytes| ratio(baseline.saturating_sub(of.peak_bytes).0, baseline.0);
    let again = planned.plan.jobs[0]
        .events
        .iter()
        .flat_map(|e| if let Event::Recompute { keep, .. } = e { &keep[..] } else { &[] });
    let link = &site.device.link;
    let papers = match accounting {
        Accounting::Physical => None,
        Accounting::Paper => Some(paper(graph, site.liveness, &planned.program, link)?),
    };
    Ok(Figures {
        peak: of.peak_bytes,
        arena: of.arena_bytes,
        time: of.iteration_ns,
        msr: saving(site.liveness.peak),
        msr_no_free: saving(site.liveness.no_free),
        eor: ratio(of.iteration_ns.0, site.unplanned.0),
        stall: planned.run.stalls.swap_in + planned.run.stalls.swap_out + planned.run.stalls.tail,
        moved: planned.program.copies.iter().map(|c| c.bytes).sum(),
        recomputed: again.map(|t| graph.tensor(*t).bytes).sum(),
        bound: bounds.peak(of.iteration_ns.saturating_sub(site.unplanned)),
        extra: Extra::of(&planned.program, link, of.iteration_ns)?,
        papers,
    })
}

/// How far `value` is above `bound`, as a share of the bound.
fn above(value: u64, bound: u64) -> f64 {
    ratio(value.saturating_sub(bound), bound)
}

/// A budget as the user said it.
pub fn told(asked: Budget, budget: Bytes) -> String {
    match asked {
        Budget::Share(share) if share % 1000 == 0 => format!("{}%", share / 1000),
        Budget::Share(share) => format!("{}.{:03}%", share / 1000, share % 1000),
        Budget::Minimum => "min".to_owned(),
        Budget::Bytes(_) => budget.0.to_string(),
    }
}

fn table(rows: &[Row], flags: &Flags) -> Table {
    let (timing, papers) = (flags.timing, flags.accounting == Accounting::Paper);
    let mut columns =
        vec![("device", Side::Left), ("budget", Side::Right), ("planner", Side::Left)];
    let numbers = [
        "peak",
        "MSR",
        "MSR no-free",
        "EOR",
        "CBR",
        "CBR no-free",
        "stall",
        "moved",
        "recomputed",
        "time over bound",
        "peak over bound",
    ];
    columns.extend(numbers.map(|n| (n, Side::Right)));
    let by_paper = ["paper: peak", "MSR", "MSR no-free", "EOR", "CBR", "CBR no-free"];
    if papers {
        columns.extend(by_paper.map(|n| (n, Side::Right)));
    }
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
                format!("{:.4}", f.msr),
                format!("{:.4}", f.msr_no_free),
                format!("{:.4}", f.eor),
                format!("{:.4}", cbr(f.msr, f.eor)),
                format!("{:.4}", cbr(f.msr_no_free, f.eor)),
                f.stall.to_string(),
                f.moved.to_string(),
                f.recomputed.to_string(),
                row.bound
                    .map_or(String::new(), |b| format!("{:.2} %", above(f.time.0, b.0) * 100.0)),
                format!("{:.2} %", above(f.peak.0, f.bound.0) * 100.0),
            ]),
            Err(lowest) => {
                cells.push(format!("no: {lowest}"));
                cells.resize(3 + numbers.len(), String::new());
            }
        }
        if papers {
            let shown = row.plan.as_ref().ok().and_then(|f| f.papers.as_ref()).map(|p| {
                let shares = Shares::of(p, row.unplanned.1);
                let of = [
                    shares.msr,
                    shares.msr_no_free,
                    shares.eor,
                    shares.cbr(),
                    shares.cbr_no_free(),
                ];
                std::iter::once(p.peak.to_string()).chain(of.map(|x| format!("{x:.4}"))).collect()
            });
            cells.extend(shown.unwrap_or_else(|| vec![String::new(); by_paper.len()]));
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
        "unplanned_iteration_ns": row.unplanned.1,
        "bound_ns": row.bound,
    });
    match &row.plan {
        Ok(f) => {
            let figures = json!({
                "peak_bytes": f.peak,
                "arena_bytes": f.arena,
                "iteration_ns": f.time,
                "msr": f.msr,
                "msr_no_free": f.msr_no_free,
                "eor": f.eor,
                "cbr": cbr(f.msr, f.eor),
                "cbr_no_free": cbr(f.msr_no_free, f.eor),
                "stall_ns": f.stall,
                "moved_bytes": f.moved,
                "recomputed_bytes": f.recomputed,
                "bound_bytes": f.bound,
                "extra": accounting::extra_json(&f.extra),
            });
            if let Some(papers) = &f.papers {
                object["paper"] = accounting::to_json(papers, row.unplanned.1);
            }
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

const CSV: [&str; 21] = [
    "device",
    "planner",
    "budget",
    "budget_bytes",
    "fits",
    "unplanned_peak_bytes",
    "unplanned_iteration_ns",
    "peak_bytes",
    "arena_bytes",
    "iteration_ns",
    "msr",
    "msr_no_free",
    "eor",
    "cbr",
    "cbr_no_free",
    "stall_ns",
    "moved_bytes",
    "recomputed_bytes",
    "bound_bytes",
    "bound_ns",
    "lowest_bytes",
];

/// Objects within a row, whose keys the table has behind theirs: `paper_peak_bytes`.
const EXTRA: [&str; 5] = [
    "extra.recompute_ns",
    "extra.swap_in_ns",
    "extra.swap_out_ns",
    "extra.tail_ns",
    "extra.contention_ns",
];
const PAPER: [&str; 14] = [
    "paper.peak_bytes",
    "paper.iteration_ns",
    "paper.unplanned_peak_bytes",
    "paper.no_free_bytes",
    "paper.msr",
    "paper.msr_no_free",
    "paper.eor",
    "paper.cbr",
    "paper.cbr_no_free",
    "paper.extra.recompute_ns",
    "paper.extra.swap_in_ns",
    "paper.extra.swap_out_ns",
    "paper.extra.tail_ns",
    "paper.extra.contention_ns",
];

/// The rows' JSON under the same names, empty where there is none.
fn write_csv(path: &Path, rows: &[Row], flags: &Flags) -> anyhow::Result<()> {
    let papers: &[&str] = if flags.accounting == Accounting::Paper { &PAPER } else { &[] };
    let columns: Vec<&str> = CSV
        .iter()
        .chain(&EXTRA)
        .chain(papers)
        .copied()
        .chain(flags.timing.then_some("planning_s"))
        .collect();
    write_rows(path, &columns, rows.iter().map(|row| row_json(row, flags.timing)))
}

/// Objects as a table, a dot in a column's name leading into what they hold.
///
/// # Errors
/// When it can't be written.
pub fn write_rows(
    path: &Path,
    columns: &[&str],
    rows: impl Iterator<Item = Value>,
) -> anyhow::Result<()> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(columns.iter().map(|c| c.replace('.', "_")))?;
    for object in rows {
        writer.write_record(columns.iter().map(|&c| {
            match c.split('.').fold(&object, |of, key| &of[key]) {
                Value::Null => String::new(),
                Value::String(text) => text.clone(),
                value => value.to_string(),
            }
        }))?;
    }
    let text = writer.into_inner().context("the table can't be written down")?;
    neap::files::write(path, |f| f.write_all(&text))?;
    Ok(())
}

/// Points of the bound's curve.
const LEVELS: u64 = 24;

fn panel(
    graph: &Graph,
    site: &Site<'_>,
    bounds: &Bounds<'_>,
    rows: &[Row],
    methods: &[Vec<Method>],
) -> Panel {
    let curve = |method: &Method| {
        let mine = rows.iter().filter(|r| r.planner == method.name());
        let mut points: Vec<(Bytes, Nanos)> =
            mine.filter_map(|r| r.plan.as_ref().ok()).map(|f| (f.peak, f.time)).collect();
        points.sort_unstable();
        points.dedup();
        Curve { name: method.name().to_owned(), points }
    };
    // From the lowest of the plans to the unplanned peak.
    let peaks = rows.iter().filter_map(|r| r.plan.as_ref().ok()).map(|f| f.peak.0);
    let highest = site.liveness.peak.0;
    let lowest = peaks.min().unwrap_or(highest).min(highest);
    let levels = (0..=LEVELS).map(|i| Bytes(lowest + (highest - lowest) / LEVELS * i));
    Panel {
        title: format!("{} on {}", graph.name, site.device.name),
        unplanned: (site.liveness.peak, site.unplanned),
        curves: methods.iter().map(|of| curve(&of[0])).collect(),
        bound: levels.filter_map(|level| Some((level, bounds.iteration(level)?))).collect(),
    }
}
