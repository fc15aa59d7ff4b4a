//! An operator's time if it runs as fast as its arithmetic and its memory traffic allow.
//!
//! ```text
//! time = launch overhead + max(arithmetic, memory, link), at least 1 ns, rounded up
//! arithmetic = flops / (peak rate of the element type · efficiency)
//! memory     = bytes read and written / (memory bandwidth · efficiency)
//! link       = overhead of a copy + bytes from the host / host-to-device rate
//! ```
//!
//! **Bytes.** Each distinct view that is read counts once, and each view that is written counts
//! once. A view counts the distinct elements that it can reach, not its whole storage; an element
//! that `expand` repeats counts once. An in-place write counts as a read and a write, unless the
//! operator ignores the old values (`zero_`, `fill_`, `copy_`). Lookups (`embedding`,
//! `index_select`, `gather`) read as many bytes of the table as they write. Workspace is not
//! counted. Batch data comes over the link.
//!
//! **Flops.** A multiply-add counts as two:
//!
//! | kind | flops |
//! | --- | --- |
//! | convolution | 2 · outputs · weights of one output channel |
//! | its backward | the same once for the input's and once for the weight's gradient, as `output_mask` asks; 1 a gradient element for the bias |
//! | `linear`, `mm`, `addmm`, `bmm`, `matmul`, … | 2 · outputs · inner extent |
//! | attention, queries q, keys k, head sizes e and v | 2 · q · k · (e + v) for all heads, masks not considered |
//! | its backward | 2 · q · k · (3e + 2v): the scores are computed again |
//! | pooling by window | outputs · window; its backward gradient elements · window, 1 where indices are kept |
//! | adaptive pooling, reductions, losses | 1 an input element |
//! | batch, layer and group norm | 8 an input element, backward 12 |
//! | softmax, log-softmax | 5 an output element, backward 4 |
//! | dropout | 10 an output element (the random numbers), backward 1 |
//! | optimizer update | 4 to 16 a parameter element, by its row in [`job::optimizer`](crate::job::optimizer) |
//! | elementwise | 1 an element written, 10 for transcendental functions |
//! | copies, concatenation, fills, lookups, and every kind not named here | 0: bytes only |
//!
//! Errors in small counts matter little, because those operators are limited by memory. All
//! arithmetic is on integers, so a time is the same on every machine.

use super::Profile;
use super::figure::{LONGEST, Latency};
use crate::job::optimizer::Rule;
use crate::job::{Arg, Dtype, Operand, Operator};
use crate::units::Nanos;

const SECOND: u128 = 1_000_000_000;

/// The roofline's time: at least 1 ns, at most [`LONGEST`].
#[must_use]
pub fn time(operator: &Operator, device: &Profile) -> Nanos {
    let on_device = on_device(operator, device, device.efficiency_percent);
    let host = host_bytes(operator);
    let link = if host == 0 {
        0
    } else {
        u128::from(device.link.overhead_ns)
            + host.saturating_mul(SECOND).div_ceil(u128::from(device.link.h2d.max(1)))
    };
    let longest = on_device.max(link).min(u128::from(LONGEST.0));
    let total =
        device.launch_overhead_ns.saturating_add(u64::try_from(longest).unwrap_or(LONGEST.0));
    Nanos(total.clamp(1, LONGEST.0))
}

/// The longer of arithmetic and memory time, in nanoseconds, at this share of the peak rates.
fn on_device(operator: &Operator, device: &Profile, efficiency_percent: u32) -> u128 {
    let share = |work: u128, rate: u64| {
        let rate = (u128::from(rate) * u128::from(efficiency_percent)).max(1);
        work.saturating_mul(100 * SECOND).div_ceil(rate)
    };
    share(flops(operator), device.rate(element(operator)))
        .max(share(bytes(operator), device.memory_bandwidth))
}

/// The share of the device that a job keeps busy while it computes, in thousandths, 1 to 1,000: the
/// time of its operators at the peak rates, divided by their latencies. Other jobs can use the rest
/// of the device at the same time.
#[must_use]
pub fn utilisation(operators: &[Operator], latencies: &[Latency], device: &Profile) -> u32 {
    let (mut busy, mut all) = (0u128, 0u128);
    for (operator, latency) in operators.iter().zip(latencies) {
        let time = u128::from(latency.time.0);
        busy = busy.saturating_add(on_device(operator, device, 100).min(time));
        all = all.saturating_add(time);
    }
    u32::try_from(busy.saturating_mul(1000) / all.max(1)).unwrap_or(1000).clamp(1, 1000)
}

/// The element type that it computes in: that of the first floating-point view written, or else
/// read.
fn element(operator: &Operator) -> Dtype {
    let floating = |o: &&Operand| {
        matches!(
            o.dtype,
            Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16 | Dtype::C64 | Dtype::C128
        )
    };
    operator.writes().chain(operator.reads()).find(floating).map_or(Dtype::F32, |o| o.dtype)
}

fn product(extents: &[u64]) -> u128 {
    extents.iter().fold(1, |all, &n| all.saturating_mul(u128::from(n)))
}

/// The number of elements of a view. An element that `expand` repeats counts each time.
fn elements(operand: &Operand) -> u128 {
    product(&operand.shape)
}

/// Bytes of the distinct elements that a view reaches. An element that `expand` repeats counts
/// once.
fn reached(operand: &Operand) -> u128 {
    if operand.shape.contains(&0) {
        return 0;
    }
    let distinct = operand.shape.iter().zip(&operand.stride).filter(|(_, stride)| **stride != 0);
    distinct
        .fold(u128::from(operand.dtype.size()), |all, (&n, _)| all.saturating_mul(u128::from(n)))
}

/// Bytes of device memory read and written.
#[must_use]
pub fn bytes(operator: &Operator) -> u128 {
    let written: u128 = distinct(operator.writes()).map(reached).fold(0, u128::saturating_add);
    let kind = base(&operator.kind);
    let reads = distinct(operator.reads());
    let read = match kind {
        "zero_" | "fill_" | "normal_" | "uniform_" | "bernoulli_" | "random_" => 0,
        "copy_" => reads.skip(1).map(reached).fold(0, u128::saturating_add),
        "embedding" | "index_select" | "gather" => {
            reads.map(|o| reached(o).min(written)).fold(0, u128::saturating_add)
        }
        _ => reads.map(reached).fold(0, u128::saturating_add),
    };
    read.saturating_add(written)
}

/// Each view once, whatever its version, in order of first mention.
fn distinct<'a>(all: impl Iterator<Item = &'a Operand>) -> impl Iterator<Item = &'a Operand> {
    let mut seen = std::collections::HashSet::new();
    all.filter(move |o| seen.insert((o.tensor, o.dtype, o.offset, &o.shape, &o.stride)))
}

/// Bytes of arrays that come from the host. Single numbers are passed with the launch.
fn host_bytes(operator: &Operator) -> u128 {
    let of = |arg: &Arg| match arg {
        Arg::Host { dtype, shape, .. } if !shape.is_empty() => {
            product(shape).saturating_mul(u128::from(dtype.size()))
        }
        _ => 0,
    };
    operator.args.iter().map(of).fold(0, u128::saturating_add)
}

/// A kind without its namespace.
fn base(kind: &str) -> &str {
    kind.rsplit("::").next().unwrap_or(kind)
}

/// Floating-point operations, as the table above counts them.
#[must_use]
pub fn flops(operator: &Operator) -> u128 {
    products(operator).unwrap_or_else(|| element_by_element(operator))
}

/// Flops of convolutions, matrix products and attention; `None` for another kind.
fn products(operator: &Operator) -> Option<u128> {
    let output = || operator.writes().next().map_or(0, elements);
    let input = |index: usize| tensor(operator, index).map_or(0, elements);
    let times = u128::saturating_mul;
    Some(match base(&operator.kind) {
        "conv1d"
        | "conv2d"
        | "conv3d"
        | "convolution"
        | "_convolution"
        | "cudnn_convolution"
        | "convolution_overrideable" => {
            // Only the general form can be transposed. Its flag comes after stride, padding and
            // dilation.
            let transposed = base(&operator.kind).ends_with("convolution")
                && matches!(operator.args.get(6), Some(Arg::Bool(true)));
            times(2, times(if transposed { input(0) } else { output() }, filter(operator, 1)))
        }
        "convolution_backward" => {
            let asked = |i: usize| match operator.args.get(10) {
                Some(Arg::Bools(mask)) => mask.get(i).copied().unwrap_or(true),
                _ => true,
            };
            let transposed = matches!(operator.args.get(7), Some(Arg::Bool(true)));
            let one =
                times(2, times(if transposed { input(1) } else { input(0) }, filter(operator, 2)));
            let products = u128::from(asked(0)) + u128::from(asked(1));
            times(products, one).saturating_add(if asked(2) { input(0) } else { 0 })
        }
        "linear" | "mm" | "bmm" | "matmul" | "mv" | "dot" | "_int_mm" => {
            times(2, times(output(), inner(operator, 0)))
        }
        "addmm" | "addmm_" | "baddbmm" | "baddbmm_" | "addbmm" | "addmv" | "_addmm_activation" => {
            times(2, times(output(), inner(operator, 1)))
        }
        "scaled_dot_product_attention"
        | "_scaled_dot_product_attention_math"
        | "_scaled_dot_product_efficient_attention"
        | "_scaled_dot_product_flash_attention"
        | "_scaled_dot_product_cudnn_attention"
        | "_scaled_dot_product_fused_attention_overrideable" => attention(operator, 0, -2, 1, 1),
        "_scaled_dot_product_efficient_attention_backward"
        | "_scaled_dot_product_flash_attention_backward"
        | "_scaled_dot_product_cudnn_attention_backward"
        | "_scaled_dot_product_fused_attention_overrideable_backward" => {
            attention(operator, 1, -2, 3, 2)
        }
        // In these kinds the sequence dimension comes before the heads.
        "_efficient_attention_forward" | "_flash_attention_forward" => {
            attention(operator, 0, -3, 1, 1)
        }
        "_efficient_attention_backward" | "_flash_attention_backward" => {
            attention(operator, 1, -3, 3, 2)
        }
        _ => return None,
    })
}

/// Flops of all other kinds: a number for each element read or written.
fn element_by_element(operator: &Operator) -> u128 {
    let written = || operator.writes().map(elements).fold(0, u128::saturating_add);
    let output = || operator.writes().next().map_or(0, elements);
    let input = |index: usize| tensor(operator, index).map_or(0, elements);
    let times = u128::saturating_mul;
    match base(&operator.kind) {
        "avg_pool2d"
        | "max_pool2d"
        | "max_pool2d_with_indices"
        | "avg_pool3d"
        | "max_pool3d_with_indices" => times(output(), window(operator, 1)),
        "avg_pool2d_backward" | "avg_pool3d_backward" => times(input(0), window(operator, 2)),
        "max_pool2d_with_indices_backward" | "max_pool3d_with_indices_backward" => input(0),
        "_adaptive_avg_pool2d" | "adaptive_avg_pool2d" | "adaptive_max_pool2d" => input(0),
        "_adaptive_avg_pool2d_backward" | "adaptive_max_pool2d_backward" => written(),
        "sum"
        | "mean"
        | "prod"
        | "amax"
        | "amin"
        | "max"
        | "min"
        | "argmax"
        | "argmin"
        | "all"
        | "any"
        | "norm"
        | "linalg_vector_norm"
        | "cumsum"
        | "var"
        | "std"
        | "var_mean"
        | "logsumexp"
        | "_foreach_norm"
        | "nll_loss_forward"
        | "nll_loss2d_forward"
        | "nll_loss_backward"
        | "nll_loss2d_backward"
        | "embedding_dense_backward"
        | "mse_loss"
        | "mse_loss_backward"
        | "binary_cross_entropy_with_logits" => operator.reads().next().map_or(0, elements),
        "_batch_norm_impl_index"
        | "batch_norm"
        | "cudnn_batch_norm"
        | "native_batch_norm"
        | "_native_batch_norm_legit"
        | "layer_norm"
        | "native_layer_norm"
        | "group_norm"
        | "native_group_norm"
        | "_fused_rms_norm"
        | "rms_norm" => times(8, input(0)),
        "cudnn_batch_norm_backward"
        | "native_batch_norm_backward"
        | "_batch_norm_impl_index_backward"
        | "native_layer_norm_backward"
        | "native_group_norm_backward"
        | "_fused_rms_norm_backward" => times(12, input(0)),
        "softmax" | "_softmax" | "_safe_softmax" | "log_softmax" | "_log_softmax"
        | "cross_entropy_loss" => times(5, input(0)),
        "_softmax_backward_data" | "_log_softmax_backward_data" => times(4, input(0)),
        "native_dropout" | "dropout" | "dropout_" | "_fused_dropout" => times(10, input(0)),
        "native_dropout_backward" => input(0),
        kind => match update(operator) {
            Some(rule) => times(u128::from(rule.flops), parameters(operator)),
            None => times(per_element(kind), written()),
        },
    }
}

/// Flops per written element of elementwise kinds, in place or not, for single tensors or lists. 0
/// for kinds that only move data.
fn per_element(kind: &str) -> u128 {
    let kind = kind.strip_prefix("_foreach_").unwrap_or(kind);
    match kind.strip_suffix('_').unwrap_or(kind) {
        "add"
        | "sub"
        | "rsub"
        | "mul"
        | "div"
        | "neg"
        | "abs"
        | "sign"
        | "relu"
        | "threshold"
        | "threshold_backward"
        | "leaky_relu"
        | "leaky_relu_backward"
        | "hardtanh"
        | "hardtanh_backward"
        | "clamp"
        | "clamp_min"
        | "clamp_max"
        | "maximum"
        | "minimum"
        | "where"
        | "masked_fill"
        | "eq"
        | "ne"
        | "lt"
        | "le"
        | "gt"
        | "ge"
        | "logical_and"
        | "logical_or"
        | "logical_not"
        | "bitwise_and"
        | "bitwise_not"
        | "floor"
        | "ceil"
        | "round"
        | "reciprocal"
        | "square"
        | "remainder"
        | "isneginf"
        | "isnan"
        | "isinf" => 1,
        "addcmul" | "addcdiv" | "lerp" => 3,
        "exp"
        | "expm1"
        | "log"
        | "log1p"
        | "sqrt"
        | "rsqrt"
        | "pow"
        | "sin"
        | "cos"
        | "tan"
        | "tanh"
        | "tanh_backward"
        | "erf"
        | "sigmoid"
        | "sigmoid_backward"
        | "silu"
        | "silu_backward"
        | "gelu"
        | "gelu_backward"
        | "elu"
        | "elu_backward"
        | "softplus"
        | "softplus_backward"
        | "mish"
        | "hardswish"
        | "hardswish_backward"
        | "hardsigmoid"
        | "hardsigmoid_backward" => 10,
        _ => 0,
    }
}

fn tensor(operator: &Operator, index: usize) -> Option<&Operand> {
    match operator.args.get(index) {
        Some(Arg::Tensor(operand)) => Some(operand),
        _ => None,
    }
}

/// Weights per output element: the extents of the weight except the first one (output channels, or
/// input channels for a transposed convolution).
fn filter(operator: &Operator, weight: usize) -> u128 {
    tensor(operator, weight).map_or(0, |w| product(w.shape.get(1..).unwrap_or_default()))
}

/// The extent that a matrix product sums over: the left factor's last extent.
fn inner(operator: &Operator, left: usize) -> u128 {
    tensor(operator, left).and_then(|o| o.shape.last()).map_or(0, |&n| u128::from(n))
}

/// `heads · queries · keys · (a·e + b·v) · 2`. Query, key and value are the arguments from number
/// `first` on; `sequence` is the dimension of the sequence, counted from the end.
fn attention(operator: &Operator, first: usize, sequence: isize, a: u128, b: u128) -> u128 {
    let (Some(query), Some(key), Some(value)) =
        (tensor(operator, first), tensor(operator, first + 1), tensor(operator, first + 2))
    else {
        return 0;
    };
    let extent = |o: &Operand, from_behind: isize| {
        let index = o.shape.len().checked_add_signed(from_behind);
        index.and_then(|i| o.shape.get(i)).map_or(0, |&n| u128::from(n))
    };
    let e = extent(query, -1);
    let rows = elements(query).checked_div(e).unwrap_or(0);
    let each = a.saturating_mul(e).saturating_add(b.saturating_mul(extent(value, -1)));
    rows.saturating_mul(extent(key, sequence)).saturating_mul(each).saturating_mul(2)
}

/// Number of elements of a pooling window; a single number is the side of a square.
fn window(operator: &Operator, argument: usize) -> u128 {
    let side = |&n: &i64| u128::try_from(n).unwrap_or(0);
    match operator.args.get(argument) {
        Some(Arg::Ints(sides)) if sides.len() == 1 => {
            side(&sides[0]).saturating_mul(side(&sides[0]))
        }
        Some(Arg::Ints(sides)) => sides.iter().map(side).fold(1, u128::saturating_mul),
        Some(Arg::Int(n)) => side(n).saturating_mul(side(n)),
        _ => 1,
    }
}

/// The optimizer whose update or fused step this is, if it is one.
fn update(operator: &Operator) -> Option<&'static Rule> {
    let fused = |kind: &str| kind.strip_prefix("_fused_")?.strip_suffix('_').map(Rule::of_fused)?;
    Rule::of_kind(&operator.kind).or_else(|| fused(base(&operator.kind)))
}

/// Number of elements of the parameters that an update steps: all of its first argument if that is
/// a list, else those of its first tensor.
fn parameters(operator: &Operator) -> u128 {
    match operator.args.first() {
        Some(Arg::Tensors(all)) => all.iter().flatten().map(elements).fold(0, u128::saturating_add),
        _ => operator.reads().next().map_or(0, elements),
    }
}

#[cfg(test)]
mod tests;
