//! Normalisation: its statistics and weights, checked once for every backend.

use super::KernelError;
use super::arguments::{
    expect_shape, flag, floating, ints, mask, maybe_real, number, number_or, output, real, result,
    shaped, tensor, writable,
};
use super::error::invalid;
use super::shapes::{distinct, same, same_shape};
use super::view::{Call, Operand, View};
use crate::job::Arg;

/// Number of channels of a batch (N, C, …).
fn channels(view: &View) -> Result<usize, KernelError> {
    view.shape
        .get(1)
        .copied()
        .ok_or_else(|| invalid!("at least two dimensions are needed, not {:?}", view.shape))
}

/// Argument `at`, one value for each channel; `None` where it is absent.
fn per_channel<'a>(
    call: &'a Call<'_>,
    at: usize,
    channels: usize,
) -> Result<Option<&'a View>, KernelError> {
    let view = maybe_real(call, at)?;
    if let Some(view) = view {
        expect_shape("a value per channel", view, &[channels])?;
    }
    Ok(view)
}

/// Batch normalisation of (N, C, …), forward.
pub struct BatchNorm<'a> {
    /// The input.
    pub x: &'a View,
    /// The result.
    pub out: &'a View,
    /// Number of channels.
    pub channels: usize,
    /// Factor of each channel.
    pub weight: Option<&'a View>,
    /// Summand of each channel.
    pub bias: Option<&'a View>,
    /// Running mean and variance of each channel.
    pub running: [Option<&'a View>; 2],
    /// Where the mean and the inverse deviation of the batch go, if anywhere.
    pub saved: [Option<&'a View>; 2],
    /// The statistics are the batch's, not the running ones.
    pub training: bool,
    /// The running statistics are updated.
    pub update: bool,
    /// The share of the batch in the new running statistics.
    pub momentum: f64,
    /// What is added to the variance.
    pub eps: f64,
}

impl<'a> BatchNorm<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// When shapes don't fit, or statistics are needed and absent.
    pub fn new(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let x = real(call, 0)?;
        let channels = channels(x)?;
        let out = shaped(call, 0, &x.shape)?;
        let (training, momentum, eps) = (flag(call, 5)?, number(call, 6)?, number(call, 7)?);
        let running = [per_channel(call, 3, channels)?, per_channel(call, 4, channels)?];
        if !training && running.iter().any(Option::is_none) {
            return Err(invalid!("running statistics are needed when it is not training"));
        }
        // A replay does not touch the running statistics, which need not even be there.
        let update = training && !call.replay;
        let written = |view: &View| {
            call.outputs.iter().flatten().chain(call.hidden).any(|written| same(written, view))
        };
        if update && running.iter().flatten().any(|view| !written(view)) {
            return Err(invalid!(
                "its running statistics are updated, but the graph does not say that they are \
                 written"
            ));
        }
        Ok(Self {
            x,
            out,
            channels,
            weight: per_channel(call, 1, channels)?,
            bias: per_channel(call, 2, channels)?,
            running,
            saved: [saved(call, 1, channels)?, saved(call, 2, channels)?],
            training,
            update,
            momentum,
            eps,
        })
    }
}

/// An output with one element per channel; `None` where it is absent or empty.
fn saved<'a>(
    call: &'a Call<'_>,
    at: usize,
    channels: usize,
) -> Result<Option<&'a View>, KernelError> {
    // `batch_norm` declares one output: what it saves is hidden, before the running statistics.
    let view = result(call, at)?.filter(|view| view.shape == [channels] && channels > 0);
    let running = |view: &View| {
        (3..5).any(|at| matches!(call.args.get(at), Some(Operand::Tensor(v)) if same(v, view)))
    };
    match view {
        Some(view) if !running(view) => distinct(call, floating(view)?).map(Some),
        _ => Ok(None),
    }
}

/// Batch normalisation of (N, C, …), backward.
pub struct BatchNormBackward<'a> {
    /// The forward input.
    pub x: &'a View,
    /// The gradient of the forward result.
    pub gradient: &'a View,
    /// Number of channels.
    pub channels: usize,
    /// Factor of each channel.
    pub weight: Option<&'a View>,
    /// The mean of each channel.
    pub mean: &'a View,
    /// The inverse deviation of each channel, or the running variance where not training.
    pub scale: &'a View,
    /// The forward operator was training.
    pub training: bool,
    /// What was added to the variance.
    pub eps: f64,
    /// Where the gradients of input, weight and bias go.
    pub results: [Option<&'a View>; 3],
}

impl<'a> BatchNormBackward<'a> {
    /// Reads the arguments of `cudnn_batch_norm_backward`.
    ///
    /// # Errors
    /// When shapes don't fit, or statistics are absent.
    pub fn cudnn(call: &'a Call<'_>) -> Result<Self, KernelError> {
        Self::new(call, [0, 1], true, number(call, 7)?, [true; 3])
    }

    /// Reads the arguments of `native_batch_norm_backward`.
    ///
    /// # Errors
    /// When shapes don't fit, or statistics are absent.
    pub fn native(call: &'a Call<'_>) -> Result<Self, KernelError> {
        Self::new(call, [1, 0], flag(call, 7)?, number(call, 8)?, mask(call, 9)?)
    }

    fn new(
        call: &'a Call<'_>,
        [input, gradient]: [usize; 2],
        training: bool,
        eps: f64,
        wanted: [bool; 3],
    ) -> Result<Self, KernelError> {
        let (x, gradient) = (real(call, input)?, real(call, gradient)?);
        let channels = channels(x)?;
        expect_shape("its output gradient", gradient, &x.shape)?;
        // The running statistics stand before those of the batch.
        let [mean, scale] = if training { [5, 6] } else { [3, 4] };
        let statistic = |at: usize| {
            per_channel(call, at, channels)?.ok_or_else(|| {
                invalid!("the mean and deviation of the forward operator are needed")
            })
        };
        let (mean, scale) = (statistic(mean)?, statistic(scale)?);
        let mut results = [None; 3];
        for (at, slot) in results.iter_mut().enumerate() {
            *slot = if wanted[at] { writable(call, at)? } else { None };
            if let Some(view) = slot {
                let shape = if at == 0 { &x.shape[..] } else { &[channels] };
                expect_shape("its output", view, shape)?;
            }
        }
        Ok(Self {
            x,
            gradient,
            channels,
            weight: per_channel(call, 2, channels)?,
            mean,
            scale,
            training,
            eps,
            results,
        })
    }
}

/// A view's extents or strides without those of the channels.
#[must_use]
pub fn without_channels(of: &[usize]) -> Vec<usize> {
    of.iter().take(1).chain(&of[2..]).copied().collect()
}

/// Checks a weight or bias of rows of `length` elements over the last `inner` dimensions.
fn expect_row(view: Option<&View>, rows: &View, inner: usize) -> Result<(), KernelError> {
    let last = &rows.shape[rows.shape.len() - inner..];
    match view {
        Some(view) if view.shape != last => {
            Err(invalid!("weights of shape {:?} for rows of shape {last:?}", view.shape))
        }
        _ => Ok(()),
    }
}

/// Checks a result with one element for each row: the outer dimensions, then ones.
fn expect_each(view: Option<&View>, outer: &[usize]) -> Result<(), KernelError> {
    let Some(view) = view else { return Ok(()) };
    let (own, rest) = floating(view)?.shape.split_at_checked(outer.len()).unwrap_or((&[], &[0]));
    if own != outer || rest.iter().any(|&n| n != 1) {
        return Err(invalid!("statistics of shape {:?} for rows of shape {outer:?}", view.shape));
    }
    Ok(())
}

/// How many of the last dimensions are normalised, and the extents of the others.
fn inner<'a>(
    call: &Call<'_>,
    view: &'a View,
    at: usize,
) -> Result<(usize, &'a [usize]), KernelError> {
    let inner = ints(call, at)?.len();
    let split = view
        .shape
        .len()
        .checked_sub(inner)
        .ok_or("more normalised dimensions than the tensor has")?;
    Ok((inner, &view.shape[..split]))
}

/// Normalisation of rows over the last dimensions, forward.
pub struct LayerNorm<'a> {
    /// The input.
    pub from: &'a View,
    /// The result.
    pub out: &'a View,
    /// How many dimensions a row has.
    pub inner: usize,
    /// Extents of the other dimensions.
    pub outer: &'a [usize],
    /// Factor of each element of a row.
    pub weight: Option<&'a View>,
    /// Summand of each element of a row.
    pub bias: Option<&'a View>,
    /// What is added to the variance.
    pub eps: f64,
    /// Where each row's mean and inverse deviation go, if anywhere.
    pub saved: [Option<&'a View>; 2],
}

impl<'a> LayerNorm<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// When shapes don't fit.
    pub fn new(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let (out, from) = (output(call)?, real(call, 0)?);
        same_shape(out, from)?;
        let (inner, outer) = inner(call, from, 1)?;
        let (weight, bias) = (maybe_real(call, 2)?, maybe_real(call, 3)?);
        let saved = [result(call, 1)?, result(call, 2)?];
        expect_row(weight, from, inner)?;
        expect_row(bias, from, inner)?;
        saved.iter().try_for_each(|view| expect_each(*view, outer))?;
        Ok(Self { from, out, inner, outer, weight, bias, eps: number_or(call, 4, 1e-5)?, saved })
    }
}

/// Normalisation of rows over the last dimensions, backward.
pub struct LayerNormBackward<'a> {
    /// The gradient of the result.
    pub gradient: &'a View,
    /// The forward input.
    pub from: &'a View,
    /// How many dimensions a row has.
    pub inner: usize,
    /// Extents of the other dimensions.
    pub outer: &'a [usize],
    /// Each row's mean.
    pub mean: &'a View,
    /// Each row's inverse deviation.
    pub rstd: &'a View,
    /// Factor of each element of a row.
    pub weight: Option<&'a View>,
    /// Where the gradients of input, weight and bias go.
    pub results: [Option<&'a View>; 3],
}

impl<'a> LayerNormBackward<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// When shapes don't fit.
    pub fn new(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let (gradient, from) = (real(call, 0)?, real(call, 1)?);
        same_shape(gradient, from)?;
        let (inner, outer) = inner(call, from, 2)?;
        let (mean, rstd, weight) = (tensor(call, 3)?, tensor(call, 4)?, maybe_real(call, 5)?);
        expect_each(Some(mean), outer)?;
        expect_each(Some(rstd), outer)?;
        expect_row(weight, from, inner)?;
        let mut results = [None; 3];
        for (k, slot) in results.iter_mut().enumerate() {
            let wanted = match call.operator.args.get(7) {
                Some(Arg::Bools(mask)) => mask.get(k).copied().unwrap_or(false),
                _ => true,
            };
            *slot = result(call, k)?.filter(|_| wanted);
        }
        results[0].map_or(Ok(()), |out| same_shape(out, from))?;
        expect_row(results[1], from, inner)?;
        expect_row(results[2], from, inner)?;
        Ok(Self { gradient, from, inner, outer, mean, rstd, weight, results })
    }
}
