//! Watching PyTorch's allocator from outside: it reports every block to the profiler, through a function that this
//! library stands in front of.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::state::with;
use crate::sys;

type Callback = extern "C" fn(at: u64);
type Report = extern "C" fn(*mut c_void, i64, usize, usize, u16);

static CALLBACK: AtomicUsize = AtomicUsize::new(0);

/// Sets the function to call after each block that the allocator hands out; null for none.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_watch_allocations(callback: Option<Callback>) {
    CALLBACK.store(callback.map_or(0, |f| f as usize), Ordering::SeqCst);
}

/// `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`: a block was handed out (bytes
/// above 0) or came back. What an earlier tensor left in a new block is gone.
#[unsafe(no_mangle)]
pub extern "C" fn _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(
    at: *mut c_void,
    bytes: i64,
    allocated: usize,
    reserved: usize,
    device: u16,
) {
    static REAL: AtomicUsize = AtomicUsize::new(0);
    /// `c10::DeviceType::CUDA`, in the first byte of `c10::Device`.
    const CUDA: u16 = 1;
    let mut real = REAL.load(Ordering::Relaxed);
    if real == 0 {
        let name = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
        real = sys::real(c"libc10.so", name).map_or(1, |f| f as usize);
        REAL.store(real, Ordering::Relaxed);
    }
    if real != 1 {
        // SAFETY: PyTorch's own function of this type.
        let real: Report = unsafe { std::mem::transmute(real) };
        real(at, bytes, allocated, reserved, device);
    }
    if device & 0xff != CUDA || bytes <= 0 {
        return;
    }
    let start = at as u64;
    with(|s| s.memory.forget(start, start + bytes as u64));
    let callback = CALLBACK.load(Ordering::SeqCst);
    if callback != 0 {
        // SAFETY: only `neap_dry_watch_allocations` stores here.
        let callback: Callback = unsafe { std::mem::transmute(callback) };
        crate::python::call(|| callback(start));
    }
}
