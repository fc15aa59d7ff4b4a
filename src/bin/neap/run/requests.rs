//! Requests to a service: reads the files of jobs named on the command line, on stdin or in a
//! folder.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use neap::contract::JobPlan;
use neap::device::Profile;
use neap::job::Graph;
use neap::plan::{Method, Of, Share};
use neap::run::service::{Remote, Request, Tenant, Work};
use neap::run::{Settings, Stop};
use neap::units::Nanos;

use crate::making;
use crate::output::note;
use crate::settings::{self, DeviceFlags, Learned, Site, Subject};

/// Reads the files of jobs.
pub struct Reader {
    device: DeviceFlags,
    learned: Learned,
    settings: Settings,
}

impl Reader {
    /// Reads what the flags name, once for all jobs.
    pub fn new(device: &DeviceFlags, settings: &Settings) -> anyhow::Result<Self> {
        let (device, learned) = (device.clone(), device.read()?);
        Ok(Self { device, learned, settings: settings.clone() })
    }

    /// The jobs of a file; `None` if the checker refused its plan and printed the reasons.
    pub fn read(&self, path: &Path, iterations: u32) -> anyhow::Result<Option<Vec<Tenant>>> {
        let tenant = |name: String, graph: Graph, plan: JobPlan, profile: Profile| {
            let settings = Settings { iterations, ..self.settings.clone() };
            let (method, swap_limit, at_loads) = (Method::default(), Share::ALL, Vec::new());
            let priority = Share::ALL.priority();
            let work =
                Work { graph, plan, profile, method, priority, swap_limit, at_loads, settings };
            Tenant { name, work, submit: Nanos::ZERO }
        };
        let stem = settings::stem(path)?;
        match settings::subject(path, &[])? {
            Subject::Plan(plan, graphs) => {
                self.device.not_with_a_plan(path)?;
                if !settings::checked(path, &plan, &graphs)? {
                    return Ok(None);
                }
                let at = |problem: String| anyhow::anyhow!("{}: {problem}", path.display());
                let several = plan.jobs.len() > 1;
                let planned = |(job, graph): (usize, Graph)| {
                    let share = |of| Share::recorded(&plan, of, job).map_err(at);
                    let name = if several { graph.name.clone() } else { stem.clone() };
                    let mut it = tenant(name, graph, plan.jobs[job].clone(), plan.device.clone());
                    it.work.priority = share(Of::Tensors)?.priority();
                    it.work.swap_limit = share(Of::Swaps)?;
                    it.work.method = Method::recorded(&plan, job).map_err(at)?;
                    Ok(it)
                };
                graphs.into_iter().enumerate().map(planned).collect::<anyhow::Result<_>>().map(Some)
            }
            Subject::Graph(mut graph) => {
                let Site { device, latencies, libraries, .. } = self.learned.resolve(&mut graph)?;
                let at_loads = self.learned.at_loads(&graph);
                let (mut plan, _) = making::unplanned(&graph, &device, &latencies)?;
                plan.libraries = libraries;
                let mut it = tenant(stem, *graph, plan, device);
                it.work.at_loads = at_loads;
                Ok(Some(vec![it]))
            }
        }
    }
}

/// Makes a name that no other job has.
pub fn apart(name: &str, names: &mut BTreeSet<String>) -> String {
    let mut free = name.to_owned();
    let mut number = 2;
    while !names.insert(free.clone()) {
        free = format!("{name}-{number}");
        number += 1;
    }
    free
}

/// The names that all jobs so far have had.
pub type Names = Arc<Mutex<BTreeSet<String>>>;

/// Locks the names, even if a thread panicked while it held them.
pub fn names(of: &Names) -> MutexGuard<'_, BTreeSet<String>> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends every job and the service when `stop` is requested.
pub fn end_at(stop: &Stop, remote: &Remote, of: &Names) {
    while !stop.requested() {
        thread::sleep(LOOK);
    }
    for name in names(of).iter() {
        if !remote.ask(Request::End(name.clone())) {
            return;
        }
    }
    let _ = remote.ask(Request::Close);
}

/// Reads requests from stdin or a folder.
pub struct Asking {
    pub reader: Reader,
    pub iterations: u32,
    pub remote: Remote,
    pub names: Names,
}

/// The longest request, in bytes.
const LINE: u64 = 1 << 16;

/// The interval at which a folder is checked.
const LOOK: Duration = Duration::from_millis(200);

impl Asking {
    /// Reads requests from stdin until its end.
    pub fn listen(&mut self) {
        let mut stdin = std::io::stdin().lock();
        loop {
            let mut line = Vec::new();
            match stdin.by_ref().take(LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            let whole = line.last() == Some(&b'\n') || (line.len() as u64) < LINE;
            let line = String::from_utf8_lossy(&line).trim().to_owned();
            if !whole {
                note(&format!(
                    "stdin: a line of more than {LINE} bytes is too long; nothing more is read"
                ));
                break;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let complain = |problem: &str| {
                note(&format!("stdin: {problem}"));
                true
            };
            let went = match words[..] {
                [] => true,
                ["quit"] => break,
                ["end", job] => self.remote.ask(Request::End(job.to_owned())),
                ["run", plan] => self.run(Path::new(plan), self.iterations).is_some(),
                ["run", plan, iterations] => match iterations.parse::<u32>() {
                    Ok(n @ 1..=1_000_000) => self.run(Path::new(plan), n).is_some(),
                    _ => complain(&format!(
                        "`{iterations}` is not a number of iterations; give 1 to 1000000"
                    )),
                },
                _ => complain(&format!(
                    "`{line}` is not a request; write `run PLAN [ITERATIONS]` (a path without \
                     spaces), `end JOB` or `quit`"
                )),
            };
            if !went {
                return;
            }
        }
        let _ = self.remote.ask(Request::Close);
    }

    /// Reads a plan and submits its jobs. Returns their names, or `None` if the service has ended.
    /// A file that can't be read is reported and skipped.
    fn run(&mut self, path: &Path, iterations: u32) -> Option<Vec<String>> {
        let tenants = self.reader.read(path, iterations).unwrap_or_else(|error| {
            note(&format!("not run: {error:#}"));
            None
        });
        let mut submitted = Vec::new();
        for mut tenant in tenants.into_iter().flatten() {
            tenant.name = apart(&tenant.name, &mut names(&self.names));
            submitted.push(tenant.name.clone());
            if !self.remote.ask(Request::Submit(Box::new(tenant))) {
                return None;
            }
        }
        Some(submitted)
    }

    /// Runs the plans that appear in a folder, and ends those that disappear. A plan that can't be
    /// read is tried again when it changes.
    pub fn watch(&mut self, folder: &Path) {
        let mut taken: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
        let mut failed: BTreeMap<PathBuf, State> = BTreeMap::new();
        loop {
            let there: BTreeMap<PathBuf, State> = match std::fs::read_dir(folder) {
                Ok(entries) => entries.filter_map(|e| look(&e.ok()?.path())).collect(),
                Err(error) => {
                    let folder = folder.display();
                    note(&format!("--watch: {folder}: {error}; nothing more is read from it"));
                    break;
                }
            };
            let gone: Vec<PathBuf> =
                taken.keys().filter(|p| !there.contains_key(*p)).cloned().collect();
            for job in gone.iter().filter_map(|p| taken.remove(p)).flatten() {
                if !self.remote.ask(Request::End(job)) {
                    return;
                }
            }
            for (path, state) in there.iter().filter(|(path, _)| is_plan(path)) {
                if taken.contains_key(path) || failed.get(path) == Some(state) {
                    continue;
                }
                let Some(jobs) = self.run(path, self.iterations) else { return };
                if jobs.is_empty() {
                    failed.insert(path.clone(), *state);
                } else {
                    taken.insert(path.clone(), jobs);
                }
            }
            if there.contains_key(&folder.join("stop")) {
                break;
            }
            thread::sleep(LOOK);
        }
        let _ = self.remote.ask(Request::Close);
    }
}

/// A file's size and its time of change.
type State = (u64, Option<SystemTime>);

/// A plain file's path and state.
fn look(path: &Path) -> Option<(PathBuf, State)> {
    let of = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((path.to_owned(), (of.len(), of.modified().ok())))
}

/// Whether a file may be a plan. A name that begins with a dot is a file that is still being
/// written.
fn is_plan(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    !name.starts_with('.') && (name.ends_with(".plan.json") || name.ends_with(".plan.json.gz"))
}
