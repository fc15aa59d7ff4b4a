//! `neap simulate`: what a plan does to time and memory, without doing it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::bail;
use neap::contract::{Latency, Plan};
use neap::device::Profile;
use neap::device::latency::{Row, Table as LatencyTable};
use neap::device::library::Chosen;
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::report::curve::{Curve, Line, svg};
use neap::report::table::{Side, Table};
use neap::report::timeline::{Span, Value, Writer};
use neap::sim::accounting::{Extra, Paper, paper};
use neap::sim::allocator::Config;
use neap::sim::engine::{self, Durations, Run};
use neap::sim::noise::{Noise, percentile};
use neap::sim::passive::{self, Passive};
use neap::sim::program::{Direction, Program};
use neap::sim::recording;
use neap::sim::reserved::{self, Framework, Reserved};
use neap::units::{Bytes, Nanos, OpId};
use serde_json::json;

use crate::accounting::{self, Accounting, cbr};
use crate::allocator::{self, AllocatorFlags};
use crate::arrivals;
use crate::beside;
use crate::output::{self, Answer, note};
use crate::settings::{self, Budget, DeviceFlags, Site, Subject};

/// Simulate a plan, or a job without one.
#[derive(clap::Args)]
pub struct Flags {
    /// A *.plan.json, or a *.graph.json to simulate without a plan.
    #[arg(required_unless_present = "arrivals", conflicts_with = "arrivals")]
    subject: Option<PathBuf>,
    /// Jobs that come and go, planned anew together at each launch and end: a table with the columns graph, submit_s, iterations.
    #[arg(long, value_name = "JOBS.csv", conflicts_with_all = ["graph", "allocator", "accounting", "real", "passive", "noise", "timeline", "latencies_out", "snapshot"])]
    arrivals: Option<PathBuf>,
    /// With --arrivals: what all jobs together may take, as bytes or a share of the sum of their peaks; the whole device if not given.
    #[arg(long, requires = "arrivals")]
    budget: Option<Budget>,
    /// The plan's graph, in place of the path that the plan records.
    #[arg(long, value_name = "FILE.graph.json")]
    graph: Vec<PathBuf>,
    /// For a graph without a plan.
    #[command(flatten)]
    device: DeviceFlags,
    #[command(flatten)]
    allocator: AllocatorFlags,
    /// Give the papers' peak and time beside the physical ones.
    #[arg(long, value_enum, default_value_t = Accounting::Physical)]
    accounting: Accounting,
    /// What operators really take, as a table of latencies: the plan runs at these, not at those it was made for.
    #[arg(long, value_name = "FILE.csv")]
    real: Option<PathBuf>,
    /// For a graph: also one iteration within this budget that evicts the least recently used on demand, blocking.
    #[arg(long, value_name = "BUDGET")]
    passive: Option<Budget>,
    /// Let every latency vary by up to this share, such as 20%.
    #[arg(long, value_name = "P", value_parser = settings::deviation)]
    noise: Option<u64>,
    /// Where the noise starts.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "noise")]
    seed: u64,
    /// How many noisy iterations.
    #[arg(long, value_name = "N", default_value_t = 1000, requires = "noise", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    runs: u32,
    /// For a plan of several jobs, which run side by side: how many iterations of each; 10 if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iterations: Option<u32>,
    /// Draw memory over time, without and with the plan.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write compute, copies and memory for ui.perfetto.dev.
    #[arg(long, value_name = "FILE.json")]
    timeline: Option<PathBuf>,
    /// Write what PyTorch's allocator would do as a memory snapshot of PyTorch, to open with memory_viz (pytorch.org/memory_viz).
    #[arg(long, value_name = "FILE.pickle")]
    snapshot: Option<PathBuf>,
    /// Write the latencies that it went by, as a table for --latencies.
    #[arg(long, value_name = "FILE.csv")]
    latencies_out: Option<PathBuf>,
}

impl Flags {
    /// What is simulated.
    fn subject(&self) -> &Path {
        self.subject.as_deref().unwrap_or(Path::new(""))
    }

    /// Refuses what is for one job.
    fn only_side_by_side(&self, jobs: usize) -> anyhow::Result<()> {
        for (given, flag) in [
            (self.noise.is_some(), "--noise"),
            (self.real.is_some(), "--real"),
            (self.accounting != Accounting::Physical, "--accounting paper"),
            (self.allocator.is_pytorch(), "--allocator pytorch"),
            (self.timeline.is_some(), "--timeline"),
            (self.latencies_out.is_some(), "--latencies-out"),
            (self.snapshot.is_some(), "--snapshot"),
        ] {
            if given {
                bail!(
                    "{flag}: {} is a plan of {jobs} jobs, and this is for one; leave it away",
                    self.subject().display()
                );
            }
        }
        Ok(())
    }
}

/// What is simulated, with everything the reports need.
struct Subjects {
    graph: Graph,
    device: Profile,
    latencies: Vec<Latency>,
    libraries: BTreeMap<OpId, Chosen>,
    plan: Option<Plan>,
    liveness: Liveness,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    if flags.iterations.is_some() && flags.arrivals.is_some() {
        bail!("--iterations: the table says how many iterations each job runs; leave it away");
    }
    if flags.budget.is_some() && flags.arrivals.is_none() {
        bail!("--budget: is for --arrivals; a plan keeps to its own, and a graph has none");
    }
    if let Some(table) = &flags.arrivals {
        return arrivals::main(table, &flags.device, flags.budget, flags.plot.as_deref(), as_json);
    }
    let outputs =
        [&flags.plot, &flags.timeline, &flags.latencies_out, &flags.snapshot].map(Option::as_deref);
    let mut inputs = flags.device.inputs(&settings::subject_files(flags.subject(), &flags.graph));
    inputs.extend(flags.real.as_deref());
    settings::outputs(&inputs, &outputs)?;
    let mut subject = match settings::subject(flags.subject(), &flags.graph, &outputs)? {
        Subject::Graph(mut graph) => {
            let Site { device, latencies, libraries, .. } = flags.device.resolve(&mut graph)?;
            if flags.real.is_some() {
                bail!(
                    "--real: {} is a graph; give its latencies with --latencies",
                    flags.subject().display()
                );
            }
            Subjects {
                liveness: Liveness::of(&graph),
                graph: *graph,
                device,
                latencies,
                libraries,
                plan: None,
            }
        }
        Subject::Plan(plan, mut graphs) => {
            flags.device.not_with_a_plan(flags.subject())?;
            if flags.passive.is_some() {
                bail!(
                    "--passive: {} is a plan, and passive mode has none; name its graph instead",
                    flags.subject().display()
                );
            }
            if !settings::checked(flags.subject(), &plan, &graphs)? {
                return Ok(Answer::No);
            }
            if plan.jobs.len() > 1 {
                flags.only_side_by_side(plan.jobs.len())?;
                flags.allocator.resolve(&plan.device)?;
                return beside::main(
                    &plan,
                    &graphs,
                    flags.iterations.unwrap_or(10),
                    flags.plot.as_deref(),
                    as_json,
                );
            }
            let (latencies, libraries) =
                (plan.jobs[0].latencies.clone(), plan.jobs[0].libraries.clone());
            let graph = graphs.remove(0);
            Subjects {
                liveness: Liveness::of(&graph),
                graph,
                device: plan.device.clone(),
                latencies,
                libraries,
                plan: Some(*plan),
            }
        }
    };
    let framework = flags.allocator.resolve(&subject.device)?;
    if let (Some(real), Some(plan)) = (&flags.real, &mut subject.plan) {
        // Its proof holds at any latencies.
        subject.latencies = settings::latencies(&subject.graph, &subject.device, Some(real))?;
        plan.jobs[0].latencies.clone_from(&subject.latencies);
    }
    let program = match &subject.plan {
        Some(plan) => Program::placed(&subject.graph, &plan.jobs[0])?,
        None => Program::new(&subject.graph, &subject.latencies, &[])?,
    };
    let link = &subject.device.link;
    let nominal = Durations::nominal(&program, link);
    let run = engine::run(&program, link, &nominal)?;
    let mut curve = engine::memory(&program, &run);
    // There every residency ends; in the next iteration they go on.
    curve.retain(|point| point.0 < run.iteration);
    let noise = flags
        .noise
        .map(|share| {
            noisy(&program, &subject, &nominal, Noise { share, seed: flags.seed }, flags.runs)
        })
        .transpose()?;
    let counted = framework.is_some();
    let framework = framework.unwrap_or_else(|| Framework::on(&subject.device, Config::default()));
    let requests = match &subject.plan {
        Some(_) => reserved::planned(&subject.graph, &program, &run, &framework),
        None => reserved::unplanned(&subject.graph, &run, &framework),
    };
    let beside = requests.settle(&framework);
    let reserved = counted.then_some(&beside);
    let papers = match flags.accounting {
        Accounting::Physical => None,
        Accounting::Paper => Some(paper(&subject.graph, &subject.liveness, &program, link)?),
    };
    let extra = Extra::of(&program, link, run.iteration)?;
    let passive = match flags.passive {
        None => None,
        Some(budget) => match on_demand(&subject, budget)? {
            None => return Ok(Answer::No),
            some => some,
        },
    };
    if let Some(path) = &flags.plot {
        plot(path, flags, &subject, &run, &curve, reserved)?;
    }
    if let Some(path) = &flags.latencies_out {
        let row = |(index, (o, l)): (_, (_, &Latency))| {
            Row::of(o, &subject.device.name, l.time).by(subject.libraries.get(&OpId::of(index)))
        };
        let rows = subject.graph.operators.iter().zip(&subject.latencies).enumerate().map(row);
        LatencyTable::write(path, &rows.collect::<Vec<Row>>())?;
        note(&format!("written: {}", path.display()));
    }
    if let Some(path) = &flags.snapshot {
        let conf = flags.allocator.alloc_conf();
        neap::files::write(path, |mut out| {
            let of = &subject.graph;
            recording::write(&mut out, of, &requests, &framework, conf, beside.iterations)
        })?;
        note(&format!("written: {}", path.display()));
    }
    if let Some(path) = &flags.timeline {
        timeline(path, &subject, &program, &run, &curve)?;
    }
    let more = More {
        noise: noise.as_ref(),
        reserved,
        beside: &beside,
        papers: papers.as_ref(),
        passive,
        extra,
    };
    report(&subject, &run, &curve, &more, as_json)?;
    Ok(if reserved.is_some_and(|r| r.stats.ooms > 0) { Answer::No } else { Answer::Yes })
}

/// Sorted iteration times and the largest peak of the noisy runs.
struct Noisy {
    times: Vec<Nanos>,
    peak: Bytes,
    late: u64,
}

fn noisy(
    program: &Program,
    subject: &Subjects,
    nominal: &Durations,
    noise: Noise,
    runs: u32,
) -> anyhow::Result<Noisy> {
    let link = &subject.device.link;
    let mut all = Noisy { times: Vec::with_capacity(runs as usize), peak: Bytes::ZERO, late: 0 };
    for index in 0..runs {
        let run = engine::run(program, link, &noise.apply(nominal, u64::from(index)))?;
        all.peak = all.peak.max(engine::peak(&engine::memory(program, &run)));
        all.late += u64::from(run.late_copies);
        all.times.push(run.iteration);
    }
    all.times.sort_unstable();
    if let Some(plan) = &subject.plan
        && all.peak > plan.budget
    {
        bail!(
            "a noisy run reached {} of a budget of {}; this is a defect of neap, please report it",
            all.peak,
            plan.budget
        );
    }
    Ok(all)
}

/// One iteration in passive mode, with its budget; `None`, and the reason said, where an operator alone exceeds that.
fn on_demand(subject: &Subjects, budget: Budget) -> anyhow::Result<Option<(Bytes, Passive)>> {
    let budget =
        budget.resolve(subject.liveness.peak, &subject.device)?.unwrap_or(subject.liveness.floor);
    match passive::run(&subject.graph, &subject.latencies, &subject.device.link, budget) {
        Ok(passive) => Ok(Some((budget, passive))),
        Err(small) => {
            let name = &subject.graph.operator(small.operator).name;
            note(&format!(
                "--passive: {budget} is too small: `{name}` needs {} ({} bytes) at once",
                small.needed, small.needed.0
            ));
            Ok(None)
        }
    }
}

/// The unplanned curve over the operators' nominal times, from liveness.
fn unplanned_curve(subject: &Subjects) -> Vec<(Nanos, Bytes)> {
    let liveness = &subject.liveness;
    let mut points = Vec::with_capacity(liveness.resident.len() + 1);
    let mut now = Nanos::ZERO;
    for (bytes, latency) in liveness.resident.iter().zip(&subject.latencies) {
        points.push((now, *bytes));
        now += latency.time;
    }
    points.push((now, liveness.resident.last().copied().unwrap_or_default()));
    points
}

fn plot(
    path: &Path,
    flags: &Flags,
    subject: &Subjects,
    run: &Run,
    curve: &[(Nanos, Bytes)],
    reserved: Option<&Reserved>,
) -> anyhow::Result<()> {
    let before = unplanned_curve(subject);
    let mut after = curve.to_vec();
    let last = after.last().map_or(Bytes::ZERO, |p| p.1);
    after.push((run.iteration, last));
    let (held, used, name): (Vec<_>, Vec<_>, String);
    let mut curves = vec![Curve { name: "without a plan", points: &before }];
    let mut lines = Vec::new();
    if let Some(plan) = &subject.plan {
        curves.push(Curve { name: "with the plan", points: &after });
        lines.push(Line { name: "budget", value: plan.budget });
    }
    lines.push(Line { name: "floor", value: subject.liveness.floor });
    if let Some(reserved) = reserved {
        // What lies between the two is fragmentation.
        held = reserved.curve.iter().map(|(at, reserved, _)| (*at, *reserved)).collect();
        used = reserved.curve.iter().map(|(at, _, allocated)| (*at, *allocated)).collect();
        name = format!("reserved, {} segments", reserved.at_peak.segments);
        curves.extend([
            Curve { name: &name, points: &held },
            Curve { name: "allocated", points: &used },
        ]);
    }
    let title = format!("{} on {}", subject.graph.name, subject.device.name);
    let drawing = svg(&title, &curves, &lines)?;
    neap::files::write(path, |f| f.write_all(drawing.as_bytes()))?;
    note(&format!("written: {} ({})", path.display(), flags.subject().display()));
    Ok(())
}

fn timeline(
    path: &Path,
    subject: &Subjects,
    program: &Program,
    run: &Run,
    curve: &[(Nanos, Bytes)],
) -> anyhow::Result<()> {
    neap::files::write(path, |f| {
        let mut writer = Writer::new(f)?;
        let (process, [compute, h2d, d2h]) =
            writer.process(&subject.graph.name, ["compute", "h2d", "d2h"])?;
        for (step, &(start, end)) in program.steps.iter().zip(&run.steps) {
            let operator = subject.graph.operator(step.operator);
            let again = if step.event.is_some() { "recompute" } else { "operator" };
            let args = [("kind", Value::Text(&operator.kind)), ("as", Value::Text(again))];
            writer.span(
                compute,
                &Span { name: &operator.name, start, duration: end - start, args: &args },
            )?;
        }
        for (copy, &(start, end)) in program.copies.iter().zip(&run.copies) {
            let track = if copy.direction == Direction::H2d { h2d } else { d2h };
            let args = [("bytes", Value::Number(copy.bytes.0))];
            writer.span(
                track,
                &Span {
                    name: &subject.graph.tensor(copy.tensor).name,
                    start,
                    duration: end - start,
                    args: &args,
                },
            )?;
        }
        for &(at, bytes) in curve {
            match &subject.plan {
                Some(plan) => writer.counter(
                    process,
                    "memory",
                    at,
                    &[("resident_bytes", bytes.0), ("budget_bytes", plan.budget.0)],
                )?,
                None => writer.counter(process, "memory", at, &[("resident_bytes", bytes.0)])?,
            }
        }
        writer.finish().map(|_| ())
    })?;
    note(&format!("written: {}", path.display()));
    Ok(())
}

/// `part / whole` to four decimals; 0 for an empty whole.
pub fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (u128::from(part) * 10_000 / u128::from(whole)) as f64 / 10_000.0 }
}

/// What was asked for besides, and where extra time comes from.
struct More<'a> {
    noise: Option<&'a Noisy>,
    /// What PyTorch's allocator reserves, where that is what counts.
    reserved: Option<&'a Reserved>,
    /// The same in any case.
    beside: &'a Reserved,
    papers: Option<&'a Paper>,
    passive: Option<(Bytes, Passive)>,
    extra: Extra,
}

fn report(
    subject: &Subjects,
    run: &Run,
    curve: &[(Nanos, Bytes)],
    more: &More<'_>,
    as_json: bool,
) -> anyhow::Result<()> {
    let &More { noise, reserved, beside, papers, passive, extra } = more;
    let liveness = &subject.liveness;
    let peak = if subject.plan.is_some() { engine::peak(curve) } else { liveness.peak };
    let unplanned: Nanos = subject.latencies.iter().map(|l| l.time).sum();
    let saving = |baseline: Bytes| ratio(baseline.saturating_sub(peak).0, baseline.0);
    let (msr, msr_no_free, eor) =
        (saving(liveness.peak), saving(liveness.no_free), ratio(run.iteration.0, unplanned.0));
    let figures = subject.plan.as_ref().map(|p| p.figures);
    if as_json {
        let mut object = json!({
            "peak_bytes": peak,
            "iteration_ns": run.iteration,
            "unplanned_peak_bytes": liveness.peak,
            "unplanned_iteration_ns": unplanned,
            "no_free_bytes": liveness.no_free,
            "floor_bytes": liveness.floor,
            "late_copies": run.late_copies,
            "swap_in_stall_ns": run.stalls.swap_in,
            "swap_out_stall_ns": run.stalls.swap_out,
            "tail_stall_ns": run.stalls.tail,
            "msr": msr, "msr_no_free": msr_no_free, "eor": eor, "cbr": cbr(msr, eor), "cbr_no_free": cbr(msr_no_free, eor),
            "extra": accounting::extra_json(&extra),
        });
        object["pytorch"] = allocator::beside_json(beside);
        if let Some(papers) = papers {
            object["paper"] = accounting::to_json(papers, unplanned);
        }
        if let Some((budget, passive)) = passive {
            object["passive"] = json!({
                "budget_bytes": budget,
                "peak_bytes": passive.peak,
                "iteration_ns": passive.iteration,
                "eor": ratio(passive.iteration.0, unplanned.0),
                "swap_out_stall_ns": passive.out,
                "swap_in_stall_ns": passive.back,
                "evictions": passive.evictions,
                "evicted_bytes": passive.evicted,
                "fetched_bytes": passive.fetched,
            });
        }
        if let (Some(plan), Some(figures)) = (&subject.plan, figures) {
            object["budget_bytes"] = json!(plan.budget);
            object["arena_bytes"] = json!(figures.arena_bytes);
            object["pinned_bytes"] = json!(figures.pinned_bytes);
            object["first_iteration_ns"] = json!(figures.first_iteration_ns);
        }
        if let Some(reserved) = reserved {
            allocator::add_json(&mut object, reserved);
        }
        if let Some(noise) = noise {
            object["noise"] = json!({
                "runs": noise.times.len(),
                "p50_ns": percentile(&noise.times, 50),
                "p95_ns": percentile(&noise.times, 95),
                "p99_ns": percentile(&noise.times, 99),
                "peak_bytes": noise.peak,
                "late_copies": noise.late,
            });
        }
        return output::json(&object);
    }
    let mut table =
        Table::new(&[("", Side::Left), ("without a plan", Side::Right), ("with", Side::Right)]);
    table.row(["peak".to_owned(), liveness.peak.to_string(), peak.to_string()]);
    table.row(["iteration".to_owned(), unplanned.to_string(), run.iteration.to_string()]);
    let mut text = format!("{table}\n");
    text += &format!(
        "memory saving MSR {msr:.4} against liveness, {msr_no_free:.4} against freeing nothing; time ratio EOR {eor:.4}; CBR {:.4} and {:.4}\n",
        cbr(msr, eor),
        cbr(msr_no_free, eor)
    );
    if let Some(papers) = papers {
        text += &accounting::told(papers, unplanned);
    }
    text += &format!(
        "waiting: {} for swap-ins, {} for swap-outs, {} at the end; {} late copies\n",
        run.stalls.swap_in, run.stalls.swap_out, run.stalls.tail, run.late_copies
    );
    if extra.total() != 0 {
        let sign = if extra.contention < 0 { "-" } else { "" };
        let contention = Nanos(u64::try_from(extra.contention.unsigned_abs()).unwrap_or(u64::MAX));
        text += &format!(
            "extra time: {} recomputing; waiting {} for swap-ins, {} for swap-outs, {} at the end without contention on the link; {sign}{contention} contention\n",
            extra.recompute, extra.swap_in, extra.swap_out, extra.tail
        );
    }
    if let Some((budget, passive)) = passive {
        text += &format!(
            "passive within {budget}: {}, of that {} for {} evictions ({} copied) and {} for fetches ({})\n",
            passive.iteration,
            passive.out,
            passive.evictions,
            passive.evicted,
            passive.back,
            passive.fetched
        );
    }
    if let Some(reserved) = reserved {
        text += &allocator::told(reserved);
        text += "\n";
    } else {
        text += &allocator::beside(beside);
    }
    if let Some(noise) = noise {
        text += &format!(
            "{} noisy runs: p50 {}, p95 {}, p99 {}; largest peak {}; {} late copies\n",
            noise.times.len(),
            percentile(&noise.times, 50),
            percentile(&noise.times, 95),
            percentile(&noise.times, 99),
            noise.peak,
            noise.late
        );
    }
    output::data(&text)
}
