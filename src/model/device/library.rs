//! The algorithm that a library chose for an operator, where it has several, and its workspace.
//!
//! `neap profile` records the choice, the table of latencies keeps it, the plan reserves the
//! workspace, and the run uses the same algorithm or stops with an error.

use std::collections::BTreeMap;

use super::key::key;
use super::table::Table;
use crate::job::Graph;
use crate::units::{Bytes, OpId};

/// More passes than any operator has.
const MOST: usize = 16;

/// A library's choice for an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Chosen {
    /// The library's number for each of the operator's passes, in order; -1 for a plain kernel.
    pub algorithms: Vec<i32>,
    /// Bytes of the workspace, which the passes use one after the other.
    pub workspace: Bytes,
}

impl Chosen {
    /// The algorithms as a table writes them: `1;-1`.
    #[must_use]
    pub fn text(&self) -> String {
        self.algorithms.iter().map(i32::to_string).collect::<Vec<_>>().join(";")
    }

    /// Reads what [`Chosen::text`] wrote; `None` where the text has another form.
    #[must_use]
    pub fn read(text: &str, workspace: Bytes) -> Option<Self> {
        let algorithms =
            text.split(';').map(|n| n.trim().parse().ok()).collect::<Option<Vec<i32>>>()?;
        let chosen = Self { algorithms, workspace };
        chosen.is_possible().then_some(chosen)
    }

    /// Whether a library can make such a choice.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        (1..=MOST).contains(&self.algorithms.len()) && self.algorithms.iter().all(|&a| a >= -1)
    }
}

/// The choices in `table` for the operators of `graph`.
#[must_use]
pub fn chosen(graph: &Graph, table: &Table) -> BTreeMap<OpId, Chosen> {
    let of =
        |(index, operator)| Some((OpId::from_index(index), table.chosen(&key(operator))?.clone()));
    graph.operators.iter().enumerate().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_read_back() {
        for (text, algorithms) in [("1", vec![1]), ("0;-1", vec![0, -1]), (" 7 ; 2", vec![7, 2])] {
            let chosen = Chosen::read(text, Bytes(512)).unwrap();
            assert_eq!(chosen, Chosen { algorithms, workspace: Bytes(512) });
            assert_eq!(Chosen::read(&chosen.text(), Bytes(512)), Some(chosen));
        }
        for bad in
            ["", ";", "winograd", "-2", "1;", "99999999999", "1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1;1"]
        {
            assert_eq!(Chosen::read(bad, Bytes::ZERO), None, "{bad}");
        }
    }
}
