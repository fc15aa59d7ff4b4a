//! `neap device`: the devices that neap knows, the ones that are here, and how fast they are.

use std::path::{Path, PathBuf};

use neap::device::profile::{self, Document};
use neap::device::{builtin, present};
use neap::report::table::{Side, Table};
use neap::run::measure::{self, LinkRates, Measurement};
use neap::units::Nanos;
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::run::Where;
use crate::settings;

/// List the built-in devices, show one, or measure the one that is here.
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
    /// Measure link, memory, arithmetic and overheads, and write a *.device.json.
    Measure {
        #[command(flatten)]
        on: Where,
        /// What can't be measured, such as the memory a job may have, comes from this device: a built-in name or a file.
        #[arg(long, value_name = "NAME|FILE", default_value = "host")]
        device: String,
        /// What to call it.
        #[arg(long, default_value = "host")]
        name: String,
        /// Where to write it; only reported if not given.
        #[arg(short, long, value_name = "FILE.device.json")]
        output: Option<PathBuf>,
    },
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    match &flags.command {
        Command::List => list(as_json)?,
        Command::Show { name } => show(name, as_json)?,
        Command::Measure { on, device, name, output } => {
            let target = on.choose(None)?;
            settings::outputs(&[Path::new(device)], &[output.as_deref()])?;
            let measured = measure::measure(&target, &profile::load(device)?, name)?;
            if let Some(path) = output {
                profile::write(path, &measured.profile)?;
                note(&format!("written: {}", path.display()));
            }
            measurement(&measured, as_json)?;
        }
    }
    Ok(Answer::Yes)
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let profiles: Vec<_> = builtin::names().iter().filter_map(|name| builtin::find(name)).collect();
    let present = present::cuda_devices();
    if as_json {
        let here: Vec<_> = present
            .iter()
            .flatten()
            .map(|p| json!({ "name": p.name, "memory_bytes": p.memory_bytes }))
            .collect();
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
        let tenths =
            |value: u64, unit: u64| format!("{}.{}", value / unit, value % unit * 10 / unit);
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
        Ok(devices) => devices
            .iter()
            .for_each(|p| note(&format!("present: {} with {}", p.name, p.memory_bytes))),
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

fn measurement(measured: &Measurement, as_json: bool) -> anyhow::Result<()> {
    let Measurement { profile, link, products } = measured;
    if as_json {
        let rates = |l: &LinkRates| {
            json!({
                "bytes": l.bytes,
                "loaded": l.loaded,
                "h2d_bytes_per_s": l.h2d,
                "d2h_bytes_per_s": l.d2h,
                "h2d_both_bytes_per_s": l.h2d_both,
                "d2h_both_bytes_per_s": l.d2h_both,
            })
        };
        let products: Vec<_> = products
            .iter()
            .map(|(extent, rate)| json!({ "extent": extent, "flops_per_s": rate }))
            .collect();
        return output::json(&json!({
            "device": Document::from(profile.clone()),
            "link": link.iter().map(rates).collect::<Vec<_>>(),
            "products": products,
        }));
    }
    let giga =
        |rate: u64| format!("{}.{:02}", rate / 1_000_000_000, rate % 1_000_000_000 / 10_000_000);
    let mut table = Table::new(&[
        ("copies of", Side::Right),
        ("others", Side::Left),
        ("h2d GB/s", Side::Right),
        ("d2h GB/s", Side::Right),
        ("both: h2d", Side::Right),
        ("both: d2h", Side::Right),
    ]);
    for l in link {
        let others = if l.loaded { "busy" } else { "idle" };
        table.row([
            l.bytes.to_string(),
            others.to_owned(),
            giga(l.h2d),
            giga(l.d2h),
            giga(l.h2d_both),
            giga(l.d2h_both),
        ]);
    }
    let products: Vec<String> =
        products.iter().map(|(extent, rate)| format!("{} at {extent}", giga(*rate))).collect();
    output::data(&format!(
        "{table}\nmatrix products, GFLOP/s: {}; convolutions reach {} % of the best\nmemory {} GB/s; a copy costs {} besides, a step {}",
        products.join(", "),
        profile.efficiency_percent,
        giga(profile.memory_bandwidth),
        Nanos(profile.link.overhead_ns),
        Nanos(profile.launch_overhead_ns),
    ))
}
