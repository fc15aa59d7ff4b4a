//! The time that decisions cost: simulates operators and copies before anything has an address.
//!
//! It works as [`crate::sim::engine`], except that bytes change owner by slot: a residency that
//! begins in a slot waits for all swap-outs that must have ended by then. Placement can only relax
//! that. Copies start in the order of [`crate::emit`]. Cost: O((operators + copies) · log).

use super::residency::{Gap, Residencies};
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

struct Queue {
    direction: Direction,
    items: Vec<Item>,
    next: usize,
    running: bool,
    left: u128,
}

/// Simulates the decisions in `residencies`.
#[must_use]
pub fn run(residencies: &Residencies<'_>, latencies: &[Latency], link: &Link) -> Clock {
    let n = latencies.len();
    let (mut outs, mut backs) = (Vec::new(), Vec::new());
    for (tensor, gap, decision) in residencies.decisions() {
        let Gap::Swap(w) = decision else { continue };
        let bytes = residencies.graph.tensor(tensor).bytes;
        let of = (tensor, gap);
        if !residencies.clean(tensor, gap) {
            let rank = (w.out_place, w.starts.0, tensor.0);
            outs.push(Item { rank, bound: w.out_until, bytes, of });
        }
        let (_, b, _) = residencies.ends(tensor, gap);
        let rank = (w.back_from / 2, w.starts.1, tensor.0);
        backs.push(Item { rank, bound: b, bytes, of });
    }
    outs.sort_unstable_by_key(|i| i.rank);
    backs.sort_unstable_by_key(|i| i.rank);
    // For each slot, how many copies of each queue must have ended before it.
    let slots = 2 * n + 2;
    let (mut gone, mut here) = (vec![0usize; slots], vec![0usize; slots]);
    for (position, item) in outs.iter().enumerate() {
        let slot = (item.bound as usize + 1).min(slots - 1);
        gone[slot] = gone[slot].max(position + 1);
    }
    for slot in 1..slots {
        gone[slot] = gone[slot].max(gone[slot - 1]);
    }
    for (position, item) in backs.iter().enumerate() {
        let slot = item.bound as usize;
        here[slot] = here[slot].max(position + 1);
    }
    let mut remade = vec![0u64; n + 1];
    for (&(slot, _), chain) in &residencies.chains {
        remade[slot as usize / 2] +=
            chain.operators.iter().map(|id| latencies[id.index()].time.0.max(1)).sum::<u64>();
    }
    let queue = |direction, items| Queue { direction, items, next: 0, running: false, left: 0 };
    let mut queues = [queue(Direction::H2d, backs), queue(Direction::D2h, outs)];
    let mut clock = Clock {
        start: Vec::with_capacity(n + 1),
        end: Vec::with_capacity(n),
        total: 0,
        late: Vec::new(),
    };
    let (mut now, mut slot, mut ready_at, mut busy_until) = (0u64, 0usize, 0u64, None::<u64>);
    loop {
        // Start every item that can start.
        while busy_until.is_none() && slot < 2 * n {
            let recompute = slot % 2 == 0;
            if recompute && remade[slot / 2] == 0 {
                slot += 1;
                continue;
            }
            if queues[1].next < gone[slot] || queues[0].next < here[slot] {
                break;
            }
            if now > ready_at {
                let waited = now - ready_at;
                // The step waited for the copy that has just ended.
                let q = usize::from(here[slot] == 0 || queues[0].next != here[slot]);
                if let Some(item) = queues[q].next.checked_sub(1).map(|i| &queues[q].items[i]) {
                    clock.late.push((item.of.0, item.of.1, waited));
                }
            }
            let time = if recompute {
                remade[slot / 2]
            } else {
                clock.start.push(now);
                latencies[slot / 2].time.0.max(1)
            };
            busy_until = Some(now + time);
        }
        let places = id32(clock.end.len());
        for q in 0..2 {
            let done = queues[1].next;
            let queue = &mut queues[q];
            if !queue.running
                && let Some(item) = queue.items.get(queue.next)
                && item.rank.0 <= places
                && (q == 1 || done >= gone[2 * item.rank.0 as usize])
            {
                queue.running = true;
                queue.left = work(link, queue.direction, item.bytes).max(1);
            }
        }
        // Advance to the next end.
        let both = queues.iter().all(|q| q.running);
        let mut next = busy_until;
        for queue in &queues {
            if queue.running {
                let wait = wait(queue.left, rate(link, queue.direction, both));
                let at = now.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX / 2));
                next = Some(next.map_or(at, |n| n.min(at)));
            }
        }
        let Some(next) = next else { break };
        let passed = u128::from(next - now);
        now = next;
        for queue in &mut queues {
            if queue.running {
                queue.left = queue
                    .left
                    .saturating_sub(passed * u128::from(rate(link, queue.direction, both)));
                if queue.left == 0 {
                    queue.running = false;
                    queue.next += 1;
                }
            }
        }
        if busy_until == Some(now) {
            if slot % 2 == 1 {
                clock.end.push(now);
            }
            slot += 1;
            busy_until = None;
            ready_at = now;
        }
    }
    // Items that never ran make the time infinite. This happens only if decisions contradict each
    // other.
    let stuck = clock.end.len() < n || queues.iter().any(|q| q.next < q.items.len());
    clock.total = if stuck { u64::MAX } else { now };
    clock.start.resize(n + 1, now);
    clock.end.resize(n, now);
    clock
}
