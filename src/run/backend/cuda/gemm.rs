//! Matrix products by cuBLASLt. A sum may be split over blocks when its parts are added in a fixed
//! order: the same bits at every run. How a product is carried out depends on its shape, and never
//! on the plan: the library is asked once, and all later plans of the process take its answer.
//!
//! Operands that are neither by rows nor by columns go to the plain kernel ([`super::emit`]).

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use super::emit::layout;
use super::launch::Gemm;
use super::libs::{LibError, Opened};
use crate::Product;
use crate::backend::operators::KernelError;
use crate::backend::operators::error::device_error;
use crate::job::Dtype;

type Handle = *mut c_void;

/// A choice of the library, opaque.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Algorithm([u64; 8]);

#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

type Set = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;

/// cuBLASLt's functions and its handle.
pub struct CublasLt {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    describe: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int,
    set_description: Set,
    drop_description: unsafe extern "C" fn(Handle) -> c_int,
    layout: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int,
    set_layout: Set,
    drop_layout: unsafe extern "C" fn(Handle) -> c_int,
    prefer: unsafe extern "C" fn(*mut Handle) -> c_int,
    set_preference: Set,
    drop_preference: unsafe extern "C" fn(Handle) -> c_int,
    configuration:
        unsafe extern "C" fn(*const Algorithm, c_int, *mut c_void, usize, *mut usize) -> c_int,
    heuristic: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Heuristic,
        *mut c_int,
    ) -> c_int,
    #[allow(clippy::type_complexity, reason = "as the library declares it")]
    multiply: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *const c_void,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *mut c_void,
        Handle,
        *const Algorithm,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> c_int,
    /// Round the factors of f32 products to TF32.
    tf32: bool,
}

/// A matrix as the library stores it: by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Extent along which elements follow each other.
    pub rows: i64,
    /// The other extent.
    pub columns: i64,
    /// From a column to the next.
    pub step: i64,
    /// The library turns it before multiplying.
    pub transposed: bool,
}

/// The library's A, B and C for a product. What is stored by rows is by columns its transpose, so
/// it computes c' = b' a': A is b, B is a.
#[must_use]
pub fn stored(g: &Gemm) -> Option<[Stored; 3]> {
    let factor = |rows: i64, columns: i64, steps: [i64; 2]| {
        let (by_columns, step) = layout(rows, columns, steps)?;
        let (rows, columns) = if by_columns { (rows, columns) } else { (columns, rows) };
        Some(Stored { rows, columns, step, transposed: !by_columns })
    };
    let a = factor(g.n, g.k, [g.b.column, g.b.row])?;
    let b = factor(g.k, g.m, [g.a.column, g.a.row])?;
    let (by_columns, step) = layout(g.m, g.n, [g.c.row, g.c.column])?;
    (!by_columns).then_some([a, b, Stored { rows: g.n, columns: g.m, step, transposed: false }])
}

/// A product that is ready to run: descriptors and the algorithm.
pub struct Plan {
    gemm: Gemm,
    description: Handle,
    /// Of the library's A, B and C.
    layouts: [Handle; 3],
    algorithm: Algorithm,
    /// How much it works in.
    pub workspace: u64,
    /// For the user.
    pub product: Option<Product>,
}

/// The library's answers, by what it was asked: types, extents, steps, alignment, memory. `None`
/// where it has no way.
type Answers = BTreeMap<Vec<i64>, Option<(Algorithm, u64, Product)>>;
static ANSWERS: Mutex<Answers> = Mutex::new(BTreeMap::new());

/// Numbers of cublasLt.h.
mod code {
    pub const F32: i32 = 0;
    pub const BF16: i32 = 14;
    pub const F16: i32 = 2;
    pub const COMPUTE_F32: i32 = 68;
    pub const COMPUTE_TF32: i32 = 77;
    pub const TRANSPOSE_A: i32 = 3;
    pub const TRANSPOSE_B: i32 = 4;
    pub const EPILOGUE: i32 = 7;
    pub const BIAS: i32 = 8;
    pub const BATCH: i32 = 5;
    pub const BATCH_STEP: i32 = 6;
    pub const WORKSPACE: i32 = 1;
    pub const REDUCTIONS: i32 = 3;
    pub const ALIGNMENT: i32 = 5;
    pub const EPILOGUE_BIAS: i32 = 4;
    /// Parts of a sum lie in the workspace and are added by a kernel of its own. The other schemes
    /// add them in whatever order blocks end, or round each first.
    pub const REDUCE_IN_WORKSPACE: i32 = 2;
    /// Of an algorithm: its number, tile, parts of sums, and how these are added.
    pub const CHOSEN: [i32; 4] = [0, 1, 2, 3];
}

fn check(what: &str, status: c_int) -> Result<(), KernelError> {
    if status == 0 { Ok(()) } else { Err(device_error!("cuBLASLt {what}: status {status}")) }
}

impl CublasLt {
    /// A handle on the current context.
    ///
    /// # Errors
    /// When a function is missing, or the library fails.
    pub fn new(library: &Opened, tf32: bool) -> Result<Self, KernelError> {
        let text = |e: LibError| KernelError::Device(e.to_string());
        // SAFETY: the types are those of cublasLt.h of CUDA 13, with enumerations as whole numbers.
        unsafe {
            let create: unsafe extern "C" fn(*mut Handle) -> c_int =
                library.function(c"cublasLtCreate").map_err(text)?;
            let mut handle = std::ptr::null_mut();
            check("does not start", create(&raw mut handle))?;
            Ok(Self {
                handle,
                destroy: library.function(c"cublasLtDestroy").map_err(text)?,
                describe: library.function(c"cublasLtMatmulDescCreate").map_err(text)?,
                set_description: library
                    .function(c"cublasLtMatmulDescSetAttribute")
                    .map_err(text)?,
                drop_description: library.function(c"cublasLtMatmulDescDestroy").map_err(text)?,
                layout: library.function(c"cublasLtMatrixLayoutCreate").map_err(text)?,
                set_layout: library.function(c"cublasLtMatrixLayoutSetAttribute").map_err(text)?,
                drop_layout: library.function(c"cublasLtMatrixLayoutDestroy").map_err(text)?,
                prefer: library.function(c"cublasLtMatmulPreferenceCreate").map_err(text)?,
                set_preference: library
                    .function(c"cublasLtMatmulPreferenceSetAttribute")
                    .map_err(text)?,
                drop_preference: library
                    .function(c"cublasLtMatmulPreferenceDestroy")
                    .map_err(text)?,
                configuration: library
                    .function(c"cublasLtMatmulAlgoConfigGetAttribute")
                    .map_err(text)?,
                heuristic: library.function(c"cublasLtMatmulAlgoGetHeuristic").map_err(text)?,
                multiply: library.function(c"cublasLtMatmul").map_err(text)?,
                tf32,
            })
        }
    }

    /// Chooses how to carry out a product in at most `workspace` bytes; `None` when the library has
    /// no way.
    ///
    /// # Errors
    /// When the library fails.
    pub fn plan(&self, gemm: &Gemm, workspace: u64) -> Result<Option<Plan>, KernelError> {
        let (kind, compute) = match gemm.dtype {
            Dtype::Bf16 => (code::BF16, code::COMPUTE_F32),
            Dtype::F16 => (code::F16, code::COMPUTE_F32),
            _ => (code::F32, if self.tf32 { code::COMPUTE_TF32 } else { code::COMPUTE_F32 }),
        };
        let Some(stored) = stored(gemm) else { return Ok(None) };
        let mut plan = Plan {
            gemm: *gemm,
            description: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            algorithm: Algorithm([0; 8]),
            workspace,
            product: None,
        };
        let found = self.choose(&mut plan, kind, compute, stored);
        if !matches!(found, Ok(true)) {
            self.forget(&plan);
        }
        Ok(found?.then_some(plan))
    }

    fn choose(
        &self,
        plan: &mut Plan,
        kind: i32,
        compute: i32,
        stored: [Stored; 3],
    ) -> Result<bool, KernelError> {
        let g = plan.gemm;
        let set = |function: Set, of: Handle, attribute: i32, value: *const c_void, size: usize| {
            // SAFETY: the attribute has this size, and the value lives through the call.
            check("refuses an attribute", unsafe { function(of, attribute, value, size) })
        };
        let number = |function: Set, of: Handle, attribute: i32, value: i32| {
            set(function, of, attribute, (&raw const value).cast(), 4)
        };
        // SAFETY: descriptors are created into places that outlive the calls, and dropped by
        // `forget`.
        unsafe {
            check(
                "describes no product",
                (self.describe)(&raw mut plan.description, compute, code::F32),
            )?;
            for (slot, of) in plan.layouts.iter_mut().zip(stored) {
                check(
                    "lays out no matrix",
                    (self.layout)(slot, kind, of.rows as u64, of.columns as u64, of.step),
                )?;
            }
        }
        for (attribute, of) in [code::TRANSPOSE_A, code::TRANSPOSE_B].into_iter().zip(stored) {
            number(self.set_description, plan.description, attribute, i32::from(of.transposed))?;
        }
        if !g.bias.is_null() {
            number(self.set_description, plan.description, code::EPILOGUE, code::EPILOGUE_BIAS)?;
            set(self.set_description, plan.description, code::BIAS, (&raw const g.bias).cast(), 8)?;
        }
        if g.batch > 1 {
            let count =
                i32::try_from(g.batch).map_err(|_| device_error!("a batch of {}", g.batch))?;
            for (layout, step) in plan.layouts.iter().zip([g.b.batch, g.a.batch, g.c.batch]) {
                number(self.set_layout, *layout, code::BATCH, count)?;
                set(self.set_layout, *layout, code::BATCH_STEP, (&raw const step).cast(), 8)?;
            }
        }
        // Places of tensors in the arena are multiples of 512: the same in every plan.
        let alignments =
            [g.b.data, g.a.data, g.c.data].map(|data| 1i32 << data.addr().trailing_zeros().min(8));
        let mut asked = vec![kind.into(), compute.into(), plan.workspace.cast_signed()];
        let matrix = |of: &Stored| [of.rows, of.columns, of.step, of.transposed.into()];
        asked.extend(stored.iter().flat_map(matrix));
        asked.extend([g.batch, g.b.batch, g.a.batch, g.c.batch, i64::from(!g.bias.is_null())]);
        asked.extend(alignments.map(i64::from));
        let mut answers = ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = match answers.get(&asked) {
            Some(answer) => *answer,
            None => {
                let answer = self.ask(plan, alignments)?;
                answers.insert(asked, answer);
                answer
            }
        };
        let Some((algorithm, workspace, product)) = answer else { return Ok(false) };
        (plan.algorithm, plan.workspace, plan.product) = (algorithm, workspace, Some(product));
        Ok(true)
    }

    /// The library's choice for a product that is described, and the memory that it works in.
    fn ask(
        &self,
        plan: &Plan,
        [a, b, c]: [i32; 3],
    ) -> Result<Option<(Algorithm, u64, Product)>, KernelError> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: created here, dropped below.
        check("takes no preference", unsafe { (self.prefer)(&raw mut preference) })?;
        let mut found = Heuristic {
            algorithm: Algorithm([0; 8]),
            workspace: 0,
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut count = 0;
        let asked = (|| {
            let set = |attribute: i32, value: *const c_void, size: usize| {
                // SAFETY: the attribute has this size, and the value lives through the call.
                let status = unsafe { (self.set_preference)(preference, attribute, value, size) };
                check("refuses an attribute", status)
            };
            set(code::WORKSPACE, (&raw const plan.workspace).cast(), 8)?;
            let reductions = code::REDUCE_IN_WORKSPACE;
            set(code::REDUCTIONS, (&raw const reductions).cast(), 4)?;
            for (i, alignment) in (0..).zip([a, b, c, c]) {
                set(code::ALIGNMENT + i, (&raw const alignment).cast(), 4)?;
            }
            let [a, b, c] = plan.layouts;
            // SAFETY: all descriptors are alive, and there is room for one answer.
            let status = unsafe {
                (self.heuristic)(
                    self.handle,
                    plan.description,
                    a,
                    b,
                    c,
                    c,
                    preference,
                    1,
                    &raw mut found,
                    &raw mut count,
                )
            };
            // 15: not supported this way.
            if status == 15 { Ok(()) } else { check("chooses no algorithm", status) }
        })();
        // SAFETY: made above, used no more.
        unsafe { (self.drop_preference)(preference) };
        asked?;
        let workspace = found.workspace as u64;
        if count == 0 || found.state != 0 || workspace > plan.workspace {
            return Ok(None);
        }
        let product = self.product(&plan.gemm, &found.algorithm)?;
        // Whatever was asked for: parts that are added otherwise give other bits each time.
        let ordered = product.parts <= 1 || product.reduction == code::REDUCE_IN_WORKSPACE as u32;
        Ok(ordered.then_some((found.algorithm, workspace, product)))
    }

    /// What an algorithm does.
    fn product(&self, g: &Gemm, algorithm: &Algorithm) -> Result<Product, KernelError> {
        let mut of = [0u32; 4];
        for (slot, attribute) in of.iter_mut().zip(code::CHOSEN) {
            let (to, mut written) = (std::ptr::from_mut(slot).cast(), 0);
            // SAFETY: each of these attributes has four bytes.
            let status =
                unsafe { (self.configuration)(algorithm, attribute, to, 4, &raw mut written) };
            check("does not say what an algorithm is", status)?;
        }
        let [algorithm, tile, parts, reduction] = of;
        let Gemm { dtype, m, n, k, batch, .. } = *g;
        let bias = !g.bias.is_null();
        Ok(Product { m, n, k, batch, dtype, bias, algorithm, tile, parts, reduction })
    }

    /// Puts a product on a stream.
    ///
    /// # Errors
    /// When the library refuses.
    ///
    /// # Safety
    /// The stream is of the current context; the operands lie on the device and belong to this
    /// step; `workspace` has the plan's size.
    pub unsafe fn run(
        &self,
        plan: &Plan,
        workspace: *mut c_void,
        stream: *mut c_void,
    ) -> Result<(), KernelError> {
        let (g, [a, b, c]) = (&plan.gemm, plan.layouts);
        // SAFETY: descriptors are alive; the caller vouches for the operands.
        let status = unsafe {
            (self.multiply)(
                self.handle,
                plan.description,
                (&raw const g.alpha).cast(),
                g.b.data.cast(),
                a,
                g.a.data.cast(),
                b,
                (&raw const g.beta).cast(),
                g.c.data.cast(),
                c,
                g.c.data.cast(),
                c,
                &raw const plan.algorithm,
                workspace,
                usize::try_from(plan.workspace).unwrap_or(0),
                stream,
            )
        };
        check("does not multiply", status)
    }

    /// Gives a plan's descriptors back.
    pub fn forget(&self, plan: &Plan) {
        // SAFETY: each was made by this library, or is null, and is used no more.
        unsafe {
            if !plan.description.is_null() {
                (self.drop_description)(plan.description);
            }
            for layout in plan.layouts.into_iter().filter(|l| !l.is_null()) {
                (self.drop_layout)(layout);
            }
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used no more.
        unsafe { (self.destroy)(self.handle) };
    }
}
