//! Who is let in, who runs its next iteration, who leaves: decisions over events, without threads
//! or clocks of its own.
//!
//! The same policies and lanes as the simulator's ([`crate::sim::share`]), asked at real iteration
//! boundaries. A running job is never interrupted within an iteration; who is not asked to go on is
//! *idle*, with its memory where it was. An idle job's memory leaves the device only when another's
//! turn needs the room and the policy moves memory.

use std::collections::{BTreeMap, BTreeSet};

use super::memory::{Entry, Memory, Spot};
use crate::sim::share::lanes::{JobId, Join, MOST};
use crate::sim::share::policy::{Facts, Policy, Style, choose};
use crate::units::{Bytes, Nanos};

/// What a job needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Kept between iterations.
    pub persistent: Bytes,
    /// While an iteration runs.
    pub ephemeral: Bytes,
    /// It was planned to share bytes with others: its iterations may take turns with theirs in one
    /// lane.
    pub shares: bool,
    /// Which of its plans that is.
    pub plan: usize,
}

/// A job as it comes.
#[derive(Clone, Copy, Debug)]
pub struct Coming {
    /// What it needs.
    pub needs: Needs,
    /// The part of the device that it keeps busy, per mille.
    pub utilisation: u32,
    /// How many iterations it has. At least 1.
    pub iterations: u32,
    /// How long one is thought to take.
    pub iteration: Nanos,
}

/// A command to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Come in, following this plan.
    Enter(JobId, Spot, usize),
    /// Run an iteration.
    Go(JobId),
    /// Go out, with all that is kept.
    Leave(JobId),
    /// End before the next iteration.
    Stop(JobId),
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Outside, without memory.
    Waiting,
    /// Inside, between iterations.
    Idle,
    /// In an iteration.
    Running,
    /// On its way out.
    Leaving,
    /// Outside for a moment; its memory is kept.
    Out,
}

#[derive(Clone, Debug)]
struct Tenant {
    needs: Needs,
    /// What it will need once it follows its next plan.
    next: Option<Needs>,
    utilisation: u32,
    submit: Nanos,
    state: State,
    begun: bool,
    stopping: bool,
    left: u32,
    /// How long an iteration was thought to take, and how long the last one took.
    expected: Nanos,
    measured: Option<Nanos>,
    /// Its turns, as `fair` counts them: who comes starts with the least of those who are there.
    turns: u64,
}

impl Tenant {
    fn inside(&self) -> bool {
        matches!(self.state, State::Idle | State::Running)
    }
}

/// Decides.
pub struct Scheduler {
    policy: &'static dyn Policy,
    patience: Nanos,
    turn: Nanos,
    memory: Memory,
    jobs: BTreeMap<JobId, Tenant>,
    /// Who comes in once all of these are out.
    room_for: Option<(JobId, BTreeSet<JobId>)>,
}

impl Scheduler {
    /// An empty device. From `patience` on a job is overdue; `turn` is the least service for which
    /// memory is moved between turns.
    #[must_use]
    pub fn new(policy: &'static dyn Policy, arena: Bytes, patience: Nanos, turn: Nanos) -> Self {
        let most =
            if matches!(policy.style(), Style::One { .. } | Style::Rotating) { 1 } else { MOST };
        let memory = Memory::new(arena, most);
        Self { policy, patience, turn, memory, jobs: BTreeMap::new(), room_for: None }
    }

    /// The device's memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// A job comes. False when it could never be in, and is not taken.
    pub fn submit(&mut self, job: JobId, coming: &Coming, now: Nanos) -> bool {
        if !self.memory.ever(coming.needs.persistent, coming.needs.ephemeral) {
            return false;
        }
        let tenant = Tenant {
            needs: coming.needs,
            next: None,
            utilisation: coming.utilisation,
            submit: now,
            state: State::Waiting,
            begun: false,
            stopping: false,
            left: coming.iterations.max(1),
            expected: coming.iteration,
            measured: None,
            turns: self.jobs.values().map(|t| t.turns).min().unwrap_or(0),
        };
        self.jobs.insert(job, tenant);
        true
    }

    /// A job has another plan, which it follows as soon as there is room for that.
    pub fn replanned(&mut self, job: JobId, needs: Needs) {
        if let Some(tenant) =
            self.jobs.get_mut(&job).filter(|_| self.memory.ever(needs.persistent, needs.ephemeral))
        {
            if tenant.state == State::Waiting {
                tenant.needs = needs;
            } else {
                tenant.next = Some(needs);
            }
        }
    }

    /// An iteration has ended.
    pub fn ran(&mut self, job: JobId, took: Nanos) {
        if let Some(tenant) = self.jobs.get_mut(&job) {
            tenant.state = State::Idle;
            tenant.left = tenant.left.saturating_sub(1);
            tenant.turns = tenant.turns.saturating_add(took.0);
            tenant.measured = Some(took);
        }
    }

    /// A job is out.
    pub fn left(&mut self, job: JobId) {
        let kept = self.room_for.as_ref().is_some_and(|(_, moving)| moving.contains(&job));
        let Some(tenant) = self.jobs.get_mut(&job) else { return };
        if kept {
            tenant.state = State::Out;
        } else {
            tenant.state = State::Waiting;
            tenant.needs = tenant.next.take().unwrap_or(tenant.needs);
            self.memory.leave(job);
        }
    }

    /// A job has ended, whichever way.
    pub fn ended(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.memory.leave(job);
    }

    /// A job shall end before its next iteration.
    pub fn stop(&mut self, job: JobId) {
        if let Some(tenant) = self.jobs.get_mut(&job) {
            tenant.stopping = true;
        }
    }

    /// What a job that is not in waits for.
    #[must_use]
    pub fn waits_for(&self, job: JobId) -> Option<String> {
        let tenant = self.jobs.get(&job).filter(|t| t.state == State::Waiting)?;
        let (free, needs) = (self.memory.free(), tenant.needs);
        let fits = self.memory.clone().admit(
            job,
            (needs.persistent, needs.ephemeral),
            self.join(&needs),
            &BTreeSet::new(),
        ) != Entry::Full;
        Some(match self.policy.style() {
            Style::One { preempts: false } => "the jobs before it to end".to_owned(),
            _ if self.room_for.is_some() => "others to move together".to_owned(),
            Style::UntilBusy { .. } if fits => {
                "its turn: jobs with less work left keep the device busy".to_owned()
            }
            _ if fits => "its turn".to_owned(),
            _ => format!(
                "room: it needs {} + {}, of {} {free} are free",
                needs.persistent,
                needs.ephemeral,
                self.memory.arena()
            ),
        })
    }

    /// What is to be done now.
    pub fn decide(&mut self, now: Nanos) -> Vec<Order> {
        let mut orders = Vec::new();
        self.stops(&mut orders);
        self.moving(&mut orders);
        let order = self.ranked(now);
        let wanted = match self.policy.style() {
            Style::One { preempts: false } => self.next_in_line(&order, &mut orders),
            Style::One { preempts: true } => self.best(&order, &mut orders),
            Style::All => self.all(&order, &mut orders),
            Style::Rotating => self.least_served(&order, &mut orders),
            Style::UntilBusy { .. } => self.until_busy(&order, now, &mut orders),
        };
        self.adopt(&mut orders);
        self.go(&wanted, &mut orders);
        orders
    }

    fn state(&self, job: JobId) -> Option<State> {
        self.jobs.get(&job).map(|t| t.state)
    }

    fn set(&mut self, job: JobId, state: State) {
        if let Some(tenant) = self.jobs.get_mut(&job) {
            tenant.state = state;
        }
    }

    fn leave(&mut self, job: JobId, orders: &mut Vec<Order>) {
        // A job that has run its last iteration ends by itself.
        if let Some(tenant) =
            self.jobs.get_mut(&job).filter(|t| t.state == State::Idle && t.left > 0)
        {
            tenant.state = State::Leaving;
            orders.push(Order::Leave(job));
        }
    }

    fn stops(&mut self, orders: &mut Vec<Order>) {
        let there =
            |t: &Tenant| t.left > 0 && matches!(t.state, State::Waiting | State::Idle | State::Out);
        let stop = |(id, t): (&JobId, &Tenant)| (t.stopping && there(t)).then_some(*id);
        for job in self.jobs.iter().filter_map(stop).collect::<Vec<_>>() {
            orders.push(Order::Stop(job));
            self.set(job, State::Leaving);
        }
    }

    /// Goes on with making room for a job by moving others.
    fn moving(&mut self, orders: &mut Vec<Order>) {
        let Some((newcomer, mut moving)) = self.room_for.take() else { return };
        moving.retain(|job| self.jobs.get(job).is_some_and(|t| !t.stopping));
        let called_off =
            self.jobs.get(&newcomer).is_none_or(|t| t.state != State::Waiting || t.stopping);
        if called_off || moving.iter().all(|&job| self.state(job) == Some(State::Out)) {
            let entry = if called_off { Entry::Full } else { self.admit(newcomer, &moving) };
            if let Entry::Moves(more) = entry {
                moving.extend(more);
            } else {
                let out: Vec<JobId> = self
                    .jobs
                    .iter()
                    .filter(|(_, t)| t.state == State::Out)
                    .map(|(id, _)| *id)
                    .collect();
                out.into_iter().for_each(|job| self.enter(job, orders));
                if entry == Entry::In {
                    self.enter(newcomer, orders);
                }
                // Who was still on its way out is then simply out.
                return;
            }
        }
        moving.iter().for_each(|&job| self.leave(job, orders));
        self.room_for = Some((newcomer, moving));
    }

    /// Those who may run at once don't share a lane unless they were planned so; others share one.
    fn join(&self, needs: &Needs) -> Join {
        if needs.shares || matches!(self.policy.style(), Style::One { .. } | Style::Rotating) {
            Join::Share
        } else {
            Join::Own
        }
    }

    fn admit(&mut self, job: JobId, out: &BTreeSet<JobId>) -> Entry {
        let Some(needs) = self.jobs.get(&job).map(|t| t.needs) else { return Entry::Full };
        self.memory.admit(job, (needs.persistent, needs.ephemeral), self.join(&needs), out)
    }

    fn enter(&mut self, job: JobId, orders: &mut Vec<Order>) {
        if let (Some(spot), Some(tenant)) = (self.memory.spots().get(&job), self.jobs.get_mut(&job))
        {
            tenant.state = State::Idle;
            orders.push(Order::Enter(job, *spot, tenant.needs.plan));
        }
    }

    /// Lets a waiting job in, if that goes at once; otherwise begins to make room for it by moving
    /// others together.
    fn bring_in(&mut self, job: JobId, orders: &mut Vec<Order>) -> bool {
        if self.room_for.is_some()
            || self.jobs.get(&job).is_none_or(|t| t.state != State::Waiting || t.stopping)
        {
            return false;
        }
        match self.admit(job, &BTreeSet::new()) {
            Entry::In => {
                self.enter(job, orders);
                true
            }
            Entry::Moves(moving) => {
                moving.iter().for_each(|&other| self.leave(other, orders));
                self.room_for = Some((job, moving));
                false
            }
            Entry::Full => false,
        }
    }

    /// Begins to make room for a job by sending others out, the last of `order` first, if that is
    /// enough.
    fn send_out(&mut self, job: JobId, keep: &[JobId], order: &[JobId], orders: &mut Vec<Order>) {
        let Some(needs) =
            self.jobs.get(&job).filter(|t| t.state == State::Waiting).map(|t| t.needs)
        else {
            return;
        };
        let bytes = (needs.persistent, needs.ephemeral);
        let fits = |memory: &Memory| {
            memory.clone().admit(job, bytes, self.join(&needs), &BTreeSet::new()) != Entry::Full
        };
        let mut without = self.memory.clone();
        let leaving: Vec<JobId> = self
            .jobs
            .iter()
            .filter(|(_, t)| t.state == State::Leaving)
            .map(|(id, _)| *id)
            .collect();
        leaving.iter().for_each(|&l| without.leave(l));
        let mut victims = Vec::new();
        for &other in order.iter().rev().filter(|o| {
            **o != job && !keep.contains(o) && self.jobs.get(o).is_some_and(Tenant::inside)
        }) {
            if fits(&without) {
                break;
            }
            without.leave(other);
            victims.push(other);
        }
        if fits(&without) {
            victims.into_iter().for_each(|victim| self.leave(victim, orders));
        }
    }

    /// All who are there, best first.
    fn ranked(&self, now: Nanos) -> Vec<JobId> {
        // Those that have run say by how much expectations are wrong on this device.
        let ran = self
            .jobs
            .values()
            .filter_map(|t| Some((u128::from(t.measured?.0), u128::from(t.expected.0))));
        let (took, thought) = ran.fold((0u128, 0u128), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let (took, thought) = if took == 0 || thought == 0 { (1, 1) } else { (took, thought) };
        let rank = |t: &Tenant| {
            let iteration = t
                .measured
                .map_or_else(|| u128::from(t.expected.0) * took / thought, |m| m.0.into());
            let remaining =
                Nanos(u64::try_from(iteration * u128::from(t.left)).unwrap_or(u64::MAX));
            self.policy.rank(&Facts { submit: t.submit, remaining, utilisation: t.utilisation })
        };
        let mut order: Vec<JobId> =
            self.jobs.iter().filter(|(_, t)| !t.stopping).map(|(id, _)| *id).collect();
        order.sort_by_key(|id| self.jobs.get(id).map(|t| (rank(t), t.submit, *id)));
        if let Some(oldest) = self.overdue(now) {
            order.retain(|&j| j != oldest);
            order.insert(0, oldest);
        }
        order
    }

    fn overdue(&self, now: Nanos) -> Option<JobId> {
        let there = self.jobs.iter().filter(|(_, t)| !t.stopping);
        let (job, oldest) =
            there.min_by_key(|(id, t)| (t.submit, **id)).filter(|_| self.policy.ages())?;
        (oldest.submit.0.saturating_add(self.patience.0) <= now.0).then_some(*job)
    }

    /// One at a time, to its end.
    fn next_in_line(&mut self, order: &[JobId], orders: &mut Vec<Order>) -> Vec<JobId> {
        let begun = order.iter().find(|j| self.jobs.get(j).is_some_and(|t| t.begun));
        let Some(&job) = begun.or(order.first()) else { return Vec::new() };
        self.bring_in(job, orders);
        vec![job]
    }

    /// One at a time, the best of those who are in.
    fn best(&mut self, order: &[JobId], orders: &mut Vec<Order>) -> Vec<JobId> {
        for &job in order {
            self.bring_in(job, orders);
        }
        order
            .iter()
            .copied()
            .find(|j| self.jobs.get(j).is_some_and(Tenant::inside))
            .into_iter()
            .collect()
    }

    /// Everyone who fits, in order.
    fn all(&mut self, order: &[JobId], orders: &mut Vec<Order>) -> Vec<JobId> {
        for &job in order {
            if self.state(job) == Some(State::Waiting) && !self.bring_in(job, orders) {
                break;
            }
        }
        order.iter().copied().filter(|j| self.jobs.get(j).is_some_and(Tenant::inside)).collect()
    }

    /// One at a time, the job that has had least. A job outside comes in once it is behind by more
    /// than a turn.
    fn least_served(&mut self, order: &[JobId], orders: &mut Vec<Order>) -> Vec<JobId> {
        let turns =
            |jobs: &BTreeMap<JobId, Tenant>, j: &JobId| jobs.get(j).map_or(u64::MAX, |t| t.turns);
        let mut by_turns = order.to_vec();
        by_turns.sort_by_key(|j| (turns(&self.jobs, j), *j));
        let inside = |jobs: &BTreeMap<JobId, Tenant>| {
            by_turns.iter().copied().find(|j| jobs.get(j).is_some_and(Tenant::inside))
        };
        for &job in &by_turns {
            if self.state(job) != Some(State::Waiting)
                || self.bring_in(job, orders)
                || !self.policy.moves()
                || self.room_for.is_some()
            {
                continue;
            }
            let behind = |i: JobId| {
                turns(&self.jobs, &job).saturating_add(self.turn.0) < turns(&self.jobs, &i)
            };
            if inside(&self.jobs).is_none_or(behind) {
                // Until it is in, no other job comes in, and none runs.
                self.send_out(job, &[], &by_turns, orders);
                return Vec::new();
            }
        }
        inside(&self.jobs).into_iter().collect()
    }

    /// The best until the device is busy.
    fn until_busy(&mut self, order: &[JobId], now: Nanos, orders: &mut Vec<Order>) -> Vec<JobId> {
        let ranked: Vec<(JobId, u32)> =
            order.iter().filter_map(|j| Some((*j, self.jobs.get(j)?.utilisation))).collect();
        let overdue = self.overdue(now).is_some_and(|j| self.state(j) == Some(State::Waiting));
        // Those planned to share need one lane among them.
        let (mut taken, mut lane) = (Bytes::ZERO, Bytes::ZERO);
        let wanted = choose(ranked.into_iter(), MOST, overdue, |job| {
            let Some(needs) = self.jobs.get(&job).map(|t| t.needs) else { return false };
            let (own, shared) = if needs.shares {
                (Bytes::ZERO, lane.max(needs.ephemeral))
            } else {
                (needs.ephemeral, lane)
            };
            let fits = taken + needs.persistent + own + shared <= self.memory.arena();
            if fits {
                (taken, lane) = (taken + needs.persistent + own, shared);
            }
            fits
        });
        for &job in &wanted {
            if self.state(job) == Some(State::Waiting) && !self.bring_in(job, orders) {
                if self.room_for.is_none() {
                    self.send_out(job, &wanted, order, orders);
                }
                break;
            }
        }
        wanted
    }

    /// Who has a new plan and would fit with it goes out to come in again.
    fn adopt(&mut self, orders: &mut Vec<Order>) {
        if self.room_for.is_some() {
            return;
        }
        let replanned =
            |(id, t): (&JobId, &Tenant)| (t.state == State::Idle).then_some((*id, t.next?));
        for (job, next) in self.jobs.iter().filter_map(replanned).collect::<Vec<_>>() {
            let mut memory = self.memory.clone();
            memory.leave(job);
            if memory.admit(
                job,
                (next.persistent, next.ephemeral),
                self.join(&next),
                &BTreeSet::new(),
            ) == Entry::In
            {
                self.leave(job, orders);
            }
        }
    }

    fn go(&mut self, wanted: &[JobId], orders: &mut Vec<Order>) {
        let one = matches!(self.policy.style(), Style::One { .. } | Style::Rotating);
        let spots = self.memory.spots();
        let running = |jobs: &BTreeMap<JobId, Tenant>| -> BTreeSet<u32> {
            jobs.iter()
                .filter(|(_, t)| t.state == State::Running)
                .filter_map(|(id, _)| Some(spots.get(id)?.lane))
                .collect()
        };
        for &job in wanted {
            let busy = running(&self.jobs);
            let moving = self.room_for.as_ref().is_some_and(|(_, moving)| moving.contains(&job));
            let Some(tenant) =
                self.jobs.get_mut(&job).filter(|t| t.state == State::Idle && !moving && t.left > 0)
            else {
                continue;
            };
            let Some(spot) = spots.get(&job) else { continue };
            if (one && !busy.is_empty()) || busy.contains(&spot.lane) {
                continue;
            }
            (tenant.state, tenant.begun) = (State::Running, true);
            orders.push(Order::Go(job));
        }
    }
}
