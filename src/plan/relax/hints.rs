//! What the program of [`super`] does with each tensor, as a hint for planners.

use super::path::{AWAY, DROPPED, Prices};
use super::{Memory, PARTS, Rules, solved};
use crate::contract::Latency;
use crate::device::Link;
use crate::job::Graph;
use crate::residency::Residencies;
use crate::units::Bytes;

/// How much of a tensor is away over the link, and how much is dropped, at the instant at which
/// most of it is: parts of [`Hint::WHOLE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// Away over the link.
    pub swapped: u32,
    /// To be made again.
    pub dropped: u32,
}

impl Hint {
    /// All of a tensor.
    pub const WHOLE: u32 = 1 << 16;
}

/// The last of [`PARTS`] is left out: it takes more than twice the time. Without the one before it
/// plans gain a third less.
const LEVELS: usize = PARTS.len() - 1;

/// What the program does with each tensor of a job that keeps its order. The planes that gave the
/// last prices, with their weights, are a solution of it.
#[must_use]
pub fn hints(graph: &Graph, latencies: &[Latency], link: &Link, budget: Bytes) -> Vec<Hint> {
    // With what recomputes need, four of eleven plans were slower and two quicker.
    let rules = Rules { budget, late: false, needs: false };
    let residencies = Residencies::new(graph);
    let solved = solved(&residencies, latencies, link, rules, &PARTS[..LEVELS], f64::INFINITY);
    let mut hints = vec![Hint::default(); graph.tensors.len()];
    let Some((relaxation, found)) = solved else { return hints };
    let groups = &relaxation.alike.groups;
    let mut shares: Vec<Vec<[f64; 2]>> =
        groups.iter().map(|group| vec![[0.0; 2]; group.course.steps.len()]).collect();
    let (mut memory, mut prices) = (Memory::default(), Prices::default());
    for (weight, point) in &found.planes {
        relaxation.prices(point, &mut prices);
        for (group, shares) in groups.iter().zip(&mut shares) {
            memory.paths.best(&group.course, &prices);
            for ([away, dropped], state) in shares.iter_mut().zip(&memory.paths.path[1..]) {
                match *state {
                    AWAY => *away += weight,
                    DROPPED => *dropped += weight,
                    _ => {}
                }
            }
        }
    }
    let all: f64 = found.planes.iter().map(|(weight, _)| weight).sum();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 1")]
    let part = |share: f64| (share / all * f64::from(Hint::WHOLE)) as u32;
    for (group, shares) in groups.iter().zip(shares) {
        let most = |of: usize| shares.iter().map(|share| share[of]).fold(0.0, f64::max);
        let hint = Hint { swapped: part(most(0)), dropped: part(most(1)) };
        group.tensors.iter().for_each(|tensor| hints[tensor.index()] = hint);
    }
    hints
}
