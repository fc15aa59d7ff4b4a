//! Layer normalisation over the last dimensions, root-mean-square normalisation, and their gradients.
//!
//! Means and variances are kept in double precision. Not for: batch normalisation.

use super::super::view::{Call, View};
use super::Kernel;
use super::arguments::{floating, ints, maybe_tensor, number_or, output, result, tensor};
use super::elements::{BLOCK, Rows, each, parts, read, same_shape, sum_of, write};
use crate::job::Arg;

/// The kernel for `kind`.
pub fn find(kind: &str) -> Option<Kernel> {
    let kernel: Kernel = match kind.strip_prefix("aten::")? {
        "layer_norm" | "native_layer_norm" => forward,
        "native_layer_norm_backward" => backward,
        _ => return None,
    };
    Some(kernel)
}

/// A weight or bias as one row, checked against the rows it scales.
fn row_of<'a>(
    view: Option<&'a View>,
    inner: usize,
    rows: &Rows<'_>,
) -> Result<Option<Rows<'a>>, String> {
    let Some(view) = view else { return Ok(None) };
    let row = Rows::last(view, inner)?;
    if row.length != rows.length || view.shape.len() != inner {
        return Err(format!(
            "weights of shape {:?} for rows of {} elements",
            view.shape, rows.length
        ));
    }
    Ok(Some(row))
}

/// Strides of a per-row result such as the mean: the outer dimensions, then ones.
fn per_row(view: Option<&View>, rows: &Rows<'_>) -> Result<Vec<usize>, String> {
    let Some(view) = view else { return Ok(vec![0; rows.outer.len()]) };
    floating(view)?;
    let (outer, rest) = view.shape.split_at_checked(rows.outer.len()).unwrap_or((&[], &[0]));
    if outer != rows.outer || rest.iter().any(|&n| n != 1) {
        return Err(format!(
            "statistics of shape {:?} for rows of shape {:?}",
            view.shape, rows.outer
        ));
    }
    Ok(view.stride[..rows.outer.len()].to_vec())
}

fn forward(call: &Call<'_>) -> Result<(), String> {
    let (out, from, inner) = (output(call)?, tensor(call, 0)?, ints(call, 1)?.len());
    same_shape(out, from)?;
    let (to, rows) = (Rows::last(out, inner)?, Rows::last(from, inner)?);
    let (weight, bias) = (
        row_of(maybe_tensor(call, 2)?, inner, &rows)?,
        row_of(maybe_tensor(call, 3)?, inner, &rows)?,
    );
    let eps = number_or(call, 4, 1e-5)?;
    let (mean_out, rstd_out) = (result(call, 1)?, result(call, 2)?);
    let strides = [
        to.stride.clone(),
        rows.stride.clone(),
        per_row(mean_out, &rows)?,
        per_row(rstd_out, &rows)?,
    ];
    let (mut x, mut w, mut b) = ([0.0f32; BLOCK], [1.0f32; BLOCK], [0.0f32; BLOCK]);
    each(&rows.outer, &strides, |[target, source, mean_at, rstd_at]| {
        let (mut sum, mut squares) = (0.0, 0.0);
        for (first, n) in parts(rows.length) {
            rows.load(source, first, &mut x[..n]);
            sum += sum_of(n, |i| f64::from(x[i]));
        }
        let mean = sum / rows.length as f64;
        for (first, n) in parts(rows.length) {
            rows.load(source, first, &mut x[..n]);
            squares += sum_of(n, |i| (f64::from(x[i]) - mean).powi(2));
        }
        let rstd = (1.0 / (squares / rows.length as f64 + eps).sqrt()) as f32;
        let mean = mean as f32;
        for (first, n) in parts(rows.length) {
            rows.load(source, first, &mut x[..n]);
            if let Some(weight) = &weight {
                weight.load(0, first, &mut w[..n]);
            }
            if let Some(bias) = &bias {
                bias.load(0, first, &mut b[..n]);
            }
            for ((x, &w), &b) in x[..n].iter_mut().zip(&w).zip(&b) {
                *x = (*x - mean) * rstd * w + b;
            }
            to.store(target, first, &x[..n]);
        }
        for (view, at, value) in [(mean_out, mean_at, mean), (rstd_out, rstd_at, rstd)] {
            if let Some(view) = view {
                write(view, at, value);
            }
        }
    });
    Ok(())
}

fn backward(call: &Call<'_>) -> Result<(), String> {
    let (grad_view, from_view, inner) = (tensor(call, 0)?, tensor(call, 1)?, ints(call, 2)?.len());
    same_shape(grad_view, from_view)?;
    let (grad, rows) = (Rows::last(grad_view, inner)?, Rows::last(from_view, inner)?);
    let (mean, rstd) = (tensor(call, 3)?, tensor(call, 4)?);
    let (mean_stride, rstd_stride) = (per_row(Some(mean), &rows)?, per_row(Some(rstd), &rows)?);
    let weight = row_of(maybe_tensor(call, 5)?, inner, &rows)?;
    let wanted = |k: usize| match call.operator.args.get(7) {
        Some(Arg::Bools(mask)) => mask.get(k).copied().unwrap_or(false),
        _ => true,
    };
    let (mut x, mut g, mut w) = ([0.0f32; BLOCK], [0.0f32; BLOCK], [1.0f32; BLOCK]);
    if let Some(out) = result(call, 0)?.filter(|_| wanted(0)) {
        same_shape(out, from_view)?;
        let to = Rows::last(out, inner)?;
        let strides = [
            grad.stride.clone(),
            rows.stride.clone(),
            mean_stride.clone(),
            rstd_stride.clone(),
            to.stride.clone(),
        ];
        let n_inverse = 1.0 / rows.length as f64;
        each(&rows.outer, &strides, |[from, source, mean_at, rstd_at, target]| {
            let (mean, rstd) = (read(mean, mean_at) as f32, read(rstd, rstd_at) as f32);
            let (mut sum, mut products) = (0.0, 0.0);
            let mut load = |first: usize, n: usize, x: &mut [f32; BLOCK], g: &mut [f32; BLOCK]| {
                grad.load(from, first, &mut g[..n]);
                rows.load(source, first, &mut x[..n]);
                if let Some(weight) = &weight {
                    weight.load(0, first, &mut w[..n]);
                    g[..n].iter_mut().zip(&w).for_each(|(g, w)| *g *= w);
                }
                x[..n].iter_mut().for_each(|x| *x = (*x - mean) * rstd);
            };
            for (first, n) in parts(rows.length) {
                load(first, n, &mut x, &mut g);
                sum += sum_of(n, |i| f64::from(g[i]));
                products += sum_of(n, |i| f64::from(g[i]) * f64::from(x[i]));
            }
            let (sum, products) = ((sum * n_inverse) as f32, (products * n_inverse) as f32);
            for (first, n) in parts(rows.length) {
                load(first, n, &mut x, &mut g);
                for (g, &x) in g[..n].iter_mut().zip(&x) {
                    *g = rstd * (*g - sum - x * products);
                }
                to.store(target, first, &g[..n]);
            }
        });
    }
    // Sums over rows, a block of columns at a time.
    let (weight_out, bias_out) =
        (result(call, 1)?.filter(|_| wanted(1)), result(call, 2)?.filter(|_| wanted(2)));
    let (to_weight, to_bias) = (row_of(weight_out, inner, &rows)?, row_of(bias_out, inner, &rows)?);
    if to_weight.is_none() && to_bias.is_none() {
        return Ok(());
    }
    let strides = [grad.stride.clone(), rows.stride.clone(), mean_stride, rstd_stride];
    for (first, n) in parts(rows.length) {
        let (mut weights, mut biases) = ([0.0f64; BLOCK], [0.0f64; BLOCK]);
        each(&rows.outer, &strides, |[from, source, mean_at, rstd_at]| {
            let (mean, rstd) = (read(mean, mean_at) as f32, read(rstd, rstd_at) as f32);
            grad.load(from, first, &mut g[..n]);
            rows.load(source, first, &mut x[..n]);
            for i in 0..n {
                weights[i] += f64::from(g[i]) * f64::from((x[i] - mean) * rstd);
                biases[i] += f64::from(g[i]);
            }
        });
        for (to, totals) in [(&to_weight, &weights), (&to_bias, &biases)] {
            if let Some(to) = to {
                g[..n].iter_mut().zip(totals).for_each(|(slot, total)| *slot = *total as f32);
                to.store(0, first, &g[..n]);
            }
        }
    }
    Ok(())
}
