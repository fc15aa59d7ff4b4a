//! Convolutions by cuDNN: deterministic algorithms only, in the workspace that the plan reserves.
//!
//! Where the library has no such algorithm for the workspace at hand, the plain kernels do it. Not
//! for: profiling, which asks [`Cudnn::plan`] what a larger workspace would allow.

use std::ffi::{c_int, c_void};

use super::launch::{Conv, Pass};
use super::libs::{LibError, Opened};
use super::params::Operand;
use crate::backend::operators::KernelError;
use crate::backend::operators::error::device_error;
use crate::job::Dtype;

type Handle = *mut c_void;

/// What the library expects of an algorithm: `cudnnConvolution…AlgoPerf_t`, the same for all three
/// passes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Expected {
    algorithm: c_int,
    status: c_int,
    time: f32,
    memory: usize,
    determinism: c_int,
    mathematics: c_int,
    reserved: [c_int; 3],
}

/// More than cuDNN has of any pass.
const MOST: usize = 16;

type Make = unsafe extern "C" fn(*mut Handle) -> c_int;
type Drop1 = unsafe extern "C" fn(Handle) -> c_int;
type Ask = unsafe extern "C" fn(
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    c_int,
    *mut c_int,
    *mut Expected,
) -> c_int;
type Run = unsafe extern "C" fn(
    Handle,
    *const c_void,
    Handle,
    *const c_void,
    Handle,
    *const c_void,
    Handle,
    c_int,
    *mut c_void,
    usize,
    *const c_void,
    Handle,
    *mut c_void,
) -> c_int;

/// cuDNN's functions and its handle.
pub struct Cudnn {
    handle: Handle,
    destroy: Drop1,
    make: [Make; 3],
    drop: [Drop1; 3],
    #[allow(clippy::type_complexity, reason = "as the library declares it")]
    set_tensor: unsafe extern "C" fn(
        Handle,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
    ) -> c_int,
    set_filter: unsafe extern "C" fn(Handle, c_int, c_int, c_int, c_int, c_int, c_int) -> c_int,
    set_convolution: unsafe extern "C" fn(
        Handle,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
    ) -> c_int,
    set_groups: unsafe extern "C" fn(Handle, c_int) -> c_int,
    set_mathematics: unsafe extern "C" fn(Handle, c_int) -> c_int,
    ask: [Ask; 3],
    run: [Run; 3],
    tf32: bool,
}

/// A convolution that is ready to run.
pub struct Plan {
    conv: Conv,
    /// Of x, y, w and the convolution.
    descriptors: [Handle; 4],
    /// The library's number of the algorithm within its pass.
    pub algorithm: i32,
    /// How much it works in.
    pub workspace: u64,
}

/// `CUDNN_FMA_MATH`; the default rounds the factors of f32 to TF32.
const EXACT: c_int = 3;

const TENSOR: usize = 0;
const FILTER: usize = 1;
const CONVOLUTION: usize = 2;

fn check(what: &str, status: c_int) -> Result<(), KernelError> {
    if status == 0 { Ok(()) } else { Err(device_error!("cuDNN {what}: status {status}")) }
}

impl Cudnn {
    /// A handle on the current context that works on `stream`.
    ///
    /// # Errors
    /// When a function is missing, or the library fails.
    ///
    /// # Safety
    /// The stream is of the current context and outlives the handle.
    pub unsafe fn new(
        library: &Opened,
        stream: *mut c_void,
        tf32: bool,
    ) -> Result<Self, KernelError> {
        let text = |e: LibError| KernelError::Device(e.to_string());
        // SAFETY: the types are those of cudnn.h of version 9, with enumerations as whole numbers.
        unsafe {
            let create: Make = library.function(c"cudnnCreate").map_err(text)?;
            let set_stream: unsafe extern "C" fn(Handle, *mut c_void) -> c_int =
                library.function(c"cudnnSetStream").map_err(text)?;
            let mut handle = std::ptr::null_mut();
            check("does not start", create(&raw mut handle))?;
            let cudnn = Self {
                handle,
                destroy: library.function(c"cudnnDestroy").map_err(text)?,
                make: [
                    library.function(c"cudnnCreateTensorDescriptor").map_err(text)?,
                    library.function(c"cudnnCreateFilterDescriptor").map_err(text)?,
                    library.function(c"cudnnCreateConvolutionDescriptor").map_err(text)?,
                ],
                drop: [
                    library.function(c"cudnnDestroyTensorDescriptor").map_err(text)?,
                    library.function(c"cudnnDestroyFilterDescriptor").map_err(text)?,
                    library.function(c"cudnnDestroyConvolutionDescriptor").map_err(text)?,
                ],
                set_tensor: library.function(c"cudnnSetTensor4dDescriptorEx").map_err(text)?,
                set_filter: library.function(c"cudnnSetFilter4dDescriptor").map_err(text)?,
                set_convolution: library
                    .function(c"cudnnSetConvolution2dDescriptor")
                    .map_err(text)?,
                set_groups: library.function(c"cudnnSetConvolutionGroupCount").map_err(text)?,
                set_mathematics: library.function(c"cudnnSetConvolutionMathType").map_err(text)?,
                ask: [
                    library.function(c"cudnnGetConvolutionForwardAlgorithm_v7").map_err(text)?,
                    library
                        .function(c"cudnnGetConvolutionBackwardDataAlgorithm_v7")
                        .map_err(text)?,
                    library
                        .function(c"cudnnGetConvolutionBackwardFilterAlgorithm_v7")
                        .map_err(text)?,
                ],
                run: [
                    library.function(c"cudnnConvolutionForward").map_err(text)?,
                    library.function(c"cudnnConvolutionBackwardData").map_err(text)?,
                    library.function(c"cudnnConvolutionBackwardFilter").map_err(text)?,
                ],
                tf32,
            };
            check("takes no stream", set_stream(handle, stream))?;
            Ok(cudnn)
        }
    }

    /// The library's first choice among deterministic algorithms that work in at most `workspace`
    /// bytes: of all, or `wanted` alone. `None` when it has none, or can't take these strides.
    ///
    /// # Errors
    /// When the library fails.
    pub fn plan(
        &self,
        conv: &Conv,
        workspace: u64,
        wanted: Option<i32>,
    ) -> Result<Option<Plan>, KernelError> {
        let mut plan = Plan {
            conv: *conv,
            descriptors: [std::ptr::null_mut(); 4],
            algorithm: 0,
            workspace: 0,
        };
        let found = self.choose(&mut plan, workspace, wanted);
        if !matches!(found, Ok(true)) {
            self.forget(&plan);
        }
        Ok(found?.then_some(plan))
    }

    fn choose(
        &self,
        plan: &mut Plan,
        workspace: u64,
        wanted: Option<i32>,
    ) -> Result<bool, KernelError> {
        let kinds = [TENSOR, TENSOR, FILTER, CONVOLUTION];
        for (slot, kind) in plan.descriptors.iter_mut().zip(kinds) {
            // SAFETY: the slot outlives the call.
            check("makes no descriptor", unsafe { self.make[kind](slot) })?;
        }
        if !self.describe(plan) {
            return Ok(false);
        }
        let fits = |e: &&Expected| {
            e.status == 0
                && e.determinism == 1
                && e.memory as u64 <= workspace
                && wanted.is_none_or(|wanted| wanted == e.algorithm)
        };
        let (found, count) = self.expected(plan);
        let Some(best) = found.iter().take(count).find(fits) else {
            return Ok(false);
        };
        (plan.algorithm, plan.workspace) = (best.algorithm, best.memory as u64);
        // The algorithm is the library's number together with what it computes in.
        let mathematics = if self.exact(plan.conv.dtype) { EXACT } else { best.mathematics };
        // SAFETY: the descriptor was made by this library for a convolution.
        let status = unsafe { (self.set_mathematics)(plan.descriptors[3], mathematics) };
        check("refuses what it said that it computes in", status)?;
        Ok(true)
    }

    /// Factors are kept as they are.
    fn exact(&self, dtype: Dtype) -> bool {
        dtype == Dtype::F32 && !self.tf32
    }

    /// Sets a plan's descriptors; false where the library can't take its shape or strides.
    fn describe(&self, plan: &Plan) -> bool {
        let p = &plan.conv.params;
        // cudnnDataType_t
        let kind = match plan.conv.dtype {
            Dtype::Bf16 => 9,
            Dtype::F16 => 2,
            _ => 0,
        };
        let filter = [p.groups * p.channels_out, p.channels_in, p.kernel[0], p.kernel[1]];
        let Some(format) = filter_format(&p.w, filter) else { return false };
        let (Ok(images), Some(x), Some(y)) =
            (c_int::try_from(p.images), strides(&p.x), strides(&p.y))
        else {
            return false;
        };
        let [dx, dy, dw, dc] = plan.descriptors;
        // `channels` of all groups, height and width, then four strides.
        let set_tensor = |at: Handle, channels: c_int, size: [c_int; 2], s: [c_int; 4]| {
            let [height, width] = size;
            // SAFETY: the descriptor was made by this library for a tensor.
            unsafe {
                (self.set_tensor)(at, kind, images, channels, height, width, s[0], s[1], s[2], s[3])
            }
        };
        let [out, input, height, width] = filter;
        let ([above, left], [down, right], [apart, beside]) = (p.padding, p.stride, p.dilation);
        let mathematics = if self.exact(plan.conv.dtype) { EXACT } else { 0 };
        // Cross-correlation, summed in f32.
        let (mode, sums) = (1, 0);
        // SAFETY: the descriptors were made by this library for a filter and a convolution.
        let others = unsafe {
            [
                (self.set_filter)(dw, kind, format, out, input, height, width),
                (self.set_convolution)(dc, above, left, down, right, apart, beside, mode, sums),
                (self.set_groups)(dc, p.groups),
                (self.set_mathematics)(dc, mathematics),
            ]
        };
        set_tensor(dx, p.groups * p.channels_in, p.size, x) == 0
            && set_tensor(dy, p.groups * p.channels_out, p.out, y) == 0
            && others.iter().all(|&status| status == 0)
    }

    /// The library's algorithms for a plan, best first, and how many there are.
    fn expected(&self, plan: &Plan) -> ([Expected; MOST], usize) {
        let blank = Expected {
            algorithm: 0,
            status: 0,
            time: 0.0,
            memory: 0,
            determinism: 0,
            mathematics: 0,
            reserved: [0; 3],
        };
        let (mut found, mut count) = ([blank; MOST], 0);
        let (pass, first, second, last) = self.order(plan);
        let [.., dc] = plan.descriptors;
        let (most, into) = (MOST as c_int, found.as_mut_ptr());
        // SAFETY: there is room for `MOST` answers.
        let status = unsafe {
            self.ask[pass](self.handle, first, second, dc, last, most, &raw mut count, into)
        };
        let count = if status == 0 { usize::try_from(count).unwrap_or(0) } else { 0 };
        (found, count)
    }

    /// Index of the pass, and its descriptors in the library's order: two operands, then what is
    /// written.
    fn order(&self, plan: &Plan) -> (usize, Handle, Handle, Handle) {
        let [x, y, w, _] = plan.descriptors;
        match plan.conv.pass {
            Pass::Forward => (0, x, w, y),
            Pass::BackInput => (1, w, y, x),
            Pass::BackWeight => (2, x, y, w),
        }
    }

    /// Puts a convolution on the handle's stream.
    ///
    /// # Errors
    /// When the library refuses.
    ///
    /// # Safety
    /// Operands lie on the device and belong to this step; `workspace` has the plan's size.
    pub unsafe fn run(&self, plan: &Plan, workspace: *mut c_void) -> Result<(), KernelError> {
        let p = &plan.conv.params;
        let (pass, first, second, last) = self.order(plan);
        let [a, b, to] = match plan.conv.pass {
            Pass::Forward => [p.x.data, p.w.data, p.y.data],
            Pass::BackInput => [p.w.data, p.y.data, p.x.data],
            Pass::BackWeight => [p.x.data, p.y.data, p.w.data],
        };
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the caller vouches for the operands; numbers are read before the call returns.
        let status = unsafe {
            self.run[pass](
                self.handle,
                (&raw const one).cast(),
                first,
                a.cast(),
                second,
                b.cast(),
                plan.descriptors[3],
                plan.algorithm,
                workspace,
                usize::try_from(plan.workspace).unwrap_or(0),
                (&raw const zero).cast(),
                last,
                to.cast(),
            )
        };
        check("does not convolve", status)
    }

    /// Gives a plan's descriptors back.
    pub fn forget(&self, plan: &Plan) {
        for (descriptor, kind) in
            plan.descriptors.into_iter().zip([TENSOR, TENSOR, FILTER, CONVOLUTION])
        {
            if !descriptor.is_null() {
                // SAFETY: made by this library, used no more.
                unsafe { self.drop[kind](descriptor) };
            }
        }
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used no more.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// The library's strides, where they fit its numbers.
fn strides(o: &Operand) -> Option<[c_int; 4]> {
    let mut all = [0; 4];
    for (slot, &stride) in all.iter_mut().zip(&o.stride) {
        *slot = c_int::try_from(stride).ok().filter(|&s| s > 0)?;
    }
    Some(all)
}

/// The library's format of dense weights: 0 for channels first, 1 for channels last.
fn filter_format(w: &Operand, shape: [i32; 4]) -> Option<c_int> {
    let [_, c, h, k] = shape.map(i64::from);
    let dense = |expected: [i64; 4]| (0..4).all(|d| shape[d] == 1 || w.stride[d] == expected[d]);
    if dense([c * h * k, h * k, k, 1]) {
        Some(0)
    } else if dense([c * h * k, 1, k * c, c]) {
        Some(1)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_weights() {
        let weights = |stride: [i64; 4]| {
            let mut o = Operand::number(0.0);
            o.stride[..4].copy_from_slice(&stride);
            o
        };
        assert_eq!(filter_format(&weights([18, 9, 3, 1]), [4, 2, 3, 3]), Some(0));
        assert_eq!(filter_format(&weights([18, 1, 6, 2]), [4, 2, 3, 3]), Some(1));
        assert_eq!(filter_format(&weights([36, 18, 6, 2]), [4, 2, 3, 3]), None);
        assert_eq!(filter_format(&weights([2, 1, 1, 1]), [4, 2, 1, 1]), Some(0));
        assert_eq!(size_of::<Expected>(), 48);
    }
}
