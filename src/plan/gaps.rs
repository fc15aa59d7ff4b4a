//! What is decided for the gaps between a tensor's uses. Nearly all gaps of nearly all tensors are
//! kept, so only the others are listed.

use std::ops::Index;

use super::residency::Gap;

/// Decisions by gap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gaps {
    count: usize,
    /// What is not kept, ascending by gap.
    others: Vec<(usize, Gap)>,
}

impl Gaps {
    /// `count` gaps, all kept.
    #[must_use]
    pub const fn kept(count: usize) -> Self {
        Self { count, others: Vec::new() }
    }

    /// How many gaps there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The gaps that are not kept, ascending, with what is decided for them.
    pub fn others(&self) -> impl DoubleEndedIterator<Item = (usize, Gap)> + '_ {
        self.others.iter().copied()
    }

    /// Decides a gap.
    pub fn set(&mut self, gap: usize, decision: Gap) {
        match (self.others.binary_search_by_key(&gap, |other| other.0), decision) {
            (Ok(at), Gap::Keep) => drop(self.others.remove(at)),
            (Ok(at), _) => self.others[at].1 = decision,
            (Err(_), Gap::Keep) => {}
            (Err(at), _) => self.others.insert(at, (gap, decision)),
        }
    }

    /// Adds a gap that is kept before gap `at`, or at the end.
    pub fn insert(&mut self, at: usize) {
        self.count += 1;
        self.others.iter_mut().filter(|other| other.0 >= at).for_each(|other| other.0 += 1);
    }
}

impl Index<usize> for Gaps {
    type Output = Gap;

    fn index(&self, gap: usize) -> &Gap {
        match self.others.binary_search_by_key(&gap, |other| other.0) {
            Ok(at) => &self.others[at].1,
            Err(_) => &Gap::Keep,
        }
    }
}

impl FromIterator<Gap> for Gaps {
    fn from_iter<I: IntoIterator<Item = Gap>>(decisions: I) -> Self {
        let mut gaps = Self::default();
        for (gap, decision) in decisions.into_iter().enumerate() {
            gaps.insert(gap);
            gaps.set(gap, decision);
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn gaps_are_a_list_of_decisions(
            steps in prop::collection::vec((0usize..8, 0usize..4), 0..40),
        ) {
            let (mut gaps, mut list) = (Gaps::default(), Vec::new());
            for (at, step) in steps {
                let decision = if step == 1 { Gap::Keep } else { Gap::Recompute };
                if step == 0 {
                    gaps.insert(at.min(list.len()));
                    list.insert(at.min(list.len()), Gap::Keep);
                } else if at < list.len() {
                    gaps.set(at, decision);
                    list[at] = decision;
                }
                prop_assert_eq!(gaps.len(), list.len());
                prop_assert!((0..list.len()).all(|gap| gaps[gap] == list[gap]));
                let others = list.iter().copied().enumerate().filter(|one| one.1 != Gap::Keep);
                prop_assert!(gaps.others().eq(others));
                prop_assert_eq!(&gaps, &list.iter().copied().collect());
            }
        }
    }
}
