//! Weight normalisation: a weight as a direction and a length (Salimans and Kingma, 2016).

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{int_or, real, result, shaped};
use crate::backend::operators::error::invalid;
use crate::backend::operators::shapes::{dimension, each};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{read, write};

pub const TABLE: Table<Kernel> = table! {
    "_weight_norm_interface" => forward,
    "_weight_norm_interface_backward" => backward,
};

/// For every slice of `v` along `dim`, its first element; and extents and steps inside a slice.
fn slices(v: &View, dim: usize) -> (usize, usize, Vec<usize>, Vec<usize>) {
    let (mut shape, mut stride) = (v.shape.clone(), v.stride.clone());
    let (count, step) = (shape.remove(dim), stride.remove(dim));
    (count, step, shape, stride)
}

/// The step between the lengths of neighbouring slices, of shape (1, …, n, …, 1).
fn length_step(view: &View, v: &View, dim: usize) -> Result<usize, KernelError> {
    let fits = view.shape.len() == v.shape.len()
        && (0..v.shape.len()).all(|d| view.shape[d] == if d == dim { v.shape[d] } else { 1 });
    if fits {
        Ok(view.stride[dim])
    } else {
        Err(invalid!("lengths of {:?} for directions of {:?}", view.shape, v.shape))
    }
}

/// `(v, g, dim)` to the weight and the lengths of `v`.
fn forward(call: &Call<'_>) -> Result<(), KernelError> {
    let (v, g) = (real(call, 0)?, real(call, 1)?);
    let dim = dimension(int_or(call, 2, 0)?, v.shape.len())?;
    let out = shaped(call, 0, &v.shape)?;
    let norms = result(call, 1)?;
    let g_step = length_step(g, v, dim)?;
    let norm_step = norms.map(|n| length_step(n, v, dim)).transpose()?;
    let (count, step, shape, stride) = slices(v, dim);
    let mut out_stride = out.stride.clone();
    let out_step = out_stride.remove(dim);
    for i in 0..count {
        let mut squares = 0.0;
        each(&shape, &[&stride], |[at]| squares += read(v, i * step + at).powi(2));
        let norm = squares.sqrt();
        let factor = read(g, i * g_step) / norm;
        each(&shape, &[&stride, &out_stride], |[at, to]| {
            write(out, i * out_step + to, (read(v, i * step + at) * factor) as f32);
        });
        if let (Some(norms), Some(norm_step)) = (norms, norm_step) {
            write(norms, i * norm_step, norm as f32);
        }
    }
    Ok(())
}

/// `(grad, v, g, lengths, dim)` to the gradients of `v` and `g`.
fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (grad, v, g, norms) = (real(call, 0)?, real(call, 1)?, real(call, 2)?, real(call, 3)?);
    let dim = dimension(int_or(call, 4, 0)?, v.shape.len())?;
    let (v_out, g_out) = (shaped(call, 0, &v.shape)?, shaped(call, 1, &g.shape)?);
    if grad.shape != v.shape {
        return Err(invalid!("gradients of {:?} for {:?}", grad.shape, v.shape));
    }
    let [g_step, norm_step, out_step] =
        [length_step(g, v, dim)?, length_step(norms, v, dim)?, length_step(g_out, v, dim)?];
    let (count, step, shape, stride) = slices(v, dim);
    let part = |view: &View| {
        let mut stride = view.stride.clone();
        (stride.remove(dim), stride)
    };
    let ((grad_step, grad_stride), (to_step, to_stride)) = (part(grad), part(v_out));
    for i in 0..count {
        let mut along = 0.0;
        let strides = [&stride[..], &grad_stride[..], &to_stride[..]];
        each(&shape, &strides, |[at, from, _]| {
            along += read(v, i * step + at) * read(grad, i * grad_step + from);
        });
        let (norm, length) = (read(norms, i * norm_step), read(g, i * g_step));
        write(g_out, i * out_step, (along / norm) as f32);
        each(&shape, &strides, |[at, from, to]| {
            let turned =
                read(grad, i * grad_step + from) - read(v, i * step + at) * along / (norm * norm);
            write(v_out, i * to_step + to, (length / norm * turned) as f32);
        });
    }
    Ok(())
}
