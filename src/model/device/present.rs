//! The CUDA devices of this machine, for messages and for the choice of a device to run on.
//! Building and starting neap needs none.

use crate::units::Bytes;

/// A CUDA device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// Its name, from the driver.
    pub name: String,
    /// Its memory in bytes, from the driver.
    pub memory_bytes: Bytes,
    /// Its compute capability, major × 10 + minor.
    pub capability: u32,
    /// How many multiprocessors it has.
    pub multiprocessors: u32,
}

/// Every CUDA device, in the driver's order.
///
/// # Errors
/// One sentence for the user, when there is no driver, no device, or the driver fails.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<Vec<Present>, String> {
    use cudarc::driver::sys::CUdevice_attribute as Attribute;
    use cudarc::driver::{result, sys};

    // SAFETY: the call only checks whether the driver's library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver on this machine (libcuda is not found)".to_owned());
    }
    let fail = |what: &'static str| {
        move |error: result::DriverError| {
            format!("the NVIDIA driver cannot {what}: {}", code(error))
        }
    };
    // Compares the raw code, because the driver may be unable to give an error's text before it is
    // initialised.
    match result::init() {
        Ok(()) => {}
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Err("the NVIDIA driver finds no device".to_owned());
        }
        Err(error) => return Err(fail("start")(error)),
    }
    let count = result::device::get_count().map_err(fail("count its devices"))?;
    if count == 0 {
        return Err("the NVIDIA driver finds no device".to_owned());
    }
    (0..count)
        .map(|ordinal| {
            let device = result::device::get(ordinal).map_err(fail("open a device"))?;
            let name = result::device::get_name(device).map_err(fail("name a device"))?;
            // SAFETY: `device` was returned by `get` just above.
            let memory = unsafe { result::device::total_mem(device) }
                .map_err(fail("read a device's memory size"))?;
            let attribute = |which| {
                // SAFETY: `device` was returned by `get` above.
                let found = unsafe { result::device::get_attribute(device, which) };
                found.map_err(fail("describe a device")).map(i32::unsigned_abs)
            };
            let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            Ok(Present {
                name,
                memory_bytes: Bytes(memory as u64),
                capability: major * 10 + minor,
                multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            })
        })
        .collect()
}

#[cfg(feature = "cuda")]
fn code(error: cudarc::driver::result::DriverError) -> String {
    format!("{:?}", error.0)
}

/// Every CUDA device, in the driver's order.
///
/// # Errors
/// Always: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<Vec<Present>, String> {
    Err("built without the cuda feature".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_never_panics_and_says_something() {
        match cuda_devices() {
            Ok(devices) => assert!(
                !devices.is_empty()
                    && devices.iter().all(|d| !d.name.is_empty() && d.memory_bytes > Bytes::ZERO)
            ),
            Err(why) => assert!(!why.is_empty()),
        }
    }
}
