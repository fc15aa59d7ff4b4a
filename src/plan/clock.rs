//! The time that decisions cost: simulates operators and copies before anything has an address.
//!
//! It works as [`crate::sim::engine`], except that bytes change owner by slot: a residency that
//! begins in a slot waits for all swap-outs that must have ended by then. Placement can only relax
//! that. Copies start in the order of [`crate::emit`]. Cost: O((operators + copies) · log).

use super::residency::Residencies;
use crate::contract::Latency;
use crate::device::Link;
use crate::sim::engine::{rate, wait, work};
use crate::sim::program::Direction;
use crate::units::{Bytes, TensorId, id32};

/// The times of a job's operators.
#[derive(Clone, Debug)]
pub struct Clock {
    /// Start of each operator, and the end of the iteration.
    pub start: Vec<u64>,
    /// End of each operator, which is the start of the place after it.
    pub end: Vec<u64>,
    /// When all operators and copies have ended.
    pub total: u64,
    /// Copies that steps waited for: tensor, gap and nanoseconds waited.
    pub late: Vec<(TensorId, usize, u64)>,
}

impl Clock {
    /// The times without a plan.
    #[must_use]
    pub fn nominal(latencies: &[Latency]) -> Self {
        let mut now = 0;
        let (mut start, mut end) =
            (Vec::with_capacity(latencies.len() + 1), Vec::with_capacity(latencies.len()));
        for latency in latencies {
            start.push(now);
            now += latency.time.0;
            end.push(now);
        }
        start.push(now);
        Self { start, end, total: now, late: Vec::new() }
    }

    /// When an operator starts.
    #[must_use]
    pub fn start(&self, operator: u32) -> u64 {
        self.start[operator as usize]
    }

    /// When an operator ends.
    #[must_use]
    pub fn end(&self, operator: u32) -> u64 {
        self.end[operator as usize]
    }

    /// When a place begins: the end of the operator before it.
    #[must_use]
    pub fn place(&self, place: u32) -> u64 {
        place.checked_sub(1).map_or(0, |op| self.end[op as usize])
    }

    /// The time from which on a slot is needed: the beginning of a recompute's place, or the
    /// operator's start.
    #[must_use]
    pub fn slot(&self, slot: u32) -> u64 {
        if slot.is_multiple_of(2) { self.place(slot / 2) } else { self.start[slot as usize / 2] }
    }

    /// The slot of the last operator that starts before `instant`, but at least `least`.
    #[must_use]
    pub fn slot_before(&self, instant: u64, least: u32) -> u32 {
        let started = self.start[..self.end.len()].partition_point(|&t| t < instant);
        u32::try_from((2 * started).saturating_sub(1)).unwrap_or(u32::MAX).max(least)
    }

    /// The last place that begins at or before `instant`.
    #[must_use]
    pub fn place_by(&self, instant: u64) -> u32 {
        u32::try_from(self.end.partition_point(|&t| t <= instant)).unwrap_or(u32::MAX)
    }
}

/// A copy that was decided.
struct Item {
    /// Its position in the queue.
    rank: (u32, u64, u32),
    /// For a copy out, the last slot that it may take. For a copy in, the slot of the use that
    /// needs it.
    bound: u32,
    bytes: Bytes,
    of: (TensorId, usize),
}

/// The copies of one direction, in the order in which they run.
struct Queue {
    direction: Direction,
    items: Vec<Item>,
    /// The item that runs or starts next.
    next: usize,
    running: bool,
    /// Work that is left of the running item.
    left: u128,
    /// For each slot, how many items must have ended before it begins.
    ended: Vec<usize>,
}

impl Queue {
    /// Sorts the items. `slot` says which slot waits for an item.
    fn new(
        direction: Direction,
        mut items: Vec<Item>,
        slots: usize,
        slot: impl Fn(&Item) -> usize,
    ) -> Self {
        items.sort_unstable_by_key(|i| i.rank);
        let mut ended = vec![0usize; slots];
        for (position, item) in items.iter().enumerate() {
            let slot = slot(item).min(slots - 1);
            ended[slot] = ended[slot].max(position + 1);
        }
        Self { direction, items, next: 0, running: false, left: 0, ended }
    }

    /// Starts the next item.
    fn start(&mut self, link: &Link) {
        self.running = true;
        self.left = work(link, self.direction, self.items[self.next].bytes).max(1);
    }

    /// When the running item ends, if nothing else changes.
    fn end(&self, now: u64, link: &Link, both: bool) -> Option<u64> {
        self.running.then(|| {
            let left = wait(self.left, rate(link, self.direction, both));
            now.saturating_add(u64::try_from(left).unwrap_or(u64::MAX / 2))
        })
    }

    /// Lets some nanoseconds pass.
    fn pass(&mut self, passed: u128, link: &Link, both: bool) {
        if !self.running {
            return;
        }
        let done = passed * u128::from(rate(link, self.direction, both));
        self.left = self.left.saturating_sub(done);
        if self.left == 0 {
            self.running = false;
            self.next += 1;
        }
    }
}

/// Copies out and back, in this order.
fn queues(residencies: &Residencies<'_>, slots: usize) -> [Queue; 2] {
    let (mut outs, mut backs) = (Vec::new(), Vec::new());
    residencies.each_swap(|tensor, gap, w| {
        let bytes = residencies.graph.tensor(tensor).bytes;
        let of = (tensor, gap);
        if !residencies.clean(tensor, gap) {
            let rank = (residencies.out_place(tensor, gap, &w), w.starts.0, tensor.0);
            outs.push(Item { rank, bound: w.out_until, bytes, of });
        }
        let (_, b, _) = residencies.ends(tensor, gap);
        let rank = (w.back_from / 2, w.starts.1, tensor.0);
        backs.push(Item { rank, bound: b, bytes, of });
    });
    let mut out = Queue::new(Direction::D2h, outs, slots, |item| item.bound as usize + 1);
    // What had to leave before a slot had to leave before all later ones.
    for slot in 1..slots {
        out.ended[slot] = out.ended[slot].max(out.ended[slot - 1]);
    }
    [out, Queue::new(Direction::H2d, backs, slots, |item| item.bound as usize)]
}

/// A simulation under way.
struct Simulation<'a> {
    latencies: &'a [Latency],
    link: &'a Link,
    out: Queue,
    back: Queue,
    /// What each place computes again, in nanoseconds.
    remade: Vec<u64>,
    clock: Clock,
    now: u64,
    /// The slot that runs or begins next.
    slot: usize,
    /// When the slot before it ended.
    ready_at: u64,
    busy_until: Option<u64>,
}

impl Simulation<'_> {
    /// Starts the next operator or recompute, unless it has to wait for a copy.
    fn start_step(&mut self) {
        while self.busy_until.is_none() && self.slot < 2 * self.latencies.len() {
            let (slot, operator) = (self.slot, self.slot / 2);
            let recompute = slot.is_multiple_of(2);
            if recompute && self.remade[operator] == 0 {
                self.slot += 1;
                continue;
            }
            let (out, back) = (&self.out, &self.back);
            if out.next < out.ended[slot] || back.next < back.ended[slot] {
                break;
            }
            if self.now > self.ready_at {
                // The step waited for the copy that has just ended.
                let comes = back.ended[slot] > 0 && back.next == back.ended[slot];
                let queue = if comes { back } else { out };
                if let Some(item) = queue.next.checked_sub(1).map(|i| &queue.items[i]) {
                    self.clock.late.push((item.of.0, item.of.1, self.now - self.ready_at));
                }
            }
            let time = if recompute {
                self.remade[operator]
            } else {
                self.clock.start.push(self.now);
                self.latencies[operator].time.0.max(1)
            };
            self.busy_until = Some(self.now + time);
        }
    }

    /// Starts the next copy of each direction, where its place has come and its bytes are free.
    fn start_copies(&mut self) {
        let places = id32(self.clock.end.len());
        let startable = |queue: &Queue, out: Option<&Queue>| {
            !queue.running
                && queue.items.get(queue.next).is_some_and(|item| {
                    let place = item.rank.0;
                    place <= places && out.is_none_or(|o| o.next >= o.ended[2 * place as usize])
                })
        };
        // A copy back takes bytes, so it waits for what leaves before its place.
        if startable(&self.back, Some(&self.out)) {
            self.back.start(self.link);
        }
        if startable(&self.out, None) {
            self.out.start(self.link);
        }
    }

    /// Goes on to the next end of a step or copy; false where nothing runs.
    fn advance(&mut self) -> bool {
        let Self { link, now, .. } = *self;
        let both = self.out.running && self.back.running;
        let ends = [&self.back, &self.out].map(|queue| queue.end(now, link, both));
        let Some(next) = ends.into_iter().chain([self.busy_until]).flatten().min() else {
            return false;
        };
        for queue in [&mut self.back, &mut self.out] {
            queue.pass(u128::from(next - now), link, both);
        }
        self.now = next;
        if self.busy_until == Some(next) {
            if self.slot % 2 == 1 {
                self.clock.end.push(next);
            }
            self.slot += 1;
            self.busy_until = None;
            self.ready_at = next;
        }
        true
    }

    /// The times, after the last end.
    fn finish(self) -> Clock {
        let (mut clock, n) = (self.clock, self.latencies.len());
        // Items that never ran make the time infinite. This happens only if decisions contradict
        // each other.
        let left = [&self.back, &self.out].iter().any(|q| q.next < q.items.len());
        clock.total = if clock.end.len() < n || left { u64::MAX } else { self.now };
        clock.start.resize(n + 1, self.now);
        clock.end.resize(n, self.now);
        clock
    }
}

/// Simulates the decisions in `residencies`.
#[must_use]
pub fn run(residencies: &Residencies<'_>, latencies: &[Latency], link: &Link) -> Clock {
    let n = latencies.len();
    let [out, back] = queues(residencies, 2 * n + 2);
    let mut remade = vec![0u64; n + 1];
    for (&(slot, _), chain) in &residencies.chains {
        remade[slot as usize / 2] +=
            chain.operators.iter().map(|id| latencies[id.index()].time.0.max(1)).sum::<u64>();
    }
    let (start, end) = (Vec::with_capacity(n + 1), Vec::with_capacity(n));
    let mut simulation = Simulation {
        latencies,
        link,
        out,
        back,
        remade,
        clock: Clock { start, end, total: 0, late: Vec::new() },
        now: 0,
        slot: 0,
        ready_at: 0,
        busy_until: None,
    };
    loop {
        simulation.start_step();
        simulation.start_copies();
        if !simulation.advance() {
            return simulation.finish();
        }
    }
}
