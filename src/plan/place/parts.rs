//! Splits items into parts that no chain of overlaps connects. Each part can be placed on its own.

use super::cliques::Cliques;

/// Sorts `order` so that each part is contiguous. Returns the parts as ranges, small ones first.
pub(super) fn split(cliques: &Cliques, order: &mut [u32]) -> Vec<(usize, usize)> {
    let ranges = &cliques.ranges;
    let mut parts: Vec<(usize, usize)> = Vec::new();
    if order.iter().any(|&i| ranges[i as usize].len() > 1) {
        let groups = groups(cliques, order);
        let mut keyed: Vec<(usize, u32)> = groups.into_iter().zip(order.iter().copied()).collect();
        keyed.sort_unstable();
        for (at, &(group, item)) in keyed.iter().enumerate() {
            order[at] = item;
            match parts.last_mut() {
                Some(part) if keyed[part.0].0 == group => part.1 = at + 1,
                _ => parts.push((at, at + 1)),
            }
        }
    } else {
        order.sort_unstable_by_key(|&i| (cliques.first(i), i));
        let mut end = 0;
        for (at, &item) in order.iter().enumerate() {
            let Some(&(low, high)) = ranges[item as usize].first() else { continue };
            match parts.last_mut() {
                Some(part) if low < end => part.1 = at + 1,
                _ => parts.push((at, at + 1)),
            }
            end = end.max(high);
        }
    }
    parts.sort_by_key(|p| p.1 - p.0);
    parts
}

/// For each item the number of its part. Items with several spans connect the times of these spans.
fn groups(cliques: &Cliques, order: &[u32]) -> Vec<usize> {
    let mut runs: Vec<(u32, u32, usize)> = Vec::new();
    for (at, &i) in order.iter().enumerate() {
        runs.extend(cliques.ranges[i as usize].iter().map(|r| (r.0, r.1, at)));
    }
    runs.sort_unstable();
    let mut first: Vec<Option<usize>> = vec![None; order.len()];
    let mut parent: Vec<usize> = Vec::new();
    let mut end = 0;
    for (low, high, at) in runs {
        if parent.is_empty() || low >= end {
            parent.push(parent.len());
        }
        end = end.max(high);
        let run = parent.len() - 1;
        match first[at] {
            Some(other) => {
                let (a, b) = (root(&mut parent, other), root(&mut parent, run));
                parent[a.max(b)] = a.min(b);
            }
            None => first[at] = Some(run),
        }
    }
    first.into_iter().map(|run| run.map_or(usize::MAX, |run| root(&mut parent, run))).collect()
}

fn root(parent: &mut [usize], mut of: usize) -> usize {
    while parent[of] != of {
        parent[of] = parent[parent[of]];
        of = parent[of];
    }
    of
}
