//! Flags that say whose allocator memory is counted with, and what it says.

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::sim::reserved::{Framework, Reserved};
use neap::units::Bytes;
use serde_json::{Value, json};

/// Whose allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// One arena with placed addresses, as `neap run` has it.
    Arena,
    /// PyTorch's caching allocator: what it would reserve for the same tensors.
    Pytorch,
}

/// Whose allocator counts, and its settings.
#[derive(clap::Args, Clone, Debug)]
pub struct AllocatorFlags {
    /// Whose allocator memory is counted with.
    #[arg(long, value_enum, default_value_t = Kind::Arena)]
    allocator: Kind,
    /// The settings of PyTorch's allocator, as in PYTORCH_CUDA_ALLOC_CONF.
    #[arg(long, value_name = "CONF", allow_hyphen_values = true)]
    alloc_conf: Option<String>,
    /// What each of PyTorch's two threads asks for at its first matrix multiplication; by the device's generation if not given.
    #[arg(long, value_name = "BYTES")]
    library_workspace: Option<Bytes>,
}

impl AllocatorFlags {
    /// PyTorch's allocator is meant.
    pub fn is_pytorch(&self) -> bool {
        self.allocator == Kind::Pytorch
    }

    /// The framework, if its allocator is meant.
    ///
    /// # Errors
    /// When the settings mean nothing, or are given without the allocator.
    pub fn resolve(&self, device: &Profile) -> anyhow::Result<Option<Framework>> {
        if self.allocator == Kind::Arena {
            if self.alloc_conf.is_some() || self.library_workspace.is_some() {
                bail!(
                    "--alloc-conf, --library-workspace: these are PyTorch's; add --allocator pytorch, or leave them away"
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

    /// The settings' text, as in `PYTORCH_CUDA_ALLOC_CONF`.
    pub fn alloc_conf(&self) -> &str {
        self.alloc_conf.as_deref().unwrap_or_default()
    }

    /// For a plan's record.
    pub fn record(&self) -> impl Iterator<Item = (String, String)> {
        let kind = (self.allocator == Kind::Pytorch)
            .then(|| ("allocator".to_owned(), "pytorch".to_owned()));
        let conf = self.alloc_conf.clone().map(|conf| ("alloc-conf".to_owned(), conf));
        let library =
            self.library_workspace.map(|b| ("library-workspace".to_owned(), b.0.to_string()));
        kind.into_iter().chain(conf).chain(library)
    }
}

/// Adds what was reserved to a command's JSON.
pub fn add_json(object: &mut Value, reserved: &Reserved) {
    object["peak_reserved_bytes"] = json!(reserved.at_peak.reserved);
    object["peak_allocated_bytes"] = json!(reserved.stats.peak_allocated);
    object["segments"] = json!(reserved.at_peak.segments);
    object["fragmentation_bytes"] = json!(reserved.at_peak.fragmentation());
    object["allocator_iterations"] = json!(reserved.iterations);
    object["allocator_settled"] = json!(reserved.settled);
    object["ooms"] = json!(reserved.stats.ooms);
}

/// What PyTorch's allocator would hold for what an arena was planned for, as a command's JSON has it.
pub fn beside_json(reserved: &Reserved) -> Value {
    json!({
        "reserved_bytes": reserved.at_peak.reserved,
        "allocated_bytes": reserved.stats.peak_allocated,
    })
}

/// The same in a sentence.
pub fn beside(reserved: &Reserved) -> String {
    let (held, used) = (reserved.at_peak.reserved, reserved.stats.peak_allocated);
    format!(
        "under PyTorch's own allocator, cuBLAS workspaces included: {held} ({} bytes) reserved, {used} ({} bytes) allocated\n",
        held.0, used.0
    )
}

/// What was reserved, in a sentence.
pub fn told(reserved: &Reserved) -> String {
    let peak = &reserved.at_peak;
    let settled = if reserved.settled { "steady after" } else { "not steady after" };
    let failed = if reserved.stats.ooms > 0 {
        format!("; OUT OF MEMORY {} times", reserved.stats.ooms)
    } else {
        String::new()
    };
    format!(
        "PyTorch's allocator reserves {} ({} bytes) in {} segments, of which {} are not in use; {settled} {} iterations{failed}",
        peak.reserved,
        peak.reserved.0,
        peak.segments,
        peak.fragmentation(),
        reserved.iterations
    )
}
