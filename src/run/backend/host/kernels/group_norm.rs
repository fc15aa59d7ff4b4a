//! Group normalisation and root-mean-square normalisation, and their gradients.
//!
//! Means and variances are kept in double precision.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{
    expect_shape, int_or, ints, mask, maybe_real, number_or, real, result, shaped,
};
use crate::backend::operators::error::invalid;
use crate::backend::operators::shapes::{each, same_shape};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};
use crate::job::Arg;

use super::Kernel;
use super::elements::{read, write};

pub const TABLE: Table<Kernel> = table! {
    "native_group_norm" => |c| forward(c, &Group::native(c, 0, 3)?, [1, 2], number_or(c, 7, 1e-5)?),
    "group_norm" => |c| forward(c, &Group::whole(c)?, [2, 3], number_or(c, 4, 1e-5)?),
    "native_group_norm_backward" => backward,
    "rms_norm" => |c| rms(c, number(c, 3)?),
    "_fused_rms_norm" => |c| rms(c, number(c, 3)?),
    "_fused_rms_norm_backward" => rms_backward,
};

/// What is added to the mean square; the type's precision where it is absent.
fn number(call: &Call<'_>, at: usize) -> Result<f64, KernelError> {
    number_or(call, at, f64::from(f32::EPSILON))
}

/// (N, C, …) with the channels in groups.
struct Group<'a> {
    x: &'a View,
    samples: usize,
    groups: usize,
    /// Channels of a group.
    channels: usize,
}

impl<'a> Group<'a> {
    /// The form with sizes from argument `at` on: samples, channels, pixels, groups.
    fn native(call: &'a Call<'_>, x: usize, at: usize) -> Result<Self, KernelError> {
        Self::new(real(call, x)?, int_or(call, at + 3, 1)?)
    }

    fn whole(call: &'a Call<'_>) -> Result<Self, KernelError> {
        Self::new(real(call, 0)?, int_or(call, 1, 1)?)
    }

    fn new(x: &'a View, groups: i64) -> Result<Self, KernelError> {
        let groups = usize::try_from(groups).unwrap_or(0);
        match x.shape[..] {
            [samples, channels, ..] if groups > 0 && channels % groups == 0 => {
                Ok(Self { x, samples, groups, channels: channels / groups })
            }
            _ => Err(invalid!("{groups} groups of a tensor of shape {:?}", x.shape)),
        }
    }

    /// Calls `visit(channel, offsets)` for each element of a group, offsets in several views of
    /// the same shape.
    fn each<const N: usize>(
        &self,
        [sample, group]: [usize; 2],
        views: [&View; N],
        mut visit: impl FnMut(usize, [usize; N]),
    ) {
        for c in 0..self.channels {
            let channel = group * self.channels + c;
            let strides: [Vec<usize>; N] = views.map(|v| v.stride[2..].to_vec());
            each(&self.x.shape[2..], &strides, |at: [usize; N]| {
                visit(
                    channel,
                    std::array::from_fn(|k| {
                        at[k] + sample * views[k].stride[0] + channel * views[k].stride[1]
                    }),
                );
            });
        }
    }

    fn elements(&self) -> usize {
        self.channels * self.x.shape[2..].iter().product::<usize>()
    }
}

fn channel(view: Option<&View>, at: usize, otherwise: f32) -> f32 {
    view.map_or(otherwise, |v| read(v, at * v.stride[0]) as f32)
}

fn per_channel<'a>(
    call: &'a Call<'_>,
    at: usize,
    channels: usize,
) -> Result<Option<&'a View>, KernelError> {
    let view = maybe_real(call, at)?;
    view.map_or(Ok(()), |view| expect_shape("a value per channel", view, &[channels]))?;
    Ok(view)
}

fn forward(
    call: &Call<'_>,
    of: &Group<'_>,
    [weight, bias]: [usize; 2],
    eps: f64,
) -> Result<(), KernelError> {
    let out = shaped(call, 0, &of.x.shape)?;
    let channels = of.groups * of.channels;
    let (weight, bias) = (per_channel(call, weight, channels)?, per_channel(call, bias, channels)?);
    let statistic = |at: usize| {
        let view = result(call, at)?.filter(|view| view.shape == [of.samples, of.groups]);
        view.map(|_| shaped(call, at, &[of.samples, of.groups])).transpose()
    };
    let (mean_out, rstd_out) = (statistic(1)?, statistic(2)?);
    let elements = of.elements() as f64;
    for place in (0..of.samples).flat_map(|n| (0..of.groups).map(move |g| [n, g])) {
        let (mut sum, mut squares) = (0.0, 0.0);
        of.each(place, [of.x], |_, [at]| sum += read(of.x, at));
        let mean = sum / elements;
        of.each(place, [of.x], |_, [at]| squares += (read(of.x, at) - mean).powi(2));
        let rstd = 1.0 / (squares / elements + eps).sqrt();
        of.each(place, [of.x, out], |c, [from, to]| {
            let scale = rstd as f32 * channel(weight, c, 1.0);
            let shift = channel(bias, c, 0.0) - scale * mean as f32;
            write(out, to, read(of.x, from) as f32 * scale + shift);
        });
        for (view, value) in [(mean_out, mean), (rstd_out, rstd)] {
            if let Some(v) = view {
                write(v, place[0] * v.stride[0] + place[1] * v.stride[1], value as f32);
            }
        }
    }
    Ok(())
}

fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (gradient, of) = (real(call, 0)?, Group::native(call, 1, 5)?);
    same_shape(gradient, of.x)?;
    let channels = of.groups * of.channels;
    let (mean, rstd) = (real(call, 2)?, real(call, 3)?);
    expect_shape("the mean", mean, &[of.samples, of.groups])?;
    expect_shape("the deviation", rstd, &[of.samples, of.groups])?;
    let (weight, wanted) = (per_channel(call, 4, channels)?, mask(call, 9)?);
    let into = |at: usize, shape: &[usize]| {
        let view = result(call, at)?.filter(|_| wanted[at]);
        view.map(|_| shaped(call, at, shape)).transpose()
    };
    let (dx, dw, db) = (into(0, &of.x.shape)?, into(1, &[channels])?, into(2, &[channels])?);
    let (mut products, mut sums) = (vec![0.0f64; channels], vec![0.0f64; channels]);
    let elements = of.elements() as f64;
    for place in (0..of.samples).flat_map(|n| (0..of.groups).map(move |g| [n, g])) {
        let at = |v: &View| read(v, place[0] * v.stride[0] + place[1] * v.stride[1]);
        let (mean, rstd) = (at(mean), at(rstd));
        let (mut level, mut tilt) = (0.0, 0.0);
        of.each(place, [gradient, of.x], |c, [g, x]| {
            let (g, normal) = (read(gradient, g), (read(of.x, x) - mean) * rstd);
            products[c] += g * normal;
            sums[c] += g;
            let g = g * f64::from(channel(weight, c, 1.0));
            level += g;
            tilt += g * normal;
        });
        let (level, tilt) = (level / elements, tilt / elements);
        let Some(dx) = dx else { continue };
        of.each(place, [gradient, of.x, dx], |c, [g, x, to]| {
            let g = read(gradient, g) * f64::from(channel(weight, c, 1.0));
            let normal = (read(of.x, x) - mean) * rstd;
            write(dx, to, (rstd * (g - level - normal * tilt)) as f32);
        });
    }
    for (view, totals) in [(dw, products), (db, sums)] {
        if let Some(v) = view {
            totals.iter().enumerate().for_each(|(c, t)| write(v, c * v.stride[0], *t as f32));
        }
    }
    Ok(())
}

/// Rows over the last dimensions: extents of the others, and of a row.
fn split<'a>(
    call: &Call<'_>,
    x: &'a View,
    at: usize,
) -> Result<(&'a [usize], &'a [usize]), KernelError> {
    let inner = ints(call, at)?.len();
    let split = x.shape.len().checked_sub(inner).ok_or("more dimensions than the tensor has")?;
    Ok(x.shape.split_at(split))
}

/// `x / sqrt(mean(x²) + eps) * weight` over the last dimensions.
fn rms(call: &Call<'_>, eps: f64) -> Result<(), KernelError> {
    let (x, weight) = (real(call, 0)?, maybe_real(call, 2)?);
    let (outer, inner) = split(call, x, 1)?;
    let out = shaped(call, 0, &x.shape)?;
    weight.map_or(Ok(()), |w| expect_shape("the weight", w, inner))?;
    let saved = result(call, 1)?.filter(|v| v.shape.starts_with(outer) && !v.shape.is_empty());
    let steps = |v: &View| v.stride[..outer.len()].to_vec();
    let rest = |v: &View| v.stride[outer.len()..].to_vec();
    let none = vec![0; outer.len()];
    let strides = [steps(x), steps(out), saved.map_or(none, steps)];
    let elements = inner.iter().product::<usize>() as f64;
    each(outer, &strides, |[from, to, kept]| {
        let mut squares = 0.0;
        each(inner, &[rest(x)], |[at]| squares += read(x, from + at).powi(2));
        let rstd = 1.0 / (squares / elements + eps).sqrt();
        let weight_steps = weight.map_or(vec![0; inner.len()], |w| w.stride.clone());
        each(inner, &[rest(x), rest(out), weight_steps], |[a, b, w]| {
            let scale = weight.map_or(1.0, |view| read(view, w) as f32);
            write(out, to + b, read(x, from + a) as f32 * rstd as f32 * scale);
        });
        if let Some(saved) = saved {
            write(saved, kept, rstd as f32);
        }
    });
    Ok(())
}

fn rms_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (gradient, x, rstd, weight) =
        (real(call, 0)?, real(call, 1)?, real(call, 3)?, maybe_real(call, 4)?);
    same_shape(gradient, x)?;
    let (outer, inner) = split(call, x, 2)?;
    weight.map_or(Ok(()), |w| expect_shape("the weight", w, inner))?;
    if !rstd.shape.starts_with(outer) {
        return Err(invalid!("deviations of shape {:?} for rows of {outer:?}", rstd.shape));
    }
    let wanted = |at: usize| match call.operator.args.get(5) {
        Some(Arg::Bools(mask)) => mask.get(at).copied().unwrap_or(false),
        _ => true,
    };
    let into = |at: usize, shape: &[usize]| {
        let view = result(call, at)?.filter(|_| wanted(at));
        view.map(|_| shaped(call, at, shape)).transpose()
    };
    let (dx, dw) = (into(0, &x.shape)?, into(1, inner)?);
    let steps = |v: &View| v.stride[..outer.len()].to_vec();
    let rest = |v: &View| v.stride[outer.len()..].to_vec();
    let weight_steps = weight.map_or(vec![0; inner.len()], |w| w.stride.clone());
    let elements = inner.iter().product::<usize>();
    let mut products = vec![0.0f64; elements];
    let out_steps = dx.map_or(vec![0; outer.len()], steps);
    each(outer, &[steps(gradient), steps(x), steps(rstd), out_steps], |[g, from, r, to]| {
        let rstd = read(rstd, r);
        let scaled =
            |at: usize, w: usize| read(gradient, g + at) * weight.map_or(1.0, |view| read(view, w));
        let (mut tilt, mut place) = (0.0, 0);
        each(inner, &[rest(gradient), rest(x), weight_steps.clone()], |[a, b, w]| {
            let normal = read(x, from + b) * rstd;
            tilt += scaled(a, w) * normal;
            products[place] += read(gradient, g + a) * normal;
            place += 1;
        });
        let tilt = tilt / elements as f64;
        if let Some(dx) = dx {
            let strides = [rest(gradient), rest(x), weight_steps.clone(), rest(dx)];
            each(inner, &strides, |[a, b, w, c]| {
                let normal = read(x, from + b) * rstd;
                write(dx, to + c, (rstd * (scaled(a, w) - normal * tilt)) as f32);
            });
        }
    });
    if let Some(dw) = dw {
        let mut totals = products.iter();
        each(inner, &[&dw.stride], |[at]| {
            write(dw, at, totals.next().map_or(0.0, |t| *t as f32));
        });
    }
    Ok(())
}
