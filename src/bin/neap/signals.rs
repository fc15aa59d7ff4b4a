//! INT, TERM and HUP: the first asks a run to end after its iteration, the second ends the process.

use std::sync::Arc;

use anyhow::Context;
use neap::run::Stop;
use signal_hook::consts::signal;
use signal_hook::flag;

#[cfg(unix)]
const SIGNALS: [i32; 3] = [signal::SIGINT, signal::SIGTERM, signal::SIGHUP];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [signal::SIGINT, signal::SIGTERM];

/// The exit code of a run that a signal ended.
pub const STOPPED: u8 = 130;

/// From now on the first signal requests `stop` and a second one ends the process at once.
///
/// # Errors
/// When the system lets no handler be set.
pub fn request_at_signals(stop: &Stop) -> anyhow::Result<()> {
    let requested = stop.flag();
    for signal in SIGNALS {
        // In this order: a signal looks whether there was one before, and then says that it came.
        flag::register_conditional_shutdown(signal, i32::from(STOPPED), Arc::clone(&requested))
            .and_then(|_| flag::register(signal, Arc::clone(&requested)))
            .context("no handler for signals can be set")?;
    }
    Ok(())
}
