//! Telling the Python side when the host reads the device.

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

type Callback = extern "C" fn(kind: c_int, at: u64, bytes: u64);

static CALLBACK: AtomicUsize = AtomicUsize::new(0);

/// Bytes that a kernel should have made: they read 0.
const COMPUTED: c_int = 1;
/// Bytes that were copied to the device: they read back as they were.
const COPIED: c_int = 2;

/// Sets the function to call after each copy from the device to the host; null for none.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_on_read(callback: Option<Callback>) {
    CALLBACK.store(callback.map_or(0, |f| f as usize), Ordering::SeqCst);
}

/// Tells of a read. No lock may be held: the callback takes Python's.
pub fn tell(exact: bool, at: u64, bytes: u64) {
    let callback = CALLBACK.load(Ordering::SeqCst);
    if callback != 0 {
        // SAFETY: only `neap_dry_on_read` stores here.
        let callback: Callback = unsafe { std::mem::transmute(callback) };
        crate::python::call(|| callback(if exact { COPIED } else { COMPUTED }, at, bytes));
    }
}
