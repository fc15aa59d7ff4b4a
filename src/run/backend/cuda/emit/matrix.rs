//! Matrix products: the library where the strides allow it, the plain kernel elsewhere.
//!
//! Not for: convolutions.

use super::super::super::host::kernels::arguments::{Input, number_or};
use super::super::super::host::kernels::elements::broadcast;
use super::super::super::host::kernels::strided::collapse;
use super::super::super::host::view::{Call, View};
use super::super::launch::{Action, Actions, Family, Gemm, Matrix, MatrixProduct, Operand};
use super::Emit;
use super::args::{floating, maybe_tensor, real, shaped};
use super::map::{Extra, fill, join, map, signed};

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind {
        "aten::linear" => linear,
        "aten::mm" | "aten::bmm" | "aten::matmul" => {
            |c, a| batched(c, a, real(c, 0)?, real(c, 1)?, 1.0, 0.0, None)
        }
        "aten::addmm" | "aten::baddbmm" => addmm,
        _ => return None,
    })
}

fn linear(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (x, weight) = (real(call, 0)?, real(call, 1)?);
    let &[n, _] = weight.shape.as_slice() else {
        return Err(format!(
            "aten::linear needs a weight of two dimensions, not {:?}",
            weight.shape
        ));
    };
    let mut transposed = weight.clone();
    transposed.shape.reverse();
    transposed.stride.reverse();
    let Some(bias) = maybe_tensor(call, 2)? else {
        return batched(call, actions, x, &transposed, 1.0, 0.0, None);
    };
    let mut shape = x.shape.clone();
    *shape.last_mut().ok_or("aten::linear needs an input of at least one dimension")? = n;
    added(call, actions, bias, &shape, [x, &transposed], 1.0, 1.0)
}

fn addmm(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (start, a, b) = (real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let (beta, alpha) = (number_or(call, 3, 1.0)? as f32, number_or(call, 4, 1.0)? as f32);
    if beta == 0.0 {
        return batched(call, actions, a, b, alpha, 0.0, None);
    }
    let [.., m, _] = a.shape[..] else {
        return Err(format!("{} needs matrices", call.operator.kind));
    };
    let [.., n] = b.shape[..] else { return Err(format!("{} needs matrices", call.operator.kind)) };
    let mut shape = a.shape.clone();
    let rank = shape.len();
    (shape[rank - 2], shape[rank - 1]) = (m, n);
    added(call, actions, start, &shape, [a, b], alpha, beta)
}

/// `alpha a b + beta start`: a dense row that is added unscaled goes with the product, all else is spread first.
fn added(
    call: &Call<'_>,
    actions: &mut Actions,
    start: &View,
    shape: &[usize],
    [a, b]: [&View; 2],
    alpha: f32,
    beta: f32,
) -> Result<(), String> {
    let out = shaped(call, 0, shape)?;
    let row = start.shape.len() == 1
        && start.shape.last() == shape.last()
        && start.stride == [1]
        && start.dtype == out.dtype;
    if row && beta == 1.0 && alpha == 1.0 && a.shape.last() != Some(&0) {
        return batched(call, actions, a, b, alpha, 0.0, Some(start));
    }
    let scale = Input::Number { value: f64::from(beta), float: true };
    map(actions, true, "mul", out, &[Input::View(floating(start)?), scale], &Extra::default())?;
    batched(call, actions, a, b, alpha, 1.0, None)
}

/// A product of matrices that share steps: extents, then (row, column) steps of each.
struct Product {
    m: i64,
    n: i64,
    k: i64,
    steps: [[i64; 2]; 3],
}

fn batched(
    call: &Call<'_>,
    actions: &mut Actions,
    a: &View,
    b: &View,
    alpha: f32,
    beta: f32,
    bias: Option<&View>,
) -> Result<(), String> {
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
    let mut batch =
        if a_batch.len() >= b_batch.len() { a_batch.to_vec() } else { b_batch.to_vec() };
    for other in [a_batch, b_batch] {
        let skip = batch.len() - other.len();
        for (extent, &n) in batch[skip..].iter_mut().zip(other) {
            if *extent == 1 {
                *extent = n;
            }
        }
    }
    let leading = |view: &View, own: &[usize]| {
        broadcast(
            &View {
                shape: own.to_vec(),
                stride: view.stride[..own.len()].to_vec(),
                ..view.clone()
            },
            &batch,
        )
    };
    let (a_steps, b_steps) = (leading(&a, a_batch)?, leading(&b, b_batch)?);
    let mut shape = batch.clone();
    shape.extend((!row).then_some(m));
    shape.extend((!column).then_some(n));
    let out = shaped(call, 0, &shape)?;
    if a.dtype != b.dtype || a.dtype != out.dtype {
        return Err(format!(
            "{kind} multiplies {:?} with {:?} into {:?}",
            a.dtype, b.dtype, out.dtype
        ));
    }
    if out.shape.contains(&0) {
        return Ok(());
    }
    if k == 0 {
        return if beta == 0.0 { fill(actions, out, 0.0) } else { Ok(()) };
    }
    let step = |view: &View, at: usize| view.stride[at] as i64;
    let c_row = if row { 0 } else { step(out, batch.len()) };
    let c_column = if column { 0 } else { step(out, shape.len() - 1) };
    let (a_at, b_at) = (a_batch.len(), b_batch.len());
    let mut p = Product {
        m: m as i64,
        n: n as i64,
        k: k as i64,
        steps: [
            [step(&a, a_at), step(&a, a_at + 1)],
            [step(&b, b_at), step(&b, b_at + 1)],
            [c_row, c_column],
        ],
    };
    let views = [&a, &b, out];
    // Batches that share the right-hand matrix and whose rows follow each other are one taller matrix.
    if !row && !batch.is_empty() && b_steps.iter().zip(&batch).all(|(&s, &n)| s == 0 || n == 1) {
        let rows: Vec<usize> = batch.iter().copied().chain([m]).collect();
        let a_walk: Vec<usize> = a_steps.iter().copied().chain([a.stride[a_at]]).collect();
        if let Some((a_row, out_row)) =
            collapse(&rows, &a_walk).zip(collapse(&rows, &out.stride[..=batch.len()]))
        {
            p.m = rows.iter().product::<usize>() as i64;
            (p.steps[0][0], p.steps[2][0]) = (a_row as i64, out_row as i64);
            return emit(actions, &p, views, &[], &[vec![], vec![], vec![]], alpha, beta, bias);
        }
    }
    let (shape, strides) = join(
        &batch,
        &[signed(&a_steps), signed(&b_steps), signed(&out.stride[..batch.len()])],
        false,
    )?;
    emit(actions, &p, views, &shape, &strides, alpha, beta, bias)
}

/// How the library sees a matrix of `rows` by `columns`: (it is stored by columns, step between them), if it can.
pub fn layout(rows: i64, columns: i64, [row, column]: [i64; 2]) -> Option<(bool, i64)> {
    if (column == 1 || columns == 1) && (row >= columns || rows == 1) {
        Some((false, if rows == 1 { columns } else { row }))
    } else if (row == 1 || rows == 1) && (column >= rows || columns == 1) {
        Some((true, if columns == 1 { rows } else { column }))
    } else {
        None
    }
}

#[allow(clippy::too_many_arguments, reason = "a product has them")]
fn emit(
    actions: &mut Actions,
    p: &Product,
    views: [&View; 3],
    batch: &[u32],
    strides: &[Vec<i64>],
    alpha: f32,
    beta: f32,
    bias: Option<&View>,
) -> Result<(), String> {
    let fits = layout(p.m, p.k, p.steps[0]).is_some()
        && layout(p.k, p.n, p.steps[1]).is_some()
        && layout(p.m, p.n, p.steps[2]).is_some_and(|(by_columns, _)| !by_columns)
        && [p.m, p.n, p.k].iter().all(|&n| n < 1 << 31);
    let size = views[0].dtype.size() as i64;
    let at =
        |which: usize, offset: i64| views[which].data.wrapping_offset((offset * size) as isize);
    if fits {
        // The last dimension of the batch goes to the library, those before it one by one.
        let (inner, outer) =
            batch.split_last().map_or((1, &[][..]), |(&n, outer)| (i64::from(n), outer));
        let count: i64 = outer.iter().map(|&n| i64::from(n)).product();
        for index in 0..count {
            let (mut rest, mut offset) = (index, [0; 3]);
            for (d, &n) in outer.iter().enumerate().rev() {
                let c = rest % i64::from(n);
                rest /= i64::from(n);
                offset.iter_mut().zip(strides).for_each(|(o, s)| *o += c * s[d]);
            }
            let matrix = |which: usize| Matrix {
                data: at(which, offset[which]),
                row: p.steps[which][0],
                column: p.steps[which][1],
                batch: strides[which].last().copied().unwrap_or(0),
            };
            actions.list.push(Action::Gemm(Gemm {
                dtype: views[0].dtype,
                m: p.m,
                n: p.n,
                k: p.k,
                batch: inner,
                alpha,
                beta,
                a: matrix(0),
                b: matrix(1),
                c: matrix(2),
                bias: bias.map_or(std::ptr::null_mut(), |b| b.data),
            }));
        }
        return Ok(());
    }
    if batch.len() > 4 {
        return Err("matrices in a batch of more than four dimensions".into());
    }
    let operand = |which: usize| {
        let mut stride = p.steps[which].to_vec();
        stride.extend(&strides[which]);
        Operand::strided(views[which], &stride)
    };
    let mut shape = [1; 4];
    shape[..batch.len()].copy_from_slice(batch);
    let product = MatrixProduct {
        m: p.m,
        n: p.n,
        k: p.k,
        batch: batch.iter().map(|&n| i64::from(n)).product(),
        rank: batch.len() as i32,
        alpha,
        beta,
        pad: 0,
        shape,
        a: operand(0)?,
        b: operand(1)?,
        c: operand(2)?,
        bias: bias.map_or(Ok(Operand::number(0.0)), |b| Operand::strided(b, &[0, 1]))?,
    };
    let tiles = ((p.m + 15) / 16).saturating_mul((p.n + 15) / 16).saturating_mul(product.batch);
    actions.launch(Family::Matrix, "matrix_product", tiles, [16, 16], &product);
    Ok(())
}
