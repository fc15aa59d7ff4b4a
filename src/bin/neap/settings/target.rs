//! `--on`: the machine that operators run on.

use std::path::PathBuf;

use anyhow::bail;
use neap::device::present;
use neap::run::Target;

use crate::output::note;

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum On {
    /// The embedded host device.
    Host,
    /// An NVIDIA GPU.
    Cuda,
}

/// The machine on which operators run.
#[derive(clap::Args)]
pub struct TargetFlags {
    /// Where to run; by default on the GPU if there is a usable one, else on the host.
    #[arg(long, value_enum)]
    on: Option<On>,
    /// The folder of NVIDIA's libraries, searched before Python environments and the loader's
    /// paths.
    #[arg(long, value_name = "DIR")]
    cuda_libs: Option<PathBuf>,
    /// Let the GPU round the factors of f32 products to TF32: faster but less accurate.
    #[arg(long)]
    tf32: bool,
}

impl TargetFlags {
    /// The device to run on; `host_only` names a flag that only the host has, if one is given.
    ///
    /// # Errors
    /// When flags contradict each other, or there is no GPU.
    pub fn choose(&self, host_only: Option<&str>) -> anyhow::Result<Target> {
        let cuda = || Target::Cuda { libs: self.cuda_libs.clone(), tf32: self.tf32 };
        if let Some(folder) = self.cuda_libs.as_ref().filter(|folder| !folder.is_dir()) {
            bail!("--cuda-libs: {} is not a folder", folder.display());
        }
        match (self.on, host_only) {
            (Some(On::Host), _) if self.tf32 || self.cuda_libs.is_some() => {
                bail!("--tf32 and --cuda-libs are for --on cuda")
            }
            (Some(On::Host), _) | (None, Some(_)) => Ok(Target::Host),
            (Some(On::Cuda), Some(flags)) => {
                bail!("{flags}: only --on host has this; leave it out")
            }
            (Some(On::Cuda), None) => match present::cuda_devices() {
                Err(why) => bail!("--on cuda: {why}; use --on host"),
                Ok(_) => Ok(cuda()),
            },
            (None, None) => match present::cuda_devices() {
                Ok(_) => Ok(cuda()),
                Err(why) => {
                    note(&format!("note: running on the host: {why}"));
                    Ok(Target::Host)
                }
            },
        }
    }
}
