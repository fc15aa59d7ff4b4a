//! What happened to scripts that share a device: the log that a server writes.
//!
//! The log is one JSON object a line. Times are nanoseconds since the server began.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::courses::Course;
use super::rows::RowsError;
use super::tokens::LARGEST as MOST_BYTES;
use crate::units::{Bytes, Nanos};

/// The version of the log.
const VERSION: u32 = 1;
/// The most bytes of a log that are read.
const LARGEST: u64 = 1 << 30;
/// The most scripts of a log.
const MOST: usize = 100_000;
/// The latest time in a log: a year.
const LATEST: Nanos = Nanos(31_536_000_000_000_000);

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
        /// The time of all its iterations, if it said that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        work_ns: Option<Nanos>,
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
    /// What the scripts that ran did, by their numbers.
    pub courses: BTreeMap<u64, Course>,
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
    let mut courses: BTreeMap<u64, Course> = BTreeMap::new();
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
            What::Needs { persistent_bytes, ephemeral_bytes, .. }
                if persistent_bytes.max(ephemeral_bytes) > MOST_BYTES =>
            {
                return Err(wrong(format!("no device has more than {MOST_BYTES}")));
            }
            What::Iteration { took_ns, .. } if took_ns > now => {
                return Err(wrong("its iteration began before the log".into()));
            }
            What::Came { script, .. } if courses.len() == MOST || courses.contains_key(&script) => {
                return Err(wrong(format!("script {script} comes twice, or is one too many")));
            }
            what => Course::follow(&mut courses, &what, now).map_err(wrong)?,
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
    courses.values_mut().for_each(|course| course.leave(last));
    courses.retain(|_, course| course.has_run());
    if courses.is_empty() {
        return Err(RowsError::at(path, 1, "no script of it ever ran; there is nothing to replay"));
    }
    Ok(Log { budget, policy, courses })
}

#[cfg(test)]
mod tests {
    use super::super::courses::{outcome, trace};
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
        let came = |script, name: &str| What::Came { script, name: name.to_owned(), work_ns: None };
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
        let trace = trace(&log.courses);
        let [a, b] = &trace.jobs[..] else { panic!("two scripts") };
        assert_eq!((a.submit, a.work, a.iteration), (Nanos(10), Nanos(37), Nanos(20)));
        assert_eq!(a.need, (Bytes(5), Bytes(50)));
        assert_eq!((b.submit, b.work), (Nanos(20), Nanos(10)));
        let outcome = outcome(&log.courses);
        let figures = outcome.figures(&trace.jobs);
        assert_eq!((figures.makespan, figures.queuing), (50, 6));
        assert_eq!(outcome.switches, 1);
    }

    #[test]
    fn a_torn_last_line_is_left_out() {
        let came = What::Came { script: 1, name: "a".to_owned(), work_ns: None };
        let whole = log(&[
            (0, What::began(Bytes(9), "fifo")),
            (1, came),
            (2, What::Token { script: 1 }),
            (7, What::Left { script: 1 }),
        ]);
        let torn = read_lines(&format!("{whole}{{\"at_ns\":8,\"ev")).unwrap();
        assert_eq!(outcome(&torn.courses), outcome(&read_lines(&whole).unwrap().courses));
    }

    #[test]
    fn a_damaged_log_names_its_line() {
        let began = log(&[(5, What::began(Bytes(1), "fifo"))]);
        let (persistent_bytes, ephemeral_bytes) = (Bytes(1), Bytes(u64::MAX));
        let too_large = log(&[(6, What::Needs { script: 3, persistent_bytes, ephemeral_bytes })]);
        let (took_ns, holds_bytes) = (Nanos(7), Bytes(1));
        let too_long = log(&[(6, What::Iteration { script: 3, took_ns, holds_bytes })]);
        for (more, wanted) in [
            ("{\n", "line 2"),
            ("{\"at_ns\":6,\"event\":\"left\",\"script\":3}\n", "script 3 is not there"),
            ("{\"at_ns\":1,\"event\":\"came\",\"script\":3,\"name\":\"x\"}\n", "before the last"),
            ("", "ever ran"),
            (&too_large, "no device has more"),
            (&too_long, "began before the log"),
        ] {
            let error = read_lines(&format!("{began}{more}")).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
        assert!(read_lines("").unwrap_err().contains("no event"));
        assert!(read_lines("{\"at_ns\":1,\"event\":\"left\",\"script\":3}").is_err());
    }
}
