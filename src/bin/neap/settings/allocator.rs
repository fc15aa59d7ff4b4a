//! The allocator by which memory is counted, and the bytes that it reserves.

use std::fmt;

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::sim::allocator::Config;
use neap::sim::reserved::{Framework, Reserved, Timeline};
use neap::units::Bytes;
use serde::Serialize;

/// The allocator that serves a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// One arena with placed addresses, as `neap run` has it.
    Arena,
    /// PyTorch's caching allocator: what it would reserve for the same tensors.
    Pytorch,
}

/// The allocator by which memory counts, and its settings.
#[derive(clap::Args, Clone, Debug)]
pub struct AllocatorFlags {
    /// The allocator by which memory is counted.
    #[arg(long, value_enum, default_value_t = Kind::Arena)]
    allocator: Kind,
    /// The settings of PyTorch's allocator, as in PYTORCH_CUDA_ALLOC_CONF.
    #[arg(long, value_name = "CONF", allow_hyphen_values = true)]
    alloc_conf: Option<String>,
    /// The bytes that each of PyTorch's two threads requests at its first matrix multiplication; by
    /// default as on the device's generation of GPUs.
    #[arg(long, value_name = "BYTES")]
    library_workspace: Option<Bytes>,
}

impl AllocatorFlags {
    /// Whether memory is counted by PyTorch's allocator.
    pub fn is_pytorch(&self) -> bool {
        self.allocator == Kind::Pytorch
    }

    /// The framework, if memory is counted by its allocator.
    ///
    /// # Errors
    /// When the settings can't be read, or are given without the allocator.
    pub fn resolve(&self, device: &Profile) -> anyhow::Result<Option<Framework>> {
        if self.allocator == Kind::Arena {
            if self.alloc_conf.is_some() || self.library_workspace.is_some() {
                bail!(
                    "--alloc-conf and --library-workspace are PyTorch's; add --allocator pytorch, \
                     or leave them out"
                );
            }
            return Ok(None);
        }
        let config = self.alloc_conf().parse().context("--alloc-conf")?;
        let mut framework = Framework::on(device, config);
        if let Some(bytes) = self.library_workspace {
            framework.library = bytes;
        }
        Ok(Some(framework))
    }

    /// The settings as text in the form of `PYTORCH_CUDA_ALLOC_CONF`.
    pub fn alloc_conf(&self) -> &str {
        self.alloc_conf.as_deref().unwrap_or_default()
    }

    /// The options that the plan records.
    pub fn record(&self) -> impl Iterator<Item = (String, String)> {
        let kind = (self.allocator == Kind::Pytorch)
            .then(|| ("allocator".to_owned(), "pytorch".to_owned()));
        let conf = self.alloc_conf.clone().map(|conf| ("alloc-conf".to_owned(), conf));
        let library =
            self.library_workspace.map(|b| ("library-workspace".to_owned(), b.0.to_string()));
        kind.into_iter().chain(conf).chain(library)
    }
}

/// The bytes that PyTorch's allocator reserves for a plan's requests.
#[derive(Serialize)]
pub struct ReservedReport {
    peak_reserved_bytes: Bytes,
    peak_allocated_bytes: Bytes,
    segments: u64,
    fragmentation_bytes: Bytes,
    allocator_iterations: u32,
    allocator_settled: bool,
    ooms: u64,
}

impl ReservedReport {
    pub fn new(reserved: &Reserved) -> Self {
        Self {
            peak_reserved_bytes: reserved.at_peak.reserved,
            peak_allocated_bytes: reserved.stats.peak_allocated,
            segments: reserved.at_peak.segments,
            fragmentation_bytes: reserved.at_peak.fragmentation(),
            allocator_iterations: reserved.iterations,
            allocator_settled: reserved.settled,
            ooms: reserved.stats.ooms,
        }
    }
}

impl fmt::Display for ReservedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settled = if self.allocator_settled { "steady after" } else { "not steady after" };
        let segments = match self.segments {
            0 => "expandable".to_owned(),
            count => count.to_string(),
        };
        write!(
            f,
            "PyTorch's allocator reserves {} ({} bytes) in {segments} segments, of which {} are \
             not in use; {settled} {} iterations",
            self.peak_reserved_bytes,
            self.peak_reserved_bytes.0,
            self.fragmentation_bytes,
            self.allocator_iterations
        )?;
        if self.ooms > 0 {
            write!(f, "; OUT OF MEMORY {} times", self.ooms)?;
        }
        writeln!(f)
    }
}

/// The bytes that PyTorch's allocator would reserve for a plan made for an arena.
#[derive(Default, Serialize)]
pub struct BesideReport {
    reserved_bytes: Bytes,
    allocated_bytes: Bytes,
    /// The block that the script must request and free before all others, if the plan counts on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_block_bytes: Option<Bytes>,
    /// Whether that is with expandable segments, which were not asked for.
    #[serde(skip)]
    expandable: bool,
}

impl BesideReport {
    /// For `requests`, which reserve `reserved` under `framework`. Where each iteration reserves
    /// more than the one before, as with large tensors that come and go among small ones, that
    /// figure only says when counting stopped: then it is with expandable segments, as `neap torch`
    /// sets them.
    pub fn new(reserved: &Reserved, requests: &Timeline, framework: &Framework) -> Self {
        let expandable = !reserved.settled && !framework.config.expandable;
        let again = expandable.then(|| {
            let config = Config { expandable, ..framework.config.clone() };
            let first = Bytes::ZERO;
            requests.settle(&Framework { config, first, ..framework.clone() })
        });
        let reserved = again.as_ref().unwrap_or(reserved);
        Self {
            reserved_bytes: reserved.at_peak.reserved,
            allocated_bytes: reserved.stats.peak_allocated,
            first_block_bytes: Some(framework.first).filter(|&f| f > Bytes::ZERO && !expandable),
            expandable,
        }
    }
}

impl fmt::Display for BesideReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, used) = (self.reserved_bytes, self.allocated_bytes);
        writeln!(
            f,
            "under PyTorch's own allocator{}, cuBLAS workspaces included: {held} ({} bytes) \
             reserved, {used} ({} bytes) allocated",
            if self.expandable { " with expandable segments" } else { "" },
            held.0,
            used.0
        )
    }
}
