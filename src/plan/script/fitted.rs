//! Plans that fit into what PyTorch's allocator reserves.
//!
//! What is reserved depends on which tensors stay and where they lie: where many small ones leave
//! and others stay between them, a large one fits into no gap. So of each good set several plans
//! are sketched: for lower targets, and with the activations that are born last staying.

use super::ScriptError;
use super::graph::graph;
use super::search::{Decided, Keeps, LEAST_PART, Made, Search, better, options};
use super::world::{Way, World};
use crate::parallel::in_parallel;

/// Which parts of the activations stay, in percent ([`Way::stay`]).
const STAY: [u32; 5] = [0, 25, 40, 50, 60];

/// How many targets are tried for each set and each of these.
const TARGETS: usize = 4;

/// A target is lower than the last by this part of the bytes by which the plan for that reserves
/// too much.
const PART: u64 = 3;

/// How many of the plans are made anew with care.
const CAREFULLY: usize = 2;

impl<'a> Search<'a> {
    /// The best plan, or a better one of these sets.
    pub(super) fn fitted(
        &self,
        sets: &[Vec<usize>],
        mut best: Made<'a>,
    ) -> Result<Made<'a>, ScriptError> {
        if !self.predicts || best.found.actions.peak_bytes > self.limit {
            return Ok(best);
        }
        let fits = best.found.keeps == Keeps::All;
        if fits && self.takes_the_first() {
            return Ok(best);
        }
        let bar = if fits { best.found.time } else { u64::MAX };
        let ways: Vec<(usize, u32)> =
            (0..sets.len()).flat_map(|set| STAY.map(|stay| (set, stay))).collect();
        let made = in_parallel(ways.len(), |at| {
            let (set, stay) = ways[at];
            self.fit(&sets[set], Way { stay, ..self.way }, bar)
        });
        let mut found: Vec<Made<'a>> = Vec::new();
        for made in made {
            found.extend(made?);
        }
        found.sort_by_key(Made::worth);
        found.truncate(CAREFULLY);
        let finalists = if self.takes_the_first() { 0 } else { found.len() };
        let careful =
            in_parallel(finalists, |at| self.made(&found[at], options(self.effort, true)));
        for (made, careful) in found.iter_mut().zip(careful) {
            made.improve(careful?);
        }
        best = found.into_iter().fold(best, better);
        Ok(best)
    }

    /// The best sketch for a set that takes less time than this.
    fn fit(&self, set: &[usize], way: Way, bar: u64) -> Result<Option<Made<'a>>, ScriptError> {
        let world = World::new(self.problem, way, set.to_vec());
        let planned = graph(&world, self.divisible)?;
        let (mut target, mut bar, mut best) = (self.budget, bar, None);
        for _ in 0..TARGETS {
            let Decided { events, program, run, reached } = self.decide(&planned, target)?;
            if run.iteration.0 >= bar || !reached {
                break;
            }
            let actions = self.actions(&world, &planned, &events, &program, &run, true);
            let beyond = actions.peak_bytes.saturating_sub(self.budget);
            let missed = actions.without_trims.saturating_sub(self.limit);
            let found = self.found(actions, run.iteration.0, target, true);
            if found.keeps == Keeps::All && found.time < bar {
                bar = found.time;
                best = Some(found);
            }
            if missed == 0 {
                break;
            }
            let step = beyond.max(missed / PART).max(self.budget / LEAST_PART);
            target = target.saturating_sub(step);
        }
        Ok(best.map(|found| Made { world, planned, found }))
    }
}
