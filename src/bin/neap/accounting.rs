//! Shares of memory and time as the papers define them, and the papers' accounting beside the
//! physical one.

use std::fmt;

use neap::sim::accounting::{Extra, Paper};
use neap::units::{Bytes, Nanos};
use serde::Serialize;

/// How memory and time are counted in reports. Plans are made and proved by physical accounting in
/// either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Accounting {
    /// As on the device: bytes count from the start of a copy or an operator, and the link's
    /// directions have separate queues.
    Physical,
    /// Also as the papers count: swap-ins and outputs from their end, no workspaces, and one copy
    /// at a time on the link.
    Paper,
}

/// `part / whole` to four decimals; 0 for an empty whole.
pub fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (u128::from(part) * 10_000 / u128::from(whole)) as f64 / 10_000.0 }
}

/// The median of some times, the upper one of an even number; 0 of none.
pub fn median(times: impl Iterator<Item = Nanos>) -> Nanos {
    let mut times: Vec<Nanos> = times.collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The saving of memory and the cost in time, as the papers define them.
#[derive(Clone, Copy, Serialize)]
pub struct Shares {
    /// Memory saving ratio against liveness: the share of the peak that is saved.
    pub msr: f64,
    /// The same against a run that never frees a tensor.
    pub msr_no_free: f64,
    /// Extra overhead ratio: planned time over unplanned time.
    pub eor: f64,
    /// Cost-benefit ratio: `msr / eor`.
    pub cbr: f64,
    /// `msr_no_free / eor`.
    pub cbr_no_free: f64,
}

impl Shares {
    /// The shares of a planned peak and time, against two baselines and an unplanned time.
    pub fn new(
        (peak, time): (Bytes, Nanos),
        (liveness, no_free): (Bytes, Bytes),
        unplanned: Nanos,
    ) -> Self {
        let saving = |baseline: Bytes| ratio(baseline.saturating_sub(peak).0, baseline.0);
        let (msr, msr_no_free, eor) =
            (saving(liveness), saving(no_free), ratio(time.0, unplanned.0));
        Self { msr, msr_no_free, eor, cbr: cbr(msr, eor), cbr_no_free: cbr(msr_no_free, eor) }
    }
}

/// Saving ratio divided by time ratio, to four decimals.
fn cbr(msr: f64, eor: f64) -> f64 {
    if eor > 0.0 { (msr / eor * 10_000.0).round() / 10_000.0 } else { 0.0 }
}

/// The papers' figures, under `paper` in a command's JSON.
#[derive(Serialize)]
pub struct PaperReport {
    pub peak_bytes: Bytes,
    pub iteration_ns: Nanos,
    pub unplanned_peak_bytes: Bytes,
    pub no_free_bytes: Bytes,
    #[serde(flatten)]
    pub shares: Shares,
    pub extra: ExtraReport,
}

impl PaperReport {
    pub fn new(paper: &Paper, unplanned: Nanos) -> Self {
        Self {
            peak_bytes: paper.peak,
            iteration_ns: paper.iteration,
            unplanned_peak_bytes: paper.unplanned_peak,
            no_free_bytes: paper.no_free,
            shares: Shares::new(
                (paper.peak, paper.iteration),
                (paper.unplanned_peak, paper.no_free),
                unplanned,
            ),
            extra: ExtraReport::new(&paper.extra),
        }
    }
}

impl fmt::Display for PaperReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.shares;
        writeln!(
            f,
            "by the papers' accounting: peak {} ({} bytes) of {} with liveness and {} freeing \
             nothing, iteration {}; MSR {:.4} and {:.4}; EOR {:.4}; CBR {:.4} and {:.4}",
            self.peak_bytes,
            self.peak_bytes.0,
            self.unplanned_peak_bytes,
            self.no_free_bytes,
            self.iteration_ns,
            s.msr,
            s.msr_no_free,
            s.eor,
            s.cbr,
            s.cbr_no_free
        )
    }
}

/// Time that a plan adds to an iteration, by cause.
#[derive(Default, Serialize)]
pub struct ExtraReport {
    pub recompute_ns: Nanos,
    pub swap_in_ns: Nanos,
    pub swap_out_ns: Nanos,
    pub tail_ns: Nanos,
    /// Negative where contention on the link hides other waiting.
    pub contention_ns: i64,
}

impl ExtraReport {
    pub fn new(extra: &Extra) -> Self {
        Self {
            recompute_ns: extra.recompute,
            swap_in_ns: extra.swap_in,
            swap_out_ns: extra.swap_out,
            tail_ns: extra.tail,
            contention_ns: i64::try_from(extra.contention).unwrap_or(i64::MAX),
        }
    }
}

impl fmt::Display for ExtraReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recompute_ns, swap_in_ns, swap_out_ns, tail_ns, contention_ns } = self;
        let causes = [recompute_ns, swap_in_ns, swap_out_ns, tail_ns].map(|n| i128::from(n.0));
        if causes.iter().sum::<i128>() + i128::from(*contention_ns) == 0 {
            return Ok(());
        }
        let sign = if *contention_ns < 0 { "-" } else { "" };
        let contention = Nanos(contention_ns.unsigned_abs());
        writeln!(
            f,
            "extra time: {recompute_ns} recomputing; waiting {swap_in_ns} for swap-ins, \
             {swap_out_ns} for swap-outs, {tail_ns} at the end without contention on the link; \
             {sign}{contention} contention"
        )
    }
}
