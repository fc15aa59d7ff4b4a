//! Losses: negative log likelihood, cross entropy, squared error.
//!
//! Sums are kept in double precision.

use crate::backend::operators::arguments::{output, result};
use crate::backend::operators::error::{data_error, invalid};
use crate::backend::operators::loss::{
    Backward, Classes, CrossEntropy, Reduction, backward, cross_entropy, reduction,
};
use crate::backend::operators::shapes::{count, each};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{Rows, fill, read, read_int, write};
use super::softmax;

pub const TABLE: Table<Kernel> = table! {
    "nll_loss" | "nll_loss_nd" | "nll_loss_forward" | "nll_loss2d" | "nll_loss2d_forward" => {
            nll_loss
        },
    "nll_loss_backward" | "nll_loss2d_backward" => nll_loss_backward,
    "cross_entropy_loss" => cross_entropy_loss,
};

impl Classes<'_> {
    /// Elements from a class to the next.
    fn step(&self) -> usize {
        self.scores.stride[self.dim]
    }

    /// `visit(class offset in scores, other offset, weight)` for each target that counts; a `None`
    /// class is ignored.
    fn each(
        &self,
        other: Vec<usize>,
        mut visit: impl FnMut(Option<usize>, usize, f64),
    ) -> Result<(), KernelError> {
        let mut bad = None;
        let mut stride = self.scores.stride.clone();
        let step = stride.remove(self.dim);
        each(
            &self.target.shape,
            &[stride, self.target.stride.clone(), other],
            |[scores, target, other]| {
                let class = read_int(self.target, target);
                if class == self.ignored {
                    visit(None, other, 0.0);
                } else if let Some(class) =
                    usize::try_from(class).ok().filter(|&c| c < self.classes)
                {
                    let weight = self.weight.map_or(1.0, |w| read(w, class * w.stride[0]));
                    visit(Some(scores + class * step), other, weight);
                } else {
                    bad = Some(class);
                }
            },
        );
        bad.map_or(Ok(()), |class| {
            Err(data_error!("target {class} is not one of {} classes", self.classes))
        })
    }
}

fn likelihood(
    out: &View,
    classes: &Classes<'_>,
    how: Reduction,
    total: Option<&View>,
    loss_of: impl Fn(usize) -> f64,
) -> Result<(), KernelError> {
    classes.expect(out, how)?;
    let other = if how == Reduction::None {
        out.stride.clone()
    } else {
        vec![0; classes.target.shape.len()]
    };
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

fn nll_loss(call: &Call<'_>) -> Result<(), KernelError> {
    let classes = Classes::from_call(call)?;
    likelihood(output(call)?, &classes, reduction(call, 3)?, result(call, 1)?, |at| {
        -read(classes.scores, at)
    })
}

fn nll_loss_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let Backward { classes, gradient: grad, how, total } = backward(call)?;
    let out = classes.scores;
    let other = if how == Reduction::None {
        grad.stride.clone()
    } else {
        vec![0; classes.target.shape.len()]
    };
    let divisor = match (how, total) {
        (Reduction::Mean, Some(total)) => read(total, 0),
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

/// Cross entropy in one step, for graphs that keep it whole.
fn cross_entropy_loss(call: &Call<'_>) -> Result<(), KernelError> {
    let CrossEntropy { classes, how, logs, total } = cross_entropy(call)?;
    let (out, scores, dim) = (output(call)?, classes.scores, classes.dim);
    if let Some(logs) = logs {
        softmax::apply(logs, scores, dim, true, false)?;
        return likelihood(out, &classes.with(logs), how, total, |at| -read(logs, at));
    }
    if scores.shape.len() > 2 {
        return Err(invalid!("scores of more than two dimensions without their logarithms kept"));
    }
    let rows = Rows::along(scores, dim)?;
    let (row_step, class_span) =
        (rows.stride.first().copied().unwrap_or(0), classes.step() * classes.classes);
    likelihood(out, &classes, how, total, |at| {
        // Back from the class to its row: rows lie outside classes, or inside them.
        let row = if row_step == 0 {
            0
        } else if row_step >= class_span {
            at / row_step * row_step
        } else {
            at % classes.step()
        };
        let (most, sum) = softmax::extent_of(&rows, row);
        f64::from(most) + sum.ln() - read(scores, at)
    })
}
