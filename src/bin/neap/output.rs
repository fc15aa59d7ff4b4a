//! The output of a command: an exit code, its report on stdout, everything else on stderr.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use neap::report::page::Page;
use neap::report::plain;
use serde::Serialize;
use serde_json::Value;

use crate::signals;

/// How a command ended, if its input was good.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Done: exit code 0.
    Yes,
    /// The answer is no (does not fit, check failed, differs): exit code 1.
    No,
    /// A signal ended it early: exit code 130.
    Stopped,
    /// The program to be judged failed by itself, so there is no answer: exit code 3.
    Failed,
    /// The exit code of a command that this one ran.
    Code(u8),
}

impl Answer {
    /// [`Answer::Yes`] where `yes` holds.
    pub const fn yes_if(yes: bool) -> Self {
        if yes { Self::Yes } else { Self::No }
    }

    /// Prints the error, if there is one, and gives the exit code.
    pub fn exit(result: anyhow::Result<Self>) -> ExitCode {
        match result {
            Ok(Self::Yes) => ExitCode::SUCCESS,
            Ok(Self::No) => ExitCode::from(1),
            Ok(Self::Failed) => ExitCode::from(3),
            Ok(Self::Code(code)) => ExitCode::from(code),
            Ok(Self::Stopped) => ExitCode::from(signals::STOPPED),
            Err(error) => {
                note(&format!("error: {}", chain(&error)));
                ExitCode::from(2)
            }
        }
    }
}

/// The last steps of a command, after its work. Each step runs even if the ones before it failed,
/// so that one output that can't be written loses neither the answer nor the other outputs.
#[derive(Default)]
pub struct Ending(Option<anyhow::Error>);

impl Ending {
    /// Begins with the report.
    pub fn reporting(figures: &(impl Serialize + Display), as_json: bool) -> Self {
        let mut ending = Self::default();
        ending.then(|| report(figures, as_json));
        ending
    }

    /// Begins with a report whose figures and text were made side by side.
    pub fn printing((figures, text): &(Value, String), as_json: bool) -> Self {
        let mut ending = Self::default();
        ending.then(|| if as_json { json(figures) } else { data(text) });
        ending
    }

    /// Writes a file, if it is asked for.
    pub fn file(&mut self, path: Option<&Path>, write: impl FnOnce(&Path) -> anyhow::Result<()>) {
        if let Some(path) = path {
            self.then(|| write(path));
        }
    }

    /// Runs a step.
    pub fn then(&mut self, step: impl FnOnce() -> anyhow::Result<()>) {
        match (step(), &self.0) {
            (Ok(()), _) => {}
            (Err(error), None) => self.0 = Some(error),
            (Err(error), Some(_)) => note(&format!("error: {}", chain(&error))),
        }
    }

    /// The answer, or the first error.
    ///
    /// # Errors
    /// When a step failed.
    pub fn with(self, answer: Answer) -> anyhow::Result<Answer> {
        self.0.map_or(Ok(answer), Err)
    }
}

/// The error and its causes, without those that the text before them already quotes.
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

/// Turns `text` into one printable line, so that names from files can't start a line of their own.
/// A text that is too long loses its middle: the place is at its beginning and the remedy at its
/// end.
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

/// Prints a report: one JSON object, or the same figures as text.
///
/// # Errors
/// When stdout can't be written.
pub fn report(report: &(impl Serialize + Display), as_json: bool) -> anyhow::Result<()> {
    if as_json { json(&serde_json::to_value(report)?) } else { data(&report.to_string()) }
}

/// Prints data without control characters. It is no error if the reader stops early (`| head`).
///
/// # Errors
/// When stdout can't be written.
pub fn data(text: &str) -> anyhow::Result<()> {
    let mut all: String = text.lines().map(plain).collect::<Vec<_>>().join("\n");
    all.push('\n');
    raw(all.as_bytes())
}

/// Prints bytes as they are.
///
/// # Errors
/// When stdout can't be written.
pub fn raw(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("stdout cannot be written"),
    }
}

/// Prints one JSON object as data, keys in alphabetical order.
///
/// # Errors
/// When stdout can't be written.
pub fn json(value: &Value) -> anyhow::Result<()> {
    data(&format!("{value:#}"))
}

/// Prints a message as one line on stderr.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", one_line(text));
}

/// Prints that a file was written.
pub fn written(path: &Path) {
    note(&format!("written: {}", path.display()));
}

/// Writes a text file, whole or not at all, and prints that it was written.
///
/// # Errors
/// When it can't be written.
pub fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    neap::files::write(path, |out| out.write_all(text.as_bytes()))?;
    written(path);
    Ok(())
}

/// Writes a page, whole or not at all, and prints that it was written.
///
/// # Errors
/// When it can't be written.
pub fn page(path: &Path, page: &Page) -> anyhow::Result<()> {
    write(path, &page.html()?)
}

/// Writes a table with these columns, whole or not at all, and prints that it was written.
///
/// # Errors
/// When it can't be written.
pub fn csv<R: IntoIterator<Item: AsRef<[u8]>>>(
    path: &Path,
    heads: impl IntoIterator<Item: AsRef<[u8]>>,
    rows: impl IntoIterator<Item = R>,
) -> anyhow::Result<()> {
    neap::files::write(path, |out| {
        let mut table = csv::Writer::from_writer(out);
        table.write_record(heads)?;
        rows.into_iter().try_for_each(|row| table.write_record(row))?;
        table.flush()
    })?;
    written(path);
    Ok(())
}

/// The word for a value in a file format, without underscores: `optimizer state`.
pub fn word(value: impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().replace('_', " ")
}
