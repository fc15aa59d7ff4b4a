//! The device of a target, made for a script, whether or not this build has CUDA.

use std::collections::BTreeMap;
use std::path::Path;

use super::backend::{self, Device, Failure, host};
use super::{Lookup, Target};
use crate::contract::Chosen;
use crate::job::Graph;
use crate::units::{Bytes, OpId};

/// What a device says of itself.
#[derive(Default)]
pub struct Said {
    pub notes: Vec<String>,
    pub libraries: BTreeMap<OpId, Chosen>,
}

/// A device's memory that several jobs share, and its link.
pub enum Shared {
    Host(host::Shared),
    #[cfg(feature = "cuda")]
    Cuda(backend::cuda::Shared),
}

impl Shared {
    /// An arena of exactly so many bytes on the device of `target`. For a GPU it is given back on
    /// this thread.
    ///
    /// # Errors
    /// When there is no such device, or it has not got them.
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

/// Makes the device of `target` for `script`, in memory of its own unless there is a shared one,
/// with these algorithms of libraries, and runs `work` with it; what came of that, and what the
/// device says of itself.
///
/// # Errors
/// When there is no such device, or it can't be made ready.
pub fn open<R>(
    (target, shared): (&Target, Option<&Shared>),
    graph: &Graph,
    (script, libraries): (&backend::Script, &BTreeMap<OpId, Chosen>),
    kernels: Lookup,
    batch: &[Vec<u8>],
    options: &host::Options,
    work: impl FnOnce(&mut dyn Device) -> R,
) -> Result<(R, Said), Failure> {
    match target {
        Target::Host => {
            let shared = match shared {
                Some(Shared::Host(shared)) => Some(shared),
                _ => None,
            };
            host::with_device(graph, script, kernels, batch, options, shared, work)
                .map(|result| (result, Said::default()))
        }
        Target::Cuda { .. } if options.load_percent > 0 => Err(Failure::Device(
            "others at work are made on the host only; leave --load away".to_owned(),
        )),
        Target::Cuda { libs, tf32 } => on_gpu(
            graph,
            (script, libraries),
            batch,
            (libs.as_deref(), *tf32),
            options.poison,
            shared,
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

/// Runs `work` with the CUDA device; what came of it, and what the device says of itself.
#[cfg(feature = "cuda")]
fn on_gpu<R>(
    graph: &Graph,
    (script, libraries): (&backend::Script, &BTreeMap<OpId, Chosen>),
    batch: &[Vec<u8>],
    (libs, tf32): (Option<&Path>, bool),
    poison: bool,
    shared: Option<&Shared>,
    work: impl FnOnce(&mut dyn Device) -> R,
) -> Result<(R, Said), Failure> {
    let algorithms =
        libraries.iter().map(|(id, chosen)| (*id, chosen.algorithms.clone())).collect();
    let options =
        backend::cuda::Options { libs: libs.map(Path::to_path_buf), tf32, poison, algorithms };
    let shared = match shared {
        Some(Shared::Cuda(shared)) => Some(shared),
        _ => None,
    };
    backend::cuda::with_device(graph, script, batch, &options, shared, |device| {
        let result = work(device);
        let chosen = |(id, passes): (&OpId, &Vec<(i32, Bytes)>)| {
            let workspace = passes.iter().map(|p| p.1).max().unwrap_or_default();
            (*id, Chosen { algorithms: passes.iter().map(|p| p.0).collect(), workspace })
        };
        let libraries = device.algorithms().iter().map(chosen).collect();
        (result, Said { notes: std::mem::take(&mut device.notes), libraries })
    })
}

#[cfg(not(feature = "cuda"))]
fn on_gpu<R>(
    _: &Graph,
    _: (&backend::Script, &BTreeMap<OpId, Chosen>),
    _: &[Vec<u8>],
    _: (Option<&Path>, bool),
    _: bool,
    _: Option<&Shared>,
    _: impl FnOnce(&mut dyn Device) -> R,
) -> Result<(R, Said), Failure> {
    Err(Failure::Device("built without the cuda feature".to_owned()))
}
