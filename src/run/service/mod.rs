//! Several jobs on one device at once: one process, one arena, scheduled at iteration boundaries.
//!
//! The service runs plans in lanes under a policy; [`crate::sim::share`] simulates the same
//! decisions, and its [`scheduler`](crate::sim::share::scheduler) decides here which job runs next.
//! Each job has its own thread and streams, and a part of the shared arena (`split`). Jobs may come
//! and go during the run, and are then planned again together, and also when measured latencies
//! drift (`feedback`). A job computes the same numbers as when it runs alone, because other jobs
//! affect only its timing.

mod feedback;
mod planning;
mod record;
mod split;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

pub use record::{JobReport, Moment, Planning, Report, Stretch, Verdict};
pub use worker::Work;

use super::start::Shared;
use super::{RunError, Settings};
use crate::contract::JobPlan;
use crate::device::{Profile, roofline};
use crate::job::json;
use crate::sim::engine;
use crate::sim::program::Program;
use crate::sim::share::lanes::JobId;
use crate::sim::share::memory::Need;
use crate::sim::share::policy::Policy;
use crate::sim::share::scheduler::{Coming, Needs, Order, Scheduler};
use crate::units::{BLOCK, Bytes, Nanos, id32, saturated};
use feedback::Feedback;
use planning::Made;
use record::Records;
use split::Split;
use worker::{Command, Progress, Worker};

/// A job to be run.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its name, which no other present job has.
    pub name: String,
    /// The job and its plan.
    pub work: Work,
    /// When it is submitted, from the service's start.
    pub submit: Nanos,
}

/// A request to the running service.
#[derive(Debug)]
pub enum Request {
    /// Submit a job now.
    Submit(Box<Tenant>),
    /// End the job of this name at its next iteration boundary.
    End(String),
    /// There will be no more requests.
    Close,
}

/// An event, for observers.
#[derive(Debug)]
pub enum Notice<'a> {
    /// A job was submitted and waits; the reason.
    Queued(&'a str, String),
    /// A job was admitted, after this time.
    Admitted(&'a str, Nanos),
    /// An iteration of a job has ended.
    Iteration,
    /// A job has ended.
    Ended(&'a str, &'a Verdict),
    /// There is no job of this name.
    Unknown(&'a str),
    /// All jobs were planned again.
    Planned(&'a Planning),
}

/// The settings of the service.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// The policy that picks the next job.
    pub policy: &'static Policy,
    /// Size of the arena.
    pub arena: Bytes,
    /// How long after its submission a job is overdue, if the policy cares.
    pub patience: Nanos,
    /// The shortest service after which memory is moved for a turn.
    pub turn: Nanos,
    /// The device and the rate of copies. Seeds and iterations are each job's own.
    pub settings: &'a Settings,
    /// The device's profile.
    pub device: &'a Profile,
    /// Whether all jobs are planned again whenever a job comes, ends or drifts.
    pub replan: bool,
    /// By how much the sum of a job's operators or of the link's copies must change for that, in
    /// thousandths.
    pub threshold_per_mille: u64,
    /// Whether the report has all events. There are several for each iteration.
    pub events: bool,
}

/// Why the service did not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// A job that was submitted at the start can't run.
    #[error("`{0}`: {1}")]
    Job(String, RunError),
    /// A job that was submitted at the start does not fit even alone.
    #[error("`{name}` never fits: it keeps {persistent} ({} bytes) and its iterations need {ephemeral} ({} bytes), of {arena} ({} bytes); plan it with a lower --budget, or give more --memory", .persistent.0, .ephemeral.0, .arena.0)]
    NeverFits {
        /// The name.
        name: String,
        /// Bytes that it holds between iterations.
        persistent: Bytes,
        /// Bytes that its iterations need.
        ephemeral: Bytes,
        /// Bytes of the arena.
        arena: Bytes,
    },
    /// Two jobs have the same name.
    #[error("there are two jobs called `{0}`; name them apart")]
    Twice(String),
    /// The device failed.
    #[error(transparent)]
    Device(RunError),
}

/// A message to the service.
enum Message {
    Progress(JobId, Progress),
    Request(Request),
    Planned(Box<Made>),
}

/// The messages to the service, from its jobs and from other threads.
pub struct Mailbox {
    sender: Sender<Message>,
    messages: Receiver<Message>,
    /// Whether a request may still come.
    open: bool,
}

impl Default for Mailbox {
    fn default() -> Self {
        let (sender, messages) = channel();
        Self { sender, messages, open: false }
    }
}

/// Sends requests to the service from other threads.
#[derive(Clone)]
pub struct Remote(Sender<Message>);

impl Mailbox {
    /// From now on the service waits for [`Request::Close`].
    pub fn remote(&mut self) -> Remote {
        self.open = true;
        Remote(self.sender.clone())
    }
}

impl Remote {
    /// Sends a request. Returns whether the service is still running.
    #[must_use]
    pub fn ask(&self, request: Request) -> bool {
        self.0.send(Message::Request(request)).is_ok()
    }
}

/// A job's needs and expected times, from its plan.
fn coming(work: &Work, plan: &JobPlan, index: usize) -> Result<Coming, RunError> {
    let program = Program::placed(&work.graph, plan)?;
    let split = Split::new(&program, plan.window.as_ref());
    let iteration =
        engine::nominal(&program, &work.profile.link).map(|run| run.iteration).unwrap_or_default();
    Ok(Coming {
        needs: Needs {
            persistent: split.persistent,
            ephemeral: split.ephemeral,
            shares: plan.window.is_some(),
            plan: index,
        },
        utilisation: roofline::utilisation(&work.graph.operators, &plan.latencies, &work.profile),
        iterations: work.settings.iterations,
        iteration,
    })
}

/// The same of a job that comes, under its plan.
fn first_coming(Tenant { name, work, .. }: &Tenant) -> Result<Coming, ServiceError> {
    coming(work, &work.plan, 0).map_err(|e| ServiceError::Job(name.clone(), e))
}

/// The persistent and ephemeral bytes of a job's plan.
///
/// # Errors
/// When the plan can't be read.
pub fn needs(work: &Work) -> Result<Need, RunError> {
    coming(work, &work.plan, 0).map(|c| c.needs.bytes())
}

/// Runs `tenants`, and the jobs that are submitted later, until all have ended and no more requests
/// can come.
///
/// # Errors
/// Before the run: a job of the start that can't run or does not fit, or a missing device. During
/// the run, a job that fails is reported and the others continue.
pub fn serve(
    options: &Options<'_>,
    tenants: Vec<Tenant>,
    mailbox: Mailbox,
    notice: &mut dyn FnMut(Notice<'_>),
) -> Result<Report, ServiceError> {
    let options = Options { arena: Bytes(options.arena.0 / BLOCK * BLOCK), ..*options };
    let target = &options.settings.target;
    let mut seated = Vec::with_capacity(tenants.len());
    for tenant in tenants {
        let coming = first_coming(&tenant)?;
        let (name, arena, Needs { persistent, ephemeral, .. }) =
            (tenant.name.clone(), options.arena, coming.needs);
        if persistent + ephemeral > arena {
            return Err(ServiceError::NeverFits { name, persistent, ephemeral, arena });
        }
        seated.push((tenant, coming));
    }
    let shared = Shared::new(target, options.arena, &options.settings.host(options.device))
        .map_err(|f| ServiceError::Device(RunError::Device(target.name(), f.to_string())))?;
    thread::scope(|scope| {
        let scheduler =
            Scheduler::new(options.policy, options.arena, options.patience, options.turn);
        let mut service = Service {
            scope,
            options,
            shared: &shared,
            mailbox,
            scheduler,
            seats: Vec::new(),
            started: Instant::now(),
            records: Records::new(options.events),
            feedback: Feedback::new(options.device, options.threshold_per_mille),
            is_planning: false,
            why: Vec::new(),
            asked: 0,
            planned_for: 0,
        };
        for (tenant, coming) in seated {
            service.seat(tenant, coming)?;
        }
        service.ready()?;
        service.run(notice);
        Ok(Report { arena_bytes: service.options.arena, ..service.records.report })
    })
}

struct Service<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    options: Options<'env>,
    shared: &'env Shared,
    mailbox: Mailbox,
    scheduler: Scheduler,
    /// Seats by job number.
    seats: Vec<Seat>,
    started: Instant,
    records: Records,
    feedback: Feedback,
    /// Whether all jobs are being planned in the background.
    is_planning: bool,
    /// Why jobs are planned next.
    why: Vec<String>,
    /// How many times the set of jobs has changed, now and when the plans in use were made.
    asked: u64,
    planned_for: u64,
}

impl<'env> Service<'_, 'env> {
    fn now(&self) -> Nanos {
        Nanos(saturated(self.started.elapsed().as_nanos()))
    }

    /// Starts a job's thread.
    fn seat(&mut self, tenant: Tenant, coming: Coming) -> Result<(), ServiceError> {
        if self.seats.iter().any(|s| s.stage != Stage::Gone && s.name == tenant.name) {
            return Err(ServiceError::Twice(tenant.name));
        }
        let Tenant { name, work, submit } = tenant;
        let (id, work) = (id32(self.seats.len()), Arc::new(work));
        self.records.came((&name, &work), submit, &coming);
        self.feedback.came(&work.plan);
        let (commands, received) = channel();
        let (arena, shared, mine) = (self.options.arena, self.shared, Arc::clone(&work));
        let messages = self.mailbox.sender.clone();
        self.scope.spawn(move || {
            let report = |what| drop(messages.send(Message::Progress(id, what)));
            Worker { id, work: &mine, arena, shared, commands: received, report: &report }.run();
        });
        let (sha256, plans) = (json::sha256(&work.graph), BTreeMap::from([(0, work.plan.clone())]));
        let (stage, follows) = (Stage::Coming, 0);
        let seat = Seat { name, work, sha256, commands, coming, submit, stage, plans, follows };
        self.seats.push(seat);
        Ok(())
    }

    /// Waits until all jobs of the start can run.
    fn ready(&mut self) -> Result<(), ServiceError> {
        let mut early = Vec::new();
        while self.seats.iter().any(|s| s.stage == Stage::Coming) {
            match self.mailbox.messages.recv() {
                Ok(Message::Progress(id, Progress::Failed(error))) => {
                    return Err(ServiceError::Job(self.seats[id as usize].name.clone(), error));
                }
                Ok(Message::Progress(id, _)) => self.seats[id as usize].stage = Stage::Early,
                Ok(asked) => early.push(asked),
                Err(_) => break,
            }
        }
        // Requests that came too early are sent again.
        early.into_iter().for_each(|asked| drop(self.mailbox.sender.send(asked)));
        self.started = Instant::now();
        Ok(())
    }

    fn run(&mut self, notice: &mut dyn FnMut(Notice<'_>)) {
        loop {
            self.due(notice);
            self.decide(notice);
            let present = self.seats.iter().any(|s| s.stage != Stage::Gone);
            if !present && !self.mailbox.open {
                return;
            }
            let next =
                self.seats.iter().filter(|s| s.stage == Stage::Early).map(|s| s.submit).min();
            let until = |at: Nanos| Duration::from_nanos(at.saturating_sub(self.now()).0);
            match self.mailbox.messages.recv_timeout(next.map_or(Duration::MAX, until)) {
                Ok(message) => self.handle(message, notice),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Submits the jobs whose time has come to the scheduler.
    fn due(&mut self, notice: &mut dyn FnMut(Notice<'_>)) {
        let now = self.now();
        let is_due =
            |&id: &usize| self.seats[id].stage == Stage::Early && self.seats[id].submit <= now;
        let mut due: Vec<usize> = (0..self.seats.len()).filter(is_due).collect();
        due.sort_by_key(|&id| self.seats[id].submit);
        for id in due {
            let (job, seat) = (id32(id), &mut self.seats[id]);
            seat.stage = Stage::There;
            if self.scheduler.submit(job, &seat.coming, now) {
                self.records.submitted(job, now);
                let why = format!("`{}` came", seat.name);
                self.changed(why);
            } else {
                let needs = seat.coming.needs;
                let all = format!(
                    "it never fits: it needs {} + {} of {}",
                    needs.persistent, needs.ephemeral, self.options.arena
                );
                self.gone(job, Verdict::Refused(all), notice);
            }
        }
    }

    fn handle(&mut self, message: Message, notice: &mut dyn FnMut(Notice<'_>)) {
        let now = self.now();
        match message {
            // The job was refused, and its thread is still ending.
            Message::Progress(id, _) if self.seats[id as usize].stage == Stage::Gone => {}
            Message::Progress(id, Progress::Ready) => self.seats[id as usize].stage = Stage::Early,
            Message::Progress(id, Progress::Ran(measured)) => {
                let took = measured.iteration;
                self.scheduler.ran(id, took);
                let report = self.records.note(id, now, "ran");
                report.iterations += 1;
                report.service_ns += took;
                notice(Notice::Iteration);
                self.learn(id, &measured);
            }
            Message::Progress(id, Progress::Left) => {
                self.scheduler.left(id);
                self.records.note(id, now, "leave").sent_out += 1;
            }
            Message::Progress(id, Progress::Ended(outcome, whole)) => {
                let verdict = if whole { Verdict::Done } else { Verdict::Stopped };
                let touched = &mut self.records.report.touched_peak_bytes;
                *touched = outcome.peak_bytes.max(*touched);
                self.records.job(id).outcome = *outcome;
                self.gone(id, verdict, notice);
            }
            Message::Progress(id, Progress::Failed(error)) => {
                self.gone(id, Verdict::Failed(error.to_string()), notice)
            }
            Message::Request(Request::Close) => self.mailbox.open = false,
            Message::Request(Request::Submit(mut tenant)) => {
                tenant.submit = now;
                let name = tenant.name.clone();
                let seated = first_coming(&tenant);
                if let Err(error) = seated.and_then(|coming| self.seat(*tenant, coming)) {
                    let verdict = Verdict::Refused(error.to_string());
                    notice(Notice::Ended(&name, &verdict));
                    self.records.refused(&name, now, verdict);
                }
            }
            Message::Request(Request::End(name)) => {
                match self.seats.iter().position(|s| s.stage != Stage::Gone && s.name == name) {
                    Some(id) if self.seats[id].stage == Stage::There => {
                        self.scheduler.stop(id32(id))
                    }
                    Some(id) => drop(self.seats[id].commands.send((Order::Stop, None))),
                    None => notice(Notice::Unknown(&name)),
                }
            }
            Message::Planned(made) => self.planned(*made, notice),
        }
    }

    fn gone(&mut self, id: JobId, verdict: Verdict, notice: &mut dyn FnMut(Notice<'_>)) {
        let now = self.now();
        let seat = &mut self.seats[id as usize];
        // A thread that is still running ends when its channel of commands is closed.
        (seat.stage, seat.commands) = (Stage::Gone, channel().0);
        self.scheduler.ended(id);
        notice(Notice::Ended(&seat.name, &verdict));
        let why = format!("`{}` ended", seat.name);
        self.records.ended(id, verdict, now);
        self.changed(why);
    }

    /// Asks the scheduler for decisions, and sends its orders to the jobs.
    fn decide(&mut self, notice: &mut dyn FnMut(Notice<'_>)) {
        let now = self.now();
        for (id, order) in self.scheduler.decide(now) {
            let (seat, mut newer) = (&mut self.seats[id as usize], None);
            match order {
                Order::Enter(_, plan) => {
                    newer = (seat.follows != plan).then(|| Box::new(seat.plans[&plan].clone()));
                    seat.follows = plan;
                    if self.options.replan {
                        self.feedback.follow(id as usize, &seat.work, &seat.plans[&plan]);
                    }
                    if let Some(waited) = self.records.entered(id, now) {
                        notice(Notice::Admitted(&seat.name, waited));
                    }
                }
                Order::Go => _ = self.records.note(id, now, "go").started_ns.get_or_insert(now),
                Order::Leave | Order::Stop => {}
            }
            // A thread that has ended has sent a message before.
            let _ = seat.commands.send((order, newer));
        }
        let reserved = &mut self.records.report.reserved_peak_bytes;
        *reserved = self.scheduler.memory.lanes.used().max(*reserved);
        for (id, seat) in self.seats.iter().enumerate().filter(|(_, s)| s.stage == Stage::There) {
            let job = id32(id);
            if let Some(why) = self.records.waits(job, || self.scheduler.waits_for(job)) {
                notice(Notice::Queued(&seat.name, why));
            }
        }
    }
}

/// The service's side of a job.
struct Seat {
    name: String,
    work: Arc<Work>,
    /// The hash of its graph.
    sha256: String,
    commands: Sender<Command>,
    coming: Coming,
    submit: Nanos,
    stage: Stage,
    /// By number the newest plan and the older ones that it may still follow, and the one in use.
    plans: BTreeMap<usize, JobPlan>,
    follows: usize,
}

impl Seat {
    /// Its newest plan, and the number of that.
    fn newest(&self) -> (usize, &JobPlan) {
        let newest = self.plans.last_key_value().map(|(number, plan)| (*number, plan));
        newest.unwrap_or((0, &self.work.plan))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its thread is preparing it.
    Coming,
    /// Prepared, but its time of submission has not come.
    Early,
    /// Submitted to the scheduler.
    There,
    /// Ended.
    Gone,
}
