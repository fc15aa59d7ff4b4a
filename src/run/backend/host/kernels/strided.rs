//! Getting at a call's operands: typed, checked views and walks over strided elements.
//!
//! Graph validation guarantees that each view lies inside its storage, nothing more; what is checked here
//! is what kernels rely on beyond that: element types, writes that hit each element once and stay off what
//! is read. Not for: arithmetic.

use std::cell::RefCell;

use super::super::view::{Call, Operand, TILE_BYTES, View};
use super::elements::walk;
use crate::job::{Arg, Dtype};

/// Floats in the tile that holds unfolded columns.
pub const COLUMN_FLOATS: usize = TILE_BYTES / 2 / 4;
/// Floats in the tile that holds gathered or not yet scattered rows. A quarter of the allowance stays for packing.
pub const ROW_FLOATS: usize = TILE_BYTES / 4 / 4;

thread_local! {
    static TILES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Lends this thread's two tiles, of [`COLUMN_FLOATS`] and [`ROW_FLOATS`], with whatever they last held.
pub fn with_tiles<R>(work: impl FnOnce(&mut [f32], &mut [f32]) -> R) -> R {
    TILES.with(|tiles| {
        let mut tiles = tiles.take();
        tiles.resize(COLUMN_FLOATS + ROW_FLOATS, 0.0);
        let (columns, rows) = tiles.split_at_mut(COLUMN_FLOATS);
        let result = work(columns, rows);
        TILES.set(tiles);
        result
    })
}

/// Checks that a view is of f32.
pub fn f32_only<'a>(call: &Call<'_>, view: &'a View) -> Result<&'a View, String> {
    if view.dtype == Dtype::F32 {
        Ok(view)
    } else {
        Err(format!("{} supports f32 only, not {:?}", call.operator.kind, view.dtype))
    }
}

/// The tensor argument at a position, of f32; `None` where absent or undefined.
pub fn optional<'a>(call: &Call<'a>, at: usize) -> Result<Option<&'a View>, String> {
    match call.args.get(at) {
        Some(Operand::Tensor(view)) => f32_only(call, view).map(Some),
        _ => Ok(None),
    }
}

/// The tensor argument at a position, of f32.
pub fn tensor<'a>(call: &Call<'a>, at: usize, name: &str) -> Result<&'a View, String> {
    optional(call, at)?.ok_or_else(|| {
        format!("{} needs a tensor for its argument `{name}` ({at})", call.operator.kind)
    })
}

/// The output at a position, of any type; `None` where undefined. Past the declared ones come the hidden ones.
pub fn output<'a>(call: &Call<'a>, at: usize) -> Option<&'a View> {
    match call.outputs.get(at) {
        Some(view) => view.as_ref(),
        None => call.hidden.get(at - call.outputs.len()),
    }
}

/// The output at a position, of f32 and writable.
pub fn writable<'a>(call: &Call<'a>, at: usize) -> Result<Option<&'a View>, String> {
    output(call, at).map(|view| distinct(call, f32_only(call, view)?)).transpose()
}

/// The output at a position, of f32, writable and of a shape.
pub fn result<'a>(call: &Call<'a>, at: usize, shape: &[usize]) -> Result<&'a View, String> {
    let view = writable(call, at)?
        .ok_or_else(|| format!("{} needs its output {at}", call.operator.kind))?;
    same_shape(call, "its output", view, shape)?;
    Ok(view)
}

/// Checks a view's shape.
pub fn same_shape(call: &Call<'_>, what: &str, view: &View, shape: &[usize]) -> Result<(), String> {
    if view.shape == shape {
        Ok(())
    } else {
        Err(format!("{}: {what} is {:?} where {shape:?} is needed", call.operator.kind, view.shape))
    }
}

/// A whole number argument.
pub fn int(call: &Call<'_>, at: usize) -> Result<i64, String> {
    match call.operator.args.get(at) {
        Some(Arg::Int(n)) => Ok(*n),
        other => Err(format!(
            "{} needs a whole number as argument {at}, not {other:?}",
            call.operator.kind
        )),
    }
}

/// A number argument.
pub fn float(call: &Call<'_>, at: usize) -> Result<f64, String> {
    match call.operator.args.get(at) {
        Some(Arg::Float(x)) => Ok(*x),
        #[expect(clippy::cast_precision_loss, reason = "scalars such as alpha and beta are small")]
        Some(Arg::Int(n)) => Ok(*n as f64),
        Some(Arg::Bool(b)) => Ok(f64::from(*b)),
        other => {
            Err(format!("{} needs a number as argument {at}, not {other:?}", call.operator.kind))
        }
    }
}

/// A number argument, or what stands for it when it is absent.
pub fn float_or(call: &Call<'_>, at: usize, default: f64) -> Result<f64, String> {
    if matches!(call.operator.args.get(at), None | Some(Arg::None)) {
        Ok(default)
    } else {
        float(call, at)
    }
}

/// A flag argument; absent is false.
pub fn flag(call: &Call<'_>, at: usize) -> Result<bool, String> {
    match call.operator.args.get(at) {
        Some(Arg::Bool(b)) => Ok(*b),
        Some(Arg::Int(n)) => Ok(*n != 0),
        None | Some(Arg::None) => Ok(false),
        other => {
            Err(format!("{} needs a flag as argument {at}, not {other:?}", call.operator.kind))
        }
    }
}

/// Three flags, such as which gradients are wanted; absent is all.
pub fn mask(call: &Call<'_>, at: usize) -> Result<[bool; 3], String> {
    match call.operator.args.get(at) {
        Some(Arg::Bools(flags)) if flags.len() == 3 => Ok([flags[0], flags[1], flags[2]]),
        None => Ok([true; 3]),
        other => {
            Err(format!("{} needs three flags as argument {at}, not {other:?}", call.operator.kind))
        }
    }
}

/// One or two whole numbers for height and width, at least `least`; `None` where empty or absent.
pub fn pair(call: &Call<'_>, at: usize, least: usize) -> Result<Option<[usize; 2]>, String> {
    let numbers: &[i64] = match call.operator.args.get(at) {
        Some(Arg::Ints(numbers)) => numbers,
        Some(Arg::Int(n)) => std::slice::from_ref(n),
        // An empty list has no element type to be recorded with.
        Some(Arg::None | Arg::Floats(_) | Arg::Bools(_) | Arg::Tensors(_)) | None => &[],
        Some(other) => {
            return Err(format!(
                "{} needs whole numbers as argument {at}, not {other:?}",
                call.operator.kind
            ));
        }
    };
    let one = |n: i64| {
        // Far above any real kernel, far below where sums could overflow.
        usize::try_from(n)
            .ok()
            .filter(|&n| n >= least && n <= 1 << 24)
            .ok_or_else(|| format!("{}: {n} as argument {at} is out of range", call.operator.kind))
    };
    match *numbers {
        [] => Ok(None),
        [n] => Ok(Some([one(n)?; 2])),
        [h, w] => Ok(Some([one(h)?, one(w)?])),
        _ => Err(format!(
            "{} works in two dimensions, but argument {at} is {numbers:?}",
            call.operator.kind
        )),
    }
}

/// A product that must stay far from overflow.
pub fn product(call: &Call<'_>, factors: &[usize]) -> Result<usize, String> {
    factors
        .iter()
        .try_fold(1usize, |all, &n| all.checked_mul(n))
        .filter(|&n| n <= 1 << 48)
        .ok_or_else(|| format!("{}: the extents {factors:?} are too large", call.operator.kind))
}

/// First address and one past the last address that a view can touch; `None` for a view of nothing.
fn range(view: &View) -> Option<(usize, usize)> {
    if view.shape.contains(&0) {
        return None;
    }
    let size = usize::try_from(view.dtype.size()).unwrap_or(16);
    let last: usize = view.shape.iter().zip(&view.stride).map(|(n, s)| (n - 1) * s).sum();
    let start = view.data.addr();
    Some((start, start + (last + 1) * size))
}

fn overlap(a: &View, b: &View) -> bool {
    matches!((range(a), range(b)), (Some(a), Some(b)) if a.0 < b.1 && b.0 < a.1)
}

/// Whether two views are of the same elements.
pub fn same(a: &View, b: &View) -> bool {
    a.data == b.data && a.dtype == b.dtype && a.shape == b.shape && a.stride == b.stride
}

/// Whether each index of a view is an element of its own (sufficient, and true of every sliced or permuted tensor).
pub fn once(view: &View) -> bool {
    let mut dims: Vec<(usize, usize)> = view
        .shape
        .iter()
        .zip(&view.stride)
        .filter(|(n, _)| **n != 1)
        .map(|(&n, &s)| (s, n))
        .collect();
    dims.sort_unstable();
    let mut reach = 0;
    view.shape.contains(&0)
        || dims.iter().all(|&(step, extent)| {
            let apart = step > reach;
            reach += step * (extent - 1);
            apart
        })
}

/// Checks that a view can be written whole while all arguments and other outputs are in use.
pub fn distinct<'a>(call: &Call<'_>, view: &'a View) -> Result<&'a View, String> {
    if !once(view) {
        return Err(format!(
            "{} would write an element of its output more than once (strides {:?})",
            call.operator.kind, view.stride
        ));
    }
    let mut read = call.args.iter().flat_map(|operand| -> Box<dyn Iterator<Item = &View>> {
        match operand {
            Operand::Tensor(view) => Box::new(std::iter::once(view)),
            Operand::Tensors(list) => Box::new(list.iter().flatten()),
            Operand::Plain => Box::new(std::iter::empty()),
        }
    });
    let mut written = call
        .outputs
        .iter()
        .flatten()
        .chain(call.hidden)
        .filter(|other| !std::ptr::eq(*other, view));
    if read.any(|other| overlap(view, other)) || written.any(|other| overlap(view, other)) {
        return Err(format!("{} cannot write its output over another operand", call.operator.kind));
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

/// Visits the elements of views of one shape, row-major, in runs: `visit(offsets, steps, length)`, in elements.
pub fn runs<const N: usize>(
    shape: &[usize],
    strides: [&[usize]; N],
    mut visit: impl FnMut([usize; N], [usize; N], usize),
) {
    walk(shape, &strides, false, |offsets, length, steps| visit(offsets, steps, length));
}

/// The first element of an f32 view.
pub fn base(view: &View) -> *mut f32 {
    view.data.cast()
}

/// Fills a view.
///
/// # Safety
/// The view is of f32, lies inside memory that nothing else refers to.
pub unsafe fn fill(view: &View, value: f32) {
    runs(&view.shape, [&view.stride], |[at], [step], length| {
        let start = base(view).wrapping_add(at);
        if step == 1 {
            // SAFETY: a run with step 1 is `length` elements of the view, which the caller owns.
            unsafe { std::slice::from_raw_parts_mut(start, length) }.fill(value);
        } else {
            for i in 0..length {
                // SAFETY: as above, element by element.
                unsafe { *start.wrapping_add(i * step) = value };
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn runs_visit_every_element_in_order() {
        let mut seen = Vec::new();
        runs(&[2, 2, 3], [&[6, 3, 1], &[3, 0, 1]], |[a, b], [sa, sb], n| {
            seen.extend((0..n).map(|i| (a + i * sa, b + i * sb)))
        });
        let expected: Vec<_> = (0..12).map(|i| (i, i / 6 * 3 + i % 3)).collect();
        assert_eq!(seen, expected);
        let mut lengths = Vec::new();
        runs(&[2, 2, 3], [&[6, 3, 1]], |_, _, n| lengths.push(n));
        assert_eq!(lengths, [12]);
        let mut scalars = 0;
        runs(&[], [&[]], |_, _, n| scalars += n);
        assert_eq!(scalars, 1);
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
