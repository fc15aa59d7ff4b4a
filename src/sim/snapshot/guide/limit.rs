//! What may have limited a recorded job: candidates, the likeliest first.

use super::Trace;
use crate::allocator::Allocator;
use crate::allocator::replay::LARGEST_DEVICE;
use crate::snapshot::Limit;
use crate::snapshot::words::Word;
use crate::units::Bytes;

/// Shares that are tried between the least and the most that the trace allows.
const STEPS: u64 = 24;

/// What a trace says about limits, in bytes.
#[derive(Clone, Copy)]
struct Bounds {
    /// The least share of the device that would have allowed all that was taken.
    least: u64,
    /// A share that would have allowed what failed is larger.
    most: u64,
    /// Whether memory was ever given back: without that and failures, nothing shows a limit.
    given: bool,
    failed: bool,
}

/// Limits under which the trace may have been recorded. A device that is as small as the most that
/// was held behaves as the device did, unless a share of it was the limit.
pub(super) fn candidates(trace: &Trace<'_>) -> Vec<Limit> {
    let bounds = bounds(trace);
    let whole = |bytes: u64| Limit { capacity: Bytes(bytes.min(LARGEST_DEVICE.0)), fraction: None };
    let held = u64::try_from(trace.past.most).unwrap_or(0);
    let device = trace.past.capacity.and_then(|c| u64::try_from(c).ok());
    let mut all = vec![whole(device.unwrap_or(LARGEST_DEVICE.0))];
    if !bounds.given && !bounds.failed {
        return all;
    }
    all.push(whole(held));
    let of = device.unwrap_or(LARGEST_DEVICE.0).clamp(1, LARGEST_DEVICE.0);
    // The allocator cuts a product to whole bytes: half a byte more is none.
    let share = |bytes: u64| Limit {
        capacity: Bytes(of),
        fraction: Some((bytes as f64 + 0.5) / of as f64).filter(|f| *f < 1.0),
    };
    all.push(share(bounds.least));
    if trace.config.expandable {
        // How far a segment may grow depends on the device, and decides between two that may.
        all.extend((1..=2 * STEPS).map(|n| whole(held.saturating_add(held / STEPS * n))));
    }
    if trace.config.gc_threshold.is_none() {
        return all;
    }
    // With garbage collection the share itself matters. People choose round ones.
    let most = bounds.most.min(bounds.least.saturating_mul(2));
    let within = |bytes: &u64| (bounds.least..=most).contains(bytes);
    if device.is_some() {
        #[expect(clippy::cast_possible_truncation, reason = "a share of what was a whole number")]
        let round = |percent: u64| (percent as f64 / 100.0 * of as f64) as u64;
        all.extend((1..100).map(round).filter(within).map(share));
    }
    let step = (most - bounds.least) / STEPS;
    all.extend((1..=STEPS).map(|n| bounds.least + n * step).filter(within).map(share));
    all
}

fn bounds(trace: &Trace<'_>) -> Bounds {
    let sizes = Allocator::new(&trace.config, LARGEST_DEVICE, Some(1.0));
    let mut bounds = Bounds { least: 0, most: u64::MAX, given: false, failed: false };
    // Held, and held before the present allocation took anything.
    let (mut held, mut before) = (0u64, None);
    for at in 0..trace.events.len() {
        let Some(e) = trace.at(at) else { continue };
        let size = e.size.unsigned_abs();
        match e.action {
            Word::SegmentAlloc | Word::SegmentMap => {
                before.get_or_insert(held);
                held = held.saturating_add(size);
            }
            Word::SegmentFree | Word::SegmentUnmap => {
                held = held.saturating_sub(size);
                bounds.given = true;
            }
            Word::Alloc => {
                if let Some(before) = before.take() {
                    let wanted = sizes.segment_for(size).saturating_add(before);
                    bounds.least = bounds.least.max(wanted).max(held);
                }
            }
            Word::Oom => {
                let before = before.take().unwrap_or(held);
                let wanted = sizes.segment_for(size).saturating_add(before);
                bounds.most = bounds.most.min(wanted.saturating_sub(1));
                bounds.failed = true;
            }
            _ => {}
        }
    }
    bounds.least = bounds.least.min(LARGEST_DEVICE.0);
    bounds.most = bounds.most.max(bounds.least);
    bounds
}
