//! Progress of a slow command, on stderr if that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar of `length` units named `what`, with the time that is left.
pub fn bar(length: u64, what: &str) -> ProgressBar {
    styled(Some(length), &format!("{{bar:30}} {{pos}}/{{len}} {what}, {{eta}} left"))
}

/// A bar that also shows the present unit, and the seconds elapsed while a unit takes long.
pub fn steps(length: u64, what: &str) -> ProgressBar {
    let style = format!("{{bar:30}} {{pos}}/{{len}} {what}, {{elapsed}}: {{msg}}");
    let bar = styled(Some(length), &style);
    bar.enable_steady_tick(TICK);
    bar
}

/// A spinner with the seconds elapsed, for work of unknown length.
pub fn working(on: &str) -> ProgressBar {
    let bar = styled(None, "{spinner} {msg}, {elapsed}");
    bar.set_message(on.to_owned());
    bar.enable_steady_tick(TICK);
    bar
}

const TICK: Duration = Duration::from_millis(250);

fn styled(length: Option<u64>, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
