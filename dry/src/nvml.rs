//! NVML: PyTorch counts devices with it before it asks the runtime, and would find the real ones.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::config::config;
use crate::state::with;
use crate::sys::{self, SUCCESS, Status, put};

/// `NVML_ERROR_INVALID_ARGUMENT`
const INVALID: Status = 2;

macro_rules! succeeding {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Status {
            SUCCESS
        }
    )* };
}

succeeding! { nvmlInit nvmlInit_v2 nvmlInitWithFlags nvmlShutdown }

/// A device is its number, raised by one so that it is not null.
fn number(device: *mut c_void) -> c_int {
    device as c_int - 1
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(out: *mut c_uint) -> Status {
    // NVML knows nothing of CUDA_VISIBLE_DEVICES: PyTorch reads that itself.
    let all = std::env::var("NEAP_DRY_DEVICES").ok().and_then(|v| v.parse().ok()).unwrap_or(1);
    unsafe { put(out, all) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(
    index: c_uint,
    out: *mut *mut c_void,
) -> Status {
    unsafe { put(out, (index as usize + 1) as *mut c_void) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    text: *const c_char,
    out: *mut *mut c_void,
) -> Status {
    let mut device = 0;
    if unsafe { crate::device::cudaDeviceGetByPCIBusId(&mut device, text) } != SUCCESS {
        return INVALID;
    }
    unsafe { nvmlDeviceGetHandleByIndex_v2(device as c_uint, out) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(
    device: *mut c_void,
    out: *mut c_char,
    room: c_uint,
) -> Status {
    let text = format!("GPU-00000000-0000-0000-0000-{:012x}", number(device) + 1);
    unsafe { sys::put_text(out, room as usize, &text) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(
    _device: *mut c_void,
    out: *mut c_char,
    room: c_uint,
) -> Status {
    unsafe { sys::put_text(out, room as usize, &config().name) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(device: *mut c_void, out: *mut c_uint) -> Status {
    unsafe { put(out, number(device) as c_uint) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(
    device: *mut c_void,
    out: *mut [u64; 3],
) -> Status {
    let free = with(|s| s.memory.said_free(number(device)));
    let total = config().total_bytes;
    unsafe { put(out, [total, free, total.saturating_sub(free)]) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    _device: *mut c_void,
    major: *mut c_int,
    minor: *mut c_int,
) -> Status {
    unsafe {
        put(major, config().capability / 10);
        put(minor, config().capability % 10);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(out: *mut c_int) -> Status {
    unsafe { put(out, config().cuda) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(out: *mut c_int) -> Status {
    unsafe { put(out, config().cuda) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(out: *mut c_char, room: c_uint) -> Status {
    unsafe { sys::put_text(out, room as usize, "580.00") };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(status: Status) -> *const c_char {
    if status == SUCCESS { c"success".as_ptr() } else { c"refused by neap's dry device".as_ptr() }
}

/// Processes on a device: none that it would name. PyTorch asks when it runs out of memory.
macro_rules! processes {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(_device: *mut c_void, count: *mut c_uint) -> Status {
            unsafe { put(count, 0) };
            SUCCESS
        }
    )* };
}

processes! {
    nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2
    nvmlDeviceGetComputeRunningProcesses_v3
}

/// Everything else that a device could be asked is not supported.
macro_rules! unsupported {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Status {
            /// `NVML_ERROR_NOT_SUPPORTED`
            const NOT_SUPPORTED: Status = 3;
            NOT_SUPPORTED
        }
    )* };
}

unsupported! {
    nvmlDeviceGetUtilizationRates nvmlDeviceGetTemperature nvmlDeviceGetPowerUsage nvmlDeviceGetClockInfo
    nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetNvLinkState
    nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetFanSpeed nvmlDeviceGetPowerManagementLimit
    nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetMaxClockInfo
    nvmlDeviceGetP2PStatus nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetCpuAffinity nvmlDeviceGetPciInfo_v3
    nvmlDeviceGetPerformanceState nvmlDeviceGetTotalEccErrors
}
