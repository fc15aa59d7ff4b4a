//! Calling back into Python: with its lock, and without touching an exception that is on its way.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use crate::sys::symbol;

type Object = *mut c_void;

/// Functions of Python's stable interface.
struct Interface {
    alive: extern "C" fn() -> c_int,
    ensure: extern "C" fn() -> c_int,
    release: extern "C" fn(c_int),
    fetch: extern "C" fn(*mut Object, *mut Object, *mut Object),
    restore: extern "C" fn(Object, Object, Object),
}

fn interface() -> Option<&'static Interface> {
    static FOUND: OnceLock<Option<Interface>> = OnceLock::new();
    let find = || {
        let names = [
            c"Py_IsInitialized",
            c"PyGILState_Ensure",
            c"PyGILState_Release",
            c"PyErr_Fetch",
            c"PyErr_Restore",
        ];
        let found = names.map(symbol);
        if found.contains(&std::ptr::null_mut()) {
            return None;
        }
        let [alive, ensure, release, fetch, restore] = found;
        // SAFETY: Python's functions of these names have these types.
        unsafe {
            Some(Interface {
                alive: std::mem::transmute::<Object, extern "C" fn() -> c_int>(alive),
                ensure: std::mem::transmute::<Object, extern "C" fn() -> c_int>(ensure),
                release: std::mem::transmute::<Object, extern "C" fn(c_int)>(release),
                fetch: std::mem::transmute::<
                    Object,
                    extern "C" fn(*mut Object, *mut Object, *mut Object),
                >(fetch),
                restore: std::mem::transmute::<Object, extern "C" fn(Object, Object, Object)>(
                    restore,
                ),
            })
        }
    };
    FOUND.get_or_init(find).as_ref()
}

/// Runs `f` with Python's lock held. Nothing runs where there is no Python any more.
pub fn call(f: impl FnOnce()) {
    let Some(python) = interface() else { return };
    if (python.alive)() == 0 {
        return;
    }
    let lock = (python.ensure)();
    let mut raised = [std::ptr::null_mut(); 3];
    let [kind, value, trace] = &mut raised;
    (python.fetch)(kind, value, trace);
    f();
    (python.restore)(raised[0], raised[1], raised[2]);
    (python.release)(lock);
}
