//! The parts of the exact search, each of which can be left out to see what it is worth.
//!
//! Leaving one out never makes a wrong answer, only a slower one.

/// A part of the search that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Technique {
    /// Items that no chain of overlaps connects are solved apart from one another, from the start.
    Partition,
    /// The same again after every placement, for what is left.
    Decompose,
    /// A node is given up when, in some clique, what is unplaced and at least so high does not fit
    /// above that height.
    Sections,
    /// The next item never lies below the one before, and not at the same height with a lower rank.
    Monotone,
    /// An item that is passed lies on something unplaced, and something unplaced must come in its
    /// way.
    Support,
    /// No item is placed where another would fit beneath it.
    Dominance,
    /// Lowest first among the choices; else by rank alone.
    Lowest,
    /// A placement that is in no other item's way has no alternatives.
    Free,
    /// Of items with equal size and life the first comes first.
    Twins,
    /// Several ranks in turn; else the first only.
    Portfolio,
    /// A try of a rank is given up after some nodes, a few more in every round, and the next
    /// begins; else the first try goes on to the end.
    Restarts,
    /// When no failure below a placement has to do with its item's time, its alternatives are
    /// skipped. That may skip a layout, too: what fails so proves nothing and is tried again
    /// without.
    Jump,
    /// In two rounds of three, items of cliques that failed often move forward.
    Weights,
    /// In the other rounds every rank is shuffled a little, but for the first.
    Shuffle,
}

impl Technique {
    /// All, with their names on the command line.
    pub const ALL: [(Self, &'static str); 14] = [
        (Self::Partition, "partition"),
        (Self::Decompose, "decompose"),
        (Self::Sections, "sections"),
        (Self::Monotone, "monotone"),
        (Self::Support, "support"),
        (Self::Dominance, "dominance"),
        (Self::Lowest, "lowest"),
        (Self::Free, "free"),
        (Self::Twins, "twins"),
        (Self::Portfolio, "portfolio"),
        (Self::Restarts, "restarts"),
        (Self::Jump, "jump"),
        (Self::Weights, "weights"),
        (Self::Shuffle, "shuffle"),
    ];
}

/// How to search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How many steps at most: looks at an item's clique.
    pub effort: u64,
    /// What to leave out.
    pub without: Vec<Technique>,
}

impl Options {
    fn with(&self, technique: Technique) -> bool {
        !self.without.contains(&technique)
    }
}

/// The techniques, unpacked.
#[allow(clippy::struct_excessive_bools, reason = "switches")]
pub(super) struct On {
    pub partition: bool,
    pub decompose: bool,
    pub sections: bool,
    pub monotone: bool,
    pub support: bool,
    pub dominance: bool,
    pub lowest: bool,
    pub free: bool,
    pub twins: bool,
    pub portfolio: bool,
    pub restarts: bool,
    pub jump: bool,
    pub weights: bool,
    pub shuffle: bool,
}

impl On {
    pub(super) fn of(options: &Options) -> Self {
        Self {
            partition: options.with(Technique::Partition),
            decompose: options.with(Technique::Decompose),
            sections: options.with(Technique::Sections),
            monotone: options.with(Technique::Monotone),
            support: options.with(Technique::Support) && options.with(Technique::Monotone),
            dominance: options.with(Technique::Dominance),
            lowest: options.with(Technique::Lowest),
            free: options.with(Technique::Free),
            twins: options.with(Technique::Twins),
            portfolio: options.with(Technique::Portfolio),
            restarts: options.with(Technique::Restarts),
            jump: options.with(Technique::Jump),
            weights: options.with(Technique::Weights),
            shuffle: options.with(Technique::Shuffle),
        }
    }
}
