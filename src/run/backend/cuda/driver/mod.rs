//! The driver, as little of it as the device needs: context, memories, streams, events, modules.
//!
//! Raw addresses throughout; each wrapper gives its handle back once. Everything is used from the
//! thread that made it. Nothing is tracked: what waits for what is the script's.

mod graph;
mod pinned;

use std::ffi::{CString, c_int, c_void};
use std::marker::PhantomData;

use cudarc::driver::{result, sys};

use super::launch::Launch;
use crate::backend::operators::KernelError;
use crate::units::Bytes;
pub use graph::Replay;
pub use pinned::PinnedMemory;

/// One sentence about what failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(pub String);

impl From<Fault> for KernelError {
    fn from(fault: Fault) -> Self {
        Self::Device(fault.0)
    }
}

fn fault(what: &str) -> impl FnOnce(result::DriverError) -> Fault + '_ {
    move |error| Fault(format!("the driver {what}: {:?}", error.0))
}

/// Keeps a type on the thread that made it.
type Here = PhantomData<*const ()>;

/// The primary context of a device, current on this thread.
pub struct Context {
    device: sys::CUdevice,
    /// The device's name.
    pub name: String,
    /// Such as 90.
    pub capability: u32,
    /// Such as `sm_90`.
    pub arch: String,
    /// How many multiprocessors it has.
    pub multiprocessors: u32,
    here: Here,
}

/// The least driver that CUDA 13's code and libraries run on.
const DRIVER: c_int = 13_000;

impl Context {
    /// Of a device that [`crate::device::present::cuda_devices`] has seen.
    ///
    /// # Errors
    /// A driver that is too old, or that refuses.
    pub fn new(ordinal: c_int) -> Result<Self, Fault> {
        let mut version = 0;
        // SAFETY: it writes one number.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }
            .result()
            .map_err(fault("does not tell its version"))?;
        if version < DRIVER {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(Fault(format!(
                "the driver is for CUDA {major}.{minor}; 13.0 is needed: install NVIDIA's driver 580 or later"
            )));
        }
        let device = result::device::get(ordinal).map_err(fault("does not open the device"))?;
        let name = result::device::get_name(device).map_err(fault("does not name the device"))?;
        let attribute = |which| {
            // SAFETY: `device` was returned by `get` just above.
            unsafe { result::device::get_attribute(device, which) }
                .map_err(fault("does not describe the device"))
        };
        let major =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: the context is given back in `drop`.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(fault("gives no context"))?;
        let capability = u32::try_from(major * 10 + minor).unwrap_or(0);
        let arch = format!("sm_{capability}");
        let multiprocessors = u32::try_from(processors).unwrap_or(0);
        let made = Self { device, name, capability, arch, multiprocessors, here: PhantomData };
        // SAFETY: it was just retained.
        unsafe { result::ctx::set_current(context) }
            .map_err(fault("does not enter its context"))?;
        Ok(made)
    }

    /// A stream that waits for no other.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn queue(&self) -> Result<Queue, Fault> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(fault("gives no stream"))?;
        Ok(Queue { stream, here: PhantomData })
    }

    /// An event, which keeps the time if it must.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn event(&self, timed: bool) -> Result<Event, Fault> {
        let flag = if timed {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        Self::event_of(flag)
    }

    /// An event that keeps the time, and for which a thread sleeps in [`Event::wait`].
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn alarm(&self) -> Result<Event, Fault> {
        Self::event_of(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC)
    }

    fn event_of(flag: sys::CUevent_flags) -> Result<Event, Fault> {
        let event = result::event::create(flag).map_err(fault("gives no event"))?;
        Ok(Event { event, here: PhantomData })
    }

    /// Allocates exactly `size` bytes of the device.
    ///
    /// # Errors
    /// When they are not there.
    pub fn allocate(&self, size: Bytes) -> Result<DeviceMemory, Fault> {
        let none = |_| Fault(format!("{} has no {size} to give", self.name));
        let bytes = usize::try_from(size.0).map_err(|_| Fault(format!("an arena of {size}")))?;
        let start = if bytes == 0 {
            0
        } else {
            // SAFETY: given back in `drop`; the plan proves that no byte is read before it is
            // written.
            unsafe { result::malloc_sync(bytes) }.map_err(none)?
        };
        Ok(DeviceMemory { start, bytes, lent: false, here: PhantomData })
    }

    /// Waits on the host until everything that was ever asked of the device has ended. A write from
    /// pageable memory may return before it has, and streams here do not wait for it.
    ///
    /// # Errors
    /// Of anything that ran.
    pub fn wait_for_all(&self) -> Result<(), Fault> {
        result::ctx::synchronize().map_err(fault("reports a failure"))
    }

    /// Loads machine code.
    ///
    /// # Errors
    /// When the driver refuses it.
    pub fn load(&self, code: &[u8]) -> Result<Module, Fault> {
        // SAFETY: the image is whole machine code, as NVRTC made it; the module is unloaded once.
        let module = unsafe { result::module::load_data(code.as_ptr().cast()) }
            .map_err(fault("does not load the kernels"))?;
        Ok(Module { module, here: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `new`; all that was made in it is gone by the order of the device's
        // fields.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Loaded kernels.
pub struct Module {
    module: sys::CUmodule,
    here: Here,
}

impl Module {
    /// One of its kernels.
    ///
    /// # Errors
    /// When it has none of that name.
    pub fn kernel(&self, name: &str, shared: u32) -> Result<sys::CUfunction, Fault> {
        let text =
            CString::new(name).map_err(|_| Fault("a kernel's name with a zero byte".to_owned()))?;
        // SAFETY: the module is loaded, and outlives the function's use.
        let function = unsafe { result::module::get_function(self.module, text) }
            .map_err(|_| Fault(format!("there is no kernel `{name}`")))?;
        if shared > 0 {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            unsafe { result::function::set_function_attribute(function, most, shared as i32) }
                .map_err(|e| {
                    Fault(format!("`{name}` gets no {shared} bytes of shared memory: {:?}", e.0))
                })?;
        }
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

fn inside(bytes: usize, offset: usize, size: usize, what: &str) -> Result<(), Fault> {
    match offset.checked_add(size) {
        Some(end) if end <= bytes => Ok(()),
        _ => Err(Fault(format!("{size} bytes at {offset} lie outside the {what}"))),
    }
}

/// The arena.
pub struct DeviceMemory {
    start: sys::CUdeviceptr,
    bytes: usize,
    /// Another gives it back.
    lent: bool,
    here: Here,
}

/// An arena for threads that did not make it; the one that did outlives their use of it.
#[derive(Clone, Copy, Debug)]
pub struct Lent {
    start: sys::CUdeviceptr,
    bytes: usize,
}

impl Lent {
    /// For this thread.
    #[must_use]
    pub const fn memory(self) -> DeviceMemory {
        DeviceMemory { start: self.start, bytes: self.bytes, lent: true, here: PhantomData }
    }
}

impl DeviceMemory {
    /// How much it is.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        Bytes(self.bytes as u64)
    }

    /// For other threads.
    #[must_use]
    pub const fn lend(&self) -> Lent {
        Lent { start: self.start, bytes: self.bytes }
    }

    /// The device address of a stretch.
    ///
    /// # Errors
    /// When it is not inside.
    pub fn at(&self, offset: Bytes, size: Bytes) -> Result<u64, Fault> {
        inside(self.bytes, offset.0 as usize, size.0 as usize, "arena")?;
        Ok(self.start + offset.0)
    }

    /// Writes while nothing runs.
    ///
    /// # Errors
    /// Outside, or the driver.
    pub fn write(&self, offset: Bytes, data: &[u8]) -> Result<(), Fault> {
        let to = self.at(offset, Bytes(data.len() as u64))?;
        if data.is_empty() {
            return Ok(());
        }
        // SAFETY: inside the allocation.
        unsafe { result::memcpy_htod_sync(to, data) }.map_err(fault("does not copy to the device"))
    }

    /// Reads while nothing runs.
    ///
    /// # Errors
    /// As [`DeviceMemory::write`].
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<(), Fault> {
        let from = self.at(offset, Bytes(into.len() as u64))?;
        if into.is_empty() {
            return Ok(());
        }
        // SAFETY: inside the allocation.
        unsafe { result::memcpy_dtoh_sync(into, from) }
            .map_err(fault("does not copy from the device"))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.start != 0 && !self.lent {
            // SAFETY: allocated once, given back once.
            let _ = unsafe { result::free_sync(self.start) };
        }
    }
}

/// A moment on a stream.
pub struct Event {
    event: sys::CUevent,
    here: Here,
}

impl Event {
    /// Waits on the host until it has passed.
    ///
    /// # Errors
    /// Of anything that ran before it.
    pub fn wait(&self) -> Result<(), Fault> {
        // SAFETY: the event is alive.
        unsafe { sys::cuEventSynchronize(self.event) }
            .result()
            .map_err(fault("reports a failure before an event"))
    }

    /// Nanoseconds from this to another, both passed.
    ///
    /// # Errors
    /// When one has not been recorded, or does not keep the time.
    pub fn until(&self, other: &Self) -> Result<u64, Fault> {
        // SAFETY: both events are alive.
        let milliseconds = unsafe { result::event::elapsed(self.event, other.event) }
            .map_err(fault("does not tell the time"))?;
        Ok((f64::from(milliseconds.max(0.0)) * 1e6) as u64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once, given back once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// A stream.
pub struct Queue {
    stream: sys::CUstream,
    here: Here,
}

impl Queue {
    /// For libraries.
    #[must_use]
    pub fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Records a moment here.
    ///
    /// # Errors
    /// When the driver has failed.
    pub fn record(&self, event: &Event) -> Result<(), Fault> {
        // SAFETY: both are alive, of one context.
        unsafe { result::event::record(event.event, self.stream) }
            .map_err(fault("records no event"))
    }

    /// Lets what follows here wait for a moment.
    ///
    /// # Errors
    /// When the driver has failed.
    pub fn wait(&self, event: &Event) -> Result<(), Fault> {
        // SAFETY: both are alive, of one context.
        unsafe {
            result::stream::wait_event(
                self.stream,
                event.event,
                sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            )
        }
        .map_err(fault("does not wait"))
    }

    /// Waits on the host until all here has ended.
    ///
    /// # Errors
    /// Of anything that ran here.
    pub fn wait_for_all(&self) -> Result<(), Fault> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(fault("reports a failure on a stream"))
    }

    /// Calls `what` on a thread of the driver once all that stands here before has ended. It may
    /// not use the driver.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn then(&self, what: Box<dyn FnOnce() + Send>) -> Result<(), Fault> {
        unsafe extern "C" fn call(data: *mut c_void) {
            // SAFETY: the box of `then`, which the driver passes once.
            let what = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
            what();
        }
        let data = Box::into_raw(Box::new(what));
        // SAFETY: the stream is alive, and `call` takes what it is given.
        let asked = unsafe { sys::cuLaunchHostFunc(self.stream, Some(call), data.cast()) };
        asked.result().map_err(|error| {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(data) });
            fault("does not call back")(error)
        })
    }

    /// Copies on the device.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), Fault> {
        // SAFETY: addresses are inside the arena, checked when they were made.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }
            .map_err(fault("does not copy"))
    }

    /// Copies from pinned memory.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn copy_in(&self, to: u64, from: *mut c_void, bytes: usize) -> Result<(), Fault> {
        // SAFETY: the ranges are inside pinned memory and arena, checked, and stay until the stream
        // is done.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, self.stream) }
            .result()
            .map_err(fault("does not copy to the device"))
    }

    /// Copies to pinned memory.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn copy_out(&self, to: *mut c_void, from: u64, bytes: usize) -> Result<(), Fault> {
        // SAFETY: as in `copy_in`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, self.stream) }
            .result()
            .map_err(fault("does not copy from the device"))
    }

    /// Fills with a byte.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), Fault> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the stretch is inside the arena, checked when it was made.
        unsafe { result::memset_d8_async(to, byte, bytes, self.stream) }
            .map_err(fault("does not fill memory"))
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn launch(&self, function: sys::CUfunction, launch: &mut Launch) -> Result<(), Fault> {
        let mut parameters = [launch.params.as_mut_ptr().cast::<c_void>()];
        let [x, y] = launch.block;
        // SAFETY: the kernel takes one structure of this size, whose mirror the parameters were
        // made from; the driver copies it before it returns.
        unsafe {
            result::launch_kernel(
                function,
                (launch.grid, 1, 1),
                (x, y, 1),
                launch.shared,
                self.stream,
                &mut parameters,
            )
        }
        .map_err(|e| Fault(format!("the driver does not launch `{}`: {:?}", launch.kernel, e.0)))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: made once, given back once.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}
