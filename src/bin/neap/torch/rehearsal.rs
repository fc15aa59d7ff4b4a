//! The plan for a script's first iteration, made and tried on the dry device: for one that does not
//! fit until there is a plan, or that is to fit from the beginning.
//!
//! The script is planned on a card that is never full, and tried with that plan on one with the
//! real card's memory, from the first iteration on: there memory lies otherwise than in the
//! iterations that were planned for. Where it does not keep to the budget there, it is planned for
//! less.

use std::cmp::Reverse;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::Context;
use clap::Parser;
use neap::device::profile;
use neap::files::read_regular;
use neap::units::Bytes;
use serde_json::Value;

use super::Flags;
use super::card::Card;
use super::linux::{Dry, LARGEST_PLAN, Reports, UNKNOWN, environment, paths, scratch};
use crate::dry::launch::{self, Memory};
use crate::dry::unpack::Unpacked;
use crate::output::note;

/// The most optimizer steps of a run that makes a plan; it ends as soon as the plan stays.
const PLANNING_STEPS: u64 = 40;
/// The optimizer steps that a plan is tried for.
const TRIAL_STEPS: u64 = 9;
/// How often the script is planned.
const TRIES: usize = 4;
/// The part of the budget that is left free beyond what the last plan exceeded it by, or beyond
/// what was left free before where the plan ended in running out of memory.
const STEP: u64 = 20;

/// The folder of what `neap.torch` reports; the dry device's own reports have like names.
const REPORTS: &str = "torch";

/// A command whose first iterations are to fit, and the card that they run on.
pub struct Rehearsal<'a> {
    pub flags: &'a Flags,
    pub card: &'a Card,
    pub unpacked: &'a Unpacked,
}

/// How a plan did on the dry device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Failed,
    /// It reserved this many bytes more than the budget.
    Over(Reverse<u64>),
    KeptToBudget,
}

impl Rehearsal<'_> {
    /// Makes plans until one keeps to the budget from the first iteration on; the best one, as a
    /// file in `folder`.
    ///
    /// # Errors
    /// When a command can't be started.
    pub fn plan(&self, folder: &Path) -> anyhow::Result<Option<PathBuf>> {
        let mut best: Option<(Outcome, PathBuf)> = None;
        let mut budget = None;
        let mut free = 0;
        for round in 0..TRIES {
            let path = folder.join(format!("dry-{round}.plan.json"));
            self.make(&path, budget.map(|bytes: u64| bytes.saturating_sub(free)))?;
            let Some(asked) = stamp(&path, budget) else { break };
            budget = Some(asked);
            if launch::interrupted() {
                break;
            }
            let outcome = self.try_out(&path, asked)?;
            if best.as_ref().is_none_or(|(before, _)| outcome > *before) {
                best = Some((outcome, path));
            }
            free = free.saturating_add(asked / STEP);
            free = match outcome {
                Outcome::KeptToBudget => break,
                Outcome::Over(Reverse(bytes)) => free.saturating_add(bytes),
                Outcome::Failed => free.saturating_mul(2),
            };
            if round + 1 < TRIES {
                note(&format!(
                    "note: by that plan the first iterations would not keep to the budget; \
                     planning with {} left free",
                    Bytes(free)
                ));
            }
        }
        // A script that could run without a plan does so rather than by one that failed.
        let usable = |outcome: Outcome| self.flags.scout.is_none() || outcome != Outcome::Failed;
        Ok(best.filter(|(outcome, _)| usable(*outcome)).map(|(_, path)| path))
    }

    /// Runs the script silently on a device that is never full and computes nothing, and is
    /// otherwise the script's own, until it has a plan: which kernels run depends on the device.
    fn make(&self, plan: &Path, budget: Option<u64>) -> anyhow::Result<()> {
        let scratch = scratch()?;
        let scout = self.flags.scout.unwrap_or(0);
        let steps = PLANNING_STEPS + scout;
        let mut command = self.command(steps, Memory::UNLIMITED, scratch.path(), None)?;
        command.env("NEAP_TORCH_SAVE_PLAN", plan).env("NEAP_TORCH_PLAN_ONLY", "1");
        command.env("NEAP_TORCH_SCOUT", scout.to_string());
        if let Some(budget) = budget {
            command.env("NEAP_TORCH_BUDGET", budget.to_string());
        }
        let log = scratch.path().join("log");
        run_silently(command, &log)?;
        if !plan.exists() {
            let text = end(&log).unwrap_or_default();
            let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
            note(&format!("note: the dry run made no plan; it ended with: {last}"));
        }
        Ok(())
    }

    /// Runs the script by a plan on a device with the card's memory.
    fn try_out(&self, plan: &Path, budget: u64) -> anyhow::Result<Outcome> {
        let scratch = scratch()?;
        let has = self.card.available().unwrap_or(Memory::UNLIMITED.total);
        let memory = Memory { total: has, capacity: has };
        let steps = TRIAL_STEPS.max(self.flags.scout.unwrap_or(0));
        let mut command = self.command(steps, memory, scratch.path(), Some(plan))?;
        command.env_remove("NEAP_TORCH_JOIN");
        let status = run_silently(command, &scratch.path().join("log"))?;
        let reports = Reports::read(&scratch.path().join(REPORTS)).reports;
        if !status.success() || reports.is_empty() {
            return Ok(Outcome::Failed);
        }
        let reserved = reports.iter().filter_map(|report| report["peak_reserved_bytes"].as_u64());
        let most = reserved.max().unwrap_or(0);
        let over = most.saturating_sub(budget);
        Ok(if over == 0 { Outcome::KeptToBudget } else { Outcome::Over(Reverse(over)) })
    }

    fn command(
        &self,
        steps: u64,
        memory: Memory,
        scratch: &Path,
        plan: Option<&Path>,
    ) -> anyhow::Result<Command> {
        let steps = steps.to_string();
        let asked = ["dry", "--steps", &steps, "--no-second-run", "--"].map(OsString::from);
        let Dry { flags: dry } = Dry::try_parse_from(asked.iter().chain(&self.flags.command))?;
        // What the card does not say is as in the profile that the plan is made by.
        let named = self.flags.device.as_deref().or(self.card.profile()).unwrap_or(UNKNOWN);
        let device = profile::load(named)?;
        let mut command = launch::command(&dry, &device, memory, self.unpacked, scratch)?;
        command.envs(self.card.environment());
        let reports = scratch.join(REPORTS);
        fs::create_dir(&reports).context("no folder for reports can be made")?;
        environment(&mut command, self.flags, plan, &reports)?;
        let unpacked = self.unpacked;
        paths(&mut command, &[&unpacked.hook, &unpacked.torch_hook, &unpacked.python])?;
        Ok(command)
    }
}

fn run_silently(mut command: Command, log: &Path) -> anyhow::Result<ExitStatus> {
    let file = fs::File::create(log).context("the log cannot be written")?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    launch::run(command)
}

/// The end of what a script printed, which may be of any length.
fn end(log: &Path) -> io::Result<String> {
    const BYTES: u64 = 1 << 16;
    let mut file = fs::File::open(log)?;
    let from = file.metadata()?.len().saturating_sub(BYTES);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The budget of a plan, which is `budget` from now on, if that is given; nothing without a plan.
fn stamp(path: &Path, budget: Option<u64>) -> Option<u64> {
    let mut form: Value = serde_json::from_str(&read_regular(path, LARGEST_PLAN).ok()?).ok()?;
    let Some(budget) = budget else { return form["budget_bytes"].as_u64() };
    form["budget_bytes"] = budget.into();
    fs::write(path, form.to_string()).ok()?;
    Some(budget)
}
