//! Shapes, strides, and whether views are of the same elements.

use std::ops::Range;

use super::KernelError;
use super::error::invalid;
use super::view::{Call, View};

/// Dimension `dim` of `rank` with negatives counted from the end.
///
/// # Errors
/// When it is out of range.
pub fn dimension(dim: i64, rank: usize) -> Result<usize, KernelError> {
    let rank = rank.max(1);
    usize::try_from(if dim < 0 { dim + rank as i64 } else { dim })
        .ok()
        .filter(|&d| d < rank)
        .ok_or_else(|| invalid!("dimension {dim} of a tensor of {rank} dimensions"))
}

/// How many elements a view shows.
pub fn count(view: &View) -> usize {
    view.shape.iter().product()
}

/// Whether the elements lie one after another.
pub fn is_contiguous(view: &View) -> bool {
    let mut expected = 1;
    view.shape.iter().zip(&view.stride).rev().all(|(&n, &s)| {
        let fits = n == 1 || s == expected;
        expected *= n;
        fits
    }) || count(view) == 0
}

/// Row-major strides.
pub fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut stride = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        stride[i - 1] = stride[i] * shape[i].max(1);
    }
    stride
}

/// A view's strides as a tensor of `shape` sees them: 0 where it repeats.
///
/// # Errors
/// When it can't be broadcast.
pub fn broadcast(view: &View, shape: &[usize]) -> Result<Vec<usize>, KernelError> {
    let fail = || invalid!("shape {:?} can't be broadcast to {shape:?}", view.shape);
    let missing = shape.len().checked_sub(view.shape.len()).ok_or_else(fail)?;
    let mut stride = vec![0; shape.len()];
    for (d, (&n, &s)) in view.shape.iter().zip(&view.stride).enumerate() {
        match n {
            _ if n == shape[missing + d] => stride[missing + d] = s,
            1 => {}
            _ => return Err(fail()),
        }
    }
    Ok(stride)
}

/// Refuses a view of another shape.
///
/// # Errors
/// When the shapes differ.
pub fn same_shape(a: &View, b: &View) -> Result<(), KernelError> {
    if a.shape == b.shape {
        Ok(())
    } else {
        Err(invalid!("shapes {:?} and {:?} differ", a.shape, b.shape))
    }
}

/// The part of a view with `range` of dimension `dim`.
///
/// # Errors
/// When the range is not inside the dimension.
pub fn narrow(view: &View, dim: usize, range: Range<usize>) -> Result<View, KernelError> {
    let extent = *view.shape.get(dim).ok_or("a dimension beyond the tensor's")?;
    if range.start > range.end || range.end > extent {
        return Err(invalid!("elements {}..{} of a dimension of {extent}", range.start, range.end));
    }
    let mut part = view.clone();
    if !range.is_empty() {
        part.data = at(view, range.start * view.stride[dim]);
    }
    part.shape[dim] = range.len();
    Ok(part)
}

/// The part of `view` at `index` of dimension `dim`, which is left out.
///
/// # Errors
/// As [`narrow`].
pub fn select(view: &View, dim: usize, index: usize) -> Result<View, KernelError> {
    let mut part = narrow(view, dim, index..index + 1)?;
    part.shape.remove(dim);
    part.stride.remove(dim);
    Ok(part)
}

/// `out` and `from` by the same extents, where dimension d of `out` is `times[d]` times `from`'s,
/// the repeats outside (`tiled`) or inside: a copy from the second view to the first repeats.
///
/// # Errors
/// When the extents are others.
pub fn repeats(
    out: &View,
    from: &View,
    times: &[usize],
    tiled: bool,
) -> Result<(View, View), KernelError> {
    let (mut to, mut source) = (out.clone(), from.clone());
    for shape in [&mut to.shape, &mut to.stride, &mut source.shape, &mut source.stride] {
        shape.clear();
    }
    for (d, &n) in from.shape.iter().enumerate() {
        if Some(out.shape[d]) != n.checked_mul(times[d]) {
            return Err(invalid!(
                "repeating shape {:?} by {times:?} does not give {:?}",
                from.shape,
                out.shape
            ));
        }
        let step = out.stride[d];
        let pairs = if tiled {
            [(times[d], n * step, 0), (n, step, from.stride[d])]
        } else {
            [(n, times[d] * step, from.stride[d]), (times[d], step, 0)]
        };
        for (extent, to_step, from_step) in pairs {
            to.shape.push(extent);
            to.stride.push(to_step);
            source.shape.push(extent);
            source.stride.push(from_step);
        }
    }
    Ok((to, source))
}

/// The address of the element `offset` elements after the first; only for offsets inside the view.
pub fn at(view: &View, offset: usize) -> *mut u8 {
    view.data.wrapping_add(offset * view.dtype.size() as usize)
}

/// Calls `row(offsets, length, strides)` for runs that together cover `shape` once, where `offsets`
/// and `strides` count elements of each of `N` operands. Dimensions are taken in order of operand
/// 0's strides when `reorder`, and joined where all operands allow it.
pub fn walk<const N: usize>(
    shape: &[usize],
    strides: &[impl AsRef<[usize]>; N],
    reorder: bool,
    mut row: impl FnMut([usize; N], usize, [usize; N]),
) {
    walk_dyn(shape, std::array::from_fn(|k| strides[k].as_ref()), reorder, &mut row);
}

/// What [`walk_dyn`] calls. A `dyn FnMut` would compile every closure a second time, to be called
/// once.
trait Row<const N: usize> {
    fn run(&mut self, offsets: [usize; N], length: usize, strides: [usize; N]);
}

impl<const N: usize, F: FnMut([usize; N], usize, [usize; N])> Row<N> for F {
    fn run(&mut self, offsets: [usize; N], length: usize, strides: [usize; N]) {
        self(offsets, length, strides);
    }
}

/// One instance for each number of operands: a call for each run costs nothing, code for each
/// kernel would.
fn walk_dyn<const N: usize>(
    shape: &[usize],
    strides: [&[usize]; N],
    reorder: bool,
    row: &mut dyn Row<N>,
) {
    if shape.contains(&0) {
        return;
    }
    let mut dims: Vec<(usize, [usize; N])> = shape
        .iter()
        .enumerate()
        .filter(|&(_, &n)| n != 1)
        .map(|(d, &n)| (n, std::array::from_fn(|k| strides[k][d])))
        .collect();
    if reorder {
        dims.sort_by_key(|(_, s)| std::cmp::Reverse(s[0]));
    }
    let mut joined: Vec<(usize, [usize; N])> = Vec::with_capacity(dims.len());
    for (n, s) in dims {
        match joined.last_mut() {
            Some((m, t)) if (0..N).all(|k| t[k] == s[k] * n) => (*m, *t) = (*m * n, s),
            _ => joined.push((n, s)),
        }
    }
    let (length, step) = joined.pop().unwrap_or((1, [1; N]));
    let mut index = vec![0; joined.len()];
    let mut offsets = [0; N];
    loop {
        row.run(offsets, length, step);
        let mut d = joined.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            let (n, s) = joined[d];
            index[d] += 1;
            if index[d] < n {
                (0..N).for_each(|k| offsets[k] += s[k]);
                break;
            }
            index[d] = 0;
            (0..N).for_each(|k| offsets[k] -= s[k] * (n - 1));
        }
    }
}

/// Calls `visit` with the operands' offsets for every index of `shape`, in row-major order.
pub fn each<const N: usize>(
    shape: &[usize],
    strides: &[impl AsRef<[usize]>; N],
    mut visit: impl FnMut([usize; N]),
) {
    walk(shape, strides, false, |start, length, step| {
        for i in 0..length {
            visit(std::array::from_fn(|k| start[k] + i * step[k]));
        }
    });
}

/// First address and one past the last address that a view can touch; `None` for a view of nothing.
#[must_use]
pub fn span(view: &View) -> Option<(usize, usize)> {
    if view.shape.contains(&0) {
        return None;
    }
    let size = usize::try_from(view.dtype.size()).unwrap_or(16);
    let last: usize = view.shape.iter().zip(&view.stride).map(|(n, s)| (n - 1) * s).sum();
    let start = view.data.addr();
    Some((start, start + (last + 1) * size))
}

fn overlap(a: &View, b: &View) -> bool {
    matches!((span(a), span(b)), (Some(a), Some(b)) if a.0 < b.1 && b.0 < a.1)
}

/// Whether two views are of the same elements.
pub fn same(a: &View, b: &View) -> bool {
    a.data == b.data && a.dtype == b.dtype && a.shape == b.shape && a.stride == b.stride
}

/// Whether each index of a view is an element of its own (sufficient, and true of every sliced or
/// permuted tensor).
pub fn once(view: &View) -> bool {
    let mut dims: Vec<(usize, usize)> = view
        .shape
        .iter()
        .zip(&view.stride)
        .filter(|(n, _)| **n != 1)
        .map(|(&n, &s)| (s, n))
        .collect();
    dims.sort();
    let mut reach = 0;
    view.shape.contains(&0)
        || dims.iter().all(|&(step, extent)| {
            let apart = step > reach;
            reach += step * (extent - 1);
            apart
        })
}

/// Checks that a view can be written whole while all arguments and other outputs are in use.
///
/// # Errors
/// When it shares memory with one of them, or with itself.
pub fn distinct<'a>(call: &Call<'_>, view: &'a View) -> Result<&'a View, KernelError> {
    if !once(view) {
        return Err(invalid!(
            "an element of its output would be written more than once (strides {:?})",
            view.stride
        ));
    }
    let mut written = call.writes().filter(|other| !std::ptr::eq(*other, view));
    if call.reads().any(|other| overlap(view, other)) || written.any(|other| overlap(view, other)) {
        return Err(invalid!("its output cannot be written over another operand"));
    }
    Ok(view)
}

/// The one step that walks these dimensions in row-major order, if there is one.
pub fn collapse(shape: &[usize], stride: &[usize]) -> Option<usize> {
    let mut walk: Option<(usize, usize)> = None;
    for (&extent, &step) in shape.iter().zip(stride).rev().filter(|(n, _)| **n != 1) {
        walk = match walk {
            None => Some((step, extent)),
            Some((first, count)) if step == first * count => Some((first, count * extent)),
            Some(_) => return None,
        };
    }
    Some(walk.map_or(1, |(step, _)| step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Dtype;

    #[test]
    fn collapse_finds_the_single_step() {
        assert_eq!(collapse(&[2, 3], &[3, 1]), Some(1));
        assert_eq!(collapse(&[2, 3], &[6, 2]), Some(2));
        assert_eq!(collapse(&[2, 3], &[4, 1]), None);
        assert_eq!(collapse(&[2, 1, 3], &[3, 77, 1]), Some(1));
        assert_eq!(collapse(&[2, 3], &[1, 2]), None);
        assert_eq!(collapse(&[1], &[5]), Some(1));
    }

    #[test]
    fn once_refuses_repeats() {
        let view = |shape: &[usize], stride: &[usize]| View {
            data: std::ptr::null_mut(),
            dtype: Dtype::F32,
            shape: shape.into(),
            stride: stride.into(),
        };
        assert!(once(&view(&[2, 3], &[3, 1])));
        assert!(once(&view(&[2, 3], &[1, 2])));
        assert!(once(&view(&[2, 1], &[1, 0])));
        assert!(!once(&view(&[2, 3], &[0, 1])));
        assert!(!once(&view(&[2, 3], &[2, 1])));
    }
}
