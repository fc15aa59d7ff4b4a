//! `neap compare`: planners × budgets × devices in one table.

mod one;
mod together;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::builder::{OsStringValueParser, TypedValueParser};
use neap::contract::check::check;
use neap::contract::{Event, JobPlan, Plan};
use neap::device::Profile;
use neap::job::Graph;
use neap::parallel::in_parallel;
use neap::plan::together::Memo;
use neap::plan::{Method, PlanError};
use neap::report::frontier::{self, Curve, Panel};
use neap::units::{Bytes, Nanos};
use serde::Serialize;
use serde_json::Value;

use crate::accounting::{Accounting, Shares};
use crate::output::{self, Answer, Ending, note};
use crate::progress;
use crate::settings::planner::named;
use crate::settings::{Budget, DeviceFlags, JobArg, NamedBudget, Outputs};

/// Compare the plans of several planners for each budget and device with the best that is possible.
///
/// Several jobs are planned together for one memory and one link, and run beside each other.
///
/// The exit code is 0 if some planner met each budget, and 1 if no planner met one of them.
#[derive(clap::Args)]
pub struct Flags {
    /// The job, or several jobs that share the device. With FILE@0.5 at most half of that job's
    /// tensors are swapped, and the other jobs give up memory first.
    #[arg(required = true, value_name = "FILE.graph.json[@SHARE[:PART]]",
          value_parser = OsStringValueParser::new().try_map(JobArg::read))]
    graphs: Vec<JobArg>,
    /// The planners by name; all by default.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = named())]
    planners: Vec<Method>,
    /// Budgets: bytes (12GiB), shares of the unplanned peak (60%; for several jobs, of the sum of
    /// their peaks), or `min`. A budget above the device's memory becomes the device's memory.
    #[arg(
        long,
        value_name = "BUDGET,…",
        value_delimiter = ',',
        default_value = "80%,70%,60%,50%,40%"
    )]
    budget: Vec<Budget>,
    /// A built-in device (`neap device list`) or a *.device.json file; may be repeated. `host` by
    /// default.
    #[arg(long, value_name = "NAME|FILE")]
    device: Vec<String>,
    /// A table of measured latencies, used before the roofline.
    #[arg(long, value_name = "FILE.csv")]
    latencies: Option<PathBuf>,
    /// Also give peak and time by the papers' accounting.
    #[arg(long, value_enum, default_value_t = Accounting::Physical)]
    accounting: Accounting,
    /// Write the table as CSV.
    #[arg(long, value_name = "FILE.csv")]
    csv: Option<PathBuf>,
    /// Draw time against memory.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Also report the time that planning took, which differs from run to run.
    #[arg(long)]
    timing: bool,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let mut inputs: Vec<&Path> = flags.graphs.iter().map(|g| &*g.path).collect();
    inputs.extend(flags.device.iter().map(Path::new));
    inputs.extend(flags.latencies.as_deref());
    Outputs::new(&inputs, &[flags.csv.as_deref(), flags.plot.as_deref()])?;
    match &flags.graphs[..] {
        [job] => job.alone().and_then(|()| one::main(flags, job, as_json)),
        _ => together::main(flags, as_json),
    }
}

impl Flags {
    /// Each device with the sources of its latencies.
    fn devices(&self) -> Vec<DeviceFlags> {
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

    /// The planners for each job, with the job's limit on swapping. Planners without such a limit
    /// are left out.
    fn methods(&self) -> anyhow::Result<Vec<Vec<Method>>> {
        let asked = if self.planners.is_empty() { Method::all() } else { self.planners.clone() };
        let mut able = Vec::with_capacity(asked.len());
        for method in asked {
            match self
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
                "--planners: none of them has a limit on swapping; name neap or tensile, or leave \
                 the share out"
            );
        }
        Ok(able)
    }

    /// The budgets in bytes without duplicates; `None` for the minimum.
    fn budgets(
        &self,
        peak: Bytes,
        device: &Profile,
    ) -> anyhow::Result<Vec<(Budget, Option<Bytes>)>> {
        let mut all: Vec<(Budget, Option<Bytes>)> = Vec::new();
        for &asked in &self.budget {
            let budget = asked.resolve(peak, device)?;
            if all.iter().all(|b| b.1 != budget) {
                all.push((asked, budget));
            }
        }
        Ok(all)
    }
}

/// The job or jobs on one device.
trait Case: Sync {
    /// Figures of the jobs that do not depend on the budget.
    type Base: Serialize + Send;
    /// Figures of a plan.
    type Figures: Serialize + Send;
    /// What a planner makes.
    type Made;

    fn device(&self) -> &Profile;
    /// The unplanned peak, of which a budget may be a share.
    fn peak(&self) -> Bytes;
    /// Plans by a planner (for each job) within a budget, or with the least memory; `memo` has the
    /// planner's plans so far.
    fn make(
        &self,
        methods: &[Method],
        budget: Option<Bytes>,
        memo: &Memo,
    ) -> Result<Self::Made, PlanError>;
    /// The plan of what was made, and its graphs.
    fn plan<'m>(&'m self, made: &'m Self::Made) -> (&'m Plan, &'m [Graph]);
    fn base(&self, budget: Bytes) -> Self::Base;
    fn figures(&self, made: &Self::Made) -> anyhow::Result<Self::Figures>;
    fn panel(&self, rows: &[Row<Self::Base, Self::Figures>], methods: &[Vec<Method>]) -> Panel;
}

/// One planner at one budget on one device.
#[derive(Serialize)]
struct Row<B, F> {
    device: String,
    planner: &'static str,
    budget: String,
    /// The budget in bytes. For `min`, the bytes that were reached.
    budget_bytes: Bytes,
    fits: bool,
    unplanned_peak_bytes: Bytes,
    #[serde(flatten)]
    base: B,
    #[serde(flatten)]
    figures: Option<F>,
    /// The lowest bytes that the planner reached, if it did not meet the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    lowest_bytes: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    planning_s: Option<f64>,
    #[serde(skip)]
    took: Duration,
}

impl<B, F> Row<B, F> {
    /// Plans and judges. A plan that does not pass the checker is a defect.
    fn new<C: Case<Base = B, Figures = F>>(
        case: &C,
        methods: &[Method],
        (asked, budget): (Budget, Option<Bytes>),
        memo: &Memo,
    ) -> anyhow::Result<Self> {
        let (planner, started) = (methods[0].name(), Instant::now());
        let made = case.make(methods, budget, memo);
        let took = started.elapsed();
        let (figures, budget, lowest_bytes) = match made {
            Ok(made) => {
                let (plan, graphs) = case.plan(&made);
                if let Err(refusals) = check(plan, graphs) {
                    bail!(
                        "{planner}'s plan did not pass the checker; this is a defect of neap, \
                         please report it with the graphs: {}",
                        refusals[0]
                    );
                }
                (Some(case.figures(&made)?), plan.budget, None)
            }
            Err(PlanError::Infeasible(no)) => (None, no.budget, Some(no.lowest)),
            Err(defect) => return Err(defect.into()),
        };
        Ok(Self {
            device: case.device().name.clone(),
            planner,
            budget: NamedBudget(asked, budget).to_string(),
            budget_bytes: budget,
            fits: figures.is_some(),
            unplanned_peak_bytes: case.peak(),
            base: case.base(budget),
            figures,
            lowest_bytes,
            planning_s: None,
            took,
        })
    }

    /// The cells around the figures. For a plan that does not fit, the figures are `width` empty
    /// cells.
    fn cells(&self, figures: Option<Vec<String>>, width: usize) -> Vec<String> {
        let mut cells = vec![self.device.clone(), self.budget.clone(), self.planner.to_owned()];
        let lowest = self.lowest_bytes.map(|lowest| format!("no: {lowest}"));
        cells.extend(figures.or(lowest.map(|l| vec![l])).unwrap_or_default());
        cells.resize(3 + width, String::new());
        cells.extend(self.planning_s.map(|_| format!("{:.1?}", self.took)));
        cells
    }
}

/// The bytes of the tensors that a job's plan computes again.
fn recomputed(plan: &JobPlan, graph: &Graph) -> Bytes {
    let kept = plan.events.iter().map(|event| match event {
        Event::Recompute { keep, .. } => &keep[..],
        _ => &[],
    });
    kept.flatten().map(|tensor| graph.tensor(*tensor).bytes).sum()
}

/// The cells of the shares of memory and time.
fn shares(s: &Shares) -> [String; 5] {
    [s.msr, s.msr_no_free, s.eor, s.cbr, s.cbr_no_free].map(|share| format!("{share:.4}"))
}

/// All rows, their drawing, and whether some planner met each budget.
struct Compared<B, F> {
    rows: Vec<Row<B, F>>,
    panels: Vec<Panel>,
    all_met: bool,
}

/// Plans every case at every budget with every planner.
fn compare<C: Case>(
    flags: &Flags,
    cases: &[C],
    methods: &[Vec<Method>],
) -> anyhow::Result<Compared<C::Base, C::Figures>> {
    let budgets = cases
        .iter()
        .map(|case| flags.budgets(case.peak(), case.device()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let all: usize = budgets.iter().map(Vec::len).sum();
    let bar = progress::steps((all * methods.len()) as u64, "plans made");
    let mut done = Compared { rows: Vec::new(), panels: Vec::new(), all_met: true };
    for (case, budgets) in cases.iter().zip(budgets) {
        // Budgets share what a planner plans for other budgets, unless its time is measured.
        let memos: Vec<Memo> = methods.iter().map(|_| Memo::on_all_cores()).collect();
        let mut rows = each(flags, budgets.len() * methods.len(), |index| {
            let (at, of) = (index / methods.len(), index % methods.len());
            bar.set_message(format!("{} on {}", methods[of][0].name(), case.device().name));
            let row = match flags.timing {
                true => Row::new(case, &methods[of], budgets[at], &Memo::on_all_cores()),
                false => Row::new(case, &methods[of], budgets[at], &memos[of]),
            };
            bar.inc(1);
            row
        })?;
        done.all_met &= rows.chunks(methods.len()).all(|of| of.iter().any(|r| r.fits));
        if flags.plot.is_some() {
            done.panels.push(case.panel(&rows, methods));
        }
        done.rows.append(&mut rows);
    }
    bar.finish_and_clear();
    if flags.timing {
        done.rows.iter_mut().for_each(|row| row.planning_s = Some(row.took.as_secs_f64()));
    }
    Ok(done)
}

/// Runs `work(0)` to `work(count - 1)` on all cores, or one after the other where planning is
/// timed.
fn each<T: Send>(
    flags: &Flags,
    count: usize,
    work: impl Fn(usize) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    if flags.timing {
        return (0..count).map(work).collect();
    }
    in_parallel(count, work).into_iter().collect()
}

/// Writes table and drawing.
fn write(
    flags: &Flags,
    columns: &str,
    rows: &[impl Serialize],
    panels: &[Panel],
    ending: &mut Ending,
) {
    let columns: Vec<&str> =
        columns.split(',').chain(flags.timing.then_some("planning_s")).collect();
    ending.file(flags.csv.as_deref(), |path| write_csv(path, &columns, rows));
    ending.file(flags.plot.as_deref(), |path| output::write(path, &frontier::svg(panels)?));
}

/// Writes rows as a table with these columns. A dot in a column's name leads into a nested object.
fn write_csv(path: &Path, columns: &[&str], rows: &[impl Serialize]) -> anyhow::Result<()> {
    let cell = |row: &Value, column: &str| match column.split('.').fold(row, |of, key| &of[key]) {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    let rows = rows.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    let rows = rows.iter().map(|row| columns.iter().map(|column| cell(row, column)));
    output::csv(path, columns.iter().map(|column| column.replace('.', "_")), rows)
}

/// The points of one planner in a drawing.
fn curve<B, F>(rows: &[Row<B, F>], method: &Method, point: impl Fn(&F) -> (Bytes, Nanos)) -> Curve {
    let mine = rows.iter().filter(|r| r.planner == method.name());
    let mut points: Vec<(Bytes, Nanos)> =
        mine.filter_map(|r| r.figures.as_ref()).map(point).collect();
    points.sort_unstable();
    points.dedup();
    Curve { name: method.name().to_owned(), points }
}
