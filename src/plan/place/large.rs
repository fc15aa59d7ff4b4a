//! The exact search for the large items of a problem; the small ones fill the holes by first fit.
//!
//! A plan has thousands of items of which a few hundred hold nearly all bytes. Not for: proofs, as what the large items'
//! search refutes may be the fault of the small ones' share.

use super::heuristic::{Start, first_fit};
use super::search::{self, Options, Outcome};
use super::{Item, Layout, load};

/// The small items together hold at most this part of the load at any moment.
const SMALL: u64 = 256;

/// A layout within `capacity`, if the search finds one within `effort` steps. Nothing where an offset is given.
pub(super) fn place(items: &[Item], capacity: u64, effort: u64) -> Option<Layout> {
    if items.iter().any(|i| i.fixed.is_some()) {
        return None;
    }
    let last = items.iter().flat_map(|i| &i.spans).map(|s| s.1).max()?;
    let (always, others): (Vec<usize>, Vec<usize>) = (0..items.len()).partition(|&i| items[i].spans == [(0, last)]);
    let bottom = Start::new(items, &always, Vec::new()).layout;
    // The largest size such that all items up to it are small.
    let share = load(items) / SMALL;
    let mut sizes: Vec<u64> = others.iter().map(|&i| items[i].bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let few = |size: u64| load(&others.iter().map(|&i| items[i].clone()).filter(|i| i.bytes <= size).collect::<Vec<_>>()) <= share;
    let small = sizes.partition_point(|&size| few(size));
    let limit = small.checked_sub(1).map_or(0, |at| sizes[at]);
    let (mut rest, large): (Vec<usize>, Vec<usize>) = others.iter().partition(|&&i| items[i].bytes <= limit);
    let chosen: Vec<Item> = large.iter().map(|&i| items[i].clone()).collect();
    let options = Options { effort, without: Vec::new() };
    let (Outcome::Placed(found), _) = search::search(&chosen, capacity.checked_sub(bottom.height)?, &options) else { return None };
    // The large ones stand; the small ones go where there is room.
    let mut standing = items.to_vec();
    for (&i, offset) in large.iter().zip(found.offsets) {
        standing[i].fixed = Some(bottom.height + offset);
    }
    rest.sort_by_key(|&i| (std::cmp::Reverse(items[i].bytes), i));
    let layout = first_fit(&standing, &rest, &Start { layout: bottom, given: large });
    (layout.height <= capacity).then_some(layout)
}
