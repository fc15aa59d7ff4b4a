//! The subcommands, each with its module.

use super::output::Answer;
use super::{
    cache, check, compare, device, diff, dry, estimate, explain, import, inspect, place, plan,
    profile, replay, run, score, script, share, shell, simulate, torch, train,
};

#[derive(clap::Subcommand)]
pub enum Command {
    Import(import::Flags),
    Inspect(inspect::Flags),
    Plan(plan::Flags),
    Compare(compare::Flags),
    Place(place::Flags),
    Simulate(simulate::Flags),
    Run(run::Flags),
    Profile(profile::Flags),
    Train(train::Flags),
    Dry(Box<dry::Flags>),
    Torch(Box<torch::Flags>),
    Estimate(Box<estimate::Flags>),
    Replay(replay::Flags),
    Score(score::Flags),
    Share(Box<share::Flags>),
    Check(check::Flags),
    Diff(diff::Flags),
    Explain(explain::Flags),
    Device(device::Flags),
    Cache(cache::Flags),
    Script(script::Flags),
    Completions(shell::Completions),
    Man(shell::Manual),
}

impl Command {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// On bad input; the error names the remedy.
    pub fn run(&self, json: bool) -> anyhow::Result<Answer> {
        match self {
            Self::Import(flags) => import::main(flags, json),
            Self::Inspect(flags) => inspect::main(flags, json),
            Self::Plan(flags) => plan::main(flags, json),
            Self::Compare(flags) => compare::main(flags, json),
            Self::Place(flags) => place::main(flags, json),
            Self::Simulate(flags) => simulate::main(flags, json),
            Self::Run(flags) => run::main(flags, json),
            Self::Profile(flags) => profile::main(flags, json),
            Self::Train(flags) => train::main(flags, json),
            Self::Dry(flags) => dry::main(flags, json),
            Self::Torch(flags) => torch::main(flags, json),
            Self::Estimate(flags) => estimate::main(flags, json),
            Self::Replay(flags) => replay::main(flags, json),
            Self::Score(flags) => score::main(flags, json),
            Self::Share(flags) => share::main(flags, json),
            Self::Check(flags) => check::main(flags, json),
            Self::Diff(flags) => diff::main(flags, json),
            Self::Explain(flags) => explain::main(flags, json),
            Self::Device(flags) => device::main(flags, json),
            Self::Cache(flags) => cache::main(flags, json),
            Self::Script(flags) => script::main(flags),
            Self::Completions(flags) => shell::completions(flags),
            Self::Man(flags) => shell::manual(flags),
        }
    }
}
