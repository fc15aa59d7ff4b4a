//! Layer normalisation over the last dimensions, root-mean-square normalisation, and their
//! gradients.
//!
//! Means and variances are kept in double precision.

use crate::backend::operators::norm::{LayerNorm, LayerNormBackward};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{BLOCK, Rows, parts, read, sum_of, write};
use crate::backend::operators::shapes::each;

pub const TABLE: Table<Kernel> = table! {
    "layer_norm" | "native_layer_norm" => forward,
    "native_layer_norm_backward" => backward,
};

/// A weight or bias as one row.
fn row_of(view: Option<&View>, inner: usize) -> Result<Option<Rows<'_>>, KernelError> {
    view.map(|view| Rows::last(view, inner)).transpose()
}

/// Steps of a result with one element for each row.
fn per_row(view: Option<&View>, outer: &[usize]) -> Vec<usize> {
    view.map_or(vec![0; outer.len()], |view| view.stride[..outer.len()].to_vec())
}

fn forward(call: &Call<'_>) -> Result<(), KernelError> {
    let of = LayerNorm::new(call)?;
    let (to, rows) = (Rows::last(of.out, of.inner)?, Rows::last(of.from, of.inner)?);
    let (weight, bias) = (row_of(of.weight, of.inner)?, row_of(of.bias, of.inner)?);
    let (eps, [mean_out, rstd_out]) = (of.eps, of.saved);
    let strides = [
        to.stride.clone(),
        rows.stride.clone(),
        per_row(mean_out, of.outer),
        per_row(rstd_out, of.outer),
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

fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let of = LayerNormBackward::new(call)?;
    let LayerNormBackward { inner, mean, rstd, results: [input_out, weight_out, bias_out], .. } =
        of;
    let (grad, rows) = (Rows::last(of.gradient, inner)?, Rows::last(of.from, inner)?);
    let (mean_stride, rstd_stride) = (per_row(Some(mean), of.outer), per_row(Some(rstd), of.outer));
    let weight = row_of(of.weight, inner)?;
    let (mut x, mut g, mut w) = ([0.0f32; BLOCK], [0.0f32; BLOCK], [1.0f32; BLOCK]);
    if let Some(out) = input_out {
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
    let (to_weight, to_bias) = (row_of(weight_out, inner)?, row_of(bias_out, inner)?);
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
