//! The `neap` command: flags in, resolved settings out, one file per subcommand.

mod accounting;
mod allocator;
mod arrivals;
mod beside;
mod check;
mod command;
mod compare;
mod compare_jobs;
mod device;
mod diff;
mod dry;
mod estimate;
mod explain;
mod import;
mod inspect;
mod output;
mod place;
mod plan;
mod profile;
mod replay;
mod run;
mod score;
mod service;
mod settings;
mod share;
mod simulate;
mod together;
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
    command: command::Command,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    Answer::exit(cli.command.run(cli.json))
}
