//! What all kernels share: element access through strided views of mixed types.
//!
//! Work goes in blocks of [`BLOCK`] elements: each operand's block is loaded (and converted) into a
//! small array, the arithmetic runs over arrays and vectorises, the result is stored. So strides,
//! broadcasting, type mixes and in-place operands cost nothing in the arithmetic's code.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{Input, floating, is_floating};
use crate::backend::operators::error::invalid;
use crate::backend::operators::shapes::{at, broadcast, walk};
use crate::backend::operators::view::View;
use crate::job::Dtype;

use super::half;

/// Elements handled at a time.
pub const BLOCK: usize = 512;

/// The type arithmetic happens in: `f32` for floating operands, `i64` for whole numbers and flags.
pub trait Lane: Copy + Default + PartialOrd + PartialEq + 'static {
    /// What sums are kept in.
    type Wide: Copy;
    /// From a host number.
    fn from_f64(value: f64) -> Self;
    /// To the accumulator's type.
    fn wide(self) -> Self::Wide;
    /// Fills `into` with the elements at `from`, `from + stride`, ….
    ///
    /// # Safety
    /// Those elements of `dtype`, one of the supported types, must lie inside readable memory.
    unsafe fn load(dtype: Dtype, from: *const u8, stride: usize, into: &mut [Self]);
    /// Writes `from` to the elements at `to`, `to + stride`, ….
    ///
    /// # Safety
    /// Those elements of `dtype`, one of the supported types, must lie inside writable memory.
    unsafe fn store(dtype: Dtype, to: *mut u8, stride: usize, from: &[Self]);
}

/// # Safety
/// As [`Lane::load`], for elements of type `E`.
unsafe fn gather<E: Copy, T: Copy>(
    from: *const u8,
    stride: usize,
    into: &mut [T],
    convert: impl Fn(E) -> T,
) {
    let from = from.cast::<E>();
    if stride == 0 {
        if !into.is_empty() {
            // SAFETY: the first element is readable; no alignment is assumed.
            into.fill(convert(unsafe { from.read_unaligned() }));
        }
    } else if stride == 1 {
        for (i, slot) in into.iter_mut().enumerate() {
            // SAFETY: the caller vouches for `into.len()` elements from here.
            *slot = convert(unsafe { from.add(i).read_unaligned() });
        }
    } else {
        for (i, slot) in into.iter_mut().enumerate() {
            // SAFETY: as above, `stride` apart.
            *slot = convert(unsafe { from.add(i * stride).read_unaligned() });
        }
    }
}

/// # Safety
/// As [`Lane::store`], for elements of type `E`.
unsafe fn scatter<E: Copy, T: Copy>(
    to: *mut u8,
    stride: usize,
    from: &[T],
    convert: impl Fn(T) -> E,
) {
    let to = to.cast::<E>();
    if stride == 1 {
        for (i, &value) in from.iter().enumerate() {
            // SAFETY: the caller vouches for `from.len()` elements from here.
            unsafe { to.add(i).write_unaligned(convert(value)) };
        }
    } else {
        for (i, &value) in from.iter().enumerate() {
            // SAFETY: as above, `stride` apart.
            unsafe { to.add(i * stride).write_unaligned(convert(value)) };
        }
    }
}

macro_rules! lane {
    ($lane:ty, $wide:ty, $zero:expr) => {
        impl Lane for $lane {
            type Wide = $wide;

            fn from_f64(value: f64) -> Self {
                value as $lane
            }

            fn wide(self) -> $wide {
                self as $wide
            }

            #[inline(never)]
            unsafe fn load(dtype: Dtype, from: *const u8, stride: usize, into: &mut [Self]) {
                // SAFETY: the caller vouches for elements of `dtype`; each arm reads that type.
                unsafe {
                    match dtype {
                        Dtype::F32 => gather(from, stride, into, |x: f32| x as $lane),
                        Dtype::Bf16 => {
                            gather(from, stride, into, |x: u16| half::from_bf16(x) as $lane)
                        }
                        Dtype::F16 => {
                            gather(from, stride, into, |x: u16| half::from_f16(x) as $lane)
                        }
                        Dtype::F64 => gather(from, stride, into, |x: f64| x as $lane),
                        Dtype::I64 => gather(from, stride, into, |x: i64| x as $lane),
                        Dtype::I32 => gather(from, stride, into, |x: i32| x as $lane),
                        Dtype::U8 => gather(from, stride, into, |x: u8| <$lane>::from(x)),
                        _ => gather(from, stride, into, |x: u8| <$lane>::from(u8::from(x != 0))),
                    }
                }
            }

            #[inline(never)]
            unsafe fn store(dtype: Dtype, to: *mut u8, stride: usize, from: &[Self]) {
                // SAFETY: the caller vouches for elements of `dtype`; each arm writes that type.
                unsafe {
                    match dtype {
                        Dtype::F32 => scatter(to, stride, from, |x| x as f32),
                        Dtype::Bf16 => scatter(to, stride, from, |x| half::to_bf16(x as f32)),
                        Dtype::F16 => scatter(to, stride, from, |x| half::to_f16(x as f32)),
                        Dtype::F64 => scatter(to, stride, from, |x| x as f64),
                        Dtype::I64 => scatter(to, stride, from, |x| x as i64),
                        Dtype::I32 => scatter(to, stride, from, |x| x as i32),
                        Dtype::U8 => scatter(to, stride, from, |x| x as i64 as u8),
                        _ => scatter(to, stride, from, |x| u8::from(x != $zero)),
                    }
                }
            }
        }
    };
}

lane!(f32, f64, 0.0);
lane!(i64, i64, 0);

/// What [`blocks`] calls: the loaded inputs, the number of elements in them, where results go. A
/// `dyn FnMut` would compile every closure a second time, to be called once.
pub trait Arithmetic<T, const N: usize> {
    /// Computes one block.
    fn run(&mut self, inputs: &[[T; BLOCK]; N], count: usize, out: &mut [T; BLOCK]);
}

impl<T, const N: usize, F> Arithmetic<T, N> for F
where
    F: FnMut(&[[T; BLOCK]; N], usize, &mut [T; BLOCK]),
{
    fn run(&mut self, inputs: &[[T; BLOCK]; N], count: usize, out: &mut [T; BLOCK]) {
        self(inputs, count, out);
    }
}

/// `f` over blocks of the broadcast inputs (at most three), into `out`.
///
/// # Errors
/// When an input can't be broadcast to `out`.
pub fn blocks<T: Lane, const N: usize>(
    out: &View,
    inputs: [&Input<'_>; N],
    f: &mut dyn Arithmetic<T, N>,
) -> Result<(), KernelError> {
    let mut strides: Vec<Vec<usize>> = Vec::with_capacity(N);
    let mut loaded = [[T::default(); BLOCK]; N];
    for (k, operand) in inputs.iter().enumerate() {
        match operand {
            Input::View(view) => strides.push(broadcast(view, &out.shape)?),
            Input::Number { value, .. } => {
                loaded[k] = [T::from_f64(*value); BLOCK];
                strides.push(vec![0; out.shape.len()]);
            }
        }
    }
    // The first operand of the walk is the output.
    let mut all: [Vec<usize>; 4] = Default::default();
    all[0].clone_from(&out.stride);
    for (slot, stride) in all[1..].iter_mut().zip(strides) {
        *slot = stride;
    }
    (N + 1..4).for_each(|k| all[k] = vec![0; out.shape.len()]);
    let mut computed = [T::default(); BLOCK];
    walk(&out.shape, &all, true, |start, length, step| {
        let mut done = 0;
        while done < length {
            let n = (length - done).min(BLOCK);
            for (k, operand) in inputs.iter().enumerate() {
                if let Input::View(view) = operand {
                    let from = at(view, start[k + 1] + done * step[k + 1]);
                    // SAFETY: the walk stays inside the broadcast view, and views lie inside their
                    // storage.
                    unsafe { T::load(view.dtype, from, step[k + 1], &mut loaded[k][..n]) };
                }
            }
            f.run(&loaded, n, &mut computed);
            // SAFETY: the walk stays inside the output's view.
            unsafe {
                T::store(out.dtype, at(out, start[0] + done * step[0]), step[0], &computed[..n])
            };
            done += n;
        }
    });
    Ok(())
}

/// `f` of each element of `a`.
///
/// # Errors
/// When `a` can't be broadcast to `out`.
pub fn map1<T: Lane>(out: &View, a: &Input<'_>, f: impl Fn(T) -> T) -> Result<(), KernelError> {
    blocks(out, [a], &mut |[a]: &[[T; BLOCK]; 1], n: usize, out: &mut [T; BLOCK]| {
        for (out, &a) in out[..n].iter_mut().zip(&a[..n]) {
            *out = f(a);
        }
    })
}

/// `f` of each pair of elements.
///
/// # Errors
/// When an input can't be broadcast to `out`.
pub fn map2<T: Lane>(
    out: &View,
    a: &Input<'_>,
    b: &Input<'_>,
    f: impl Fn(T, T) -> T,
) -> Result<(), KernelError> {
    blocks(out, [a, b], &mut |[a, b]: &[[T; BLOCK]; 2], n: usize, out: &mut [T; BLOCK]| {
        for ((out, &a), &b) in out[..n].iter_mut().zip(&a[..n]).zip(&b[..n]) {
            *out = f(a, b);
        }
    })
}

/// `f` of each triple of elements.
///
/// # Errors
/// When an input can't be broadcast to `out`.
pub fn map3<T: Lane>(
    out: &View,
    a: &Input<'_>,
    b: &Input<'_>,
    c: &Input<'_>,
    f: impl Fn(T, T, T) -> T,
) -> Result<(), KernelError> {
    blocks(out, [a, b, c], &mut |[a, b, c]: &[[T; BLOCK]; 3], n: usize, out: &mut [T; BLOCK]| {
        for (((out, &a), &b), &c) in out[..n].iter_mut().zip(&a[..n]).zip(&b[..n]).zip(&c[..n]) {
            *out = f(a, b, c);
        }
    })
}

/// Copies `from`, broadcast and converted, to `out`.
///
/// # Errors
/// When it can't be broadcast.
pub fn copy(out: &View, from: &View) -> Result<(), KernelError> {
    let strides = [out.stride.clone(), broadcast(from, &out.shape)?];
    if out.dtype == from.dtype {
        let size = out.dtype.size() as usize;
        let mut dense = true;
        walk(&out.shape, &strides, true, |_, _, step| dense = step == [1, 1]);
        if dense {
            walk(&out.shape, &strides, true, |start, length, _| {
                // SAFETY: the walk stays inside both views; copying an operand onto itself is
                // allowed.
                unsafe { std::ptr::copy(at(from, start[1]), at(out, start[0]), length * size) };
            });
            return Ok(());
        }
    }
    if is_floating(out) || is_floating(from) {
        map1::<f32>(out, &Input::View(from), |x| x)
    } else {
        map1::<i64>(out, &Input::View(from), |x| x)
    }
}

/// Sets every element.
///
/// # Errors
/// None today; the signature is the kernels'.
pub fn fill(out: &View, value: f64) -> Result<(), KernelError> {
    let number = Input::Number { value, float: true };
    if is_floating(out) {
        map1::<f32>(out, &number, |x| x)
    } else {
        map1::<i64>(out, &number, |x| x)
    }
}

/// One element as a number.
pub fn read(view: &View, offset: usize) -> f64 {
    let mut slot = [0.0f32];
    let mut whole = [0i64];
    // SAFETY: callers pass offsets inside the view.
    unsafe {
        if is_floating(view) {
            f32::load(view.dtype, at(view, offset), 1, &mut slot);
            return f64::from(slot[0]);
        }
        i64::load(view.dtype, at(view, offset), 1, &mut whole);
    }
    whole[0] as f64
}

/// One element as a whole number.
pub fn read_int(view: &View, offset: usize) -> i64 {
    let mut slot = [0i64];
    // SAFETY: callers pass offsets inside the view.
    unsafe { i64::load(view.dtype, at(view, offset), 1, &mut slot) };
    slot[0]
}

/// Writes one element.
pub fn write(view: &View, offset: usize, value: f32) {
    // SAFETY: callers pass offsets inside the view.
    unsafe { f32::store(view.dtype, at(view, offset), 1, &[value]) };
}

/// Writes one whole number.
pub fn write_int(view: &View, offset: usize, value: i64) {
    // SAFETY: callers pass offsets inside the view.
    unsafe { i64::store(view.dtype, at(view, offset), 1, &[value]) };
}

/// Copies one element, converted.
pub fn copy_element(out: &View, to: usize, from: &View, at: usize) {
    if is_floating(out) {
        write(out, to, read(from, at) as f32);
    } else {
        write_int(out, to, read_int(from, at));
    }
}

/// Rows of `f32` elements: the last `inner` dimensions as one run, the others as an index.
pub struct Rows<'a> {
    view: &'a View,
    /// Extents of the index.
    pub outer: Vec<usize>,
    /// Strides of the index.
    pub stride: Vec<usize>,
    /// Elements of a row.
    pub length: usize,
    step: usize,
}

impl<'a> Rows<'a> {
    /// The rows along the last `inner` dimensions.
    ///
    /// # Errors
    /// When it isn't f32 or those dimensions don't form one run of evenly spaced elements.
    pub fn last(view: &'a View, inner: usize) -> Result<Self, KernelError> {
        let split = view
            .shape
            .len()
            .checked_sub(inner)
            .ok_or("more normalised dimensions than the tensor has")?;
        floating(view)?;
        let mut runs = Vec::new();
        walk(&view.shape[split..], &[&view.stride[split..]], false, |_, length, step| {
            if runs.len() < 2 {
                runs.push((length, step[0]));
            }
        });
        let (length, step) = match runs[..] {
            [] => (0, 1),
            [run] => run,
            _ => {
                return Err(invalid!(
                    "the last {inner} dimensions of strides {:?} are not one run",
                    view.stride
                ));
            }
        };
        Ok(Self {
            view,
            outer: view.shape[..split].to_vec(),
            stride: view.stride[..split].to_vec(),
            length,
            step,
        })
    }

    /// The rows along dimension `dim`.
    ///
    /// # Errors
    /// When it isn't f32.
    pub fn along(view: &'a View, dim: usize) -> Result<Self, KernelError> {
        floating(view)?;
        let (mut outer, mut stride) = (view.shape.clone(), view.stride.clone());
        if outer.is_empty() {
            return Ok(Self { view, outer, stride, length: 1, step: 1 });
        }
        let (length, step) = (outer.remove(dim), stride.remove(dim));
        Ok(Self { view, outer, stride, length, step })
    }

    /// Loads part of the row at `offset`.
    pub fn load(&self, offset: usize, first: usize, into: &mut [f32]) {
        debug_assert!(first + into.len() <= self.length);
        // SAFETY: the part lies inside the row, the row inside the view.
        unsafe {
            f32::load(self.view.dtype, at(self.view, offset + first * self.step), self.step, into)
        };
    }

    /// Stores part of the row at `offset`.
    pub fn store(&self, offset: usize, first: usize, from: &[f32]) {
        debug_assert!(first + from.len() <= self.length);
        // SAFETY: the part lies inside the row, the row inside the view.
        unsafe {
            f32::store(self.view.dtype, at(self.view, offset + first * self.step), self.step, from)
        };
    }
}

/// The parts of at most [`BLOCK`] elements that make up `length`.
pub fn parts(length: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..length).step_by(BLOCK).map(move |first| (first, (length - first).min(BLOCK)))
}

/// Sum of `f(i)` in double precision, in eight interleaved strands.
pub fn sum_of(n: usize, f: impl Fn(usize) -> f64) -> f64 {
    let mut strands = [0.0f64; 8];
    let whole = n / 8 * 8;
    for first in (0..whole).step_by(8) {
        for (lane, strand) in strands.iter_mut().enumerate() {
            *strand += f(first + lane);
        }
    }
    let mut total: f64 = strands.iter().sum();
    for i in whole..n {
        total += f(i);
    }
    total
}
