//! Turns in which persistent memory moves (policy `fair`).
//!
//! While all jobs fit, each has its own persistent memory on the device and runs its iterations in
//! the one lane, beside inference jobs. Otherwise there is room for the persistent memory of only
//! one job, and each turn moves one job's memory out and another's in. Between turns the lane is
//! cut to the next job's need, so that persistent memory and lane together are as large as the job
//! that needs most.

use super::super::lanes::Join;
use super::super::mechanism::Mechanism;
use super::super::memory::Need;
use super::super::policy::Style;
use super::Engine;

/// Which of the jobs that take turns have their memory on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Seated {
    /// None of them.
    #[default]
    Empty,
    /// All of them.
    All,
    /// Only the job whose turn it is.
    One,
}

/// The job number that stands for the job whose turn it is.
const TURN: u32 = u32::MAX;

impl Engine<'_> {
    /// Whether persistent memory moves with the turns where not all jobs fit.
    pub(super) fn turns_move(&self) -> bool {
        self.style == Style::Rotating
            && (self.moves || self.settings.mechanism == Mechanism::Checkpoint)
    }

    /// How the jobs that take turns, and one more with the need `more`, can be seated beside the
    /// services. `None` if not even one job fits.
    fn seats(&self, more: Need) -> Option<Seated> {
        if self.settings.mechanism == Mechanism::Checkpoint {
            return self.served.is_empty().then_some(Seated::One);
        }
        let (served, [kept, lane, sum]) = (self.served.largest()[1], self.sharers.largest());
        let fits =
            |bytes: u128| self.served.persistent + bytes <= u128::from(self.settings.capacity.0);
        let lane = lane.max(more.1).max(served);
        if fits(self.sharers.persistent + u128::from(more.0.0) + u128::from(lane.0)) {
            return Some(Seated::All);
        }
        let one = sum.max(more.0 + more.1).max(kept.max(more.0) + served);
        fits(u128::from(one.0)).then_some(Seated::One)
    }

    /// Adds a job to those that take turns. Returns false if the services leave too little for its
    /// turn.
    pub(super) fn take_turns(&mut self, job: u32, need: Need) -> bool {
        let Some(seats) = self.seats(need) else { return false };
        self.sharers.add(job, need);
        if seats == Seated::All && self.seated != Seated::One {
            self.seated = Seated::All;
            return self.take(job, need, Join::Share);
        }
        self.reseat();
        true
    }

    /// A job that takes turns needs more. Returns whether its turn still fits.
    pub(super) fn widen_turns(&mut self, job: u32, from: Need, to: Need) -> bool {
        self.leave_turns(job, from);
        self.needs[job as usize] = to;
        self.take_turns(job, to) || {
            self.needs[job as usize] = from;
            self.take_turns(job, from);
            false
        }
    }

    pub(super) fn leave_turns(&mut self, job: u32, need: Need) {
        if self.seated == Seated::All {
            self.give(job);
        }
        self.sharers.remove(job, need);
        self.reseat();
    }

    /// Makes room for an inference job by seating fewer jobs. Returns whether that was possible.
    pub(super) fn beside_turns(&mut self, job: u32, need: Need) -> bool {
        if !self.turns_move() || self.sharers.is_empty() {
            return true;
        }
        self.served.add(job, need);
        let seats = self.seats(Need::default());
        self.served.remove(job, need);
        if seats == Some(Seated::One) {
            self.unseat();
        }
        seats.is_some()
    }

    /// Seats as many jobs as their present needs allow.
    pub(super) fn reseat(&mut self) {
        if !self.turns_move() {
            return;
        }
        let seats = if self.sharers.is_empty() {
            Seated::Empty
        } else {
            self.seats(Need::default()).unwrap_or(Seated::One)
        };
        if seats == Seated::All && self.seated == Seated::All {
            return;
        }
        self.unseat();
        self.seated = seats;
        match seats {
            Seated::Empty => {}
            Seated::All => {
                for job in self.sharers.jobs() {
                    self.take(job, self.needs[job as usize], Join::Share);
                }
            }
            Seated::One => {
                let (served, [kept, lane, sum]) =
                    (self.served.largest()[1], self.sharers.largest());
                let sum = sum.max(kept + served);
                self.turn = (sum.saturating_sub(lane.max(served)), lane);
                self.take(TURN, self.turn, Join::Share);
            }
        }
    }

    fn unseat(&mut self) {
        match std::mem::replace(&mut self.seated, Seated::Empty) {
            Seated::Empty => {}
            Seated::All => self.sharers.jobs().into_iter().for_each(|job| self.give(job)),
            Seated::One => self.give(TURN),
        }
    }
}
