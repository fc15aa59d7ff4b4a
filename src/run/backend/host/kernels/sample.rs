//! Reading an image at places between its pixels, given by a grid, and the gradients of both.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{flag, int_or, real, shaped};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{fill, read, write};

pub const TABLE: Table<Kernel> = table! {
    "grid_sampler" | "grid_sampler_2d" | "cudnn_grid_sampler" => forward,
    "grid_sampler_2d_backward" => backward,
    "affine_grid_generator" => |c| affine(c, false),
    "affine_grid_generator_backward" => |c| affine(c, true),
};

/// How places outside the image are answered, and what -1 and 1 mean.
#[derive(Clone, Copy)]
struct Sampling {
    nearest: bool,
    border: bool,
    aligned: bool,
}

impl Sampling {
    fn new(call: &Call<'_>, at: usize) -> Result<Self, KernelError> {
        let (mode, padding) = (int_or(call, at, 0)?, int_or(call, at + 1, 0)?);
        if !(0..=1).contains(&mode) || !(0..=1).contains(&padding) {
            return Err(unsupported!(
                "images are sampled nearest or bilinearly, with zeros or the border around them"
            ));
        }
        Ok(Self { nearest: mode == 1, border: padding == 1, aligned: flag(call, at + 2)? })
    }

    /// The pixel coordinate of `x` in -1..1, and its slope.
    fn pixel(self, x: f64, size: usize) -> (f64, f64) {
        let n = size as f64;
        let (at, slope) = if self.aligned {
            ((x + 1.0) / 2.0 * (n - 1.0), (n - 1.0) / 2.0)
        } else {
            (((x + 1.0) * n - 1.0) / 2.0, n / 2.0)
        };
        // As PyTorch: at the border itself nothing moves any more.
        if !self.border || (at > 0.0 && at < n - 1.0) {
            (at, slope)
        } else {
            (at.clamp(0.0, n - 1.0), 0.0)
        }
    }

    /// The pixels along one dimension with their weights and the weights' slopes.
    fn taps(self, at: f64) -> [(i64, f64, f64); 2] {
        if self.nearest {
            return [(at.round_ties_even() as i64, 1.0, 0.0), (0, 0.0, 0.0)];
        }
        let low = at.floor();
        [(low as i64, 1.0 - (at - low), -1.0), (low as i64 + 1, at - low, 1.0)]
    }
}

/// Where an element lies.
fn place(view: &View, at: [usize; 4]) -> usize {
    (0..4).map(|d| at[d] * view.stride[d]).sum()
}

/// `visit` with the place of the result, the pixel, its weight, and the weight's slopes along x and
/// y of the grid; channel by channel.
fn each(
    image: &View,
    grid: &View,
    how: Sampling,
    mut visit: impl FnMut([usize; 4], [usize; 4], f64, [f64; 2]),
) -> Result<(), KernelError> {
    let (&[n, c, height, width], &[n_too, rows, columns, 2]) = (&image.shape[..], &grid.shape[..])
    else {
        return Err(invalid!("{:?} sampled at {:?}", image.shape, grid.shape));
    };
    if n != n_too {
        return Err(invalid!("{:?} sampled at {:?}", image.shape, grid.shape));
    }
    for cell in 0..n * rows * columns {
        let (b, i, j) = (cell / columns / rows, cell / columns % rows, cell % columns);
        let (x, x_slope) = how.pixel(read(grid, place(grid, [b, i, j, 0])), width);
        let (y, y_slope) = how.pixel(read(grid, place(grid, [b, i, j, 1])), height);
        for (row, wy, dy) in how.taps(y) {
            for (column, wx, dx) in how.taps(x) {
                let inside =
                    (0..height as i64).contains(&row) && (0..width as i64).contains(&column);
                if !inside || (wx == 0.0 && dx == 0.0) || (wy == 0.0 && dy == 0.0) {
                    continue;
                }
                for channel in 0..c {
                    let pixel = [b, channel, row as usize, column as usize];
                    let slopes = [dx * wy * x_slope, dy * wx * y_slope];
                    visit([b, channel, i, j], pixel, wx * wy, slopes);
                }
            }
        }
    }
    Ok(())
}

fn forward(call: &Call<'_>) -> Result<(), KernelError> {
    let (image, grid) = (real(call, 0)?, real(call, 1)?);
    let (Some(&rows), Some(&columns)) = (grid.shape.get(1), grid.shape.get(2)) else {
        return Err(invalid!("{:?} sampled at {:?}", image.shape, grid.shape));
    };
    let out = shaped(call, 0, &[&image.shape[..2], &[rows, columns]].concat())?;
    fill(out, 0.0)?;
    each(image, grid, Sampling::new(call, 2)?, |to, pixel, weight, _| {
        let at = place(out, to);
        write(out, at, (read(out, at) + weight * read(image, place(image, pixel))) as f32);
    })
}

/// `(grad, image, grid, mode, padding, aligned, mask)` to the gradients of image and grid.
fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (grad, image, grid) = (real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let present = |at: usize| call.outputs.get(at).is_some_and(Option::is_some);
    let into = if present(0) { Some(shaped(call, 0, &image.shape)?) } else { None };
    let moved = if present(1) { Some(shaped(call, 1, &grid.shape)?) } else { None };
    for view in [into, moved].into_iter().flatten() {
        fill(view, 0.0)?;
    }
    each(image, grid, Sampling::new(call, 3)?, |from, pixel, weight, slopes| {
        let g = read(grad, place(grad, from));
        if let Some(view) = into {
            let at = place(view, pixel);
            write(view, at, (read(view, at) + g * weight) as f32);
        }
        if let Some(view) = moved {
            let value = g * read(image, place(image, pixel));
            for (k, slope) in slopes.into_iter().enumerate() {
                let at = place(view, [from[0], from[2], from[3], k]);
                write(view, at, (read(view, at) + value * slope) as f32);
            }
        }
    })
}

/// `(theta, size, aligned)` to a grid of places in -1..1; or the gradient of theta.
fn affine(call: &Call<'_>, backward: bool) -> Result<(), KernelError> {
    let given = real(call, 0)?;
    let size = crate::backend::operators::arguments::ints(call, 1)?;
    let aligned = flag(call, 2)?;
    let &[n, _, h, w] = &size[..] else {
        return Err(unsupported!("grids of images of size {size:?}"));
    };
    let [n, h, w] = [n, h, w].map(|x| usize::try_from(x).unwrap_or(0));
    let (theta, grid) = if backward {
        (shaped(call, 0, &[n, 2, 3])?, given)
    } else {
        (given, shaped(call, 0, &[n, h, w, 2])?)
    };
    if grid.shape != [n, h, w, 2] || theta.shape != [n, 2, 3] {
        return Err(invalid!("a grid of {:?} by {:?}", grid.shape, theta.shape));
    }
    let axis = |i: usize, n: usize| match (aligned, n) {
        (_, 1) => 0.0,
        (true, _) => 2.0 * i as f64 / (n - 1) as f64 - 1.0,
        (false, _) => (2.0 * i as f64 + 1.0) / n as f64 - 1.0,
    };
    if backward {
        fill(theta, 0.0)?;
    }
    for cell in 0..n * h * w {
        let (b, i, j) = (cell / w / h, cell / w % h, cell % w);
        let base = [axis(j, w), axis(i, h), 1.0];
        for k in 0..2 {
            let at = place(grid, [b, i, j, k]);
            let entry = |m: usize| b * theta.stride[0] + k * theta.stride[1] + m * theta.stride[2];
            if backward {
                for (m, x) in base.into_iter().enumerate() {
                    let to = entry(m);
                    write(theta, to, (read(theta, to) + x * read(grid, at)) as f32);
                }
            } else {
                let sum: f64 = (0..3).map(|m| read(theta, entry(m)) * base[m]).sum();
                write(grid, at, sum as f32);
            }
        }
    }
    Ok(())
}
