//! Convolutions in three dimensions, forward and backward, element by element in double precision.
//!
//! The same walk over (output, input, weight) serves all of them: what is written is the sum over
//! the others. A transposed convolution is the walk with input and output exchanged.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{
    flag, int_or, ints, mask, maybe_real, output, real, shaped,
};
use crate::backend::operators::conv::Places;
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::view::{Call, View};
use crate::job::Arg;

use super::elements::{read, write};
use super::volume::place;

/// A convolution from a large side to a small one.
struct Volume {
    groups: usize,
    stride: [usize; 3],
    padding: [usize; 3],
    dilation: [usize; 3],
}

/// Which of the three sides is written.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Large,
    Weight,
    Small,
}

impl Volume {
    fn new(call: &Call<'_>, places: Places) -> Result<Self, KernelError> {
        let three = |at: usize, least: i64, otherwise: usize| match ints(call, at)?[..] {
            [] => Ok([otherwise; 3]),
            [n] if (least..1 << 24).contains(&n) => Ok([n as usize; 3]),
            [d, h, w] if [d, h, w].iter().all(|n| (least..1 << 24).contains(n)) => {
                Ok([d as usize, h as usize, w as usize])
            }
            ref other => Err(invalid!("{other:?} as argument {at} of a convolution")),
        };
        if matches!(call.operator.args.get(places.padding), Some(Arg::Text(_))) {
            return Err(unsupported!("padding by a word is not supported in three dimensions"));
        }
        let groups = usize::try_from(int_or(call, places.groups, 1)?).unwrap_or(0);
        if groups == 0 {
            return Err(invalid!("a convolution of no groups"));
        }
        Ok(Self {
            groups,
            stride: three(places.stride, 1, 1)?,
            padding: three(places.padding, 0, 0)?,
            dilation: three(places.dilation, 1, 1)?,
        })
    }

    fn check(&self, large: &View, weight: &View, small: &View) -> Result<(), KernelError> {
        let fits = [large, weight, small].iter().all(|v| v.shape.len() == 5)
            && large.shape[0] == small.shape[0]
            && weight.shape[0] == small.shape[1]
            && weight.shape[1] * self.groups == large.shape[1]
            && small.shape[1].is_multiple_of(self.groups);
        let extents = |i: usize| {
            let reach = self.dilation[i] * (weight.shape[2 + i].max(1) - 1);
            (small.shape[2 + i].max(1) - 1) * self.stride[i] + reach
                < large.shape[2 + i] + 2 * self.padding[i]
        };
        if fits && (0..3).all(extents) {
            Ok(())
        } else {
            Err(invalid!(
                "a convolution of {:?} by {:?} to {:?}",
                large.shape,
                weight.shape,
                small.shape
            ))
        }
    }

    /// Writes one side: for each of its elements the sum over what meets it.
    fn run(&self, sides: [&View; 3], written: Side) -> Result<(), KernelError> {
        let [large, weight, small] = sides;
        self.check(large, weight, small)?;
        let into = match written {
            Side::Large => large,
            Side::Weight => weight,
            Side::Small => small,
        };
        let mut sums = vec![0.0f64; into.shape.iter().product()];
        let flat = |at: [usize; 5]| (0..5).fold(0, |sum, d| sum * into.shape[d] + at[d]);
        self.walk(large, weight, small, |l, w, s| {
            let value = |view: &View, at: [usize; 5]| read(view, place(view, at));
            match written {
                Side::Large => sums[flat(l)] += value(small, s) * value(weight, w),
                Side::Weight => sums[flat(w)] += value(small, s) * value(large, l),
                Side::Small => sums[flat(s)] += value(large, l) * value(weight, w),
            }
        });
        let mut sums = sums.into_iter();
        crate::backend::operators::shapes::each(&into.shape, &[&into.stride], |[to]| {
            write(into, to, sums.next().unwrap_or(0.0) as f32);
        });
        Ok(())
    }

    /// `visit` with every large element, weight and small element that meet.
    fn walk(
        &self,
        large: &View,
        weight: &View,
        small: &View,
        mut visit: impl FnMut([usize; 5], [usize; 5], [usize; 5]),
    ) {
        let [many, channels] = [small.shape[1] / self.groups, weight.shape[1]];
        let kernel = &weight.shape[2..];
        for cell in 0..small.shape.iter().product() {
            let s = unravel(cell, &small.shape);
            let group = s[1] / many.max(1);
            for tap in 0..kernel.iter().product() {
                let k = [tap / kernel[2] / kernel[1], tap / kernel[2] % kernel[1], tap % kernel[2]];
                let pixel = |i: usize| {
                    (s[2 + i] * self.stride[i] + k[i] * self.dilation[i])
                        .checked_sub(self.padding[i])
                        .filter(|&p| p < large.shape[2 + i])
                };
                let (Some(z), Some(y), Some(x)) = (pixel(0), pixel(1), pixel(2)) else { continue };
                for c in 0..channels {
                    visit([s[0], group * channels + c, z, y, x], [s[1], c, k[0], k[1], k[2]], s);
                }
            }
        }
    }
}

/// The indices of element `at` of a row-major tensor.
fn unravel(mut at: usize, shape: &[usize]) -> [usize; 5] {
    let mut index = [0; 5];
    for d in (0..5).rev() {
        index[d] = at % shape[d];
        at /= shape[d];
    }
    index
}

/// Adds a bias of one number for each channel.
fn add_bias(call: &Call<'_>, out: &View) -> Result<(), KernelError> {
    let Some(bias) = maybe_real(call, 2)? else { return Ok(()) };
    let steps = [0, bias.stride.first().copied().unwrap_or(0), 0, 0, 0];
    if bias.shape != out.shape[1..2] {
        return Err(invalid!("a bias of {:?} for {:?}", bias.shape, out.shape));
    }
    let strides = [&out.stride[..], &steps[..]];
    crate::backend::operators::shapes::each(&out.shape, &strides, |[to, from]| {
        write(out, to, (read(out, to) + read(bias, from)) as f32);
    });
    Ok(())
}

pub fn forward(call: &Call<'_>, places: Places) -> Result<(), KernelError> {
    let out = shaped(call, 0, &output(call)?.shape)?;
    let of = Volume::new(call, places)?;
    of.run([real(call, 0)?, real(call, 1)?, out], Side::Small)?;
    add_bias(call, out)
}

pub fn transposed(call: &Call<'_>, places: Places) -> Result<(), KernelError> {
    let out = shaped(call, 0, &output(call)?.shape)?;
    let of = Volume::new(call, places)?;
    of.run([out, real(call, 1)?, real(call, 0)?], Side::Large)?;
    add_bias(call, out)
}

pub fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (gradient, input, weight) = (real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let (transposed, wanted) = (flag(call, 7)?, mask(call, 10)?);
    let of = Volume::new(call, Places::BACKWARD)?;
    let present = |at: usize| wanted[at] && call.outputs.get(at).is_some_and(Option::is_some);
    if present(0) {
        let into = shaped(call, 0, &input.shape)?;
        if transposed {
            of.run([gradient, weight, into], Side::Small)?;
        } else {
            of.run([into, weight, gradient], Side::Large)?;
        }
    }
    if present(1) {
        let into = shaped(call, 1, &weight.shape)?;
        let (large, small) = if transposed { (gradient, input) } else { (input, gradient) };
        of.run([large, into, small], Side::Weight)?;
    }
    if present(2) {
        let into = shaped(call, 2, &gradient.shape[1..2])?;
        let gone = [true, false, true, true, true];
        super::reduce::sum_over(into, gradient, &gone, 1.0)?;
    }
    Ok(())
}
