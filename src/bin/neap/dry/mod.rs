//! `neap dry`: runs a training script on a device that owns memory and computes nothing.

#[cfg(target_os = "linux")]
mod against;
#[cfg(target_os = "linux")]
mod baseline;
#[cfg(target_os = "linux")]
mod events;
#[cfg(target_os = "linux")]
mod found;
#[cfg(target_os = "linux")]
pub mod launch;
#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
mod notes;
#[cfg(target_os = "linux")]
mod on_cpu;
#[cfg(target_os = "linux")]
mod others;
#[cfg(target_os = "linux")]
mod page;
#[cfg(target_os = "linux")]
mod plot;
#[cfg(target_os = "linux")]
mod prepare;
#[cfg(target_os = "linux")]
mod report;
#[cfg(target_os = "linux")]
mod sizes;
#[cfg(target_os = "linux")]
mod stubs;
#[cfg(target_os = "linux")]
pub mod unpack;
#[cfg(target_os = "linux")]
mod verdicts;
#[cfg(target_os = "linux")]
mod whole;

use std::path::PathBuf;

use neap::units::Bytes;

use crate::output::Answer;
use crate::settings;

/// Run a PyTorch script without a GPU and report the GPU memory that it takes, to the byte.
///
/// PyTorch's own dispatcher, autograd, optimizer and caching allocator run; only the device is
/// neap's: it owns memory and computes nothing. Exits 0 when the script fits the device, 1 when it
/// does not, 3 when it failed otherwise.
#[derive(clap::Args)]
pub struct Flags {
    /// The device to be: a built-in name or a *.device.json file.
    #[arg(long, value_name = "NAME|FILE", default_value = "h100")]
    pub device: String,
    /// The device's memory for allocations, in place of the device's own.
    #[arg(long, value_name = "BYTES")]
    pub device_bytes: Option<Bytes>,
    /// How many such devices there are.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub devices: u32,
    /// Run rank 0 of this many, with a process group that talks to no one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=65536))]
    pub ranks: Option<u32>,
    /// End the script after this many optimizer steps.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: Option<u64>,
    /// Write one steady iteration as a job graph, to plan from.
    #[arg(long, value_name = "FILE.graph.json")]
    pub record: Option<PathBuf>,
    /// Write PyTorch's memory snapshot.
    #[arg(long, value_name = "FILE.pickle")]
    pub snapshot: Option<PathBuf>,
    /// Write every request to PyTorch's allocator, in order (op,id,bytes,stream).
    #[arg(long, value_name = "FILE.csv")]
    pub events: Option<PathBuf>,
    /// Compare every request with a memory snapshot, of a real GPU or of another run; exit 1 where
    /// they differ.
    #[arg(long, value_name = "FILE.pickle")]
    pub check_against: Option<PathBuf>,
    /// Compare the peak with that of an earlier run, whose report `--json` wrote; exit 1 where more
    /// is reserved.
    #[arg(long, value_name = "FILE.json")]
    pub baseline: Option<PathBuf>,
    /// How much more may be reserved than in the baseline, such as 1%.
    #[arg(long, value_name = "P", requires = "baseline", default_value = "0%",
          value_parser = settings::values::deviation)]
    pub tolerance: u64,
    /// Draw memory over the first iterations by category.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Write a page to look at in a browser: every block over the whole run with its line and
    /// module, to zoom and to search, and the devices that it fits.
    #[arg(long, value_name = "FILE.html")]
    pub html: Option<PathBuf>,
    /// Predict the peak for another size of what the script calls its models with, from the sizes
    /// that it ran with: 512, or 16x512 where two vary.
    #[arg(long, value_name = "SIZE", value_parser = at)]
    pub at: Option<At>,
    /// Draw the peak over the size that varies, with the device's limit.
    #[arg(long, value_name = "FILE.svg")]
    pub plot_sizes: Option<PathBuf>,
    /// What each cuDNN convolution asks for as its workspace.
    #[arg(long, value_name = "BYTES")]
    pub cudnn_workspace: Option<Bytes>,
    /// Sizes that depend on values (nonzero, boolean masks): as large as they can be, or empty.
    #[arg(long, value_enum, default_value_t)]
    pub data_dependent: DataDependent,
    /// CUDA events finish only when the host waits for them, which keeps blocks that another stream
    /// uses longest.
    #[arg(long)]
    pub late: bool,
    /// Let the script save files where it says, and loggers go online.
    #[arg(long)]
    pub allow_writes: bool,
    /// After an out-of-memory error, do not run the script again to find the smallest device that
    /// would do.
    #[arg(long)]
    pub no_second_run: bool,
    /// Run the script, silently, on the other built-in devices too, as far as each has to be known
    /// from a run: about a dozen runs, two at a time.
    #[arg(long)]
    pub all_devices: bool,
    /// Make the stubs for the PyTorch in this folder and print the environment that they need.
    #[arg(long, hide = true, value_name = "FOLDER")]
    pub prepare: Option<PathBuf>,
    /// The command that runs the script, after `--`.
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "prepare")]
    pub command: Vec<std::ffi::OsString>,
}

/// The sizes that `--at` names, one for each that varies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At(pub Vec<u64>);

/// Reads sizes such as `512` or `16x512`.
///
/// # Errors
/// When one is no positive number.
pub fn at(text: &str) -> Result<At, String> {
    let size = |part: &str| part.parse().ok().filter(|&size| size > 0 && size < 1 << 32);
    let sizes: Option<Vec<u64>> = text.split('x').map(size).collect();
    sizes.map(At).ok_or_else(|| format!("`{text}` is no size; give one such as 512, or 16x512"))
}

/// What sizes that depend on values are taken to be.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DataDependent {
    /// As large as they can be: an upper bound.
    #[default]
    Max,
    /// Empty.
    Zero,
}

/// Runs the command and reports.
///
/// # Errors
/// Bad use.
#[cfg(target_os = "linux")]
pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    linux::main(flags, as_json)
}

/// Says that there is no such thing here.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn main(_flags: &Flags, _as_json: bool) -> anyhow::Result<Answer> {
    anyhow::bail!("`neap dry` runs on Linux only; `neap estimate` forecasts from a CPU trace here")
}
