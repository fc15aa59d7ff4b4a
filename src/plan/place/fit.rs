//! First fit and best fit: for each item in turn the lowest free offset, or the smallest hole.
//!
//! Placed items are indexed by intervals of time. Most items have short lives within one interval.
//! For these, only items that begin or end in the same interval are compared, and the holes between
//! those that are alive during all of it. For an item with a longer life, all placed items below
//! the answer are compared.

use super::{Item, Layout};

/// The most intervals of the index, and about how many items each should have.
const STRETCHES: usize = 256;
const EACH: usize = 48;

/// The layout before the first item is placed.
pub(super) struct Start {
    /// Items that are always alive, placed at the bottom.
    pub layout: Layout,
    /// Items with a given offset.
    pub given: Vec<usize>,
}

impl Start {
    /// Stacks the items `always` at the bottom, and puts the items `given` at their offsets.
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

/// Spans of placed items by offset, in chunks, so that an insertion moves few entries.
#[derive(Default)]
struct Chunks(Vec<Chunk>);

/// Spans with neighbouring offsets.
struct Chunk {
    standing: Vec<Standing>,
    /// The start of the earliest span and the end of the latest one.
    life: (u32, u32),
    /// The highest address, one past the last byte.
    top: u64,
}

/// The most spans in a chunk.
const CHUNK: usize = 512;

impl Chunk {
    fn new(standing: Vec<Standing>) -> Self {
        let mut chunk = Self { standing: Vec::new(), life: (u32::MAX, 0), top: 0 };
        standing.iter().for_each(|s| chunk.note(s));
        Self { standing, ..chunk }
    }

    fn note(&mut self, standing: &Standing) {
        self.life = (self.life.0.min(standing.span.0), self.life.1.max(standing.span.1));
        self.top = self.top.max(standing.end);
    }
}

impl Chunks {
    fn insert(&mut self, standing: Standing) {
        let first = |c: &Chunk| c.standing.first().map_or(0, |s| s.offset);
        let at = self.0.partition_point(|c| first(c) < standing.offset).saturating_sub(1);
        let Some(chunk) = self.0.get_mut(at) else {
            self.0.push(Chunk::new(vec![standing]));
            return;
        };
        let place = chunk.standing.partition_point(|s| s.offset < standing.offset);
        chunk.note(&standing);
        chunk.standing.insert(place, standing);
        if chunk.standing.len() > CHUNK {
            // When spans are added in order, full chunks stay behind.
            let half = if place + 1 == chunk.standing.len() { CHUNK } else { CHUNK / 2 };
            let upper = chunk.standing.split_off(half);
            let lower = std::mem::take(&mut chunk.standing);
            *chunk = Chunk::new(lower);
            self.0.insert(at + 1, Chunk::new(upper));
        }
    }

    /// The lowest offset from `offset` on at which the item overlaps no other.
    fn lowest(&self, item: &Item, mut offset: u64) -> u64 {
        for chunk in &self.0 {
            if chunk.standing[0].offset >= offset + item.bytes {
                break;
            }
            if chunk.top <= offset
                || !item.spans.iter().any(|s| s.0 < chunk.life.1 && chunk.life.0 < s.1)
            {
                continue;
            }
            for other in &chunk.standing {
                if other.offset >= offset + item.bytes {
                    break;
                }
                if other.end > offset
                    && item.spans.iter().any(|s| s.0 < other.span.1 && other.span.0 < s.1)
                {
                    offset = other.end.next_multiple_of(item.align);
                }
            }
        }
        offset
    }
}

impl Chunks {
    /// The smallest hole from `bottom` on into which the item fits; of equal holes the lowest. If
    /// there is none, the offset above all items that are in the way.
    fn tightest(&self, item: &Item, bottom: u64) -> u64 {
        let (mut top, mut best) = (bottom, None::<(u64, u64)>);
        for chunk in &self.0 {
            if !item.spans.iter().any(|s| s.0 < chunk.life.1 && chunk.life.0 < s.1) {
                continue;
            }
            for other in &chunk.standing {
                if !item.spans.iter().any(|s| s.0 < other.span.1 && other.span.0 < s.1) {
                    continue;
                }
                let hole = other.offset.saturating_sub(top);
                if hole >= item.bytes && best.is_none_or(|b| hole < b.0) {
                    best = Some((hole, top));
                }
                top = top.max(other.end.next_multiple_of(item.align));
            }
        }
        best.map_or(top, |b| b.1)
    }
}

/// The items alive in an interval of time.
#[derive(Default)]
struct Stretch {
    /// Bytes in use during all of it, as disjoint ranges by offset.
    solid: Vec<(u64, u64)>,
    /// Spans that begin or end in it, by offset.
    parts: Vec<Standing>,
}

impl Stretch {
    fn fill(&mut self, mut from: u64, mut until: u64) {
        let low = self.solid.partition_point(|s| s.1 < from);
        let high = low + self.solid[low..].partition_point(|s| s.0 <= until);
        if low < high {
            from = from.min(self.solid[low].0);
            until = until.max(self.solid[high - 1].1);
        }
        self.solid.splice(low..high, [(from, until)]);
    }

    /// As [`Chunks::lowest`], for a life within the interval.
    fn lowest(&self, bytes: u64, align: u64, (from, until): (u32, u32), mut offset: u64) -> u64 {
        let mut solid =
            self.solid[self.solid.partition_point(|s| s.1 <= offset)..].iter().peekable();
        let mut parts = self
            .parts
            .iter()
            .filter(|p| from < p.span.1 && p.span.0 < until)
            .map(|p| (p.offset, p.end))
            .peekable();
        loop {
            let low = |range: Option<&(u64, u64)>| range.map_or(u64::MAX, |r| r.0);
            let (a, b) = (low(solid.peek().copied()), low(parts.peek()));
            if a.min(b) >= offset + bytes {
                return offset;
            }
            let next = if a <= b { solid.next().copied() } else { parts.next() };
            offset = next.map_or(offset, |next| {
                if next.1 > offset { next.1.next_multiple_of(align) } else { offset }
            });
        }
    }
}

/// All placed items, and those alive in each interval of time.
struct Index {
    width: u32,
    all: Chunks,
    stretches: Vec<Stretch>,
}

impl Index {
    fn new(items: &[Item]) -> Self {
        let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max().unwrap_or(0);
        let count = u32::try_from((items.len() / EACH).clamp(1, STRETCHES)).unwrap_or(1);
        let width = last / count + 1;
        let mut stretches = Vec::new();
        stretches.resize_with((last / width + 1) as usize, Stretch::default);
        Self { width, all: Chunks::default(), stretches }
    }

    fn insert(&mut self, item: &Item, offset: u64) {
        for &span in item.spans.iter().filter(|s| s.0 < s.1) {
            let standing = Standing { offset, end: offset + item.bytes, span };
            self.all.insert(standing);
            for at in span.0 / self.width..=(span.1 - 1) / self.width {
                let stretch = &mut self.stretches[at as usize];
                let start = at * self.width;
                if span.0 <= start && start.saturating_add(self.width) <= span.1 {
                    stretch.fill(offset, standing.end);
                } else {
                    let place = stretch.parts.partition_point(|s| s.offset < offset);
                    stretch.parts.insert(place, standing);
                }
            }
        }
    }

    /// The lowest offset from `bottom` on at which the item overlaps no other.
    fn lowest(&self, item: &Item, bottom: u64) -> u64 {
        let bottom = bottom.next_multiple_of(item.align);
        match item.spans[..] {
            [span] if span.0 < span.1 && span.0 / self.width == (span.1 - 1) / self.width => self
                .stretches[(span.0 / self.width) as usize]
                .lowest(item.bytes, item.align, span, bottom),
            _ => self.all.lowest(item, bottom),
        }
    }
}

/// Puts each item in turn at the lowest free offset above the bottom.
pub(super) fn first_fit(items: &[Item], order: &[usize], start: &Start) -> Layout {
    fit(items, order, start, Index::lowest)
}

/// Puts each item in turn into the smallest hole above the bottom.
pub(super) fn best_fit(items: &[Item], order: &[usize], start: &Start) -> Layout {
    fit(items, order, start, |index, item, bottom| {
        index.all.tightest(item, bottom.next_multiple_of(item.align))
    })
}

fn fit(
    items: &[Item],
    order: &[usize],
    start: &Start,
    find: impl Fn(&Index, &Item, u64) -> u64,
) -> Layout {
    let mut layout = start.layout.clone();
    let bottom = layout.height;
    let mut index = Index::new(items);
    let mut given = start.given.clone();
    given.sort_unstable_by_key(|&i| items[i].fixed);
    for given in given {
        let offset = items[given].fixed.unwrap_or(0);
        layout.offsets[given] = offset;
        layout.height = layout.height.max(offset + items[given].bytes);
        index.insert(&items[given], offset);
    }
    for &i in order {
        let offset = find(&index, &items[i], bottom);
        layout.offsets[i] = offset;
        layout.height = layout.height.max(offset + items[i].bytes);
        index.insert(&items[i], offset);
    }
    layout
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_trying_every_offset(
            raw in proptest::collection::vec(
                (
                    1u64..9,
                    0u32..90,
                    prop_oneof![3 => 0u32..6, 1 => 0u32..60],
                    0u32..3,
                    any::<bool>(),
                ),
                0..120,
            ),
            width in 1u32..40,
        ) {
            let mut index = Index { width, all: Chunks::default(), stretches: Vec::new() };
            index.stretches.resize_with((200 / width + 1) as usize, Stretch::default);
            let mut standing: Vec<(Item, u64)> = Vec::new();
            for (bytes, from, length, align, twice) in raw {
                let mut spans = vec![(from, from + length)];
                if twice {
                    spans.push((from + length + 3, from + length + 8));
                }
                let item = Item { align: 1 << align, ..Item::new(bytes, spans) };
                let free = |offset: u64| {
                    let apart =
                        |other: &Item, at: u64| offset + bytes <= at || at + other.bytes <= offset;
                    let meet = |a: &(u32, u32), b: &(u32, u32)| {
                        a.0 < a.1 && b.0 < b.1 && a.0 < b.1 && b.0 < a.1
                    };
                    let never = |other: &Item| {
                        !other.spans.iter().any(|a| item.spans.iter().any(|b| meet(a, b)))
                    };
                    offset.is_multiple_of(item.align)
                        && standing.iter().all(|(other, at)| apart(other, *at) || never(other))
                };
                let wanted = (3..).find(|&o| free(o)).unwrap();
                // An item with an empty life blocks the bytes of items alive around it, which is
                // harmless.
                if item.spans.iter().all(|s| s.0 < s.1) {
                    prop_assert_eq!(index.lowest(&item, 3), wanted);
                }
                index.insert(&item, wanted);
                standing.push((item, wanted));
            }
        }
    }
}
