//! Calling back into Python: with its lock, and without touching an exception that is on its way.

use std::ffi::{c_int, c_void};

use crate::sys::symbol;

type Object = *mut c_void;

/// Runs `f` with Python's lock held. Nothing runs where there is no Python any more.
pub fn call(f: impl FnOnce()) {
    let alive = symbol(c"Py_IsInitialized");
    let ensure = symbol(c"PyGILState_Ensure");
    let release = symbol(c"PyGILState_Release");
    let fetch = symbol(c"PyErr_Fetch");
    let restore = symbol(c"PyErr_Restore");
    if [alive, ensure, release, fetch, restore].contains(&std::ptr::null_mut()) {
        return;
    }
    // SAFETY: functions of Python's stable interface, of these types.
    unsafe {
        let alive: extern "C" fn() -> c_int = std::mem::transmute(alive);
        let ensure: extern "C" fn() -> c_int = std::mem::transmute(ensure);
        let release: extern "C" fn(c_int) = std::mem::transmute(release);
        let fetch: extern "C" fn(*mut Object, *mut Object, *mut Object) =
            std::mem::transmute(fetch);
        let restore: extern "C" fn(Object, Object, Object) = std::mem::transmute(restore);
        if alive() == 0 {
            return;
        }
        let lock = ensure();
        let mut raised = [std::ptr::null_mut(); 3];
        let [kind, value, trace] = &mut raised;
        fetch(kind, value, trace);
        f();
        restore(raised[0], raised[1], raised[2]);
        release(lock);
    }
}
