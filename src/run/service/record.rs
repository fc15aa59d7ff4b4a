//! What became of the jobs, kept as it happens.

use crate::Outcome;
use crate::sim::share::lanes::JobId;
use crate::units::{Bytes, Nanos};

use super::scheduler::Coming;

/// How a job ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// It has not yet.
    #[default]
    Unfinished,
    /// All its iterations have run.
    Done,
    /// It was asked to end before.
    Stopped,
    /// It could not go on.
    Failed(String),
    /// It was not let in.
    Refused(String),
}

impl Verdict {
    /// As tables have it.
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

    /// Why, where there is more to say.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Failed(why) | Self::Refused(why) => Some(why),
            _ => None,
        }
    }
}

/// What became of a job. Instants count from the start of the service.
#[derive(Clone, Debug, Default)]
pub struct JobReport {
    /// What it is called.
    pub name: String,
    /// When it came.
    pub submitted: Nanos,
    /// When its first iteration began.
    pub started: Option<Nanos>,
    /// When it ended.
    pub ended: Nanos,
    /// How it ended.
    pub verdict: Verdict,
    /// What it waited for first, if it did.
    pub waited_for: Option<String>,
    /// The sum of its iterations' times.
    pub service: Nanos,
    /// How many it has run.
    pub iterations: u32,
    /// How often it was sent out, for others or to move.
    pub left: u32,
    /// What it keeps, and what its iterations need, by its first plan.
    pub persistent: Bytes,
    /// See `persistent`.
    pub ephemeral: Bytes,
    /// What running it was like. A job that ended early has no checksum.
    pub outcome: Outcome,
    /// It is in for the first time, and has said so.
    entered: bool,
}

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The instant.
    pub at: Nanos,
    /// To whom, by position in the report.
    pub job: usize,
    /// `submit`, `enter`, `go`, `ran`, `leave` or `end`.
    pub what: &'static str,
}

/// A time during which the same jobs were there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    /// From when.
    pub from: Nanos,
    /// Until when.
    pub to: Nanos,
    /// Service of each job that was there, by position in the report.
    pub service: Vec<(usize, Nanos)>,
}

/// What became of everything.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// In order of coming.
    pub jobs: Vec<JobReport>,
    /// Size of the arena.
    pub arena: Bytes,
    /// The most that was promised at once: persistent memory and lanes.
    pub reserved_peak: Bytes,
    /// The end of the highest bytes that were touched.
    pub touched_peak: Bytes,
    /// When the last job ended.
    pub makespan: Nanos,
    /// What happened, in order.
    pub moments: Vec<Moment>,
    /// Times during which the same jobs were there, in order.
    pub stretches: Vec<Stretch>,
}

/// The report in the making.
#[derive(Default)]
pub struct Records {
    report: Report,
    /// By job, its position in the report.
    places: Vec<usize>,
    /// Who is there, with the service it had when that last changed.
    there: Vec<(usize, Nanos)>,
    since: Nanos,
}

impl Records {
    fn of(&mut self, job: JobId) -> Option<(usize, &mut JobReport)> {
        let place = *self.places.get(job as usize)?;
        Some((place, self.report.jobs.get_mut(place)?))
    }

    fn note(&mut self, at: Nanos, job: usize, what: &'static str) {
        self.report.moments.push(Moment { at, job, what });
    }

    /// A job has a seat; jobs are numbered in this order.
    pub fn came(&mut self, name: &str, submitted: Nanos, coming: &Coming) {
        self.places.push(self.report.jobs.len());
        self.report.jobs.push(JobReport {
            name: name.to_owned(),
            submitted,
            persistent: coming.needs.persistent,
            ephemeral: coming.needs.ephemeral,
            ..JobReport::default()
        });
    }

    /// A job has no seat.
    pub fn refused(&mut self, name: &str, now: Nanos, verdict: Verdict) {
        self.report.jobs.push(JobReport {
            name: name.to_owned(),
            submitted: now,
            ended: now,
            verdict,
            ..JobReport::default()
        });
    }

    /// It is the scheduler's.
    pub fn submitted(&mut self, job: JobId, now: Nanos) {
        if let Some((place, report)) = self.of(job) {
            let had = report.service;
            self.turn_over(now);
            self.there.push((place, had));
            self.note(now, place, "submit");
        }
    }

    /// A time with the same jobs is over.
    fn turn_over(&mut self, now: Nanos) {
        let (jobs, from) = (&self.report.jobs, self.since);
        let service: Vec<(usize, Nanos)> = self
            .there
            .iter()
            .map(|&(place, had)| (place, jobs[place].service.saturating_sub(had)))
            .collect();
        if !service.is_empty() && from < now {
            self.report.stretches.push(Stretch { from, to: now, service });
        }
        for (place, had) in &mut self.there {
            *had = self.report.jobs[*place].service;
        }
        self.since = now;
    }

    /// It is in; how long it took, the first time.
    pub fn entered(&mut self, job: JobId, now: Nanos) -> Option<Nanos> {
        let (place, report) = self.of(job)?;
        let first = !std::mem::replace(&mut report.entered, true);
        let waited = now.saturating_sub(report.submitted);
        self.note(now, place, "enter");
        first.then_some(waited)
    }

    /// It runs an iteration.
    pub fn went(&mut self, job: JobId, now: Nanos) {
        if let Some((place, report)) = self.of(job) {
            report.started.get_or_insert(now);
            self.note(now, place, "go");
        }
    }

    /// It has run one.
    pub fn ran(&mut self, job: JobId, took: Nanos, now: Nanos) {
        if let Some((place, report)) = self.of(job) {
            report.iterations += 1;
            report.service += took;
            self.note(now, place, "ran");
        }
    }

    /// It is out.
    pub fn left(&mut self, job: JobId, now: Nanos) {
        if let Some((place, report)) = self.of(job) {
            report.left += 1;
            self.note(now, place, "leave");
        }
    }

    /// Whether it is not known yet what it waits for.
    pub fn must_tell(&mut self, job: JobId) -> bool {
        self.of(job).is_some_and(|(_, report)| !report.entered && report.waited_for.is_none())
    }

    /// It waits.
    pub fn waits(&mut self, job: JobId, why: String) {
        if let Some((_, report)) = self.of(job) {
            report.waited_for = Some(why);
        }
    }

    /// What it was like.
    pub fn outcome(&mut self, job: JobId, outcome: Outcome) {
        if let Some((_, report)) = self.of(job) {
            let touched = outcome.peak_bytes;
            report.outcome = outcome;
            self.report.touched_peak = self.report.touched_peak.max(touched);
        }
    }

    /// It has ended.
    pub fn ended(&mut self, job: JobId, verdict: Verdict, now: Nanos) {
        if let Some((place, report)) = self.of(job) {
            (report.verdict, report.ended) = (verdict, now);
            self.turn_over(now);
            self.there.retain(|t| t.0 != place);
            self.report.makespan = self.report.makespan.max(now);
            self.note(now, place, "end");
        }
    }

    /// So many bytes are promised.
    pub fn used(&mut self, bytes: Bytes) {
        self.report.reserved_peak = self.report.reserved_peak.max(bytes);
    }

    /// The whole of it.
    pub fn report(&mut self, arena: Bytes) -> Report {
        Report { arena, ..std::mem::take(&mut self.report) }
    }
}
