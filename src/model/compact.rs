//! What the standard library compiles anew for every type, in little code: for places where a
//! program spends no time worth measuring.
//!
//! A sort is six kilobytes for each type and each key. Here one compiled sort orders places,
//! whatever stands there.

use std::cmp::Ordering;

/// The stable sorts of a slice, in little code; about half as fast as the standard library's.
pub trait CompactSort<T> {
    /// As [`slice::sort_by`].
    fn compact_sort_by(&mut self, compare: impl FnMut(&T, &T) -> Ordering);

    /// As [`slice::sort_by_key`].
    fn compact_sort_by_key<K: Ord>(&mut self, mut key: impl FnMut(&T) -> K) {
        self.compact_sort_by(|a, b| key(a).cmp(&key(b)));
    }

    /// As [`slice::sort`].
    fn compact_sort(&mut self)
    where
        T: Ord,
    {
        self.compact_sort_by(T::cmp);
    }
}

impl<T> CompactSort<T> for [T] {
    fn compact_sort_by(&mut self, compare: impl FnMut(&T, &T) -> Ordering) {
        if self.len() > 1 {
            sort(self.len(), &mut Places { items: self, compare });
        }
    }
}

/// What is sorted, by numbers of places. A closure would be compiled twice, once to be called only
/// once.
trait Sorted {
    fn compare(&mut self, a: usize, b: usize) -> Ordering;
    fn swap(&mut self, a: usize, b: usize);
}

struct Places<'a, T, F> {
    items: &'a mut [T],
    compare: F,
}

impl<T, F: FnMut(&T, &T) -> Ordering> Sorted for Places<'_, T, F> {
    fn compare(&mut self, a: usize, b: usize) -> Ordering {
        (self.compare)(&self.items[a], &self.items[b])
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.items.swap(a, b);
    }
}

/// Sorts numbers of places, then brings to each place what belongs there, by swaps of two.
#[inline(never)]
fn sort(count: usize, all: &mut dyn Sorted) {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|&a, &b| all.compare(a, b));
    for first in 0..count {
        // What was at `first` moves along until it is where it belongs.
        let mut at = first;
        loop {
            let from = std::mem::replace(&mut order[at], at);
            if from == first {
                break;
            }
            all.swap(at, from);
            at = from;
        }
    }
}

/// Collecting into a `BTreeMap` or `BTreeSet`, entry by entry.
pub trait Gather: Iterator + Sized {
    /// As [`Iterator::collect`], which would sort the entries first.
    fn gather<C: Default + Extend<Self::Item>>(self) -> C {
        let mut all = C::default();
        all.extend(self);
        all
    }
}

impl<I: Iterator> Gather for I {}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sorts_as_the_standard_library(list in prop::collection::vec(0u8..20, 0..60)) {
            let numbered: Vec<(u8, usize)> = list.into_iter().zip(0..).collect();
            let (mut ours, mut theirs) = (numbered.clone(), numbered);
            ours.compact_sort_by_key(|&(value, _)| value);
            theirs.sort_by_key(|&(value, _)| value);
            prop_assert_eq!(&ours, &theirs);
            ours.compact_sort_by(|a, b| b.0.cmp(&a.0));
            theirs.sort_by_key(|&(value, _)| Reverse(value));
            prop_assert_eq!(&ours, &theirs);
            ours.compact_sort();
            theirs.sort();
            prop_assert_eq!(&ours, &theirs);
            // The last of equal keys stays, in both.
            let map: BTreeMap<u8, usize> = ours.into_iter().gather();
            prop_assert_eq!(map, theirs.into_iter().collect::<BTreeMap<_, _>>());
        }
    }
}
