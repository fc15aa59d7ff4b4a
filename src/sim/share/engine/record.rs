//! What an outcome records besides the figures: memory over time, and why one job waited.

use super::super::mechanism::Mechanism;
use super::super::result::Moment;
use super::{Engine, State};
use crate::units::{Bytes, Nanos};

impl Engine<'_> {
    pub(super) fn record(&mut self) {
        if self.keep.moments {
            let (persistent, lanes) = if self.settings.mechanism == Mechanism::Lanes {
                let lanes = self.room.lanes().iter().map(|(id, lane)| (*id, lane.size));
                (self.room.persistent(), lanes.collect())
            } else {
                (Bytes::ZERO, vec![(0, self.room.used())])
            };
            self.outcome.moments.push(Moment { at: Nanos(self.now), persistent, lanes });
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
