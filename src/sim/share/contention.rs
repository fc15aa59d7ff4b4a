//! How much of a device a job keeps busy alone, and how fast jobs go beside each other.
//!
//! The model: a job alone keeps `u` of the device busy (per mille, 1 to 1000). Jobs that run at
//! once go at full speed while their `u` add up to at most 1000. Beyond that all go at 1000 / Σu.
//! An iteration takes `fixed + batch · each`; the device idles for a part of `fixed`.
//!
//! *Calibrated*: `fixed` and `each` are straight lines through the measured iteration times of
//! Salus's workloads on a P100 (public baselines, three batch sizes per net). The idle part, 56 %
//! of `fixed`, is set so that 300 `resnet50_50` at once gain the published ×1.07. `superres` has no
//! measured iterations, and its 420 is set from the published ×2.38. A workload without
//! measurements is taken to keep the device busy: no gain is claimed.

use crate::units::Nanos;

/// The whole of a device's compute, per mille.
pub const WHOLE: u32 = 1000;

/// The part of an iteration's fixed time (per mille) in which the device idles. Calibrated.
const IDLE: u64 = 560;

/// Utilisation of `superres` at a batch of 128, used for smaller batches too. Calibrated.
const SUPERRES: u32 = 420;

/// A net's name, the fixed microseconds of an iteration, and nanoseconds for each sample of a
/// batch.
const NETS: [(&str, u64, u64); 11] = [
    ("vgg11", 31_600, 3_031_000),
    ("vgg16", 39_300, 6_200_000),
    ("vgg19", 46_300, 7_259_000),
    ("resnet50", 25_600, 3_995_000),
    ("resnet101", 50_800, 6_631_000),
    ("resnet152", 72_100, 9_496_000),
    ("googlenet", 19_500, 1_604_000),
    ("alexnet", 13_400, 318_000),
    ("overfeat", 32_800, 657_000),
    ("inception3", 37_200, 6_463_000),
    ("inception4", 92_300, 12_625_000),
];

/// Of a workload, whose name is net_batch: the time of its iteration alone, where it was measured,
/// and the share of the device that it keeps busy alone, per mille.
#[must_use]
pub fn speed(workload: &str) -> (Option<Nanos>, u32) {
    let unknown = (None, WHOLE);
    let Some((net, batch)) = workload.rsplit_once('_') else { return unknown };
    let Ok(batch @ 1..=4096) = batch.parse::<u64>() else { return unknown };
    if net == "superres" && batch <= 128 {
        return (None, SUPERRES);
    }
    let Some((_, fixed, each)) = NETS.iter().find(|(name, ..)| *name == net) else {
        return unknown;
    };
    let (fixed, whole) = (fixed * 1000, fixed * 1000 + each * batch);
    // Rounded up, so that it is at least 1 and at most the whole.
    let share = (whole - fixed * IDLE / 1000).saturating_mul(1000).div_ceil(whole);
    (Some(Nanos(whole)), u32::try_from(share).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_calibrated_and_what_is_unknown() {
        assert_eq!(speed("superres_128"), (None, 420));
        assert_eq!(speed("resnet50_50"), (Some(Nanos(225_350_000)), 937));
        // The calibration did not use this measured time of 21 ms.
        assert_eq!(speed("alexnet_25").0, Some(Nanos(21_350_000)));
        assert!(speed("alexnet_25").1 < speed("alexnet_100").1);
        for unknown in [
            "",
            "x",
            "vae_64",
            "resnet50_",
            "resnet50_0",
            "resnet50_99999999999999999999",
            "alexneteval_5",
        ] {
            assert_eq!(speed(unknown), (None, WHOLE), "{unknown}");
        }
    }
}
