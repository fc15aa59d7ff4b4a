//! The global scratch of PyTorch's CUDA reduction kernel.
//!
//! A reduction with few outputs and many inputs is split across thread blocks. Their partial
//! results meet in a buffer in global memory, beside one counter per block. The size follows from
//! the iteration space alone: this is the launch configuration of PyTorch's `Reduce.cuh`
//! (`setReduceConfig`) for its usual four values per load. Sorted and segmented reductions are not
//! handled.

use super::super::inputs::Tensor;
use super::{Class, Editor, Rule};

/// The most threads of a block.
const MOST_THREADS: u64 = 512;
const WARP: u64 = 32;
/// Values that a thread loads at once.
const VECTOR: u64 = 4;
const FEWEST_VALUES: u64 = 16;
const MOST_VALUES: u64 = 256;

impl Editor<'_> {
    pub(super) fn reduction(&mut self, op: u32) -> bool {
        let inputs = self.inputs(op);
        let Some(input) = inputs.tensor(0) else { return false };
        let at = match self.name(op) {
            "aten::norm" | "aten::linalg_vector_norm" => 2,
            _ => 1,
        };
        let rank = input.dims.len();
        let named = inputs
            .integers(at)
            .filter(|d| !d.is_empty())
            .unwrap_or_else(|| (0..rank as i64).collect());
        let dims: Vec<usize> = named
            .iter()
            .filter_map(|&d| usize::try_from(if d < 0 { d + rank as i64 } else { d }).ok())
            .filter(|&d| d < rank)
            .collect();
        self.reduction_scratch(op, input, &dims);
        false
    }

    /// Adds the scratch of reducing `input` over `dims`.
    pub(super) fn reduction_scratch(&mut self, op: u32, input: &Tensor, dims: &[usize]) {
        if !self.applies(Rule::Reductions) {
            return;
        }
        if let Some((buffer, counters)) = scratch(input, dims, self.settings.class) {
            self.add_transients(&[buffer, counters], op, Rule::Reductions);
        }
    }
}

/// One dimension of the iteration space.
#[derive(Clone, Copy, Debug)]
struct Axis {
    size: u64,
    input: u64,
    output: u64,
    reduced: bool,
}

/// Bytes of the buffer and of the counters; `None` when every output is reduced within one block.
pub(super) fn scratch(input: &Tensor, reduced: &[usize], class: Class) -> Option<(u64, u64)> {
    let axes = axes(input, reduced);
    let outputs: u64 = axes.iter().filter(|a| !a.reduced).map(|a| a.size).product();
    let each: u64 = axes.iter().filter(|a| a.reduced).map(|a| a.size).product();
    if outputs == 0 || each == 0 || input.count() == 0 || input.count() > 1 << 31 {
        return None;
    }
    let reduced_axes = axes.iter().filter(|a| a.reduced).count();
    let element = input.element.max(4);
    let along_reduced = reduced_axes == axes.len()
        || axes.first()?.input < axes.get(reduced_axes)?.input
        || reduced_axes == 0;
    let (mut across, down, stride) = if along_reduced {
        (each, outputs, axes.first().map_or(1, |a| a.input))
    } else {
        (outputs, each, axes[reduced_axes].input)
    };
    let mut vector = 1;
    if stride == 1 {
        if along_reduced && across > 128 && axes.len() == 1 {
            across /= VECTOR;
        } else if !along_reduced {
            vector = output_vector(&axes, reduced_axes);
            across /= vector;
        }
    }
    let most = MOST_THREADS / vector;
    let (across, down) = (last_power_of_two(across).min(most), last_power_of_two(down).min(most));
    let mut width = across.min(WARP);
    let height = down.min(most / width);
    width = across.min(most / height);

    let (mut step_input, mut step_output) = (1, 1);
    if along_reduced {
        step_input *= width;
    } else {
        step_output *= width;
    }
    let split_threshold = (height * 16).min(MOST_VALUES);
    let across_warps = each.div_ceil(step_input) >= split_threshold;
    if across_warps {
        step_input *= height;
    } else {
        step_output *= height;
    }
    let values = each.div_ceil(step_input);
    let grid = (outputs / vector).div_ceil(step_output);
    let target = class.multiprocessors * (class.threads / (width * height));
    if !across_warps || values < MOST_VALUES || grid > target {
        return None;
    }
    let blocks =
        target.div_ceil(grid).min(values.div_ceil(FEWEST_VALUES)).max(values.div_ceil(MOST_VALUES));
    if blocks <= 1 {
        return None;
    }
    let share = if along_reduced { 1 } else { width * vector };
    Some((element * outputs * blocks * share, 4 * grid))
}

/// The iteration space as `TensorIterator` orders it: reduced axes first, each kind by stride,
/// neighbours merged.
fn axes(input: &Tensor, reduced: &[usize]) -> Vec<Axis> {
    let mut output = 1;
    let mut all: Vec<Axis> = Vec::with_capacity(input.dims.len());
    for (d, &size) in input.dims.iter().enumerate().rev() {
        let is_reduced = reduced.contains(&d);
        let stride =
            input.strides.get(d).copied().unwrap_or_else(|| input.dims[d + 1..].iter().product());
        all.push(Axis {
            size,
            input: stride,
            output: if is_reduced { 0 } else { output },
            reduced: is_reduced,
        });
        if !is_reduced {
            output = output.saturating_mul(size);
        }
    }
    all.retain(|a| a.size != 1);
    all.sort_by_key(|a| (!a.reduced, if a.reduced { a.input } else { a.output }));
    let mut merged: Vec<Axis> = Vec::with_capacity(all.len());
    for axis in all {
        match merged.last_mut() {
            Some(last)
                if last.reduced == axis.reduced
                    && last.input.saturating_mul(last.size) == axis.input
                    && last.output.saturating_mul(last.size) == axis.output =>
            {
                last.size = last.size.saturating_mul(axis.size);
            }
            _ => merged.push(axis),
        }
    }
    merged
}

/// How many outputs one thread handles at once: a divisor of all strides that matter.
fn output_vector(axes: &[Axis], first_output: usize) -> u64 {
    let mut vector = VECTOR;
    let mut divide = |n: u64| {
        while !n.is_multiple_of(vector) {
            vector /= 2;
        }
    };
    divide(axes[first_output].size);
    for (index, axis) in axes.iter().enumerate() {
        if index != first_output {
            divide(axis.input);
        }
    }
    vector
}

fn last_power_of_two(n: u64) -> u64 {
    if n == 0 { 1 } else { 1 << n.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: Class = Class { capability: 9, multiprocessors: 132, threads: 2048 };

    fn packed(dims: &[u64]) -> Tensor {
        let strides = (0..dims.len()).map(|d| dims[d + 1..].iter().product()).collect();
        Tensor { dims: dims.to_vec(), strides, element: 4, integral: false }
    }

    /// Requests of PyTorch 2.11 on a Hopper-class device.
    #[test]
    fn sizes_are_pytorchs() {
        assert_eq!(scratch(&packed(&[1024, 768]), &[0], H100), Some((6_291_456, 24)));
        assert_eq!(scratch(&packed(&[1024, 3072]), &[0], H100), Some((25_165_824, 96)));
        assert_eq!(scratch(&packed(&[32128, 512]), &[0], H100).map(|s| s.0), Some(131_596_288));
        assert_eq!(scratch(&packed(&[32, 10]), &[0], H100), None);
        assert_eq!(
            scratch(&packed(&[32, 64, 86, 86]), &[0, 2, 3], H100).map(|s| s.0.div_ceil(512) * 512),
            Some(2560)
        );
    }
}
