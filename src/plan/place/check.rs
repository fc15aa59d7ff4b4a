//! Checks a layout by a sweep over time, with code that the search for layouts does not share.
//!
//! At each moment a map by address has the items that are alive. A new item is compared with its
//! two neighbours only. Cost: O(n log n).

use std::collections::BTreeMap;

/// Bytes `offset..offset + size`, held during the half-open `from..until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The owner, for the message.
    pub owner: usize,
    /// The first moment.
    pub from: u64,
    /// The first moment after.
    pub until: u64,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub size: u64,
}

/// What is wrong with a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Two items hold the same bytes at the same time.
    #[error("items {0} and {1} share bytes while both are alive")]
    Overlap(usize, usize),
    /// An item ends above the capacity.
    #[error("item {0} ends above the capacity")]
    TooHigh(usize),
}

/// The highest end of a layout that is correct.
///
/// # Errors
/// The fault that comes first in time.
pub fn check(all: &[Held], capacity: u64) -> Result<u64, Fault> {
    // At the same moment, ends come before beginnings.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * all.len());
    for (index, held) in all.iter().enumerate() {
        if held.offset.checked_add(held.size).is_none_or(|end| end > capacity) {
            return Err(Fault::TooHigh(held.owner));
        }
        if held.from < held.until && held.size > 0 {
            events.push((held.from, true, index));
            events.push((held.until, false, index));
        }
    }
    events.sort();
    let mut alive: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, begins, index) in events {
        let held = &all[index];
        if !begins {
            alive.remove(&held.offset);
            continue;
        }
        let end = |i: usize| all[i].offset + all[i].size;
        let below = alive.range(..=held.offset).next_back().filter(|&(_, &i)| end(i) > held.offset);
        let above = alive.range(held.offset..).next().filter(|&(&start, _)| start < end(index));
        if let Some((_, &other)) = below.or(above) {
            return Err(Fault::Overlap(all[other].owner, held.owner));
        }
        alive.insert(held.offset, index);
    }
    Ok(all.iter().map(|h| h.offset + h.size).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn boxes(raw: &[(u64, u64, u64, u64)]) -> Vec<Held> {
        let held = |(owner, &(from, length, offset, size))| Held {
            owner,
            from,
            until: from + length,
            offset,
            size,
        };
        raw.iter().enumerate().map(held).collect()
    }

    #[test]
    fn faults_have_names() {
        assert_eq!(check(&boxes(&[(0, 2, 0, 4), (2, 2, 0, 4), (0, 4, 4, 4)]), 8), Ok(8));
        assert_eq!(check(&boxes(&[(0, 3, 0, 4), (2, 2, 3, 4)]), 8), Err(Fault::Overlap(0, 1)));
        assert_eq!(check(&boxes(&[(0, 3, 2, 2), (2, 2, 0, 8)]), 8), Err(Fault::Overlap(0, 1)));
        assert_eq!(check(&boxes(&[(0, 3, 5, 4)]), 8), Err(Fault::TooHigh(0)));
        assert_eq!(check(&boxes(&[(0, 3, u64::MAX, 4)]), u64::MAX), Err(Fault::TooHigh(0)));
        assert_eq!(check(&[], 0), Ok(0));
    }

    proptest! {
        #[test]
        fn says_what_comparing_all_pairs_says(
            raw in proptest::collection::vec((0u64..20, 1u64..8, 0u64..20, 1u64..4), 0..8),
        ) {
            let all = boxes(&raw);
            let meet = |a: &Held, b: &Held| {
                a.from < b.until
                    && b.from < a.until
                    && a.offset < b.offset + b.size
                    && b.offset < a.offset + a.size
            };
            let clash = (0..all.len()).any(|i| (0..i).any(|j| meet(&all[i], &all[j])));
            prop_assert_eq!(check(&all, 100).is_err(), clash);
        }
    }
}
