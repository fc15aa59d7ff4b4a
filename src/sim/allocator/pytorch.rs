//! The rules of `PyTorch`'s CUDA caching allocator in version 2.11: rounding, pools, splitting, and
//! which memory is given back before the device is asked again.
//!
//! Stream events are not modelled, because a sequence says when a free completed. A private pool
//! (of a CUDA graph, or a `MemPool`) is a stream of its own. Source: `PyTorch`'s public source,
//! compared with the allocator itself request by request.

use super::config::Config;
use super::core::{Core, Rules, Step, Want};
use super::device::Device;
use crate::units::{BLOCK, Bytes};

/// The largest request that the small pool serves.
const SMALL: u64 = 1 << 20;
/// The small pool's segments.
const SMALL_SEGMENT: u64 = 2 << 20;
/// From here on a request gets a segment of its own size …
const OWN_SEGMENT: u64 = 10 << 20;
/// … rounded up to this.
const ROUND_SEGMENT: u64 = 2 << 20;

/// The pools of a stream.
const SMALL_POOL: usize = 0;
const LARGE_POOL: usize = 1;

/// `PyTorch`'s caching allocator over a device.
pub type Allocator = Core<PyTorch>;

/// A configuration on a device.
#[derive(Clone, Debug)]
pub struct PyTorch {
    /// Blocks of at least this size are not split; `u64::MAX` where all may be split.
    max_split: u64,
    max_non_split_rounding: u64,
    large_segment: u64,
    divisions: [u64; 16],
    expandable: bool,
    /// The most bytes that may be reserved, where a memory fraction is set.
    allowed: Option<u64>,
    /// Reserved bytes above which old segments are given back.
    collect_above: Option<u64>,
}

impl Allocator {
    /// An empty allocator on a device of `capacity` bytes. `memory_fraction` (in [0, 1]) is
    /// `set_per_process_memory_fraction`; `None` takes the configuration's.
    #[must_use]
    pub fn new(config: &Config, capacity: Bytes, memory_fraction: Option<f64>) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a float saturates")]
        let share = |whole: u64, part: f64| (part * whole as f64) as u64;
        // A fraction of 1 is no limit, and without a limit there is no garbage collection.
        let fraction = memory_fraction.or(config.memory_fraction).filter(|f| *f < 1.0);
        let allowed = fraction.map(|f| share(capacity.0, f));
        let rules = PyTorch {
            max_split: config.max_split.map_or(u64::MAX, |b| b.0),
            max_non_split_rounding: config.max_non_split_rounding.unwrap_or(config.large_segment).0,
            large_segment: config.large_segment.0,
            divisions: config.divisions,
            expandable: config.expandable,
            allowed,
            collect_above: allowed.zip(config.gc_threshold).map(|(a, t)| share(a, t)),
        };
        Self::over(rules, Device::new(capacity))
    }
}

impl Allocator {
    /// The size of the segment that a request of `bytes` would be given, were there no free block.
    pub(crate) fn segment_for(&self, bytes: u64) -> u64 {
        self.rules.want(bytes, 0).segment
    }
}

impl PyTorch {
    fn round(&self, bytes: u64) -> u64 {
        if bytes < BLOCK {
            return BLOCK;
        }
        let divisions = self.divisions[(bytes.ilog2().saturating_sub(20) as usize).min(15)];
        if divisions <= 1 || bytes <= BLOCK.wrapping_mul(divisions) {
            return bytes.next_multiple_of(BLOCK);
        }
        if bytes.is_power_of_two() {
            return bytes;
        }
        let floor = 1 << bytes.ilog2();
        match floor >> divisions.ilog2() {
            0 => floor << 1,
            step => bytes.next_multiple_of(step),
        }
    }
}

impl Rules for PyTorch {
    const POOLS: usize = 2;

    fn want(&self, bytes: u64, stream: u32) -> Want {
        let size = self.round(bytes);
        let (pool, segment) = if size <= SMALL {
            (SMALL_POOL, SMALL_SEGMENT)
        } else if size < OWN_SEGMENT {
            (LARGE_POOL, self.large_segment)
        } else {
            (LARGE_POOL, size.next_multiple_of(ROUND_SEGMENT))
        };
        Want { size, segment, pool, stream }
    }

    fn fits(&self, want: &Want, block: u64) -> bool {
        if want.size < self.max_split {
            block < self.max_split
        } else {
            block < want.size.saturating_add(self.max_non_split_rounding)
        }
    }

    fn splits(&self, want: &Want, block: u64) -> bool {
        let rest = block - want.size;
        if want.pool == SMALL_POOL || self.expandable {
            rest >= BLOCK
        } else {
            want.size < self.max_split && rest > SMALL
        }
    }

    fn page(&self, pool: usize) -> Option<u64> {
        self.expandable.then_some(if pool == SMALL_POOL {
            SMALL_SEGMENT
        } else {
            self.large_segment
        })
    }

    fn allows(&self, reserved: u64, segment: u64) -> bool {
        self.allowed.is_none_or(|a| reserved + segment <= a)
    }

    fn before_asking(core: &mut Core<Self>, want: &Want, step: u32) -> Step {
        match step {
            0 => {
                collect_garbage(core);
                Step::Ask { retry: false }
            }
            1 if release_available(core, want) => Step::Ask { retry: false },
            1 => Step::Next,
            2 => {
                core.empty_cache();
                Step::Ask { retry: true }
            }
            _ => Step::GiveUp,
        }
    }
}

/// While more than the threshold is reserved, gives back the large pool's unsplit segments that are
/// older than average.
fn collect_garbage(core: &mut Allocator) {
    let Some(threshold) = core.rules.collect_above else { return };
    let Some(target) = core.stats().reserved.0.checked_sub(threshold).filter(|t| *t > 0) else {
        return;
    };
    let mut left = core.releasable(LARGE_POOL);
    let mut age: u64 = left.iter().map(|(_, age)| age).sum();
    let mut reclaimed = 0;
    while reclaimed < target && !left.is_empty() {
        // One correctly rounded division, as in PyTorch: the same on every machine.
        let mean = age as f64 / left.len() as f64;
        let before = left.len();
        left.retain(|&(block, its)| {
            if (its as f64) < mean {
                return true;
            }
            reclaimed += core.block(block).size;
            age -= its;
            core.release(block);
            false
        });
        if left.len() == before {
            break;
        }
    }
}

/// Used where a largest splittable size is set: gives back one block that is large enough, or the
/// largest unsplittable blocks until their sum is. Returns whether that was enough.
fn release_available(core: &mut Allocator, want: &Want) -> bool {
    let least = core.rules.max_split;
    if least == u64::MAX {
        return false;
    }
    let wanted = want.size.max(least);
    let (enough, _) = core.at_least(want, wanted);
    if let Some(block) = enough.filter(|b| !core.grows(*b)) {
        core.release(block);
        return true;
    }
    let mut released = 0;
    while released < wanted {
        let (_, Some(largest)) = core.at_least(want, 0) else { break };
        if core.block(largest).size < least || core.grows(largest) {
            break;
        }
        released += core.block(largest).size;
        core.release(largest);
    }
    released >= wanted
}
