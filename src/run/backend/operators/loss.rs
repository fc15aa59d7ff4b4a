//! Losses: what is compared with what, checked once for every backend.

use super::KernelError;
use super::arguments::{floating, int_or, is_floating, maybe_tensor, number_or, output, tensor};
use super::error::{invalid, unsupported};
use super::shapes::{count, same_shape};
use super::view::{Call, View};

/// How the elements' losses become the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// They stay as they are.
    None,
    /// Their mean.
    Mean,
    /// Their sum.
    Sum,
}

/// The reduction that argument `index` says; the mean where it is absent.
///
/// # Errors
/// For a number that stands for none.
pub fn reduction(call: &Call<'_>, index: usize) -> Result<Reduction, KernelError> {
    match int_or(call, index, 1)? {
        0 => Ok(Reduction::None),
        1 => Ok(Reduction::Mean),
        2 => Ok(Reduction::Sum),
        other => Err(unsupported!("reduction {other} is not known")),
    }
}

/// Scores of shape (N, C, …) or (C) with targets of shape (N, …) or ().
#[derive(Clone)]
pub struct Classes<'a> {
    /// A score for each class.
    pub scores: &'a View,
    /// The right class of each sample.
    pub target: &'a View,
    /// A weight for each class.
    pub weight: Option<&'a View>,
    /// Samples of this class don't count.
    pub ignored: i64,
    /// Which dimension of the scores the classes are.
    pub dim: usize,
    /// Number of classes.
    pub classes: usize,
}

impl<'a> Classes<'a> {
    /// Checks that they belong together.
    ///
    /// # Errors
    /// When shapes or types don't fit.
    pub fn new(
        scores: &'a View,
        target: &'a View,
        weight: Option<&'a View>,
        ignored: i64,
    ) -> Result<Self, KernelError> {
        let dim = usize::from(scores.shape.len() > 1);
        let mut shape = floating(scores)?.shape.clone();
        if shape.is_empty() {
            return Err(invalid!("class scores without a dimension"));
        }
        let classes = shape.remove(dim);
        if target.shape != shape {
            return Err(invalid!(
                "targets of shape {:?} for scores of shape {:?}",
                target.shape,
                scores.shape
            ));
        }
        if is_floating(target) {
            return Err(unsupported!("targets that are probabilities are not supported"));
        }
        if weight.is_some_and(|w| w.shape != [classes]) {
            return Err(invalid!("class weights of another number of classes"));
        }
        Ok(Self { scores, target, weight, ignored, dim, classes })
    }

    /// Scores, targets, weights and the ignored class of a forward operator.
    ///
    /// # Errors
    /// When shapes or types don't fit.
    pub fn from_call(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let ignored = int_or(call, 4, -100)?;
        Self::new(tensor(call, 0)?, tensor(call, 1)?, maybe_tensor(call, 2)?, ignored)
    }

    /// The same with other scores of the same shape.
    #[must_use]
    pub fn with(&self, scores: &'a View) -> Self {
        Self { scores, ..self.clone() }
    }

    /// Checks the shape of the result: one loss for each sample, or one for all.
    ///
    /// # Errors
    /// For another shape.
    pub fn expect(&self, losses: &View, how: Reduction) -> Result<(), KernelError> {
        match how {
            Reduction::None => same_shape(losses, self.target),
            _ if count(losses) == 1 => Ok(()),
            _ => Err(invalid!("one reduced loss of shape {:?}", losses.shape)),
        }
    }
}

/// What the gradient of the negative log likelihood is made of.
pub struct Backward<'a> {
    /// The gradient, by classes.
    pub classes: Classes<'a>,
    /// The gradient of the loss.
    pub gradient: &'a View,
    /// How the losses were reduced.
    pub how: Reduction,
    /// The sum of the weights that the forward operator left.
    pub total: Option<&'a View>,
}

/// Reads the arguments of `nll_loss_backward`.
///
/// # Errors
/// When shapes or types don't fit.
pub fn backward<'a>(call: &'a Call<'_>) -> Result<Backward<'a>, KernelError> {
    let (out, gradient) = (output(call)?, tensor(call, 0)?);
    same_shape(out, tensor(call, 1)?)?;
    // The gradient has its own strides; classes are looked up through them.
    let ignored = int_or(call, 5, -100)?;
    let classes = Classes::new(out, tensor(call, 2)?, maybe_tensor(call, 3)?, ignored)?;
    let how = reduction(call, 4)?;
    classes.expect(gradient, how)?;
    let total = maybe_tensor(call, 6)?.filter(|t| count(t) == 1);
    Ok(Backward { classes, gradient, how, total })
}

/// What cross entropy in one step is made of, for graphs that keep it whole.
pub struct CrossEntropy<'a> {
    /// Scores and targets.
    pub classes: Classes<'a>,
    /// How the losses are reduced.
    pub how: Reduction,
    /// Where the logarithms of the probabilities go, if anywhere.
    pub logs: Option<&'a View>,
    /// Where the sum of the weights goes, if anywhere.
    pub total: Option<&'a View>,
}

/// Reads the arguments of `cross_entropy_loss`. Hidden results are distinguished by shape.
///
/// # Errors
/// When shapes or types don't fit, and for label smoothing.
pub fn cross_entropy<'a>(call: &'a Call<'_>) -> Result<CrossEntropy<'a>, KernelError> {
    if number_or(call, 5, 0.0)? != 0.0 {
        return Err(unsupported!("label smoothing is not supported"));
    }
    let classes = Classes::from_call(call)?;
    let logs = call.hidden.iter().find(|v| v.shape == classes.scores.shape);
    let total = call.hidden.iter().find(|v| v.shape.is_empty());
    Ok(CrossEntropy { classes, how: reduction(call, 3)?, logs, total })
}
