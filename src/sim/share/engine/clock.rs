//! Clocks: how far the running jobs are, and when the next of them reaches something.
//!
//! A clock counts the progress that each of its jobs has made, in 2^-20 ns of a job's time alone.
//! Where jobs take turns in lanes, each lane has a clock. Under the other policies there is one.

use std::collections::BTreeSet;

use super::super::lanes::LaneId;
use super::super::mechanism::Mechanism;
use super::super::policy::Style;
use super::{Engine, FINE, NEVER, WHOLE, turns};
use crate::units::Bytes;

/// A clock's number: of the lane where lanes take turns, of the group where jobs catch up.
pub(super) type ClockId = u32;

/// Jobs that progress alike. What they reach is ordered by the clock's reading at that time.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The progress so far.
    pub at: u128,
    /// Progress per nanosecond, as a fraction; zero while the jobs wait.
    speed: (u128, u128),
    /// How many jobs share the clock's time: none while they wait.
    share: u64,
    /// Sum of its jobs' utilisations, per mille.
    pub utilised: u64,
    /// When its jobs end.
    pub running: BTreeSet<(u128, u32)>,
    /// When its jobs give way.
    pub drains: BTreeSet<(u128, u32)>,
    /// When its jobs outgrow what they were admitted with.
    pub growths: BTreeSet<(u128, u32)>,
}

impl Clock {
    /// The time at which the clock reads `target`, if it is `now` and the speed stays.
    fn reaches(&self, target: u128, now: u64) -> u64 {
        if self.speed.0 == 0 {
            return NEVER;
        }
        let wait = (target.saturating_sub(self.at) * self.speed.1).div_ceil(self.speed.0 << FINE);
        u64::try_from(wait).unwrap_or(NEVER).saturating_add(now)
    }

    /// The time of what its jobs reach first.
    fn next(&self, now: u64) -> u64 {
        let firsts = [&self.running, &self.drains, &self.growths].map(|of| of.first());
        let times = firsts.into_iter().flatten().map(|first| self.reaches(first.0, now));
        times.min().unwrap_or(NEVER)
    }

    /// The use of the device while its jobs run, per mille.
    fn load(&self) -> u64 {
        self.utilised.checked_div(self.share).unwrap_or(0)
    }
}

impl Engine<'_> {
    /// The running jobs.
    pub(super) fn runs(&self) -> impl Iterator<Item = u32> + '_ {
        self.clocks.values().flat_map(|clock| clock.running.iter().map(|run| run.1))
    }

    /// A running job's clock.
    pub(super) fn clock(&self, job: u32) -> &Clock {
        &self.clocks[&self.clock_of[job as usize]]
    }

    /// A running job's clock, to be changed.
    pub(super) fn clock_mut(&mut self, job: u32) -> &mut Clock {
        self.clocks.entry(self.clock_of[job as usize]).or_default()
    }

    /// The time of what any running job reaches first, or of one group catching up with the next.
    pub(super) fn reached(&self) -> u64 {
        let first = self.clocks.values().map(|clock| clock.next(self.now)).min().unwrap_or(NEVER);
        first.min(self.catches_up().map_or(NEVER, |(front, next)| {
            self.clocks[&front].reaches(self.clocks[&next].at, self.now)
        }))
    }

    /// The first of the events in `of` that a clock has reached.
    pub(super) fn due(&self, of: impl Fn(&Clock) -> &BTreeSet<(u128, u32)>) -> Option<(u128, u32)> {
        let reached = |clock| of(clock).first().filter(|event| event.0 <= clock.at).copied();
        self.clocks.values().find_map(reached)
    }

    /// Whether the job with the least service since it came runs alone, as in the released code,
    /// which compares that and never resets it.
    fn compares_service(&self) -> bool {
        self.style == Style::Rotating && self.released
    }

    /// Puts a job that starts on a clock.
    pub(super) fn on_clock(&mut self, job: u32) {
        let by_lane = self.style == Style::Rotating && !self.turns_move();
        let id = if !by_lane {
            0
        } else if self.compares_service() {
            let served = self.jobs[job as usize].work.0 - self.remaining[job as usize];
            let at = u128::from(served) << FINE;
            let known = self.clocks.iter().find(|(_, clock)| clock.at == at).map(|(id, _)| *id);
            let new = self.clocks.last_key_value().map_or(0, |last| last.0 + 1);
            let id = known.unwrap_or(new);
            self.clocks.entry(id).or_insert_with(|| Clock { at, ..Clock::default() });
            id
        } else {
            self.lane_of(job)
        };
        self.clock_of[job as usize] = id;
    }

    /// A resident's lane; 0 if it has none.
    pub(super) fn lane_of(&self, job: u32) -> LaneId {
        self.room.lane_of(job).unwrap_or(0)
    }

    /// The group that runs and the group with the next more service, where groups catch up.
    fn catches_up(&self) -> Option<(ClockId, ClockId)> {
        if !self.compares_service() {
            return None;
        }
        let mut groups: Vec<_> = self.clocks.iter().map(|(id, clock)| (clock.at, *id)).collect();
        groups.sort_unstable();
        Some((groups.first()?.1, groups.get(1)?.1))
    }

    /// Joins groups of jobs that now had the same service, to the nanosecond, and forgets clocks
    /// without jobs.
    pub(super) fn settle_clocks(&mut self) {
        self.clocks.retain(|_, clock| !clock.running.is_empty());
        while let Some((front, next)) = self.catches_up()
            && self.clocks[&next].at - self.clocks[&front].at < 1 << FINE
            && let Some(from) = self.clocks.remove(&next)
            && let Some(into) = self.clocks.get_mut(&front)
        {
            for (_, job) in &from.running {
                self.clock_of[*job as usize] = front;
            }
            into.utilised += from.utilised;
            into.running.extend(from.running);
            into.growths.extend(from.growths);
        }
    }

    pub(super) fn advance(&mut self, at: u64) {
        let passed = u128::from(at - self.now);
        for clock in self.clocks.values_mut() {
            clock.at += (passed * (clock.speed.0 << FINE)) / clock.speed.1.max(1);
        }
        let load = self.load();
        self.outcome.busy += passed * u128::from(load.min(u64::from(WHOLE)));
        let held = self.room.used();
        self.outcome.held += passed * u128::from(held.0);
        self.outcome.most = self.outcome.most.max(held);
        self.slow += passed * u128::from(load.max(u64::from(WHOLE)));
        if let Some((bytes, turn)) = self.turning {
            self.outcome.moved += bytes * passed / turn;
        }
        self.now = at;
    }

    /// The use of the device by all jobs that run now, per mille.
    pub(super) fn load(&self) -> u64 {
        self.clocks.values().map(Clock::load).sum::<u64>() + self.serving
    }

    pub(super) fn set_speed(&mut self) {
        self.turning = None;
        let front = self.catches_up().map(|(front, _)| front);
        for (id, clock) in &mut self.clocks {
            clock.share = match self.style {
                _ if front.is_some_and(|front| front != *id) => 0,
                Style::Rotating => clock.running.len() as u64,
                _ => 1,
            };
        }
        let n = self.clocks.values().map(|clock| clock.running.len()).sum::<usize>() as u128;
        let whole = u128::from(WHOLE);
        let (mut num, mut den) = (whole, u128::from(self.load()).max(whole));
        match self.settings.mechanism {
            // A partition's job is slower by itself, so partitions do not slow each other.
            Mechanism::Static => den = whole,
            Mechanism::MpsOc if n > 0 => {
                let over = self.room.used().saturating_sub(self.settings.capacity);
                let paging = u128::from(self.settings.copies(over, over));
                let iteration = (self.iterations / n).max(1);
                (num, den) = (num * iteration, den * iteration + whole * paging);
            }
            _ => {}
        }
        if self.style == Style::Rotating && n > 1 && self.seated == turns::Seated::One {
            let mean = Bytes(u64::try_from(self.sharers.persistent / n).unwrap_or(u64::MAX));
            let turn = u128::from(self.settings.turn.0.max(1));
            let whole = turn + u128::from(self.settings.copies(mean, mean));
            (num, den) = (num * turn, den * whole);
            self.turning = Some((2 * u128::from(mean.0), whole));
        }
        for clock in self.clocks.values_mut() {
            let den = den * u128::from(clock.share.max(1));
            let bits = (128 - den.leading_zeros()).saturating_sub(38);
            let num = if clock.share == 0 { 0 } else { (num >> bits).max(1) };
            clock.speed = (num, den >> bits);
        }
    }
}
