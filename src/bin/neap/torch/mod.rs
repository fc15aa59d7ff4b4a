//! `neap torch`: runs a PyTorch training script, unchanged, within a budget of device memory.

#[cfg(target_os = "linux")]
mod card;
#[cfg(target_os = "linux")]
mod history;
#[cfg(target_os = "linux")]
#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
mod passing;
#[cfg(target_os = "linux")]
mod rehearsal;
#[cfg(target_os = "linux")]
mod serve;
#[cfg(target_os = "linux")]
mod shares;
#[cfg(target_os = "linux")]
mod story;

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use neap::sim::share::policy::{self, Policy};
use neap::units::{Bytes, Nanos};

use crate::output::Answer;
use crate::settings::values::{policy, seconds};
use crate::settings::{Budget, JobArg};

/// Run a PyTorch training script, unchanged, within a budget of device memory.
///
/// The first iterations are watched; then a plan is made and carried out inside PyTorch: saved
/// activations and optimizer states are swapped to the host, calls of modules run again in
/// backward. Every number stays what it is without neap, bit for bit. Exits with the command's own
/// exit code.
#[derive(clap::Args)]
pub struct Flags {
    /// What PyTorch may reserve: bytes (12GiB), or a share of the unplanned peak (60%). With
    /// --serve: what all scripts may reserve together, in bytes.
    #[arg(long, value_name = "BUDGET", required_unless_present_any = ["plan", "join"])]
    pub budget: Option<Budget>,
    /// Divide the budget among the scripts that --join this socket, and plan anew when one comes or
    /// goes. With a command, also run that; then until the last script has gone.
    #[arg(long, value_name = "SOCKET", requires = "budget", conflicts_with_all = ["plan", "join"])]
    pub serve: Option<PathBuf>,
    /// Run within a share of the budget of `neap torch --serve SOCKET`, or in a lane of it. SOCKET
    /// may end in limits on a share's swaps, as `neap plan` reads them: with @0.5 the server plans
    /// for at most half of the script's tensors to be swapped, and the other scripts give up memory
    /// first; with @1:0.25 for at most a quarter of all scripts' swaps to be its own.
    #[arg(long, value_name = "SOCKET", conflicts_with = "budget",
          value_parser = OsStringValueParser::new().try_map(JobArg::read))]
    pub join: Option<JobArg>,
    /// What scripts that join get. A share each: all run at the same time, and each moves what does
    /// not fit its share. Or a lane: scripts run as they are, and those of one lane take turns, so
    /// that all need what each keeps between iterations, and once the most that one needs within.
    #[arg(long, value_enum, default_value_t, requires = "serve")]
    pub mode: Mode,
    /// With --mode lanes: which script goes first.
    #[arg(long, value_name = "POLICY", default_value = "fair", value_parser = policy(),
          requires = "serve")]
    pub policy: &'static Policy,
    /// With --mode lanes: take the token from a script that has held it this long while others
    /// wait, in place of ten times its longest iteration (and at least 10 s).
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "serve")]
    pub token_limit: Option<Nanos>,
    /// With --mode lanes: write what happens, for `neap share FILE.jsonl`.
    #[arg(long, value_name = "FILE.jsonl", requires = "serve")]
    pub log: Option<PathBuf>,
    /// In a lane: what the script keeps between iterations and needs besides within one, so that it
    /// waits for room before it allocates anything. Otherwise its first iterations, which it runs
    /// alone, show that.
    #[arg(long, value_name = "KEPT+WITHIN", value_parser = needs)]
    pub needs: Option<(Bytes, Bytes)>,
    /// In a lane: the time that all iterations of the script take alone; srtf goes by it. A script
    /// without it goes after those with.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub work: Option<Nanos>,
    /// Whose times and link the plan is made by: a built-in name or a *.device.json file. Without
    /// it, those of the built-in device that the script's card is, or of the a6000 if none is.
    #[arg(long, value_name = "NAME|FILE")]
    pub device: Option<String>,
    /// Operator times for the first plan: a table that --latencies-out, `neap profile` or
    /// `neap run` wrote. Later plans go by times that are measured in the script.
    #[arg(long, value_name = "FILE.csv")]
    pub latencies: Option<PathBuf>,
    /// A predictor from `neap train`, for operators that the table lacks.
    #[arg(long, value_name = "FILE.predictor.json")]
    pub predictor: Option<PathBuf>,
    /// Write the operator times that were measured in the script, for --latencies.
    #[arg(long, value_name = "FILE.csv")]
    pub latencies_out: Option<PathBuf>,
    /// Act by this plan from the first iteration on: a file that --save-plan wrote.
    #[arg(long, value_name = "FILE", conflicts_with = "budget")]
    pub plan: Option<PathBuf>,
    /// Write the plan, for --plan.
    #[arg(long, value_name = "FILE")]
    pub save_plan: Option<PathBuf>,
    /// Write one planned iteration as a timeline for Perfetto. With --serve and lanes: all scripts,
    /// lanes and tokens.
    #[arg(long, value_name = "FILE.json")]
    pub timeline: Option<PathBuf>,
    /// Write what the script reports at its end as a page to look at in a browser. With --serve it
    /// also shows which scripts held how many bytes over time.
    #[arg(long, value_name = "FILE.html")]
    pub html: Option<PathBuf>,
    /// Swap only: no module runs twice.
    #[arg(long)]
    pub no_recompute: bool,
    /// Update each parameter inside backward as soon as its gradient is complete, and free the
    /// gradient. Only for a script that takes the step after each backward and does not look at
    /// gradients.
    #[arg(long)]
    pub early_updates: bool,
    /// Refuse what would reserve more than the budget, with PyTorch's OutOfMemoryError. Without
    /// it, what has no plan, such as an evaluation, may where the device has room. A share of a
    /// server always binds. Also lets an unexpected error of neap's own end the script; without
    /// it that is said in a line, and the script goes on without neap. Where the script ends well
    /// but the budget is not met, or that is not known, the exit code is 1.
    #[arg(long)]
    pub strict: bool,
    /// Make every plan anew in place of taking it from the cache.
    #[arg(long)]
    pub no_cache: bool,
    /// When the first iterations do not fit, do not plan on the dry device and start again.
    #[arg(long)]
    pub no_second_run: bool,
    /// Run the first N steps on the dry device before the script itself, and plan for the largest
    /// of them: the plan acts from the script's first iteration on.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u64).range(2..=100),
        conflicts_with_all = ["plan", "join", "serve"]
    )]
    pub scout: Option<u64>,
    /// The command that runs the script, after `--`.
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "serve")]
    pub command: Vec<std::ffi::OsString>,
}

/// What scripts that join get.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// A share each.
    #[default]
    Shares,
    /// A lane, and its token in turn.
    Lanes,
}

/// Reads needs such as `3GiB+5GiB`.
fn needs(text: &str) -> Result<(Bytes, Bytes), String> {
    let both = text
        .split_once('+')
        .and_then(|(kept, within)| Some((kept.trim().parse().ok()?, within.trim().parse().ok()?)));
    both.ok_or_else(|| format!("`{text}` is not KEPT+WITHIN; give two sizes such as 1.5GiB+6GiB"))
}

impl Flags {
    /// The policy by which lanes are passed on.
    ///
    /// # Errors
    /// When no server of lanes passes them on so.
    #[cfg(target_os = "linux")]
    fn policy(&self) -> anyhow::Result<&'static Policy> {
        if self.mode == Mode::Shares {
            let given =
                [("--token-limit", self.token_limit.is_some()), ("--log", self.log.is_some())];
            if let Some((flag, _)) = given.iter().find(|one| one.1) {
                anyhow::bail!("{flag} is for lanes; add --mode lanes");
            }
        } else if self.policy.name == policy::NEAP.name {
            anyhow::bail!(
                "--policy neap moves memory that scripts keep; give fifo, srtf, pack or fair"
            );
        }
        Ok(self.policy)
    }

    /// Refuses what means nothing to a script in a lane, or outside of one.
    ///
    /// # Errors
    /// The first flag that does.
    #[cfg(target_os = "linux")]
    fn fits(&self, has_lane: bool) -> anyhow::Result<()> {
        let lane = [("--needs", self.needs.is_some()), ("--work", self.work.is_some())];
        let plan = [
            ("a limit on swaps", self.join.as_ref().is_some_and(JobArg::is_limited)),
            ("--plan", self.plan.is_some()),
            ("--save-plan", self.save_plan.is_some()),
            ("--latencies", self.latencies.is_some()),
            ("--predictor", self.predictor.is_some()),
            ("--latencies-out", self.latencies_out.is_some()),
            ("--early-updates", self.early_updates),
            ("--no-recompute", self.no_recompute),
            ("--strict", self.strict),
        ];
        let given =
            |flags: &[(&'static str, bool)]| flags.iter().find(|one| one.1).map(|one| one.0);
        match (has_lane, given(&lane), given(&plan)) {
            (true, _, Some(flag)) => anyhow::bail!(
                "{flag} is for plans, and scripts in lanes run as they are; leave it out, or serve \
                 with --mode shares"
            ),
            (false, Some(flag), _) => {
                anyhow::bail!(
                    "{flag} is for scripts in lanes; leave it out, or serve with --mode lanes"
                )
            }
            _ => Ok(()),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// Bad use.
#[cfg(target_os = "linux")]
pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    linux::main(flags, as_json)
}

/// Says that there is no such thing here.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn main(_flags: &Flags, _as_json: bool) -> anyhow::Result<Answer> {
    anyhow::bail!("`neap torch` runs on Linux only; in the script, use neap.torch.fit")
}
