//! Losses: negative log likelihood, cross entropy, squared error.
//!
//! Sums are kept in double precision. Not for: the logarithm of softmax itself.

use super::super::view::{Call, View};
use super::Kernel;
use super::arguments::{Input, floating, int_or, maybe_tensor, number_or, output, result, tensor};
use super::elements::{Rows, count, each, fill, map2, map3, read, read_int, same_shape, write};
use super::softmax;

/// The kernel for `kind`.
pub fn find(kind: &str) -> Option<Kernel> {
    let kernel: Kernel = match kind.strip_prefix("aten::")? {
        "nll_loss" | "nll_loss_nd" | "nll_loss_forward" | "nll_loss2d" | "nll_loss2d_forward" => {
            nll_loss
        }
        "nll_loss_backward" | "nll_loss2d_backward" => nll_loss_backward,
        "cross_entropy_loss" => cross_entropy_loss,
        "mse_loss" => mse_loss,
        "mse_loss_backward" => mse_loss_backward,
        _ => return None,
    };
    Some(kernel)
}

/// How a loss becomes a number.
#[derive(Clone, Copy, PartialEq)]
enum Reduction {
    None,
    Mean,
    Sum,
}

fn reduction(call: &Call<'_>, index: usize) -> Result<Reduction, String> {
    match int_or(call, index, 1)? {
        0 => Ok(Reduction::None),
        1 => Ok(Reduction::Mean),
        2 => Ok(Reduction::Sum),
        other => Err(format!("reduction {other} is not known")),
    }
}

/// Scores of shape (N, C, …) or (C) with targets of shape (N, …) or (): the class dimension taken out.
struct Classes<'a> {
    scores: &'a View,
    target: &'a View,
    weight: Option<&'a View>,
    ignored: i64,
    /// Strides of the scores without their class dimension.
    stride: Vec<usize>,
    step: usize,
    classes: usize,
}

impl<'a> Classes<'a> {
    fn new(
        scores: &'a View,
        target: &'a View,
        weight: Option<&'a View>,
        ignored: i64,
    ) -> Result<Self, String> {
        floating(scores)?;
        let dim = usize::from(scores.shape.len() > 1);
        let (mut shape, mut stride) = (scores.shape.clone(), scores.stride.clone());
        if shape.is_empty() {
            return Err("class scores without a dimension".into());
        }
        let (classes, step) = (shape.remove(dim), stride.remove(dim));
        if target.shape != shape {
            return Err(format!(
                "targets of shape {:?} for scores of shape {:?}",
                target.shape, scores.shape
            ));
        }
        if target.dtype == crate::job::Dtype::F32 {
            return Err("targets that are probabilities are not supported".into());
        }
        if weight.is_some_and(|w| w.shape != [classes]) {
            return Err("class weights of another number of classes".into());
        }
        Ok(Self { scores, target, weight, ignored, stride, step, classes })
    }

    /// `visit(class offset in scores, other offset, weight)` for each target that counts; a `None` class is ignored.
    fn each(
        &self,
        other: Vec<usize>,
        mut visit: impl FnMut(Option<usize>, usize, f64),
    ) -> Result<(), String> {
        let mut bad = None;
        each(
            &self.target.shape,
            &[self.stride.clone(), self.target.stride.clone(), other],
            |[scores, target, other]| {
                let class = read_int(self.target, target);
                if class == self.ignored {
                    visit(None, other, 0.0);
                } else if let Some(class) =
                    usize::try_from(class).ok().filter(|&c| c < self.classes)
                {
                    let weight = self.weight.map_or(1.0, |w| read(w, class * w.stride[0]));
                    visit(Some(scores + class * self.step), other, weight);
                } else {
                    bad = Some(class);
                }
            },
        );
        bad.map_or(Ok(()), |class| {
            Err(format!("target {class} is not one of {} classes", self.classes))
        })
    }
}

fn likelihood(
    out: &View,
    classes: &Classes<'_>,
    how: Reduction,
    total: Option<&View>,
    loss_of: impl Fn(usize) -> f64,
) -> Result<(), String> {
    let other = if how == Reduction::None {
        same_shape(out, classes.target)?;
        out.stride.clone()
    } else {
        vec![0; classes.target.shape.len()]
    };
    if how != Reduction::None && count(out) != 1 {
        return Err(format!("a reduced loss of shape {:?}", out.shape));
    }
    let (mut sum, mut weights) = (0.0, 0.0);
    classes.each(other, |class, to, weight| {
        let loss = class.map_or(0.0, |at| weight * loss_of(at));
        sum += loss;
        weights += weight;
        if how == Reduction::None {
            write(out, to, loss as f32);
        }
    })?;
    match how {
        Reduction::None => {}
        Reduction::Sum => write(out, 0, sum as f32),
        Reduction::Mean => write(out, 0, (sum / weights) as f32),
    }
    if let Some(total) = total.filter(|t| count(t) == 1) {
        write(total, 0, if how == Reduction::None { 0.0 } else { weights as f32 });
    }
    Ok(())
}

fn nll_loss(call: &Call<'_>) -> Result<(), String> {
    let scores = tensor(call, 0)?;
    let classes =
        Classes::new(scores, tensor(call, 1)?, maybe_tensor(call, 2)?, int_or(call, 4, -100)?)?;
    likelihood(output(call)?, &classes, reduction(call, 3)?, result(call, 1)?, |at| {
        -read(scores, at)
    })
}

fn nll_loss_backward(call: &Call<'_>) -> Result<(), String> {
    let (out, grad) = (output(call)?, tensor(call, 0)?);
    same_shape(out, tensor(call, 1)?)?;
    // The gradient has its own strides; classes are looked up through them.
    let classes =
        Classes::new(out, tensor(call, 2)?, maybe_tensor(call, 3)?, int_or(call, 5, -100)?)?;
    let how = reduction(call, 4)?;
    let other = if how == Reduction::None {
        same_shape(grad, classes.target)?;
        grad.stride.clone()
    } else if count(grad) == 1 {
        vec![0; classes.target.shape.len()]
    } else {
        return Err(format!("a gradient of shape {:?} for one loss", grad.shape));
    };
    let divisor = match (how, maybe_tensor(call, 6)?) {
        (Reduction::Mean, Some(total)) if count(total) == 1 => read(total, 0),
        (Reduction::Mean, _) => {
            let mut weights = 0.0;
            classes.each(other.clone(), |_, _, weight| weights += weight)?;
            weights
        }
        _ => 1.0,
    };
    fill(out, 0.0)?;
    classes.each(other, |class, from, weight| {
        if let Some(at) = class {
            let g = read(grad, from) as f32 / divisor as f32;
            write(out, at, -(weight as f32) * g);
        }
    })
}

/// Cross entropy in one step, for graphs that keep it whole. Hidden results are told apart by shape:
/// the logarithms of the probabilities, and the sum of the weights.
fn cross_entropy_loss(call: &Call<'_>) -> Result<(), String> {
    let scores = tensor(call, 0)?;
    if number_or(call, 5, 0.0)? != 0.0 {
        return Err("label smoothing is not supported".into());
    }
    let classes =
        Classes::new(scores, tensor(call, 1)?, maybe_tensor(call, 2)?, int_or(call, 4, -100)?)?;
    let total = call.hidden.iter().find(|v| v.shape.is_empty());
    let dim = usize::from(scores.shape.len() > 1);
    if let Some(logs) = call.hidden.iter().find(|v| v.shape == scores.shape) {
        softmax::apply(logs, scores, dim, true, false)?;
        let classes = Classes {
            scores: logs,
            ..Classes::new(logs, classes.target, classes.weight, classes.ignored)?
        };
        return likelihood(output(call)?, &classes, reduction(call, 3)?, total, |at| {
            -read(classes.scores, at)
        });
    }
    if scores.shape.len() > 2 {
        return Err("scores of more than two dimensions without their logarithms kept".into());
    }
    let rows = Rows::along(scores, dim)?;
    let (row_step, class_span) =
        (rows.stride.first().copied().unwrap_or(0), classes.step * classes.classes);
    likelihood(output(call)?, &classes, reduction(call, 3)?, total, |at| {
        // Back from the class to its row: rows lie outside classes, or inside them.
        let row = if row_step == 0 {
            0
        } else if row_step >= class_span {
            at / row_step * row_step
        } else {
            at % classes.step
        };
        let (most, sum) = softmax::extent_of(&rows, row);
        f64::from(most) + sum.ln() - read(scores, at)
    })
}

fn mse_loss(call: &Call<'_>) -> Result<(), String> {
    let (out, a, b) = (floating(output(call)?)?, tensor(call, 0)?, tensor(call, 1)?);
    same_shape(a, b)?;
    let how = reduction(call, 2)?;
    if how == Reduction::None {
        return map2::<f32>(out, &Input::View(a), &Input::View(b), |a, b| (a - b) * (a - b));
    }
    let mut sum = 0.0;
    each(&a.shape, &[&a.stride, &b.stride], |[x, y]| {
        let d = read(a, x) as f32 - read(b, y) as f32;
        sum += f64::from(d * d);
    });
    if how == Reduction::Mean {
        sum /= count(a) as f64;
    }
    write(out, 0, sum as f32);
    Ok(())
}

fn mse_loss_backward(call: &Call<'_>) -> Result<(), String> {
    let (out, grad, a, b) =
        (floating(output(call)?)?, tensor(call, 0)?, tensor(call, 1)?, tensor(call, 2)?);
    let norm = if reduction(call, 3)? == Reduction::Mean { 2.0 / count(a) as f32 } else { 2.0 };
    map3::<f32>(out, &Input::View(grad), &Input::View(a), &Input::View(b), |g, a, b| {
        norm * (a - b) * g
    })
}
