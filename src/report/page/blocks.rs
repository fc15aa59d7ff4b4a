//! What the layers of a chart consist of: blocks of memory, each from where to where.

use std::collections::HashMap;

use serde::{Serialize, Serializer};

use crate::units::Bytes;

/// The most blocks that a page lists one by one; of more, the largest.
const MOST: usize = 300_000;

/// What is known of a block besides its size. Empty texts are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Label {
    /// Its name, such as that of a parameter or of the operator that made it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The module in which it was made.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub module: String,
    /// The line of the script that made it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub line: String,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    from: u64,
    /// The position from which on it is gone; `None` while it lives.
    until: Option<u64>,
    bytes: u64,
    layer: u8,
    label: u32,
}

/// Blocks in the order of their beginning.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    all: Vec<Block>,
    /// Indices into `all` of those that live, by id.
    living: HashMap<u32, usize>,
    labels: Vec<Label>,
    known: HashMap<Label, u32>,
}

impl Blocks {
    /// A block of a layer begins at a position, which is at least that of the call before. Its id
    /// is that of no block that lives.
    pub fn begin(&mut self, id: u32, from: u64, bytes: Bytes, layer: usize, label: Label) {
        let label = *self.known.entry(label).or_insert_with_key(|label| {
            self.labels.push(label.clone());
            self.labels.len() as u32 - 1
        });
        let layer = u8::try_from(layer).unwrap_or(u8::MAX);
        self.living.insert(id, self.all.len());
        self.all.push(Block { from, until: None, bytes: bytes.0, layer, label });
    }

    /// The block with this id ends at a position. Returns its layer and bytes; `None` if no such
    /// block lives.
    pub fn end(&mut self, id: u32, until: u64) -> Option<(usize, Bytes)> {
        let block = &mut self.all[self.living.remove(&id)?];
        block.until = Some(until);
        Some((usize::from(block.layer), Bytes(block.bytes)))
    }

    /// The blocks that a page lists, and how many smaller ones it leaves out.
    fn listed(&self) -> (Vec<Block>, usize) {
        let Some(more) = self.all.len().checked_sub(MOST).filter(|more| *more > 0) else {
            return (self.all.clone(), 0);
        };
        let mut sizes: Vec<u64> = self.all.iter().map(|b| b.bytes).collect();
        let (_, least, _) = sizes.select_nth_unstable(more);
        let least = *least;
        let larger = self.all.iter().filter(|b| b.bytes > least).count();
        // Of those that are as large as the smallest listed one, the first.
        let mut equal = MOST - larger;
        let kept = self.all.iter().filter(|b| {
            let last = b.bytes == least && equal > 0;
            equal -= usize::from(last);
            b.bytes > least || last
        });
        (kept.copied().collect(), more)
    }
}

/// As columns, which take less than rows: positions as the difference to the block before, lives as
/// one more than their length, 0 for a block that lives to the end.
impl Serialize for Blocks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Columns<'a> {
            from: Vec<u64>,
            life: Vec<u64>,
            bytes: Vec<u64>,
            layer: Vec<u8>,
            label: Vec<u32>,
            labels: &'a [Label],
            left_out: usize,
        }
        let (blocks, left_out) = self.listed();
        let mut before = 0;
        let step = |b: &Block| b.from - std::mem::replace(&mut before, b.from);
        Columns {
            from: blocks.iter().map(step).collect(),
            life: blocks.iter().map(|b| b.until.map_or(0, |until| until - b.from + 1)).collect(),
            bytes: blocks.iter().map(|b| b.bytes).collect(),
            layer: blocks.iter().map(|b| b.layer).collect(),
            label: blocks.iter().map(|b| b.label).collect(),
            labels: &self.labels,
            left_out,
        }
        .serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn label(name: &str) -> Label {
        Label { name: name.into(), ..Label::default() }
    }

    #[test]
    fn columns_say_where_each_block_begins_and_how_long_it_lives() {
        let mut blocks = Blocks::default();
        blocks.begin(7, 3, Bytes(512), 1, label("a"));
        blocks.begin(8, 5, Bytes(1024), 0, label("b"));
        assert_eq!(blocks.end(7, 5), Some((1, Bytes(512))));
        assert_eq!(blocks.end(7, 6), None);
        blocks.begin(7, 9, Bytes(2048), 1, label("a"));
        let wanted = json!({
            "from": [3, 2, 4], "life": [3, 0, 0], "bytes": [512, 1024, 2048],
            "layer": [1, 0, 1], "label": [0, 1, 0],
            "labels": [{ "name": "a" }, { "name": "b" }], "left_out": 0,
        });
        assert_eq!(serde_json::to_value(&blocks).unwrap(), wanted);
    }

    #[test]
    fn of_too_many_the_largest_are_listed() {
        let mut blocks = Blocks::default();
        let count = MOST as u32 + 1000;
        for id in 0..count {
            blocks.begin(id, u64::from(id), Bytes(u64::from(id % 500)), 0, Label::default());
        }
        let (listed, left_out) = blocks.listed();
        assert_eq!((listed.len(), left_out), (MOST, 1000));
        let small = listed.iter().filter(|b| b.bytes < 2).count();
        let all = count.div_ceil(500) + (count - 1).div_ceil(500);
        assert_eq!(small, all as usize - 1000);
        assert!(listed.is_sorted_by_key(|b| b.from));
    }
}
