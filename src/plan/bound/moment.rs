//! What may be away at one instant of a job, and the most bytes of it; proved in [`super`].

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A copy that lets a tensor be away.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copied {
    /// Its rank by density (bytes per nanosecond); 0 is the densest.
    pub(super) rank: u32,
    pub(super) bytes: u64,
    /// Its time, and its window at the operator's start without any waiting.
    pub(super) time: u64,
    pub(super) window: u64,
    /// It may leave in pieces.
    pub(super) loose: bool,
    /// Window and time of the copy of the same tensor in the other direction.
    pub(super) other: Option<(u64, u64)>,
}

/// A tensor that may be recomputed: its share of its writers' time, and the longest of these
/// operators.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recomputed {
    pub(super) bytes: u64,
    pub(super) cost: u64,
    pub(super) longest: u64,
}

/// The tensors that may be away during an operator.
#[derive(Clone, Debug, Default)]
pub(super) struct Moment {
    /// Copies in, and copies out of the tensors that need one, each sorted by window.
    pub(super) back: Vec<Copied>,
    pub(super) out: Vec<Copied>,
    /// Copies in of the tensors that need no copy out.
    pub(super) clean: Vec<Copied>,
    /// Tensors that may be recomputed, by falling bytes per nanosecond.
    pub(super) recompute: Vec<Recomputed>,
    /// Sum of the bytes that may be away.
    pub(super) all: u64,
    /// The iteration's time without any waiting.
    pub(super) period: u64,
    /// Of each tensor its bytes, and what its copies in both directions take while both are busy;
    /// by falling bytes per nanosecond.
    pub(super) copied: Vec<(u64, u64)>,
    /// The most of such time that fits into a nanosecond, in 1024ths.
    pub(super) width: u64,
}

impl Moment {
    /// The most bytes that can be away `offset` into the operator if the iteration takes `added`
    /// longer.
    pub(super) fn away(&self, added: u64, offset: u64) -> u64 {
        // Later instants leave less of the window to copies in and more to copies out.
        let period = self.period;
        let room_back = |window: u64| (window - offset).min(period).saturating_add(added);
        let room_out = |window: u64| (window + offset).min(period).saturating_add(added);
        let in_time = |c: &Copied| {
            c.loose
                || c.time <= room_back(c.window)
                    && c.other.is_none_or(|(window, time)| time <= room_out(window))
        };
        let out_in_time = |c: &Copied| {
            c.loose
                || c.time <= room_out(c.window)
                    && c.other.is_none_or(|(window, time)| time <= room_back(window))
        };
        let back = most(&self.back, in_time, room_back);
        let clean: u64 = self.clean.iter().filter(|c| in_time(c)).map(|c| c.bytes).sum();
        let out = clean + most(&self.out, out_in_time, room_out);
        let copied = self.copied(added);
        self.all.min(back.min(out).min(copied) + self.recomputed(added))
    }

    /// The most bytes whose copies fit into one iteration, in both directions together.
    fn copied(&self, added: u64) -> u64 {
        let all = u128::from(self.period) + u128::from(added);
        let mut left = (all * u128::from(self.width)).div_ceil(1024);
        let mut bytes = 0;
        for &(of, time) in &self.copied {
            let time = u128::from(time);
            if time > left {
                let left = u64::try_from(left).unwrap_or(u64::MAX);
                return bytes + share(of, left, u64::try_from(time).unwrap_or(u64::MAX));
            }
            left -= time;
            bytes += of;
        }
        bytes
    }

    fn recomputed(&self, added: u64) -> u64 {
        let (mut left, mut bytes) = (added, 0);
        for item in self.recompute.iter().filter(|r| r.longest <= added) {
            if item.cost > left {
                return bytes + share(item.bytes, left, item.cost);
            }
            left -= item.cost;
            bytes += item.bytes;
        }
        bytes
    }
}

/// `bytes · part / whole`, rounded up.
fn share(bytes: u64, part: u64, whole: u64) -> u64 {
    u64::try_from((u128::from(bytes) * u128::from(part)).div_ceil(u128::from(whole.max(1))))
        .unwrap_or(bytes)
}

/// Compares densities in bytes per nanosecond.
pub(super) fn denser(bytes_a: u64, time_a: u64, bytes_b: u64, time_b: u64) -> Ordering {
    (u128::from(bytes_a) * u128::from(time_b)).cmp(&(u128::from(bytes_b) * u128::from(time_a)))
}

/// Sorts copies by window, and ranks them by density.
pub(super) fn rank(copies: &mut [Copied]) {
    copies.sort_unstable_by_key(|c| c.window);
    let mut order: Vec<(u64, u64, u32)> =
        (0u32..).zip(&*copies).map(|(at, c)| (c.bytes, c.time, at)).collect();
    order.sort_unstable_by(|a, b| denser(b.0, b.1, a.0, a.1));
    let (mut rank, mut last) = (0, order.first().map_or((0, 0), |o| (o.0, o.1)));
    for (bytes, time, at) in order {
        rank += u32::from(denser(bytes, time, last.0, last.1).is_ne());
        last = (bytes, time);
        copies[at as usize].rank = rank;
    }
}

/// A chosen copy by rank and position. The heap's first is the least dense.
struct LeastDense(u32, u32);

impl Ord for LeastDense {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.cmp(&other.0)
    }
}
impl PartialOrd for LeastDense {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for LeastDense {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl Eq for LeastDense {}

/// The most bytes of copies, sorted by window, that fit into their nested windows; rounded up.
fn most(copies: &[Copied], fits: impl Fn(&Copied) -> bool, room: impl Fn(u64) -> u64) -> u64 {
    let mut chosen: BinaryHeap<LeastDense> = BinaryHeap::with_capacity(copies.len());
    // The part of each copy that is still chosen.
    let mut left: Vec<u64> = copies.iter().map(|c| c.time).collect();
    let mut taken: u128 = 0;
    for (position, copy) in (0u32..).zip(copies).filter(|(_, copy)| fits(copy)) {
        taken += u128::from(copy.time);
        chosen.push(LeastDense(copy.rank, position));
        let room = u128::from(room(copy.window));
        while taken > room {
            let Some(LeastDense(rank, position)) = chosen.pop() else { break };
            let left = &mut left[position as usize];
            let over = taken - room;
            if over >= u128::from(*left) {
                taken -= u128::from(*left);
            } else {
                *left -= u64::try_from(over).unwrap_or(*left);
                taken = room;
                chosen.push(LeastDense(rank, position));
            }
        }
    }
    let bytes = |LeastDense(_, position): LeastDense| {
        let (copy, left) = (&copies[position as usize], left[position as usize]);
        if left == copy.time { copy.bytes } else { share(copy.bytes, left, copy.time) }
    };
    chosen.into_iter().map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_in_a_period_takes_the_link_at_most_twice() {
        let moment = |period| Moment {
            period,
            width: 2048,
            copied: vec![(100, 10), (50, 10)],
            ..Moment::default()
        };
        let most = [(10, 0), (10, 5), (5, 0), (5, 2), (0, 1)]
            .map(|(period, added)| moment(period).copied(added));
        assert_eq!(most, [150, 150, 100, 120, 20]);
    }
}
