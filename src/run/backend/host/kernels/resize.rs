//! Images made larger or smaller: nearest pixels, linear and cubic interpolation, and their
//! gradients, in one to three dimensions.
//!
//! Every image is seen as (batch, channels, depth, height, width): what is missing has extent 1.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{flag, maybe_number, output, real, shaped};
use crate::backend::operators::error::invalid;
use crate::backend::operators::view::Call;
use crate::backend::operators::{Table, table};
use crate::job::Arg;

use super::Kernel;
use super::elements::{fill, read, write};
use super::volume::{lifted, place};

pub const TABLE: Table<Kernel> = table! {
    "upsample_nearest1d" | "upsample_nearest2d" | "upsample_nearest3d" => {
            |c| resize(c, false, Sampling::Nearest)
        },
    "upsample_nearest1d_backward" | "upsample_nearest2d_backward" | "upsample_nearest3d_backward" => {
            |c| resize(c, true, Sampling::Nearest)
        },
    "_upsample_nearest_exact1d" | "_upsample_nearest_exact2d" | "_upsample_nearest_exact3d" => {
            |c| resize(c, false, Sampling::NearestExact)
        },
    "_upsample_nearest_exact1d_backward" | "_upsample_nearest_exact2d_backward" | "_upsample_nearest_exact3d_backward" => {
            |c| resize(c, true, Sampling::NearestExact)
        },
    "upsample_linear1d" | "upsample_bilinear2d" | "upsample_trilinear3d" => {
            |c| resize(c, false, Sampling::Linear { aligned: flag(c, 2)? })
        },
    "upsample_linear1d_backward" | "upsample_bilinear2d_backward" | "upsample_trilinear3d_backward" => {
            |c| resize(c, true, Sampling::Linear { aligned: flag(c, 3)? })
        },
    "upsample_bicubic2d" => |c| resize(c, false, Sampling::Cubic { aligned: flag(c, 2)? }),
    "upsample_bicubic2d_backward" => {
            |c| resize(c, true, Sampling::Cubic { aligned: flag(c, 3)? })
        },
};

/// Aligned: the corners' pixels stay where they are; else the corners themselves do.
#[derive(Clone, Copy)]
enum Sampling {
    Nearest,
    NearestExact,
    Linear { aligned: bool },
    Cubic { aligned: bool },
}

impl Sampling {
    fn is_nearest(self) -> bool {
        matches!(self, Self::Nearest | Self::NearestExact)
    }
}

/// How much larger the result is in each of `rank` dimensions, where the call says so: a list, as
/// interpolation in Python calls, or one argument each.
fn scales(call: &Call<'_>, at: usize, rank: usize) -> Result<[Option<f64>; 3], KernelError> {
    let mut all = [None; 3];
    match call.operator.args.get(at) {
        Some(Arg::Floats(list)) => {
            for (slot, scale) in all[3 - rank..].iter_mut().zip(list) {
                *slot = Some(*scale);
            }
        }
        _ => {
            for (i, slot) in all[3 - rank..].iter_mut().enumerate() {
                *slot = maybe_number(call, at + i)?;
            }
        }
    }
    Ok(all)
}

/// Pixels of the input and their weights, for one pixel of the result along one dimension.
type Taps = Vec<(usize, f32)>;

fn samples(from: usize, to: usize, scale: Option<f64>, how: Sampling) -> Vec<Taps> {
    let ratio = match scale {
        Some(scale) if scale > 0.0 => (1.0 / scale) as f32,
        _ => from as f32 / to as f32,
    };
    let last = from.saturating_sub(1);
    let place = |i: usize, aligned: bool| {
        if aligned {
            i as f32 * if to > 1 { last as f32 / (to - 1) as f32 } else { 0.0 }
        } else {
            (i as f32 + 0.5) * ratio - 0.5
        }
    };
    (0..to)
        .map(|i| match how {
            Sampling::Nearest => vec![(((i as f32 * ratio) as usize).min(last), 1.0)],
            Sampling::NearestExact => {
                vec![((((i as f32 + 0.5) * ratio) as usize).min(last), 1.0)]
            }
            Sampling::Linear { aligned } => {
                let place = place(i, aligned).max(0.0);
                let first = (place as usize).min(last);
                let share = (place - first as f32).clamp(0.0, 1.0);
                vec![(first, 1.0 - share), ((first + 1).min(last), share)]
            }
            Sampling::Cubic { aligned } => {
                let place = place(i, aligned);
                let (low, t) = (place.floor() as i64, place - place.floor());
                let taps = cubic(t).into_iter().enumerate();
                taps.map(|(k, w)| ((low - 1 + k as i64).clamp(0, last as i64) as usize, w))
                    .collect()
            }
        })
        .map(|taps: Taps| taps.into_iter().filter(|(_, weight)| *weight != 0.0).collect())
        .collect()
}

/// The weights of four neighbours at `t` between the middle two (Keys, 1981, with a = -0.75).
fn cubic(t: f32) -> [f32; 4] {
    const A: f32 = -0.75;
    let near = |x: f32| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f32| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]
}

/// Resizes argument 0 into the output, or its gradient if `backward`. The next arguments are the
/// output's size, for a gradient also the input's size, `align_corners` unless the sampling is
/// nearest, and the scales.
fn resize(call: &Call<'_>, backward: bool, how: Sampling) -> Result<(), KernelError> {
    let (given, out) = (real(call, 0)?, shaped(call, 0, &output(call)?.shape)?);
    let Some(rank) = given.shape.len().checked_sub(2).filter(|rank| (1..=3).contains(rank)) else {
        return Err(invalid!("an image of shape {:?}", given.shape));
    };
    let after = 2 + usize::from(backward) + usize::from(!how.is_nearest());
    let scales = scales(call, after, rank)?;
    let (small, large) = if backward { (out, given) } else { (given, out) };
    let (small, large) = (lifted(small, rank)?, lifted(large, rank)?);
    if small.shape[..2] != large.shape[..2] || small.shape.contains(&0) {
        return Err(invalid!("resizing {:?} to {:?}", small.shape, large.shape));
    }
    let taps: [Vec<Taps>; 3] = std::array::from_fn(|i| match (rank, i) {
        // Extents that are not there.
        _ if i < 3 - rank => vec![vec![(0, 1.0)]],
        _ => samples(small.shape[2 + i], large.shape[2 + i], scales[i], how),
    });
    if backward {
        fill(out, 0.0)?;
    }
    let [height, width] = [small.shape[3], small.shape[4]];
    let mut sums = vec![0.0f64; small.shape[2] * height * width];
    for plane in 0..small.shape[0] * small.shape[1] {
        let (n, c) = (plane / small.shape[1], plane % small.shape[1]);
        sums.fill(0.0);
        for (i, depths) in taps[0].iter().enumerate() {
            for (j, rows) in taps[1].iter().enumerate() {
                for (k, columns) in taps[2].iter().enumerate() {
                    let at = place(&large, [n, c, i, j, k]);
                    let g = if backward { read(&large, at) } else { 0.0 };
                    let mut sum = 0.0f32;
                    for &(z, a) in depths {
                        for &(y, b) in rows {
                            for &(x, w) in columns {
                                let weight = a * b * w;
                                if backward {
                                    sums[(z * height + y) * width + x] += g * f64::from(weight);
                                } else {
                                    sum += weight
                                        * read(&small, place(&small, [n, c, z, y, x])) as f32;
                                }
                            }
                        }
                    }
                    if !backward {
                        write(&large, at, sum);
                    }
                }
            }
        }
        if backward {
            for (at, sum) in sums.iter().enumerate() {
                let pixel = [n, c, at / width / height, at / width % height, at % width];
                write(&small, place(&small, pixel), *sum as f32);
            }
        }
    }
    Ok(())
}
