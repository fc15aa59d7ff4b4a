//! The papers' accounting in reports, and extra time by cause.

use neap::sim::accounting::{Extra, Paper};
use neap::units::Nanos;
use serde_json::{Value, json};

use crate::simulate::ratio;

/// How memory and time are counted in reports. Plans are made and proved by physical accounting in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Accounting {
    /// As the device has it: bytes count from a copy's or an operator's start, and the link's directions are apart.
    Physical,
    /// The papers' beside it: swap-ins and outputs count from their end, workspaces not at all, and the link carries one copy at a time.
    Paper,
}

/// Saving and time as the papers say them.
pub struct Shares {
    /// Against liveness.
    pub msr: f64,
    /// Against freeing nothing.
    pub msr_no_free: f64,
    /// Time over unplanned time.
    pub eor: f64,
}

impl Shares {
    pub fn of(paper: &Paper, unplanned: Nanos) -> Self {
        let saving =
            |baseline: neap::units::Bytes| ratio(baseline.saturating_sub(paper.peak).0, baseline.0);
        Self {
            msr: saving(paper.unplanned_peak),
            msr_no_free: saving(paper.no_free),
            eor: ratio(paper.iteration.0, unplanned.0),
        }
    }

    pub fn cbr(&self) -> f64 {
        cbr(self.msr, self.eor)
    }

    pub fn cbr_no_free(&self) -> f64 {
        cbr(self.msr_no_free, self.eor)
    }
}

/// Saving over time ratio, to four decimals.
pub fn cbr(msr: f64, eor: f64) -> f64 {
    if eor > 0.0 { (msr / eor * 10_000.0).round() / 10_000.0 } else { 0.0 }
}

/// The papers' figures as a command's JSON has them, under `paper`.
pub fn to_json(paper: &Paper, unplanned: Nanos) -> Value {
    let shares = Shares::of(paper, unplanned);
    json!({
        "peak_bytes": paper.peak,
        "iteration_ns": paper.iteration,
        "unplanned_peak_bytes": paper.unplanned_peak,
        "no_free_bytes": paper.no_free,
        "msr": shares.msr, "msr_no_free": shares.msr_no_free, "eor": shares.eor,
        "cbr": shares.cbr(), "cbr_no_free": shares.cbr_no_free(),
        "extra": extra_json(&paper.extra),
    })
}

/// Extra time by cause.
pub fn extra_json(extra: &Extra) -> Value {
    json!({
        "recompute_ns": extra.recompute,
        "swap_in_ns": extra.swap_in,
        "swap_out_ns": extra.swap_out,
        "tail_ns": extra.tail,
        "contention_ns": i64::try_from(extra.contention).unwrap_or(i64::MAX),
    })
}

/// The papers' figures in a sentence.
pub fn told(paper: &Paper, unplanned: Nanos) -> String {
    let shares = Shares::of(paper, unplanned);
    format!(
        "by the papers' accounting: peak {} ({} bytes) of {} with liveness and {} freeing nothing, iteration {}; MSR {:.4} and {:.4}; EOR {:.4}; CBR {:.4} and {:.4}\n",
        paper.peak,
        paper.peak.0,
        paper.unplanned_peak,
        paper.no_free,
        paper.iteration,
        shares.msr,
        shares.msr_no_free,
        shares.eor,
        shares.cbr(),
        shares.cbr_no_free()
    )
}
