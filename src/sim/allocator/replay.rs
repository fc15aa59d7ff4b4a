//! Request sequences through an allocator: peaks, failures, and the smallest device that survives.
//! One replay, many replays in parallel, and the search for a capacity.

use super::{Allocator, BlockHandle, BlockView, Config, GRANULE, SegmentChange, Stats};
use crate::parallel::in_parallel;
use crate::requests::Request;
use crate::units::Bytes;

/// The largest device that is modelled, 64 TiB. It also stands for a device that is never full.
pub const LARGEST_DEVICE: Bytes = Bytes(1 << 46);

/// What a sequence did to an allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests replayed.
    pub events: u64,
    /// Counters at the end, and the peak of each counter on its own. Peaks are over the states
    /// between requests.
    pub stats: Stats,
    /// The counters when `reserved` was at its peak; of several such states the one with most bytes
    /// in use.
    pub at_peak: Stats,
    /// The index of the request after which this state first occurred.
    pub peak_index: u64,
    /// The index of the first request that failed.
    pub first_oom: Option<u64>,
}

/// A replay under way.
#[derive(Clone, Debug)]
pub struct Replay {
    allocator: Allocator,
    /// Block handles by id; `NOTHING` for an id without a block.
    handles: Vec<BlockHandle>,
    report: Report,
}

impl Replay {
    /// A replay before its first request. `memory_fraction` as in [`Allocator::new`].
    #[must_use]
    pub fn new(config: &Config, capacity: Bytes, memory_fraction: Option<f64>) -> Self {
        Self {
            allocator: Allocator::new(config, capacity, memory_fraction),
            handles: Vec::new(),
            report: Report::default(),
        }
    }

    /// Answers one request. Returns false if it was out of memory.
    pub fn step(&mut self, request: Request) -> bool {
        let mut ok = true;
        match request {
            Request::Allocate { id, bytes, stream } => {
                let id = id as usize;
                if id >= self.handles.len() {
                    self.handles.resize(id + 1, BlockHandle::NOTHING);
                }
                match self.allocator.allocate(bytes, stream) {
                    Ok(handle) => self.handles[id] = handle,
                    Err(_) => {
                        self.handles[id] = BlockHandle::NOTHING;
                        self.report.first_oom.get_or_insert(self.report.events);
                        ok = false;
                    }
                }
                let (now, peak) = (self.allocator.stats(), &self.report.at_peak);
                if now.reserved > peak.reserved
                    || now.reserved == peak.reserved && now.allocated > peak.allocated
                {
                    self.report.at_peak = *now;
                    self.report.peak_index = self.report.events;
                }
            }
            Request::Free { id } => {
                if let Some(handle) = self.handles.get_mut(id as usize) {
                    self.allocator.free(std::mem::replace(handle, BlockHandle::NOTHING));
                }
            }
            Request::EmptyCache => self.allocator.empty_cache(),
        }
        self.report.events += 1;
        ok
    }

    /// The allocator in its current state.
    #[must_use]
    pub const fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// The block that `id` holds; `None` when it holds none.
    #[must_use]
    pub fn block(&self, id: u32) -> Option<BlockView> {
        self.allocator.view(*self.handles.get(id as usize)?)
    }

    /// Records what is taken from the device and given back, for [`Replay::take_changes`].
    pub fn record(&mut self) {
        self.allocator.record();
    }

    /// As [`Core::take_changes`](super::Core::take_changes).
    pub fn take_changes(&mut self) -> Vec<SegmentChange> {
        self.allocator.take_changes()
    }

    /// The report over the requests so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut stats = *self.allocator.stats();
        stats.peak_reserved = self.report.at_peak.reserved;
        Report { stats, ..self.report }
    }
}

/// Replays all requests.
#[must_use]
pub fn replay(
    requests: &[Request],
    config: &Config,
    capacity: Bytes,
    memory_fraction: Option<f64>,
) -> Report {
    observe(requests, config, capacity, memory_fraction, |_, _, _| {})
}

/// Replays all requests. After each it calls `seen` with the request's index, whether it was
/// served, and the allocator.
pub fn observe(
    requests: &[Request],
    config: &Config,
    capacity: Bytes,
    memory_fraction: Option<f64>,
    mut seen: impl FnMut(usize, bool, &Allocator),
) -> Report {
    let mut replay = Replay::new(config, capacity, memory_fraction);
    for (index, request) in requests.iter().enumerate() {
        let ok = replay.step(*request);
        seen(index, ok, replay.allocator());
    }
    replay.report()
}

/// One setting of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The allocator's settings.
    pub config: Config,
    /// The device's capacity in bytes.
    pub capacity: Bytes,
    /// The memory fraction, as in [`Allocator::new`].
    pub memory_fraction: Option<f64>,
}

/// Replays the requests under every setting, on all cores. Reports are in the settings' order.
#[must_use]
pub fn sweep(requests: &[Request], settings: &[Setting]) -> Vec<Report> {
    in_parallel(settings.len(), |i| {
        let Setting { config, capacity, memory_fraction } = &settings[i];
        replay(requests, config, *capacity, *memory_fraction)
    })
}

/// A capacity at which no request of a sequence fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Smallest {
    /// Bytes, in whole granules. The sequence has been replayed on exactly this capacity.
    pub capacity: Bytes,
    /// Whether every smaller capacity is known to fail. A sequence can survive on one capacity and
    /// fail on a larger one, so without this proof a smaller capacity may do.
    pub proven: bool,
}

/// How many requests a search may replay before it stops with the best capacity found.
const EFFORT: u64 = 200_000_000;

/// The least capacity, in whole granules, at which no request fails; `None` if there is none up to
/// [`LARGEST_DEVICE`].
///
/// A bisection finds a capacity that survives. Then smaller ones are excluded from below. A replay
/// that fails does the same on every capacity up to the least one at which the device would have
/// granted a call that it refused, so the search jumps from one such capacity to the next. With a
/// memory fraction or growing segments, behaviour depends on the capacity in more ways, and every
/// granule is tried. [`Smallest::proven`] says whether the search was completed.
#[must_use]
pub fn smallest_capacity(
    requests: &[Request],
    config: &Config,
    memory_fraction: Option<f64>,
) -> Option<Smallest> {
    let granules = |bytes: u64| bytes.div_ceil(GRANULE) * GRANULE;
    let free = replay(requests, config, LARGEST_DEVICE, memory_fraction);
    if free.first_oom.is_some() {
        return None;
    }
    let fraction = memory_fraction.or(config.memory_fraction);
    let try_one = |capacity: u64| {
        let mut replay = Replay::new(config, Bytes(capacity), memory_fraction);
        let survives = requests.iter().all(|r| replay.step(*r));
        let refused = replay.allocator.device().refused().map_or(u64::MAX, |b| granules(b.0));
        let next =
            if fraction.is_some() || config.expandable { capacity + GRANULE } else { refused };
        (survives, next, replay.report.events)
    };
    let mut effort = free.events;
    // No smaller capacity survives: these bytes are requested at the same time.
    let least = granules(free.stats.peak_requested.0).max(GRANULE);
    let mut low = least;
    let mut high = granules(free.at_peak.reserved.0).max(low);
    loop {
        let (survives, _, events) = try_one(high);
        effort += events;
        if survives {
            break;
        }
        // With a memory fraction or segments rounded up to granules, the device must have more than
        // was reserved.
        low = high;
        high *= 2;
        if high > LARGEST_DEVICE.0 {
            return None;
        }
    }
    while low + GRANULE < high {
        let middle = granules(low + (high - low) / 2);
        let (survives, _, events) = try_one(middle);
        effort += events;
        if survives {
            high = middle;
        } else {
            low = middle;
        }
    }
    let mut capacity = least;
    while capacity < high && effort < EFFORT {
        let (survives, next, events) = try_one(capacity);
        effort += events;
        if survives {
            high = capacity;
        } else {
            capacity = next.max(capacity + GRANULE);
        }
    }
    Some(Smallest { capacity: Bytes(high), proven: capacity >= high })
}
