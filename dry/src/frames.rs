//! Which Python code runs, without making Python's own frame objects.
//!
//! A frame object that is asked for lives until its function returns, and counts as a container for
//! Python's garbage collector, which then runs earlier than it does without this library.

use std::ffi::c_void;
use std::sync::OnceLock;

use crate::sys::symbol;

/// Where this Python keeps what is needed, in bytes from the start of each structure. The Python
/// side finds out, and holds it against Python's own answer.
#[repr(C)]
pub struct Layout {
    /// In the state of a thread: the frame that runs, or what has it.
    thread: u64,
    /// In what has it: the frame that runs; `u64::MAX` where the thread's state has it itself.
    through: u64,
    /// In a frame: its code, the frame that called it, and the instruction.
    code: u64,
    previous: u64,
    instruction: u64,
}

/// Puts code and instruction of the innermost `room` frames of this thread into `out`, two words
/// for each; how many there were. The caller holds Python's lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neap_dry_frames(layout: &Layout, out: *mut u64, room: u64) -> u64 {
    static STATE: OnceLock<usize> = OnceLock::new();
    let state = *STATE.get_or_init(|| {
        [c"PyThreadState_GetUnchecked", c"_PyThreadState_UncheckedGet"]
            .map(|name| symbol(name) as usize)
            .into_iter()
            .find(|at| *at != 0)
            .unwrap_or(0)
    });
    if state == 0 {
        return 0;
    }
    // SAFETY: both of Python's functions have this type.
    let state: extern "C" fn() -> *mut c_void = unsafe { std::mem::transmute(state) };
    let thread = state() as u64;
    if thread == 0 {
        return 0;
    }
    // SAFETY: the layout is this Python's, and frames of a thread that runs don't change meanwhile.
    let word = |at: u64| unsafe { (at as *const u64).read() };
    let mut frame = word(thread + layout.thread);
    if layout.through != u64::MAX && frame != 0 {
        frame = word(frame + layout.through);
    }
    let mut many = 0;
    while frame != 0 && many < room {
        // Python 3.14 marks borrowed references in the lowest bits.
        let code = word(frame + layout.code) & !7;
        // SAFETY: the caller has room for as many.
        unsafe {
            out.add(2 * many as usize).write(code);
            out.add(2 * many as usize + 1).write(word(frame + layout.instruction));
        }
        many += 1;
        frame = word(frame + layout.previous);
    }
    many
}
