//! Whether the script fits other devices, as far as that is known.
//!
//! Which kernels PyTorch takes, and so what a script asks for, depends on the device: attention,
//! reductions, the workspaces of libraries. So a run's requests are replayed on devices that differ
//! from its own in memory alone; what others ask for is known once the script has run on them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use neap::device::{Profile, builtin};
use neap::report::page;
use neap::report::table::{Side, Table};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::Replay;
use neap::sim::requests::Request;
use neap::units::Bytes;
use serde_json::{Value, json};

use super::launch::Kernels;

/// What is known of one device.
pub struct Verdict {
    device: String,
    available: Bytes,
    says: Says,
}

/// The answer for a device, and what it is known from.
#[derive(Clone, PartialEq, Eq)]
pub enum Says {
    Fits { reserved: Bytes, from: String },
    DoesNotFit { from: String },
    Fails { why: String },
    NotKnown,
}

/// The verdicts as a table of a page.
pub fn tabled(verdicts: &[Verdict]) -> page::Table {
    let row = |v: &Verdict| {
        let (need, says, from) = match &v.says {
            Says::Fits { reserved, from } => (Some(*reserved), "fits", from.as_str()),
            Says::DoesNotFit { from } => (None, "does not fit", from.as_str()),
            Says::Fails { why } => (None, "fails", why.as_str()),
            Says::NotKnown => (None, "not known", "it takes other kernels: --all-devices runs it"),
        };
        let share = need.and_then(|need| page::share(need, v.available));
        let device = v.device.as_str().into();
        vec![device, v.available.into(), need.into(), share.into(), says.into(), from.into()]
    };
    page::Table {
        name: "Devices".to_owned(),
        columns: vec![
            ("device", page::Kind::Text),
            ("memory", page::Kind::Bytes),
            ("reserved", page::Kind::Bytes),
            ("share of it", page::Kind::Share),
            ("answer", page::Kind::Text),
            ("known from", page::Kind::Text),
        ],
        rows: verdicts.iter().map(row).collect(),
    }
}

/// What a script asked for from its beginning to its end.
#[derive(Clone)]
pub struct Asked {
    pub requests: Arc<Vec<Request>>,
    pub config: Config,
}

impl Asked {
    /// The answer for a device that differs in memory alone from the one that was asked.
    fn replayed(&self, profile: &Profile, from: String) -> Says {
        let mut replay = Replay::new(&self.config, profile.available(), None);
        if self.requests.iter().all(|request| replay.step(*request)) {
            Says::Fits { reserved: replay.report().stats.peak_reserved, from }
        } else {
            Says::DoesNotFit { from }
        }
    }
}

/// What came of a run.
#[derive(Clone)]
pub struct Ran {
    pub says: Says,
    /// Nothing where the script did not reach its end, or where the memory decided what it asked.
    pub asked: Option<Asked>,
}

/// The run that is reported.
pub struct Own<'a> {
    pub profile: &'a Profile,
    /// Its answer, where the device had its own memory.
    pub says: Option<Says>,
    pub asked: Option<Asked>,
}

/// Runs the script on a device.
pub type Runner<'a> = &'a (dyn Fn(&Profile) -> Ran + Sync);

/// A verdict for each built-in GPU, the smallest first. With `runner` the script runs on those for
/// which nothing else tells, `at_once` at a time.
pub fn verdicts(own: &Own<'_>, runner: Option<Runner<'_>>, at_once: usize) -> Vec<Verdict> {
    let generations = generations();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(devices) = generations.get(next.fetch_add(1, Ordering::Relaxed)) {
            let says = Generation::new(devices, own, runner).settled();
            let verdict = |(profile, says): (&Profile, Says)| Verdict {
                device: profile.name.clone(),
                available: profile.available(),
                says,
            };
            let verdicts = devices.iter().zip(says).map(verdict);
            found.lock().unwrap_or_else(PoisonError::into_inner).extend(verdicts);
        }
    };
    thread::scope(|scope| {
        for _ in 1..at_once {
            scope.spawn(work);
        }
        work();
    });
    let mut all = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    all.sort_by(|a, b| (a.available, &a.device).cmp(&(b.available, &b.device)));
    all
}

/// The built-in GPUs by compute capability, and within one by multiprocessors and memory.
fn generations() -> Vec<Vec<Profile>> {
    let profiles = builtin::names().iter().filter_map(|name| builtin::find(name));
    let mut all: Vec<Profile> = profiles.filter(|p| p.multiprocessors.is_some()).collect();
    all.sort_by_key(|p| (Kernels::new(p), p.available()));
    let mut found: Vec<Vec<Profile>> = Vec::new();
    for profile in all {
        let capability = Kernels::new(&profile).capability;
        match found.last_mut() {
            Some(same) if Kernels::new(&same[0]).capability == capability => same.push(profile),
            _ => found.push(vec![profile]),
        }
    }
    found
}

/// The devices of one compute capability, and what is known of each.
struct Generation<'a> {
    devices: &'a [Profile],
    runner: Option<Runner<'a>>,
    says: Vec<Option<Says>>,
    asked: Vec<Option<Asked>>,
}

impl<'a> Generation<'a> {
    /// With what the reported run says of them.
    fn new(devices: &'a [Profile], own: &Own<'_>, runner: Option<Runner<'a>>) -> Self {
        let ran_on = Kernels::new(own.profile);
        let mut found = Self {
            devices,
            runner,
            says: vec![None; devices.len()],
            asked: vec![None; devices.len()],
        };
        for (index, device) in devices.iter().enumerate() {
            let kernels = Kernels::new(device);
            if kernels == ran_on {
                found.asked[index].clone_from(&own.asked);
            }
            if *device.name == own.profile.name && own.says.is_some() {
                found.says[index].clone_from(&own.says);
            } else if let Some(asked) = &own.asked
                && kernels.capability == ran_on.capability
            {
                let same = kernels == ran_on;
                let mut from = "this run's requests".to_owned();
                if !same {
                    let (here, there) = (kernels.multiprocessors, ran_on.multiprocessors);
                    from = format!("{from}, if {here} multiprocessors ask for what {there} do");
                }
                let says = asked.replayed(device, from);
                let certain = same && matches!(says, Says::Fits { .. });
                found.says[index] = (certain || runner.is_none()).then_some(says);
            }
        }
        found
    }

    /// All that can be known. Temporary storage of kernels grows with the number of
    /// multiprocessors: where what the devices with the fewest and the most ask for takes the same
    /// memory, so does what those between ask for.
    fn settled(mut self) -> Vec<Says> {
        if self.runner.is_some() {
            let (mut low, mut high) = (0, self.devices.len() - 1);
            while low < high && !self.reaches_the_end(low) {
                low += 1;
            }
            while low < high && !self.reaches_the_end(high) {
                high -= 1;
            }
            for index in 0..self.devices.len() {
                self.alike(index);
                if (low..high).contains(&index) {
                    self.between(index, low, high);
                }
                self.reaches_the_end(index);
            }
        }
        self.says.into_iter().map(|says| says.unwrap_or(Says::NotKnown)).collect()
    }

    /// Takes the answer for a device between two, if both agree on it.
    fn between(&mut self, index: usize, low: usize, high: usize) {
        let (Some(a), Some(b)) = (&self.asked[low], &self.asked[high]) else { return };
        let (low, high) = (&self.devices[low].name, &self.devices[high].name);
        let from = format!("runs on {low} and {high}, which agree");
        if self.says[index].is_none()
            && let says @ Says::Fits { .. } = a.replayed(&self.devices[index], from.clone())
            && says == b.replayed(&self.devices[index], from)
        {
            self.says[index] = Some(says);
        }
    }

    /// Takes requests for a device of which nothing is known yet, if it serves them.
    fn replay(&mut self, index: usize, asked: &Asked, from: String) {
        if self.says[index].is_none()
            && let says @ Says::Fits { .. } = asked.replayed(&self.devices[index], from)
        {
            (self.says[index], self.asked[index]) = (Some(says), Some(asked.clone()));
        }
    }

    /// Takes the requests on a device that differs in memory alone.
    fn alike(&mut self, index: usize) {
        let kernels = Kernels::new(&self.devices[index]);
        let alike = (0..self.devices.len())
            .filter(|i| *i != index && Kernels::new(&self.devices[*i]) == kernels)
            .find_map(|i| Some((i, self.asked[i].clone()?)));
        if let Some((like, asked)) = alike {
            self.replay(index, &asked, format!("the requests on {}", self.devices[like].name));
        }
    }

    /// Finds out about a device; whether all that the script asks for there is known.
    fn reaches_the_end(&mut self, index: usize) -> bool {
        self.alike(index);
        if let (None, Some(run)) = (&self.says[index], self.runner) {
            let ran = run(&self.devices[index]);
            (self.says[index], self.asked[index]) = (Some(ran.says), ran.asked);
        }
        self.asked[index].is_some()
    }
}

/// A table of them, and below it how to know more.
pub fn table(verdicts: &[Verdict]) -> String {
    let mut table = Table::new(&[
        ("device", Side::Left),
        ("available", Side::Right),
        ("", Side::Left),
        ("known from", Side::Left),
    ]);
    for v in verdicts {
        let (says, from) = match &v.says {
            Says::Fits { reserved, from } => (format!("fits, {reserved} reserved"), &**from),
            Says::DoesNotFit { from } => ("does not fit".to_owned(), &**from),
            Says::Fails { why } => (format!("fails: {why}"), "a run on it"),
            Says::NotKnown => continue,
        };
        table.row([v.device.clone(), v.available.to_string(), says, from.to_owned()]);
    }
    let unknown = verdicts.iter().filter(|v| matches!(v.says, Says::NotKnown));
    let unknown: Vec<&str> = unknown.map(|v| &*v.device).collect();
    if unknown.is_empty() {
        return format!("\n{table}");
    }
    format!(
        "\n{table}not known, since PyTorch may take other kernels there (run with --device NAME, \
         or with --all-devices): {}\n",
        unknown.join(", ")
    )
}

/// For programs. What is not known is null.
pub fn form(verdicts: &[Verdict]) -> Vec<Value> {
    let form = |v: &Verdict| {
        let (fits, reserved, from, why) = match &v.says {
            Says::Fits { reserved, from } => (Some(true), Some(reserved.0), Some(&**from), None),
            Says::DoesNotFit { from } => (Some(false), None, Some(&**from), None),
            Says::Fails { why } => (None, None, Some("a run on it"), Some(why)),
            Says::NotKnown => (None, None, None, None),
        };
        json!({
            "device": v.device, "available_bytes": v.available.0, "fits": fits,
            "peak_reserved_bytes": reserved, "known_from": from, "fails": why,
        })
    };
    verdicts.iter().map(form).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A script that takes one block.
    fn asks(bytes: u64) -> Option<Asked> {
        let request = Request::Allocate { id: 0, bytes: Bytes(bytes), stream: 0 };
        Some(Asked { requests: Arc::new(vec![request]), config: Config::default() })
    }

    fn own(device: &Profile, bytes: u64) -> Own<'_> {
        let says = Says::Fits { reserved: Bytes(bytes), from: "this run".to_owned() };
        Own { profile: device, says: Some(says), asked: asks(bytes) }
    }

    /// What a table says of each device, and from what, by name.
    fn said(verdicts: &[Verdict]) -> std::collections::BTreeMap<&str, String> {
        let words = |v: &Verdict| match &v.says {
            Says::Fits { reserved, from } => format!("{}: {from}", reserved.0 / MIB),
            Says::DoesNotFit { from } => format!("no: {from}"),
            Says::Fails { why } => format!("fails: {why}"),
            Says::NotKnown => "not known".to_owned(),
        };
        verdicts.iter().map(|v| (&*v.device, words(v))).collect()
    }

    #[test]
    fn a_run_says_nothing_of_other_generations() {
        let device = builtin::find("a6000").unwrap();
        let verdicts = verdicts(&own(&device, 512 * MIB), None, 1);
        let said = said(&verdicts);
        assert_eq!(said.len(), builtin::names().len() - 1);
        assert_eq!(said["a6000"], "512: this run");
        let rtx3090 = "512: this run's requests, if 82 multiprocessors ask for what 84 do";
        assert_eq!(said["rtx3090"], rtx3090);
        assert_eq!(said.values().filter(|s| *s == "not known").count(), said.len() - 4);
        let text = table(&verdicts);
        let unknown = text.lines().last().unwrap();
        assert!(unknown.starts_with("not known") && unknown.contains(" rtx2080ti,"), "{text}");
        assert!(text.lines().all(|l| !l.starts_with("rtx2080ti")), "{text}");
    }

    #[test]
    fn what_differs_in_memory_alone_is_replayed() {
        let device = builtin::find("h100").unwrap();
        let verdicts = verdicts(&own(&device, 90 << 30), None, 1);
        let said = said(&verdicts);
        assert_eq!(said["gh200"], "92160: this run's requests");
        assert_eq!(said["h200"], "92160: this run's requests");
        assert_eq!(said["b200"], "not known");
        let device = builtin::find("h200").unwrap();
        let verdicts = super::verdicts(&own(&device, 90 << 30), None, 1);
        assert_eq!(self::said(&verdicts)["h100"], "no: this run's requests");
    }

    /// Each generation is run where it has the fewest and the most multiprocessors, and between
    /// where those two differ or one does not reach the end.
    #[test]
    fn the_script_runs_where_nothing_else_tells() {
        let device = builtin::find("h100").unwrap();
        let ran = Mutex::new(Vec::new());
        let run = |profile: &Profile| {
            ran.lock().unwrap().push(profile.name.clone());
            let kernels = Kernels::new(profile);
            let from = "a run on it".to_owned();
            let bytes = match (kernels.capability, kernels.multiprocessors) {
                (60, _) => return Ran { says: Says::Fails { why: "x".to_owned() }, asked: None },
                (86, 28) => return Ran { says: Says::DoesNotFit { from }, asked: None },
                (89, count) => u64::from(count) * MIB,
                _ => 64 * MIB,
            };
            Ran { says: Says::Fits { reserved: Bytes(bytes), from }, asked: asks(bytes) }
        };
        let verdicts = verdicts(&own(&device, 512 * MIB), Some(&run), 2);
        let said = said(&verdicts);
        assert!(said.values().all(|s| s != "not known"), "{said:?}");
        let mut ran = ran.into_inner().unwrap();
        ran.sort_unstable();
        assert_eq!(
            ran.join(" "),
            "a10 a100-80g a30 a6000 b200 l4 l40s p100 rtx2080ti rtx3060 rtx4060 rtx4080 rtx4090 rtx5090 t4 v100"
        );
        assert_eq!(said["p100"], "fails: x");
        assert_eq!(said["h200"], "512: this run's requests");
        assert_eq!(said["a100-40g"], "64: the requests on a100-80g");
        assert_eq!(said["v100-32g"], "64: the requests on v100");
        assert_eq!(said["rtx3060"], "no: a run on it");
        assert_eq!(said["rtx3090"], "64: runs on a10 and a6000, which agree");
        assert_eq!(said["rtx4080"], "76: a run on it");
    }
}
