//! Telling the Python side when the host reads the device.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::memory::Content;

type Callback = extern "C" fn(kind: c_int, at: u64, bytes: u64);

static CALLBACK: AtomicUsize = AtomicUsize::new(0);

/// Bytes that a kernel should have made: they read 0.
const COMPUTED: c_int = 1;
/// Bytes that are known: they read as on a GPU.
const KNOWN: c_int = 2;
/// Bytes that follow from an answer of neap's own.
const ASSUMED: c_int = 3;

/// Sets the function to call after each copy from the device to the host; null for none.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_on_read(callback: Option<Callback>) {
    CALLBACK.store(callback.map_or(0, |f| f as usize), Ordering::SeqCst);
}

/// Reads of one size, as its bytes' logarithm, up to 16 bytes.
const SIZES: usize = 5;

thread_local! {
    static ANSWERS: Cell<[Option<u64>; SIZES]> = const { Cell::new([None; SIZES]) };
}

/// What this thread reads of computed bytes from now on where it reads `bytes` at once: 1, 2, 4, 8
/// or 16; the highest number ends that. An operator of PyTorch's that looks at a result before it
/// goes on takes 0 for a failure.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_answer(bytes: u64, value: u64) {
    let mut all = ANSWERS.get();
    if bytes.is_power_of_two()
        && let Some(answer) = all.get_mut(bytes.ilog2() as usize)
    {
        *answer = (value != u64::MAX).then_some(value);
        ANSWERS.set(all);
    }
}

/// What computed bytes read as, where this thread was given that.
pub fn answer(bytes: u64) -> Option<[u8; 16]> {
    let which = bytes.checked_ilog2().filter(|_| bytes.is_power_of_two())?;
    let value = ANSWERS.get().get(which as usize).copied().flatten()?;
    let mut answer = [0; 16];
    answer[..8].copy_from_slice(&value.to_le_bytes());
    Some(answer)
}

/// Tells of a read. No lock may be held: the callback takes Python's.
pub fn tell(content: Content, at: u64, bytes: u64) {
    let callback = CALLBACK.load(Ordering::SeqCst);
    if callback != 0 {
        // SAFETY: only `neap_dry_on_read` stores here.
        let callback: Callback = unsafe { std::mem::transmute(callback) };
        let kind = match content {
            Content::Unknown => COMPUTED,
            Content::Known => KNOWN,
            Content::Assumed => ASSUMED,
        };
        crate::python::call(|| callback(kind, at, bytes));
    }
}
