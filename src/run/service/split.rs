//! Splits a plan's arena into two parts: bytes that a job keeps between iterations, and bytes that
//! only an iteration needs.
//!
//! The first part belongs to the job while it is resident. The second part may belong to another
//! job between iterations (Salus: persistent and ephemeral memory). Where jobs pass a window on
//! within their iterations, the window is the second part, and all else is kept. Addresses keep
//! their order within each part, so residencies that shared bytes still do, and the two parts
//! together are as large as the arena. If a residency lies across the edge between kept and other
//! bytes (it takes over the bytes of a parameter that is out, and more), its whole range is kept.

use crate::contract::Window;
use crate::sim::program::{Begin, Program, Residency};
use crate::units::Bytes;

/// A range of the arena and its place in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// The range in the plan's arena.
    from: u64,
    until: u64,
    kept: bool,
    /// Its first byte in its part.
    at: u64,
}

/// The two parts of an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Bytes kept between iterations.
    pub persistent: Bytes,
    /// Bytes needed while an iteration runs.
    pub ephemeral: Bytes,
    pieces: Vec<Piece>,
}

impl Split {
    /// Splits the ranges of the arena that a placed program uses; `window` is passed on within
    /// iterations.
    pub fn new(program: &Program, window: Option<&Window>) -> Self {
        let between = |r: &Residency| r.begin == Begin::Iteration || r.stays;
        let outside = |at: Bytes, w: &Window| at < w.offset || at.0 >= w.offset.0 + w.bytes.0;
        let (mut all, mut kept) = (Vec::with_capacity(program.residencies.len()), Vec::new());
        for r in &program.residencies {
            if let Some(offset) = r.offset.filter(|_| r.bytes > Bytes::ZERO) {
                let range = (offset.0, offset.0 + r.bytes.0);
                all.push(range);
                if window.map_or_else(|| between(r), |w| outside(offset, w)) {
                    kept.push(range);
                }
            }
        }
        let mut kept = union(kept);
        // Kept ranges grow by residencies that cross their edges, until none does.
        loop {
            let met = union(all.iter().copied().filter(|range| meets(&kept, *range)).collect());
            if met == kept {
                break;
            }
            kept = met;
        }
        // Bytes that the job never uses, such as other jobs' bytes between its own and a window,
        // belong to no residency here.
        let used = union(all);
        let mut edges: Vec<u64> = used.iter().chain(&kept).flat_map(|r| [r.0, r.1]).collect();
        edges.sort();
        edges.dedup();
        let (mut pieces, mut sizes) = (Vec::with_capacity(edges.len()), [0, 0]);
        for pair in edges.windows(2) {
            let (from, until) = (pair[0], pair[1]);
            if meets(&used, (from, until)) {
                let kept = meets(&kept, (from, until));
                let size = &mut sizes[usize::from(kept)];
                pieces.push(Piece { from, until, kept, at: *size });
                *size += until - from;
            }
        }
        let [ephemeral, persistent] = sizes.map(Bytes);
        Self { persistent, ephemeral, pieces }
    }

    /// The program with its two parts at these addresses.
    pub fn moved(&self, program: &Program, persistent: Bytes, ephemeral: Bytes) -> Program {
        let mut moved = program.clone();
        for r in &mut moved.residencies {
            r.offset = r.offset.map(|offset| {
                let at = self.pieces.partition_point(|p| p.until <= offset.0);
                // A residency of no bytes may have any address.
                self.pieces.get(at).filter(|p| p.from <= offset.0).map_or(persistent, |p| {
                    let base = if p.kept { persistent } else { ephemeral };
                    base + Bytes(p.at + offset.0 - p.from)
                })
            });
        }
        moved
    }
}

/// The union of ranges, as ranges that don't touch, in order.
fn union(mut all: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    all.sort();
    let mut union: Vec<(u64, u64)> = Vec::with_capacity(all.len());
    for (from, until) in all {
        match union.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ => union.push((from, until)),
        }
    }
    union
}

/// Whether a range meets one of these, which don't touch and are in order.
fn meets(ranges: &[(u64, u64)], (from, until): (u64, u64)) -> bool {
    ranges.get(ranges.partition_point(|r| r.1 <= from)).is_some_and(|r| r.0 < until)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::contract::Place;
    use crate::sim::window::Stretches;

    fn program(stretches: &[(u64, u64, bool)]) -> Program {
        let residency = |&(offset, bytes, kept): &(u64, u64, bool)| Residency {
            tensor: None,
            place: Place::Workspace { step: 0 },
            bytes: Bytes(bytes),
            begin: if kept { Begin::Iteration } else { Begin::Step(0) },
            first_step: None,
            last_step: None,
            out: None,
            stays: kept,
            offset: Some(Bytes(offset)),
            previous: None,
            after: Vec::new(),
        };
        Program {
            steps: Vec::new(),
            copies: Vec::new(),
            residencies: stretches.iter().map(residency).collect(),
            loaded: Bytes::ZERO,
            stretches: Stretches::default(),
        }
    }

    fn offsets(program: &Program) -> Vec<u64> {
        program.residencies.iter().map(|r| r.offset.unwrap().0).collect()
    }

    #[test]
    fn what_is_never_used_takes_no_room() {
        let p = program(&[(0, 10, true), (10, 5, false), (100, 20, false)]);
        let split = Split::new(&p, None);
        assert_eq!((split.persistent, split.ephemeral), (Bytes(10), Bytes(25)));
        assert_eq!(offsets(&split.moved(&p, Bytes(0), Bytes(50))), [0, 50, 55]);
        // Where 100..120 is a window, all else is kept.
        let window = Window { offset: Bytes(100), bytes: Bytes(64), hands_over_after: Vec::new() };
        let passed = Split::new(&p, Some(&window));
        assert_eq!((passed.persistent, passed.ephemeral), (Bytes(15), Bytes(20)));
    }

    #[test]
    fn what_is_kept_comes_first_wherever_it_was() {
        // Kept: 10..20 and 40..50; 45..60 crosses the second's edge, so all of 40..60 is kept.
        let p = program(&[
            (0, 10, false),
            (10, 10, true),
            (20, 20, false),
            (40, 10, true),
            (45, 15, false),
            (60, 5, false),
            (12, 4, false),
        ]);
        let split = Split::new(&p, None);
        assert_eq!((split.persistent, split.ephemeral), (Bytes(30), Bytes(35)));
        let moved = split.moved(&p, Bytes(1000), Bytes(2000));
        assert_eq!(offsets(&moved), [2000, 1000, 2010, 1010, 1015, 2030, 1002]);
        assert_eq!(
            Split::new(&program(&[]), None),
            Split { persistent: Bytes::ZERO, ephemeral: Bytes::ZERO, pieces: Vec::new() }
        );
    }

    proptest! {
        #[test]
        fn what_shared_bytes_shares_the_same_bytes_and_nothing_else_does(
            stretches in proptest::collection::vec((0u64..64, 0u64..16, any::<bool>()), 0..20),
        ) {
            let p = program(&stretches);
            let split = Split::new(&p, None);
            let (low, high) = (1000, 1000 + split.persistent.0);
            let moved = split.moved(&p, Bytes(low), Bytes(high));
            let all: Vec<(u64, u64)> =
                moved.residencies.iter().map(|r| (r.offset.unwrap().0, r.bytes.0)).collect();
            for (&(at, bytes), &(was, _, kept)) in all.iter().zip(&stretches) {
                if bytes > 0 {
                    prop_assert!(low <= at && at + bytes <= high + split.ephemeral.0);
                    prop_assert!(at >= high || at + bytes <= high, "it lies across both parts");
                    prop_assert!(!kept || at < high);
                    for (&(other, size), &(before, ..)) in
                        all.iter().zip(&stretches).filter(|o| o.0.1 > 0)
                    {
                        let (meet, met) = (
                            at < other + size && other < at + bytes,
                            was < before + size && before < was + bytes,
                        );
                        prop_assert_eq!(meet, met);
                        prop_assert!(!meet || at.wrapping_sub(other) == was.wrapping_sub(before));
                    }
                }
            }
        }
    }
}
