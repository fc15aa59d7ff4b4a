//! Walks over strided f32 elements in place, and the scratch of kernels that unfold.

use std::cell::RefCell;

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::is_floating;
use crate::backend::operators::error::unsupported;
use crate::backend::operators::shapes::walk;
use crate::backend::operators::view::{Call, TILE_BYTES, View};
use crate::job::Dtype;

/// Floats in the tile that holds unfolded columns.
pub const COLUMN_FLOATS: usize = TILE_BYTES / 2 / 4;
/// Floats in the tile that holds gathered or not yet scattered rows. A quarter of the allowance
/// stays for packing.
pub const ROW_FLOATS: usize = TILE_BYTES / 4 / 4;

thread_local! {
    static TILES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Lends this thread's two tiles, of [`COLUMN_FLOATS`] and [`ROW_FLOATS`], with whatever they last
/// held.
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

/// Refuses floating operands other than f32: kernels with this check read and write f32 in place.
///
/// # Errors
/// When an argument or a result is of another floating type.
pub fn f32_operands(call: &Call<'_>) -> Result<(), KernelError> {
    match call.views().find(|view| is_floating(view) && view.dtype != Dtype::F32) {
        None => Ok(()),
        Some(view) => Err(unsupported!("f32 only is supported, not {:?}", view.dtype)),
    }
}

/// Visits the elements of views of one shape, row-major, in runs: `visit(offsets, steps, length)`,
/// in elements.
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
}
