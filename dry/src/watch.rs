//! Watching PyTorch's allocator from outside.
//!
//! Two of PyTorch's functions are stood in front of. The allocator calls the first before it takes
//! its lock, to remember the stack: here Python says which line and module asks. It calls the
//! second under its lock, to tell the profiler: here the block's address is put down. Python's lock
//! is never taken under the allocator's, so two threads can't wait for each other.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::state::with;
use crate::sys;

/// Asks Python where an allocation comes from; the answer is a number of Python's.
type Callback = extern "C" fn() -> u32;
type Report = extern "C" fn(*mut c_void, i64, usize, usize, u16);
#[cfg(target_arch = "x86_64")]
type Gather = extern "C" fn(*mut Shared, bool, bool, bool) -> *mut Shared;

/// An allocation of PyTorch's caching allocator.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Allocation {
    at: u64,
    place: u32,
    device: u32,
}

/// All allocations so far, and which of them stand.
#[derive(Default)]
pub struct Allocations {
    all: Vec<Allocation>,
    living: HashMap<u64, u32>,
    /// Those that cuBLAS was given as its workspace.
    workspaces: BTreeSet<u32>,
    /// Those that Python's garbage collector freed.
    collected: Vec<u32>,
    /// Addresses of those whose content someone noted.
    noted: HashSet<u64>,
}

impl Allocations {
    fn note_workspace(&mut self, at: u64) {
        self.workspaces.extend(self.living.get(&at));
    }

    pub fn note(&mut self, at: u64) {
        self.noted.insert(at);
    }

    pub fn is_noted(&self, at: u64) -> bool {
        self.noted.contains(&at)
    }
}

/// Where no callback said where an allocation comes from.
const NOWHERE: u32 = u32::MAX;

static CALLBACK: AtomicUsize = AtomicUsize::new(0);
/// Whether PyTorch is to keep the stacks that it gathers with C++ frames in them.
static KEEP_STACKS: AtomicBool = AtomicBool::new(true);

thread_local! {
    /// Whether Python's garbage collector runs in this thread.
    static COLLECTING: Cell<bool> = const { Cell::new(false) };
    static PLACE: Cell<u32> = const { Cell::new(NOWHERE) };
}

/// Sets the function to ask before each allocation; null for none.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_watch_allocations(callback: Option<Callback>, keep_stacks: c_int) {
    KEEP_STACKS.store(keep_stacks != 0 || callback.is_none(), Ordering::SeqCst);
    CALLBACK.store(callback.map_or(0, |f| f as usize), Ordering::SeqCst);
}

/// How many allocations there have been.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_allocations() -> u64 {
    with(|s| s.allocations.all.len()) as u64
}

/// The number of the allocation that stands at an address, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_allocation_at(at: u64) -> i64 {
    with(|s| s.allocations.living.get(&at).map_or(-1, |n| i64::from(*n)))
}

/// Copies the first `room` allocations to `out`; how many it copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neap_dry_all_allocations(out: *mut Allocation, room: u64) -> u64 {
    with(|s| {
        let many = s.allocations.all.len().min(room as usize);
        // SAFETY: the caller has room for as many.
        unsafe { std::ptr::copy_nonoverlapping(s.allocations.all.as_ptr(), out, many) };
        many as u64
    })
}

/// Notes that cuBLAS works in the block at an address.
pub fn note_workspace(at: *const c_void) {
    if !at.is_null() {
        with(|s| s.allocations.note_workspace(at as u64));
    }
}

/// Copies the numbers of the first `room` allocations that cuBLAS was given as its workspace, in
/// order, to `out`; how many there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neap_dry_workspace_allocations(out: *mut u64, room: u64) -> u64 {
    with(|s| {
        for (i, number) in s.allocations.workspaces.iter().take(room as usize).enumerate() {
            // SAFETY: the caller has room for as many.
            unsafe { out.add(i).write(u64::from(*number)) };
        }
        s.allocations.workspaces.len() as u64
    })
}

/// Says whether Python's garbage collector runs in this thread from now on.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_collecting(on: c_int) {
    COLLECTING.set(on != 0);
}

/// Copies the numbers of the first `room` allocations that the collector freed to `out`; how many
/// there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neap_dry_collected_allocations(out: *mut u64, room: u64) -> u64 {
    with(|s| {
        for (i, number) in s.allocations.collected.iter().take(room as usize).enumerate() {
            // SAFETY: the caller has room for as many.
            unsafe { out.add(i).write(u64::from(*number)) };
        }
        s.allocations.collected.len() as u64
    })
}

/// The most bytes that a device had given out since the last call.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_take_peak(device: c_int) -> u64 {
    with(|s| s.memory.take_peak(device))
}

/// A `std::shared_ptr`.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
pub struct Shared([usize; 2]);

/// `torch::CapturedTraceback::gather(bool python, bool script, bool cpp)`: the allocator is about
/// to allocate. The stack itself is left out where only this library asked for it; C++ frames are
/// what tells that call from others.
///
/// A C++ function that returns a structure in memory takes its address first, as this one does. On
/// other architectures the address comes in a register of its own, and nothing is asked there.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ZN5torch17CapturedTraceback6gatherEbbb(
    out: *mut Shared,
    python: bool,
    script: bool,
    cpp: bool,
) -> *mut Shared {
    static REAL: OnceLock<usize> = OnceLock::new();
    let callback = CALLBACK.load(Ordering::SeqCst);
    if callback != 0 {
        // SAFETY: only `neap_dry_watch_allocations` stores here.
        let callback: Callback = unsafe { std::mem::transmute(callback) };
        crate::python::call(|| PLACE.set(callback()));
    }
    let real = *REAL.get_or_init(|| {
        let name = c"_ZN5torch17CapturedTraceback6gatherEbbb";
        sys::real(c"libtorch_cpu.so", name).map_or(0, |f| f as usize)
    });
    if real == 0 || cpp && !KEEP_STACKS.load(Ordering::SeqCst) {
        unsafe { sys::put(out, Shared([0; 2])) };
        return out;
    }
    // SAFETY: PyTorch's own function of this type.
    let real: Gather = unsafe { std::mem::transmute(real) };
    real(out, python, script, cpp)
}

/// `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`: a block was
/// handed out (bytes above 0) or came back. What an earlier tensor left in a new block is gone.
#[unsafe(no_mangle)]
pub extern "C" fn _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(
    at: *mut c_void,
    bytes: i64,
    allocated: usize,
    reserved: usize,
    device: u16,
) {
    static REAL: OnceLock<usize> = OnceLock::new();
    /// `c10::DeviceType::CUDA`, in the first byte of `c10::Device`.
    const CUDA: u16 = 1;
    if device & 0xff == CUDA {
        let index = u32::from(device >> 8);
        let place = PLACE.replace(NOWHERE);
        with(|s| {
            let start = at as u64;
            if bytes > 0 {
                s.memory.forget(start, start + bytes as u64);
                s.allocations.noted.remove(&start);
                s.allocations.living.insert(start, s.allocations.all.len() as u32);
                s.allocations.all.push(Allocation { at: start, place, device: index });
            } else {
                let number = s.allocations.living.remove(&start);
                s.allocations.collected.extend(number.filter(|_| COLLECTING.get()));
            }
        });
    }
    let real = *REAL.get_or_init(|| {
        let name = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
        sys::real(c"libc10.so", name).map_or(0, |f| f as usize)
    });
    if real != 0 {
        // SAFETY: PyTorch's own function of this type.
        let real: Report = unsafe { std::mem::transmute(real) };
        real(at, bytes, allocated, reserved, device);
    }
}
