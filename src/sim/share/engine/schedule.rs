//! Decides after each event which jobs are admitted and which run next, one function for each
//! style.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::super::contention::WHOLE;
use super::super::lanes::{Join, LaneId, MOST};
use super::super::mechanism::Mechanism;
use super::super::policy::Style;
use super::{Engine, Key, LOOK, NEVER, State};
use crate::units::{Bytes, Nanos, saturated};

/// Before every key.
const FIRST: Key = (i64::MIN, 0, 0);

impl Engine<'_> {
    pub(super) fn schedule(&mut self) {
        while self.serve() {}
        match self.style {
            Style::All => self.admit(Join::Own, |engine, job| engine.start(job, Bytes::ZERO)),
            Style::Rotating => {
                self.admit(Join::Share, |engine, job| engine.start(job, Bytes::ZERO))
            }
            Style::Best if self.settings.mechanism == Mechanism::Lanes => self.one_in_each_lane(),
            Style::One | Style::Best => self.one(),
            Style::Fill => self.fill(),
            Style::UntilBusy => self.until_busy(),
        }
        self.freed = false;
        self.came.clear();
    }

    /// Admits some of the waiting inference jobs. Returns whether there may be more.
    fn serve(&mut self) -> bool {
        let asking: Vec<u32> = self.services.iter().copied().take(LOOK).collect();
        let (asked, before) = (asking.len(), self.services.len());
        for job in asking {
            let need = self.needs[job as usize];
            let taken = self.beside_turns(job, need) && self.take(job, need, Join::Serve);
            if taken {
                self.served.add(job, need);
                self.services.remove(&job);
            }
            self.reseat();
            if !taken {
                continue;
            }
            self.turn_to(job, State::Serving);
            let (it, now) = (&self.jobs[job as usize], Some(Nanos(self.now)));
            self.serving += u64::from(self.demand(job));
            self.slow_at.insert(job, self.slow);
            let result = &mut self.outcome.jobs[job as usize];
            (result.admitted, result.start) = (now, now);
            self.timers.push(Reverse((self.now.saturating_add(it.work.0), job)));
        }
        asked == LOOK && self.services.len() < before
    }

    /// When a job becomes overdue.
    fn patient_until(&self, job: u32) -> u64 {
        self.jobs[job as usize].submit.0.saturating_add(self.settings.patience.0)
    }

    /// The oldest job, if it is overdue.
    fn overdue(&self) -> Option<u32> {
        self.there.first().copied().filter(|&oldest| self.patient_until(oldest) <= self.now)
    }

    /// The same, if it waits.
    fn waits_overdue(&self) -> Option<u32> {
        self.overdue().filter(|&job| self.state[job as usize] == State::Waiting)
    }

    /// When the oldest job becomes overdue, if the policy cares.
    pub(super) fn falls_overdue(&self) -> u64 {
        let falls = self.there.first().map(|&oldest| self.patient_until(oldest));
        falls.filter(|at| *at > self.now && self.policy.ages).unwrap_or(NEVER)
    }

    /// The waiting jobs that are tried when room is free.
    fn line(&self) -> Vec<u32> {
        let most = if self.tries_all { usize::MAX } else { LOOK };
        self.waiting.iter().take(most).map(|key| key.2).collect()
    }

    /// Admits waiting jobs in the policy's order, as far as there is room.
    fn admit(&mut self, join: Join, mut then: impl FnMut(&mut Self, u32)) {
        // Salus's queue lets later jobs pass for ever, in the paper and in the released code.
        let open = self.released || self.tries_all;
        let skips = self.policy.skips || open;
        loop {
            let closed = self.waits_overdue().filter(|_| !open);
            let looked: Vec<u32> = match closed {
                Some(oldest) => vec![oldest],
                None if self.freed || !skips => self.line(),
                // No room was freed, so a job that did not fit before does not fit now.
                None => {
                    let mut came = self.came.clone();
                    came.retain(|&job| self.state[job as usize] == State::Waiting);
                    came.sort_by_key(|&job| self.line_key(job));
                    came
                }
            };
            let mut again = closed.is_some() || looked.len() >= LOOK;
            let mut widest = self.room.widest();
            for job in looked {
                if self.tries_all {
                    // The queue is long, so what can't fit is seen without a search.
                    let (free, (persistent, ephemeral)) =
                        (self.room.free(), self.room.charge(self.needs[job as usize]));
                    if free < self.least {
                        return;
                    }
                    if persistent > free || ephemeral > widest + (free - persistent) {
                        again = false;
                        continue;
                    }
                }
                if self.let_in(job, join) {
                    widest = self.room.widest();
                    self.waiting.remove(&self.line_key(job));
                    then(self, job);
                } else {
                    again = false;
                    if !skips {
                        break;
                    }
                }
            }
            if !again {
                return;
            }
            // The overdue job was admitted, so the jobs behind it are tried again.
            self.freed |= closed.is_some();
        }
    }

    /// One job at a time in each lane: the first in the policy's order.
    fn one_in_each_lane(&mut self) {
        self.admit(Join::Share, Self::rest);
        let (shortest, out) = self.make_way().unzip();
        let mut runners: BTreeMap<LaneId, u32> =
            self.runs().map(|job| (self.lane_of(job), job)).collect();
        let mut from = (0, FIRST);
        while let Some(&(lane, best)) = self.idle.range(from..).next() {
            from = (lane + 1, FIRST);
            if let Some(runner) = runners.remove(&lane) {
                if best >= self.key(runner) {
                    continue;
                }
                self.drain(runner);
                if self.state[runner as usize] == State::Running {
                    continue;
                }
            }
            self.idle.remove(&(lane, best));
            let out = out.filter(|_| shortest == Some(best.2));
            self.start(best.2, out.unwrap_or_default());
        }
    }

    /// Where memory moves, lets in the best waiting job if it would run next and there is no room
    /// for it: the memory of other jobs goes to the host, the last in the policy's order first. A
    /// running job gives way at the end of its iteration. Returns the job that was let in and the
    /// bytes that its start has to wait for.
    fn make_way(&mut self) -> Option<(u32, Bytes)> {
        let best = self.waiting.first().copied().filter(|_| self.moves)?;
        let job = best.2;
        let runner = self.runs().next();
        let worse = |key: Key| key > best;
        let first = self.idle.iter().next().is_none_or(|idle| worse(idle.1))
            && runner.is_none_or(|runner| worse(self.key(runner)));
        // Services stay.
        let (persistent, ephemeral) = self.room.charge(self.needs[job as usize]);
        let lane = ephemeral.max(self.served.largest()[1]);
        let taken = self.served.persistent + u128::from((persistent + lane).0);
        if !first
            || taken > u128::from(self.room.capacity().0)
            || self.waits_overdue().is_some_and(|overdue| overdue != job)
        {
            return None;
        }
        if let Some(runner) = runner {
            self.drain(runner);
            if self.state[runner as usize] == State::Running {
                return None;
            }
        }
        let mut out = Bytes::ZERO;
        while !self.let_in(job, Join::Share) {
            let Some(victim) = self.victim(|_| true) else {
                self.outcome.moved += u128::from(out.0);
                return None;
            };
            out += self.send_away(victim);
        }
        self.waiting.remove(&best);
        self.rest(job);
        // What left may now fit beside it.
        self.admit(Join::Share, Self::rest);
        Some((job, out))
    }

    /// One job at a time on the device.
    fn one(&mut self) {
        loop {
            let aged = self.waits_overdue().filter(|_| self.policy.ages);
            let aged = aged.map(|job| self.line_key(job));
            let Some(best) = aged.or(self.waiting.first().copied()) else { return };
            let runner = self.runs().next();
            if let Some(runner) = runner {
                let older = self.policy.ages && self.overdue() == Some(runner);
                let better = aged.is_some() || best < self.key(runner);
                if self.style == Style::One || older || !better {
                    return;
                }
                self.drain(runner);
                if self.runs().next().is_some() {
                    return;
                }
                continue;
            }
            let job = best.2;
            if !self.let_in(job, Join::Own) {
                return;
            }
            self.waiting.remove(&best);
            let out = self.last.take().filter(|&last| last != job);
            let out = out.map_or(Bytes::ZERO, |last| self.needs[last as usize].0);
            return self.start(job, out);
        }
    }

    fn fill(&mut self) {
        for job in self.waits_overdue().map_or_else(|| self.line(), |job| vec![job]) {
            let utilised: u64 = self.clocks.values().map(|clock| clock.utilised).sum();
            if utilised + self.serving >= u64::from(WHOLE) {
                return;
            }
            if self.let_in(job, Join::Own) {
                self.waiting.remove(&self.line_key(job));
                self.start(job, Bytes::ZERO);
            }
        }
    }

    fn until_busy(&mut self) {
        let wanted = self.wanted();
        let others: Vec<u32> = self.runs().filter(|j| !wanted.contains(j)).collect();
        for job in others {
            self.drain(job);
        }
        for &job in &wanted {
            let state = self.state[job as usize];
            match state {
                State::Running => self.clock_mut(job).drains.retain(|d| d.1 != job),
                State::Idle | State::Waiting if !self.place(job, &wanted) => return,
                _ => {}
            }
        }
    }

    /// Which jobs should run: the policy's decision over running, resident and waiting jobs.
    fn wanted(&self) -> Vec<u32> {
        let lanes = &self.room;
        let mut keys: Vec<Key> = self.runs().map(|job| self.key(job)).collect();
        // No idle job has a lane, so these are the first in the policy's order.
        keys.extend(self.idle.iter().take(LOOK).map(|idle| idle.1));
        keys.extend(self.waiting.iter().take(LOOK));
        keys.sort_unstable();
        let head = self.overdue();
        let merged = keys.into_iter().map(|key| key.2).filter(|job| Some(*job) != head);
        let ranked = head.into_iter().chain(merged).take(LOOK);
        // Services stay. Persistent memory stays too where the policy does not move it.
        let served = Bytes(saturated(self.served.persistent).min(u64::MAX / 4));
        let mut taken =
            self.served.largest()[1] + if self.moves { served } else { lanes.persistent() };
        // While an overdue job does not fit, no job behind it is admitted.
        let mut closed = head.is_some_and(|h| self.state[h as usize] == State::Waiting);
        let fits = |job: u32| {
            let need = self.needs[job as usize];
            let (persistent, ephemeral) = lanes.charge(need);
            let held = !self.moves && self.state[job as usize] != State::Waiting;
            let more = ephemeral + if held { Bytes::ZERO } else { persistent };
            if closed && head != Some(job) && self.state[job as usize] == State::Waiting
                || taken + more > lanes.capacity()
            {
                return false;
            }
            closed &= head != Some(job);
            taken += more;
            true
        };
        let ranked = ranked.map(|j| (j, self.jobs[j as usize].utilisation));
        self.policy.choose(ranked, MOST, head.is_some(), fits)
    }

    /// Gives a job a lane of its own and starts it. Moves the persistent memory of idle jobs out of
    /// the way, if that is allowed.
    fn place(&mut self, job: u32, wanted: &[u32]) -> bool {
        let (idle, line) = (self.idle_key(job), self.line_key(job));
        let mut out = Bytes::ZERO;
        while !self.let_in(job, Join::Own) {
            // A running job that should not run stops at the end of its iteration.
            let Some(victim) = self.victim(|j| j != job && !wanted.contains(&j)) else {
                // No job starts after these copies, which overlap with the running jobs.
                self.outcome.moved += u128::from(out.0);
                return false;
            };
            out += self.send_away(victim);
        }
        self.idle.remove(&idle);
        self.waiting.remove(&line);
        self.start(job, out);
        true
    }
}
