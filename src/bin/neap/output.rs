//! What a command answers with: exit codes, stdout for data, stderr for the rest.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use neap::report::plain;

/// How a command ended, short of bad input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Done: exit 0.
    Yes,
    /// The answer is no (does not fit, check failed, differs): exit 1.
    No,
    /// What was to be judged failed by itself, so that there is no answer: exit 3.
    Failed,
}

impl Answer {
    /// Reports an error, if there is one, and gives the exit code.
    pub fn exit(result: anyhow::Result<Self>) -> ExitCode {
        match result {
            Ok(Self::Yes) => ExitCode::SUCCESS,
            Ok(Self::No) => ExitCode::from(1),
            Ok(Self::Failed) => ExitCode::from(3),
            Err(error) => {
                note(&format!("error: {}", chain(&error)));
                ExitCode::from(2)
            }
        }
    }
}

/// The error and its causes, less those that the text before them already quotes.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    text
}

/// The longest message, in characters.
const LONGEST: usize = 1200;

/// Names out of files can neither forge a second line nor drown the message: what is too long loses its middle, as the place stands
/// at the beginning and the remedy at the end.
fn one_line(text: &str) -> String {
    let text = plain(text);
    let count = text.chars().count();
    if count <= LONGEST {
        return text.into_owned();
    }
    let head: String = text.chars().take(LONGEST / 2).collect();
    let tail: String = text.chars().skip(count - LONGEST / 2).collect();
    format!("{head} […] {tail}")
}

/// Prints data, harmless to a terminal. A reader that has seen enough (`| head`) is no error, and changes no answer.
///
/// # Errors
/// When stdout can't be written.
pub fn data(text: &str) -> anyhow::Result<()> {
    let mut all: String = text.lines().map(plain).collect::<Vec<_>>().join("\n");
    all.push('\n');
    let mut out = io::stdout().lock();
    match out.write_all(all.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("stdout cannot be written"),
    }
}

/// Prints one JSON object as data.
///
/// # Errors
/// When stdout can't be written.
pub fn json(value: &serde_json::Value) -> anyhow::Result<()> {
    data(&format!("{value:#}"))
}

/// A bar on stderr that counts to `total`; nothing where stderr is no terminal.
pub fn progress(total: usize, what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
    let style = format!("{what} {{pos}}/{{len}} [{{elapsed}}]");
    // The template is ours and right, so there is nothing to say if it were not.
    if let Ok(style) = ProgressStyle::with_template(&style) {
        bar.set_style(style);
    }
    bar
}

/// Says something to the person on one line of stderr.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", one_line(text));
}
