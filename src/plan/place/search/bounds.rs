//! Bounds on every final offset at a node of the search, and whether they leave hope.

use super::{Change, Key, NOTHING, Search, align};

impl Search<'_> {
    /// Bounds every final offset at a node. Returns the lowest end that any item can have now, or
    /// the clique that makes the node hopeless.
    pub(super) fn bounds(&mut self, from: usize, until: usize, last: Key) -> Result<u64, usize> {
        let part = &self.order[from..until];
        let (mut least_end, mut live_end) = (u64::MAX, u64::MAX);
        self.passed.clear();
        for &i in part {
            let (offset, bytes) = (self.offset[i as usize], self.bytes[i as usize]);
            let end = offset + bytes;
            least_end = least_end.min(end);
            self.spent.steps += u64::from(self.cliques.width[i as usize]);
            self.bound[i as usize] = offset;
            if !self.on.monotone || (offset, self.rank[i as usize]) > last {
                live_end = live_end.min(end);
            } else if self.items[i as usize].fixed.is_some() {
                return Err(self.cliques.first(i));
            } else {
                self.passed.push(i);
            }
        }
        self.lifted(from, until, last, live_end)?;
        if self.on.sections {
            self.sections(from, until)?;
            self.remember(from, until);
        }
        Ok(least_end)
    }

    /// Raises the bounds of passed items, and compares all bounds with the capacity.
    fn lifted(&mut self, from: usize, until: usize, last: Key, live_end: u64) -> Result<(), usize> {
        let Self { items, cliques, offset, bytes, bound, order, low, passed, on, .. } = self;
        let part = &order[from..until];
        for &i in &*passed {
            let least = if on.support { live_end } else { last.0 };
            let at = align(least.max(offset[i as usize]).min(self.capacity), &items[i as usize]);
            bound[i as usize] = at;
        }
        for &i in part {
            if bound[i as usize] + bytes[i as usize] > self.capacity {
                cliques.each(i, |c| self.weight[c] += 1);
                return Err(cliques.first(i));
            }
        }
        if !on.support || passed.is_empty() {
            return Ok(());
        }
        let (first, last_end) = cliques.hull(passed.iter().copied());
        low[first as usize..last_end as usize].fill(NOTHING);
        for &i in part {
            let at = bound[i as usize];
            let end = at + bytes[i as usize];
            if !cliques.reaches(i, (first, last_end)) {
                continue;
            }
            for range in cliques.within(i, (first, last_end)) {
                for low in &mut low[range] {
                    low.end = low.end.min(end);
                    low.second = low.second.min(low.first.max(at));
                    low.first = low.first.min(at);
                }
            }
        }
        // Parts are visited in their order, so that the same node fails by the same clique.
        for &i in &*passed {
            let (mut other, mut end) = (u64::MAX, u64::MAX);
            let own = bound[i as usize];
            cliques.each(i, |c| {
                end = end.min(low[c].end);
                // Where another item is as low, the second lowest is too.
                other = other.min(if low[c].first == own { low[c].second } else { low[c].first });
            });
            let item = &items[i as usize];
            let at = align(own.max(end.min(self.capacity)), item);
            bound[i as usize] = at;
            // No other item can come under it, or every item that can lifts it too high.
            if other >= offset[i as usize] + item.bytes || at + item.bytes > self.capacity {
                cliques.each(i, |c| self.weight[c] += 1);
                return Err(cliques.first(i));
            }
        }
        Ok(())
    }

    /// Fails if, in some clique, the items above some height do not fit.
    ///
    /// The node above passed with the bounds that are known, and items only leave cliques. So only
    /// cliques of items with other bounds are examined, and what lies between them.
    fn sections(&mut self, from: usize, until: usize) -> Result<(), usize> {
        let Self { cliques, bound, known, bytes, order, sums, sorted, .. } = self;
        let part = &order[from..until];
        let changed = |i: &u32| bound[*i as usize] != known[*i as usize];
        let hull = cliques.hull(part.iter().copied().filter(changed));
        sorted.clear();
        let concerned = part.iter().filter(|i| cliques.reaches(**i, hull));
        sorted.extend(concerned.map(|&i| (bound[i as usize], i)));
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        sums[hull.0 as usize..hull.1 as usize].fill(0);
        for &(at, i) in &*sorted {
            let room = self.capacity - at;
            let bytes = bytes[i as usize];
            // The sign of what is left in each clique: sums stay below 2^63.
            let mut short = 0u64;
            for range in cliques.within(i, hull) {
                for sum in &mut sums[range] {
                    *sum += bytes;
                    short |= room.wrapping_sub(*sum);
                }
            }
            if short >> 63 != 0 {
                let full = cliques.within(i, hull).flatten().filter(|&c| sums[c] > room).last();
                let full = full.unwrap_or_else(|| cliques.first(i));
                self.weight[full] += 1;
                return Err(full);
            }
        }
        Ok(())
    }

    /// Keeps the bounds of a node whose cliques all passed, until its placement is undone.
    fn remember(&mut self, from: usize, until: usize) {
        for &i in &self.order[from..until] {
            let known = &mut self.known[i as usize];
            if *known != self.bound[i as usize] {
                self.trail.push(Change::Bound(i, *known));
                *known = self.bound[i as usize];
            }
        }
    }
}
