//! Softmax, its logarithm and gradients, and losses.
//!
//! Not for: the arithmetic (kernels/softmax.cu).

use super::super::super::host::kernels::arguments::{Input, int_or, number_or};
use super::super::super::host::kernels::elements::{count, dimension, same_shape};
use super::super::super::host::view::{Call, View};
use super::super::launch::{Actions, Family, Rows};
use super::Emit;
use super::args::{floating, is_floating, maybe_tensor, output, result, tensor};
use super::map::{Extra, fill, map};
use super::reduce::threads;
use super::rows::{Row, params};

/// What makes the actions of `kind`.
pub fn find(kind: &str) -> Option<Emit> {
    Some(match kind.strip_prefix("aten::")? {
        "softmax" | "_softmax" | "_safe_softmax" => |c, a| softmax(c, a, false),
        "log_softmax" | "_log_softmax" => |c, a| softmax(c, a, true),
        "_softmax_backward_data" => |c, a| softmax_backward(c, a, false),
        "_log_softmax_backward_data" => |c, a| softmax_backward(c, a, true),
        "nll_loss" | "nll_loss_nd" | "nll_loss_forward" | "nll_loss2d" | "nll_loss2d_forward" => {
            |c, a| {
                let classes = Classes::new(
                    tensor(c, 0)?,
                    tensor(c, 1)?,
                    maybe_tensor(c, 2)?,
                    int_or(c, 4, -100)?,
                )?;
                likelihood(a, output(c)?, &classes, reduction(c, 3)?, result(c, 1)?, false)
            }
        }
        "nll_loss_backward" | "nll_loss2d_backward" => nll_loss_backward,
        "cross_entropy_loss" => cross_entropy_loss,
        "mse_loss" => mse_loss,
        "mse_loss_backward" => |c, a| {
            let (grad, x, y) = (tensor(c, 0)?, tensor(c, 1)?, tensor(c, 2)?);
            let norm = if reduction(c, 3)? == MEAN { 2.0 / count(x) as f32 } else { 2.0 };
            let extra = Extra { s: [norm, 0.0, 0.0, 0.0], ..Extra::default() };
            map(
                a,
                true,
                "mse_backward",
                floating(output(c)?)?,
                &[Input::View(grad), Input::View(x), Input::View(y)],
                &extra,
            )
        },
        _ => return None,
    })
}

const NONE: i64 = 0;
const MEAN: i64 = 1;

fn reduction(call: &Call<'_>, index: usize) -> Result<i64, String> {
    match int_or(call, index, 1)? {
        how @ 0..=2 => Ok(how),
        other => Err(format!("reduction {other} is not known")),
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
) -> Result<(), String> {
    same_shape(out, from)?;
    let length = from.shape.get(dim).map_or(1, |&n| n as i64);
    let rows = [Row::along(out, dim)?, Row::along(from, dim)?];
    let p = Rows { flags, ..params(actions, &outer(&from.shape, dim), length, &rows)? };
    actions.launch(Family::Softmax, "softmax", p.rows, [threads(length, 512), 1], &p);
    Ok(())
}

fn softmax(call: &Call<'_>, actions: &mut Actions, log: bool) -> Result<(), String> {
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

fn softmax_backward(call: &Call<'_>, actions: &mut Actions, log: bool) -> Result<(), String> {
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

/// Scores of shape (N, C, …) or (C) with targets of shape (N, …) or (): the class dimension taken out.
struct Classes<'a> {
    scores: Row<'a>,
    target: &'a View,
    weight: Option<&'a View>,
    ignored: i64,
    classes: usize,
}

impl<'a> Classes<'a> {
    fn new(
        scores: &'a View,
        target: &'a View,
        weight: Option<&'a View>,
        ignored: i64,
    ) -> Result<Self, String> {
        let dim = usize::from(scores.shape.len() > 1);
        let &classes = scores.shape.get(dim).ok_or("class scores without a dimension")?;
        if target.shape != outer(&scores.shape, dim) {
            return Err(format!(
                "targets of shape {:?} for scores of shape {:?}",
                target.shape, scores.shape
            ));
        }
        if is_floating(target) {
            return Err("targets that are probabilities are not supported".into());
        }
        if weight.is_some_and(|w| w.shape != [classes]) {
            return Err("class weights of another number of classes".into());
        }
        Ok(Self { scores: Row::along(scores, dim)?, target, weight, ignored, classes })
    }

    fn weight(&self) -> Row<'a> {
        match self.weight {
            None => Row::number(1.0),
            Some(view) => Row {
                view: Some(view),
                value: 0.0,
                stride: Vec::new(),
                step: view.stride[0] as i64,
            },
        }
    }
}

fn likelihood(
    actions: &mut Actions,
    out: &View,
    classes: &Classes<'_>,
    how: i64,
    total: Option<&View>,
    raw: bool,
) -> Result<(), String> {
    let to = if how == NONE {
        same_shape(out, classes.target)?;
        Row::each(Some(out), &out.stride)
    } else if count(out) == 1 {
        Row::each(Some(out), &[])
    } else {
        return Err(format!("a reduced loss of shape {:?}", out.shape));
    };
    let total =
        total.filter(|t| count(t) == 1).map_or(Row::number(0.0), |t| Row::each(Some(t), &[]));
    let rows = [
        to,
        classes.scores.clone(),
        Row::each(Some(classes.target), &classes.target.stride),
        classes.weight(),
        total,
    ];
    let mut p = params(actions, &classes.target.shape, classes.classes as i64, &rows)?;
    p.k = [classes.ignored, how, classes.classes as i64, i64::from(raw)];
    actions.launch(Family::Softmax, "likelihood", 1, [512, 1], &p);
    Ok(())
}

fn nll_loss_backward(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, grad) = (output(call)?, tensor(call, 0)?);
    same_shape(out, tensor(call, 1)?)?;
    let classes =
        Classes::new(out, tensor(call, 2)?, maybe_tensor(call, 3)?, int_or(call, 5, -100)?)?;
    let how = reduction(call, 4)?;
    let from = if how == NONE {
        same_shape(grad, classes.target)?;
        Row::each(Some(grad), &grad.stride)
    } else if count(grad) == 1 {
        Row::each(Some(grad), &[])
    } else {
        return Err(format!("a gradient of shape {:?} for one loss", grad.shape));
    };
    let total = maybe_tensor(call, 6)?
        .filter(|t| count(t) == 1)
        .map_or(Row::number(0.0), |t| Row::each(Some(t), &[]));
    fill(actions, out, 0.0)?;
    let rows = [
        classes.scores.clone(),
        from,
        Row::each(Some(classes.target), &classes.target.stride),
        classes.weight(),
        total,
    ];
    let mut p = params(actions, &classes.target.shape, classes.classes as i64, &rows)?;
    p.k = [classes.ignored, how, classes.classes as i64, 0];
    actions.launch(Family::Softmax, "likelihood_backward", 1, [512, 1], &p);
    Ok(())
}

fn cross_entropy_loss(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let scores = tensor(call, 0)?;
    if number_or(call, 5, 0.0)? != 0.0 {
        return Err("label smoothing is not supported".into());
    }
    let classes =
        Classes::new(scores, tensor(call, 1)?, maybe_tensor(call, 2)?, int_or(call, 4, -100)?)?;
    let total = call.hidden.iter().find(|v| v.shape.is_empty());
    if let Some(logs) = call.hidden.iter().find(|v| v.shape == scores.shape) {
        apply(actions, logs, scores, usize::from(scores.shape.len() > 1), 1)?;
        let classes = Classes::new(logs, classes.target, classes.weight, classes.ignored)?;
        return likelihood(actions, output(call)?, &classes, reduction(call, 3)?, total, false);
    }
    likelihood(actions, output(call)?, &classes, reduction(call, 3)?, total, true)
}

fn mse_loss(call: &Call<'_>, actions: &mut Actions) -> Result<(), String> {
    let (out, a, b) = (floating(output(call)?)?, tensor(call, 0)?, tensor(call, 1)?);
    same_shape(a, b)?;
    let how = reduction(call, 2)?;
    if how == NONE {
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
    p.k[1] = how;
    actions.launch(Family::Softmax, "squared_error", 1, [512, 1], &p);
    Ok(())
}
