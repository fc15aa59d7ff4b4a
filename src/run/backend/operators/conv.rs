//! Convolutions in two dimensions: their extents, checked once for every backend.

use super::KernelError;
use super::arguments::{expect_shape, int_or, pair, product};
use super::error::{invalid, unsupported};
use super::view::{Call, View};
use crate::job::Arg;

/// A convolution from `images` of `size` to `out`, both in pixels (height, width).
///
/// A transposed convolution is the same with the two sides exchanged.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    /// Images in the batch.
    pub images: usize,
    /// Groups of channels that are convolved apart.
    pub groups: usize,
    /// Input and output channels of one group.
    pub channels: [usize; 2],
    /// Extents of the input.
    pub size: [usize; 2],
    /// Extents of the output.
    pub out: [usize; 2],
    /// Extents of the kernel.
    pub kernel: [usize; 2],
    /// Pixels from window to window.
    pub stride: [usize; 2],
    /// Pixels of zeros on each side.
    pub padding: [usize; 2],
    /// Pixels from kernel element to kernel element.
    pub dilation: [usize; 2],
}

/// Where an operator has the arguments of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The distance from window to window.
    pub stride: usize,
    /// The padding, in pixels or as a word.
    pub padding: usize,
    /// The distance of kernel elements.
    pub dilation: usize,
    /// The number of groups.
    pub groups: usize,
}

impl Places {
    /// Of `conv2d`.
    pub const CONV2D: Self = Self { stride: 3, padding: 4, dilation: 5, groups: 6 };
    /// Of `cudnn_convolution`.
    pub const CUDNN: Self = Self { stride: 3, padding: 2, dilation: 4, groups: 5 };
    /// Of `convolution`.
    pub const CONVOLUTION: Self = Self { stride: 3, padding: 4, dilation: 5, groups: 8 };
    /// Of `conv_transpose2d`.
    pub const TRANSPOSED: Self = Self { stride: 3, padding: 4, dilation: 7, groups: 6 };
    /// Of `convolution_backward`.
    pub const BACKWARD: Self = Self { stride: 4, padding: 5, dilation: 6, groups: 9 };
}

impl Convolution {
    /// The convolution whose gradient is the transposed convolution from images of shape `small`
    /// to images of shape `large`, by `weight` (C of `small`, C of `large` / groups, h, w).
    ///
    /// # Errors
    /// When the shapes and arguments contradict each other.
    pub fn transposed(
        call: &Call<'_>,
        large: &[usize],
        small: &[usize],
        weight: &View,
        places: Places,
    ) -> Result<Self, KernelError> {
        let of = Self::new(call, large, weight, places)?;
        if of.output() == small {
            Ok(of)
        } else {
            Err(invalid!("a transposed convolution from {small:?} does not give {large:?}"))
        }
    }

    /// The convolution of `input` (N, C, H, W) by `weight` (K, C / groups, h, w).
    ///
    /// # Errors
    /// When the shapes and arguments contradict each other.
    pub fn new(
        call: &Call<'_>,
        input: &[usize],
        weight: &View,
        places: Places,
    ) -> Result<Self, KernelError> {
        let (stride, dilation) = (
            pair(call, places.stride, 1)?.unwrap_or([1; 2]),
            pair(call, places.dilation, 1)?.unwrap_or([1; 2]),
        );
        let (&[images, all_in, height, width], &[all_out, channels_in, kernel_h, kernel_w]) =
            (input, weight.shape.as_slice())
        else {
            return Err(unsupported!(
                "images of four dimensions only are convolved, not {input:?} with {:?}",
                weight.shape
            ));
        };
        let (size, kernel) = ([height, width], [kernel_h, kernel_w]);
        if kernel.contains(&0) {
            return Err(invalid!("the kernel {:?} is empty", weight.shape));
        }
        let reach = |i: usize| {
            (kernel[i] - 1)
                .checked_mul(dilation[i])
                .filter(|&reach| reach < 1 << 30)
                .ok_or_else(|| invalid!("the kernel is too wide"))
        };
        let reach = [reach(0)?, reach(1)?];
        let padding = match call.operator.args.get(places.padding) {
            Some(Arg::Text(word)) if word == "valid" => [0; 2],
            Some(Arg::Text(word)) => {
                if word != "same" || reach.iter().any(|r| r % 2 != 0) || stride != [1; 2] {
                    return Err(unsupported!("the padding `{word}` is not supported here"));
                }
                reach.map(|r| r / 2)
            }
            _ => pair(call, places.padding, 0)?.unwrap_or([0; 2]),
        };
        let groups = usize::try_from(int_or(call, places.groups, 1)?).ok().filter(|&g| {
            g > 0 && all_out.is_multiple_of(g) && Some(all_in) == channels_in.checked_mul(g)
        });
        let Some(groups) = groups else {
            return Err(invalid!(
                "the groups do not divide the channels of {input:?} and {:?}",
                weight.shape
            ));
        };
        let extent = |i: usize| {
            let room = size[i].checked_add(2 * padding[i])?.checked_sub(reach[i] + 1)?;
            Some(room / stride[i] + 1)
        };
        let Some((out_h, out_w)) = extent(0).zip(extent(1)) else {
            return Err(invalid!("the kernel {:?} does not fit into {input:?}", weight.shape));
        };
        product(&[images, all_out, out_h, out_w])?;
        product(&[images, all_in, height, width])?;
        product(&[all_out, all_in, kernel_h, kernel_w])?;
        Ok(Self {
            images,
            groups,
            channels: [channels_in, all_out / groups],
            size,
            out: [out_h, out_w],
            kernel,
            stride,
            padding,
            dilation,
        })
    }

    /// What `convolution_backward` differentiates, given its gradient, input and weight; then the
    /// large side, which is unfolded, and the small one.
    ///
    /// # Errors
    /// When the shapes and arguments contradict each other.
    pub fn backward<'a>(
        call: &Call<'_>,
        [gradient, input, weight]: [&'a View; 3],
        transposed: bool,
    ) -> Result<(Self, &'a View, &'a View), KernelError> {
        let (large, small) = if transposed { (gradient, input) } else { (input, gradient) };
        let of = Self::new(call, &large.shape, weight, Places::BACKWARD)?;
        expect_shape("the side that is convolved to", small, &of.output())?;
        Ok((of, large, small))
    }

    /// Shape of the output.
    #[must_use]
    pub fn output(&self) -> [usize; 4] {
        [self.images, self.channels[1] * self.groups, self.out[0], self.out[1]]
    }
}
