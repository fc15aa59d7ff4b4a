//! What happened to scripts that really shared a device: the log that a server writes, and the
//! trace of jobs that it is.
//!
//! The log is one JSON object a line. Times are nanoseconds since the server began. A script's work
//! is the time for which it held the token of its lane; how long it waited in between is left out,
//! so the simulator may order the same work by another policy.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::jobs::{Job, Trace};
use super::memory::Need;
use super::result::{Doing, JobResult, Outcome, Stretch, Verdict};
use super::rows::RowsError;
use crate::units::{Bytes, Nanos, id32};

/// The version of the log.
const VERSION: u32 = 1;
/// The most bytes of a log that are read.
const LARGEST: u64 = 1 << 30;
/// The most scripts of a log.
const MOST: usize = 100_000;
/// The latest time in a log: a year.
const LATEST: Nanos = Nanos(31_536_000_000_000_000);
/// Scripts beside each other were measured so: the simulator slows none of them again.
const SLOWS_NONE: u32 = 1;

/// Something that happened, at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, since the server began.
    pub at_ns: Nanos,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What happened. A script is named by its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum What {
    /// The server began.
    Began {
        /// The version of the log.
        version: u32,
        /// What all scripts may reserve together.
        budget_bytes: Bytes,
        /// Which script goes first.
        policy: String,
    },
    /// A script came.
    Came {
        /// Its number.
        script: u64,
        /// Its name.
        name: String,
    },
    /// What a script needs became known, or grew.
    Needs {
        /// Its number.
        script: u64,
        /// What it keeps between iterations.
        persistent_bytes: Bytes,
        /// What it needs besides within one.
        ephemeral_bytes: Bytes,
    },
    /// It is in this lane from now on.
    Admitted {
        /// Its number.
        script: u64,
        /// The lane's number.
        lane: u32,
    },
    /// It got the token: it runs.
    Token {
        /// Its number.
        script: u64,
    },
    /// One of its iterations has ended.
    Iteration {
        /// Its number.
        script: u64,
        /// How long it took.
        took_ns: Nanos,
        /// What its allocator had reserved then.
        holds_bytes: Bytes,
    },
    /// It gave the token back, or that was taken from it.
    Passed {
        /// Its number.
        script: u64,
        /// Why it was taken, if it was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// It gave free memory back.
    GaveBack {
        /// Its number.
        script: u64,
        /// What its allocator has reserved since.
        holds_bytes: Bytes,
    },
    /// It is gone.
    Left {
        /// Its number.
        script: u64,
    },
}

impl What {
    /// The beginning of a log.
    #[must_use]
    pub fn began(budget: Bytes, policy: &str) -> Self {
        Self::Began { version: VERSION, budget_bytes: budget, policy: policy.to_owned() }
    }

    /// The script that it happened to.
    #[must_use]
    pub const fn script(&self) -> Option<u64> {
        match self {
            Self::Began { .. } => None,
            Self::Came { script, .. }
            | Self::Needs { script, .. }
            | Self::Admitted { script, .. }
            | Self::Token { script }
            | Self::Iteration { script, .. }
            | Self::Passed { script, .. }
            | Self::GaveBack { script, .. }
            | Self::Left { script } => Some(*script),
        }
    }
}

/// A log that was read.
#[derive(Clone, Debug)]
pub struct Log {
    /// What all scripts could reserve together.
    pub budget: Bytes,
    /// The policy by which the server passed tokens on.
    pub policy: String,
    /// The scripts that ran, as jobs.
    pub trace: Trace,
    /// What happened to them.
    pub outcome: Outcome,
}

/// One script, as far as it was read.
#[derive(Default)]
struct Script {
    name: String,
    came: Nanos,
    need: Need,
    admitted: Option<Nanos>,
    start: Option<Nanos>,
    holds: Option<Nanos>,
    work: Nanos,
    iterations: Vec<Nanos>,
    switches: u32,
    end: Option<Nanos>,
    since: Nanos,
    stretches: Vec<(Doing, Nanos, Nanos)>,
}

impl Script {
    fn does(&mut self, doing: Doing, now: Nanos) {
        if self.since < now {
            self.stretches.push((doing, self.since, now));
        }
        self.since = now;
    }

    fn waits(&self) -> Doing {
        if self.start.is_some() { Doing::Rests } else { Doing::Waits }
    }

    fn token(&mut self, now: Nanos) {
        if self.holds.is_none() {
            self.does(self.waits(), now);
            self.start.get_or_insert(now);
            self.holds = Some(now);
        }
    }

    fn passes(&mut self, now: Nanos) {
        if let Some(since) = self.holds.take() {
            self.work += now.saturating_sub(since);
            self.does(Doing::Runs, now);
            self.switches += 1;
        }
    }

    fn left(&mut self, now: Nanos) {
        if self.end.is_none() {
            self.passes(now);
            self.does(self.waits(), now);
            self.end = Some(now);
        }
    }

    /// The time of one of its iterations: the median, or all of its work where none ended.
    fn iteration(&self) -> Nanos {
        let mut all = self.iterations.clone();
        all.sort_unstable();
        let median = all.get(all.len() / 2).copied().unwrap_or(self.work);
        median.min(self.work).max(Nanos(1))
    }
}

/// Whether a file is named as a log is.
#[must_use]
pub fn is_log(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "jsonl")
}

/// Reads a log. Scripts that never ran are left out.
///
/// # Errors
/// An error that names file, line and remedy.
pub fn read(path: &Path) -> Result<Log, RowsError> {
    let file = crate::files::open_regular(path)
        .map_err(|error| RowsError::at(path, 0, error.to_string()))?;
    let mut began = None;
    let mut scripts: BTreeMap<u64, Script> = BTreeMap::new();
    let mut last = Nanos::ZERO;
    let mut lines = BufReader::new(file.take(LARGEST));
    for at in 1.. {
        let wrong = |problem: String| RowsError::at(path, at, problem);
        let mut line = String::new();
        lines.read_line(&mut line).map_err(|error| wrong(error.to_string()))?;
        // A server that was killed may have left a part of a line.
        if !line.ends_with('\n') {
            break;
        }
        let Event { at_ns: now, what } = serde_json::from_str(&line).map_err(|error| {
            wrong(format!("is no event of a log: {error}; `neap torch --serve --log` writes one"))
        })?;
        if now < last || now > LATEST {
            return Err(wrong("its time is before the last one's, or beyond a year".into()));
        }
        last = now;
        match what {
            What::Began { version, budget_bytes, policy } => {
                if version != VERSION || began.is_some() {
                    return Err(wrong(format!(
                        "a log of version {VERSION} begins once; record it anew with this neap"
                    )));
                }
                if budget_bytes == Bytes::ZERO {
                    return Err(wrong("its budget is 0 bytes; record it anew".into()));
                }
                began = Some((budget_bytes, policy));
            }
            _ if began.is_none() => return Err(wrong("comes before the log begins".into())),
            What::Came { script, name } => {
                if scripts.len() == MOST || scripts.contains_key(&script) {
                    return Err(wrong(format!("script {script} comes twice, or is one too many")));
                }
                let new = Script { name, came: now, since: now, ..Script::default() };
                scripts.insert(script, new);
            }
            what => apply(what, now, &mut scripts).map_err(wrong)?,
        }
    }
    let Some((budget, policy)) = began else {
        return Err(RowsError::at(
            path,
            1,
            "holds no event; `neap torch --serve --log` writes one",
        ));
    };
    // What is there at the log's end has run until then.
    scripts.values_mut().for_each(|script| script.left(last));
    let ran: Vec<Script> = scripts.into_values().filter(|s| s.work > Nanos::ZERO).collect();
    if ran.is_empty() {
        return Err(RowsError::at(path, 1, "no script of it ever ran; there is nothing to replay"));
    }
    Ok(Log { budget, policy, outcome: outcome(&ran), trace: trace(&ran) })
}

fn apply(what: What, now: Nanos, scripts: &mut BTreeMap<u64, Script>) -> Result<(), String> {
    let Some(number) = what.script() else { return Ok(()) };
    let known = scripts.get_mut(&number).filter(|script| script.end.is_none());
    let script =
        known.ok_or_else(|| format!("script {number} is not there; is a line missing?"))?;
    match what {
        What::Began { .. } | What::Came { .. } | What::GaveBack { .. } => {}
        What::Needs { persistent_bytes, ephemeral_bytes, .. } => {
            script.need = (persistent_bytes, ephemeral_bytes);
        }
        What::Admitted { .. } => _ = script.admitted.get_or_insert(now),
        What::Token { .. } => script.token(now),
        What::Iteration { took_ns, .. } => script.iterations.push(took_ns),
        What::Passed { .. } => script.passes(now),
        What::Left { .. } => script.left(now),
    }
    Ok(())
}

fn trace(scripts: &[Script]) -> Trace {
    let job = |script: &Script| Job {
        name: script.name.as_str().into(),
        submit: script.came,
        work: script.work,
        iteration: script.iteration(),
        need: script.need,
        utilisation: SLOWS_NONE,
        priority: 0,
        kill: None,
        rate: None,
        growth: None,
    };
    Trace { jobs: scripts.iter().map(job).collect(), sorted: true }
}

fn outcome(scripts: &[Script]) -> Outcome {
    let result = |script: &Script| JobResult {
        admitted: script.admitted.or(script.start),
        start: script.start,
        end: script.end.unwrap_or_default(),
        verdict: Verdict::Done,
        served: script.work,
        // The last token goes with the script.
        switches: script.switches.saturating_sub(1),
        dilation: 1000,
    };
    let jobs: Vec<JobResult> = scripts.iter().map(result).collect();
    let switches = jobs.iter().map(|job| u64::from(job.switches)).sum();
    let mut stretches = Vec::new();
    for (job, script) in scripts.iter().enumerate() {
        let stretch = |&(doing, from, to): &_| Stretch { job: id32(job), doing, from, to };
        stretches.extend(script.stretches.iter().map(stretch));
    }
    Outcome { jobs, switches, stretches, ..Outcome::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_lines(lines: &str) -> Result<Log, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        std::fs::write(&path, lines).unwrap();
        read(&path).map_err(|error| error.to_string())
    }

    fn log(events: &[(u64, What)]) -> String {
        let line = |(at, what): &(u64, What)| {
            let event = Event { at_ns: Nanos(*at), what: what.clone() };
            serde_json::to_string(&event).unwrap() + "\n"
        };
        events.iter().map(line).collect()
    }

    #[test]
    fn what_was_logged_is_a_trace_and_its_outcome() {
        let needs = |script, p, e| What::Needs {
            script,
            persistent_bytes: Bytes(p),
            ephemeral_bytes: Bytes(e),
        };
        let iteration =
            |script, took| What::Iteration { script, took_ns: Nanos(took), holds_bytes: Bytes(1) };
        let came = |script, name: &str| What::Came { script, name: name.to_owned() };
        let token = |script| What::Token { script };
        let text = log(&[
            (0, What::began(Bytes(100), "srtf")),
            (10, came(1, "a")),
            (10, token(1)),
            (20, came(2, "b")),
            (30, iteration(1, 20)),
            (30, needs(1, 5, 50)),
            (30, What::Admitted { script: 1, lane: 0 }),
            (30, What::Passed { script: 1, why: None }),
            (32, token(2)),
            (42, What::Left { script: 2 }),
            (43, token(1)),
            (53, iteration(1, 10)),
            (60, What::Left { script: 1 }),
        ]);
        let log = read_lines(&text).unwrap();
        assert_eq!((log.budget, log.policy.as_str()), (Bytes(100), "srtf"));
        let [a, b] = &log.trace.jobs[..] else { panic!("two scripts") };
        assert_eq!((a.submit, a.work, a.iteration), (Nanos(10), Nanos(37), Nanos(20)));
        assert_eq!(a.need, (Bytes(5), Bytes(50)));
        assert_eq!((b.submit, b.work), (Nanos(20), Nanos(10)));
        let figures = log.outcome.figures(&log.trace.jobs);
        assert_eq!((figures.makespan, figures.queuing), (50, 6));
        assert_eq!(log.outcome.switches, 1);
    }

    #[test]
    fn a_torn_last_line_is_left_out() {
        let came = What::Came { script: 1, name: "a".to_owned() };
        let whole = log(&[
            (0, What::began(Bytes(9), "fifo")),
            (1, came),
            (2, What::Token { script: 1 }),
            (7, What::Left { script: 1 }),
        ]);
        let torn = read_lines(&format!("{whole}{{\"at_ns\":8,\"ev")).unwrap();
        assert_eq!(torn.outcome.jobs, read_lines(&whole).unwrap().outcome.jobs);
    }

    #[test]
    fn a_damaged_log_names_its_line() {
        let began = log(&[(5, What::began(Bytes(1), "fifo"))]);
        for (more, wanted) in [
            ("{\n", "line 2"),
            ("{\"at_ns\":6,\"event\":\"left\",\"script\":3}\n", "script 3 is not there"),
            ("{\"at_ns\":1,\"event\":\"came\",\"script\":3,\"name\":\"x\"}\n", "before the last"),
            ("", "ever ran"),
        ] {
            let error = read_lines(&format!("{began}{more}")).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
        assert!(read_lines("").unwrap_err().contains("no event"));
        assert!(read_lines("{\"at_ns\":1,\"event\":\"left\",\"script\":3}").is_err());
    }
}
