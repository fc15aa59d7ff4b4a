//! Matrix products: the library where the strides allow it, the plain kernel elsewhere.

use crate::backend::operators::arguments::Input;
use crate::backend::operators::error::unsupported;
use crate::backend::operators::matrix::{Affine, Product};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Action, Actions, Family, Gemm, Matrix};
use super::super::params::{MatrixProduct, Operand};
use super::Emit;
use super::map::{Extra, fill, join, map, signed};

pub const TABLE: Table<Emit> = table! {
    "linear" => |c, a| affine(a, &Affine::linear(c)?, c),
    "mm" | "bmm" | "matmul" => |c, a| affine(a, &Affine::product(c)?, c),
    "addmm" | "baddbmm" => |c, a| affine(a, &Affine::added(c)?, c),
};

/// A dense row that is added unscaled goes with the product, all else is spread first.
fn affine(actions: &mut Actions, of: &Affine<'_>, call: &Call<'_>) -> Result<(), KernelError> {
    let product = Product::new(call, &of.a, &of.b)?;
    let Some(start) = of.start else { return emit(actions, &product, of.alpha, 0.0, None) };
    let out = product.out;
    let row = start.shape.len() == 1
        && start.shape.last() == out.shape.last()
        && start.stride == [1]
        && start.dtype == out.dtype;
    if row && of.beta == 1.0 && of.alpha == 1.0 && product.extents[1] != 0 {
        return emit(actions, &product, of.alpha, 0.0, Some(start));
    }
    let scale = Input::Number { value: f64::from(of.beta), float: true };
    map(actions, true, "mul", out, &[Input::View(start), scale], &Extra::default())?;
    emit(actions, &product, of.alpha, 1.0, None)
}

/// How the library sees a matrix of `rows` by `columns`: (it is stored by columns, step between
/// them), if it can.
pub fn layout(rows: i64, columns: i64, [row, column]: [i64; 2]) -> Option<(bool, i64)> {
    if (column == 1 || columns == 1) && (row >= columns || rows == 1) {
        Some((false, if rows == 1 { columns } else { row }))
    } else if (row == 1 || rows == 1) && (column >= rows || columns == 1) {
        Some((true, if columns == 1 { rows } else { column }))
    } else {
        None
    }
}

fn emit(
    actions: &mut Actions,
    of: &Product<'_>,
    alpha: f32,
    beta: f32,
    bias: Option<&View>,
) -> Result<(), KernelError> {
    if of.out.shape.contains(&0) {
        return Ok(());
    }
    let [m, k, n] = of.extents.map(|n| n as i64);
    if k == 0 {
        return if beta == 0.0 { fill(actions, of.out, 0.0) } else { Ok(()) };
    }
    let all_steps: Vec<Vec<i64>> = of.batch_steps.iter().map(|s| signed(s)).collect();
    let (batch, strides) = join(&of.batch, &all_steps, false)?;
    let steps = of.steps.map(|two| two.map(|s| s as i64));
    let views = [&of.a, &of.b, of.out];
    let fits = layout(m, k, steps[0]).is_some()
        && layout(k, n, steps[1]).is_some()
        && layout(m, n, steps[2]).is_some_and(|(by_columns, _)| !by_columns)
        && [m, n, k].iter().all(|&n| n < 1 << 31);
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
                offset.iter_mut().zip(&strides).for_each(|(o, s)| *o += c * s[d]);
            }
            let matrix = |which: usize| Matrix {
                data: at(which, offset[which]),
                row: steps[which][0],
                column: steps[which][1],
                batch: strides[which].last().copied().unwrap_or(0),
            };
            actions.list.push(Action::Gemm(Gemm {
                dtype: views[0].dtype,
                m,
                n,
                k,
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
        return Err(unsupported!("matrices in a batch of more than four dimensions"));
    }
    let operand = |which: usize| {
        let mut stride = steps[which].to_vec();
        stride.extend(&strides[which]);
        Operand::strided(views[which], &stride)
    };
    let mut shape = [1; 4];
    shape[..batch.len()].copy_from_slice(&batch);
    let product = MatrixProduct {
        m,
        n,
        k,
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
    let tiles = ((m + 15) / 16).saturating_mul((n + 15) / 16).saturating_mul(product.batch);
    actions.launch(Family::Matrix, "matrix_product", tiles, [16, 16], &product);
    Ok(())
}
