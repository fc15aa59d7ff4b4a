//! Reductions: which dimensions go, checked once for every backend.

use super::KernelError;
use super::arguments::{ints, tensor};
use super::error::invalid;
use super::shapes::dimension;
use super::view::{Call, View};
use crate::job::Arg;

/// One flag for each dimension of argument 0: all of them.
///
/// # Errors
/// When there is no such argument.
pub fn everything(call: &Call<'_>) -> Result<Vec<bool>, KernelError> {
    Ok(vec![true; tensor(call, 0)?.shape.len()])
}

/// One flag for each dimension of argument 0: those named in argument `at`, all when it names none.
///
/// # Errors
/// When a dimension is out of range.
pub fn chosen_at(call: &Call<'_>, at: usize) -> Result<Vec<bool>, KernelError> {
    let (rank, named) = (tensor(call, 0)?.shape.len(), ints(call, at)?);
    let mut chosen = vec![named.is_empty(); rank];
    for dim in named {
        let dim = dimension(dim, rank)?;
        if let Some(slot) = chosen.get_mut(dim) {
            *slot = true;
        }
    }
    Ok(chosen)
}

/// [`chosen_at`] argument 1.
///
/// # Errors
/// When a dimension is out of range.
pub fn chosen(call: &Call<'_>) -> Result<Vec<bool>, KernelError> {
    chosen_at(call, 1)
}

/// The dimensions of `sum` and `mean`, which have a form without dimensions, `(self, dtype)`.
///
/// # Errors
/// When a dimension is out of range.
pub fn summed(call: &Call<'_>) -> Result<Vec<bool>, KernelError> {
    let args = &call.operator.args;
    let without = args.len() <= 2 && !matches!(args.get(1), Some(Arg::Ints(_)));
    if without { everything(call) } else { chosen(call) }
}

/// The dimensions of an operator that has a form with at most `least` arguments over all of them.
///
/// # Errors
/// When a dimension is out of range.
pub fn all_or_chosen(call: &Call<'_>, least: usize) -> Result<Vec<bool>, KernelError> {
    if call.operator.args.len() <= least { everything(call) } else { chosen(call) }
}

/// The number of elements that are reduced to one.
#[must_use]
pub fn terms(from: &View, gone: &[bool]) -> usize {
    from.shape.iter().zip(gone).filter(|(_, g)| **g).map(|(n, _)| *n).product()
}

/// The extents or strides of the reduced dimensions; of the kept ones if `which` is false.
#[must_use]
pub fn pick(values: &[usize], gone: &[bool], which: bool) -> Vec<usize> {
    values.iter().zip(gone).filter(|(_, g)| **g == which).map(|(v, _)| *v).collect()
}

/// A view's dimensions in two parts.
pub struct Split {
    /// Extents of the dimensions that are kept.
    pub kept: Vec<usize>,
    /// Extents of the dimensions that are reduced.
    pub reduced: Vec<usize>,
    /// The input's strides along the kept dimensions, in elements.
    pub kept_stride: Vec<usize>,
    /// The input's strides along the reduced dimensions, in elements.
    pub reduced_stride: Vec<usize>,
    /// Whether the innermost dimension is kept: results are best computed side by side.
    pub columns: bool,
}

impl Split {
    /// Splits the dimensions of `from`.
    #[must_use]
    pub fn new(from: &View, gone: &[bool]) -> Self {
        let (kept, reduced) = (pick(&from.shape, gone, false), pick(&from.shape, gone, true));
        let (kept_stride, reduced_stride) =
            (pick(&from.stride, gone, false), pick(&from.stride, gone, true));
        let nearest = |strides: &[usize], shape: &[usize]| {
            let steps = strides.iter().zip(shape).filter(|&(&s, &n)| n > 1 && s > 0);
            steps.map(|(&s, _)| s).min().unwrap_or(usize::MAX)
        };
        let columns = nearest(&reduced_stride, &reduced) > nearest(&kept_stride, &kept);
        Self { kept, reduced, kept_stride, reduced_stride, columns }
    }

    /// The steps of a result along the dimensions that stay; it may keep the others as ones.
    ///
    /// # Errors
    /// When the result is of another shape.
    pub fn result(&self, out: &View, gone: &[bool]) -> Result<Vec<usize>, KernelError> {
        if out.shape == self.kept {
            Ok(out.stride.clone())
        } else if out.shape.len() == gone.len()
            && pick(&out.shape, gone, false) == self.kept
            && pick(&out.shape, gone, true).iter().all(|&n| n == 1)
        {
            Ok(pick(&out.stride, gone, false))
        } else {
            Err(invalid!("reducing to shape {:?} does not give {:?}", self.kept, out.shape))
        }
    }
}
