//! `neap device`: the devices that neap knows, the ones of this machine, and how fast they are.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use neap::device::profile::{self, Document};
use neap::device::{Profile, builtin, present};
use neap::report::table::{Side, Table};
use neap::run::Target;
use neap::run::measure::{self, Beside, LinkRates, Measurement};
use neap::units::{Bytes, Nanos};
use serde::Serialize;

use crate::output::{self, Answer, Ending, note};
use crate::settings::{Outputs, TargetFlags};

/// List the built-in devices, show one, or measure this machine's device.
#[derive(clap::Args)]
pub struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// List the built-in devices, and the CUDA devices of this machine.
    List,
    /// Show one device's figures and their sources. With --json the output is a *.device.json file.
    Show {
        /// A built-in name or a *.device.json file.
        name: String,
        /// List the operators that `run` can execute on it, and the element types that each
        /// supports; `cuda` stands for any GPU.
        #[arg(long)]
        operators: bool,
    },
    /// Measure link, memory, arithmetic and overheads, and write a *.device.json.
    Measure {
        #[command(flatten)]
        on: TargetFlags,
        /// The device whose figures stand for those that can't be measured, such as the memory of a
        /// job: a built-in name or a file.
        #[arg(long, value_name = "NAME|FILE")]
        device: Option<String>,
        /// The name of the measured device.
        #[arg(long, default_value = "host")]
        name: String,
        /// Measure small sizes only: a try, whose figures are too low.
        #[arg(long)]
        quick: bool,
        /// The output file; without it the figures are only reported.
        #[arg(short, long, value_name = "FILE.device.json")]
        output: Option<PathBuf>,
    },
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    match &flags.command {
        Command::List => list(as_json),
        Command::Show { name, operators: true } => {
            let host = name != "cuda" && profile::load(name)?.name == "host";
            let target = if host { Target::Host } else { Target::Cuda { libs: None, tf32: false } };
            output::report(&Operators { operators: neap::run::operators(&target) }, as_json)?;
            Ok(Answer::Yes)
        }
        Command::Show { name, .. } => {
            output::report(&Shown(profile::load(name)?), as_json)?;
            Ok(Answer::Yes)
        }
        Command::Measure { on, device, name, quick, output } => {
            let target = on.choose(None)?;
            let inputs: Vec<&Path> = device.iter().map(Path::new).collect();
            Outputs::new(&inputs, &[output.as_deref()])?;
            let base = base(&target, device.as_deref())?;
            let measured = measure::measure(&target, &base, name, *quick)?;
            let mut ending = Ending::reporting(&Measured::new(&measured), as_json);
            if let Some(path) = output {
                ending.then(|| {
                    profile::write(path, &measured.profile)?;
                    output::written(path);
                    Ok(())
                });
            }
            ending.with(Answer::Yes)
        }
    }
}

/// What can't be measured: of the named device; else of the built-in one that the GPU is. A GPU's
/// memory is its own.
fn base(target: &Target, device: Option<&str>) -> anyhow::Result<Profile> {
    let gpu = match target {
        Target::Host => None,
        Target::Cuda { .. } => present::cuda_devices().ok().and_then(|all| all.into_iter().next()),
    };
    let Some(gpu) = gpu else { return Ok(profile::load(device.unwrap_or("host"))?) };
    let name = device.or_else(|| builtin::like(&gpu.name));
    let name = name.with_context(|| {
        format!("--device: name the profile that is most like {} (`neap device list`)", gpu.name)
    })?;
    let profile = Profile { memory_bytes: gpu.memory_bytes, ..profile::load(name)? };
    ensure!(
        profile.reserve_bytes < profile.memory_bytes,
        "--device: {name} reserves {}, and {} has {}: name a smaller device",
        profile.reserve_bytes,
        gpu.name,
        gpu.memory_bytes
    );
    Ok(profile)
}

/// The operators that a device can run.
#[derive(Serialize)]
struct Operators {
    operators: Vec<neap::run::Listed>,
}

impl fmt::Display for Operators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&[("operator", Side::Left), ("element types", Side::Left)]);
        for operator in &self.operators {
            table.row([operator.kind.clone(), operator.types.to_owned()]);
        }
        table.fmt(f)
    }
}

fn list(as_json: bool) -> anyhow::Result<Answer> {
    let present = present::cuda_devices();
    let here = present.iter().flatten();
    let list = List {
        devices: builtin::names().iter().filter_map(|name| builtin::find(name)).collect(),
        present: here
            .map(|p| Present { name: p.name.clone(), memory_bytes: p.memory_bytes })
            .collect(),
    };
    output::report(&list, as_json)?;
    if let Err(why) = present.as_ref().map_err(ToString::to_string) {
        note(&format!("no CUDA device here: {why}"));
    }
    for p in &list.present {
        note(&format!("present: {} with {}", p.name, p.memory_bytes));
    }
    Ok(Answer::Yes)
}

#[derive(Serialize)]
struct List {
    devices: Vec<Profile>,
    present: Vec<Present>,
}

/// A CUDA device of this machine.
#[derive(Serialize)]
struct Present {
    name: String,
    memory_bytes: Bytes,
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&[
            ("device", Side::Left),
            ("memory", Side::Right),
            ("f32 GFLOP/s", Side::Right),
            ("GB/s", Side::Right),
            ("h2d GB/s", Side::Right),
            ("d2h GB/s", Side::Right),
        ]);
        for p in &self.devices {
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
        write!(f, "{table}")
    }
}

/// One device; its JSON is a `*.device.json`.
struct Shown(Profile);

impl Serialize for Shown {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Document::from(self.0.clone()).serialize(serializer)
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(profile) = self;
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
        write!(f, "{}\n{table}\n{}", profile.name, profile.source)
    }
}

/// The result of a measurement.
#[derive(Serialize)]
struct Measured {
    device: Document,
    link: Vec<Copies>,
    products: Vec<Products>,
}

/// The rate of copies of one size.
#[derive(Serialize)]
struct Copies {
    bytes: Bytes,
    /// Whether the device computed meanwhile.
    loaded: bool,
    /// What it computed.
    beside: &'static str,
    h2d_bytes_per_s: u64,
    d2h_bytes_per_s: u64,
    h2d_both_bytes_per_s: u64,
    d2h_both_bytes_per_s: u64,
}

/// The rate of products of square matrices.
#[derive(Serialize)]
struct Products {
    extent: u64,
    flops_per_s: u64,
}

impl Measured {
    fn new(measured: &Measurement) -> Self {
        let copies = |l: &LinkRates| Copies {
            bytes: l.bytes,
            loaded: l.beside != Beside::Nothing,
            beside: match l.beside {
                Beside::Nothing => "nothing",
                Beside::Products => "products",
                Beside::Additions => "additions",
            },
            h2d_bytes_per_s: l.h2d,
            d2h_bytes_per_s: l.d2h,
            h2d_both_bytes_per_s: l.h2d_both,
            d2h_both_bytes_per_s: l.d2h_both,
        };
        let products = |&(extent, flops_per_s): &(u64, u64)| Products { extent, flops_per_s };
        Self {
            device: Document::from(measured.profile.clone()),
            link: measured.link.iter().map(copies).collect(),
            products: measured.products.iter().map(products).collect(),
        }
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let giga = |rate: u64| {
            format!("{}.{:02}", rate / 1_000_000_000, rate % 1_000_000_000 / 10_000_000)
        };
        let mut table = Table::new(&[
            ("copies of", Side::Right),
            ("beside", Side::Left),
            ("h2d GB/s", Side::Right),
            ("d2h GB/s", Side::Right),
            ("both: h2d", Side::Right),
            ("both: d2h", Side::Right),
        ]);
        for l in &self.link {
            table.row([
                l.bytes.to_string(),
                l.beside.to_owned(),
                giga(l.h2d_bytes_per_s),
                giga(l.d2h_bytes_per_s),
                giga(l.h2d_both_bytes_per_s),
                giga(l.d2h_both_bytes_per_s),
            ]);
        }
        let product = |p: &Products| format!("{} at {}", giga(p.flops_per_s), p.extent);
        let products: Vec<String> = self.products.iter().map(product).collect();
        let profile = Profile::from(self.device.clone());
        write!(
            f,
            "{table}\nmatrix products, GFLOP/s: {}; convolutions reach {} % of the best\n\
             memory {} GB/s; a copy costs {} besides, a step {}",
            products.join(", "),
            profile.efficiency_percent,
            giga(profile.memory_bandwidth),
            Nanos(profile.link.overhead_ns),
            Nanos(profile.launch_overhead_ns),
        )
    }
}
