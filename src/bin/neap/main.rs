//! The `neap` command: flags in, resolved settings out, one file per subcommand.

mod allocator;
mod check;
mod compare;
mod device;
mod diff;
mod estimate;
mod import;
mod inspect;
mod output;
mod place;
mod plan;
mod profile;
mod replay;
mod run;
mod score;
mod settings;
mod simulate;
mod train;

use std::process::ExitCode;

use clap::Parser;

use output::Answer;

/// Plans, proves, simulates and runs deep-learning training in less GPU memory.
#[derive(Parser)]
#[command(name = "neap", version, propagate_version = true, max_term_width = 100)]
struct Cli {
    /// Print one JSON object on stdout.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Import(import::Flags),
    Inspect(inspect::Flags),
    Plan(plan::Flags),
    Compare(compare::Flags),
    Place(place::Flags),
    Simulate(simulate::Flags),
    Run(run::Flags),
    Profile(profile::Flags),
    Train(train::Flags),
    Estimate(Box<estimate::Flags>),
    Replay(replay::Flags),
    Score(score::Flags),
    Check(check::Flags),
    Diff(diff::Flags),
    Device(device::Flags),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let answer = match cli.command {
        Command::Import(flags) => import::main(&flags, cli.json),
        Command::Inspect(flags) => inspect::main(&flags, cli.json),
        Command::Plan(flags) => plan::main(&flags, cli.json),
        Command::Compare(flags) => compare::main(&flags, cli.json),
        Command::Place(flags) => place::main(&flags, cli.json),
        Command::Simulate(flags) => simulate::main(&flags, cli.json),
        Command::Run(flags) => run::main(&flags, cli.json),
        Command::Profile(flags) => profile::main(&flags, cli.json),
        Command::Train(flags) => train::main(&flags, cli.json),
        Command::Estimate(flags) => estimate::main(&flags, cli.json),
        Command::Replay(flags) => replay::main(&flags, cli.json),
        Command::Score(flags) => score::main(&flags, cli.json),
        Command::Check(flags) => check::main(&flags, cli.json),
        Command::Diff(flags) => diff::main(&flags, cli.json),
        Command::Device(flags) => device::main(&flags, cli.json),
    };
    Answer::exit(answer)
}
