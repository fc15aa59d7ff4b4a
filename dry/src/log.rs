//! The device's log: one line an event, appended to `device-PID.log` in the run's folder.
//!
//!     process NAME                     what the process is called
//!     segment + DEVICE BYTES USED AT   device memory taken, what the process has then, and when
//!     segment - DEVICE BYTES USED AT
//!     gone PROCESS DEVICE BYTES AT     what another process had when it was found to have ended
//!     refused DEVICE BYTES USED        an allocation that the device has no room for
//!     stub NAME COUNT                  at exit: a function that did nothing, and its calls
//!     estimate NAME COUNT              at exit: a size that the vendor's library alone knows
//!     foreign LIBRARY                  a library that brings a CUDA runtime of its own
//!     note TEXT

use std::ffi::{CStr, c_char};
use std::fs::OpenOptions;
use std::io::Write;

use crate::config::config;
use crate::state::with;
use crate::sys;

/// Appends lines in one write, so that a process which is killed loses nothing before it, and
/// without a lock, so that a fork leaves none behind.
fn append(text: &str) {
    let Some(folder) = &config().folder else { return };
    let path = folder.join(format!("device-{}.log", std::process::id()));
    if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(text.as_bytes());
    }
}

/// Appends one line.
pub fn line(text: std::fmt::Arguments<'_>) {
    append(&format!("{text}\n"));
}

/// A line of the Python side's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn neap_dry_note(text: *const c_char) {
    if !text.is_null() {
        // SAFETY: the caller gives a C string.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().replace('\n', " ");
        line(format_args!("note {text}"));
    }
}

/// Counts an answer that is an estimate: the library that knows it needs a device.
pub fn estimated(name: &'static str) {
    with(|s| *s.estimated.entry(name).or_default() += 1);
}

fn estimates() -> String {
    let all = with(|s| s.estimated.clone());
    all.iter().map(|(name, count)| format!("estimate {name} {count}\n")).collect()
}

/// The generated stubs, and how often each was called.
fn stubs() -> impl Iterator<Item = (&'static CStr, u64)> {
    let counts = sys::symbol(c"neap_stub_counts") as *const u64;
    let mut name = sys::symbol(c"neap_stub_names") as *const c_char;
    let many = sys::symbol(c"neap_stub_many") as *const u64;
    let there = !counts.is_null() && !name.is_null() && !many.is_null();
    // SAFETY: the generator writes `many` counters and as many names, each closed by a zero byte.
    let many = if there { unsafe { *many as usize } } else { 0 };
    (0..many).map(move |i| unsafe {
        let text = CStr::from_ptr(name);
        name = name.add(text.count_bytes() + 1);
        (text, counts.add(i).read_volatile())
    })
}

/// How often stubs were called that stand for work of NVIDIA's libraries.
pub fn work() -> u64 {
    const LIBRARIES: [&str; 7] =
        ["cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nccl"];
    const ARRANGING: [&str; 5] = ["Create", "Destroy", "Set", "Get", "Query"];
    let works = |name: &CStr| {
        let name = name.to_str().unwrap_or_default();
        LIBRARIES.iter().any(|l| name.starts_with(l)) && !ARRANGING.iter().any(|a| name.contains(a))
    };
    stubs().filter(|(name, _)| works(name)).map(|(_, count)| count).sum()
}

/// Writes how often each generated stub was called, and each estimate given. Runs when the process
/// ends; the Python side calls it as well, for processes that end by `_exit`.
#[unsafe(no_mangle)]
pub extern "C" fn neap_dry_flush() {
    if config().folder.is_none() {
        return;
    }
    let called = stubs().filter(|(_, count)| *count > 0);
    let lines = called.map(|(name, n)| format!("stub {} {n}\n", name.to_string_lossy()));
    append(&(estimates() + &lines.collect::<String>()));
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = {
    extern "C" fn at_exit() {
        neap_dry_flush();
    }
    at_exit
};
