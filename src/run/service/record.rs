//! Records what happens to the jobs.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use crate::Outcome;
use crate::sim::share::lanes::JobId;
use crate::units::{Bytes, Nanos};

use super::worker::Work;
use crate::sim::share::scheduler::Coming;

/// How a job ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// It has not ended.
    #[default]
    Unfinished,
    /// All its iterations have run.
    Done,
    /// It ended early because it was asked to.
    Stopped,
    /// It failed.
    Failed(String),
    /// It was not admitted.
    Refused(String),
}

impl Verdict {
    /// The verdict's name in tables.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Unfinished => "unfinished",
            Self::Done => "done",
            Self::Stopped => "stopped",
            Self::Failed(_) => "failed",
            Self::Refused(_) => "refused",
        }
    }

    /// The reason, if there is one.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Failed(why) | Self::Refused(why) => Some(why),
            _ => None,
        }
    }
}

/// The record of a job. Times count from the start of the service.
#[derive(Clone, Debug, Default, Serialize)]
pub struct JobReport {
    /// Its name.
    pub name: String,
    /// How it ended.
    #[serde(skip)]
    pub verdict: Verdict,
    /// When it was submitted.
    pub submitted_ns: Nanos,
    /// When its first iteration began.
    pub started_ns: Option<Nanos>,
    /// When it ended.
    pub ended_ns: Nanos,
    /// The reason for its first wait, if it had to wait.
    pub waited_for: Option<String>,
    /// The sum of its iterations' times.
    pub service_ns: Nanos,
    /// How many iterations it has run.
    pub iterations: u32,
    /// How many times its memory was copied to the host, for other jobs or to be moved.
    pub sent_out: u32,
    /// Bytes that it keeps between iterations, by its first plan.
    pub persistent_bytes: Bytes,
    /// Bytes that its iterations need, by its first plan.
    pub ephemeral_bytes: Bytes,
    /// The job, unless it was refused at once.
    #[serde(skip)]
    pub work: Option<Arc<Work>>,
    /// The results of its run. A job that ended early has no checksum.
    #[serde(skip)]
    pub outcome: Outcome,
    /// Whether its first admission was reported.
    #[serde(skip)]
    entered: bool,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The instant.
    pub at: Nanos,
    /// The job, by position in the report.
    pub job: usize,
    /// `submit`, `enter`, `go`, `ran`, `leave`, `plan` or `end`.
    pub what: &'static str,
    /// Of `plan`: why all jobs were planned again.
    pub why: String,
}

/// One time that all jobs were planned again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Planning {
    /// When the new plans were ready.
    pub at_ns: Nanos,
    /// Which jobs came, ended or drifted.
    pub why: String,
    /// The jobs whose plan is new.
    pub new_plans: Vec<String>,
    /// Why there are no new plans.
    pub kept_because: Option<String>,
    /// Predicted time of one iteration of each job by itself, added up, under the old plans.
    pub predicted_before_ns: Option<Nanos>,
    /// The same under the new plans.
    pub predicted_after_ns: Option<Nanos>,
    /// How long planning took, in the background.
    pub planning_ns: Nanos,
}

/// A span of time with the same jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stretch {
    /// When it begins.
    pub from_ns: Nanos,
    /// When it ends.
    pub to_ns: Nanos,
    /// Service of each job in it.
    pub service_ns: BTreeMap<String, Nanos>,
}

/// The record of the whole service.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// In order of submission.
    #[serde(skip)]
    pub jobs: Vec<JobReport>,
    /// Size of the arena.
    pub arena_bytes: Bytes,
    /// The most bytes in use at once: persistent memory and lanes.
    pub reserved_peak_bytes: Bytes,
    /// The end of the highest bytes that were touched.
    pub touched_peak_bytes: Bytes,
    /// When the last job ended.
    pub makespan_ns: Nanos,
    /// The events, in order, if they were asked for.
    #[serde(skip)]
    pub moments: Vec<Moment>,
    /// The spans with the same jobs, in order.
    pub stretches: Vec<Stretch>,
    /// The times that all jobs were planned again, in order.
    pub plannings: Vec<Planning>,
}

/// The report while it is being made.
#[derive(Default)]
pub struct Records {
    pub report: Report,
    /// Whether events are kept.
    events: bool,
    /// Each job's position in the report.
    places: Vec<usize>,
    /// The present jobs, with their service when the set of jobs last changed.
    there: Vec<(usize, Nanos)>,
    since: Nanos,
}

impl Records {
    /// No records yet.
    pub fn new(events: bool) -> Self {
        Self { events, ..Self::default() }
    }

    fn event(&mut self, moment: Moment) {
        if self.events {
            self.report.moments.push(moment);
        }
    }

    /// A job's report.
    pub fn job(&mut self, job: JobId) -> &mut JobReport {
        &mut self.report.jobs[self.places[job as usize]]
    }

    /// Records an event of a job, whose report it returns.
    pub fn note(&mut self, job: JobId, at: Nanos, what: &'static str) -> &mut JobReport {
        let place = self.places[job as usize];
        self.event(Moment { at, job: place, what, why: String::new() });
        &mut self.report.jobs[place]
    }

    /// A job gets its number; jobs are numbered in this order.
    pub fn came(&mut self, tenant: (&str, &Arc<Work>), submitted: Nanos, coming: &Coming) {
        self.places.push(self.report.jobs.len());
        self.report.jobs.push(JobReport {
            name: tenant.0.to_owned(),
            work: Some(Arc::clone(tenant.1)),
            submitted_ns: submitted,
            persistent_bytes: coming.needs.persistent,
            ephemeral_bytes: coming.needs.ephemeral,
            ..JobReport::default()
        });
    }

    /// A job is refused before it gets a number.
    pub fn refused(&mut self, name: &str, now: Nanos, verdict: Verdict) {
        self.report.jobs.push(JobReport {
            name: name.to_owned(),
            submitted_ns: now,
            ended_ns: now,
            verdict,
            ..JobReport::default()
        });
    }

    /// A job was submitted to the scheduler.
    pub fn submitted(&mut self, job: JobId, now: Nanos) {
        self.turn_over(now);
        let had = self.note(job, now, "submit").service_ns;
        self.there.push((self.places[job as usize], had));
    }

    /// Ends the span with the present set of jobs.
    fn turn_over(&mut self, now: Nanos) {
        let (jobs, from_ns) = (&self.report.jobs, self.since);
        let service = |&(place, had): &(usize, Nanos)| {
            let job = &jobs[place];
            (job.name.clone(), job.service_ns.saturating_sub(had))
        };
        let service_ns: BTreeMap<String, Nanos> = self.there.iter().map(service).collect();
        if !service_ns.is_empty() && from_ns < now {
            self.report.stretches.push(Stretch { from_ns, to_ns: now, service_ns });
        }
        for (place, had) in &mut self.there {
            *had = self.report.jobs[*place].service_ns;
        }
        self.since = now;
    }

    /// A job was admitted. Returns how long it waited, the first time.
    pub fn entered(&mut self, job: JobId, now: Nanos) -> Option<Nanos> {
        let report = self.note(job, now, "enter");
        let first = !std::mem::replace(&mut report.entered, true);
        first.then_some(now.saturating_sub(report.submitted_ns))
    }

    /// All jobs were planned again, and these have new plans.
    pub fn planned(&mut self, mut planning: Planning, jobs: &[JobId]) -> &Planning {
        for &job in jobs {
            let (at, job, why) = (planning.at_ns, self.places[job as usize], planning.why.clone());
            self.event(Moment { at, job, what: "plan", why });
            planning.new_plans.push(self.report.jobs[job].name.clone());
        }
        self.report.plannings.push_mut(planning)
    }

    /// Records what a job waits for. Returns that if it is the first wait of a job that was never
    /// admitted.
    pub fn waits(&mut self, job: JobId, why: impl FnOnce() -> Option<String>) -> Option<String> {
        let report = self.job(job);
        if report.entered || report.waited_for.is_some() {
            return None;
        }
        report.waited_for = why();
        report.waited_for.clone()
    }

    /// A job has ended.
    pub fn ended(&mut self, job: JobId, verdict: Verdict, now: Nanos) {
        self.turn_over(now);
        let report = self.note(job, now, "end");
        (report.verdict, report.ended_ns) = (verdict, now);
        self.there.retain(|t| t.0 != self.places[job as usize]);
        self.report.makespan_ns = self.report.makespan_ns.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_kept_only_where_they_are_asked_for() {
        for asked in [false, true] {
            let mut records = Records::new(asked);
            records.places.push(0);
            records.report.jobs.push(JobReport::default());
            for at in 0..100 {
                records.note(0, Nanos(at), "ran");
            }
            assert_eq!(records.report.moments.len(), if asked { 100 } else { 0 });
        }
    }
}
