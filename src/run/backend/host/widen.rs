//! Operators on bf16, f16 and f64: their operands are converted, the kernel computes in f32, and
//! each result is rounded once, to the nearest. For bf16 and f16 PyTorch's kernels on the CPU do
//! the same; f64 is less exact here than there.
//!
//! The converted copies lie outside the arena and live as long as the call.

use super::kernels::Kernel;
use super::kernels::elements::{Lane, copy};
use crate::backend::operators::error::unsupported;
use crate::backend::operators::shapes::span;
use crate::backend::operators::view::{Call, Operand, View};
use crate::backend::operators::{KernelError, kept_input};
use crate::job::Dtype;

/// Bytes that operands of one other type cover, and the same elements as f32.
struct Range {
    start: usize,
    end: usize,
    dtype: Dtype,
    /// An argument reads them.
    read: bool,
    wide: Vec<f32>,
}

/// Of a floating type that kernels do not work in.
fn is_other(view: &View) -> bool {
    matches!(view.dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F64)
}

fn size(dtype: Dtype) -> usize {
    usize::try_from(dtype.size()).unwrap_or(8)
}

/// Runs `kernel`, in f32 where operands are of another floating type.
///
/// # Errors
/// What the kernel says; and when operands of different types share bytes.
pub fn run(kernel: Kernel, call: &Call<'_>) -> Result<(), KernelError> {
    if let Some((kept, input)) = kept_input(call) {
        copy(kept, input)?;
    }
    if !call.views().any(is_other) {
        return kernel(call);
    }
    let mut ranges = ranges(call)?;
    let args: Vec<Operand> = call
        .args
        .iter()
        .map(|operand| match operand {
            Operand::Tensor(view) => Operand::Tensor(widened(&mut ranges, view)),
            Operand::Tensors(list) => Operand::Tensors(
                list.iter().map(|v| v.as_ref().map(|v| widened(&mut ranges, v))).collect(),
            ),
            Operand::Plain => Operand::Plain,
        })
        .collect();
    let outputs: Vec<Option<View>> =
        call.outputs.iter().map(|v| v.as_ref().map(|v| widened(&mut ranges, v))).collect();
    let hidden: Vec<View> = call.hidden.iter().map(|v| widened(&mut ranges, v)).collect();
    kernel(&Call { args: &args, outputs: &outputs, hidden: &hidden, ..*call })?;
    for (narrow, wide) in call.writes().zip(outputs.iter().flatten().chain(&hidden)) {
        if is_other(narrow) && !narrow.data.is_null() {
            copy(narrow, wide)?;
        }
    }
    Ok(())
}

/// The bytes that operands of other floating types cover, those that overlap as one.
fn ranges(call: &Call<'_>) -> Result<Vec<Range>, KernelError> {
    let mut ranges: Vec<Range> = Vec::new();
    let reads = call.reads().map(|view| (view, true));
    for (view, read) in reads.chain(call.writes().map(|view| (view, false))) {
        if let (true, Some((start, end))) = (is_other(view) && !view.data.is_null(), span(view)) {
            ranges.push(Range { start, end, dtype: view.dtype, read, wide: Vec::new() });
        }
    }
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start < last.end => {
                if last.dtype != range.dtype || (range.start - last.start) % size(range.dtype) != 0
                {
                    return Err(shared());
                }
                last.end = last.end.max(range.end);
                last.read |= range.read;
            }
            _ => joined.push(range),
        }
    }
    let others = call.views().filter(|view| !is_other(view) && !view.data.is_null());
    for (start, end) in others.filter_map(span) {
        if joined.iter().any(|range| range.start < end && start < range.end) {
            return Err(shared());
        }
    }
    for range in &mut joined {
        range.wide = vec![0.0; (range.end - range.start) / size(range.dtype)];
        if range.read {
            let from = call.views().find_map(|view| {
                let at = range.start.checked_sub(view.data.addr())?;
                (is_other(view) && at == 0).then_some(view.data)
            });
            let Some(from) = from else { continue };
            // SAFETY: the range is joined of views, which lie inside one storage.
            unsafe { f32::load(range.dtype, from, 1, &mut range.wide) };
        }
    }
    Ok(joined)
}

fn shared() -> KernelError {
    unsupported!("operands of different types share bytes")
}

/// The view of the widened elements.
fn widened(ranges: &mut [Range], view: &View) -> View {
    let start = view.data.addr();
    let range = ranges.iter_mut().find(|r| (r.start..r.end).contains(&start));
    match range.filter(|_| is_other(view)) {
        None if is_other(view) => View { dtype: Dtype::F32, ..view.clone() },
        None => view.clone(),
        Some(range) => View {
            data: range
                .wide
                .as_mut_ptr()
                .wrapping_add((start - range.start) / size(range.dtype))
                .cast(),
            dtype: Dtype::F32,
            ..view.clone()
        },
    }
}
