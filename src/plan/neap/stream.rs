//! Streaming: what one operator of the iteration alone uses (optimizer states, their pieces) comes
//! just before it and leaves right after it.
//!
//! Where a model's states are larger than the budget leaves room for, everything waits for the
//! link, and what counts is how few bytes move and how evenly. The greedy choice, slot by slot,
//! moves more than it needs to. Here some of these bytes are chosen before it, as evenly over time
//! as the link carries them, so that both directions are busy: one piece leaves while the next one
//! comes. [`super::improve`] tries several shares of the missing bytes.

use crate::residency::{Lifetime, Residencies};
use crate::units::TensorId;

/// What can be streamed: nothing generates it, and one operator uses it. With `parameters` also
/// what several use, which is away from the last of them to the next iteration.
#[must_use]
pub fn streamable(residencies: &Residencies<'_>, least: u64, parameters: bool) -> Vec<TensorId> {
    let may = |l: &Lifetime| {
        l.long_lived && l.bytes >= least && (l.uses.len() == 1 || parameters && l.uses.len() > 1)
    };
    let lifetimes = residencies.lifetimes.iter().enumerate();
    lifetimes.filter(|(_, l)| may(l)).map(|(index, _)| TensorId::from_index(index)).collect()
}

/// A tensor that may be streamed.
#[derive(Clone, Copy, Debug)]
pub struct Streamed {
    /// The tensor.
    pub tensor: TensorId,
    /// Its bytes.
    pub bytes: u64,
    /// How long its copies take while both directions are busy.
    pub time: u64,
    /// How long after the moment with the highest load it is used.
    pub after: u64,
    /// Whether it is streamed already.
    pub is: bool,
}

/// The positions of those that are used last and are not streamed yet, with at most `bytes`
/// together.
#[must_use]
pub fn last(all: &[Streamed], mut bytes: u64) -> Vec<usize> {
    let mut chosen = Vec::new();
    for (at, of) in all.iter().enumerate().rev() {
        if !of.is && of.bytes <= bytes {
            bytes -= of.bytes;
            chosen.push(at);
        }
    }
    chosen
}

/// As many more of these as have `wanted` bytes together, chosen so that the link can carry each of
/// them in by its use if all time after the peak is stretched by one factor, the smallest there is.
/// `all` stand in order of use; the positions of those chosen.
#[must_use]
pub fn spread(all: &[Streamed], wanted: u64) -> Vec<usize> {
    let chosen = |stretch: u128| {
        let mut busy = 0u128;
        let mut chosen = Vec::new();
        let mut bytes = 0;
        for (at, of) in all.iter().enumerate() {
            let until = busy + u128::from(of.time);
            if of.is {
                busy = until;
            } else if bytes < wanted && until * 1024 <= u128::from(of.after) * stretch {
                busy = until;
                bytes += of.bytes;
                chosen.push(at);
            }
        }
        (bytes, chosen)
    };
    let (mut low, mut high) = (0u128, 1024 << 6);
    while high - low > 8 {
        let middle = u128::midpoint(low, high);
        if chosen(middle).0 >= wanted { high = middle } else { low = middle }
    }
    chosen(high).1
}
