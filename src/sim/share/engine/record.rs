//! What an outcome tells besides the figures: memory over time, what jobs do, why one waits.

use super::super::mechanism::Mechanism;
use super::super::result::{Doing, Moment, Stretch};
use super::{Engine, State};
use crate::units::{Bytes, Nanos};

impl Engine<'_> {
    /// Changes a job's state, and records what it did until now where that is kept.
    pub(super) fn turn_to(&mut self, job: u32, state: State) {
        let before = std::mem::replace(&mut self.state[job as usize], state);
        let Some(since) = self.since.get_mut(job as usize) else { return };
        if before == state {
            return;
        }
        let (from, to) = (Nanos(*since), Nanos(self.now));
        *since = self.now;
        let doing = match before {
            State::Away => return,
            State::Waiting => Doing::Waits,
            State::Idle => Doing::Rests,
            State::Running => Doing::Runs,
            State::Serving => Doing::Serves,
        };
        if from < to {
            self.outcome.stretches.push(Stretch { job, doing, from, to });
        }
    }

    /// Records memory over time, and why one job waits.
    pub(super) fn record(&mut self) {
        if self.keep.moments {
            let (persistent, lanes) = if self.settings.mechanism == Mechanism::Lanes {
                let lanes = self.room.lanes().iter().map(|(id, lane)| (*id, lane.size));
                (self.room.persistent(), lanes.collect())
            } else {
                (Bytes::ZERO, vec![(0, self.room.used())])
            };
            let running = self.runs().count() + self.served.by[0].len();
            let waiting = self.waiting.len() + self.services.len();
            let at = Nanos(self.now);
            self.outcome.moments.push(Moment { at, persistent, lanes, running, waiting });
        }
        let Some(job) = self.keep.reasons else { return };
        let need = self.needs[job as usize];
        let name = |j: u32| &self.jobs[j as usize].name;
        let ahead = || match (self.runs().next(), self.runs().count()) {
            (None, _) => "no job".to_owned(),
            (Some(first), 1) => format!("`{}`", name(first)),
            (Some(first), n) => format!("`{}` and {} more", name(first), n - 1),
        };
        let text = match self.state[job as usize] {
            State::Away => return,
            State::Running if self.clock(job).drains.iter().any(|d| d.1 == job) => {
                "finishes its iteration, then gives way".to_owned()
            }
            State::Running => "runs".to_owned(),
            State::Serving => "serves".to_owned(),
            State::Idle => format!("is in and waits for its turn: {} runs", ahead()),
            State::Waiting => {
                let what = if need.0 + need.1 > self.room.free() { "memory" } else { "its turn" };
                let before = self.waiting.iter().position(|k| k.2 == job).unwrap_or(0);
                format!("waits for {what}, {before} before it: {} runs", ahead())
            }
        };
        if self.outcome.reasons.last().is_none_or(|r| r.1 != text) {
            self.outcome.reasons.push((Nanos(self.now), text));
        }
    }
}
