//! Dropout and its gradient.
//!
//! Masks come from [`crate::backend::operators::random`], numbered by an element's place in
//! row-major order whatever the strides.

use crate::backend::operators::arguments::{
    Input, flag, floating, input, int_or, is_floating, maybe_input, number, number_or, output,
    real, result, tensor,
};
use crate::backend::operators::random::{Random, survivors, unrounded};
use crate::backend::operators::shapes::{at, broadcast, each, same_shape, walk};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{KernelError, Table, table};
use crate::job::Arg;

use super::Kernel;
use super::elements::{BLOCK, Lane, copy, fill, map2, read, write, write_int};

pub const TABLE: Table<Kernel> = table! {
    "dropout" | "dropout_" | "native_dropout" => dropout,
    "native_dropout_backward" => dropout_backward,
    "bernoulli" | "bernoulli_" => bernoulli,
    "rand" | "rand_like" => |c| uniform(c, [0.0, 1.0]),
    "randn" | "randn_like" => |c| normal(c, [0.0, 1.0]),
    "normal_" => |c| normal(c, [number_or(c, 1, 0.0)?, number_or(c, 2, 1.0)?]),
    "randint" | "randint_like" => |c| {
            let at = usize::from(c.operator.kind.ends_with("like"));
            let (low, high) = match c.operator.args.get(at + 1) {
                Some(Arg::Int(high)) => (int_or(c, at, 0)?, *high),
                _ => (0, int_or(c, at, 1)?),
            };
            let (out, wide) = (output(c)?, (high - low).max(1) as f64);
            each_random(c, out, |at, share| {
                let value = low + (share * wide) as i64;
                if is_floating(out) {
                    write(out, at, value as f32);
                } else {
                    write_int(out, at, value);
                }
            });
            Ok(())
        },
    "uniform_" | "uniform" => |c| uniform(c, [number_or(c, 1, 0.0)?, number_or(c, 2, 1.0)?]),
};

fn dropout(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, from, p) = (floating(output(call)?)?, real(call, 0)?, number(call, 1)?);
    same_shape(out, from)?;
    let mask = result(call, 1)?;
    if let Some(mask) = mask {
        same_shape(out, mask)?;
    }
    // An absent flag means training.
    let training = flag(call, 2)? || matches!(call.operator.args.get(2), None | Some(Arg::None));
    if !training || p == 0.0 {
        if let Some(mask) = mask {
            fill(mask, 1.0)?;
        }
        return copy(out, from);
    }
    let random = Random { key: call.random_key, iteration: call.iteration };
    let scale = survivors(p);
    // Without a mask the third operand is the input again, and is not written.
    let flags: &View = mask.unwrap_or(from);
    let (mut keep, mut x, mut marks) = ([false; BLOCK], [0.0f32; BLOCK], [0i64; BLOCK]);
    let mut element = 0;
    walk(&out.shape, &[&out.stride, &from.stride, &flags.stride], false, |start, length, step| {
        for done in (0..length).step_by(BLOCK) {
            let n = (length - done).min(BLOCK);
            random.keep(p, element, &mut keep[..n]);
            element += n as u64;
            // SAFETY: the walk stays inside all three views.
            unsafe {
                f32::load(from.dtype, at(from, start[1] + done * step[1]), step[1], &mut x[..n]);
                for ((x, &k), mark) in x[..n].iter_mut().zip(&keep).zip(&mut marks) {
                    *x = if k { *x * scale } else { 0.0 };
                    *mark = i64::from(k);
                }
                f32::store(out.dtype, at(out, start[0] + done * step[0]), step[0], &x[..n]);
                if mask.is_some() {
                    i64::store(
                        flags.dtype,
                        at(flags, start[2] + done * step[2]),
                        step[2],
                        &marks[..n],
                    );
                }
            }
        }
    });
    Ok(())
}

fn dropout_backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, grad, mask) = (floating(output(call)?)?, tensor(call, 0)?, tensor(call, 1)?);
    let scale = unrounded(number(call, 2)?);
    map2::<f32>(out, &Input::View(grad), &Input::View(mask), |g, m| g * m * scale)
}

/// Visits each element of `out` with a random number in [0, 1), a multiple of 2^-24.
fn each_random(call: &Call<'_>, out: &View, mut visit: impl FnMut(usize, f64)) {
    let random = Random { key: call.random_key, iteration: call.iteration };
    let mut element = 0;
    each(&out.shape, &[&out.stride], |[at]| {
        visit(at, f64::from(random.word(element) >> 8) / 16_777_216.0);
        element += 1;
    });
}

/// Ones with the probability in argument 1, a number or a tensor; of `bernoulli`, in argument 0.
fn bernoulli(call: &Call<'_>) -> Result<(), KernelError> {
    let out = output(call)?;
    let given = maybe_input(call, 1)?;
    let probability = match given {
        None if call.operator.kind.ends_with('_') => Input::Number { value: 0.5, float: true },
        None => input(call, 0)?,
        Some(given) => given,
    };
    let stride = match probability {
        Input::View(view) => broadcast(view, &out.shape)?,
        Input::Number { .. } => vec![0; out.shape.len()],
    };
    let random = Random { key: call.random_key, iteration: call.iteration };
    let mut element = 0;
    each(&out.shape, &[&out.stride, &stride], |[to, from]| {
        let p = match probability {
            Input::View(view) => read(view, from),
            Input::Number { value, .. } => value,
        };
        let one = f64::from(random.word(element) >> 8) / 16_777_216.0 < p;
        write(out, to, f32::from(u8::from(one)));
        element += 1;
    });
    Ok(())
}

/// Normally distributed numbers, two words each (Box and Muller, 1958).
fn normal(call: &Call<'_>, [mean, deviation]: [f64; 2]) -> Result<(), KernelError> {
    let out = floating(output(call)?)?;
    let random = Random { key: call.random_key, iteration: call.iteration };
    let share = |word: u32| (f64::from(word) + 0.5) / 4_294_967_296.0;
    let mut element = 0;
    each(&out.shape, &[&out.stride], |[at]| {
        let [a, b] = [2 * element, 2 * element + 1].map(|i| share(random.word(i)));
        let value = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        write(out, at, (mean + deviation * value) as f32);
        element += 1;
    });
    Ok(())
}

fn uniform(call: &Call<'_>, [low, high]: [f64; 2]) -> Result<(), KernelError> {
    let out = floating(output(call)?)?;
    each_random(call, out, |at, share| write(out, at, (low + share * (high - low)) as f32));
    Ok(())
}
