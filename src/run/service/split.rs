//! A plan's arena cut in two: what a job keeps between iterations, and what only an iteration needs.
//!
//! The first part must stay the job's own while it is resident, the second may be another job's between its iterations (Salus: persistent
//! and ephemeral memory). No tensor moves within its part, so the plan is what it was: the two together are as large as the arena, and
//! bytes that were shared still are. Whatever lies across the edge between what is kept and what is not (it takes over bytes of a parameter that
//! is out, and others) makes its stretch kept as a whole. Not for: where the two parts lie.

use crate::sim::program::{Begin, Program};
use crate::units::Bytes;

/// Where a part of the arena went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// Its stretch of the plan's arena.
    from: u64,
    until: u64,
    kept: bool,
    /// Where it begins in its part.
    at: u64,
}

/// The two parts of an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Kept between iterations.
    pub persistent: Bytes,
    /// Needed while an iteration runs.
    pub ephemeral: Bytes,
    pieces: Vec<Piece>,
}

impl Split {
    /// Cuts the stretch of the arena that a placed program uses.
    #[must_use]
    pub fn of(program: &Program) -> Self {
        let mut all: Vec<(u64, u64, bool)> = Vec::with_capacity(program.residencies.len());
        for r in &program.residencies {
            if let Some(offset) = r.offset.filter(|_| r.bytes > Bytes::ZERO) {
                all.push((offset.0, offset.0 + r.bytes.0, r.begin == Begin::Iteration || r.stays));
            }
        }
        // Stretches that are kept grow by whatever lies across their edges, until nothing does.
        let mut kept = union(all.iter().filter(|r| r.2).map(|r| (r.0, r.1)).collect());
        loop {
            let crosses = |&&(from, until, _): &&(u64, u64, bool)| {
                let first = kept.partition_point(|k: &(u64, u64)| k.1 <= from);
                kept.get(first).is_some_and(|k| k.0 < until && !(k.0 <= from && until <= k.1))
            };
            let more: Vec<(u64, u64)> = all.iter().filter(crosses).map(|r| (r.0, r.1)).collect();
            if more.is_empty() {
                break;
            }
            kept = union(kept.into_iter().chain(more).collect());
        }
        let (low, high) = (all.iter().map(|r| r.0).min().unwrap_or(0), all.iter().map(|r| r.1).max().unwrap_or(0));
        let mut pieces = Vec::with_capacity(2 * kept.len() + 1);
        let (mut end, mut persistent, mut ephemeral) = (low, 0, 0);
        for (from, until) in kept.into_iter().chain([(high, high)]) {
            if end < from {
                pieces.push(Piece { from: end, until: from, kept: false, at: ephemeral });
                ephemeral += from - end;
            }
            if from < until {
                pieces.push(Piece { from, until, kept: true, at: persistent });
                persistent += until - from;
            }
            end = until;
        }
        Self { persistent: Bytes(persistent), ephemeral: Bytes(ephemeral), pieces }
    }

    /// The program with its parts at these addresses.
    #[must_use]
    pub fn moved(&self, program: &Program, persistent: Bytes, ephemeral: Bytes) -> Program {
        let mut moved = program.clone();
        for r in &mut moved.residencies {
            r.offset = r.offset.map(|offset| {
                let at = self.pieces.partition_point(|p| p.until <= offset.0);
                // What has no bytes may lie anywhere.
                self.pieces.get(at).filter(|p| p.from <= offset.0).map_or(persistent, |p| {
                    let base = if p.kept { persistent } else { ephemeral };
                    base + Bytes(p.at + offset.0 - p.from)
                })
            });
        }
        moved
    }
}

/// Stretches that touch no other, in order.
fn union(mut all: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    all.sort_unstable();
    let mut union: Vec<(u64, u64)> = Vec::with_capacity(all.len());
    for (from, until) in all {
        match union.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ => union.push((from, until)),
        }
    }
    union
}
