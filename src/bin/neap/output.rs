//! What a command answers with: exit codes, stdout for data, stderr for the rest.

use std::io::{self, Write};
use std::process::ExitCode;

use neap::report::plain;

/// How a command ended, short of bad input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Done: exit 0.
    Yes,
    /// The answer is no (does not fit, check failed, differs): exit 1.
    No,
}

impl Answer {
    /// Reports an error, if there is one, and gives the exit code.
    pub fn exit(result: anyhow::Result<Self>) -> ExitCode {
        match result {
            Ok(Self::Yes) => ExitCode::SUCCESS,
            Ok(Self::No) => ExitCode::from(1),
            Err(error) => {
                // A reader that has seen enough (`| head`) is not an error of ours.
                if error.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)) {
                    return ExitCode::SUCCESS;
                }
                note(&format!("error: {error:#}"));
                ExitCode::from(2)
            }
        }
    }
}

/// Prints data.
///
/// # Errors
/// When stdout can't be written.
pub fn data(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()?;
    Ok(())
}

/// Prints one JSON object as data.
///
/// # Errors
/// When stdout can't be written.
pub fn json(value: &serde_json::Value) -> anyhow::Result<()> {
    data(&format!("{value:#}"))
}

/// Says something to the person, on stderr.
pub fn note(text: &str) {
    let lines: Vec<_> = text.lines().map(plain).collect();
    let _ = writeln!(io::stderr().lock(), "{}", lines.join("\n"));
}
