//! Pooling in two dimensions: its windows, checked once for every backend.

use super::KernelError;
use super::arguments::{expect_shape, flag, maybe_int, pair, product, tensor};
use super::error::{invalid, unsupported};
use super::view::{Call, View};
use crate::job::{Arg, Dtype};

/// Extents of images (batch, channels, height, width); the batch dimension may be missing.
///
/// # Errors
/// For other ranks and for images that are too large.
pub fn images(shape: &[usize]) -> Result<[usize; 4], KernelError> {
    let four = match *shape {
        [c, h, w] => [1, c, h, w],
        [n, c, h, w] => [n, c, h, w],
        _ => {
            return Err(unsupported!(
                "images of three or four dimensions are pooled, not {shape:?}"
            ));
        }
    };
    product(&four)?;
    if four[2].max(four[3]) > 1 << 30 || four[1] > 1 << 31 {
        return Err(unsupported!(
            "images of at most 2^30 rows and columns are pooled, not {shape:?}"
        ));
    }
    Ok(four)
}

/// The same rank as `like`, with another height and width.
#[must_use]
pub fn resized(like: &[usize], [height, width]: [usize; 2]) -> Vec<usize> {
    let mut shape = like.to_vec();
    let rank = shape.len();
    (shape[rank - 2], shape[rank - 1]) = (height, width);
    shape
}

/// Windows of a fixed size over images; all extents are (height, width) in pixels.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Extents of a window, in elements.
    pub kernel: [usize; 2],
    /// Pixels from window to window.
    pub stride: [usize; 2],
    /// Pixels on each side that belong to no image.
    pub padding: [usize; 2],
    /// Pixels from element to element of a window.
    pub dilation: [usize; 2],
    /// Extents of the image.
    pub size: [usize; 2],
    /// How many windows there are.
    pub out: [usize; 2],
}

impl Windows {
    /// Kernel, stride and padding are the arguments `at..at + 3`.
    ///
    /// # Errors
    /// When they don't fit the image.
    pub fn new(
        call: &Call<'_>,
        size: [usize; 2],
        at: usize,
        dilation: [usize; 2],
        ceil: bool,
    ) -> Result<Self, KernelError> {
        let kernel = pair(call, at, 1)?.ok_or("it needs a kernel size")?;
        let stride = pair(call, at + 1, 1)?.unwrap_or(kernel);
        let padding = pair(call, at + 2, 0)?.unwrap_or([0; 2]);
        let mut out = [0; 2];
        for i in 0..2 {
            if padding[i] > kernel[i] / 2 {
                return Err(invalid!(
                    "the padding {padding:?} is more than half of the kernel {kernel:?}"
                ));
            }
            let reach = (kernel[i] - 1)
                .checked_mul(dilation[i])
                .and_then(|r| r.checked_add(1))
                .filter(|&reach| reach < 1 << 30);
            let round = if ceil { stride[i] - 1 } else { 0 };
            // The padded image may be shorter than the window by what rounding up makes good.
            let room = reach
                .and_then(|reach| size[i].checked_add(2 * padding[i] + round)?.checked_sub(reach));
            let Some(room) = room.filter(|_| size[i] > 0) else {
                return Err(invalid!("the kernel {kernel:?} does not fit into {size:?}"));
            };
            out[i] = room / stride[i] + 1;
            // The last window must start inside the image or the padding before it.
            if ceil && (out[i] - 1) * stride[i] >= size[i] + padding[i] {
                out[i] -= 1;
            }
        }
        Ok(Self { kernel, stride, padding, dilation, size, out })
    }

    /// The windows of maximum pooling, whose kernel is argument `at`.
    ///
    /// # Errors
    /// As [`Windows::new`].
    pub fn of_max(call: &Call<'_>, shape: &[usize], at: usize) -> Result<Self, KernelError> {
        let [_, _, height, width] = images(shape)?;
        let dilation = pair(call, at + 3, 1)?.unwrap_or([1; 2]);
        Self::new(call, [height, width], at, dilation, flag(call, at + 4)?)
    }
}

/// Checks the indices of maximum pooling.
///
/// # Errors
/// When they are of another type or shape.
pub fn expect_indices(indices: &View, shape: &[usize]) -> Result<(), KernelError> {
    expect_shape("its indices", indices, shape)?;
    match indices.dtype {
        Dtype::I64 => Ok(()),
        other => Err(unsupported!("indices are I64, not {other:?}")),
    }
}

/// What an average is divided by.
#[derive(Clone, Copy, Debug)]
pub struct Divisor {
    /// The pixels of the window that lie in the padding count too.
    pub with_padding: bool,
    /// This number instead of the pixels.
    pub fixed: Option<i64>,
}

/// The windows of average pooling, whose kernel is argument `at`, and what each sum is divided by.
///
/// # Errors
/// As [`Windows::new`], and for a divisor of 0.
pub fn average(
    call: &Call<'_>,
    shape: &[usize],
    at: usize,
) -> Result<(Windows, Divisor), KernelError> {
    let [_, _, height, width] = images(shape)?;
    let windows = Windows::new(call, [height, width], at, [1; 2], flag(call, at + 3)?)?;
    let with_padding = !matches!(call.operator.args.get(at + 4), Some(Arg::Bool(false)));
    let fixed = maybe_int(call, at + 5)?;
    if fixed == Some(0) {
        return Err(invalid!("it cannot divide by 0"));
    }
    Ok((windows, Divisor { with_padding, fixed }))
}

/// How many windows adaptive pooling has in each dimension: as argument 1 says or, backward, as the
/// gradient in argument `gradient` has pixels.
///
/// # Errors
/// When there is no image or no size.
pub fn adaptive(
    call: &Call<'_>,
    shape: &[usize],
    gradient: Option<usize>,
) -> Result<[usize; 2], KernelError> {
    let out = match gradient {
        None => pair(call, 1, 0)?.ok_or("it needs an output size")?,
        Some(at) => {
            let [_, _, height, width] = images(&tensor(call, at)?.shape)?;
            [height, width]
        }
    };
    let [_, _, height, width] = images(shape)?;
    if height == 0 || width == 0 {
        return Err(invalid!("it needs an image, not {shape:?}"));
    }
    Ok(out)
}
