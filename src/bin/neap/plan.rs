//! `neap plan`: a plan within a budget, proved safe before it is written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::ValueEnum as _;
use clap::builder::{OsStringValueParser, TypedValueParser};
use neap::contract::{Event, Plan, Source, json as plan_json};
use neap::job::Graph;
use neap::job::liveness::Liveness;
use neap::plan::bound::Bounds;
use neap::plan::method::SwitchError;
use neap::plan::robust::{self, Robust};
use neap::plan::{self, Method, PlanError, Planned, Request};
use neap::report::table::{Side, Table};
use neap::sim::accounting::{Paper, paper};
use neap::sim::allocator::Config;
use neap::sim::reserved::{self, Framework, Reserved};
use neap::units::{Bytes, Nanos};
use serde_json::{Value, json};

use crate::accounting::{self, Accounting};
use crate::allocator::{self, AllocatorFlags};
use crate::output::{self, Answer, note};
use crate::settings::{self, Budget, DeviceFlags, Site};
use crate::together::{self, JobArg};

/// Find a plan that keeps a job, or several on one device, within a memory budget.
#[derive(clap::Args)]
pub struct Flags {
    /// The job, or several that share the device. FILE@0.5 swaps at most that share of a job's tensors, and lets it give way later.
    #[arg(required = true, value_name = "FILE.graph.json[@SHARE]", value_parser = OsStringValueParser::new().try_map(JobArg::read))]
    pub graphs: Vec<JobArg>,
    #[command(flatten)]
    pub device: DeviceFlags,
    /// Bytes (12GiB), a share of the unplanned peak (60%), or `min`; all that the device offers if not given.
    #[arg(long)]
    pub budget: Option<Budget>,
    /// Where to write the plan; only reported if not given.
    #[arg(short, long, value_name = "FILE.plan.json")]
    pub output: Option<PathBuf>,
    /// Several jobs: let them share bytes that none holds round its iteration's boundary, and wait for them at an operator boundary, where that is quicker
    /// or the only way to meet the budget.
    #[arg(long)]
    pub overlap: bool,
    /// How to look for it.
    #[arg(long, value_enum, default_value_t = Planner::Neap)]
    pub planner: Planner,
    /// Give the papers' peak and time beside the physical ones, which alone the plan keeps to.
    #[arg(long, value_enum, default_value_t = Accounting::Physical)]
    pub accounting: Accounting,
    /// Plan for the 95th percentile of the iteration's time while every latency varies by up to this share, such as 20%.
    #[arg(long, value_name = "P", value_parser = settings::deviation)]
    pub noise: Option<u64>,
    /// With `pytorch` the budget binds what the allocator reserves.
    #[command(flatten)]
    pub allocator: AllocatorFlags,
    #[command(flatten)]
    pub switches: Switches,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Planner {
    /// Swap, recompute or keep, decided together and improved step by step.
    Neap,
    /// vDNN: every layer's feature maps leave during the forward, whatever the budget.
    VdnnAll,
    /// vDNN: convolutions' feature maps only.
    VdnnConv,
    /// Segments of the forward are run again before their backward.
    Checkpoint,
    /// Capuchin: swaps by free time, recomputation by memory saved per second.
    Capuchin,
    /// TENSILE's algorithms 1 to 3, with passive swapping as the last resort.
    Tensile,
}

impl Planner {
    /// With its default switches.
    fn method(self) -> Method {
        self.to_possible_value().and_then(|v| Method::named(v.get_name())).unwrap_or_default()
    }
}

/// The planner's heuristics, each of which can be left out. A field's name is the switch's in the
/// planner's options, behind `no-` where it switches something off.
#[derive(clap::Args, serde::Serialize)]
#[command(next_help_heading = "Planner switches")]
#[serde(rename_all = "kebab-case")]
pub struct Switches {
    /// neap, tensile: Never swap.
    #[arg(long)]
    no_swap: bool,
    /// neap, tensile: Keep parameters and optimizer states on the device round the end of the iteration.
    #[arg(long)]
    no_across: bool,
    /// neap, tensile: Never recompute.
    #[arg(long)]
    no_recompute: bool,
    /// neap, tensile: Never swap what an operator would have to wait for.
    #[arg(long)]
    no_passive: bool,
    /// neap, tensile: Copies run at the last moment even where there is room earlier.
    #[arg(long)]
    no_prefetch: bool,
    /// neap: Recompute only from what is on the device.
    #[arg(long)]
    no_chains: bool,
    /// neap: Each recompute makes one tensor.
    #[arg(long)]
    no_share: bool,
    /// neap: No tensor lives longer for the sake of recomputes.
    #[arg(long)]
    no_extend: bool,
    /// neap: Never take a choice back.
    #[arg(long)]
    no_drop: bool,
    /// neap: Never fall back on another planner's plan.
    #[arg(long)]
    no_portfolio: bool,
    /// neap, several jobs: Plan them in one way only, however they go side by side.
    #[arg(long)]
    no_joint: bool,
    /// neap, several jobs: Never plan for the part of the link that each gets.
    #[arg(long)]
    no_link_share: bool,
    /// neap: How many steps of improvement to make; 16 if not given.
    #[arg(long, value_name = "STEPS")]
    effort: Option<u32>,
    /// tensile: Look for swaps in time for as long as there are any.
    #[arg(long)]
    no_stop_rule: bool,
    /// tensile: The largest share of tensors that may be swapped, in percent; 100 if not given.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    max_swap_rate: Option<u32>,
    /// neap, tensile: Leave tensors below this size on the device while anything else helps; 64KiB if not given.
    #[arg(long, value_name = "BYTES")]
    min_swap: Option<Bytes>,
}

impl Switches {
    /// The planner with its switches, and those that differ from their defaults.
    ///
    /// # Errors
    /// When a switch is given that the planner does not have.
    pub fn resolve(&self, planner: Planner) -> anyhow::Result<(Method, BTreeMap<String, String>)> {
        let given: BTreeMap<String, Value> = serde_json::from_value(serde_json::to_value(self)?)?;
        let mut switches = Vec::new();
        for (flag, value) in &given {
            match value {
                Value::Bool(true) => {
                    switches.push((flag.trim_start_matches("no-"), "false".to_owned()))
                }
                Value::Number(number) => switches.push((flag.as_str(), number.to_string())),
                _ => {}
            }
        }
        let method = planner.method();
        let method = method.with(switches.iter().map(|(k, v)| (*k, v.as_str()))).map_err(|e| {
            let SwitchError::Unknown { switch, .. } = &e else { return anyhow::Error::new(e) };
            let off = format!("no-{switch}");
            let flag = if given.contains_key(&off) { &off } else { switch };
            anyhow::anyhow!(
                "--{flag}: --planner {} has no such switch; leave it away or name another planner",
                method.name()
            )
        })?;
        let changed = method.switches();
        Ok((method, changed))
    }
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let inputs: Vec<&Path> = flags.graphs.iter().map(|g| &*g.path).collect();
    settings::outputs(&flags.device.inputs(&inputs), &[flags.output.as_deref()])?;
    match &flags.graphs[..] {
        [_] if flags.overlap => bail!(
            "--overlap: one job has nobody to share bytes with; leave it away or name more jobs"
        ),
        [job] => one(flags, job, as_json),
        _ => together::main(flags, as_json),
    }
}

fn one(flags: &Flags, job: &JobArg, as_json: bool) -> anyhow::Result<Answer> {
    let mut graph = settings::graph(&job.path)?;
    let Site { device, latencies, libraries, sha256 } = flags.device.resolve(&mut graph)?;
    let liveness = Liveness::of(&graph);
    let budget = flags
        .budget
        .unwrap_or(Budget::Bytes(device.available()))
        .resolve(liveness.peak, &device)?;
    let (method, mut recorded_options) = flags.switches.resolve(flags.planner)?;
    let method = job.limited(method)?;
    recorded_options.extend(job.share.record(None));
    let framework = flags.allocator.resolve(&device)?;
    recorded_options.extend(flags.allocator.record());
    if let Some(share) = flags.noise {
        recorded_options.insert("noise".to_owned(), told_share(share));
    }
    let request = Request {
        graph: &graph,
        file: (graph_path(flags, &job.path)?, sha256),
        device: &device,
        latencies: &latencies,
        budget: budget
            .unwrap_or_else(|| device.available().min(Bytes(liveness.peak.0.saturating_mul(2)))),
        method,
        recorded_options,
    };
    let started = Instant::now();
    let framework = framework.as_ref();
    let made = match (flags.noise, budget) {
        (None, Some(_)) => plan::make_for(&request, framework).map(|p| (p, None)),
        (None, None) => plan::minimum_for(&request, framework).map(|p| (p, None)),
        (Some(share), Some(_)) => robust::make_for(&request, share, framework).map(apart),
        (Some(share), None) => robust::minimum_for(&request, share, framework).map(apart),
    };
    let (mut planned, noise) = match made {
        Ok(made) => made,
        Err(error) => {
            return does_not_fit(
                error,
                &format!("{}: ", job.path.display()),
                liveness.peak,
                as_json,
            );
        }
    };
    let took = started.elapsed();
    planned.plan.jobs[0].libraries = libraries;
    let graphs = [graph];
    prove_and_write(flags, &planned.plan, &graphs)?;
    note(&format!("planned in {took:.1?}"));
    let bounds = Bounds::new(&graphs[0], &latencies, &device.link);
    let papers = match flags.accounting {
        Accounting::Physical => None,
        Accounting::Paper => Some(paper(&graphs[0], &liveness, &planned.program, &device.link)?),
    };
    let reserved = {
        let framework = Framework::on(&device, Config::default());
        reserved::planned(&graphs[0], &planned.program, &planned.run, &framework).settle(&framework)
    };
    let beside = Beside { reserved, papers, noise };
    report(flags, &planned, &liveness, &bounds, &beside, as_json)?;
    Ok(Answer::Yes)
}

/// Says that there is no plan, where that is the answer.
///
/// # Errors
/// What is not an answer but a defect.
pub fn does_not_fit(
    error: PlanError,
    of: &str,
    unplanned_peak: Bytes,
    as_json: bool,
) -> anyhow::Result<Answer> {
    let PlanError::Infeasible(no) = error else { return Err(error.into()) };
    if as_json {
        output::json(&json!({
            "fits": false,
            "budget_bytes": no.budget,
            "floor_bytes": no.floor,
            "lowest_bytes": no.lowest,
            "unplanned_peak_bytes": unplanned_peak,
            "blocked": no.blocked,
        }))?;
    }
    note(&format!("{of}{}", PlanError::Infeasible(no)));
    Ok(Answer::No)
}

/// Proves a plan and writes it where it is wanted: nothing that was refused is ever written.
///
/// # Errors
/// When it is refused, or can't be written.
pub fn prove_and_write(flags: &Flags, plan: &Plan, graphs: &[Graph]) -> anyhow::Result<()> {
    if let Err(refusals) = neap::contract::check::check(plan, graphs) {
        let reasons: Vec<String> = refusals.iter().take(5).map(ToString::to_string).collect();
        bail!(
            "the plan did not pass the checker; this is a defect of neap, please report it with the graphs: {}",
            reasons.join("; ")
        );
    }
    if let Some(output) = &flags.output {
        plan_json::write(output, plan, graphs)?;
    }
    Ok(())
}

/// The graph's path as the plan records it: relative to the plan's folder.
pub fn graph_path(flags: &Flags, graph: &Path) -> anyhow::Result<String> {
    let plan = flags.output.as_deref().unwrap_or(Path::new("job.plan.json"));
    plan_json::relative(plan, graph).with_context(|| {
        format!("{}: cannot be written so that it names {}", plan.display(), graph.display())
    })
}

/// Times of the 95th percentile, with this plan and with the one that does not look at noise.
type Noisy = Option<(Nanos, Option<Nanos>)>;

fn apart(robust: Robust) -> (Planned, Noisy) {
    (robust.planned, Some((robust.p95, robust.before)))
}

/// A share in thousandths of a percent, as a flag says it.
fn told_share(share: u64) -> String {
    let decimals = format!("{}.{:03}", share / 1000, share % 1000);
    format!("{}%", decimals.trim_end_matches('0').trim_end_matches('.'))
}

/// What is reported beside the plan itself.
struct Beside {
    /// What PyTorch's allocator, with its default settings, would hold for it.
    reserved: Reserved,
    papers: Option<Paper>,
    noise: Noisy,
}

fn report(
    flags: &Flags,
    planned: &Planned,
    liveness: &Liveness,
    bounds: &Bounds<'_>,
    beside: &Beside,
    as_json: bool,
) -> anyhow::Result<()> {
    let figures = &planned.plan.figures;
    let Beside { reserved: pytorch, papers, noise } = beside;
    // What no plan can beat: the peak without added time, and the time at this budget.
    let (bound_peak, bound_time) =
        (bounds.peak(Nanos::ZERO), bounds.iteration(planned.plan.budget).unwrap_or_default());
    let job = &planned.plan.jobs[0];
    let count = |f: fn(&Event) -> bool| job.events.iter().filter(|e| f(e)).count();
    let swaps_out = count(|e| matches!(e, Event::SwapOut { .. }));
    let swaps_in = count(|e| matches!(e, Event::SwapIn { .. }));
    let recomputes = count(|e| matches!(e, Event::Recompute { .. }));
    let sources = |s: Source| job.latencies.iter().filter(|l| l.source == s).count();
    if as_json {
        let mut object = serde_json::to_value(figures)?;
        object["fits"] = json!(true);
        object["planner"] = json!(planned.plan.planner);
        object["device"] = json!(planned.plan.device.name);
        object["budget_bytes"] = json!(planned.plan.budget);
        object["floor_bytes"] = json!(liveness.floor);
        object["no_free_bytes"] = json!(liveness.no_free);
        object["bound_bytes"] = json!(bound_peak);
        object["bound_ns"] = json!(bound_time);
        object["swap_outs"] = json!(swaps_out);
        object["swap_ins"] = json!(swaps_in);
        object["recomputes"] = json!(recomputes);
        object["swap_in_stall_ns"] = json!(planned.run.stalls.swap_in);
        object["swap_out_stall_ns"] = json!(planned.run.stalls.swap_out);
        object["tail_stall_ns"] = json!(planned.run.stalls.tail);
        object["latency_sources"] = json!({ "graph": sources(Source::Graph), "measured": sources(Source::Measured), "predicted": sources(Source::Predicted), "roofline": sources(Source::Roofline) });
        object["pytorch"] = allocator::beside_json(pytorch);
        if let Some(papers) = papers {
            object["paper"] = accounting::to_json(papers, figures.unplanned_iteration_ns);
        }
        if let Some((p95, before)) = *noise {
            object["noise"] = json!({ "runs": robust::RUNS, "seed": robust::SEED, "p95_ns": p95, "p95_without_ns": before });
        }
        if let Some(reserved) = &planned.reserved {
            allocator::add_json(&mut object, reserved);
        }
        return output::json(&object);
    }
    let mut table = Table::new(&[
        ("", Side::Left),
        ("unplanned", Side::Right),
        ("planned", Side::Right),
        ("exact", Side::Right),
    ]);
    let bytes = |b: Bytes| b.to_string();
    table.row([
        "peak".to_owned(),
        bytes(figures.unplanned_peak_bytes),
        bytes(figures.peak_bytes),
        figures.peak_bytes.0.to_string(),
    ]);
    table.row([
        "arena".to_owned(),
        String::new(),
        bytes(figures.arena_bytes),
        figures.arena_bytes.0.to_string(),
    ]);
    table.row([
        "budget".to_owned(),
        String::new(),
        bytes(planned.plan.budget),
        planned.plan.budget.0.to_string(),
    ]);
    table.row([
        "floor".to_owned(),
        String::new(),
        bytes(liveness.floor),
        liveness.floor.0.to_string(),
    ]);
    table.row([
        "pinned".to_owned(),
        String::new(),
        bytes(figures.pinned_bytes),
        figures.pinned_bytes.0.to_string(),
    ]);
    table.row([
        "iteration".to_owned(),
        figures.unplanned_iteration_ns.to_string(),
        figures.iteration_ns.to_string(),
        figures.iteration_ns.0.to_string(),
    ]);
    table.row([
        "bound, without added time".to_owned(),
        String::new(),
        bytes(bound_peak),
        bound_peak.0.to_string(),
    ]);
    table.row([
        "bound, at this budget".to_owned(),
        String::new(),
        bound_time.to_string(),
        bound_time.0.to_string(),
    ]);
    let mut text = format!(
        "{table}\n{swaps_out} swap-outs, {swaps_in} swap-ins, {recomputes} recomputes; waiting {} for swap-ins, {} for swap-outs, {} at the end\n\
         latencies: {} measured, {} predicted, {} from the graph, {} by roofline on {}\n",
        planned.run.stalls.swap_in,
        planned.run.stalls.swap_out,
        planned.run.stalls.tail,
        sources(Source::Measured),
        sources(Source::Predicted),
        sources(Source::Graph),
        sources(Source::Roofline),
        planned.plan.device.name,
    );
    if let Some(papers) = papers {
        text += &accounting::told(papers, figures.unplanned_iteration_ns);
    }
    if let Some((p95, before)) = *noise {
        let beside = before
            .map_or_else(String::new, |b| format!(", {b} if planned without regard to noise"));
        text += &format!("under noise: p95 {p95} of {} runs{beside}\n", robust::RUNS);
    }
    if let Some(reserved) = &planned.reserved {
        text += &allocator::told(reserved);
        text += "\n";
    } else {
        text += &allocator::beside(pytorch);
    }
    output::data(&text)?;
    if let Some(output) = &flags.output {
        note(&format!("written: {}", output.display()));
    }
    Ok(())
}
