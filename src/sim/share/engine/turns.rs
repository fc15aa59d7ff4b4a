//! Turns whose persistent memory comes and goes (policy `fair`): everyone is in while all fit, else only whose turn it is.
//!
//! Everyone has a seat of its own in the one lane while the sums allow it, beside what is served. Else one seat, as large as the largest, is
//! whoever's turn it is, and each turn moves one job's memory out and another's in.

use super::super::lanes::Join;
use super::super::mechanism::Mechanism;
use super::super::memory::Need;
use super::super::policy::Style;
use super::Engine;

/// Who of those who take turns has memory on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seated {
    /// There is nobody.
    Nobody,
    /// All of them.
    All,
    /// Whose turn it is.
    One,
}

/// Whoever's turn it is, as one resident.
const TURN: u32 = u32::MAX;

impl Engine<'_> {
    /// Whether persistent memory comes and goes with the turns where not all fit.
    pub(super) fn turns_move(&self) -> bool {
        self.style == Style::Rotating && (self.moves || self.settings.mechanism == Mechanism::Checkpoint)
    }

    /// How those who take turns can be seated beside what is served, if they and `more` were what they need.
    fn seats(&self, more: Need) -> Option<Seated> {
        let (served, largest) = (self.served.largest(), self.sharers.largest());
        let lane = largest.1.max(more.1).max(served.1);
        let fits = |persistent: u128| self.served.persistent + persistent + u128::from(lane.0) <= u128::from(self.settings.capacity.0);
        if self.settings.mechanism == Mechanism::Checkpoint {
            return self.served.by_persistent.is_empty().then_some(Seated::One);
        }
        if fits(self.sharers.persistent + u128::from(more.0.0)) {
            return Some(Seated::All);
        }
        fits(u128::from(largest.0.max(more.0).0)).then_some(Seated::One)
    }

    /// A job joins, unless what is served leaves too little for its turn.
    pub(super) fn take_turns(&mut self, job: u32, need: Need) -> bool {
        let Some(seats) = self.seats(need) else { return false };
        if seats == Seated::All && self.seated != Seated::One {
            self.seated = Seated::All;
            self.sharers.add(job, need);
            return self.take(job, need, Join::Share);
        }
        self.sharers.add(job, need);
        self.reseat();
        true
    }

    /// A job that is one of them needs more; whether its turn still fits.
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
            self.give(job, need);
        }
        self.sharers.remove(job, need);
        self.reseat();
    }

    /// Makes room for an inference job where turns can give way; whether there is enough for it.
    pub(super) fn beside_turns(&mut self, job: u32, need: Need) -> bool {
        if !self.turns_move() || self.seated == Seated::Nobody {
            return true;
        }
        self.served.add(job, need);
        let seats = self.seats(Need::default());
        self.served.remove(job, need);
        if seats == Some(Seated::One) && self.seated == Seated::All {
            self.unseat();
            self.seat(Seated::One);
        }
        seats.is_some()
    }

    /// Brings the seats to what those who take turns need now.
    pub(super) fn reseat(&mut self) {
        if !self.turns_move() {
            return;
        }
        let seats = if self.sharers.by_persistent.is_empty() { Seated::Nobody } else { self.seats(Need::default()).unwrap_or(Seated::One) };
        if seats == Seated::All && self.seated == Seated::All {
            return;
        }
        self.unseat();
        self.seat(seats);
    }

    fn unseat(&mut self) {
        match self.seated {
            Seated::Nobody => {}
            Seated::All => {
                for (_, job) in self.sharers.by_persistent.clone() {
                    self.give(job, self.needs[job as usize]);
                }
            }
            Seated::One => self.give(TURN, self.turn),
        }
    }

    fn seat(&mut self, seats: Seated) {
        self.seated = seats;
        match seats {
            Seated::Nobody => {}
            Seated::All => {
                for (_, job) in self.sharers.by_persistent.clone() {
                    self.take(job, self.needs[job as usize], Join::Share);
                }
            }
            Seated::One => {
                self.turn = self.sharers.largest();
                self.take(TURN, self.turn, Join::Share);
            }
        }
    }
}
