//! What a job would take if its script said something else: an edited forecast.
//!
//! For: `--what-if zero-grad=start|backward,dtype=bf16`. Not for: anything that changes shapes, or which operators run.
//!
//! `zero-grad` moves where an iteration gives back the gradients of the one before: right before the model is first called
//! (`start`), or right before `backward()` (`backward`). Nothing else changes.
//!
//! `dtype=bf16` is pure bf16 training, `model.to(torch.bfloat16)` with inputs to match, recorded in single precision.
//! Halved: parameters, batch norms' statistics, gradients, optimizer states, every block that an operator makes of single
//! precision, attention's outputs and gradients, the multi-tensor optimizer's temporaries. Not halved: integers and
//! booleans (token ids, labels, indices of pooling, counters, tables), masks, what norms save besides their output (GPUs keep
//! means and deviations in single precision), attention's log-sum-exp, the scratch of reductions (it accumulates in single
//! precision), workspaces, the cuDNN allowance, and what a loss makes of logits that are turned to single precision right
//! before it (`logits.float()`): the copy, which single precision doesn't show, is added, and so is that of its gradient. What
//! else a script turns back into single precision (the inside of an RMS norm, Adafactor's own arithmetic) is halved too,
//! which it shouldn't be.
//!
//! Accuracy ([`WhatIf::accuracy`]): forecasts of real traces, edited, against what PyTorch 2.11's allocator did for the
//! edited script, on models of torchvision and transformers with SGD, Adam, AdamW, RMSprop, Adagrad and Adafactor.

use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

use super::calls::NONE;
use super::forecast::{Block, Forecast, Job};
use super::inputs::{Inputs, Tensor};
use super::roles::Role;
use super::twin::{Settings, step_class};
use crate::sim::requests::Request;
use crate::units::Bytes;

/// Where gradients are cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroGrad {
    /// Before the model is called.
    Start,
    /// Before backward.
    Backward,
}

/// A measured error, in hundredths of a percent, over a number of jobs.
struct Measured {
    edit: &'static str,
    jobs: u32,
    reserved: [u32; 2],
    allocated: [u32; 2],
}

/// Jobs: 14 recorded with `start`, 8 with `backward`, each asked for the other.
const ZERO_GRAD: Measured = Measured { edit: "zero-grad", jobs: 22, reserved: [0, 97], allocated: [0, 156] };
/// Jobs without Adafactor: 9 convolutional models, 2 vision transformers, 9 language models. Attention ran by the flash kernel.
/// The worst, T5 in reserved and GPT-Neo in allocated, are under: probably their own arithmetic in single precision (RMS norms,
/// attention).
const BF16: Measured = Measured { edit: "dtype=bf16", jobs: 20, reserved: [0, 561], allocated: [15, 641] };
/// The two with Adafactor, ResNet-18 and T5, both under.
const BF16_ADAFACTOR: Measured = Measured { edit: "dtype=bf16 with Adafactor", jobs: 2, reserved: [1849, 2586], allocated: [953, 1148] };

impl Measured {
    fn sentence(&self) -> String {
        let percent = |hundredths: u32| format!("{}.{:02} %", hundredths / 100, hundredths % 100);
        let [[r, rr], [a, aa]] = [self.reserved, self.allocated].map(|m| m.map(percent));
        format!(
            "{}: on {} jobs, peak reserved was off by {r} in the median and {rr} at worst, peak allocated by {a} and {aa}",
            self.edit, self.jobs
        )
    }
}

/// The edits to make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WhatIf {
    /// Where gradients are cleared, where that is to change.
    pub zero_grad: Option<ZeroGrad>,
    /// Whether everything is bf16.
    pub bf16: bool,
}

/// An edit nobody knows.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "'{0}' is no edit of a forecast, or comes twice; known are zero-grad=start, zero-grad=backward and dtype=bf16, separated by commas"
)]
pub struct WhatIfError(String);

impl FromStr for WhatIf {
    type Err = WhatIfError;

    fn from_str(text: &str) -> Result<Self, WhatIfError> {
        let mut what_if = Self::default();
        for word in text.split(',').map(str::trim) {
            match word {
                "zero-grad=start" if what_if.zero_grad.is_none() => what_if.zero_grad = Some(ZeroGrad::Start),
                "zero-grad=backward" if what_if.zero_grad.is_none() => what_if.zero_grad = Some(ZeroGrad::Backward),
                "dtype=bf16" if !what_if.bf16 => what_if.bf16 = true,
                _ => return Err(WhatIfError(word.to_owned())),
            }
        }
        Ok(what_if)
    }
}

impl WhatIf {
    /// The forecast of `job`, edited. Before [`super::answer::answer`], which repeats its iterations.
    #[must_use]
    pub fn apply(&self, job: &Job, _settings: &Settings, mut forecast: Forecast) -> Forecast {
        if let Some(zero_grad) = self.zero_grad {
            forecast = move_clears(job, forecast, zero_grad);
        }
        if self.bf16 {
            if job.trace.marks.iter().any(|m| step_class(job.trace.text(m.name)) == Some("Adafactor")) {
                forecast
                    .notes
                    .push("Adafactor computes and keeps its states in single precision even for bf16; here they are halved".to_owned());
            }
            let upcasts = upcasts(job);
            forecast = raise(job, &forecast, &upcasts);
            halve(job, &mut forecast, &upcasts);
        }
        forecast
    }

    /// How far such edits were off, a sentence each.
    #[must_use]
    pub fn accuracy(&self) -> Vec<String> {
        let edits = [self.zero_grad.map(|_| &ZERO_GRAD), self.bf16.then_some(&BF16), self.bf16.then_some(&BF16_ADAFACTOR)];
        edits.into_iter().flatten().map(Measured::sentence).collect()
    }
}

/// Moves the frees of gradients.
fn move_clears(job: &Job, forecast: Forecast, zero_grad: ZeroGrad) -> Forecast {
    let Forecast { requests, times, blocks, starts, .. } = &forecast;
    let iterations = &job.phases.iterations[..job.phases.iterations.len().min(starts.len())];
    let mut made = vec![0; blocks.len()];
    let mut moved = vec![false; requests.len()];
    // By iteration, in the order in which they were given back.
    let mut cleared: Vec<Vec<Request>> = vec![Vec::new(); iterations.len()];
    let mut at = 0;
    for (index, &request) in requests.iter().enumerate() {
        while at < iterations.len() && starts[at] <= index {
            at += 1;
        }
        match request {
            Request::Allocate { id, .. } => made[id as usize] = at,
            Request::Free { id } if blocks[id as usize].role == Role::Gradient && at > 0 => {
                let iteration = &iterations[at - 1];
                let now = times[index];
                let target = if made[id as usize] < at {
                    // Cleared before this iteration's own gradients come.
                    iteration.backward.is_none_or(|b| now < b.start).then_some(at - 1)
                } else {
                    // Cleared after the step; the next iteration will, as the edit says.
                    iteration.steps.last().is_some_and(|s| now > s.end).then_some(at)
                };
                if let Some(target) = target {
                    moved[index] = true;
                    if let Some(list) = cleared.get_mut(target) {
                        list.push(request);
                    }
                }
            }
            Request::Free { .. } | Request::EmptyCache => {}
        }
    }
    let mut inserts: BTreeMap<usize, Vec<Request>> = BTreeMap::new();
    for ((iteration, list), &start) in iterations.iter().zip(cleared).zip(starts) {
        let place = match (zero_grad, iteration.backward) {
            (ZeroGrad::Start, _) => times.partition_point(|&t| t < iteration.called).max(start),
            (ZeroGrad::Backward, Some(backward)) => {
                let mut place = times.partition_point(|&t| t < backward.start).max(start);
                // The seed of backward is made after the script's zero_grad.
                while place > start && is_seed(job, blocks, requests[place - 1]) {
                    place -= 1;
                }
                place
            }
            (ZeroGrad::Backward, None) => start,
        };
        inserts.entry(place).or_default().extend(list);
    }
    let mut result = splice(&forecast, &moved, &inserts);
    if !moved.contains(&true) {
        result.notes.push("no iteration of the trace clears the gradients of one before it: zero-grad changes nothing".to_owned());
    }
    result
}

/// The forecast without the requests that `gone` names, and with `inserts` before those at their places.
fn splice(forecast: &Forecast, gone: &[bool], inserts: &BTreeMap<usize, Vec<Request>>) -> Forecast {
    let Forecast { requests, times, starts, .. } = forecast;
    let mut result = Forecast {
        requests: Vec::with_capacity(requests.len()),
        times: Vec::with_capacity(times.len()),
        starts: Vec::new(),
        ..forecast.clone()
    };
    let mut next = starts.iter().copied().peekable();
    for index in 0..=requests.len() {
        while next.next_if(|&s| s <= index).is_some() {
            result.starts.push(result.requests.len());
        }
        let time = times.get(index).or(times.last()).copied().unwrap_or(0);
        for &request in inserts.get(&index).into_iter().flatten() {
            result.requests.push(request);
            result.times.push(time);
        }
        if index < requests.len() && !gone[index] {
            result.requests.push(requests[index]);
            result.times.push(time);
        }
    }
    result
}

fn is_seed(job: &Job, blocks: &[Block], request: Request) -> bool {
    let Request::Allocate { id, .. } = request else { return false };
    blocks[id as usize].op.is_some_and(|op| job.trace.text(job.trace.ops[job.calls.outermost(op) as usize].name) == "aten::ones_like")
}

/// A conversion of logits to single precision, which copies nothing in single precision and does in bf16.
struct Upcast {
    /// When it is over.
    time: u64,
    /// When its result isn't needed any more.
    end: u64,
    /// The converting operator.
    op: u32,
    /// Bytes of the result.
    bytes: u64,
}

/// Conversions right before a log_softmax of a tensor of that size, with nothing of that size made in between.
fn upcasts(job: &Job) -> Vec<Upcast> {
    let Job { trace, calls, .. } = job;
    let mut found = Vec::new();
    for thread in calls.threads() {
        let mut last: Option<(u32, u64)> = None;
        for &op in thread {
            match trace.text(trace.ops[op as usize].name) {
                "aten::to" => {
                    let inputs = Inputs::of(trace, trace.args[trace.ops[op as usize].args as usize]);
                    // The form that takes a type and nothing else.
                    if let Some(tensor) = inputs.tensor(0).filter(|t| is_single(t) && t.dims.len() > 1 && inputs.plain.len() == 5)
                        && inputs.plain[1].trim() == "6"
                    {
                        last = Some((op, tensor.bytes()));
                    }
                }
                "aten::_log_softmax" => {
                    let Some((to, bytes)) = last.take() else { continue };
                    let inputs = Inputs::of(trace, trace.args[trace.ops[op as usize].args as usize]);
                    let (from, until) = (trace.ops[to as usize].end, trace.ops[op as usize].start);
                    let events = calls.events(trace, trace.ops[op as usize].thread.0, from, until);
                    let made = events
                        .iter()
                        .any(|&e| trace.memory[e as usize].bytes.unsigned_abs() == bytes && trace.memory[e as usize].bytes > 0);
                    if inputs.tensor(0).is_some_and(|t| t.bytes() == bytes) && !made {
                        found.push(Upcast { time: from, end: trace.ops[calls.outermost(op) as usize].end, op: to, bytes });
                    }
                }
                _ => {}
            }
        }
    }
    found.sort_by_key(|u| u.time);
    found
}

/// Adds the copies that such conversions make in bf16, and those of their gradients on the way back.
fn raise(job: &Job, forecast: &Forecast, upcasts: &[Upcast]) -> Forecast {
    let mut gone = vec![false; forecast.requests.len()];
    let mut inserts: BTreeMap<usize, Vec<Request>> = BTreeMap::new();
    let mut blocks = forecast.blocks.clone();
    let (trace, times) = (&job.trace, &forecast.times);
    let last = times.last().copied().unwrap_or(0);
    let mut new = |bytes: u64, role: Role, op: Option<u32>| {
        let id = blocks.len() as u32;
        blocks.push(Block { bytes, role, op, rule: Some("what-if"), before: false });
        (Request::Allocate { id, bytes: Bytes(bytes), stream: 0 }, Request::Free { id })
    };
    for upcast in upcasts.iter().filter(|u| u.end < last) {
        let (take, give) = new(upcast.bytes, Role::Temporary, Some(upcast.op));
        inserts.entry(times.partition_point(|&t| t < upcast.time)).or_default().push(take);
        inserts.entry(times.partition_point(|&t| t <= upcast.end)).or_default().push(give);
    }
    // The gradient in single precision makes room for its bf16 copy at once.
    let mut copies: HashMap<u32, Request> = HashMap::new();
    for (index, &request) in forecast.requests.iter().enumerate() {
        match request {
            Request::Allocate { id, .. } => {
                let block = forecast.blocks[id as usize];
                let Some(op) = block.op.filter(|&o| raised(job, o, block.bytes, upcasts) == Some(true)) else { continue };
                let (take, give) = new(block.bytes.div_ceil(2), block.role, block.op);
                let node = trace.ops[job.calls.outermost(op) as usize].end;
                inserts.entry(times.partition_point(|&t| t <= node).max(index + 1)).or_default().extend([take, Request::Free { id }]);
                copies.insert(id, give);
            }
            Request::Free { id } => {
                if let Some(give) = copies.remove(&id) {
                    gone[index] = true;
                    inserts.entry(index).or_default().push(give);
                }
            }
            Request::EmptyCache => {}
        }
    }
    Forecast { blocks, ..splice(forecast, &gone, &inserts) }
}

/// Whether a block stays in single precision behind a conversion of logits; `Some(true)` for the gradient that goes back
/// through it.
fn raised(job: &Job, op: u32, bytes: u64, upcasts: &[Upcast]) -> Option<bool> {
    if !upcasts.iter().any(|u| u.bytes == bytes) {
        return None;
    }
    let mut around = op;
    while around != NONE {
        match job.trace.text(job.trace.ops[around as usize].name) {
            "aten::_log_softmax_backward_data" => return Some(true),
            "aten::_log_softmax" | "aten::nll_loss_backward" | "aten::nll_loss2d_backward" => return Some(false),
            _ => around = job.calls.parent[around as usize],
        }
    }
    None
}

/// Halves what holds single precision.
fn halve(job: &Job, forecast: &mut Forecast, upcasts: &[Upcast]) {
    let mut precision = Precision::of(job, forecast);
    let mut bytes: Vec<u64> = Vec::with_capacity(forecast.blocks.len());
    for block in &forecast.blocks {
        let raised = block.op.is_some_and(|op| raised(job, op, block.bytes, upcasts).is_some());
        bytes.push(if !raised && precision.is_single(block) { block.bytes.div_ceil(2) } else { block.bytes });
    }
    for request in &mut forecast.requests {
        if let Request::Allocate { id, bytes: wanted, .. } = request {
            *wanted = Bytes(bytes[*id as usize]);
        }
    }
    forecast.before.clear();
    for (block, bytes) in forecast.blocks.iter_mut().zip(bytes) {
        block.bytes = bytes;
        if block.before {
            *forecast.before.entry(block.role).or_default() += bytes;
        }
    }
}

/// Operators whose first block is the result and whose others aren't of its type.
const FIRST_ONLY: [&str; 12] = [
    "aten::native_layer_norm",
    "aten::native_group_norm",
    "aten::native_batch_norm",
    "aten::_fused_rms_norm",
    "aten::max_pool2d_with_indices",
    "aten::max_pool3d_with_indices",
    "aten::adaptive_max_pool2d",
    "aten::max",
    "aten::min",
    "aten::sort",
    "aten::topk",
    "aten::median",
];

/// Operators that make booleans or indices of numbers.
const INTEGRAL: [&str; 18] = [
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "isnan",
    "isinf",
    "isfinite",
    "logical_and",
    "logical_or",
    "logical_not",
    "any",
    "all",
    "argmax",
    "argmin",
    "argsort",
    "nonzero",
];

/// Tells which blocks hold single precision.
struct Precision<'a> {
    job: &'a Job,
    /// Sizes of batch norms' statistics.
    statistics: Vec<u64>,
    /// The largest block that the attention rule gives each operator. Only looked up.
    attention: HashMap<Option<u32>, u64>,
    /// Calls of [`FIRST_ONLY`] whose first block was seen. Only looked up.
    first: HashMap<u32, ()>,
    inputs: HashMap<u32, Inputs>,
}

impl<'a> Precision<'a> {
    fn of(job: &'a Job, forecast: &Forecast) -> Self {
        let mut precision = Self { job, statistics: Vec::new(), attention: HashMap::new(), first: HashMap::new(), inputs: HashMap::new() };
        for (index, op) in job.trace.ops.iter().enumerate() {
            if job.trace.text(op.name) == "aten::batch_norm" {
                let inputs = precision.inputs(index as u32);
                let sizes = [3, 4].map(|i| inputs.tensor(i).map_or(0, Tensor::bytes));
                precision.statistics.extend(sizes);
            }
        }
        precision.statistics.sort_unstable();
        precision.statistics.dedup();
        for block in forecast.blocks.iter().filter(|b| b.rule == Some("attention")) {
            let largest = precision.attention.entry(block.op).or_default();
            *largest = block.bytes.max(*largest);
        }
        precision
    }

    fn inputs(&mut self, op: u32) -> &Inputs {
        let trace = &self.job.trace;
        let args = trace.ops[op as usize].args;
        self.inputs.entry(args).or_insert_with(|| Inputs::of(trace, trace.args[args as usize]))
    }

    fn is_single(&mut self, block: &Block) -> bool {
        match block.rule {
            Some("optimizer" | "softmax" | "convolutions") => return true,
            // A log-sum-exp is smaller by the size of a head.
            Some("attention") => return block.bytes * 8 > self.attention.get(&block.op).copied().unwrap_or(0),
            Some(_) => return false,
            None => {}
        }
        let Some(op) = block.op else {
            return match block.role {
                Role::Buffer => self.statistics.binary_search(&block.bytes).is_ok(),
                Role::BatchData | Role::Workspace => false,
                _ => true,
            };
        };
        let mut around = op;
        while around != NONE {
            if FIRST_ONLY.contains(&self.name(around)) {
                if self.first.insert(around, ()).is_some() {
                    return false;
                }
                break;
            }
            around = self.job.calls.parent[around as usize];
        }
        self.makes_single(op)
    }

    fn name(&self, op: u32) -> &'a str {
        self.job.trace.text(self.job.trace.ops[op as usize].name)
    }

    /// Whether what `op` makes is of single precision.
    fn makes_single(&mut self, op: u32) -> bool {
        let name = self.name(op);
        let inputs = self.inputs(op);
        let own = inputs.tensor(0).is_none_or(is_single);
        // Where an operator that makes tensors is told their type, and 6 is single precision.
        let told = |index: usize| inputs.plain.get(index).map(|t| t.trim()).filter(|t| !t.is_empty()).map(|t| t == "6");
        match name.strip_prefix("aten::").unwrap_or(name) {
            "empty" => told(1).unwrap_or(true),
            "empty_strided" => told(2).unwrap_or(true),
            "empty_like" => told(1).unwrap_or(own),
            "resize_" | "resize_as_" | "set_" => own,
            "embedding" | "gather" | "index_select" | "index" => own,
            n if INTEGRAL.contains(&n) => false,
            _ => {
                let mut tensors = inputs.list.iter().flat_map(|i| match i {
                    super::inputs::Input::Tensor(t) => std::slice::from_ref(t),
                    super::inputs::Input::List(l) => l.as_slice(),
                    super::inputs::Input::Other => &[],
                });
                inputs.list.is_empty() || tensors.any(is_single)
            }
        }
    }
}

const fn is_single(tensor: &Tensor) -> bool {
    tensor.element == 4 && !tensor.integral
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::trace::{Limits, parse};

    fn op(name: &str, start: u64, length: u64, more: &str) -> String {
        format!(r#"{{"ph":"X","cat":"cpu_op","name":"{name}","pid":1,"tid":1,"ts":{start},"dur":{length},"args":{{{more}}}}}"#)
    }

    fn mark(name: &str, start: u64, length: u64) -> String {
        format!(r#"{{"ph":"X","cat":"user_annotation","name":"{name}","pid":1,"tid":1,"ts":{start},"dur":{length}}}"#)
    }

    fn memory(time: u64, address: u64, bytes: i64) -> String {
        format!(
            r#"{{"ph":"i","cat":"cpu_instant_event","name":"[memory]","pid":1,"tid":1,"ts":{time},"args":{{"Addr":{address},"Bytes":{bytes},"Device Type":0}}}}"#
        )
    }

    /// Two iterations: ids and an activation, a gradient that the second iteration clears where `cleared` says (30 or 50).
    fn job(cleared: u64) -> Job {
        let mut events = Vec::new();
        for round in 0..2_u64 {
            let t = |time: u64| round * 100 + time;
            let single = r#""Input Dims":[[250]],"Input type":["float"],"Concrete Inputs":[""]"#;
            events.push(mark(&format!("ProfilerStep#{round}"), t(1), 98));
            events.push(mark("Optimizer.zero_grad#SGD.zero_grad", t(cleared), 2));
            events
                .push(format!(r#"{{"ph":"X","cat":"python_function","name":"nn.Module: Net_0","pid":1,"tid":1,"ts":{},"dur":10}}"#, t(35)));
            events.push(op(
                "aten::empty",
                t(10),
                5,
                r#""Input Dims":[[],[],[],[],[],[]],"Input type":["ScalarList"],"Concrete Inputs":["[100]","4","","","",""]"#,
            ));
            events.push(op("aten::relu", t(40), 5, single));
            events.push(op("autograd::engine::evaluate_function: ReluBackward0", t(60), 10, ""));
            events.push(op("aten::mul", t(62), 4, single));
            events.push(mark("Optimizer.step#SGD.step", t(80), 5));
            events.push(memory(t(12), 1, 800));
            events.push(memory(t(42), 2, 1000));
            events.push(memory(t(63), 3 + round, 1000));
            if round == 1 {
                events.push(memory(t(cleared + 1), 3, -1000));
            }
            events.push(memory(t(70), 2, -1000));
            events.push(memory(t(90), 1, -800));
        }
        let text = format!(r#"{{"traceEvents":[{}]}}"#, events.join(","));
        Job::of(parse(std::io::Cursor::new(text.into_bytes()), "t".as_ref(), &Limits::default()).unwrap())
    }

    fn settings() -> Settings {
        let class = crate::estimate::twin::Class { capability: 9, multiprocessors: 132, threads: 2048 };
        Settings { class, without: vec![crate::estimate::twin::Rule::Before], cudnn_workspace: 0 }
    }

    #[test]
    fn gradients_are_cleared_where_asked_and_nothing_else_moves() {
        let (early, late) = (job(30), job(50));
        let [start, backward] = ["zero-grad=start", "zero-grad=backward"].map(|w| w.parse::<WhatIf>().unwrap());
        let [of_early, of_late] = [&early, &late].map(|j| Forecast::of(j, &settings()));
        assert_ne!(of_early.requests, of_late.requests);
        assert_eq!(backward.apply(&early, &settings(), of_early.clone()).requests, of_late.requests);
        assert_eq!(start.apply(&late, &settings(), of_late.clone()).requests, of_early.requests);
        let same = start.apply(&early, &settings(), of_early.clone());
        assert_eq!((same.requests, same.starts), (of_early.requests, of_early.starts));
    }

    #[test]
    fn single_precision_is_halved_and_integers_are_not() {
        let job = job(30);
        let forecast = "dtype=bf16".parse::<WhatIf>().unwrap().apply(&job, &settings(), Forecast::of(&job, &settings()));
        let sizes: Vec<u64> = forecast.blocks.iter().map(|b| b.bytes).collect();
        assert_eq!(sizes, [800, 500, 500, 800, 500, 500]);
        let asked = forecast
            .requests
            .iter()
            .filter_map(|r| if let Request::Allocate { id, bytes, .. } = r { Some((*id as usize, bytes.0)) } else { None });
        assert!(asked.clone().all(|(id, bytes)| sizes[id] == bytes) && asked.count() == 6);
    }

    #[test]
    fn edits_are_named_once_and_accuracy_goes_with_them() {
        let both: WhatIf = "dtype=bf16, zero-grad=start".parse().unwrap();
        assert_eq!(both, WhatIf { zero_grad: Some(ZeroGrad::Start), bf16: true });
        assert_eq!(both.accuracy().len(), 3);
        for wrong in ["", "zero-grad", "zero-grad=never", "dtype=fp16", "dtype=bf16,dtype=bf16", "zero-grad=start,zero-grad=backward"] {
            assert!(wrong.parse::<WhatIf>().unwrap_err().to_string().contains("zero-grad=backward and dtype=bf16"), "{wrong}");
        }
    }
}
