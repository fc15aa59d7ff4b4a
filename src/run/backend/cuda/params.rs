//! The structures that kernels take by value: mirrors of those in kernels/*.cu and *.cuh.

use crate::backend::operators::KernelError;
use crate::backend::operators::error::unsupported;
use crate::backend::operators::view::View;
use crate::job::Dtype;

/// Dimensions that a kernel can walk.
pub const RANK: usize = 8;

/// The number by which kernels know an element type.
///
/// # Errors
/// For types that no kernel reads.
pub fn code(dtype: Dtype) -> Result<i32, KernelError> {
    Ok(match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::I64 => 2,
        Dtype::I32 => 3,
        Dtype::U8 => 4,
        Dtype::Bool => 5,
        Dtype::F16 => 6,
        Dtype::F64 => 7,
        other => {
            return Err(unsupported!(
                "a tensor is {other:?}; the CUDA device supports F32, Bf16, F16, F64, I64, I32, U8 and Bool"
            ));
        }
    })
}

/// Marks structures that may be handed to a kernel as bytes.
///
/// # Safety
/// `repr(C)`, without padding that could be read uninitialised, and the same as the kernel's own
/// declaration.
pub unsafe trait Params: Copy {}

/// A strided tensor or a number.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Operand {
    /// First element.
    pub data: *mut u8,
    /// As [`code`] says.
    pub dtype: i32,
    /// 1 for a number.
    pub number: i32,
    /// The number.
    pub value: f64,
    /// In elements.
    pub stride: [i64; RANK],
}

impl Operand {
    /// A number, or what is not there.
    #[must_use]
    pub const fn number(value: f64) -> Self {
        Self { data: std::ptr::null_mut(), dtype: 0, number: 1, value, stride: [0; RANK] }
    }

    /// A view's elements, with its strides in its own order.
    ///
    /// # Errors
    /// For a type without kernels, or too many dimensions.
    pub fn new(view: &View) -> Result<Self, KernelError> {
        let stride: Vec<i64> = view.stride.iter().map(|&s| s as i64).collect();
        Self::strided(view, &stride)
    }

    /// A view's elements, with other strides.
    ///
    /// # Errors
    /// As [`Operand::new`].
    pub fn strided(view: &View, stride: &[i64]) -> Result<Self, KernelError> {
        let mut all = [0; RANK];
        all.get_mut(..stride.len())
            .ok_or_else(|| unsupported!("a tensor of {} dimensions", stride.len()))?
            .copy_from_slice(stride);
        Ok(Self { data: view.data, dtype: code(view.dtype)?, number: 0, value: 0.0, stride: all })
    }
}

/// How a sum is cut over blocks.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/common.cuh")]
pub struct Parts {
    pub count: i64,
    pub second: i32,
    pub pad: i32,
    pub sums: *mut u8,
}

/// Blocks that fill a GPU: some for each of about 130 multiprocessors. Not those of the GPU that
/// runs, on which the order of a sum would depend.
const BLOCKS: i64 = 512;

#[cfg(test)]
thread_local! {
    /// Whether to cut even the small sums of tests.
    pub static SMALL_PARTS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl Parts {
    /// Of sums that `blocks` blocks would make alone, over `terms` terms each: parts of at least
    /// `least` terms.
    #[must_use]
    pub fn new(blocks: i64, terms: i64, least: i64) -> Self {
        #[cfg(test)]
        let least = if SMALL_PARTS.get() { 2 } else { least };
        let wanted = (BLOCKS + blocks - 1) / blocks.max(1);
        let count = wanted.min(terms / least).max(1);
        Self { count, second: 0, pad: 0, sums: std::ptr::null_mut() }
    }
}

/// Whose random numbers, and which are dropped.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Random {
    /// The operator's key.
    pub key: u64,
    /// Filled at each run.
    pub iteration: u64,
    /// Of 2^32: lower words are dropped.
    pub threshold: u64,
}

/// Elementwise work.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/common.cuh")]
pub struct Map {
    pub count: i64,
    pub rank: i32,
    pub dense: i32,
    pub shape: [u32; RANK],
    pub o: [Operand; 4],
    pub s: [f32; 4],
    pub k: [i64; 4],
    pub random: Random,
}

/// Rows of a tensor.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/rows.cuh")]
pub struct Rows {
    pub rows: i64,
    pub length: i64,
    pub rank: i32,
    pub flags: i32,
    pub shape: [u32; RANK],
    pub o: [Operand; 6],
    pub s: [f64; 4],
    pub k: [i64; 4],
    pub status: *mut i64,
    pub item: i64,
    pub parts: Parts,
}

/// A reduction.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/reduce.cu")]
pub struct Reduce {
    pub kept: i64,
    pub reduced: i64,
    pub kept_rank: i32,
    pub reduced_rank: i32,
    pub kept_shape: [u32; RANK],
    pub reduced_shape: [u32; RANK],
    pub out: Operand,
    pub from: Operand,
    pub index: Operand,
    pub step: [i64; RANK],
    pub out_step: i64,
    pub divisor: f64,
    pub columns: i32,
    pub most: i32,
    pub parts: Parts,
}

/// Batch normalisation.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/norm.cu")]
pub struct BatchNorm {
    pub elements: i64,
    pub outer: i64,
    pub inner: i64,
    pub rank: i32,
    pub training: i32,
    pub update: i32,
    pub inner_parts: i32,
    pub shape: [u32; RANK],
    pub x: Operand,
    pub y: Operand,
    pub out: Operand,
    pub weight: Operand,
    pub bias: Operand,
    pub mean: Operand,
    pub deviation: Operand,
    pub first: Operand,
    pub second: Operand,
    pub momentum: f64,
    pub eps: f64,
    pub parts: Parts,
}

/// Pooling.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/pool.cu")]
pub struct Pool {
    pub count: i64,
    pub channels: i64,
    pub size: [i32; 2],
    pub out: [i32; 2],
    pub kernel: [i32; 2],
    pub stride: [i32; 2],
    pub padding: [i32; 2],
    pub dilation: [i32; 2],
    pub adaptive: i32,
    pub count_padding: i32,
    pub divisor: f64,
    pub pooled: Operand,
    pub pixels: Operand,
    pub index: Operand,
}

/// Looking rows up.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/index.cu")]
pub struct Index {
    pub count: i64,
    pub rank: i32,
    pub indices: i32,
    pub shape: [u32; RANK],
    pub out: Operand,
    pub from: Operand,
    pub index: [Operand; 4],
    pub step: [i64; 4],
    pub extent: [i64; 4],
    pub wrap: i64,
    pub status: *mut i64,
    pub item: i64,
}

/// Tensors that one launch can update.
pub const TENSORS: usize = 48;
/// Elements that one block updates.
pub const CHUNK: i64 = 4096;

/// One tensor of an optimizer step.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/optimizer.cu")]
pub struct One {
    pub first: i64,
    pub count: i64,
    pub parameter: *mut u8,
    pub gradient: *mut u8,
    pub state: [*mut u8; 3],
    pub dtype: [u8; 8],
}

/// What an optimizer's step number decides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Scalars {
    /// As each rule's comment in kernels/optimizer.cu says.
    pub s: [f32; 12],
    /// The same.
    pub flag: [i32; 8],
}

/// An optimizer step of many dense tensors.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/optimizer.cu")]
pub struct Update {
    pub scalars: Scalars,
    pub tensors: i64,
    pub of: [One; TENSORS],
}

/// An optimizer step of one tensor whose views differ in strides.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/optimizer.cu")]
pub struct UpdateStrided {
    pub scalars: Scalars,
    pub count: i64,
    pub rank: i64,
    pub shape: [u32; RANK],
    pub o: [Operand; 5],
}

/// A matrix product for the plain kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/matrix.cu")]
pub struct MatrixProduct {
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub batch: i64,
    pub rank: i32,
    pub alpha: f32,
    pub beta: f32,
    pub pad: i32,
    pub shape: [u32; 4],
    pub a: Operand,
    pub b: Operand,
    pub c: Operand,
    pub bias: Operand,
}

/// A convolution for the plain kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/matrix.cu")]
pub struct Convolution {
    pub images: i64,
    pub groups: i32,
    pub channels_in: i32,
    pub channels_out: i32,
    pub size: [i32; 2],
    pub out: [i32; 2],
    pub kernel: [i32; 2],
    pub stride: [i32; 2],
    pub padding: [i32; 2],
    pub dilation: [i32; 2],
    pub pad: i32,
    pub x: Operand,
    pub w: Operand,
    pub y: Operand,
    pub bias: Operand,
}

/// Attention.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "as in kernels/attention.cu")]
pub struct Attention {
    pub batch: i32,
    pub heads: i32,
    pub queries: i32,
    pub keys: i32,
    pub width: i32,
    pub value_width: i32,
    pub group: [i32; 2],
    pub causal: i32,
    pub dropout: i32,
    pub scale: f32,
    pub factor: f32,
    pub random: Random,
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    pub bias: Operand,
    pub out: Operand,
    pub sums: Operand,
    pub gradient: Operand,
    pub dq: Operand,
    pub dk: Operand,
    pub dv: Operand,
    pub delta: *mut u8,
}

/// The work of `neap profile --load`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Busy {
    /// How often each number of a thread is multiplied and added to.
    pub rounds: i64,
    /// A word for each thread.
    pub out: *mut u8,
}

macro_rules! params {
    ($($name:ty),*) => {
        $(
            // SAFETY: `repr(C)` with fields ordered so that none is padded; the shim refuses
            // another size.
            unsafe impl Params for $name {}
        )*
    };
}
params!(
    Map,
    Rows,
    Reduce,
    BatchNorm,
    Pool,
    Index,
    Update,
    UpdateStrided,
    MatrixProduct,
    Convolution,
    Attention,
    Busy
);

/// A structure as the bytes that a launch copies.
pub fn bytes<P: Params>(params: &P) -> Vec<u8> {
    // SAFETY: `Params` are plain structures without uninitialised bytes.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size_of::<P>()) }
        .to_vec()
}
