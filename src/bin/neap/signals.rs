//! INT, TERM and HUP: the first one lets a run end after its iteration, the second ends the
//! process.

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

/// From now on the first signal requests `stop`, and a second one ends the process at once.
///
/// # Errors
/// When the system refuses a signal handler.
pub fn request_at_signals(stop: &Stop) -> anyhow::Result<()> {
    let requested = stop.flag();
    for signal in SIGNALS {
        // The order matters: on a signal, the first handler checks whether there was one before,
        // and the second records this one.
        flag::register_conditional_shutdown(signal, i32::from(STOPPED), Arc::clone(&requested))
            .and_then(|_| flag::register(signal, Arc::clone(&requested)))
            .context("a signal handler cannot be set")?;
    }
    Ok(())
}

/// From now on signals request `stop`, and none ends the process before it has cleaned up.
///
/// # Errors
/// As [`request_at_signals`].
pub fn only_request_at_signals(stop: &Stop) -> anyhow::Result<()> {
    for signal in SIGNALS {
        flag::register(signal, stop.flag()).context("a signal handler cannot be set")?;
    }
    Ok(())
}
