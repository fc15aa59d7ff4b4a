//! What the Python package recorded of one iteration, and what its executor can do with it.
//!
//! Operators, storages, saved tensors and ranges refer to each other by position in their lists.
//! This form is private to the package and the executable of one version.

use serde::Deserialize;

use crate::units::Bytes;

/// A script's iteration, as it is, and as it would be with updates inside backward.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    /// The name of the job.
    pub name: String,
    /// Every storage that an operator touches, in the order of their first appearance.
    pub storages: Vec<Storage>,
    /// The iteration as the script runs it.
    pub usual: Iteration,
    /// The same with updates inside backward, where the user allows it.
    pub soon: Option<Iteration>,
    /// Parameters that may leave during backward.
    pub lend: Vec<usize>,
    /// Where backward runs, of an iteration that calls it once.
    pub backward: Option<Backward>,
    /// Whether one operator of the optimizer's step updates many parameters.
    pub multi_tensor: bool,
    /// Whether optimizer states may stay on the host between their updates.
    pub move_states: bool,
    /// Storages below this many bytes stay.
    pub smallest: u64,
    /// A piece of the optimizer's step, where the budget asks for no smaller ones.
    pub piece: PieceSize,
}

/// How much a piece of the optimizer's step has.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceSize {
    /// The bytes of states that it should have.
    pub bytes: u64,
    /// The most parameters that it has.
    pub parameters: usize,
}

/// A storage.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Unique.
    pub name: String,
    /// Its bytes, unrounded.
    pub bytes: u64,
    /// What it is for.
    pub role: Role,
    /// The type of its elements.
    pub dtype: String,
}

impl Storage {
    /// The bytes that the allocator gives out for it.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        Bytes(self.bytes).in_blocks().0
    }
}

/// As far as planning tells storages apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A parameter.
    Parameter,
    /// A state of the optimizer.
    OptimizerState,
    /// Any other.
    Other,
}

/// The phases of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The forward, and what comes before it.
    Forward,
    /// Between the first and the last operator of backward.
    Backward,
    /// After backward.
    Optimize,
}

/// One iteration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iteration {
    /// In the script's order.
    pub operators: Vec<Operator>,
    /// What lives only for a part of it.
    pub lives: Vec<Life>,
    /// The tensors that autograd saved, in order.
    pub packs: Vec<Pack>,
    /// What can run again.
    pub ranges: Vec<Range>,
}

/// An operator.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operator {
    /// Unique in the iteration.
    pub name: String,
    /// Its time in nanoseconds.
    pub ns: u64,
    /// Its phase.
    pub phase: Phase,
    /// Whether it is the update of a single parameter, which was read off the optimizer's step.
    pub update: bool,
    /// Bytes of scratch.
    pub workspace: u64,
    /// All bytes that stand while it runs.
    pub standing: u64,
    /// What it reads.
    pub reads: Vec<usize>,
    /// What it writes that was there before.
    pub writes: Vec<usize>,
    /// What it makes.
    pub makes: Vec<usize>,
}

/// When a storage is there, in places of operators.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Life {
    /// The storage.
    pub storage: usize,
    /// The operator that makes it; nothing if it was there before.
    pub born: Option<usize>,
    /// The first place at which it is gone.
    pub end: usize,
    /// The first place at which nothing but autograd holds it.
    pub let_go: usize,
    /// The first saved tensor at which that is so: those that an operator saves after it has run
    /// come before its caller lets go of what it read.
    pub let_go_pack: usize,
    /// The place at which it is freed in the next iteration, where it stands over the end.
    pub until: Option<usize>,
    /// Whether something other than autograd holds what autograd saved of it.
    pub held: bool,
}

/// A saved tensor, in places of operators.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pack {
    /// Its storage.
    pub storage: Option<usize>,
    /// The path of the module that saved it.
    pub module: String,
    /// The place after it was saved.
    pub packed: usize,
    /// How many askings of the iteration came before: backward saves, too, what another run of it
    /// is going to ask for.
    pub order: u32,
    /// When backward asks for it within the iteration, in order: once for each run of backward
    /// through the graph.
    pub asked: Vec<Asked>,
}

/// One time at which backward asks for a saved tensor.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// The place before which it does.
    pub place: usize,
    /// How many askings of the iteration came before.
    pub order: u32,
}

/// A call of a module, or an operator, that can run again in backward in place of keeping what it
/// saved. Places are those of operators.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// The path of the call's module, or of the one around the operator.
    pub name: String,
    /// Its saved tensors, from the first to the one after the last; nothing for an
    /// operator.
    pub call: Option<(usize, usize)>,
    /// The call around it that can run again too.
    pub inside: Option<usize>,
    /// Its first operator.
    pub first: usize,
    /// The place at which running it again may stop.
    pub cut: usize,
    /// The place before which it runs again.
    pub again: usize,
    /// The place at which backward has asked for all of it.
    pub over: usize,
    /// How many saved tensors were asked for before the one that runs it again.
    pub order: u32,
    /// What it gives back meanwhile.
    pub brings: Vec<usize>,
    /// What it needs.
    pub inputs: Vec<usize>,
    /// The saved tensors that it makes.
    pub saved: Vec<usize>,
    /// The saved tensors that an operator runs again from.
    pub asked: Vec<usize>,
}

/// Where backward runs, in places of operators.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backward {
    /// Its first operator.
    pub begin: usize,
    /// The place after its last.
    pub end: usize,
}

/// What is wrong with a problem.
#[derive(Debug, thiserror::Error)]
#[error("{0} is out of range")]
pub struct ProblemError(String);

/// More bytes are no storage, and more nanoseconds no operator's.
const MOST: u64 = 1 << 46;

impl Problem {
    /// Checks that everything that is referred to is there.
    ///
    /// # Errors
    /// Names the first thing that is not.
    pub fn validate(&self) -> Result<(), ProblemError> {
        let storages = self.storages.len();
        let known = |what: &str, all: &[usize]| within(what, all, storages);
        let counted = |what: &str, count: u64| {
            if count <= MOST { Ok(()) } else { Err(ProblemError(format!("{what}, {count},"))) }
        };
        for storage in &self.storages {
            counted("the bytes of a storage", storage.bytes)?;
        }
        known("a parameter that may leave", &self.lend)?;
        for iteration in [Some(&self.usual), self.soon.as_ref()].into_iter().flatten() {
            let operators = iteration.operators.len();
            if operators == 0 {
                return Err(ProblemError("an iteration without operators".to_owned()));
            }
            for operator in &iteration.operators {
                counted("an operator's time", operator.ns)?;
                counted("an operator's workspace", operator.workspace)?;
                counted("what stands during an operator", operator.standing)?;
                for list in [&operator.reads, &operator.writes, &operator.makes] {
                    known("a storage of an operator", list)?;
                }
            }
            for life in &iteration.lives {
                known("the storage of a life", &[life.storage])?;
                let until = life.until.unwrap_or(0);
                let places = [life.born.unwrap_or(0), life.end, life.let_go, until];
                within("the place of a life", &places, operators + 1)?;
                within(
                    "the saved tensor of a life",
                    &[life.let_go_pack],
                    iteration.packs.len() + 1,
                )?;
            }
            for pack in &iteration.packs {
                known("the storage of a saved tensor", pack.storage.as_slice())?;
                let asked = pack.asked.iter().map(|asked| asked.place);
                let places: Vec<usize> = asked.chain([pack.packed]).collect();
                within("the place of a saved tensor", &places, operators + 1)?;
                if !pack.asked.is_sorted_by_key(|asked| (asked.place, asked.order)) {
                    return Err(ProblemError("a saved tensor asked for out of order".to_owned()));
                }
            }
            for (number, range) in iteration.ranges.iter().enumerate() {
                for list in [&range.brings, &range.inputs] {
                    known("a storage of a range", list)?;
                }
                for list in [&range.saved, &range.asked] {
                    within("a saved tensor of a range", list, iteration.packs.len())?;
                }
                let places = [range.first, range.cut, range.over];
                within("the place of a range", &places, operators + 1)?;
                within("the place at which a range runs again", &[range.again], operators)?;
                // Those around others come first.
                within("the call around a range", range.inside.as_slice(), number)?;
                if range.first >= range.cut || range.brings.is_empty() {
                    return Err(ProblemError("an empty range".to_owned()));
                }
            }
        }
        if let Some(backward) = self.backward {
            let places = [backward.begin, backward.end];
            within("the place of backward", &places, self.usual.operators.len() + 1)?;
            within("the first operator of backward", &[backward.begin], backward.end + 1)?;
        }
        Ok(())
    }
}

fn within(what: &str, all: &[usize], count: usize) -> Result<(), ProblemError> {
    match all.iter().find(|&&one| one >= count) {
        Some(one) => Err(ProblemError(format!("{what}, {one},"))),
        None => Ok(()),
    }
}
