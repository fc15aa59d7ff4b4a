//! Pure bf16 in place of single precision.
//!
//! `dtype=bf16` means pure bf16 training, `model.to(torch.bfloat16)` with inputs to match,
//! estimated from a trace in single precision.
//!
//! - Halved: parameters, batch norms' statistics, gradients, optimizer states, every
//!   single-precision block that an operator makes, attention's outputs and gradients, the
//!   multi-tensor optimizer's temporaries.
//! - Not halved: integers and booleans (token ids, labels, indices of pooling, counters, tables),
//!   masks, what norms save besides their output (GPUs keep means and deviations in single
//!   precision), attention's log-sum-exp, the scratch of reductions (which accumulate in single
//!   precision), workspaces, the cuDNN allowance.
//! - Logits that a script converts to single precision right before the loss (`logits.float()`):
//!   the loss's blocks stay. The copy, which a single-precision trace doesn't have, is added, and
//!   so is the copy of its gradient.
//!
//! Other conversions back to single precision (inside an RMS norm, in Adafactor's own arithmetic)
//! are halved too, which is an error of this model.

use std::collections::{BTreeMap, HashMap};

use super::super::calls::NONE;
use super::super::forecast::{Block, Forecast, Job};
use super::super::gpu::step_class;
use super::super::inputs::{Input, Inputs, Tensor};
use super::super::roles::Role;
use super::splice;
use crate::sim::requests::Request;
use crate::units::{Bytes, id32};

/// The forecast with all single-precision blocks halved, and with the copies that conversions make.
pub(super) fn halved(job: &Job, mut forecast: Forecast) -> Forecast {
    if job.trace.marks.iter().any(|m| step_class(job.trace.text(m.name)) == Some("Adafactor")) {
        forecast.notes.push("Adafactor computes and keeps its states in single precision even for bf16; here they are halved".to_owned());
    }
    let upcasts = upcasts(job);
    let mut forecast = raise(job, &forecast, &upcasts);
    halve(job, &mut forecast, &upcasts);
    forecast
}

/// A conversion of logits to single precision. It copies nothing in single precision, but it does
/// in bf16.
struct Upcast {
    /// When it ends.
    time: u64,
    /// When its result is no longer needed.
    end: u64,
    /// The converting operator.
    op: u32,
    /// Bytes of the result.
    bytes: u64,
}

/// Conversions right before a log_softmax of a tensor of the same size, if no operator makes a
/// block of that size in between.
fn upcasts(job: &Job) -> Vec<Upcast> {
    let Job { trace, calls, .. } = job;
    let mut found = Vec::new();
    for thread in calls.threads() {
        let mut last: Option<(u32, u64)> = None;
        for &op in thread {
            match trace.text(trace.ops[op as usize].name) {
                "aten::to" => {
                    let inputs =
                        Inputs::new(trace, trace.args[trace.ops[op as usize].args as usize]);
                    // The overload that takes a type and no other argument.
                    if let Some(tensor) = inputs
                        .tensor(0)
                        .filter(|t| is_single(t) && t.dims.len() > 1 && inputs.plain.len() == 5)
                        && inputs.plain[1].trim() == "6"
                    {
                        last = Some((op, tensor.bytes()));
                    }
                }
                "aten::_log_softmax" => {
                    let Some((to, bytes)) = last.take() else { continue };
                    let inputs =
                        Inputs::new(trace, trace.args[trace.ops[op as usize].args as usize]);
                    let (from, until) = (trace.ops[to as usize].end, trace.ops[op as usize].start);
                    let events = calls.events(trace, trace.ops[op as usize].thread.0, from, until);
                    let made = events.iter().any(|&e| {
                        trace.memory[e as usize].bytes.unsigned_abs() == bytes
                            && trace.memory[e as usize].bytes > 0
                    });
                    if inputs.tensor(0).is_some_and(|t| t.bytes() == bytes) && !made {
                        found.push(Upcast {
                            time: from,
                            end: trace.ops[calls.outermost(op) as usize].end,
                            op: to,
                            bytes,
                        });
                    }
                }
                _ => {}
            }
        }
    }
    found.sort_by_key(|u| u.time);
    found
}

/// Adds the copies that such conversions make in bf16, and the copies of their gradients.
fn raise(job: &Job, forecast: &Forecast, upcasts: &[Upcast]) -> Forecast {
    let mut gone = vec![false; forecast.requests.len()];
    let mut inserts: BTreeMap<usize, Vec<Request>> = BTreeMap::new();
    let mut blocks = forecast.blocks.clone();
    let (trace, times) = (&job.trace, &forecast.times);
    let last = times.last().copied().unwrap_or(0);
    let mut new = |bytes: u64, role: Role, op: Option<u32>| {
        let id = id32(blocks.len());
        blocks.push(Block { bytes, role, op, rule: Some("what-if"), before: false });
        (Request::Allocate { id, bytes: Bytes(bytes), stream: 0 }, Request::Free { id })
    };
    for upcast in upcasts.iter().filter(|u| u.end < last) {
        let (take, give) = new(upcast.bytes, Role::Temporary, Some(upcast.op));
        inserts.entry(times.partition_point(|&t| t < upcast.time)).or_default().push(take);
        inserts.entry(times.partition_point(|&t| t <= upcast.end)).or_default().push(give);
    }
    // The gradient in single precision is replaced by its bf16 copy at once.
    let mut copies: HashMap<u32, Request> = HashMap::new();
    for (index, &request) in forecast.requests.iter().enumerate() {
        match request {
            Request::Allocate { id, .. } => {
                let block = forecast.blocks[id as usize];
                let Some(op) =
                    block.op.filter(|&o| raised(job, o, block.bytes, upcasts) == Some(true))
                else {
                    continue;
                };
                let (take, give) = new(block.bytes.div_ceil(2), block.role, block.op);
                let node = trace.ops[job.calls.outermost(op) as usize].end;
                inserts
                    .entry(times.partition_point(|&t| t <= node).max(index + 1))
                    .or_default()
                    .extend([take, Request::Free { id }]);
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

/// Whether a block stays in single precision after a conversion of logits; `Some(true)` for the
/// gradient that goes back through the conversion.
fn raised(job: &Job, op: u32, bytes: u64, upcasts: &[Upcast]) -> Option<bool> {
    if !upcasts.iter().any(|u| u.bytes == bytes) {
        return None;
    }
    let mut around = op;
    while around != NONE {
        match job.trace.text(job.trace.ops[around as usize].name) {
            "aten::_log_softmax_backward_data" => return Some(true),
            "aten::_log_softmax" | "aten::nll_loss_backward" | "aten::nll_loss2d_backward" => {
                return Some(false);
            }
            _ => around = job.calls.parent[around as usize],
        }
    }
    None
}

/// Halves the blocks that hold single precision.
fn halve(job: &Job, forecast: &mut Forecast, upcasts: &[Upcast]) {
    let mut precision = Precision::new(job, forecast);
    let mut bytes: Vec<u64> = Vec::with_capacity(forecast.blocks.len());
    for block in &forecast.blocks {
        let raised = block.op.is_some_and(|op| raised(job, op, block.bytes, upcasts).is_some());
        bytes.push(if !raised && precision.is_single(block) {
            block.bytes.div_ceil(2)
        } else {
            block.bytes
        });
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

/// Operators whose first block is the result and whose other blocks have another type.
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

/// Operators that make booleans or indices from numbers.
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

/// Decides which blocks hold single precision.
struct Precision<'a> {
    job: &'a Job,
    /// Sizes of batch norms' statistics in bytes.
    statistics: Vec<u64>,
    /// The largest block that the attention rule gives each operator. This map is never iterated.
    attention: HashMap<Option<u32>, u64>,
    /// Calls of [`FIRST_ONLY`] whose first block was seen. This map is never iterated.
    first: HashMap<u32, ()>,
    inputs: HashMap<u32, Inputs>,
}

impl<'a> Precision<'a> {
    fn new(job: &'a Job, forecast: &Forecast) -> Self {
        let mut precision = Self {
            job,
            statistics: Vec::new(),
            attention: HashMap::new(),
            first: HashMap::new(),
            inputs: HashMap::new(),
        };
        for (index, op) in job.trace.ops.iter().enumerate() {
            if job.trace.text(op.name) == "aten::batch_norm" {
                let inputs = precision.inputs(id32(index));
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
        self.inputs.entry(args).or_insert_with(|| Inputs::new(trace, trace.args[args as usize]))
    }

    fn is_single(&mut self, block: &Block) -> bool {
        match block.rule {
            Some("optimizer" | "softmax" | "convolutions") => return true,
            // A log-sum-exp is smaller than the result by the factor of a head's size.
            Some("attention") => {
                return block.bytes * 8 > self.attention.get(&block.op).copied().unwrap_or(0);
            }
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

    /// Whether the blocks that `op` makes hold single precision.
    fn makes_single(&mut self, op: u32) -> bool {
        let name = self.name(op);
        let inputs = self.inputs(op);
        let own = inputs.tensor(0).is_none_or(is_single);
        // The argument that gives a factory operator's type; 6 is single precision.
        let single_at = |index: usize| {
            inputs.plain.get(index).map(|t| t.trim()).filter(|t| !t.is_empty()).map(|t| t == "6")
        };
        match name.strip_prefix("aten::").unwrap_or(name) {
            "empty" => single_at(1).unwrap_or(true),
            "empty_strided" => single_at(2).unwrap_or(true),
            "empty_like" => single_at(1).unwrap_or(own),
            "resize_" | "resize_as_" | "set_" => own,
            "embedding" | "gather" | "index_select" | "index" => own,
            n if INTEGRAL.contains(&n) => false,
            _ => {
                let mut tensors = inputs.list.iter().flat_map(|i| match i {
                    Input::Tensor(t) => std::slice::from_ref(t),
                    Input::List(l) => l.as_slice(),
                    Input::Other => &[],
                });
                inputs.list.is_empty() || tensors.any(is_single)
            }
        }
    }
}

const fn is_single(tensor: &Tensor) -> bool {
    tensor.element == 4 && !tensor.integral
}
