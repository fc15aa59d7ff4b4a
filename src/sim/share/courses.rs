//! What each script did, taken from the events of a log or of a replay, and the scripts as a trace
//! of jobs.
//!
//! A script's work is the time for which it held the token of its lane. How long it waited in
//! between is left out, so the same work can be done in another order.

use std::collections::BTreeMap;

use super::events::What;
use super::jobs::{Job, Trace};
use super::memory::Need;
use super::result::{Doing, JobResult, Moment, Outcome, Stretch, Verdict};
use crate::units::{Bytes, Nanos, id32};

/// Times were measured while scripts shared the device, so the simulator slows none of them again.
const SLOWS_NONE: u32 = 1;

/// An iteration that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// How long it took.
    pub took: Nanos,
    /// What the script's allocator had reserved then.
    pub holds: Bytes,
    /// What the script needs, where this iteration showed that.
    pub shows: Option<Need>,
}

/// What one script did.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// Its name.
    pub name: String,
    /// When it came.
    pub came: Nanos,
    /// What it said it needs when it came.
    pub said: Option<Need>,
    /// The time of all its iterations, if it said that.
    pub said_work: Option<Nanos>,
    /// Its iterations.
    pub steps: Vec<Step>,
    /// How long it held the token after its last iteration.
    pub tail: Nanos,
    need: Option<Need>,
    admitted: Option<Nanos>,
    lane: Option<u32>,
    start: Option<Nanos>,
    /// Since when it has held the token, and when its present iteration began.
    holds: Option<(Nanos, Nanos)>,
    work: Nanos,
    switches: u32,
    end: Option<Nanos>,
    since: Nanos,
    stretches: Vec<(Doing, Nanos, Nanos)>,
}

impl Course {
    /// A script that has just come.
    pub(super) fn new(name: &str, came: Nanos) -> Self {
        Self { name: name.to_owned(), came, since: came, ..Self::default() }
    }

    /// Adds an event to what the scripts did.
    ///
    /// # Errors
    /// Why the event can't have happened.
    pub fn follow(
        courses: &mut BTreeMap<u64, Self>,
        what: &What,
        now: Nanos,
    ) -> Result<(), String> {
        let Some(number) = what.script() else { return Ok(()) };
        if let What::Came { script, name, work_ns } = what {
            courses.insert(*script, Self { said_work: *work_ns, ..Self::new(name, now) });
            return Ok(());
        }
        let course = courses.get_mut(&number).filter(|course| course.end.is_none());
        let course =
            course.ok_or_else(|| format!("script {number} is not there; is a line missing?"))?;
        match *what {
            What::Began { .. } | What::Came { .. } | What::GaveBack { .. } => {}
            What::Needs { persistent_bytes, ephemeral_bytes, .. } => {
                course.needs((persistent_bytes, ephemeral_bytes));
            }
            What::Admitted { lane, .. } => {
                course.admitted.get_or_insert(now);
                course.lane = Some(lane);
            }
            What::Token { .. } => course.token(now),
            What::Iteration { took_ns: took, holds_bytes: holds, .. } => {
                course.steps.push(Step { took, holds, shows: None });
                if let Some((_, began)) = &mut course.holds {
                    *began = now;
                }
            }
            What::Passed { .. } => course.passes(now),
            What::Left { .. } => course.leave(now),
        }
        Ok(())
    }

    fn does(&mut self, doing: Doing, now: Nanos) {
        if self.since < now {
            self.stretches.push((doing, self.since, now));
        }
        self.since = now;
    }

    fn waits(&self) -> Doing {
        if self.start.is_some() { Doing::Rests } else { Doing::Waits }
    }

    fn needs(&mut self, need: Need) {
        match self.steps.last_mut() {
            Some(step) => step.shows = Some(need),
            None => self.said = Some(need),
        }
        self.need = Some(need);
    }

    fn token(&mut self, now: Nanos) {
        if self.holds.is_none() {
            self.does(self.waits(), now);
            self.start.get_or_insert(now);
            self.holds = Some((now, now));
        }
    }

    fn passes(&mut self, now: Nanos) {
        if let Some((since, began)) = self.holds.take() {
            self.work += now.saturating_sub(since);
            self.tail = now.saturating_sub(began);
            self.does(Doing::Runs, now);
            self.switches += 1;
        }
    }

    /// It is gone.
    pub fn leave(&mut self, now: Nanos) {
        if self.end.is_none() {
            self.tail = Nanos::ZERO;
            self.passes(now);
            self.does(self.waits(), now);
            self.end = Some(now);
        }
    }

    /// Whether it ever held the token.
    #[must_use]
    pub fn has_run(&self) -> bool {
        self.work > Nanos::ZERO
    }

    /// The time of one of its iterations: the median, or all of its work where none ended.
    fn iteration(&self) -> Nanos {
        let mut all: Vec<Nanos> = self.steps.iter().map(|step| step.took).collect();
        all.sort_unstable();
        let median = all.get(all.len() / 2).copied().unwrap_or(self.work);
        median.min(self.work).max(Nanos(1))
    }
}

/// The scripts as jobs, in the order of their numbers.
#[must_use]
pub fn trace(courses: &BTreeMap<u64, Course>) -> Trace {
    let job = |course: &Course| Job {
        name: course.name.as_str().into(),
        submit: course.came,
        work: course.work,
        iteration: course.iteration(),
        need: course.need.unwrap_or_default(),
        utilisation: SLOWS_NONE,
        priority: 0,
        kill: None,
        rate: None,
        growth: None,
    };
    Trace { jobs: courses.values().map(job).collect(), sorted: true }
}

/// What happened to them, in the same order.
#[must_use]
pub fn outcome(courses: &BTreeMap<u64, Course>) -> Outcome {
    let result = |course: &Course| JobResult {
        admitted: course.admitted.or(course.start),
        start: course.start,
        end: course.end.unwrap_or_default(),
        verdict: if course.has_run() { Verdict::Done } else { Verdict::NeverFits },
        served: course.work,
        // The last token goes with the script.
        switches: course.switches.saturating_sub(1),
        dilation: 1000,
    };
    let jobs: Vec<JobResult> = courses.values().map(result).collect();
    let switches = jobs.iter().map(|job| u64::from(job.switches)).sum();
    let mut stretches = Vec::new();
    for (job, course) in courses.values().enumerate() {
        let stretch = |&(doing, from, to): &_| Stretch { job: id32(job), doing, from, to };
        stretches.extend(course.stretches.iter().map(stretch));
    }
    Outcome { jobs, switches, stretches, ..Outcome::default() }
}

/// The memory that is promised now: what the scripts in lanes keep, and each lane's largest need.
#[must_use]
pub fn moment(courses: &BTreeMap<u64, Course>, at: Nanos) -> Moment {
    let there = || courses.values().filter(|course| course.end.is_none());
    let (mut persistent, mut lanes) = (Bytes::ZERO, BTreeMap::<u32, Bytes>::new());
    for (lane, need) in there().filter_map(|course| Some((course.lane?, course.need?))) {
        persistent += need.0;
        let largest = lanes.entry(lane).or_default();
        *largest = need.1.max(*largest);
    }
    let running = there().filter(|course| course.holds.is_some()).count();
    let waiting = there().filter(|course| course.lane.is_none()).count();
    Moment { at, persistent, lanes: lanes.into_iter().collect(), running, waiting }
}
