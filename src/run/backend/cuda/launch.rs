//! What a step is on CUDA: kernel launches, copies and library calls with all their arguments.
//!
//! Actions hold addresses and no handles, so they can be made ([`super::emit`]), read and checked
//! without a GPU.

use crate::backend::operators::KernelError;
use crate::backend::operators::error::unsupported;
use crate::job::{Dtype, Optimizer};

use super::params::{
    Convolution, Map, MatrixProduct, Operand, Params, Parts, RANK, Random, bytes, code,
};

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Element by element.
    Pointwise,
    /// Sums and extremes.
    Reduce,
    /// Softmax and losses.
    Softmax,
    /// Batch and layer normalisation.
    Norm,
    /// Pooling.
    Pool,
    /// Rows by number.
    Index,
    /// Optimizer steps.
    Optimizer,
    /// Products and convolutions that the libraries don't take.
    Matrix,
    /// Attention over wide heads.
    Attention,
    /// Attention over heads up to 64 wide.
    AttentionBlocked,
    /// Attention in bf16 and f16 on tensor cores.
    AttentionMma,
}

impl Family {
    /// All of them, by index.
    pub const ALL: [Self; 11] = [
        Self::Pointwise,
        Self::Reduce,
        Self::Softmax,
        Self::Norm,
        Self::Pool,
        Self::Index,
        Self::Optimizer,
        Self::Matrix,
        Self::Attention,
        Self::AttentionBlocked,
        Self::AttentionMma,
    ];

    /// Its file's name without the extension.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pointwise => "pointwise",
            Self::Reduce => "reduce",
            Self::Softmax => "softmax",
            Self::Norm => "norm",
            Self::Pool => "pool",
            Self::Index => "index",
            Self::Optimizer => "optimizer",
            Self::Matrix => "matrix",
            Self::Attention => "attention",
            Self::AttentionBlocked => "attention_blocked",
            Self::AttentionMma => "attention_mma",
        }
    }

    /// What is compiled: the parts that kernels have in common, then the file.
    #[must_use]
    pub fn source(self) -> String {
        let own = match self {
            Self::Pointwise => include_str!("../../../../kernels/pointwise.cu"),
            Self::Reduce => include_str!("../../../../kernels/reduce.cu"),
            Self::Softmax => include_str!("../../../../kernels/softmax.cu"),
            Self::Norm => include_str!("../../../../kernels/norm.cu"),
            Self::Pool => include_str!("../../../../kernels/pool.cu"),
            Self::Index => include_str!("../../../../kernels/index.cu"),
            Self::Optimizer => include_str!("../../../../kernels/optimizer.cu"),
            Self::Matrix => include_str!("../../../../kernels/matrix.cu"),
            Self::Attention => include_str!("../../../../kernels/attention.cu"),
            Self::AttentionBlocked => include_str!("../../../../kernels/attention_blocked.cu"),
            Self::AttentionMma => concat!(
                include_str!("../../../../kernels/mma.cuh"),
                include_str!("../../../../kernels/attention_mma.cu")
            ),
        };
        let shared = match self {
            Self::Attention | Self::AttentionBlocked | Self::AttentionMma => {
                include_str!("../../../../kernels/attention.cuh")
            }
            _ => include_str!("../../../../kernels/rows.cuh"),
        };
        [include_str!("../../../../kernels/common.cuh"), shared, own].concat()
    }
}

/// What changes from one iteration to the next in a kernel's parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vary {
    /// Nothing.
    Nothing,
    /// The iteration's number, as eight bytes at this place.
    Iteration(usize),
    /// [`super::params::Scalars`] at the front, by the update's kind, its parameter group and the
    /// steps done.
    Scalars(String, Option<u32>),
}

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// In which file the kernel is.
    pub family: Family,
    /// The kernel.
    pub kernel: String,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block, in x and y.
    pub block: [u32; 2],
    /// The structure that the kernel takes.
    pub params: Vec<u8>,
    /// What of it changes.
    pub vary: Vary,
    /// Memory beside the arena that it works in: where the structure has its address, and how many
    /// bytes it is.
    pub beside: Option<(usize, u64)>,
    /// Bytes of shared memory beside what the kernel declares.
    pub shared: u32,
}

impl Launch {
    /// With the address of the memory beside the arena written into the parameters.
    pub fn place(&mut self, beside: u64) {
        if let Some((at, _)) = self.beside
            && let Some(slot) = self.params.get_mut(at..at + 8)
        {
            slot.copy_from_slice(&beside.to_ne_bytes());
        }
    }

    /// With the parameters of an iteration written into them.
    ///
    /// # Errors
    /// When the optimizer lacks a number.
    pub fn fill(
        &mut self,
        iteration: u64,
        optimizer: Option<&Optimizer>,
    ) -> Result<(), KernelError> {
        match &self.vary {
            Vary::Nothing => {}
            Vary::Iteration(at) => {
                self.params
                    .get_mut(*at..*at + 8)
                    .ok_or("an iteration outside the parameters")?
                    .copy_from_slice(&iteration.to_ne_bytes());
            }
            Vary::Scalars(kind, group) => {
                let group = optimizer.and_then(|o| o.group(*group));
                let scalars = super::emit::optimizer::scalars(kind, group, iteration)?;
                let (s, flag) = (
                    scalars.s.iter().flat_map(|x| x.to_ne_bytes()),
                    scalars.flag.iter().flat_map(|x| x.to_ne_bytes()),
                );
                self.params.iter_mut().zip(s.chain(flag)).for_each(|(slot, byte)| *slot = byte);
            }
        }
        Ok(())
    }
}

/// A matrix in memory, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// First element.
    pub data: *mut u8,
    /// From a row to the next.
    pub row: i64,
    /// From a column to the next.
    pub column: i64,
    /// From one of a batch to the next.
    pub batch: i64,
}

/// `c = alpha a b + beta c + bias` for each of a batch, by the library.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names of the formula")]
pub struct Gemm {
    pub dtype: Dtype,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub batch: i64,
    pub alpha: f32,
    pub beta: f32,
    pub a: Matrix,
    pub b: Matrix,
    /// Of rows that follow each other: its columns are one element apart.
    pub c: Matrix,
    /// By column, dense; null for none.
    pub bias: *mut u8,
}

impl Gemm {
    /// The plain kernel's launch.
    ///
    /// # Errors
    /// For a type that kernels don't have.
    pub fn plain(&self) -> Result<Launch, KernelError> {
        let dtype = code(self.dtype)?;
        let operand = |m: Matrix| {
            let mut stride = [0; RANK];
            stride[..3].copy_from_slice(&[m.row, m.column, m.batch]);
            Operand { data: m.data, dtype, number: 0, value: 0.0, stride }
        };
        let bias = Matrix { data: self.bias, row: 0, column: 1, batch: 0 };
        let product = MatrixProduct {
            m: self.m,
            n: self.n,
            k: self.k,
            batch: self.batch,
            rank: 1,
            alpha: self.alpha,
            beta: self.beta,
            pad: 0,
            shape: [
                u32::try_from(self.batch).map_err(|_| unsupported!("a batch of {}", self.batch))?,
                1,
                1,
                1,
            ],
            a: operand(self.a),
            b: operand(self.b),
            c: operand(self.c),
            bias: if self.bias.is_null() { Operand::number(0.0) } else { operand(bias) },
        };
        let tiles =
            ((self.m + 15) / 16).saturating_mul((self.n + 15) / 16).saturating_mul(self.batch);
        let (kernel, params) = ("matrix_product".to_owned(), bytes(&product));
        Ok(Launch {
            family: Family::Matrix,
            kernel,
            grid: grid(tiles),
            block: [16, 16],
            params,
            vary: Vary::Nothing,
            beside: None,
            shared: 0,
        })
    }

    /// The same sum in two steps: a launch that writes the bias to every row of the result, and a
    /// product that adds to it. A bias has the result's type, so that both forms round once.
    /// `None` without a bias.
    ///
    /// # Errors
    /// For a type that kernels don't have.
    pub fn bias_first(&self) -> Result<Option<(Launch, Self)>, KernelError> {
        if self.bias.is_null() || self.beta != 0.0 {
            return Ok(None);
        }
        let dtype = code(self.dtype)?;
        let extent =
            |n: i64| u32::try_from(n).map_err(|_| unsupported!("a matrix with an extent of {n}"));
        let operand = |data: *mut u8, steps: [i64; 3]| {
            let mut stride = [0; RANK];
            stride[..3].copy_from_slice(&steps);
            Operand { data, dtype, number: 0, value: 0.0, stride }
        };
        let mut map = Map {
            count: self.batch * self.m * self.n,
            rank: 3,
            dense: 0,
            shape: [1; RANK],
            o: [Operand::number(0.0); 4],
            s: [0.0; 4],
            k: [0; 4],
            random: Random::default(),
        };
        map.shape[..3].copy_from_slice(&[extent(self.batch)?, extent(self.m)?, extent(self.n)?]);
        map.o[0] = operand(self.c.data, [self.c.batch, self.c.row, 1]);
        map.o[1] = operand(self.bias, [0, 0, 1]);
        let spread = Launch {
            family: Family::Pointwise,
            kernel: "f_copy".to_owned(),
            grid: grid(super::emit::blocks(&map)),
            block: [256, 1],
            params: bytes(&map),
            vary: Vary::Nothing,
            beside: None,
            shared: 0,
        };
        Ok(Some((spread, Self { beta: 1.0, bias: std::ptr::null_mut(), ..*self })))
    }
}

/// Which of the three a convolution is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// Writes y.
    Forward,
    /// Writes the gradient of x.
    BackInput,
    /// Writes the gradient of w.
    BackWeight,
}

/// A convolution, by the library or the plain kernels.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    /// The pass.
    pub pass: Pass,
    /// Element type of all three.
    pub dtype: Dtype,
    /// Extents, addresses and strides.
    pub params: Convolution,
}

impl Conv {
    /// The plain kernel's launch.
    #[must_use]
    pub fn plain(&self) -> Launch {
        let p = &self.params;
        let product = |of: &[i32]| of.iter().map(|&n| i64::from(n)).product::<i64>();
        let (kernel, blocks) = match self.pass {
            Pass::Forward => (
                "convolve",
                (p.images * product(&[p.groups, p.channels_out, p.out[0], p.out[1]]))
                    .div_euclid(256)
                    + 1,
            ),
            Pass::BackInput => (
                "convolve_back_input",
                (p.images * product(&[p.groups, p.channels_in, p.size[0], p.size[1]]))
                    .div_euclid(256)
                    + 1,
            ),
            Pass::BackWeight => (
                "convolve_back_weight",
                product(&[p.groups, p.channels_out, p.channels_in])
                    * product(&[p.kernel[0], p.kernel[1]]),
            ),
        };
        Launch {
            family: Family::Matrix,
            kernel: kernel.to_owned(),
            grid: grid(blocks),
            block: [256, 1],
            params: bytes(p),
            vary: Vary::Nothing,
            beside: None,
            shared: 0,
        }
    }
}

/// One thing that the device does for a step.
#[derive(Clone, Debug)]
pub enum Action {
    /// A kernel.
    Launch(Launch),
    /// A copy on the device.
    Copy {
        /// From here.
        from: *mut u8,
        /// To there.
        to: *mut u8,
        /// How many bytes.
        bytes: usize,
    },
    /// Zeros.
    Zero {
        /// The first byte.
        to: *mut u8,
        /// How many bytes.
        bytes: usize,
    },
    /// Batch data, already laid out as it goes to the device.
    Upload {
        /// To there.
        to: *mut u8,
        /// The bytes.
        data: Vec<u8>,
    },
    /// A matrix product.
    Gemm(Gemm),
    /// A convolution.
    Conv(Box<Conv>),
}

impl Action {
    /// The file of its kernel, where it surely launches one.
    #[must_use]
    pub const fn family(&self) -> Option<Family> {
        match self {
            Self::Launch(launch) => Some(launch.family),
            _ => None,
        }
    }
}

/// What a step is made of, in order.
#[derive(Debug)]
pub struct Actions {
    /// The actions.
    pub list: Vec<Action>,
    /// Where kernels report a bad number.
    pub status: *mut i64,
    /// As what.
    pub item: i64,
    /// The GPU is of compute capability 8.0 or later: tensor cores take bf16, and a block may have
    /// 96 KiB of shared memory.
    pub ampere: bool,
}

impl Actions {
    /// None yet.
    #[must_use]
    pub fn new(status: *mut i64, item: i64) -> Self {
        Self { list: Vec::new(), status, item, ampere: true }
    }

    /// Adds a launch.
    pub fn launch<P: Params>(
        &mut self,
        family: Family,
        kernel: &str,
        blocks: i64,
        block: [u32; 2],
        params: &P,
    ) {
        self.vary(family, kernel, blocks, block, params, Vary::Nothing);
    }

    /// Adds a launch of which something changes.
    pub fn vary<P: Params>(
        &mut self,
        family: Family,
        kernel: &str,
        blocks: i64,
        block: [u32; 2],
        params: &P,
        vary: Vary,
    ) {
        if blocks > 0 {
            let (kernel, grid, params) = (kernel.to_owned(), grid(blocks), bytes(params));
            let (beside, shared) = (None, 0);
            let launch = Launch { family, kernel, grid, block, params, vary, beside, shared };
            self.list.push(Action::Launch(launch));
        }
    }

    /// Gives the last launch `bytes` of shared memory beside what its kernel declares.
    pub fn shared(&mut self, bytes: u32) {
        if let Some(Action::Launch(launch)) = self.list.last_mut() {
            launch.shared = bytes;
        }
    }

    /// Gives the last launch `bytes` of scratch beside the arena. The structure has the scratch's
    /// address at `at`. Later launches of the step find what earlier ones left there.
    pub fn beside(&mut self, at: usize, bytes: u64) {
        if let Some(Action::Launch(launch)) = self.list.last_mut() {
            launch.beside = Some((at, bytes));
        }
    }

    /// Adds the launches of a sum over parts: `blocks` of them for each part, and then `joining`.
    /// The structure has its [`Parts`] at `at`; the parts' sums take `bytes` bytes.
    pub fn in_parts<P: Params>(
        &mut self,
        family: Family,
        kernel: &str,
        (blocks, joining): (i64, i64),
        block: [u32; 2],
        (params, at): (&P, usize),
        (count, bytes): (i64, u64),
    ) {
        if count <= 1 {
            return self.launch(family, kernel, blocks, block, params);
        }
        for (second, blocks) in [(0i32, blocks * count), (1, joining)] {
            self.launch(family, kernel, blocks, block, params);
            if let Some(Action::Launch(launch)) = self.list.last_mut() {
                let flag = at + std::mem::offset_of!(Parts, second);
                launch.params[flag..flag + 4].copy_from_slice(&second.to_ne_bytes());
            }
            self.beside(at + std::mem::offset_of!(Parts, sums), bytes);
        }
    }
}

/// Blocks of a launch; kernels go on from block to block where there are fewer than wanted.
fn grid(blocks: i64) -> u32 {
    u32::try_from(blocks.clamp(1, 0x7fff_ffff)).unwrap_or(1)
}
