//! One step of an LSTM or GRU layer: what follows the two matrix products.
//!
//! Gates are of shape (batch, gates * hidden); the formulas are those of `torch.nn.LSTM` (gates in
//! the order input, forget, cell, output) and `torch.nn.GRU` (reset, update, new).

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{expect_shape, maybe_real, real, result, shaped};
use crate::backend::operators::error::invalid;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{read, write};
use super::math::{sigmoid, tanh};

pub const TABLE: Table<Kernel> = table! {
    "_thnn_fused_lstm_cell" => lstm,
    "_thnn_fused_lstm_cell_backward_impl" => lstm_backward,
    "_thnn_fused_lstm_cell_backward" => |call| {
            // The gradients of both products are one tensor, and so are those of both biases.
            let outputs: Vec<_> =
                [0, 2, 3].iter().map(|&at| call.outputs.get(at).cloned().flatten()).collect();
            lstm_backward(&Call { outputs: &outputs, ..*call })
        },
    "_thnn_fused_gru_cell" => gru,
    "_thnn_fused_gru_cell_backward" => gru_backward,
};

/// A matrix (batch, columns) read or written by element; `None` reads as zeros.
#[derive(Clone, Copy)]
struct Matrix<'a>(Option<&'a View>);

impl Matrix<'_> {
    fn get(self, row: usize, column: usize) -> f32 {
        self.0.map_or(0.0, |v| read(v, row * v.stride[0] + column * v.stride[1]) as f32)
    }

    fn set(self, row: usize, column: usize, value: f32) {
        if let Some(v) = self.0 {
            write(v, row * v.stride[0] + column * v.stride[1], value);
        }
    }
}

fn matrix<'a>(call: &'a Call<'_>, at: usize, shape: &[usize]) -> Result<Matrix<'a>, KernelError> {
    let view = maybe_real(call, at)?;
    view.map_or(Ok(()), |view| expect_shape("an argument", view, shape))?;
    Ok(Matrix(view))
}

fn needed<'a>(call: &'a Call<'_>, at: usize, shape: &[usize]) -> Result<Matrix<'a>, KernelError> {
    expect_shape("an argument", real(call, at)?, shape)?;
    Ok(Matrix(Some(real(call, at)?)))
}

fn made<'a>(call: &'a Call<'_>, at: usize, shape: &[usize]) -> Result<Matrix<'a>, KernelError> {
    if result(call, at)?.is_none() {
        return Ok(Matrix(None));
    }
    shaped(call, at, shape).map(|view| Matrix(Some(view)))
}

/// A bias of one value for each gate and unit.
fn bias<'a>(call: &'a Call<'_>, at: usize, length: usize) -> Result<Bias<'a>, KernelError> {
    let view = maybe_real(call, at)?;
    view.map_or(Ok(()), |view| expect_shape("a bias", view, &[length]))?;
    Ok(Bias(view))
}

#[derive(Clone, Copy)]
struct Bias<'a>(Option<&'a View>);

impl Bias<'_> {
    fn get(self, at: usize) -> f32 {
        self.0.map_or(0.0, |v| read(v, at * v.stride[0]) as f32)
    }
}

/// Batch and hidden size of a state.
fn sizes(view: &View) -> Result<[usize; 2], KernelError> {
    match view.shape[..] {
        [batch, hidden] => Ok([batch, hidden]),
        _ => Err(invalid!("a state of shape {:?} is not a matrix", view.shape)),
    }
}

fn lstm(call: &Call<'_>) -> Result<(), KernelError> {
    let [batch, n] = sizes(real(call, 2)?)?;
    let (from_input, from_hidden) =
        (needed(call, 0, &[batch, 4 * n])?, needed(call, 1, &[batch, 4 * n])?);
    let cell = needed(call, 2, &[batch, n])?;
    let (input_bias, hidden_bias) = (bias(call, 3, 4 * n)?, bias(call, 4, 4 * n)?);
    let (hy, cy) = (made(call, 0, &[batch, n])?, made(call, 1, &[batch, n])?);
    let workspace = made(call, 2, &[batch, 4 * n])?;
    for b in 0..batch {
        for j in 0..n {
            let gate = |k: usize| {
                let at = k * n + j;
                from_input.get(b, at)
                    + from_hidden.get(b, at)
                    + input_bias.get(at)
                    + hidden_bias.get(at)
            };
            let gates = [sigmoid(gate(0)), sigmoid(gate(1)), tanh(gate(2)), sigmoid(gate(3))];
            let c = gates[1] * cell.get(b, j) + gates[0] * gates[2];
            cy.set(b, j, c);
            hy.set(b, j, gates[3] * tanh(c));
            (0..4).for_each(|k| workspace.set(b, k * n + j, gates[k]));
        }
    }
    Ok(())
}

fn lstm_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let [batch, n] = sizes(real(call, 2)?)?;
    let (grad_hy, grad_cy) = (matrix(call, 0, &[batch, n])?, matrix(call, 1, &[batch, n])?);
    let (cx, cy) = (needed(call, 2, &[batch, n])?, needed(call, 3, &[batch, n])?);
    let workspace = needed(call, 4, &[batch, 4 * n])?;
    let (gates_out, cx_out) = (made(call, 0, &[batch, 4 * n])?, made(call, 1, &[batch, n])?);
    let mut sums = vec![0.0f64; 4 * n];
    for b in 0..batch {
        for j in 0..n {
            let [i, f, g, o] = std::array::from_fn(|k| workspace.get(b, k * n + j));
            let c = tanh(cy.get(b, j));
            let gh = grad_hy.get(b, j);
            let gc = gh * o * (1.0 - c * c) + grad_cy.get(b, j);
            let gates = [
                gc * g * (1.0 - i) * i,
                gc * cx.get(b, j) * (1.0 - f) * f,
                gc * i * (1.0 - g * g),
                gh * c * (1.0 - o) * o,
            ];
            cx_out.set(b, j, gc * f);
            for (k, gate) in gates.into_iter().enumerate() {
                gates_out.set(b, k * n + j, gate);
                sums[k * n + j] += f64::from(gate);
            }
        }
    }
    bias_sums(call, 2, &sums)
}

/// Writes the gradient of a bias, if it is wanted.
fn bias_sums(call: &Call<'_>, at: usize, sums: &[f64]) -> Result<(), KernelError> {
    if result(call, at)?.is_none() {
        return Ok(());
    }
    let out = shaped(call, at, &[sums.len()])?;
    sums.iter().enumerate().for_each(|(i, sum)| write(out, i * out.stride[0], *sum as f32));
    Ok(())
}

fn gru(call: &Call<'_>) -> Result<(), KernelError> {
    let [batch, n] = sizes(real(call, 2)?)?;
    let (from_input, from_hidden) =
        (needed(call, 0, &[batch, 3 * n])?, needed(call, 1, &[batch, 3 * n])?);
    let hidden = needed(call, 2, &[batch, n])?;
    let (input_bias, hidden_bias) = (bias(call, 3, 3 * n)?, bias(call, 4, 3 * n)?);
    let (hy, workspace) = (made(call, 0, &[batch, n])?, made(call, 1, &[batch, 5 * n])?);
    for b in 0..batch {
        for j in 0..n {
            let input = |k: usize| from_input.get(b, k * n + j) + input_bias.get(k * n + j);
            let own = |k: usize| from_hidden.get(b, k * n + j) + hidden_bias.get(k * n + j);
            let reset = sigmoid(input(0) + own(0));
            let update = sigmoid(input(1) + own(1));
            let new = tanh(input(2) + reset * own(2));
            let h = hidden.get(b, j);
            hy.set(b, j, new + update * (h - new));
            let kept = [reset, update, new, h, own(2)];
            (0..5).for_each(|k| workspace.set(b, k * n + j, kept[k]));
        }
    }
    Ok(())
}

fn gru_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let [batch, n] = sizes(real(call, 0)?)?;
    let (grad, workspace) = (needed(call, 0, &[batch, n])?, needed(call, 1, &[batch, 5 * n])?);
    let (input_out, hidden_out) =
        (made(call, 0, &[batch, 3 * n])?, made(call, 1, &[batch, 3 * n])?);
    let hx_out = made(call, 2, &[batch, n])?;
    let (mut input_sums, mut hidden_sums) = (vec![0.0f64; 3 * n], vec![0.0f64; 3 * n]);
    for b in 0..batch {
        for j in 0..n {
            let [reset, update, new, h, own] = std::array::from_fn(|k| workspace.get(b, k * n + j));
            let g = grad.get(b, j);
            let update_grad = g * (h - new) * (1.0 - update) * update;
            let new_grad = g * (1.0 - update) * (1.0 - new * new);
            let reset_grad = new_grad * own * (1.0 - reset) * reset;
            hx_out.set(b, j, g * update);
            let to_input = [reset_grad, update_grad, new_grad];
            let to_hidden = [reset_grad, update_grad, new_grad * reset];
            for k in 0..3 {
                input_out.set(b, k * n + j, to_input[k]);
                hidden_out.set(b, k * n + j, to_hidden[k]);
                input_sums[k * n + j] += f64::from(to_input[k]);
                hidden_sums[k * n + j] += f64::from(to_hidden[k]);
            }
        }
    }
    bias_sums(call, 3, &input_sums)?;
    bias_sums(call, 4, &hidden_sums)
}
