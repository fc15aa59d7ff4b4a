//! The engine's memory: which jobs are admitted and sent away, which outgrow what they were
//! admitted with, and where their memory lies.

use super::super::check::check;
use super::super::lanes::Join;
use super::super::layout::Item;
use super::super::mechanism::Mechanism;
use super::super::memory::Need;
use super::super::policy::Style;
use super::super::result::Verdict;
use super::{Engine, State};
use crate::units::{Bytes, Nanos};

impl Engine<'_> {
    /// Admits a training job. Returns false if there is no room.
    pub(super) fn let_in(&mut self, job: u32, join: Join) -> bool {
        let need = self.needs[job as usize];
        let taken =
            if self.turns_move() { self.take_turns(job, need) } else { self.take(job, need, join) };
        if taken {
            self.outcome.jobs[job as usize].admitted.get_or_insert(Nanos(self.now));
        }
        taken
    }

    pub(super) fn take(&mut self, id: u32, need: Need, join: Join) -> bool {
        let taken = self.room.admit(id, need, join).is_some();
        self.touch(id);
        taken
    }

    pub(super) fn give(&mut self, id: u32) {
        self.touch(id);
        self.room.leave(id);
    }

    /// Takes a job out of its lane.
    pub(super) fn park(&mut self, job: u32) {
        self.touch(job);
        self.room.park(job);
    }

    fn touch(&mut self, id: u32) {
        if self.layout.is_some() && self.room.residents().contains_key(&id) {
            self.touched.push(Item::Persistent(id));
            self.touched.extend(self.room.lane_of(id).map(Item::Lane));
        }
    }

    /// Frees the memory of a job, if it is admitted.
    pub(super) fn release(&mut self, job: u32) {
        let (need, state) = (self.needs[job as usize], self.state[job as usize]);
        self.freed |= state != State::Waiting;
        match state {
            State::Waiting => {}
            State::Serving => {
                self.served.remove(job, need);
                self.give(job);
                self.reseat();
            }
            _ if self.turns_move() => self.leave_turns(job, need),
            _ => self.give(job),
        }
    }

    /// The idle job that comes last in the policy's order among those that `may` go to the host.
    pub(super) fn victim(&self, may: impl Fn(u32) -> bool) -> Option<u32> {
        self.idle.iter().rev().map(|k| k.1.2).find(|&job| may(job)).filter(|_| self.moves)
    }

    /// Sends an idle job's persistent memory to the host. Returns its bytes.
    pub(super) fn send_away(&mut self, job: u32) -> Bytes {
        self.idle.remove(&self.idle_key(job));
        self.release(job);
        self.on_host[job as usize] = true;
        self.turn_to(job, State::Waiting);
        self.waiting.insert(self.line_key(job));
        self.needs[job as usize].0
    }

    /// At the end of an iteration, when the clock reads `at`, a running job needs more memory than
    /// it was admitted with. It grows where it is, or leaves and waits with its true need.
    pub(super) fn outgrow(&mut self, job: u32, at: u128) {
        let Some(growth) = self.jobs[job as usize].growth.as_deref().copied() else { return };
        self.grown.insert(job);
        self.outcome.grew += 1;
        let (from, to) = (self.needs[job as usize], growth.need);
        let more =
            format!("needs {} + {} where it was admitted with {} + {}", to.0, to.1, from.0, from.1);
        if !self.room.ever(to) {
            self.say(job, || format!("outgrew the device: {more}"));
            return self.end(job, Verdict::Outgrew);
        }
        if self.widen(job, from, to) {
            self.needs[job as usize] = to;
            return self.say(job, || format!("{more}: there was room, and it goes on"));
        }
        self.say(job, || {
            format!("{more}: there is no room, so it leaves and waits with its true need")
        });
        self.outcome.outgrown += 1;
        self.stop(job, at);
        if self.state[job as usize] == State::Idle {
            self.outcome.moved += u128::from(self.send_away(job).0);
        } else if self.settings.mechanism != Mechanism::Checkpoint {
            self.outcome.moved += u128::from(from.0.0);
        }
        // Ranks do not depend on needs, so the job keeps its place in line.
        self.needs[job as usize] = to;
    }

    /// Gives an admitted job more memory, if there is room or idle jobs can lend it. Returns
    /// whether it did.
    fn widen(&mut self, job: u32, from: Need, to: Need) -> bool {
        if self.turns_move() {
            return self.widen_turns(job, from, to);
        }
        while !self.room.grow(job, to) {
            if !matches!(self.style, Style::Fill | Style::UntilBusy) {
                return false;
            }
            let Some(victim) = self.victim(|_| true) else { return false };
            let out = self.send_away(victim);
            self.outcome.moved += u128::from(out.0);
        }
        self.touch(job);
        true
    }

    pub(super) fn say(&mut self, job: u32, text: impl FnOnce() -> String) {
        if self.keep.reasons == Some(job) {
            self.outcome.reasons.push((Nanos(self.now), text()));
        }
    }

    /// Gives every changed item an address. A job's memory moves between two of its iterations. A
    /// job that starts in room that other jobs leave waits for them and for the copies. Running
    /// jobs lose the copies' time.
    pub(super) fn lie(&mut self) {
        let Some(layout) = &mut self.layout else { return self.prove() };
        if self.touched.is_empty() {
            return;
        }
        let moved = layout.update(&self.room, &mut self.touched);
        let mut shifted: Vec<u32> = Vec::new();
        for item in moved.items {
            match item {
                Item::Persistent(job) => shifted.push(job),
                Item::Lane(lane) => {
                    let lane = self.room.lanes().get(&lane);
                    shifted.extend(lane.iter().flat_map(|l| l.members.iter().map(|m| m.1)));
                }
            }
        }
        shifted.retain(|job| self.state.get(*job as usize) == Some(&State::Running));
        shifted.sort_unstable();
        shifted.dedup();
        if moved.defragmentations > 0 || moved.bytes > Bytes::ZERO {
            self.outcome.packs += moved.defragmentations;
            self.outcome.packed += u128::from(moved.bytes.0);
            self.pause(&shifted, self.settings.packing(moved.bytes));
        }
        self.prove();
    }

    /// Adds the time for packing: `shifted` are the running jobs whose memory moved.
    fn pause(&mut self, shifted: &[u32], nanos: u64) {
        let copies = u128::from(nanos) << super::FINE;
        let starts = |job: u32| self.base[job as usize] >= self.clock(job).at;
        let concerned = |job: u32| starts(job) || shifted.binary_search(&job).is_ok();
        let mut delays: Vec<(u32, u128)> = Vec::new();
        if self.style == Style::Rotating {
            // One iteration at a time runs in a lane, so at most one job of it is within an
            // iteration. The other jobs are between two.
            for clock in self.clocks.values() {
                if clock.running.iter().any(|run| concerned(run.1)) {
                    let each = copies / clock.running.len() as u128;
                    delays.extend(clock.running.iter().map(|run| (run.1, each)));
                }
            }
        } else {
            let rest = |job: u32| {
                let done = self.clock(job).at - self.base[job as usize];
                done.next_multiple_of(self.boundary(job)) - done
            };
            let within = shifted.iter().filter(|job| !starts(**job));
            let wait = within.map(|job| rest(*job)).max().unwrap_or(0);
            let delay = |job| (job, if starts(job) { wait + copies } else { copies });
            delays.extend(self.runs().filter(|job| concerned(*job)).map(delay));
        }
        delays.into_iter().for_each(|(job, by)| self.shift(job, by));
    }

    /// Delays a running job by `by` units of the clock.
    fn shift(&mut self, job: u32, by: u128) {
        let index = job as usize;
        let (end, growth) = (self.base[index] + self.length(job), self.growth(job));
        let clock = self.clock_mut(job);
        let drain = clock.drains.iter().find(|d| d.1 == job).map(|d| d.0);
        for (of, at) in [
            (&mut clock.running, Some(end)),
            (&mut clock.drains, drain),
            (&mut clock.growths, growth),
        ] {
            if let Some(at) = at
                && of.remove(&(at, job))
            {
                of.insert((at + by, job));
            }
        }
        self.base[index] += by;
    }

    /// Proves the device's memory safe, where the caller asked for proofs.
    fn prove(&mut self) {
        let lanes = self.settings.mechanism == Mechanism::Lanes;
        if !lanes || !self.keep.proof || self.outcome.harm.is_some() {
            return;
        }
        // Any of the jobs that take turns may hold the last seat.
        let need = |id: u32| self.needs.get(id as usize).copied().unwrap_or(self.turn);
        let at = |item: Item| self.layout.as_ref()?.at(item);
        let picture = self.room.picture(self.settings.capacity, need, at);
        let nowhere = self.layout.is_some()
            && (picture.residents.iter().any(|r| r.at.is_none())
                || picture.lanes.iter().any(|l| l.2.is_none()));
        let homeless = self.runs().any(|job| self.room.lane_of(job).is_none());
        let verdict = match check(&picture) {
            Ok(()) if nowhere => Err("something lies nowhere".to_owned()),
            Ok(()) if homeless && !self.turns_move() => Err("a job runs without a lane".to_owned()),
            verdict => verdict,
        };
        self.outcome.proved += 1;
        if let Err(why) = verdict {
            self.outcome.harm = Some((Nanos(self.now), why));
        }
    }
}
