//! Softmax, its logarithm and gradients, and losses.

use crate::backend::operators::arguments::{Input, floating, int_or, output, result, tensor};
use crate::backend::operators::loss::{
    Backward, Classes, CrossEntropy, Reduction, backward, cross_entropy, reduction,
};
use crate::backend::operators::shapes::{count, dimension, same_shape};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::super::launch::{Actions, Family};
use super::super::params::Rows;
use super::Emit;
use super::map::{Extra, fill, map};
use super::reduce::threads;
use super::rows::{Row, params};

pub const TABLE: Table<Emit> = table! {
    "softmax" | "_softmax" | "_safe_softmax" => |c, a| softmax(c, a, false),
    "log_softmax" | "_log_softmax" => |c, a| softmax(c, a, true),
    "_softmax_backward_data" => |c, a| softmax_backward(c, a, false),
    "_log_softmax_backward_data" => |c, a| softmax_backward(c, a, true),
    "nll_loss" | "nll_loss_nd" | "nll_loss_forward" | "nll_loss2d" | "nll_loss2d_forward" => |c, a| {
        let classes = Classes::from_call(c)?;
        likelihood(a, output(c)?, &classes, reduction(c, 3)?, result(c, 1)?, false)
    },
    "nll_loss_backward" | "nll_loss2d_backward" => nll_loss_backward,
    "cross_entropy_loss" => cross_entropy_loss,
    "mse_loss" => mse_loss,
    "mse_loss_backward" => |c, a| {
        let (grad, x, y) = (tensor(c, 0)?, tensor(c, 1)?, tensor(c, 2)?);
        let norm =
            if reduction(c, 3)? == Reduction::Mean { 2.0 / count(x) as f32 } else { 2.0 };
        let extra = Extra { s: [norm, 0.0, 0.0, 0.0], ..Extra::default() };
        let inputs = [Input::View(grad), Input::View(x), Input::View(y)];
        map(a, true, "mse_backward", floating(output(c)?)?, &inputs, &extra)
    },
};

fn code(how: Reduction) -> i64 {
    match how {
        Reduction::None => 0,
        Reduction::Mean => 1,
        Reduction::Sum => 2,
    }
}

fn outer(shape: &[usize], dim: usize) -> Vec<usize> {
    let mut outer = shape.to_vec();
    if !outer.is_empty() {
        outer.remove(dim);
    }
    outer
}

fn apply(
    actions: &mut Actions,
    out: &View,
    from: &View,
    dim: usize,
    flags: i32,
) -> Result<(), KernelError> {
    same_shape(out, from)?;
    let length = from.shape.get(dim).map_or(1, |&n| n as i64);
    let rows = [Row::along(out, dim)?, Row::along(from, dim)?];
    let p = Rows { flags, ..params(actions, &outer(&from.shape, dim), length, &rows)? };
    actions.launch(Family::Softmax, "softmax", p.rows, [threads(length, 512), 1], &p);
    Ok(())
}

fn softmax(call: &Call<'_>, actions: &mut Actions, log: bool) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let dim = dimension(int_or(call, 1, -1)?, from.shape.len())?;
    apply(
        actions,
        out,
        from,
        dim,
        i32::from(log) + 2 * i32::from(call.operator.kind == "aten::_safe_softmax"),
    )
}

fn softmax_backward(call: &Call<'_>, actions: &mut Actions, log: bool) -> Result<(), KernelError> {
    let (out, grad, saved) = (output(call)?, tensor(call, 0)?, tensor(call, 1)?);
    same_shape(out, saved)?;
    same_shape(out, grad)?;
    let dim = dimension(int_or(call, 2, -1)?, out.shape.len())?;
    let length = out.shape.get(dim).map_or(1, |&n| n as i64);
    let rows = [Row::along(out, dim)?, Row::along(grad, dim)?, Row::along(saved, dim)?];
    let p =
        Rows { flags: i32::from(log), ..params(actions, &outer(&out.shape, dim), length, &rows)? };
    actions.launch(Family::Softmax, "softmax_backward", p.rows, [threads(length, 512), 1], &p);
    Ok(())
}

/// The weights of the classes as one row.
fn weights<'a>(of: &Classes<'a>) -> Row<'a> {
    of.weight.map_or(Row::number(1.0), |view| Row {
        view: Some(view),
        value: 0.0,
        stride: Vec::new(),
        step: view.stride[0] as i64,
    })
}

/// One loss for each sample, or one for all.
fn losses<'a>(of: &Classes<'_>, view: &'a View, how: Reduction) -> Result<Row<'a>, KernelError> {
    of.expect(view, how)?;
    Ok(Row::each(Some(view), if how == Reduction::None { &view.stride } else { &[] }))
}

fn likelihood(
    actions: &mut Actions,
    out: &View,
    classes: &Classes<'_>,
    how: Reduction,
    total: Option<&View>,
    raw: bool,
) -> Result<(), KernelError> {
    let to = losses(classes, out, how)?;
    let total =
        total.filter(|t| count(t) == 1).map_or(Row::number(0.0), |t| Row::each(Some(t), &[]));
    let rows = [
        to,
        Row::along(classes.scores, classes.dim)?,
        Row::each(Some(classes.target), &classes.target.stride),
        weights(classes),
        total,
    ];
    let mut p = params(actions, &classes.target.shape, classes.classes as i64, &rows)?;
    p.k = [classes.ignored, code(how), classes.classes as i64, i64::from(raw)];
    actions.launch(Family::Softmax, "likelihood", 1, [512, 1], &p);
    Ok(())
}

fn nll_loss_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let Backward { classes, gradient, how, total } = backward(call)?;
    let (classes, out) = (&classes, classes.scores);
    let from = losses(classes, gradient, how)?;
    let total = total.map_or(Row::number(0.0), |t| Row::each(Some(t), &[]));
    fill(actions, out, 0.0)?;
    let rows = [
        Row::along(classes.scores, classes.dim)?,
        from,
        Row::each(Some(classes.target), &classes.target.stride),
        weights(classes),
        total,
    ];
    let mut p = params(actions, &classes.target.shape, classes.classes as i64, &rows)?;
    p.k = [classes.ignored, code(how), classes.classes as i64, 0];
    actions.launch(Family::Softmax, "likelihood_backward", 1, [512, 1], &p);
    Ok(())
}

fn cross_entropy_loss(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let CrossEntropy { classes, how, logs, total } = cross_entropy(call)?;
    let out = output(call)?;
    if let Some(logs) = logs {
        apply(actions, logs, classes.scores, classes.dim, 1)?;
        return likelihood(actions, out, &classes.with(logs), how, total, false);
    }
    likelihood(actions, out, &classes, how, total, true)
}

fn mse_loss(call: &Call<'_>, actions: &mut Actions) -> Result<(), KernelError> {
    let (out, a, b) = (floating(output(call)?)?, tensor(call, 0)?, tensor(call, 1)?);
    same_shape(a, b)?;
    let how = reduction(call, 2)?;
    if how == Reduction::None {
        return map(
            actions,
            true,
            "squared_difference",
            out,
            &[Input::View(a), Input::View(b)],
            &Extra::default(),
        );
    }
    let rows =
        [Row::each(Some(out), &[]), Row::each(Some(a), &a.stride), Row::each(Some(b), &b.stride)];
    let mut p = params(actions, &a.shape, 1, &rows)?;
    p.k[1] = code(how);
    actions.launch(Family::Softmax, "squared_error", 1, [512, 1], &p);
    Ok(())
}
