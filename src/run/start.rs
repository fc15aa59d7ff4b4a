//! Opens the device of a target for a script, whether or not this build has CUDA.

use std::collections::BTreeMap;
use std::path::Path;

use super::backend::{self, Device, Failure, host};
use super::{Costs, Lookup, Target};
use crate::contract::Chosen;
use crate::job::Graph;
use crate::units::{Bytes, OpId};

/// A device's own report.
#[derive(Default)]
pub struct DeviceNotes {
    pub notes: Vec<String>,
    pub libraries: BTreeMap<OpId, Chosen>,
    pub costs: Costs,
}

#[cfg(feature = "cuda")]
pub use backend::cuda::pool::Spare;

/// What a device leaves to those after it: nothing.
#[cfg(not(feature = "cuda"))]
#[derive(Default)]
pub struct Spare;

/// An arena that several jobs share, and the link.
pub enum Shared {
    Host(host::Shared),
    #[cfg(feature = "cuda")]
    Cuda(backend::cuda::Shared),
}

impl Shared {
    /// An arena of `arena` bytes on the device of `target`. A GPU's arena must be freed on this
    /// thread.
    ///
    /// # Errors
    /// When there is no such device, or it has too little memory.
    pub fn new(target: &Target, arena: Bytes, options: &host::Options) -> Result<Self, Failure> {
        match target {
            Target::Host => host::Shared::new(arena, options).map(Self::Host),
            #[cfg(feature = "cuda")]
            Target::Cuda { .. } => backend::cuda::Shared::new(arena).map(Self::Cuda),
            #[cfg(not(feature = "cuda"))]
            Target::Cuda { .. } => {
                Err(Failure::Device("built without the cuda feature".to_owned()))
            }
        }
    }
}

/// Opens the device of `target` for `script` and runs `work` with it. The device has memory of its
/// own unless there is a shared one, and its libraries use these algorithms. It leaves in `spare`
/// what the next device can use. Returns the result of `work` and the device's report.
///
/// # Errors
/// When there is no such device, or it can't be prepared.
pub fn open<R>(
    (target, shared, spare): (&Target, Option<&Shared>, &Spare),
    graph: &Graph,
    (script, libraries): (&backend::Script, &BTreeMap<OpId, Chosen>),
    kernels: Lookup,
    batch: &[Vec<u8>],
    options: &host::Options,
    work: impl FnOnce(&mut dyn Device) -> R,
) -> Result<(R, DeviceNotes), Failure> {
    match target {
        Target::Host => {
            let shared = match shared {
                Some(Shared::Host(shared)) => Some(shared),
                _ => None,
            };
            host::with_device(graph, script, kernels, batch, options, shared, work)
                .map(|result| (result, DeviceNotes::default()))
        }
        Target::Cuda { libs, tf32 } => on_gpu(
            graph,
            (script, libraries),
            batch,
            (libs.as_deref(), *tf32),
            options,
            (shared, spare),
            work,
        ),
    }
}

#[cfg(feature = "cuda")]
pub use super::backend::cuda::emit::has_algorithms;

#[cfg(not(feature = "cuda"))]
pub fn has_algorithms(_: &str) -> bool {
    false
}

#[cfg(feature = "cuda")]
pub fn on_cuda(kind: &str) -> bool {
    backend::cuda::emit::find(kind).is_some()
}

#[cfg(not(feature = "cuda"))]
pub fn on_cuda(_: &str) -> bool {
    true
}

/// Runs `work` with the CUDA device. Returns its result and the device's report.
#[cfg(feature = "cuda")]
fn on_gpu<R>(
    graph: &Graph,
    (script, libraries): (&backend::Script, &BTreeMap<OpId, Chosen>),
    batch: &[Vec<u8>],
    (libs, tf32): (Option<&Path>, bool),
    asked: &host::Options,
    (shared, spare): (Option<&Shared>, &Spare),
    work: impl FnOnce(&mut dyn Device) -> R,
) -> Result<(R, DeviceNotes), Failure> {
    let algorithms =
        libraries.iter().map(|(id, chosen)| (*id, chosen.algorithms.clone())).collect();
    let libs = libs.map(Path::to_path_buf);
    let host::Options { poison, member, load_percent, .. } = *asked;
    let options = backend::cuda::Options { libs, tf32, poison, algorithms, member, load_percent };
    let shared = match shared {
        Some(Shared::Cuda(shared)) => Some(shared),
        _ => None,
    };
    backend::cuda::with_device(graph, script, batch, &options, (shared, spare), |device| {
        let result = work(device);
        let chosen = |(id, passes): (&OpId, &Vec<(i32, Bytes)>)| {
            let workspace = passes.iter().map(|p| p.1).max().unwrap_or_default();
            (*id, Chosen { algorithms: passes.iter().map(|p| p.0).collect(), workspace })
        };
        let libraries = device.algorithms().iter().map(chosen).collect();
        let costs = Costs {
            fallbacks: device.fallbacks(),
            scratch: device.scratch(),
            pinning: device.pinning,
            products: device.products(),
        };
        (result, DeviceNotes { notes: std::mem::take(&mut device.notes), libraries, costs })
    })
}

#[cfg(not(feature = "cuda"))]
fn on_gpu<R>(
    _: &Graph,
    _: (&backend::Script, &BTreeMap<OpId, Chosen>),
    _: &[Vec<u8>],
    _: (Option<&Path>, bool),
    _: &host::Options,
    _: (Option<&Shared>, &Spare),
    _: impl FnOnce(&mut dyn Device) -> R,
) -> Result<(R, DeviceNotes), Failure> {
    Err(Failure::Device("built without the cuda feature".to_owned()))
}
