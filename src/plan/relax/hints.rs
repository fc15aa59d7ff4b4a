//! What the program of [`super`] does with each tensor, as a hint for planners.

use std::sync::Arc;

use super::path::{AWAY, DROPPED, Paths, Prices};
use super::{MIB, PARTS, Relaxation, Rules, solved};
use crate::contract::Latency;
use crate::device::Link;
use crate::job::Graph;
use crate::residency::Residencies;
use crate::units::{Bytes, Nanos};

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

/// The program of a job that keeps its order, solved.
#[derive(Debug)]
pub struct Guide {
    /// By tensor, what the program does with it. The planes that gave the last prices, with their
    /// weights, are a solution of it.
    pub hints: Arc<[Hint]>,
    /// What any plan in this order adds to the iteration at least.
    pub added: Nanos,
    budget: Bytes,
    /// The relaxation, and its best prices.
    solved: Option<(Relaxation, Vec<f64>)>,
}

impl Guide {
    /// What any plan in this order adds at least within a lower budget: what the same prices prove.
    /// Of a higher one they prove nothing: there what had to be away may fit.
    #[must_use]
    pub fn added_within(&self, budget: Bytes) -> Nanos {
        let solved = self.solved.as_ref().filter(|_| budget <= self.budget);
        let Some((relaxation, point)) = solved else { return Nanos::ZERO };
        relaxation.proved_for(point, (self.budget.0 as f64 - budget.0 as f64) / MIB)
    }
}

/// The program of a job that keeps its order.
#[must_use]
pub fn guide(graph: &Graph, latencies: &[Latency], link: &Link, budget: Bytes) -> Guide {
    // With what recomputes need, four of eleven plans were slower and two quicker.
    let rules = Rules { budget, late: false, needs: false, ends: false, proving: None };
    let residencies = Residencies::new(graph);
    let solved = solved(&residencies, latencies, link, rules, &PARTS[..LEVELS], f64::INFINITY);
    let mut hints = vec![Hint::default(); graph.tensors.len()];
    let Some((relaxation, found)) = solved else {
        return Guide { hints: hints.into(), added: Nanos::ZERO, budget, solved: None };
    };
    let groups = &relaxation.alike.groups;
    let mut shares: Vec<Vec<[f64; 2]>> =
        groups.iter().map(|group| vec![[0.0; 2]; group.course.steps.len()]).collect();
    let (mut paths, mut prices) = (Paths::default(), Prices::default());
    for (weight, point) in &found.planes {
        relaxation.prices(point, &mut prices);
        for (group, shares) in groups.iter().zip(&mut shares) {
            paths.best(&group.course, &prices);
            for ([away, dropped], state) in shares.iter_mut().zip(&paths.path[1..]) {
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
    let added = relaxation.proved(found.value);
    Guide { hints: hints.into(), added, budget, solved: Some((relaxation, found.point)) }
}
