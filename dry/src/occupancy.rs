//! How many blocks of a kernel a multiprocessor holds at once: NVIDIA's published formula, with the
//! limits of each compute capability.

use std::ffi::{c_int, c_uint, c_void};

use crate::config::config;
use crate::cubin::Attributes;
use crate::kernels::{attributes, most_dynamic};
use crate::properties::{MAX_THREADS, REGISTERS, limits};
use crate::sys::{INVALID_VALUE, SUCCESS, Status, put};

const WARP: i32 = 32;
/// Registers go to warps in multiples of this.
const REGISTERS_UNIT: i32 = 256;

/// The least multiple of `unit` that is not below `value`.
fn up(value: i32, unit: i32) -> i32 {
    (value + unit - 1) / unit * unit
}

/// Schedulers of a multiprocessor, among which registers are divided.
fn partitions() -> i32 {
    if config().capability == 60 { 2 } else { 4 }
}

/// Shared memory goes to blocks in multiples of this.
fn shared_unit() -> i32 {
    if config().capability >= 80 { 128 } else { 256 }
}

/// The most shared memory of one block.
pub fn most_shared() -> i32 {
    limits().shared_per_block
}

/// Warps that a multiprocessor has registers for.
fn warps_by_registers(registers: i32) -> i32 {
    let each = up((registers * WARP).max(1), REGISTERS_UNIT);
    REGISTERS / partitions() / each * partitions()
}

/// The most threads of one block: what the compiler was given, and what there are registers for.
pub fn largest_block(kernel: &Attributes) -> i32 {
    kernel.max_threads.min(MAX_THREADS).min(warps_by_registers(kernel.registers) * WARP)
}

/// Blocks of `threads` that a multiprocessor holds, each with `dynamic` bytes of shared memory
/// beside the kernel's own.
fn blocks(kernel: &Attributes, threads: i32, dynamic: usize) -> i32 {
    let limits = limits();
    let shared = kernel.shared as u64 + dynamic as u64;
    if threads <= 0 || threads > largest_block(kernel) || shared > limits.shared_per_block as u64 {
        return 0;
    }
    let warps = up(threads, WARP) / WARP;
    let by_threads = limits.threads / WARP / warps;
    let by_registers = warps_by_registers(kernel.registers) / warps;
    let shared = up(shared as i32 + limits.shared_reserved, shared_unit());
    let by_shared = if shared == 0 { i32::MAX } else { limits.shared_per_multiprocessor / shared };
    limits.blocks.min(by_threads).min(by_registers).min(by_shared)
}

/// Defines questions for blocks a multiprocessor; those with flags have one more argument.
macro_rules! occupancies {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            out: *mut c_int,
            function: *const c_void,
            threads: c_int,
            dynamic: usize,
        ) -> Status {
            if threads <= 0 {
                return refuse(stringify!($name), INVALID_VALUE);
            }
            match attributes(function, stringify!($name)) {
                Ok(kernel) => {
                    unsafe { put(out, blocks(&kernel, threads, dynamic)) };
                    SUCCESS
                }
                Err(status) => refuse(stringify!($name), status),
            }
        }
    )* };
}

occupancies! {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
}

/// The runtime keeps an error for later, the driver does not.
fn refuse(name: &str, status: Status) -> Status {
    if name.starts_with("cuda") { crate::device::fail(status) } else { status }
}

/// Shared memory that blocks may ask for so that a multiprocessor holds as many.
fn available(kernel: &Attributes, most: i32, count: i32, threads: i32) -> Option<usize> {
    if count <= 0 || count > blocks(kernel, threads, 0) {
        return None;
    }
    let limits = limits();
    let each = limits.shared_per_multiprocessor / count / shared_unit() * shared_unit();
    let left = each - limits.shared_reserved - kernel.shared as i32;
    Some(left.min(most).max(0) as usize)
}

/// Defines questions for shared memory that is left.
macro_rules! shared_left {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            out: *mut usize,
            function: *const c_void,
            count: c_int,
            threads: c_int,
        ) -> Status {
            let kernel = match attributes(function, stringify!($name)) {
                Ok(kernel) => kernel,
                Err(status) => return refuse(stringify!($name), status),
            };
            match available(&kernel, most_dynamic(function, &kernel), count, threads) {
                Some(bytes) => {
                    unsafe { put(out, bytes) };
                    SUCCESS
                }
                None => refuse(stringify!($name), INVALID_VALUE),
            }
        }
    )* };
}

shared_left! { cudaOccupancyAvailableDynamicSMemPerBlock cuOccupancyAvailableDynamicSMemPerBlock }

/// Shared memory by a block's size.
type Dynamic = extern "C" fn(c_int) -> usize;

/// The block with which most threads run at once, and how many such blocks fill the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxPotentialBlockSize(
    grid: *mut c_int,
    block: *mut c_int,
    function: *const c_void,
    dynamic: Option<Dynamic>,
    bytes: usize,
    limit: c_int,
) -> Status {
    let kernel = match attributes(function, "cuOccupancyMaxPotentialBlockSize") {
        Ok(kernel) => kernel,
        Err(status) => return status,
    };
    let most = if limit > 0 { limit } else { MAX_THREADS }.min(largest_block(&kernel));
    let (mut best, mut found) = (0, (0, 0));
    let mut threads = up(most, WARP);
    while threads > 0 {
        let size = threads.min(most);
        let bytes = dynamic.map_or(bytes, |f| f(size));
        let count = blocks(&kernel, size, bytes);
        if count * size > best {
            (best, found) = (count * size, (count, size));
        }
        threads -= WARP;
    }
    unsafe {
        put(grid, found.0 * config().multiprocessors);
        put(block, found.1);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    grid: *mut c_int,
    block: *mut c_int,
    function: *const c_void,
    dynamic: Option<Dynamic>,
    bytes: usize,
    limit: c_int,
    _flags: c_uint,
) -> Status {
    unsafe { cuOccupancyMaxPotentialBlockSize(grid, block, function, dynamic, bytes, limit) }
}

/// The leading fields of `struct cudaLaunchConfig_t` and of `CUlaunchConfig`.
#[repr(C)]
pub struct Launch {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: usize,
    stream: *mut c_void,
    attributes: *const LaunchAttribute,
    count: c_uint,
}

/// The driver's shared memory is a word of four bytes; both forms have the same size.
#[repr(C)]
struct LaunchAttribute {
    kind: c_int,
    _padding: c_int,
    value: [c_uint; 16],
}

impl Launch {
    fn threads(&self) -> i32 {
        self.block.iter().product::<c_uint>() as i32
    }

    /// Blocks of a cluster, where the launch asks for clusters.
    fn cluster(&self) -> i32 {
        const CLUSTER: c_int = 4;
        // SAFETY: the caller gives as many attributes.
        let all = (0..self.count as usize).map(|i| unsafe { &*self.attributes.add(i) });
        let mut shape =
            all.filter(|a| a.kind == CLUSTER).map(|a| a.value[..3].iter().product::<u32>());
        shape.next_back().unwrap_or(1).max(1) as i32
    }
}

/// Defines questions for clusters. How multiprocessors are grouped differs from chip to chip: an
/// answer takes all of them as one group.
macro_rules! clusters {
    ($($name:ident $potential:ident;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            out: *mut c_int,
            function: *const c_void,
            launch: *const Launch,
        ) -> Status {
            let kernel = match attributes(function, stringify!($name)) {
                Ok(kernel) => kernel,
                Err(status) => return refuse(stringify!($name), status),
            };
            // SAFETY: the caller gives a configuration.
            let Some(launch) = (unsafe { launch.as_ref() }) else { return INVALID_VALUE };
            let dynamic = launch.shared & 0xffff_ffff;
            let all = blocks(&kernel, launch.threads(), dynamic) * config().multiprocessors;
            crate::log::estimated(stringify!($name));
            unsafe { put(out, all / launch.cluster()) };
            SUCCESS
        }

        /// Eight blocks, which every device with clusters promises.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $potential(out: *mut c_int) -> Status {
            unsafe { put(out, if config().capability >= 90 { 8 } else { 1 }) };
            SUCCESS
        }
    )* };
}

clusters! {
    cudaOccupancyMaxActiveClusters cudaOccupancyMaxPotentialClusterSize;
    cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize;
}
