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
//! precision), workspaces, the cuDNN allowance. What a script turns back into single precision (`logits.float()`, the
//! inside of an RMS norm, Adafactor's own arithmetic) is halved too, which it shouldn't be: the measured error says
//! by how much that matters, and a note names the job's own share.

use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

use super::calls::NONE;
use super::forecast::{Block, Forecast, Job};
use super::inputs::{Inputs, Tensor};
use super::roles::Role;
use super::twin::Settings;
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
#[error("'{0}' is no edit of a forecast, or comes twice; known are zero-grad=start, zero-grad=backward and dtype=bf16, separated by commas")]
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
            halve(job, &mut forecast);
        }
        forecast
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
    let mut result = Forecast { requests: Vec::with_capacity(requests.len()), times: Vec::with_capacity(times.len()), starts: Vec::new(), ..forecast.clone() };
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
        if index < requests.len() && !moved[index] {
            result.requests.push(requests[index]);
            result.times.push(time);
        }
    }
    if !moved.contains(&true) {
        result.notes.push("no iteration of the trace clears the gradients of one before it: zero-grad changes nothing".to_owned());
    }
    result
}

fn is_seed(job: &Job, blocks: &[Block], request: Request) -> bool {
    let Request::Allocate { id, .. } = request else { return false };
    blocks[id as usize].op.is_some_and(|op| job.trace.text(job.trace.ops[job.calls.outermost(op) as usize].name) == "aten::ones_like")
}

/// Halves what holds single precision.
fn halve(job: &Job, forecast: &mut Forecast) {
    let mut precision = Precision::of(job, forecast);
    let mut bytes: Vec<u64> = Vec::with_capacity(forecast.blocks.len());
    for block in &forecast.blocks {
        bytes.push(if precision.is_single(block) { block.bytes.div_ceil(2) } else { block.bytes });
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
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_not", "any", "all", "argmax", "argmin", "argsort",
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
