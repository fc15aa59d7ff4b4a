//! First fit: the lowest free offset for each item in turn.
//!
//! Items that stand already are found by the stretch of time in which they are alive, so that short lives, which most
//! are, look at few others. Cost: the overlapping pairs, and what is in the same stretches. Not for: orders.

use super::{Item, Layout};

/// Stretches of time that the index distinguishes, and of how many items each should hold, about.
const STRETCHES: usize = 256;
const EACH: usize = 48;

/// What lies where before the first item is placed.
pub(super) struct Start {
    /// What is always there, at the bottom.
    pub layout: Layout,
    /// Items with a given offset.
    pub given: Vec<usize>,
}

impl Start {
    /// `always` one on another, and `given` where they must.
    pub fn new(items: &[Item], always: &[usize], given: Vec<usize>) -> Self {
        let mut layout = Layout { offsets: vec![0; items.len()], height: 0 };
        for &i in always {
            layout.offsets[i] = layout.height.next_multiple_of(items[i].align);
            layout.height = layout.offsets[i] + items[i].bytes;
        }
        Self { layout, given }
    }
}

/// A span of a placed item.
#[derive(Clone, Copy)]
struct Standing {
    offset: u64,
    end: u64,
    span: (u32, u32),
}

/// What stands, by offset: all of it, and what is alive in each stretch of time.
struct Index {
    width: u32,
    all: Vec<Standing>,
    stretches: Vec<Vec<Standing>>,
}

impl Index {
    fn new(items: &[Item]) -> Self {
        let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max().unwrap_or(0);
        let count = u32::try_from((items.len() / EACH).clamp(1, STRETCHES)).unwrap_or(1);
        let width = last / count + 1;
        Self { width, all: Vec::with_capacity(items.len()), stretches: vec![Vec::new(); (last / width + 1) as usize] }
    }

    fn insert(&mut self, item: &Item, offset: u64) {
        for &span in item.spans.iter().filter(|s| s.0 < s.1) {
            let standing = Standing { offset, end: offset + item.bytes, span };
            let touched = (span.0 / self.width) as usize..=((span.1 - 1) / self.width) as usize;
            for list in self.stretches[touched].iter_mut().chain([&mut self.all]) {
                let at = list.partition_point(|s| s.offset < offset);
                list.insert(at, standing);
            }
        }
    }

    /// The lowest offset from `bottom` on at which the item is in nobody's way.
    fn lowest(&self, item: &Item, bottom: u64) -> u64 {
        let one = |span: (u32, u32)| span.0 < span.1 && span.0 / self.width == (span.1 - 1) / self.width;
        let list = match item.spans[..] {
            [span] if one(span) => &self.stretches[(span.0 / self.width) as usize],
            _ => &self.all,
        };
        let mut offset = bottom.next_multiple_of(item.align);
        for other in list {
            if other.offset >= offset + item.bytes {
                break;
            }
            if other.end > offset && item.spans.iter().any(|s| s.0 < other.span.1 && other.span.0 < s.1) {
                offset = other.end.next_multiple_of(item.align);
            }
        }
        offset
    }
}

/// The lowest free offset for each item in turn, above the bottom.
pub(super) fn first_fit(items: &[Item], order: &[usize], start: &Start) -> Layout {
    let mut layout = start.layout.clone();
    let bottom = layout.height;
    let mut index = Index::new(items);
    for &given in &start.given {
        let offset = items[given].fixed.unwrap_or(0);
        layout.offsets[given] = offset;
        layout.height = layout.height.max(offset + items[given].bytes);
        index.insert(&items[given], offset);
    }
    for &i in order {
        let offset = index.lowest(&items[i], bottom);
        layout.offsets[i] = offset;
        layout.height = layout.height.max(offset + items[i].bytes);
        index.insert(&items[i], offset);
    }
    layout
}
