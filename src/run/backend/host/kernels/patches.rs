//! Windows of an image as columns and back, and pixels moved between channels and space.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{int_or, ints, output, pair, real, tensor};
use crate::backend::operators::error::invalid;
use crate::backend::operators::shapes::dimension;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{copy, fill, read, write};

pub const TABLE: Table<Kernel> = table! {
    "im2col" => |c| columns(c, real(c, 0)?, output(c)?, 1, false),
    "col2im" => |c| columns(c, output(c)?, real(c, 0)?, 2, true),
    "unfold_backward" => unfold_backward,
    "pixel_shuffle" => |c| {
        let factor = int_or(c, 1, 1)?;
        let (grouped, spread) = shuffled(tensor(c, 0)?, output(c)?, factor)?;
        copy(&spread, &grouped)
    },
    "pixel_unshuffle" => |c| {
        let factor = int_or(c, 1, 1)?;
        let (grouped, spread) = shuffled(output(c)?, tensor(c, 0)?, factor)?;
        copy(&grouped, &spread)
    },
    "channel_shuffle" | "native_channel_shuffle" => channel_shuffle,
};

/// Copies every window of `image` (N, C, H, W) to a column of `matrix` (N, C h w, windows), or adds
/// columns to where they came from. Kernel, dilation, padding and stride are the arguments from
/// `at` on.
fn columns(
    call: &Call<'_>,
    image: &View,
    matrix: &View,
    at: usize,
    fold: bool,
) -> Result<(), KernelError> {
    let kernel = pair(call, at, 1)?.ok_or("it needs a kernel size")?;
    let dilation = pair(call, at + 1, 1)?.unwrap_or([1; 2]);
    let padding = pair(call, at + 2, 0)?.unwrap_or([0; 2]);
    let stride = pair(call, at + 3, 1)?.unwrap_or([1; 2]);
    let (&[n, c, height, width], &[n_too, rows, count]) = (&image.shape[..], &matrix.shape[..])
    else {
        return Err(invalid!("windows of {:?} as {:?}", image.shape, matrix.shape));
    };
    let windows = |size: usize, i: usize| {
        (size + 2 * padding[i])
            .checked_sub(dilation[i] * (kernel[i] - 1) + 1)
            .map(|room| room / stride[i] + 1)
    };
    let (Some(tall), Some(wide)) = (windows(height, 0), windows(width, 1)) else {
        return Err(invalid!("windows of {kernel:?} in {:?}", image.shape));
    };
    if n != n_too || rows != c * kernel[0] * kernel[1] || count != tall * wide {
        return Err(invalid!("windows of {:?} as {:?}", image.shape, matrix.shape));
    }
    if fold {
        fill(image, 0.0)?;
    }
    for cell in 0..n * rows * count {
        let (image_at, row, window) = (cell / count / rows, cell / count % rows, cell % count);
        let (channel, tap) = (row / kernel[0] / kernel[1], row % (kernel[0] * kernel[1]));
        let pixel = |o: usize, k: usize, i: usize, size: usize| {
            (o * stride[i] + k * dilation[i]).checked_sub(padding[i]).filter(|&p| p < size)
        };
        let y = pixel(window / wide, tap / kernel[1], 0, height);
        let x = pixel(window % wide, tap % kernel[1], 1, width);
        let place = y.zip(x).map(|(y, x)| {
            let index = [image_at, channel, y, x];
            (0..4).map(|d| index[d] * image.stride[d]).sum::<usize>()
        });
        let other =
            image_at * matrix.stride[0] + row * matrix.stride[1] + window * matrix.stride[2];
        match place {
            Some(at) if fold => write(image, at, (read(image, at) + read(matrix, other)) as f32),
            Some(at) => write(matrix, other, read(image, at) as f32),
            None if fold => {}
            None => write(matrix, other, 0.0),
        }
    }
    Ok(())
}

/// The gradient of `Tensor.unfold`: `(grad, sizes, dim, size, step)`; windows may overlap.
fn unfold_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (grad, out) = (real(call, 0)?, output(call)?);
    let dim = dimension(int_or(call, 2, 0)?, out.shape.len())?;
    let step = usize::try_from(int_or(call, 4, 1)?).map_err(|_| "a negative step")?;
    let size = usize::try_from(int_or(call, 3, 1)?).map_err(|_| "a negative size")?;
    let windows = grad.shape.get(dim).copied().unwrap_or(0);
    if grad.shape.len() != out.shape.len() + 1
        || ints(call, 1)?.len() != out.shape.len()
        || (windows.max(1) - 1) * step + size > out.shape[dim]
        || grad.shape.last() != Some(&size)
    {
        return Err(invalid!("gradients of {:?} for {:?}", grad.shape, out.shape));
    }
    fill(out, 0.0)?;
    let mut to = out.stride.clone();
    to[dim] *= step;
    to.push(out.stride[dim]);
    crate::backend::operators::shapes::each(&grad.shape, &[&grad.stride, &to], |[from, to]| {
        write(out, to, (read(out, to) + read(grad, from)) as f32);
    });
    Ok(())
}

/// An image with many channels (…, C r r, H, W) and one with many pixels (…, C, H r, W r), both as
/// (…, C, r, r, H, W).
fn shuffled(many: &View, large: &View, factor: i64) -> Result<(View, View), KernelError> {
    let rank = many.shape.len();
    let fail = || invalid!("pixels of {:?} moved to {:?} by {factor}", many.shape, large.shape);
    let r = usize::try_from(factor).ok().filter(|&r| r > 0).ok_or_else(fail)?;
    if rank < 3 || large.shape.len() != rank {
        return Err(fail());
    }
    let (c, h, w) = (large.shape[rank - 3], many.shape[rank - 2], many.shape[rank - 1]);
    let fits = many.shape[rank - 3] == c * r * r
        && large.shape[rank - 2..] == [h * r, w * r]
        && many.shape[..rank - 3] == large.shape[..rank - 3];
    if !fits {
        return Err(fail());
    }
    let six = |view: &View, steps: [usize; 5]| {
        let mut view = view.clone();
        view.shape.truncate(rank - 3);
        view.stride.truncate(rank - 3);
        view.shape.extend([c, r, r, h, w]);
        view.stride.extend(steps);
        view
    };
    let (m, l) = (&many.stride[rank - 3..], &large.stride[rank - 3..]);
    Ok((
        six(many, [m[0] * r * r, m[0] * r, m[0], m[1], m[2]]),
        six(large, [l[0], l[1], l[2], l[1] * r, l[2] * r]),
    ))
}

/// Channels dealt out to groups in turn.
fn channel_shuffle(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let groups = usize::try_from(int_or(call, 1, 1)?).unwrap_or(0);
    let fail = || invalid!("channels of {:?} in {groups} groups", from.shape);
    let &channels = from.shape.get(1).ok_or_else(fail)?;
    if groups == 0 || channels % groups != 0 || out.shape != from.shape {
        return Err(fail());
    }
    let each = channels / groups;
    let split = |view: &View, first: [usize; 2]| {
        let mut view = view.clone();
        let step = view.stride[1];
        view.shape[1] = each;
        view.shape.insert(2, groups);
        view.stride[1] = first[0] * step;
        view.stride.insert(2, first[1] * step);
        view
    };
    copy(&split(out, [groups, 1]), &split(from, [1, each]))
}
