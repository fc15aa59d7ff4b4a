//! The built-in device profiles, and the source of each figure.
//!
//! Rates, bandwidth and memory size are the vendor's published ones. Published memory sizes are
//! read as GiB; the part that a driver withholds is in the reserve. Link rates are published
//! measurements with pinned memory, by PCIe generation. Overheads, reserve, efficiency and pinned
//! budget are round figures until measured with `neap device measure`; every `source` says so.

use super::{Link, Multiprocessors, Profile, Rates};
use crate::units::Bytes;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// Measured link rates in units of 100 MB/s: one direction alone, and each direction while both are
/// busy.
struct Measured {
    h2d: u64,
    d2h: u64,
    h2d_contended: u64,
    d2h_contended: u64,
    source: &'static str,
}

/// 12.2 GB/s up and 12.9 GB/s down alone. Contended: scaled by PCIe 4's ratio, 19.0 / 25.4.
const PCIE3: Measured = Measured {
    h2d: 122,
    d2h: 129,
    h2d_contended: 91,
    d2h_contended: 96,
    source: "PCIe 3 x16: one way measured by others (12.2 and 12.9 GB/s, pinned), contended scaled by PCIe 4's ratio of 0.75",
};
/// The middle of 24.8–26.0 GB/s alone and of 18.4–19.6 GB/s contended.
const PCIE4: Measured = Measured {
    h2d: 254,
    d2h: 254,
    h2d_contended: 190,
    d2h_contended: 190,
    source: "PCIe 4 x16: measured by others (24.8-26.0 GB/s one way, 18.4-19.6 each when both are busy, pinned; the middles)",
};
/// Half of [`PCIE4`].
const PCIE4_X8: Measured = Measured {
    h2d: 127,
    d2h: 127,
    h2d_contended: 95,
    d2h_contended: 95,
    source: "PCIe 4 x8: half of what others measured for x16 (24.8-26.0 GB/s one way, 18.4-19.6 each when both are busy, pinned)",
};
/// 55.6 GB/s alone. Contended: scaled by PCIe 4's ratio, 19.0 / 25.4.
const PCIE5: Measured = Measured {
    h2d: 556,
    d2h: 556,
    h2d_contended: 416,
    d2h_contended: 416,
    source: "PCIe 5 x16: one way measured by others (55.6 GB/s, pinned), contended scaled by PCIe 4's ratio of 0.75",
};

/// NVLink-C2C, whose two directions together reach at most the bandwidth of the host's memory.
const C2C: Measured = Measured {
    h2d: 3750,
    d2h: 2970,
    h2d_contended: 2812,
    d2h_contended: 2227,
    source: "NVLink-C2C: one way measured by others (375 and 297 GB/s, Schieffer et al. 2024), contended scaled by PCIe 4's ratio of 0.75",
};

/// A GPU of the catalogue: rates in GFLOP/s, bandwidth in GB/s.
struct Gpu {
    name: &'static str,
    /// Other names for it, in [`plain`] spelling.
    also: &'static [&'static str],
    sheet: &'static str,
    memory_gib: u64,
    reserve_mib: u64,
    f32: u64,
    f16: u64,
    f64: u64,
    bandwidth: u64,
    /// Major compute capability, number of multiprocessors, and threads of one multiprocessor.
    sm: (u32, u32, u32),
    link: Measured,
}

const GPUS: &[Gpu] = &[
    Gpu {
        name: "p100",
        also: &["p10016g"],
        sheet: "NVIDIA Tesla P100 data sheet, PCIe 16 GB; f16 without tensor cores",
        memory_gib: 16,
        reserve_mib: 512,
        f32: 9_300,
        f16: 18_700,
        f64: 4_700,
        bandwidth: 732,
        sm: (6, 56, 2048),
        link: PCIE3,
    },
    Gpu {
        name: "v100",
        also: &["v10016g", "v100sxm2"],
        sheet: "NVIDIA V100 data sheet, SXM2 16 GB; f16 on tensor cores",
        memory_gib: 16,
        reserve_mib: 512,
        f32: 15_700,
        f16: 125_000,
        f64: 7_800,
        bandwidth: 900,
        sm: (7, 80, 2048),
        link: PCIE3,
    },
    Gpu {
        name: "v100-32g",
        also: &[],
        sheet: "NVIDIA V100 data sheet, SXM2 32 GB; f16 on tensor cores",
        memory_gib: 32,
        reserve_mib: 640,
        f32: 15_700,
        f16: 125_000,
        f64: 7_800,
        bandwidth: 900,
        sm: (7, 80, 2048),
        link: PCIE3,
    },
    Gpu {
        name: "t4",
        also: &["t416g"],
        sheet: "NVIDIA T4 data sheet; f16 on tensor cores; f64 taken as 1/32 of f32",
        memory_gib: 16,
        reserve_mib: 640,
        f32: 8_100,
        f16: 65_000,
        f64: 253,
        bandwidth: 320,
        sm: (7, 40, 1024),
        link: PCIE3,
    },
    Gpu {
        name: "rtx2080ti",
        also: &["2080ti"],
        sheet: "NVIDIA Turing architecture whitepaper, reference clocks; f16 on tensor cores accumulating in f32; f64 taken as 1/32 of f32",
        memory_gib: 11,
        reserve_mib: 640,
        f32: 13_400,
        f16: 53_800,
        f64: 420,
        bandwidth: 616,
        sm: (7, 68, 1024),
        link: PCIE3,
    },
    Gpu {
        name: "rtx3060",
        also: &["3060"],
        sheet: "NVIDIA GeForce RTX 3060 12 GB specifications (3584 cores at 1.78 GHz); f16 on tensor cores accumulating in f32 taken as twice f32, f64 as 1/64",
        memory_gib: 12,
        reserve_mib: 640,
        f32: 12_740,
        f16: 25_480,
        f64: 199,
        bandwidth: 360,
        sm: (8, 28, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "rtx3090",
        also: &["3090"],
        sheet: "NVIDIA Ampere GA102 whitepaper; f16 on tensor cores accumulating in f32, dense; f64 taken as 1/64 of f32",
        memory_gib: 24,
        reserve_mib: 1_024,
        f32: 35_600,
        f16: 71_000,
        f64: 556,
        bandwidth: 936,
        sm: (8, 82, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "a10",
        also: &["a1024g"],
        sheet: "NVIDIA A10 data sheet; f16 on tensor cores is half its sparse figure of 250 TFLOP/s; f64 taken as 1/64 of f32",
        memory_gib: 24,
        reserve_mib: 1_024,
        f32: 31_200,
        f16: 125_000,
        f64: 488,
        bandwidth: 600,
        sm: (8, 72, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "a30",
        also: &["a3024g"],
        sheet: "NVIDIA A30 data sheet; f32 without TF32, f16 on tensor cores dense, f64 without tensor cores",
        memory_gib: 24,
        reserve_mib: 1_024,
        f32: 10_300,
        f16: 165_000,
        f64: 5_200,
        bandwidth: 933,
        sm: (8, 56, 2048),
        link: PCIE4,
    },
    Gpu {
        name: "rtx4060",
        also: &["4060"],
        sheet: "NVIDIA GeForce RTX 4060 specifications (3072 cores at 2.46 GHz); f16 on tensor cores accumulating in f32 taken as twice f32, f64 as 1/64",
        memory_gib: 8,
        reserve_mib: 640,
        f32: 15_110,
        f16: 30_220,
        f64: 236,
        bandwidth: 272,
        sm: (8, 24, 1536),
        link: PCIE4_X8,
    },
    Gpu {
        name: "rtx4080",
        also: &["4080"],
        sheet: "NVIDIA Ada GPU architecture whitepaper, 16 GB; f16 on tensor cores accumulating in f32, dense; f64 taken as 1/64 of f32",
        memory_gib: 16,
        reserve_mib: 1_024,
        f32: 48_700,
        f16: 97_500,
        f64: 761,
        bandwidth: 717,
        sm: (8, 76, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "rtx4090",
        also: &["4090"],
        sheet: "NVIDIA Ada GPU architecture whitepaper; f16 on tensor cores accumulating in f32, dense; f64 taken as 1/64 of f32",
        memory_gib: 24,
        reserve_mib: 1_024,
        f32: 82_600,
        f16: 165_200,
        f64: 1_290,
        bandwidth: 1_008,
        sm: (8, 128, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "l4",
        also: &["l424g"],
        sheet: "NVIDIA L4 data sheet; f16 on tensor cores is half its sparse figure of 242 TFLOP/s; f64 taken as 1/64 of f32",
        memory_gib: 24,
        reserve_mib: 1_024,
        f32: 30_300,
        f16: 121_000,
        f64: 473,
        bandwidth: 300,
        sm: (8, 58, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "l40s",
        also: &["l40s48g"],
        sheet: "NVIDIA L40S data sheet; f32 without TF32, f16 on tensor cores dense; f64 taken as 1/64 of f32",
        memory_gib: 48,
        reserve_mib: 1_024,
        f32: 91_600,
        f16: 362_000,
        f64: 1_431,
        bandwidth: 864,
        sm: (8, 142, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "a6000",
        also: &["rtxa6000"],
        sheet: "NVIDIA RTX A6000 data sheet; f16 on tensor cores is half its sparse figure of 309.7 TFLOP/s; f64 taken as 1/64 of f32",
        memory_gib: 48,
        reserve_mib: 1_024,
        f32: 38_700,
        f16: 154_800,
        f64: 604,
        bandwidth: 768,
        sm: (8, 84, 1536),
        link: PCIE4,
    },
    Gpu {
        name: "a100-40g",
        also: &["a100"],
        sheet: "NVIDIA A100 data sheet, 40 GB; f32 without TF32, f16 on tensor cores dense, f64 without tensor cores",
        memory_gib: 40,
        reserve_mib: 1_024,
        f32: 19_500,
        f16: 312_000,
        f64: 9_700,
        bandwidth: 1_555,
        sm: (8, 108, 2048),
        link: PCIE4,
    },
    Gpu {
        name: "a100-80g",
        also: &["a100sxm"],
        sheet: "NVIDIA A100 data sheet, 80 GB SXM; f32 without TF32, f16 on tensor cores dense, f64 without tensor cores",
        memory_gib: 80,
        reserve_mib: 1_536,
        f32: 19_500,
        f16: 312_000,
        f64: 9_700,
        bandwidth: 2_039,
        sm: (8, 108, 2048),
        link: PCIE4,
    },
    Gpu {
        name: "h100",
        also: &["h10080g", "h100sxm"],
        sheet: "NVIDIA H100 data sheet, SXM 80 GB; f32 without TF32, f16 on tensor cores is half its sparse figure of 1979 TFLOP/s, f64 without tensor cores",
        memory_gib: 80,
        reserve_mib: 1_536,
        f32: 67_000,
        f16: 989_000,
        f64: 34_000,
        bandwidth: 3_350,
        sm: (9, 132, 2048),
        link: PCIE5,
    },
    Gpu {
        name: "h200",
        also: &["h200141g", "h200sxm"],
        sheet: "NVIDIA H200 data sheet, SXM 141 GB; f32 without TF32, f16 on tensor cores is half its sparse figure of 1979 TFLOP/s, f64 without tensor cores",
        memory_gib: 141,
        reserve_mib: 2_048,
        f32: 67_000,
        f16: 989_000,
        f64: 34_000,
        bandwidth: 4_800,
        sm: (9, 132, 2048),
        link: PCIE5,
    },
    Gpu {
        name: "gh200",
        also: &["gh20096g"],
        sheet: "NVIDIA GH200 data sheet, 96 GB HBM3; f32 without TF32, f16 on tensor cores is half its sparse figure of 1979 TFLOP/s, f64 without tensor cores",
        memory_gib: 96,
        reserve_mib: 1_536,
        f32: 67_000,
        f16: 989_000,
        f64: 34_000,
        bandwidth: 4_000,
        sm: (9, 132, 2048),
        link: C2C,
    },
    Gpu {
        name: "rtx5090",
        also: &["5090"],
        sheet: "NVIDIA RTX Blackwell GPU architecture whitepaper; f16 on tensor cores accumulating in f32, dense; f64 taken as 1/64 of f32",
        memory_gib: 32,
        reserve_mib: 1_024,
        f32: 104_800,
        f16: 209_500,
        f64: 1_637,
        bandwidth: 1_792,
        sm: (12, 170, 1536),
        link: PCIE5,
    },
    Gpu {
        name: "b200",
        also: &["b200180g"],
        sheet: "NVIDIA HGX B200 data sheet, an eighth of its eight GPUs, 180 GB; f32 without TF32, f16 on tensor cores dense",
        memory_gib: 180,
        reserve_mib: 3_072,
        f32: 75_000,
        f16: 2_250_000,
        f64: 37_000,
        bandwidth: 8_000,
        sm: (10, 148, 2048),
        link: PCIE5,
    },
];

const NAMES: [&str; GPUS.len() + 1] = {
    let mut names = ["host"; GPUS.len() + 1];
    let mut i = 0;
    while i < GPUS.len() {
        names[i] = GPUS[i].name;
        i += 1;
    }
    names
};

/// The names of the built-in devices, the oldest first and `host` last.
#[must_use]
pub fn names() -> &'static [&'static str] {
    &NAMES
}

/// The name of the built-in device that a GPU is, by the driver's name for it, such as `NVIDIA
/// A100-SXM4-80GB`: all parts of the built-in name are words of it.
#[must_use]
pub fn like(gpu: &str) -> Option<&'static str> {
    let lower = gpu.to_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let pair = |part: &str| words.windows(2).any(|two| two.concat() == part);
    let has =
        |part: &str| pair(part) || words.iter().any(|w| *w == part || *w == format!("{part}b"));
    let names = NAMES.iter().copied().filter(|name| name.split('-').all(has));
    // `v100-32g` has more parts than `v100`.
    names.max_by_key(|name| name.split('-').count())
}

/// The built-in device with this name, in any case and spelling: `rtx4090`, `RTX 4090`, `NVIDIA
/// A100-80GB`.
#[must_use]
pub fn find(name: &str) -> Option<Profile> {
    let wanted = plain(name);
    if wanted == "host" {
        return Some(host());
    }
    let is = |gpu: &&Gpu| plain(gpu.name) == wanted || gpu.also.contains(&&*wanted);
    GPUS.iter().find(is).map(profile)
}

/// Lower-case letters and digits, without the vendor's words and with `g` for `gb`.
fn plain(name: &str) -> String {
    let mut text: String = name.to_ascii_lowercase();
    text.retain(|c| c.is_ascii_alphanumeric());
    for word in ["nvidia", "geforce", "tesla"] {
        text = text.strip_prefix(word).unwrap_or(&text).to_owned();
    }
    if let Some(short) = text.strip_suffix("gb") {
        text = format!("{short}g");
    }
    text
}

fn profile(gpu: &Gpu) -> Profile {
    const GIGA: u64 = 1_000_000_000;
    let link = &gpu.link;
    Profile {
        name: gpu.name.to_owned(),
        source: format!(
            "{}. {}. Assumed until measured: a reserve of {} MiB for the context and what the driver withholds, \
             6 µs a copy and 5 µs a launch, {EFFICIENCY} % of the peak rates (a guess), 64 GiB of pinned memory (an allowance).",
            gpu.sheet, link.source, gpu.reserve_mib
        ),
        memory_bytes: Bytes(gpu.memory_gib * GIB),
        reserve_bytes: Bytes(gpu.reserve_mib * MIB),
        flops: Rates { f32: gpu.f32 * GIGA, f16: gpu.f16 * GIGA, f64: gpu.f64 * GIGA },
        memory_bandwidth: gpu.bandwidth * GIGA,
        efficiency_percent: EFFICIENCY,
        link: Link {
            h2d: link.h2d * GIGA / 10,
            d2h: link.d2h * GIGA / 10,
            h2d_contended: link.h2d_contended * GIGA / 10,
            d2h_contended: link.d2h_contended * GIGA / 10,
            overhead_ns: 6_000,
        },
        launch_overhead_ns: 5_000,
        pinned_bytes: Bytes(64 * GIB),
        multiprocessors: Some(Multiprocessors {
            capability: gpu.sm.0,
            count: gpu.sm.1,
            threads: gpu.sm.2,
        }),
    }
}

/// In percent: less than large convolutions reach of a peak rate, more than small kernels do.
const EFFICIENCY: u32 = 60;

fn host() -> Profile {
    Profile {
        name: "host".to_owned(),
        source: "Nominal: round figures for one core of a desktop computer, measured nowhere. A copy between the arena and the host's \
                 store stands for the link. No context, hence no reserve."
            .to_owned(),
        memory_bytes: Bytes(16 * GIB),
        reserve_bytes: Bytes::ZERO,
        flops: Rates { f32: 50_000_000_000, f16: 50_000_000_000, f64: 25_000_000_000 },
        memory_bandwidth: 10_000_000_000,
        efficiency_percent: EFFICIENCY,
        link: Link {
            h2d: 5_000_000_000,
            d2h: 5_000_000_000,
            h2d_contended: 5_000_000_000,
            d2h_contended: 5_000_000_000,
            overhead_ns: 1_000,
        },
        launch_overhead_ns: 1_000,
        pinned_bytes: Bytes(16 * GIB),
        multiprocessors: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_is_possible_and_says_where_it_is_from() {
        assert_eq!(
            names().join(" "),
            "p100 v100 v100-32g t4 rtx2080ti rtx3060 rtx3090 a10 a30 rtx4060 rtx4080 rtx4090 l4 l40s \
             a6000 a100-40g a100-80g h100 h200 gh200 rtx5090 b200 host"
        );
        for name in names() {
            let profile = find(name).unwrap();
            assert_eq!(profile.validate(), Ok(()), "{name}");
            assert_eq!(profile.name, *name);
            assert!(profile.source.len() > 60, "{name}");
            assert!(profile.available().0 > profile.memory_bytes.0 / 10 * 9, "{name}");
        }
        for (spelling, name) in [
            ("RTX4090", "rtx4090"),
            ("NVIDIA GeForce RTX 4090", "rtx4090"),
            ("Tesla V100-32GB", "v100-32g"),
            ("A100", "a100-40g"),
            ("A100_80GB", "a100-80g"),
            ("HOST", "host"),
        ] {
            assert_eq!(find(spelling).map(|p| p.name).as_deref(), Some(name), "{spelling}");
        }
        for (gpu, name) in [
            ("NVIDIA H100 80GB HBM3", Some("h100")),
            ("NVIDIA GH200 480GB", Some("gh200")),
            ("NVIDIA A100-SXM4-80GB", Some("a100-80g")),
            ("NVIDIA A100-PCIE-40GB", Some("a100-40g")),
            ("Tesla V100-SXM2-32GB", Some("v100-32g")),
            ("Tesla V100-SXM2-16GB", Some("v100")),
            ("NVIDIA GeForce RTX 4080 SUPER", Some("rtx4080")),
            ("NVIDIA RTX A6000", Some("a6000")),
            ("NVIDIA L40S", Some("l40s")),
            ("NVIDIA T400", None),
            ("no GPU at all", None),
        ] {
            assert_eq!(like(gpu), name, "{gpu}");
        }
        assert_eq!(find("rtx"), None);
        assert_eq!(find(""), None);
    }

    #[test]
    fn figures_come_out_in_plain_units() {
        let a6000 = find("a6000").unwrap();
        assert_eq!(a6000.memory_bytes, Bytes(51_539_607_552));
        assert_eq!(a6000.flops.f32, 38_700_000_000_000);
        assert_eq!(a6000.memory_bandwidth, 768_000_000_000);
        assert_eq!((a6000.link.h2d, a6000.link.d2h_contended), (25_400_000_000, 19_000_000_000));
    }
}
