//! Decides which jobs are admitted, which run their next iteration, and which leave. It reacts to
//! events and has no threads or clocks of its own.
//!
//! It uses the simulator's policies and lanes at real iteration boundaries, for the jobs of one
//! process (`neap run`) and for scripts in processes of their own (`neap torch --serve`). A running
//! job is never interrupted within an iteration. A job without the order to run its next
//! iteration is *idle*, and its memory stays. An idle job's memory leaves the device only when
//! another job's turn needs the room and the policy moves memory.

use std::collections::{BTreeMap, BTreeSet};

use super::contention::WHOLE;
use super::lanes::{JobId, Join, LaneId, MOST};
use super::memory::Need;
use super::policy::{Candidate, Policy, Style};
use super::spots::{Entry, Memory, Spot};
use crate::units::{Bytes, Nanos, saturated};

/// A job's needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Bytes kept between iterations.
    pub persistent: Bytes,
    /// Bytes needed while an iteration runs.
    pub ephemeral: Bytes,
    /// Whether it was planned to share bytes with other jobs. Such jobs have a lane in common,
    /// which they pass on within their iterations.
    pub shares: bool,
    /// The number of the plan with these needs.
    pub plan: usize,
}

impl Needs {
    /// Both parts.
    #[must_use]
    pub const fn bytes(&self) -> Need {
        (self.persistent, self.ephemeral)
    }
}

/// A job that is being submitted.
#[derive(Clone, Copy, Debug)]
pub struct Coming {
    /// What it needs.
    pub needs: Needs,
    /// The share of the device that it keeps busy, per mille.
    pub utilisation: u32,
    /// At least 1.
    pub iterations: u32,
    /// Expected time of an iteration.
    pub iteration: Nanos,
}

/// What a job is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Enter the device at these addresses, with the plan of this number.
    Enter(Spot, usize),
    /// Run an iteration.
    Go,
    /// Leave the device, with everything that is kept between iterations.
    Leave,
    /// End before its next iteration.
    Stop,
}

/// Orders to jobs, in order.
type Orders = Vec<(JobId, Order)>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Not on the device.
    #[default]
    Waiting,
    /// On the device, between iterations.
    Idle,
    /// On the device, in an iteration.
    Running,
    /// Leaving the device.
    Leaving,
    /// Off the device for a moment; its room is kept.
    Out,
}

#[derive(Clone, Debug, Default)]
struct Tenant {
    needs: Needs,
    /// Its needs under its next plan, until it uses that plan.
    next: Option<Needs>,
    utilisation: u32,
    submit: Nanos,
    state: State,
    begun: bool,
    stopping: bool,
    left: u32,
    /// The expected time of an iteration, and the time of the last one.
    expected: Nanos,
    measured: Option<Nanos>,
    /// The time of all its iterations, where that is known apart from their number.
    work: Option<Nanos>,
    /// The time of its iterations so far.
    served: Nanos,
    /// Its service as `fair` counts it. A new job starts with the least service of the present
    /// jobs.
    turns: u64,
}

/// The jobs of a device and their memory.
pub struct Scheduler {
    policy: Policy,
    patience: Nanos,
    turn: Nanos,
    /// Who has which bytes.
    pub memory: Memory,
    jobs: BTreeMap<JobId, Tenant>,
    /// The job that will be admitted once all of these are out.
    room_for: Option<(JobId, BTreeSet<JobId>)>,
}

impl Scheduler {
    /// An empty device. `patience` after its submission a job is overdue; `turn` is the shortest
    /// service after which memory is moved for a turn.
    #[must_use]
    pub fn new(policy: &Policy, arena: Bytes, patience: Nanos, turn: Nanos) -> Self {
        let memory = Memory::new(arena, lanes(policy));
        let policy = *policy;
        Self { policy, patience, turn, memory, jobs: BTreeMap::new(), room_for: None }
    }

    /// An empty device for scripts in processes of their own: their memory never moves, and each
    /// ends when it does.
    #[must_use]
    pub fn of_scripts(policy: &Policy, budget: Bytes) -> Self {
        let policy = Policy { moves: false, ..*policy };
        let patience = Nanos(u64::MAX);
        let memory = Memory::of_sums(budget, lanes(&policy));
        Self { memory, ..Self::new(&policy, budget, patience, patience) }
    }

    /// Submits a job. Returns false if it could never fit; then it is not accepted.
    pub fn submit(&mut self, job: JobId, coming: &Coming, now: Nanos) -> bool {
        if !self.memory.lanes.ever(coming.needs.bytes()) {
            return false;
        }
        let tenant = Tenant {
            needs: coming.needs,
            utilisation: coming.utilisation,
            submit: now,
            left: coming.iterations.max(1),
            expected: coming.iteration,
            turns: self.jobs.values().map(|t| t.turns).min().unwrap_or(0),
            ..Tenant::default()
        };
        self.jobs.insert(job, tenant);
        true
    }

    /// Submits a script, which may have `work` in all. One that `holds` its persistent bytes has
    /// run already. Returns false if it can't be in, now or later; then it is not accepted.
    pub fn submit_script(
        &mut self,
        job: JobId,
        needs: Needs,
        work: Option<Nanos>,
        holds: bool,
        now: Nanos,
    ) -> bool {
        let iteration = Nanos::ZERO;
        let coming = Coming { needs, utilisation: WHOLE, iterations: u32::MAX, iteration };
        if !self.submit(job, &coming, now) {
            return false;
        }
        let join = self.join(&needs);
        let is_in = holds && self.may_enter(job, &needs, join);
        let kept = is_in || !holds || self.memory.lanes.hold(job, needs.persistent);
        if !kept {
            self.jobs.remove(&job);
        } else if let Some(tenant) = self.jobs.get_mut(&job) {
            // One of which that is not known has more left than any of which it is.
            tenant.work = Some(work.unwrap_or(Nanos(u64::MAX)));
            tenant.begun = holds;
            tenant.state = if is_in { State::Idle } else { State::Waiting };
        }
        kept
    }

    /// Admits a script to the memory, unless it passes one that waits and the policy forbids that.
    fn may_enter(&mut self, job: JobId, needs: &Needs, join: Join) -> bool {
        let others = || self.jobs.iter().filter(|(id, _)| **id != job);
        let passes = !self.policy.skips && others().any(|(_, t)| t.state == State::Waiting);
        let out = BTreeSet::new();
        !passes && self.memory.admit(job, needs.bytes(), join, &out) == Entry::In
    }

    /// A script needs more than it was admitted with. Returns whether there is room; if not,
    /// nothing changes.
    pub fn grow(&mut self, job: JobId, needs: Needs) -> bool {
        let grows = self.memory.lanes.grow(job, needs.bytes());
        if let Some(tenant) = self.jobs.get_mut(&job).filter(|_| grows) {
            tenant.needs = needs;
        }
        grows
    }

    /// Whether a script is in a lane.
    #[must_use]
    pub fn lane(&self, job: JobId) -> Option<LaneId> {
        self.memory.lanes.lane_of(job)
    }

    /// A job has a new plan, which it uses as soon as there is room.
    pub fn replanned(&mut self, job: JobId, needs: Needs) {
        let fits = self.memory.lanes.ever(needs.bytes());
        let Some(tenant) = self.jobs.get_mut(&job).filter(|_| fits) else { return };
        match tenant.state {
            State::Waiting => tenant.needs = needs,
            _ => tenant.next = Some(needs),
        }
    }

    /// The numbers of the plans that a job may still be asked to follow.
    pub fn plans(&self, job: JobId) -> impl Iterator<Item = usize> {
        let tenant = self.jobs.get(&job).into_iter();
        tenant.flat_map(|t| t.next.iter().chain([&t.needs])).map(|needs| needs.plan)
    }

    /// An iteration has ended.
    pub fn ran(&mut self, job: JobId, took: Nanos) {
        self.went_on(job, took);
        if let Some(tenant) = self.jobs.get_mut(&job) {
            tenant.state = State::Idle;
        }
    }

    /// An iteration has ended, and the job has begun the next one.
    pub fn went_on(&mut self, job: JobId, took: Nanos) {
        if let Some(tenant) = self.jobs.get_mut(&job) {
            tenant.left = tenant.left.saturating_sub(1);
            tenant.turns = tenant.turns.saturating_add(took.0);
            tenant.served = Nanos(tenant.served.0.saturating_add(took.0));
            tenant.measured = Some(took);
        }
    }

    /// A job has left the device.
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

    /// A job is gone.
    pub fn ended(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.memory.leave(job);
    }

    /// A job should end before its next iteration.
    pub fn stop(&mut self, job: JobId) {
        if let Some(tenant) = self.jobs.get_mut(&job) {
            tenant.stopping = true;
        }
    }

    /// The reason why a job that is not admitted waits.
    #[must_use]
    pub fn waits_for(&self, job: JobId) -> Option<String> {
        let tenant = self.jobs.get(&job).filter(|t| t.state == State::Waiting)?;
        let needs = tenant.needs;
        let fits = self.fits(&self.memory, job, &needs);
        Some(match self.policy.style {
            Style::One => "the jobs before it to end".to_owned(),
            _ if self.room_for.is_some() => "others to move together".to_owned(),
            Style::Fill | Style::UntilBusy if fits => {
                "its turn: jobs with less work left keep the device busy".to_owned()
            }
            _ if fits => "its turn".to_owned(),
            _ => {
                let (arena, free) = (self.memory.lanes.capacity(), self.memory.lanes.free());
                let Needs { persistent, ephemeral, .. } = needs;
                format!("room: it needs {persistent} + {ephemeral}, of {arena} {free} are free")
            }
        })
    }

    /// The orders for now.
    pub fn decide(&mut self, now: Nanos) -> Orders {
        let mut orders = Vec::new();
        self.stops(&mut orders);
        self.moving(&mut orders);
        let order = self.ranked(now);
        let wanted = match self.policy.style {
            Style::Fill | Style::UntilBusy => self.until_busy(&order, now, &mut orders),
            _ => self.in_order(&order, &mut orders),
        };
        self.adopt(&mut orders);
        self.go(&wanted, &mut orders);
        orders
    }

    fn state(&self, job: JobId) -> Option<State> {
        self.jobs.get(&job).map(|t| t.state)
    }

    fn leave(&mut self, job: JobId, orders: &mut Orders) {
        // A job that has run its last iteration ends without an order.
        let may = |t: &&mut Tenant| t.state == State::Idle && t.left > 0;
        if let Some(tenant) = self.jobs.get_mut(&job).filter(may) {
            tenant.state = State::Leaving;
            orders.push((job, Order::Leave));
        }
    }

    fn stops(&mut self, orders: &mut Orders) {
        for (&job, tenant) in &mut self.jobs {
            let between = matches!(tenant.state, State::Waiting | State::Idle | State::Out);
            if tenant.stopping && tenant.left > 0 && between {
                tenant.state = State::Leaving;
                orders.push((job, Order::Stop));
            }
        }
    }

    /// Continues to make room for a job by moving others.
    fn moving(&mut self, orders: &mut Orders) {
        let Some((newcomer, mut moving)) = self.room_for.take() else { return };
        moving.retain(|job| self.jobs.get(job).is_some_and(|t| !t.stopping));
        let called_off = !self.is_waiting(newcomer);
        if called_off || moving.iter().all(|&job| self.state(job) == Some(State::Out)) {
            let entry = if called_off { Entry::Full } else { self.admit(newcomer, &moving) };
            if let Entry::Moves(more) = entry {
                moving.extend(more);
            } else {
                self.all_in(State::Out).into_iter().for_each(|job| self.enter(job, orders));
                if entry == Entry::In {
                    self.enter(newcomer, orders);
                }
                // Jobs that were still leaving are then simply out.
                return;
            }
        }
        moving.iter().for_each(|&job| self.leave(job, orders));
        self.room_for = Some((newcomer, moving));
    }

    /// Jobs that may run at the same time share a lane only if they were planned to. Other jobs
    /// share one.
    fn join(&self, needs: &Needs) -> Join {
        if needs.shares || self.policy.style.in_turn() { Join::Share } else { Join::Own }
    }

    fn admit(&mut self, job: JobId, out: &BTreeSet<JobId>) -> Entry {
        let Some(needs) = self.jobs.get(&job).map(|t| t.needs) else { return Entry::Full };
        self.memory.admit(job, needs.bytes(), self.join(&needs), out)
    }

    /// Whether a job could be admitted to this memory, perhaps once others have moved.
    fn fits(&self, memory: &Memory, job: JobId, needs: &Needs) -> bool {
        let entry = memory.clone().admit(job, needs.bytes(), self.join(needs), &BTreeSet::new());
        entry != Entry::Full
    }

    /// The jobs in this state.
    fn all_in(&self, state: State) -> Vec<JobId> {
        self.jobs.iter().filter(|(_, t)| t.state == state).map(|(id, _)| *id).collect()
    }

    fn is_inside(&self, job: JobId) -> bool {
        matches!(self.state(job), Some(State::Idle | State::Running))
    }

    /// Whether a job waits for memory and goes on.
    fn is_waiting(&self, job: JobId) -> bool {
        self.jobs.get(&job).is_some_and(|t| t.state == State::Waiting && !t.stopping)
    }

    fn enter(&mut self, job: JobId, orders: &mut Orders) {
        if let (Some(spot), Some(tenant)) = (self.memory.spots().get(&job), self.jobs.get_mut(&job))
        {
            tenant.state = State::Idle;
            orders.push((job, Order::Enter(*spot, tenant.needs.plan)));
        }
    }

    /// Admits a waiting job if that is possible at once. Otherwise it begins to make room by moving
    /// other jobs together.
    fn bring_in(&mut self, job: JobId, orders: &mut Orders) -> bool {
        if self.room_for.is_some() || !self.is_waiting(job) {
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

    /// Begins to make room for a job by sending other jobs out, the last of `order` first, if that
    /// is enough.
    fn send_out(&mut self, job: JobId, keep: &[JobId], order: &[JobId], orders: &mut Orders) {
        let Some(tenant) = self.jobs.get(&job).filter(|t| t.state == State::Waiting) else {
            return;
        };
        let fits = |memory: &Memory| self.fits(memory, job, &tenant.needs);
        let mut without = self.memory.clone();
        self.all_in(State::Leaving).into_iter().for_each(|job| without.leave(job));
        let mut victims = Vec::new();
        let may =
            |other: &&JobId| **other != job && !keep.contains(other) && self.is_inside(**other);
        let mut others = order.iter().rev().filter(may);
        while !fits(&without) {
            let Some(&victim) = others.next() else { return };
            without.leave(victim);
            victims.push(victim);
        }
        victims.into_iter().for_each(|victim| self.leave(victim, orders));
    }

    /// All present jobs, the best first.
    fn ranked(&self, now: Nanos) -> Vec<JobId> {
        // The jobs that have run show how wrong expected times are on this device.
        let ran = || self.jobs.values().filter_map(|t| Some((t.measured?.0, t.expected.0)));
        let took: u128 = ran().map(|(measured, _)| u128::from(measured)).sum();
        let thought: u128 = ran().map(|(_, expected)| u128::from(expected)).sum();
        let (took, thought) = if took == 0 || thought == 0 { (1, 1) } else { (took, thought) };
        let left = |t: &Tenant| {
            if let Some(work) = t.work {
                return work.saturating_sub(t.served);
            }
            let expected = || u128::from(t.expected.0) * took / thought;
            let iteration = t.measured.map_or_else(expected, |m| m.0.into());
            Nanos(saturated(iteration * u128::from(t.left)))
        };
        let overdue = self.overdue(now);
        let place = |(&job, t): (&JobId, &Tenant)| {
            let (submit, rank) = (t.submit, self.policy.rank(t.submit, left(t)));
            let (service, begun, overdue) = (Nanos(t.turns), t.begun, overdue == Some(job));
            let candidate = Candidate { submit, rank, service, begun, overdue };
            (self.policy.place(&candidate), job)
        };
        let mut order: Vec<_> = self.jobs.iter().filter(|(_, t)| !t.stopping).map(place).collect();
        order.sort();
        order.into_iter().map(|(_, job)| job).collect()
    }

    fn overdue(&self, now: Nanos) -> Option<JobId> {
        let there = self.jobs.iter().filter(|(_, t)| !t.stopping);
        let (job, oldest) = there.min_by_key(|(id, t)| (t.submit, **id))?;
        self.policy.overdue(oldest.submit, self.patience, now).then_some(*job)
    }

    /// Brings jobs in, in order, and runs the first of those on the device. Where jobs take turns
    /// and memory moves, a job that is not on the device enters once it is behind by more than a
    /// turn.
    fn in_order(&mut self, order: &[JobId], orders: &mut Orders) -> Vec<JobId> {
        let turns = |of: &Self, job: &JobId| of.jobs.get(job).map_or(u64::MAX, |t| t.turns);
        let order =
            if self.policy.style == Style::One { &order[..order.len().min(1)] } else { order };
        for job in order {
            if self.state(*job) != Some(State::Waiting) || self.bring_in(*job, orders) {
                continue;
            }
            if !self.policy.skips {
                break;
            }
            if self.policy.style != Style::Rotating || self.room_for.is_some() {
                continue;
            }
            let first = order.iter().find(|job| self.is_inside(**job));
            let behind = turns(self, job).saturating_add(self.turn.0);
            if self.policy.moves && first.is_none_or(|first| behind < turns(self, first)) {
                // Until it is admitted, no other job is admitted and none runs.
                self.send_out(*job, &[], order, orders);
                return Vec::new();
            }
        }
        let inside = order.iter().filter(|job| self.is_inside(**job)).map(|job| (*job, 0));
        self.policy.choose(inside, order.len(), false, |_| true)
    }

    /// Runs the best jobs until the device is busy.
    fn until_busy(&mut self, order: &[JobId], now: Nanos, orders: &mut Orders) -> Vec<JobId> {
        let ranked: Vec<(JobId, u32)> =
            order.iter().filter_map(|j| Some((*j, self.jobs.get(j)?.utilisation))).collect();
        let overdue = self.overdue(now).is_some_and(|j| self.state(j) == Some(State::Waiting));
        // Jobs that were planned to share need one lane together.
        let (mut taken, mut lane) = (Bytes::ZERO, Bytes::ZERO);
        let wanted = self.policy.choose(ranked.into_iter(), MOST, overdue, |job| {
            let Some(needs) = self.jobs.get(&job).map(|t| t.needs) else { return false };
            let (own, shared) = match needs.shares {
                true => (Bytes::ZERO, lane.max(needs.ephemeral)),
                false => (needs.ephemeral, lane),
            };
            let fits = taken + needs.persistent + own + shared <= self.memory.lanes.capacity();
            if fits {
                (taken, lane) = (taken + needs.persistent + own, shared);
            }
            fits
        });
        for &job in &wanted {
            if self.state(job) == Some(State::Waiting) && !self.bring_in(job, orders) {
                if self.room_for.is_none() && self.policy.moves {
                    self.send_out(job, &wanted, order, orders);
                }
                break;
            }
        }
        wanted
    }

    /// A job with a new plan that would fit leaves the device, to enter again with that plan.
    fn adopt(&mut self, orders: &mut Orders) {
        if self.room_for.is_some() {
            return;
        }
        let replanned =
            |(id, t): (&JobId, &Tenant)| Some((*id, t.next.filter(|_| t.state == State::Idle)?));
        for (job, next) in self.jobs.iter().filter_map(replanned).collect::<Vec<_>>() {
            let mut memory = self.memory.clone();
            memory.leave(job);
            // Where others have to move for it, that begins when it has left.
            if self.fits(&memory, job, &next) {
                self.leave(job, orders);
            }
        }
    }

    fn go(&mut self, wanted: &[JobId], orders: &mut Orders) {
        let one = self.policy.style.in_turn();
        let spots = self.memory.spots();
        // The lanes in use, and whether they are passed on within iterations.
        let running = self.jobs.iter().filter(|(_, t)| t.state == State::Running);
        let mut busy: BTreeMap<LaneId, bool> =
            running.filter_map(|(id, t)| Some((spots.get(id)?.lane, t.needs.shares))).collect();
        for &job in wanted {
            let moving = self.room_for.as_ref().is_some_and(|(_, moving)| moving.contains(&job));
            let may = |t: &&mut Tenant| t.state == State::Idle && !moving && t.left > 0;
            let Some(tenant) = self.jobs.get_mut(&job).filter(may) else { continue };
            let Some(spot) = spots.get(&job) else { continue };
            let free = busy.get(&spot.lane).is_none_or(|&passed| passed && tenant.needs.shares);
            if (one && !busy.is_empty()) || !free {
                continue;
            }
            (tenant.state, tenant.begun) = (State::Running, true);
            busy.insert(spot.lane, tenant.needs.shares);
            orders.push((job, Order::Go));
        }
    }
}

/// The most lanes under a policy.
fn lanes(policy: &Policy) -> usize {
    if policy.style.in_turn() { 1 } else { MOST }
}
