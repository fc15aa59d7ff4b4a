//! The `neap` command: flags in, resolved settings out, one module per subcommand.

mod accounting;
mod before_after;
mod cache;
mod check;
mod command;
mod compare;
mod device;
mod diff;
mod dry;
mod estimate;
mod explain;
mod import;
mod inspect;
mod making;
mod output;
mod place;
mod plan;
mod profile;
mod progress;
mod replay;
mod run;
mod score;
mod script;
mod settings;
mod share;
mod shell;
mod signals;
mod simulate;
mod timeline;
mod torch;
mod train;

use std::process::ExitCode;

use clap::Parser;

use output::Answer;

/// Plan, prove, simulate and run deep-learning training in less GPU memory.
#[derive(Parser)]
#[command(name = "neap", version = env!("NEAP_VERSION"), propagate_version = true, max_term_width = 100)]
struct Cli {
    /// Print the result as one JSON object on stdout.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: command::Command,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    Answer::exit(cli.command.run(cli.json))
}
