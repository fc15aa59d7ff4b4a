//! Images made larger or smaller: nearest pixels and bilinear interpolation, and their gradients.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{flag, maybe_number, output, real, shaped};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{fill, read, write};

pub const TABLE: Table<Kernel> = table! {
    "upsample_nearest2d" => |c| resize(c, Scales::new(c, 2)?, false, Sampling::Nearest),
    "upsample_nearest2d_backward" => |c| resize(c, Scales::new(c, 3)?, true, Sampling::Nearest),
    "upsample_bilinear2d" => |c| {
        let aligned = flag(c, 2)?;
        resize(c, Scales::new(c, 3)?, false, Sampling::Bilinear { aligned })
    },
    "upsample_bilinear2d_backward" => |c| {
        let aligned = flag(c, 3)?;
        resize(c, Scales::new(c, 4)?, true, Sampling::Bilinear { aligned })
    },
};

#[derive(Clone, Copy)]
enum Sampling {
    Nearest,
    /// The corners' pixels stay where they are, or the corners themselves.
    Bilinear {
        aligned: bool,
    },
}

/// How much larger the result is in height and width, where the call says so.
struct Scales([Option<f64>; 2]);

impl Scales {
    fn new(call: &Call<'_>, at: usize) -> Result<Self, KernelError> {
        // A list of both is the form that interpolation in Python calls.
        if matches!(call.operator.args.get(at), Some(crate::job::Arg::Floats(_))) {
            return Err(unsupported!("scales in a list are not supported"));
        }
        Ok(Self([maybe_number(call, at)?, maybe_number(call, at + 1)?]))
    }
}

/// For each pixel along one dimension of the result, pixels of the input and their weights.
fn samples(from: usize, to: usize, scale: Option<f64>, how: Sampling) -> Vec<[(usize, f32); 2]> {
    let ratio = match scale {
        Some(scale) if scale > 0.0 => (1.0 / scale) as f32,
        _ => from as f32 / to as f32,
    };
    let last = from.saturating_sub(1);
    (0..to)
        .map(|i| match how {
            Sampling::Nearest => {
                let at = ((i as f32 * ratio) as usize).min(last);
                [(at, 1.0), (at, 0.0)]
            }
            Sampling::Bilinear { aligned } => {
                let place = if aligned {
                    let ratio = if to > 1 { last as f32 / (to - 1) as f32 } else { 0.0 };
                    i as f32 * ratio
                } else {
                    ((i as f32 + 0.5) * ratio - 0.5).max(0.0)
                };
                let first = (place as usize).min(last);
                let share = (place - first as f32).clamp(0.0, 1.0);
                [(first, 1.0 - share), ((first + 1).min(last), share)]
            }
        })
        .collect()
}

/// Forward from argument 0 to the output, or backward.
fn resize(
    call: &Call<'_>,
    scales: Scales,
    backward: bool,
    how: Sampling,
) -> Result<(), KernelError> {
    let (given, out) = (real(call, 0)?, shaped(call, 0, &output(call)?.shape)?);
    let (small, large) = if backward { (out, given) } else { (given, out) };
    let (&[n, c, height, width], &[n_too, c_too, tall, wide]) =
        (&small.shape[..], &large.shape[..])
    else {
        return Err(invalid!("images of four dimensions are resized, not {:?}", given.shape));
    };
    if (n, c) != (n_too, c_too) || height * width == 0 {
        return Err(invalid!("resizing {:?} to {:?}", small.shape, large.shape));
    }
    let (rows, columns) =
        (samples(height, tall, scales.0[0], how), samples(width, wide, scales.0[1], how));
    if backward {
        fill(out, 0.0)?;
    }
    let place = |v: &View, at: [usize; 4]| (0..4).map(|d| at[d] * v.stride[d]).sum::<usize>();
    let mut sums = vec![0.0f64; height * width];
    for plane in 0..n * c {
        let (image, channel) = (plane / c, plane % c);
        sums.fill(0.0);
        for (i, row) in rows.iter().enumerate() {
            for (j, column) in columns.iter().enumerate() {
                let at = place(large, [image, channel, i, j]);
                if backward {
                    let g = read(large, at);
                    for (&(r, a), &(q, b)) in pairs(row, column) {
                        sums[r * width + q] += g * f64::from(a) * f64::from(b);
                    }
                } else {
                    let mut sum = 0.0;
                    for (&(r, a), &(q, b)) in pairs(row, column) {
                        sum += a * b * read(small, place(small, [image, channel, r, q])) as f32;
                    }
                    write(large, at, sum);
                }
            }
        }
        if backward {
            for (at, sum) in sums.iter().enumerate() {
                let [i, j] = [at / width, at % width];
                write(small, place(small, [image, channel, i, j]), *sum as f32);
            }
        }
    }
    Ok(())
}

/// The pixels that weigh anything.
fn pairs<'a>(
    row: &'a [(usize, f32); 2],
    column: &'a [(usize, f32); 2],
) -> impl Iterator<Item = (&'a (usize, f32), &'a (usize, f32))> {
    let weighs = |s: &&(usize, f32)| s.1 != 0.0;
    row.iter().filter(weighs).flat_map(move |a| column.iter().filter(weighs).map(move |b| (a, b)))
}
