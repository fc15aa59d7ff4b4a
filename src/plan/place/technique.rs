//! The techniques of the exact search. Each can be switched off to measure its worth.
//!
//! Without a technique the search is slower, but never wrong.

/// A technique of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Technique {
    /// Items that no chain of overlaps connects are solved separately, from the start.
    Partition,
    /// The same again after every placement, for the remaining items.
    Decompose,
    /// A node is given up if, in some clique, the unplaced items whose bounds are at or above some
    /// height do not fit between that height and the capacity.
    Sections,
    /// The next item never lies below the one before, and not at the same height with a lower rank.
    Monotone,
    /// A passed item must lie on an unplaced item, so an unplaced item must come under it.
    Support,
    /// No item is placed where another would fit beneath it.
    Dominance,
    /// Of the choices, the lowest comes first; otherwise only the rank decides.
    Lowest,
    /// A placement that raises no other item has no alternatives.
    Free,
    /// Of items with equal size and life, the first comes first.
    Twins,
    /// Several ranks are tried in turn; otherwise only the first.
    Portfolio,
    /// A try with a rank is given up after some nodes, more in every round, and the next one
    /// begins. Otherwise the first try continues to the end.
    Restarts,
    /// If no failure below a placement involves the item's cliques, its alternatives are skipped.
    /// That may skip a layout, so a failure then proves nothing, and the search is repeated without
    /// skipping.
    Jump,
    /// In two rounds of three, items of cliques that failed often move to the front.
    Weights,
    /// In the other rounds every rank except the first is shuffled a little.
    Shuffle,
}

impl Technique {
    /// All techniques, with their names on the command line.
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

/// Options of the search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The most steps, which count the cliques of a node's unplaced items.
    pub effort: u64,
    /// The techniques to switch off.
    pub without: Vec<Technique>,
}

impl Options {
    fn with(&self, technique: Technique) -> bool {
        !self.without.contains(&technique)
    }
}

/// The techniques as separate flags.
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
    pub(super) fn new(options: &Options) -> Self {
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
