//! `neap device`: the devices that neap knows, and the ones that are here.

use neap::device::profile::{self, Document};
use neap::device::{builtin, present};
use neap::report::table::{Side, Table};
use serde_json::json;

use crate::output::{self, Answer, note};

/// List the built-in devices, or show one.
#[derive(clap::Args)]
pub struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// The built-in devices, and the CUDA devices of this machine.
    List,
    /// One device's figures and where they are from; with --json a *.device.json to start from.
    Show {
        /// A built-in name or a *.device.json file.
        name: String,
    },
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    match &flags.command {
        Command::List => list(as_json)?,
        Command::Show { name } => show(name, as_json)?,
    }
    Ok(Answer::Yes)
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let profiles: Vec<_> = builtin::names().iter().filter_map(|name| builtin::find(name)).collect();
    let present = present::cuda_devices();
    if as_json {
        let here: Vec<_> = present.iter().flatten().map(|p| json!({ "name": p.name, "memory_bytes": p.memory_bytes })).collect();
        return output::json(&json!({ "devices": profiles, "present": here }));
    }
    let mut table = Table::new(&[
        ("device", Side::Left),
        ("memory", Side::Right),
        ("f32 GFLOP/s", Side::Right),
        ("GB/s", Side::Right),
        ("h2d GB/s", Side::Right),
        ("d2h GB/s", Side::Right),
    ]);
    for p in &profiles {
        let tenths = |value: u64, unit: u64| format!("{}.{}", value / unit, value % unit * 10 / unit);
        table.row([
            p.name.clone(),
            p.memory_bytes.to_string(),
            (p.flops.f32 / 1_000_000_000).to_string(),
            tenths(p.memory_bandwidth, 1_000_000_000),
            tenths(p.link.h2d, 1_000_000_000),
            tenths(p.link.d2h, 1_000_000_000),
        ]);
    }
    output::data(&table.to_string())?;
    match present {
        Ok(devices) => devices.iter().for_each(|p| note(&format!("present: {} with {}", p.name, p.memory_bytes))),
        Err(why) => note(&format!("no CUDA device here: {why}")),
    }
    Ok(())
}

fn show(name: &str, as_json: bool) -> anyhow::Result<()> {
    let profile = profile::load(name)?;
    if as_json {
        return output::json(&serde_json::to_value(Document::from(profile))?);
    }
    let mut table = Table::new(&[("", Side::Left), ("", Side::Right)]);
    let link = &profile.link;
    let rows = [
        ("memory", profile.memory_bytes.to_string()),
        ("context reserve", profile.reserve_bytes.to_string()),
        ("available to jobs", profile.available().to_string()),
        ("f32 flop/s", profile.flops.f32.to_string()),
        ("f16 flop/s", profile.flops.f16.to_string()),
        ("f64 flop/s", profile.flops.f64.to_string()),
        ("efficiency", format!("{} %", profile.efficiency_percent)),
        ("memory bandwidth, bytes/s", profile.memory_bandwidth.to_string()),
        ("h2d alone / contended, bytes/s", format!("{} / {}", link.h2d, link.h2d_contended)),
        ("d2h alone / contended, bytes/s", format!("{} / {}", link.d2h, link.d2h_contended)),
        ("copy overhead", format!("{} ns", link.overhead_ns)),
        ("launch overhead", format!("{} ns", profile.launch_overhead_ns)),
        ("pinned host memory", profile.pinned_bytes.to_string()),
    ];
    for (key, value) in rows {
        table.row([key.to_owned(), value]);
    }
    output::data(&format!("{}\n{table}\n{}", profile.name, profile.source))
}
