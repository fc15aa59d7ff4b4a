//! What device to be, from the environment that `neap dry` sets.

use std::path::PathBuf;
use std::sync::OnceLock;

/// The device's properties. Several devices are alike.
pub struct Config {
    /// Memory that the device says it has.
    pub total_bytes: u64,
    /// Memory that allocations may take: the total less what a context takes.
    pub capacity_bytes: u64,
    pub devices: i32,
    /// Major × 10 + minor.
    pub capability: i32,
    pub multiprocessors: i32,
    pub name: String,
    /// CUDA version as `cudaRuntimeGetVersion` says it, e.g. 13000.
    pub cuda: i32,
    /// What every cuDNN convolution plan asks for.
    pub cudnn_workspace_bytes: i64,
    /// Events finish only when the host waits for them.
    pub late: bool,
    /// Where the log goes; none outside `neap dry`.
    pub folder: Option<PathBuf>,
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// The configuration, read once.
pub fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let total_bytes = number("NEAP_DRY_TOTAL_BYTES", 80u64 << 30);
        // As on a real machine, an empty CUDA_VISIBLE_DEVICES hides every device and a list shows
        // those it names.
        let asked: i32 = number("NEAP_DRY_DEVICES", 1);
        let devices = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => {
                let named = list.split(',').map(str::trim);
                named.take_while(|d| d.parse().is_ok_and(|d: i32| (0..asked).contains(&d))).count()
                    as i32
            }
            Err(_) => asked,
        };
        Config {
            total_bytes,
            capacity_bytes: number("NEAP_DRY_CAPACITY_BYTES", total_bytes),
            devices,
            capability: number("NEAP_DRY_CAPABILITY", 90),
            multiprocessors: number("NEAP_DRY_MULTIPROCESSORS", 132),
            name: std::env::var("NEAP_DRY_NAME").unwrap_or_else(|_| "neap dry device".into()),
            cuda: number("NEAP_DRY_CUDA", 13000),
            cudnn_workspace_bytes: number("NEAP_DRY_CUDNN_WORKSPACE", 0),
            late: std::env::var("NEAP_DRY_LATE").is_ok_and(|v| v == "1"),
            folder: std::env::var_os("NEAP_DRY_DIR").map(PathBuf::from),
        }
    })
}
