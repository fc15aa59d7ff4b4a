//! Matrix products on strided operands: `linear`, `mm`, `addmm`, `bmm`, `baddbmm`, `matmul`.
//!
//! Everything is one or more calls of [`product_of`].

use crate::backend::operators::matrix::{Affine, Product};
use crate::backend::operators::shapes::broadcast;
use crate::backend::operators::view::Call;
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::strided::{base, f32_operands, fill, runs};

pub const TABLE: Table<Kernel> = table! {
    "linear" => |call| affine(call, &Affine::linear(call)?),
    "mm" | "bmm" | "matmul" => |call| affine(call, &Affine::product(call)?),
    "addmm" | "baddbmm" => |call| affine(call, &Affine::added(call)?),
};

/// A matrix of f32 in memory: first element, step between rows, step between columns.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// First element.
    pub data: *mut f32,
    /// Elements from a row to the next.
    pub row: usize,
    /// Elements from a column to the next.
    pub column: usize,
}

/// `c = alpha * a (m by k) * b (k by n) + beta * c`; with beta 0, `c` is not read.
///
/// # Safety
/// The three matrices lie inside live memory of f32, each element of `c` is its own and none is in
/// `a` or `b`.
pub unsafe fn product_of(
    [m, k, n]: [usize; 3],
    alpha: f32,
    a: Matrix,
    b: Matrix,
    beta: f32,
    c: Matrix,
) {
    // A step between the rows of a single row is arbitrary; all others lie inside memory and so
    // fit.
    let step = |n: usize| isize::try_from(n).unwrap_or(0);
    // SAFETY: the caller's promise is what `sgemm` asks for.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            alpha,
            a.data,
            step(a.row),
            step(a.column),
            b.data,
            step(b.row),
            step(b.column),
            beta,
            c.data,
            step(c.row),
            step(c.column),
        );
    }
}

fn affine(call: &Call<'_>, of: &Affine<'_>) -> Result<(), KernelError> {
    f32_operands(call)?;
    let product = Product::new(call, &of.a, &of.b)?;
    let out = product.out;
    if let Some(start) = of.start {
        let stride = broadcast(start, &out.shape)?;
        runs(&out.shape, [&stride, &out.stride], |[f, o], [fs, os], length| {
            for i in 0..length {
                // SAFETY: runs stay inside the two views, which are of f32; the result is apart.
                unsafe {
                    *base(out).wrapping_add(o + i * os) =
                        of.beta * *base(start).wrapping_add(f + i * fs)
                };
            }
        });
    }
    multiply(&product, of.alpha, if of.start.is_some() { 1.0 } else { 0.0 });
    Ok(())
}

/// `out = alpha * a b + beta * out`, of checked f32 operands.
fn multiply(of: &Product<'_>, alpha: f32, beta: f32) {
    let [m, k, n] = of.extents;
    if of.out.shape.contains(&0) {
        return;
    }
    if k == 0 {
        if beta == 0.0 {
            // SAFETY: the result is of f32 and apart from all other operands.
            unsafe { fill(of.out, 0.0) };
        }
        return;
    }
    let views = [&of.a, &of.b, of.out];
    let [a_steps, b_steps, out_steps] = &of.batch_steps;
    runs(&of.batch, [a_steps, b_steps, out_steps], |at, steps, length| {
        for i in 0..length {
            let [a, b, c] = std::array::from_fn(|which| Matrix {
                data: base(views[which]).wrapping_add(at[which] + i * steps[which]),
                row: of.steps[which][0],
                column: of.steps[which][1],
            });
            // SAFETY: each matrix is a slice of its checked view; the result is apart.
            unsafe { product_of([m, k, n], alpha, a, b, beta, c) };
        }
    });
}
