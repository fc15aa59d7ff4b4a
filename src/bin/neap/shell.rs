//! `neap completions` and `neap man`: shell completions and manual pages.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::output::{self, Answer};

/// Print completions for a shell: `neap completions bash >
/// ~/.local/share/bash-completion/completions/neap`.
#[derive(clap::Args)]
pub struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Write a manual page for neap and for each subcommand into a folder.
#[derive(clap::Args)]
pub struct Manual {
    /// The folder, such as ~/.local/share/man/man1.
    folder: PathBuf,
}

pub fn completions(flags: &Completions) -> anyhow::Result<Answer> {
    let mut script = Vec::new();
    clap_complete::generate(flags.shell, &mut Cli::command(), "neap", &mut script);
    output::raw(&script)?;
    Ok(Answer::Yes)
}

pub fn manual(flags: &Manual) -> anyhow::Result<Answer> {
    std::fs::create_dir_all(&flags.folder)
        .with_context(|| format!("{}: cannot be made", flags.folder.display()))?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    page(&flags.folder, &command)?;
    Ok(Answer::Yes)
}

/// Writes the page of a command and those of its subcommands.
fn page(folder: &Path, command: &clap::Command) -> anyhow::Result<()> {
    let page = clap_mangen::Man::new(command.clone());
    let path = folder.join(page.get_filename());
    neap::files::write(&path, |out| page.render(out))?;
    output::written(&path);
    command.get_subcommands().try_for_each(|below| self::page(folder, below))
}
