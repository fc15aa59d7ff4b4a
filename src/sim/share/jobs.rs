//! A trace of jobs: the memory that each needs, when it is submitted, and how long it runs.
//!
//! The file is CSV with one row per job: `job`, `submit_s`, and `duration_s` (alone) or
//! `iterations`. The job's memory is given by one of:
//!
//! - `workload`, looked up in a [`Memory`] table;
//! - `graph`, a *.graph.json, whose liveness gives persistent and ephemeral bytes;
//! - `estimate`, a file that `neap estimate --json` wrote;
//! - `persistent_bytes` and `ephemeral_bytes`.
//!
//! Optional columns: `iteration_s`, `utilisation` (0.001 to 1), `priority` (larger first), `kill_s`
//! (after submission), `rate_per_s` (requests to an inference job). For needs that may be wrong:
//! `error_percent`, by how much the given bytes may be too low; and `actual_persistent_bytes` and
//! `actual_ephemeral_bytes`, what the job needs once `grows_after` iterations (default 1) ran.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::contention::{WHOLE, speed};
use super::memory::{Memory, Need};
use super::rows::{self, LONGEST_S, Row, RowsError, decimal};
use super::weigh::{Weighed, estimate, graph};
use crate::units::{Bytes, Nanos, saturated};

/// A job of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name, unique in the trace.
    pub name: Box<str>,
    /// When the job is submitted.
    pub submit: Nanos,
    /// Its work: its time on the device alone. For an inference job, how long it is served.
    pub work: Nanos,
    /// Time of one iteration alone.
    pub iteration: Nanos,
    /// The bytes that it holds across iterations, and those that it needs besides within one, with
    /// which it is admitted.
    pub need: Need,
    /// The share of the device that it keeps busy alone, per mille.
    pub utilisation: u32,
    /// Its priority: larger goes first.
    pub priority: i32,
    /// When it is killed, unless it is done before.
    pub kill: Option<Nanos>,
    /// Requests per thousand seconds, for an inference job.
    pub rate: Option<u64>,
    /// What it needs later, if that is more than it was admitted with.
    pub growth: Option<Box<Growth>>,
}

/// A job that outgrows what it was admitted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Persistent and ephemeral bytes, neither less than it was admitted with.
    pub need: Need,
    /// The iteration at whose end it grows, counted from 1.
    pub after: u64,
}

/// The trace, in order of submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Jobs with equal submission times keep the order of their rows.
    pub jobs: Vec<Job>,
    /// Whether the rows were out of order and had to be sorted.
    pub sorted: bool,
}

/// The iteration time of a job for which none is given.
pub const ITERATION: Nanos = Nanos(100_000_000);

/// The work that comes in the time in which it comes, in per cent of what the device can do,
/// rounded down. None where all jobs come at once or too few come to tell: then there is no rate.
#[must_use]
pub fn demand(jobs: &[Job]) -> Option<u64> {
    let [first, .., last] = jobs else { return None };
    let count = jobs.len() as u128;
    // The last job's share of the time is as long as the mean of the others'.
    let span = u128::from(last.submit.saturating_sub(first.submit).0) * count / (count - 1);
    if count < TELLING {
        return None;
    }
    let busy = |job: &Job| match job.rate {
        // Requests per thousand seconds, each of one iteration.
        Some(rate) => {
            let share = u128::from(rate) * u128::from(job.iteration.0) / 1_000_000_000;
            u128::from(job.work.0) * share.min(1000)
        }
        None => u128::from(job.work.0) * u128::from(job.utilisation),
    };
    let work: u128 = jobs.iter().map(busy).sum();
    let percent = (work / u128::from(WHOLE) * 100).checked_div(span)?;
    Some(u64::try_from(percent).unwrap_or(u64::MAX))
}

/// Fewer jobs show no rate at which they come.
const TELLING: u128 = 8;

const LARGEST: u64 = 1 << 30;
const MOST: usize = 4_000_000;
/// The most work of all jobs together, in nanoseconds. Below it no simulated time overflows.
const ALL_WORK: u128 = 1 << 59;

const COLUMNS: &str = "job,workload,graph,estimate,persistent_bytes,ephemeral_bytes,\
    error_percent,actual_persistent_bytes,actual_ephemeral_bytes,grows_after,iteration_s,submit_s,\
    duration_s,iterations,utilisation,priority,kill_s,rate_per_s";

/// Reads a trace. Workloads are looked up in `memory`. `margin` is by how many per cent the given
/// bytes may be too low; a row's `error_percent` or an estimate's own margin comes before it.
///
/// # Errors
/// An error that names file, line and remedy.
pub fn read(path: &Path, memory: &Memory, margin: u32) -> Result<Trace, RowsError> {
    let (mut jobs, mut lines, mut work) = (Vec::new(), Vec::new(), 0u128);
    let mut known = BTreeMap::new();
    rows::read(path, LARGEST, COLUMNS, "job,submit_s", |row| {
        let job = Given { row, memory, path, margin }.job(&mut known)?;
        work += u128::from(job.work.0);
        if work > ALL_WORK {
            return Err("the jobs up to here have more than 18 years of work; cut the trace".into());
        }
        if jobs.len() == MOST {
            return Err(format!("more than {MOST} jobs; cut the trace"));
        }
        jobs.push(job);
        lines.push(row.line);
        Ok(())
    })?;
    if jobs.is_empty() {
        return Err(RowsError::at(path, 1, "holds no job; add a row for each"));
    }
    let mut seen = HashSet::with_capacity(jobs.len());
    if let Some(at) = jobs.iter().position(|j: &Job| !seen.insert(&*j.name)) {
        let name = &jobs[at].name;
        let problem = format!("the job `{name}` is there twice; give each its own name");
        return Err(RowsError::at(path, lines[at], problem));
    }
    let sorted = jobs.is_sorted_by_key(|j| j.submit);
    jobs.sort_by_key(|j| j.submit);
    Ok(Trace { jobs, sorted })
}

/// A row with what is needed to read it.
struct Given<'a> {
    row: &'a Row<'a>,
    memory: &'a Memory,
    path: &'a Path,
    margin: u32,
}

impl Given<'_> {
    /// The job's memory, from the columns that give it.
    fn weigh(&self, known: &mut BTreeMap<PathBuf, Weighed>) -> Result<Weighed, String> {
        let row = self.row;
        let sizes = (row.size("persistent_bytes")?, row.size("ephemeral_bytes")?);
        let file = match (row.cell("graph"), row.cell("estimate")) {
            (Some(_), Some(_)) => Err("gives both a graph and an estimate; keep one of them")?,
            (file, None) => file.map(|f| (f, graph as fn(&Path) -> Result<Weighed, String>)),
            (None, file) => file.map(|f| (f, estimate as _)),
        };
        if let Some((file, weigh)) = file {
            if sizes.0.or(sizes.1).is_some() {
                return Err("gives both a file and sizes; keep one of them".into());
            }
            let file = self.path.parent().unwrap_or(Path::new(".")).join(file);
            return match known.get(&file) {
                Some(weighed) => Ok(*weighed),
                None => Ok(*known.entry(file.clone()).or_insert(weigh(&file)?)),
            };
        }
        let need = match (sizes, row.cell("workload")) {
            ((Some(persistent), Some(ephemeral)), _) => (persistent, ephemeral),
            ((None, None), Some(workload)) => *self.memory.get(workload).ok_or_else(|| {
                format!(
                    "the workload `{workload}` is not in the memory table; add it there \
                     (--memory), or give persistent_bytes and ephemeral_bytes"
                )
            })?,
            ((None, None), None) => {
                Err("gives no memory; fill in workload, graph, estimate, or persistent_bytes and \
                 ephemeral_bytes")?
            }
            _ => Err("gives only one of persistent_bytes and ephemeral_bytes; give both")?,
        };
        Ok(Weighed { need, margin: None, iteration: None })
    }

    /// The need that it is admitted with, and its growth if it needs more later.
    fn admission(&self, weighed: &Weighed) -> Result<(Need, Option<Box<Growth>>), String> {
        let row = self.row;
        let error = row.parsed("error_percent", "a number of per cent from 0 to 1000", |text| {
            decimal(text).filter(|e| *e <= 1_000_000_000_000)
        })?;
        let more = |b: Bytes, error: u128| {
            Bytes(b.0 + saturated((u128::from(b.0) * error).div_ceil(100_000_000_000)))
        };
        let (persistent, ephemeral) = weighed.need;
        let need = match (error, weighed.margin) {
            (None, Some(margin)) => (persistent, ephemeral + margin),
            (error, _) => {
                let error = error.unwrap_or(u128::from(self.margin) * 1_000_000_000);
                (more(persistent, error), more(ephemeral, error))
            }
        };
        let actual = (row.size("actual_persistent_bytes")?, row.size("actual_ephemeral_bytes")?);
        let after = row.parsed("grows_after", "a number of iterations from 1", |text| {
            text.parse().ok().filter(|n| *n >= 1)
        })?;
        let grows = actual != (None, None);
        if !grows && after.is_some() {
            return Err("gives grows_after, but not to what; fill actual_persistent_bytes or \
                        actual_ephemeral_bytes"
                .into());
        }
        if grows && row.cell("rate_per_s").is_some() {
            return Err("an inference job cannot grow; leave actual_persistent_bytes and \
                        actual_ephemeral_bytes empty"
                .into());
        }
        let at_least = |actual: Option<Bytes>, need| actual.unwrap_or(need).max(need);
        let grown = (at_least(actual.0, need.0), at_least(actual.1, need.1));
        let growth = Growth { need: grown, after: after.unwrap_or(1) };
        Ok((need, (grown != need).then(|| Box::new(growth))))
    }

    fn job(&self, known: &mut BTreeMap<PathBuf, Weighed>) -> Result<Job, String> {
        let row = self.row;
        let name = row.cell("job").ok_or("the row names no job; fill the column `job`")?;
        let submit = row.time("submit_s")?.ok_or("submit_s is empty; say when the job comes")?;
        let weighed = self.weigh(known)?;
        let (need, growth) = self.admission(&weighed)?;
        let known = row.cell("workload").map(speed);
        let iteration = weighed.iteration.or(known.and_then(|known| known.0));
        let iteration = row.time("iteration_s")?.or(iteration).unwrap_or(ITERATION);
        if iteration == Nanos::ZERO {
            return Err("iteration_s is 0; an iteration takes some time".into());
        }
        let utilisation = row.parsed("utilisation", "a share from 0.001 to 1", |text| {
            let share = decimal(text).filter(|s| (1_000_000..=1_000_000_000).contains(s))?;
            u32::try_from(share / 1_000_000).ok()
        })?;
        let ends = format_args!("a number of iterations that end within {LONGEST_S} s");
        let iterations = row.parsed("iterations", ends, |text| {
            let work = text.parse::<u64>().ok().and_then(|n| n.checked_mul(iteration.0));
            work.filter(|w| u128::from(*w) <= LONGEST_S * 1_000_000_000).map(Nanos)
        })?;
        let work = match (row.time("duration_s")?, iterations) {
            (Some(_), Some(_)) => Err("gives both duration_s and iterations; keep one of them")?,
            (work, iterations) => {
                work.or(iterations).ok_or("gives no run time; fill in duration_s or iterations")?
            }
        };
        let priority = row.parsed("priority", "a whole number", |text| text.parse().ok())?;
        let rate = row.parsed("rate_per_s", "a rate from 0.001 to 1000000", |text| {
            let rate = decimal(text)? / 1_000_000;
            Some(saturated(rate)).filter(|rate| (1..=1_000_000_000).contains(rate))
        })?;
        Ok(Job {
            name: name.into(),
            submit,
            work,
            iteration,
            need,
            utilisation: utilisation.or(known.map(|known| known.1)).unwrap_or(WHOLE),
            priority: priority.unwrap_or(0),
            kill: row.time("kill_s")?.map(|after| submit + after),
            rate,
            growth,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Trace, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.csv");
        std::fs::write(&path, text).unwrap();
        read(&path, &Memory::default(), 0).map_err(|e| e.to_string())
    }

    #[test]
    fn rows_are_read_and_sorted() {
        let head = "job,persistent_bytes,ephemeral_bytes,submit_s,iterations,iteration_s,priority,kill_s,rate_per_s,utilisation\n";
        let trace =
            parse(&format!("{head}b,1MiB,2,5,10,0.5,-2,7,1.5,0.25\na,1,2,1,3,,,,,\n")).unwrap();
        assert!(!trace.sorted);
        assert_eq!(
            (&*trace.jobs[0].name, trace.jobs[0].iteration, trace.jobs[0].utilisation),
            ("a", ITERATION, WHOLE)
        );
        let b = &trace.jobs[1];
        assert_eq!(
            (b.work.0, b.kill, b.rate, b.priority, b.utilisation),
            (5_000_000_000, Some(Nanos(12_000_000_000)), Some(1500), -2, 250)
        );
    }

    /// Item 16: 100 jobs of a minute every 45 seconds are four thirds of what one device can do.
    #[test]
    fn demand_is_work_in_the_time_in_which_it_comes() {
        let jobs = |more: &str, count: u64, gap: u64| {
            let rows = (0..count).map(|n| format!("j{n},1,2,{},60{more}\n", n * gap));
            let head = "job,persistent_bytes,ephemeral_bytes,submit_s,duration_s";
            let head =
                if more.is_empty() { head.to_owned() } else { format!("{head},utilisation") };
            parse(&format!("{head}\n{}", rows.collect::<String>())).unwrap().jobs
        };
        assert_eq!(demand(&jobs("", 100, 45)), Some(133));
        assert_eq!(demand(&jobs("", 100, 60)), Some(100));
        assert_eq!(demand(&jobs(",0.5", 100, 45)), Some(66));
        // All at once, or too few: there is no rate.
        assert_eq!((demand(&jobs("", 100, 0)), demand(&jobs("", 7, 45))), (None, None));
        assert_eq!(demand(&[]), None);
    }

    #[test]
    fn errors_become_margins_and_what_is_more_than_them_is_growth() {
        let head = "job,persistent_bytes,ephemeral_bytes,submit_s,duration_s,error_percent,actual_persistent_bytes,actual_ephemeral_bytes\n";
        let trace =
            parse(&format!("{head}a,1000,10,0,1,12.5,1100,12\nb,1000,10,0,1,,1500,5\n")).unwrap();
        let read = |job: &Job| (job.need, job.growth.clone());
        assert_eq!(read(&trace.jobs[0]), ((Bytes(1125), Bytes(12)), None));
        let growth = Growth { need: (Bytes(1500), Bytes(10)), after: 1 };
        assert_eq!(read(&trace.jobs[1]), ((Bytes(1000), Bytes(10)), Some(Box::new(growth))));
    }

    #[test]
    fn what_is_malformed_names_its_line() {
        let head = "job,persistent_bytes,ephemeral_bytes,submit_s,duration_s\n";
        let grown = "job,persistent_bytes,ephemeral_bytes,submit_s,duration_s,error_percent,actual_persistent_bytes,actual_ephemeral_bytes,grows_after\n";
        for (text, want) in [
            ("", "`job` is missing"),
            ("job,submit_s\n", "no job"),
            ("job,submit_s,color\n", "`color`"),
            ("job,submit_s,job\n", "twice"),
            ("job,submit_s,duration_s\na,0,1\n", "gives no memory"),
            (&format!("{head}a,1,1,0\n"), "line 2"),
            (&format!("{head}a,1,1,-1,1\n"), "submit_s"),
            (&format!("{head}a,1,1,0,nan\n"), "duration_s"),
            (&format!("{head}a,1,,0,1\n"), "give both"),
            (&format!("{head}a,x,1,0,1\n"), "persistent_bytes"),
            (&format!("{head}a,1,1,0,\n"), "gives no run time"),
            (&format!("{head}a,1,1,0,1\nb,1,1,0,1\na,1,1,0,1\n"), "line 4"),
            (&format!("{head},1,1,0,1\n"), "names no job"),
            ("job,workload,submit_s,duration_s\na,vgg,0,1\n", "`vgg`"),
            ("job,graph,submit_s,duration_s\na,none.graph.json,0,1\n", "none.graph.json"),
            ("job,estimate,submit_s,duration_s\na,jobs.csv,0,1\n", "`neap estimate --json`"),
            ("job,graph,estimate,submit_s,duration_s\na,x,y,0,1\n", "keep one"),
            (&format!("{grown}a,1,1,0,1,-1,,,\n"), "error_percent"),
            (&format!("{grown}a,1,1,0,1,,x,,\n"), "actual_persistent_bytes"),
            (&format!("{grown}a,1,1,0,1,,5,,0\n"), "grows_after"),
            (&format!("{grown}a,1,1,0,1,,,,2\n"), "but not to what"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(want) && error.contains("jobs.csv"), "{text}: {error}");
        }
    }
}
