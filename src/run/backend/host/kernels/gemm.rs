//! Matrix products on strided operands: `linear`, `mm`, `addmm`, `bmm`, `baddbmm`, `matmul`.
//!
//! Everything is one or more calls of [`product_of`]. Not for: convolutions ([`super::conv`]).

use super::super::view::{Call, View};
use super::Kernel;
use super::strided::{base, collapse, fill, float_or, optional, result, runs, tensor};

/// The kernel for a kind, if it is one of this file's.
pub fn find(kind: &str) -> Option<Kernel> {
    Some(match kind {
        "aten::linear" => linear,
        "aten::mm" | "aten::bmm" | "aten::matmul" => |call| matmul(call, 0),
        "aten::addmm" | "aten::baddbmm" => addmm,
        _ => return None,
    })
}

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
/// The three matrices lie inside live memory of f32, each element of `c` is its own and none is in `a` or `b`.
pub unsafe fn product_of(
    [m, k, n]: [usize; 3],
    alpha: f32,
    a: Matrix,
    b: Matrix,
    beta: f32,
    c: Matrix,
) {
    // A step between the rows of a single row is arbitrary; all others lie inside memory and so fit.
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

fn linear(call: &Call<'_>) -> Result<(), String> {
    let (x, weight) = (tensor(call, 0, "input")?, tensor(call, 1, "weight")?);
    let &[n, _] = weight.shape.as_slice() else {
        return Err(format!(
            "aten::linear needs a weight of two dimensions, not {:?}",
            weight.shape
        ));
    };
    let transposed = View {
        shape: weight.shape.iter().rev().copied().collect(),
        stride: weight.stride.iter().rev().copied().collect(),
        ..weight.clone()
    };
    let mut beta = 0.0;
    if let Some(bias) = optional(call, 2)? {
        let mut shape = x.shape.clone();
        *shape.last_mut().ok_or("aten::linear needs an input of at least one dimension")? = n;
        let out = result(call, 0, &shape)?;
        // SAFETY: `result` checked that the output is of f32 and nobody else's.
        unsafe { spread(call, bias, out, 1.0)? };
        beta = 1.0;
    }
    batched(call, x, &transposed, 1.0, beta)
}

fn matmul(call: &Call<'_>, first: usize) -> Result<(), String> {
    batched(call, tensor(call, first, "self")?, tensor(call, first + 1, "mat2")?, 1.0, 0.0)
}

#[expect(clippy::cast_possible_truncation, reason = "scalars are cast to the element type")]
fn addmm(call: &Call<'_>) -> Result<(), String> {
    let (start, a, b) =
        (tensor(call, 0, "self")?, tensor(call, 1, "mat1")?, tensor(call, 2, "mat2")?);
    let (beta, alpha) = (float_or(call, 3, 1.0)? as f32, float_or(call, 4, 1.0)? as f32);
    if beta == 0.0 {
        return batched(call, a, b, alpha, 0.0);
    }
    let [.., m, _] = a.shape[..] else {
        return Err(format!("{} needs matrices", call.operator.kind));
    };
    let [.., n] = b.shape[..] else { return Err(format!("{} needs matrices", call.operator.kind)) };
    let mut shape = a.shape.clone();
    let rank = shape.len();
    (shape[rank - 2], shape[rank - 1]) = (m, n);
    let out = result(call, 0, &shape)?;
    // SAFETY: `result` checked that the output is of f32 and nobody else's.
    unsafe { spread(call, start, out, beta)? };
    batched(call, a, b, alpha, 1.0)
}

/// Writes `scale * from`, broadcast, over `out`.
///
/// # Safety
/// Both are of f32; `out` has each element once and shares none with `from`.
unsafe fn spread(call: &Call<'_>, from: &View, out: &View, scale: f32) -> Result<(), String> {
    let stride = broadcast(call, &from.shape, &from.stride, &out.shape)?;
    runs(&out.shape, [&stride, &out.stride], |[f, o], [fs, os], length| {
        for i in 0..length {
            // SAFETY: runs stay inside the two views.
            unsafe {
                *base(out).wrapping_add(o + i * os) = scale * *base(from).wrapping_add(f + i * fs)
            };
        }
    });
    Ok(())
}

/// The strides with which a view is read as a larger shape.
fn broadcast(
    call: &Call<'_>,
    shape: &[usize],
    stride: &[usize],
    to: &[usize],
) -> Result<Vec<usize>, String> {
    let missing = to.len().checked_sub(shape.len());
    let fits = missing
        .is_some_and(|missing| shape.iter().zip(&to[missing..]).all(|(&n, &t)| n == t || n == 1));
    let Some(missing) = missing.filter(|_| fits) else {
        return Err(format!("{}: {shape:?} cannot be broadcast to {to:?}", call.operator.kind));
    };
    let steps = shape.iter().zip(stride).map(|(&n, &s)| if n == 1 { 0 } else { s });
    Ok(std::iter::repeat_n(0, missing).chain(steps).collect())
}

/// `out = alpha * a b + beta * out` over all leading dimensions, as `torch.matmul` broadcasts them.
fn batched(call: &Call<'_>, a: &View, b: &View, alpha: f32, beta: f32) -> Result<(), String> {
    let kind = &call.operator.kind;
    // A vector is a row on the left and a column on the right, and leaves no dimension behind.
    let (mut a, mut b) = (a.clone(), b.clone());
    let (row, column) = (a.shape.len() == 1, b.shape.len() == 1);
    if row {
        a.shape.insert(0, 1);
        a.stride.insert(0, 0);
    }
    if column {
        b.shape.push(1);
        b.stride.push(0);
    }
    let (&[ref a_batch @ .., m, k], &[ref b_batch @ .., k_too, n]) =
        (a.shape.as_slice(), b.shape.as_slice())
    else {
        return Err(format!("{kind} needs matrices, not {:?} and {:?}", a.shape, b.shape));
    };
    if k != k_too {
        return Err(format!(
            "{kind}: {:?} and {:?} do not agree on the inner extent",
            a.shape, b.shape
        ));
    }
    let longer = if a_batch.len() >= b_batch.len() { a_batch } else { b_batch };
    let mut batch = longer.to_vec();
    for other in [a_batch, b_batch] {
        let skip = batch.len() - other.len();
        for (extent, &n) in batch[skip..].iter_mut().zip(other) {
            if *extent == 1 {
                *extent = n;
            }
        }
    }
    let a_steps = broadcast(call, a_batch, &a.stride[..a_batch.len()], &batch)?;
    let b_steps = broadcast(call, b_batch, &b.stride[..b_batch.len()], &batch)?;
    let mut shape = batch.clone();
    shape.extend((!row).then_some(m));
    shape.extend((!column).then_some(n));
    let out = result(call, 0, &shape)?;
    let [a_row, a_column] = [a.stride[a_batch.len()], a.stride[a_batch.len() + 1]];
    let [b_row, b_column] = [b.stride[b_batch.len()], b.stride[b_batch.len() + 1]];
    let out_row = if row { 0 } else { out.stride[batch.len()] };
    let out_column = if column { 0 } else { out.stride[shape.len() - 1] };
    if out.shape.contains(&0) {
        return Ok(());
    }
    if k == 0 {
        if beta == 0.0 {
            // SAFETY: `result` checked that the output is of f32 and nobody else's.
            unsafe { fill(out, 0.0) };
        }
        return Ok(());
    }
    // Batches that share the right-hand matrix and whose rows follow each other are one taller matrix.
    if !row && !batch.is_empty() && b_steps.iter().zip(&batch).all(|(&s, &n)| s == 0 || n == 1) {
        let rows: Vec<usize> = batch.iter().copied().chain([m]).collect();
        let a_walk: Vec<usize> = a_steps.iter().copied().chain([a_row]).collect();
        let tall = collapse(&rows, &a_walk).zip(collapse(&rows, &out.stride[..=batch.len()]));
        if let Some((a_row, out_row)) = tall {
            let (left, right) = (
                Matrix { data: base(&a), row: a_row, column: a_column },
                Matrix { data: base(&b), row: b_row, column: b_column },
            );
            let into = Matrix { data: base(out), row: out_row, column: out_column };
            // SAFETY: collapsing found the same elements; `result` checked the output.
            unsafe { product_of([rows.iter().product(), k, n], alpha, left, right, beta, into) };
            return Ok(());
        }
    }
    runs(&batch, [&a_steps, &b_steps, &out.stride[..batch.len()]], |at, steps, length| {
        for i in 0..length {
            let left = Matrix {
                data: base(&a).wrapping_add(at[0] + i * steps[0]),
                row: a_row,
                column: a_column,
            };
            let right = Matrix {
                data: base(&b).wrapping_add(at[1] + i * steps[1]),
                row: b_row,
                column: b_column,
            };
            let into = Matrix {
                data: base(out).wrapping_add(at[2] + i * steps[2]),
                row: out_row,
                column: out_column,
            };
            // SAFETY: each matrix is a slice of its checked view; `result` checked the output.
            unsafe { product_of([m, k, n], alpha, left, right, beta, into) };
        }
    });
    Ok(())
}
