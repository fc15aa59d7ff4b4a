//! Device properties: one table of attributes, and the two layouts of `struct cudaDeviceProp`.

use std::ffi::c_int;

use crate::config::config;

/// What a device of a given compute capability can hold, from the CUDA programming guide's table of
/// technical specifications: shared memory a multiprocessor and a block (bytes), resident threads
/// and blocks.
pub struct Limits {
    pub shared_per_multiprocessor: i32,
    pub shared_per_block: i32,
    /// What the system takes of each block's.
    pub shared_reserved: i32,
    pub threads: i32,
    pub blocks: i32,
    l2: i32,
}

/// Threads of a block, registers of a multiprocessor or block, and the shared memory that a block
/// has without asking for more: alike everywhere.
pub const MAX_THREADS: i32 = 1024;
pub const REGISTERS: i32 = 65536;
pub const SHARED_PER_BLOCK: i32 = 49152;

/// The limits of this device.
pub fn limits() -> Limits {
    let (kib, threads, blocks, l2) = match config().capability {
        60 => (64, 2048, 32, 4 << 20),
        61 | 62 => (96, 2048, 32, 3 << 20),
        70 | 72 => (96, 2048, 32, 6 << 20),
        75 => (64, 1024, 16, 6 << 20),
        80 => (164, 2048, 32, 40 << 20),
        87 => (164, 1536, 16, 4 << 20),
        86 => (100, 1536, 16, 6 << 20),
        89 => (100, 1536, 24, 72 << 20),
        90 => (228, 2048, 32, 50 << 20),
        100 | 103 => (228, 2048, 32, 126 << 20),
        110 => (228, 1536, 24, 32 << 20),
        _ => (100, 1536, 24, 96 << 20),
    };
    let per_block = match config().capability {
        60..=62 => 48,
        75 => 64,
        70 | 72 => 96,
        _ => kib - 1,
    };
    Limits {
        shared_per_multiprocessor: kib << 10,
        shared_per_block: per_block << 10,
        shared_reserved: if config().capability >= 80 { 1024 } else { 0 },
        threads,
        blocks,
        l2,
    }
}

/// A value of `cudaDeviceAttr`, which the driver's `CUdevice_attribute` shares.
pub fn attribute(which: c_int, device: c_int) -> c_int {
    let limits = limits();
    match which {
        1..=3 => {
            if which == 3 {
                64
            } else {
                MAX_THREADS
            }
        }
        5 => i32::MAX,
        6 | 7 => 65535,
        8 => SHARED_PER_BLOCK,
        9 => 65536,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => REGISTERS,
        13 => 1_500_000,
        14 => 512,
        16 => config().multiprocessors,
        // Neither a display's time limit, nor integrated, nor exclusive.
        17 | 18 | 20 | 32 | 35 => 0,
        33 => device + 1,
        34 | 50 => 0,
        36 => 2_000_000,
        37 => 5120,
        38 => limits.l2,
        39 => limits.threads,
        40 => 3,
        51 => 32,
        75 => config().capability / 10,
        76 => config().capability % 10,
        81 => limits.shared_per_multiprocessor,
        87 => 2,
        // Pageable memory is not the device's, nor is another GPU on the board; multicast and
        // GPUDirect are absent.
        84 | 88 | 100 | 101 | 116 | 117 | 118 | 132 => 0,
        97 => limits.shared_per_block,
        106 => limits.blocks,
        108 | 109 => limits.l2 / 2,
        111 => limits.shared_reserved,
        119 => 1,
        120 => (config().capability >= 90) as c_int,
        _ => 1,
    }
}

/// Where the fields of `struct cudaDeviceProp` stand that differ between CUDA 12 and 13.
struct Layout {
    bytes: usize,
    multiprocessors: usize,
    integrated: usize,
    map_host: usize,
    concurrent: usize,
    bus: usize,
    copy_engines: usize,
    unified: usize,
    bus_width: usize,
    l2: usize,
    threads: usize,
    shared: usize,
    registers: usize,
    managed: usize,
    cooperative: usize,
    shared_optin: usize,
    blocks: usize,
    reserved: usize,
    pools: usize,
}

const CUDA12: Layout = Layout {
    bytes: 1032,
    multiprocessors: 388,
    integrated: 396,
    map_host: 400,
    concurrent: 576,
    bus: 584,
    copy_engines: 600,
    unified: 604,
    bus_width: 612,
    l2: 616,
    threads: 624,
    shared: 640,
    registers: 648,
    managed: 652,
    cooperative: 688,
    shared_optin: 696,
    blocks: 712,
    reserved: 720,
    pools: 744,
};

const CUDA13: Layout = Layout {
    bytes: 1008,
    multiprocessors: 384,
    integrated: 388,
    map_host: 392,
    concurrent: 560,
    bus: 568,
    copy_engines: 584,
    unified: 588,
    bus_width: 592,
    l2: 596,
    threads: 604,
    shared: 624,
    registers: 632,
    managed: 636,
    cooperative: 668,
    shared_optin: 672,
    blocks: 688,
    reserved: 696,
    pools: 720,
};

/// Fills a `struct cudaDeviceProp` of CUDA 12 or 13.
pub unsafe fn fill(out: *mut u8, device: c_int, cuda13: bool) {
    let layout = if cuda13 { &CUDA13 } else { &CUDA12 };
    let limits = limits();
    let name = format!("{}\0", config().name);
    // SAFETY: the caller gives a structure of this layout; every offset lies inside it.
    unsafe {
        std::ptr::write_bytes(out, 0, layout.bytes);
        std::ptr::copy_nonoverlapping(name.as_ptr(), out, name.len().min(255));
        *out.add(256 + 15) = device as u8 + 1;
        let int = |at: usize, value: c_int| out.add(at).cast::<c_int>().write_unaligned(value);
        let size = |at: usize, value: u64| out.add(at).cast::<u64>().write_unaligned(value);
        size(288, config().total_bytes);
        size(296, SHARED_PER_BLOCK as u64);
        int(304, REGISTERS);
        int(308, 32);
        size(312, i32::MAX as u64);
        int(320, MAX_THREADS);
        for (i, value) in [1024, 1024, 64, i32::MAX, 65535, 65535].into_iter().enumerate() {
            int(324 + 4 * i, value);
        }
        if !cuda13 {
            int(348, 1_500_000);
            int(608, 2_000_000);
        }
        size(352, 65536);
        int(360, config().capability / 10);
        int(364, config().capability % 10);
        size(368, 512);
        size(376, 32);
        int(layout.multiprocessors, config().multiprocessors);
        int(layout.integrated, 0);
        int(layout.map_host, 1);
        int(layout.concurrent, 1);
        int(layout.bus, device + 1);
        int(layout.copy_engines, 3);
        int(layout.unified, 1);
        int(layout.bus_width, 5120);
        int(layout.l2, limits.l2);
        int(layout.threads, limits.threads);
        int(layout.threads + 4, 1);
        size(layout.shared, limits.shared_per_multiprocessor as u64);
        int(layout.registers, REGISTERS);
        int(layout.managed, 1);
        int(layout.cooperative, 1);
        size(layout.shared_optin, limits.shared_per_block as u64);
        int(layout.blocks, limits.blocks);
        size(layout.reserved, limits.shared_reserved as u64);
        int(layout.pools, 1);
    }
}
