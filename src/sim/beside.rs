//! Several jobs on one device. The link carries one copy per direction. Compute slows down while
//! the jobs want more than the device has.
//!
//! Each job runs its iterations on its own clock. The caller launches, replaces and ends jobs at
//! any instant ([`Shared::until`] stops there). Each direction of the link takes the copy that
//! became ready first; of two such copies, the one of the job with the lower number. A job uses
//! part of the device's compute, its *utilisation*. While the running jobs want more than all of
//! it, every step is slowed by the same ratio. (Salus measures such parts per workload; a constant
//! slowdown would be wrong for both idle and busy jobs.) One job alone runs exactly as in
//! [`super::engine`].
//!
//! Jobs whose plans have a window hold it in turn ([`super::window`]). A copy that waits for the
//! window does not wait in the link's queue, so no job waits for ever. At an instant only the jobs
//! are looked at for which something happened; the others still wait for what they waited for. Of
//! them an instant costs a few comparisons. Memory is bounded by each job's plan.

use std::collections::BTreeSet;
use std::ops::Deref;

use super::player::{ALONE, Player};
use super::program::{Direction, Program};
use super::timing::{DIRECTIONS, Deadlock, Durations, NEVER, Run, Wires};
use super::window::Turns;
use crate::device::Link;
use crate::units::Nanos;

/// Utilisation is counted in thousandths of the device.
pub const WHOLE: u32 = 1000;

/// What a job runs, and the part of the device that it uses.
#[derive(Clone, Copy, Debug)]
pub struct Work<P, D> {
    /// Its iteration under its plan.
    pub program: P,
    /// How long its steps and copies take alone.
    pub durations: D,
    /// The part of the device's compute that its operators use, in thousandths, 1 to [`WHOLE`].
    pub utilisation: u32,
}

/// A copy that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The job.
    pub job: usize,
    /// The direction of the copy.
    pub direction: Direction,
    /// When it started.
    pub start: Nanos,
    /// When it ended.
    pub end: Nanos,
}

/// How long copies had the link to the device, and from it.
#[must_use]
pub fn busy(carried: &[Carried]) -> [Nanos; 2] {
    DIRECTIONS.map(|direction| {
        carried.iter().filter(|c| c.direction == direction).map(|c| c.end - c.start).sum()
    })
}

/// One wait of a job for the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// The job.
    pub job: usize,
    /// When the wait began.
    pub from: Nanos,
    /// When it got the window.
    pub until: Nanos,
}

struct Seat<P, D> {
    player: Player<P, D>,
    utilisation: u32,
    /// Since when its next copy in each direction has been ready.
    ready: [Option<Nanos>; 2],
    /// Since when it has waited for the window.
    asked: Option<Nanos>,
}

/// A device that several jobs share.
pub struct Shared<'a, P, D> {
    link: &'a Link,
    now: Nanos,
    seats: Vec<Option<Seat<P, D>>>,
    wires: Wires,
    /// The job whose copy is on each wire, and when that copy started.
    carrying: [Option<(usize, Nanos)>; 2],
    /// Every copy so far, in order of its end.
    pub carried: Vec<Carried>,
    turns: Turns,
    /// Every wait for the window that took time, in order of its end.
    pub waited: Vec<Waited>,
    /// The jobs for which something has happened at this instant.
    touched: BTreeSet<usize>,
    /// How often it was looked whether a job can go on.
    pub looks: u64,
    /// The speed of all steps.
    speed: u64,
}

impl<'a, P: Deref<Target = Program>, D: Deref<Target = Durations>> Shared<'a, P, D> {
    /// An idle device.
    #[must_use]
    pub fn new(link: &'a Link) -> Self {
        Self {
            link,
            now: Nanos::ZERO,
            seats: Vec::new(),
            wires: Wires::default(),
            carrying: [None; 2],
            carried: Vec::new(),
            turns: Turns::default(),
            waited: Vec::new(),
            touched: BTreeSet::new(),
            looks: 0,
            speed: ALONE,
        }
    }

    /// The present time.
    #[must_use]
    pub const fn now(&self) -> Nanos {
        self.now
    }

    /// Begins an iteration of `job` now. Each running job needs its own number; small numbers take
    /// the least memory.
    ///
    /// # Panics
    /// When the job is within an iteration.
    pub fn begin(&mut self, job: usize, work: Work<P, D>) {
        if self.seats.len() <= job {
            self.seats.resize_with(job + 1, || None);
        }
        assert!(self.seats[job].is_none(), "job {job} is running");
        let Work { program, durations, utilisation } = work;
        let player = Player::new(program, durations, self.now, true);
        let (utilisation, ready, asked) = (utilisation.clamp(1, WHOLE), [None; 2], None);
        self.seats[job] = Some(Seat { player, utilisation, ready, asked });
        self.touched.insert(job);
    }

    /// Runs until an iteration ends, or until `limit`. Returns the job and the record of its
    /// iteration.
    ///
    /// # Errors
    /// When a job's items wait for each other in a circle, which [`crate::contract::check`]
    /// excludes.
    pub fn until(&mut self, limit: Nanos) -> Result<Option<(usize, Run)>, Deadlock> {
        loop {
            self.start();
            let done = |&&job: &&usize| self.seats[job].as_ref().is_some_and(|s| s.player.done());
            if let Some(&job) = self.touched.iter().find(done)
                && let Some(seat) = self.seats[job].take()
            {
                self.touched.remove(&job);
                return Ok(Some((job, seat.player.run(self.now))));
            }
            let next = self.seats.iter().flatten().map(|s| s.player.next()).min().unwrap_or(NEVER);
            let next = next.min(self.wires.next(self.now, self.link));
            if next == NEVER
                && let Some(stuck) = self.seats.iter().flatten().next()
            {
                return Err(Deadlock { at: self.now, step: stuck.player.step() });
            }
            if next == NEVER && limit == NEVER {
                return Ok(None);
            }
            if next > limit {
                self.pass(limit.max(self.now));
                return Ok(None);
            }
            self.pass(next);
        }
    }

    fn start(&mut self) {
        for job in self.touched.clone() {
            if let Some(seat) = &mut self.seats[job]
                && seat.player.let_go(self.now)
                && let Some(next) = self.turns.leave(job)
            {
                self.touched.insert(next);
            }
        }
        let mut started = true;
        while started {
            started = false;
            self.looks += self.touched.len() as u64;
            self.take_turns();
            for direction in 0..2 {
                started |= self.start_copy(direction);
            }
            for &job in &self.touched {
                if let Some(seat) = &mut self.seats[job] {
                    started |= seat.player.start_step(self.now, self.speed);
                }
            }
        }
        let computing = self.seats.iter().flatten().filter(|s| s.player.computes());
        let wanted: u64 = computing.map(|s| u64::from(s.utilisation)).sum();
        let speed =
            if wanted <= u64::from(WHOLE) { ALONE } else { ALONE * u64::from(WHOLE) / wanted };
        if std::mem::replace(&mut self.speed, speed) != speed {
            for seat in self.seats.iter_mut().flatten() {
                seat.player.pace(self.now, speed);
            }
        }
    }

    /// Starts the copy that became ready first, if there is one and its wire is free.
    fn start_copy(&mut self, direction: usize) -> bool {
        for &job in &self.touched {
            if let Some(seat) = &mut self.seats[job]
                && seat.ready[direction].is_none()
                && seat.player.copy_ready(direction, self.now).is_some()
            {
                seat.ready[direction] = Some(self.now);
            }
        }
        if !self.wires.free(direction) {
            return false;
        }
        let ready =
            |(job, s): (usize, &Option<Seat<P, D>>)| Some((s.as_ref()?.ready[direction]?, job));
        let first = self.seats.iter().enumerate().filter_map(ready).min();
        let Some((_, job)) = first else { return false };
        let Some(seat) = &mut self.seats[job] else { return false };
        let Some(work) = seat.player.copy_ready(direction, self.now) else { return false };
        seat.player.start_copy(direction, self.now);
        seat.ready[direction] = None;
        self.wires.start(direction, work);
        self.carrying[direction] = Some((job, self.now));
        true
    }

    /// Jobs that can't go on without the window ask for it. The first in line gets it.
    fn take_turns(&mut self) {
        let (turns, waited, now) = (&mut self.turns, &mut self.waited, self.now);
        for &job in &self.touched {
            let Some(seat) = &mut self.seats[job] else { continue };
            let Some(stretch) = seat.player.wants_window(now) else { continue };
            if turns.ask(job) {
                seat.player.hold_window(stretch);
                if let Some(from) = seat.asked.take().filter(|from| *from < now) {
                    waited.push(Waited { job, from, until: now });
                }
            } else {
                seat.asked.get_or_insert(now);
            }
        }
    }

    fn pass(&mut self, to: Nanos) {
        self.touched.clear();
        for direction in self.wires.advance(to - self.now, self.link) {
            let Some((job, start)) = self.carrying[direction].take() else { continue };
            let way = DIRECTIONS[direction];
            self.carried.push(Carried { job, direction: way, start, end: to });
            if let Some(seat) = &mut self.seats[job] {
                seat.player.end_copy(direction, to);
                self.touched.insert(job);
            }
        }
        self.now = to;
        for (job, seat) in self.seats.iter_mut().enumerate() {
            if let Some(seat) = seat
                && seat.player.end_step(to)
            {
                self.touched.insert(job);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Latency, Source};
    use crate::engine::tests::graph;

    #[test]
    fn how_often_a_job_is_looked_at_does_not_depend_on_the_others() {
        let latency = Latency { time: Nanos(1000), source: Source::Graph };
        let graph = graph();
        let program = Program::new(&graph, &vec![latency; graph.operators.len()], &[]).unwrap();
        let link = crate::device::builtin::find("host").unwrap().link;
        let durations = Durations::nominal(&program, &link);
        for jobs in [1, 5, 80] {
            let mut device = Shared::new(&link);
            let work = |utilisation| Work { program: &program, durations: &durations, utilisation };
            for job in 0..jobs {
                device.until(Nanos(7 * job as u64)).unwrap();
                device.begin(job, work(300 + job as u32));
            }
            let mut ended = 0;
            while let Some((job, _)) = device.until(NEVER).unwrap() {
                ended += 1;
                if ended < 10 * jobs as u64 {
                    device.begin(job, work(300 + job as u32));
                }
            }
            let steps = ended * program.steps.len() as u64;
            let looks = device.looks;
            assert!((steps..4 * steps).contains(&looks), "{jobs} jobs: {looks}, {steps} steps");
        }
    }
}
