//! An estimate as text and as JSON.

use std::collections::BTreeMap;

use neap::estimate::answer::MARGIN_PER_MILLE;
use neap::estimate::attribution::{Places, Usage};
use neap::estimate::gpu::Rule;
use neap::estimate::roles::Role;
use neap::estimate::truth::{Truth, error_percent};
use neap::report::table::{Side, Table};
use neap::units::Bytes;
use serde::Serialize;

use super::{Estimate, HEADLINE, Judged};

/// An assumption of the estimate.
struct Assumption {
    rule: &'static str,
    text: String,
    blocks: u64,
    added: u64,
    removed: u64,
}

impl Judged {
    /// Bytes left on the device beside the peak and its margin; negative when memory is missing.
    fn spare(&self) -> i64 {
        self.available.0 as i64 - self.wanted.0 as i64
    }
}

/// Bytes at the allocated peak by role. They add up to the bytes that are reserved then.
fn at_peak(estimate: &Estimate<'_>) -> Vec<(&'static str, u64)> {
    let answer = &estimate.answer;
    let mut all: Vec<_> =
        Role::ALL.iter().map(|r| (r.name(), answer.by_role.get(r).copied().unwrap_or(0))).collect();
    all.push(("rounding", answer.at_peak.allocated.saturating_sub(answer.at_peak.requested).0));
    all.push(("cached", answer.at_peak.fragmentation().0));
    all
}

fn words(name: &str) -> String {
    name.replace('_', " ")
}

fn assumptions(estimate: &Estimate<'_>) -> Vec<Assumption> {
    let (answer, forecast, target) = (&estimate.answer, &estimate.forecast, estimate.target);
    let plain = |rule, text| Assumption { rule, text, blocks: 0, added: 0, removed: 0 };
    let mut all = Vec::new();
    for (&role, &bytes) in &forecast.before {
        let blocks = forecast.blocks.iter().filter(|b| b.before && b.role == role).count() as u64;
        let text = format!("{} that stood before the trace began", words(role.name()));
        all.push(Assumption { rule: Rule::Before.name(), text, blocks, added: bytes, removed: 0 });
    }
    for (rule, effect) in &forecast.effects {
        let (added, removed) = (effect.added, effect.removed);
        all.push(Assumption {
            rule: rule.name(),
            text: rule.does().to_owned(),
            blocks: effect.blocks,
            added,
            removed,
        });
    }
    if forecast.effects.contains_key(&Rule::Attention) {
        let text = "half precision by a fused kernel, as from Ampere on; before, bfloat16 makes the whole matrix of scores";
        all.push(plain(Rule::Attention.name(), text.to_owned()));
    }
    for rule in &estimate.settings.without {
        all.push(plain(rule.name(), format!("left out (--without): {}", rule.does())));
    }
    if estimate.settings.cudnn_workspace == 0 {
        all.push(plain(
            Rule::Cudnn.name(),
            "no workspace for cuDNN (--cudnn-workspace says how much)".to_owned(),
        ));
    }
    let repeated = forecast.starts.len().saturating_sub(answer.recorded);
    if repeated > 0 {
        let text = format!(
            "the trace has {} iterations; {repeated} more are taken to be like its last whole one",
            answer.recorded
        );
        all.push(plain("iterations", text));
    }
    if !answer.steady {
        all.push(plain(
            "iterations",
            "what is reserved still grew in the last iteration".to_owned(),
        ));
    }
    let class = target.class;
    let (name, reserve) = (&target.profile.name, target.profile.reserve_bytes);
    let said = if target.said { "" } else { ", as its profile says nothing of multiprocessors" };
    let (capability, count, threads) = (class.capability, class.multiprocessors, class.threads);
    let text = format!(
        "kernels of {name}: compute capability {capability}, {count} multiprocessors of {threads} threads{said}"
    );
    all.push(plain("class", text));
    all.push(plain("context", format!("{reserve} of {name} for the context, outside all figures")));
    let (tenths, margin) = (MARGIN_PER_MILLE, answer.margin().0);
    let text = format!(
        "{}.{} % of the peak on top, for what estimates were seen to miss",
        tenths / 10,
        tenths % 10
    );
    all.push(Assumption { rule: "margin", text, blocks: 0, added: margin, removed: 0 });
    all.extend(forecast.notes.iter().map(|note| plain("trace", note.clone())));
    all
}

/// A block at the peak.
struct Top<'a> {
    bytes: u64,
    role: Role,
    operator: &'a str,
    module: String,
    rule: Option<&'static str>,
}

fn top_blocks<'a>(estimate: &'a Estimate<'_>, places: &Places<'a>, count: usize) -> Vec<Top<'a>> {
    let blocks = &estimate.forecast.blocks;
    let mut largest = estimate.answer.alive.clone();
    largest.sort_by_key(|&id| (std::cmp::Reverse(blocks[id as usize].bytes), id));
    largest.truncate(count);
    let top = |id: u32| {
        let block = blocks[id as usize];
        Top {
            bytes: block.bytes,
            role: block.role,
            operator: block.op.map_or("", |op| places.operator(op)),
            module: block
                .op
                .and_then(|op| places.module(op))
                .map(|m| places.path(m))
                .unwrap_or_default(),
            rule: block.rule,
        }
    };
    largest.into_iter().map(top).collect()
}

/// A job's forecast.
#[derive(Serialize)]
pub struct Report<'a> {
    file: String,
    device: &'a str,
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
    margin_bytes: Bytes,
    smallest_device_bytes: Option<Bytes>,
    peak_iteration: usize,
    peak_phase: &'static str,
    /// Bytes at the allocated peak by role.
    at_peak: BTreeMap<String, u64>,
    verdicts: Vec<VerdictReport<'a>>,
    top_blocks: Vec<BlockReport<'a>>,
    assumptions: Vec<AssumptionReport>,
    iterations: Vec<IterationReport>,
    recorded_iterations: usize,
    steady: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    truth: Option<TruthReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    modules: Option<Vec<ModuleReport>>,
}

#[derive(Serialize)]
struct VerdictReport<'a> {
    device: &'a str,
    available_bytes: Bytes,
    verdict: &'static str,
    /// Negative where memory is missing.
    spare_bytes: i64,
}

#[derive(Serialize)]
struct BlockReport<'a> {
    bytes: u64,
    role: &'static str,
    operator: &'a str,
    module: String,
    rule: Option<&'static str>,
}

#[derive(Serialize)]
struct AssumptionReport {
    rule: &'static str,
    text: String,
    blocks: u64,
    added_bytes: u64,
    removed_bytes: u64,
}

#[derive(Serialize)]
struct IterationReport {
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
}

#[derive(Serialize)]
struct TruthReport {
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
    reserved_error_percent: f64,
    allocated_error_percent: f64,
}

#[derive(Serialize)]
struct ModuleReport {
    module: String,
    calls: u64,
    activation_bytes: u64,
    temporary_bytes: u64,
    gradient_bytes: u64,
    at_peak_bytes: u64,
}
impl<'a> Report<'a> {
    pub fn new(
        estimate: &'a Estimate<'_>,
        places: &Places<'a>,
        top: usize,
        by_module: bool,
    ) -> Self {
        let Estimate { answer, forecast, .. } = estimate;
        let block = |b: Top<'a>| BlockReport {
            bytes: b.bytes,
            role: b.role.name(),
            operator: b.operator,
            module: b.module,
            rule: b.rule,
        };
        let assumption = |a: Assumption| AssumptionReport {
            rule: a.rule,
            text: a.text,
            blocks: a.blocks,
            added_bytes: a.added,
            removed_bytes: a.removed,
        };
        let verdict = |j: &'a Judged| VerdictReport {
            device: &j.device,
            available_bytes: j.available,
            verdict: j.verdict.name(),
            spare_bytes: j.spare(),
        };
        let iteration = |&(peak_reserved_bytes, peak_allocated_bytes): &(Bytes, Bytes)| {
            IterationReport { peak_reserved_bytes, peak_allocated_bytes }
        };
        let (reserved, allocated) = (answer.stats.peak_reserved, answer.stats.peak_allocated);
        let truth = estimate.truth.as_ref().map(|truth| TruthReport {
            peak_reserved_bytes: truth.reserved,
            peak_allocated_bytes: truth.allocated,
            reserved_error_percent: error_percent(reserved, truth.reserved),
            allocated_error_percent: error_percent(allocated, truth.allocated),
        });
        let at_peak = at_peak(estimate).into_iter();
        let modules = || places.by_module(forecast, answer).into_iter().map(ModuleReport::new);
        Self {
            file: estimate.file.display().to_string(),
            device: &estimate.target.profile.name,
            peak_reserved_bytes: reserved,
            peak_allocated_bytes: allocated,
            margin_bytes: answer.margin(),
            smallest_device_bytes: answer.smallest,
            peak_iteration: answer.peak_iteration(forecast),
            peak_phase: places.phase(forecast, answer),
            at_peak: at_peak.map(|(name, bytes)| (format!("{name}_bytes"), bytes)).collect(),
            verdicts: estimate.judged.iter().map(verdict).collect(),
            top_blocks: top_blocks(estimate, places, top).into_iter().map(block).collect(),
            assumptions: assumptions(estimate).into_iter().map(assumption).collect(),
            iterations: answer.iterations.iter().skip(1).map(iteration).collect(),
            recorded_iterations: answer.recorded,
            steady: answer.steady,
            truth,
            modules: by_module.then(|| modules().collect()),
        }
    }
}

impl ModuleReport {
    fn new(usage: Usage) -> Self {
        Self {
            module: usage.module,
            calls: usage.calls,
            activation_bytes: usage.activations,
            temporary_bytes: usage.largest_temporary,
            gradient_bytes: usage.gradients,
            at_peak_bytes: usage.at_peak,
        }
    }
}

/// The end of a path, which may be too long for a table.
fn tail(path: &str) -> String {
    const LONGEST: usize = 60;
    let count = path.chars().count();
    if count <= LONGEST {
        path.to_owned()
    } else {
        format!("…{}", path.chars().skip(count - LONGEST + 1).collect::<String>())
    }
}

/// The tables of an estimate, one below the other.
pub fn text(estimate: &Estimate<'_>, places: &Places<'_>, top: usize) -> String {
    let mut parts = vec![figures(estimate).to_string()];
    if let Some(truth) = &estimate.truth {
        parts.push(against(truth, estimate).to_string());
    }
    parts.push(format!(
        "{}left: beside the peak and its margin; tight: runs without all of it\n",
        verdicts(estimate)
    ));
    parts.push(roles_at_peak(estimate, places).to_string());
    let blocks = largest(estimate, places, top);
    if !blocks.is_empty() {
        parts.push(blocks.to_string());
    }
    parts.push(format!(
        "{}added and left out: summed over blocks, which are not all there at once\n",
        assumed(estimate)
    ));
    if estimate.target.profile.name == HEADLINE && estimate.judged.len() > 1 {
        parts.push(format!(
            "figures of {HEADLINE}; each device's verdict is of a forecast with its own workspaces and \
             multiprocessors, if the job runs the same operators there\n"
        ));
    }
    parts.join("\n").trim_end().to_owned()
}

fn figures(estimate: &Estimate<'_>) -> Table {
    let Estimate { answer, target, .. } = estimate;
    let mut figures = Table::new(&[
        (&format!("{} on {}", estimate.file.display(), target.profile.name), Side::Left),
        ("", Side::Right),
        ("bytes", Side::Right),
    ]);
    let figure =
        |name: &str, bytes: Bytes| [name.to_owned(), bytes.to_string(), bytes.0.to_string()];
    figures.row(figure("peak reserved", answer.stats.peak_reserved));
    figures.row(figure("peak allocated", answer.stats.peak_allocated));
    figures.row(figure("margin", answer.margin()));
    match answer.smallest {
        Some(bytes) => figures.row(figure("smallest device, for the job alone", bytes)),
        None => figures.row(["smallest device, for the job alone", "none"]),
    };
    figures
}

fn against(truth: &Truth, estimate: &Estimate<'_>) -> Table {
    let answer = &estimate.answer;
    let mut table = Table::new(&[
        ("against the truth", Side::Left),
        ("really", Side::Right),
        ("error", Side::Right),
    ]);
    for (name, estimate, truth) in [
        ("peak reserved", answer.stats.peak_reserved, truth.reserved),
        ("peak allocated", answer.stats.peak_allocated, truth.allocated),
    ] {
        table.row([
            name.to_owned(),
            truth.0.to_string(),
            format!("{:+.2} %", error_percent(estimate, truth)),
        ]);
    }
    table
}

fn verdicts(estimate: &Estimate<'_>) -> Table {
    let mut verdicts = Table::new(&[
        ("device", Side::Left),
        ("available", Side::Right),
        ("verdict", Side::Left),
        ("left", Side::Right),
    ]);
    for judged in &estimate.judged {
        let spare = judged.spare();
        let left = format!("{}{}", if spare < 0 { "-" } else { "" }, Bytes(spare.unsigned_abs()));
        verdicts.row([
            judged.device.clone(),
            judged.available.to_string(),
            judged.verdict.name().to_owned(),
            left,
        ]);
    }
    verdicts
}

fn roles_at_peak(estimate: &Estimate<'_>, places: &Places<'_>) -> Table {
    let Estimate { answer, forecast, .. } = estimate;
    let (iteration, of) = (answer.peak_iteration(forecast), forecast.starts.len());
    let phase = places.phase(forecast, answer);
    let when = if iteration == 0 {
        phase.to_owned()
    } else {
        format!("iteration {iteration} of {of}, {phase}")
    };
    let mut roles =
        Table::new(&[(&format!("at the allocated peak ({when})"), Side::Left), ("", Side::Right)]);
    for (name, bytes) in at_peak(estimate).into_iter().filter(|(_, b)| *b > 0) {
        let name = if name == "cached" { "cached and not in use".to_owned() } else { words(name) };
        roles.row([name, Bytes(bytes).to_string()]);
    }
    roles
}

fn largest(estimate: &Estimate<'_>, places: &Places<'_>, top: usize) -> Table {
    let mut blocks = Table::new(&[
        ("largest blocks", Side::Right),
        ("for", Side::Left),
        ("operator", Side::Left),
        ("module", Side::Left),
    ]);
    for block in top_blocks(estimate, places, top) {
        let operator = if block.operator.is_empty() { "before the trace" } else { block.operator };
        blocks.row([
            Bytes(block.bytes).to_string(),
            words(block.role.name()),
            operator.to_owned(),
            tail(&block.module),
        ]);
    }
    blocks
}

fn assumed(estimate: &Estimate<'_>) -> Table {
    let mut assumed = Table::new(&[
        ("assumed", Side::Left),
        ("blocks", Side::Right),
        ("added", Side::Right),
        ("left out", Side::Right),
        ("what", Side::Left),
    ]);
    for a in assumptions(estimate) {
        let bytes = |b: u64| if b == 0 { "-".to_owned() } else { Bytes(b).to_string() };
        let blocks = if a.blocks == 0 { "-".to_owned() } else { a.blocks.to_string() };
        assumed.row([a.rule.to_owned(), blocks, bytes(a.added), bytes(a.removed), a.text]);
    }
    assumed
}
