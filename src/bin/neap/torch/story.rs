//! What happened to scripts in lanes, as one timeline for Perfetto: what each holds, which lane it
//! is in, and from when until when it had the token.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use neap::report::timeline::{Span, Track, Value, Writer};
use neap::sim::share::events::{Event, What};
use neap::units::{Bytes, Nanos};

use crate::output;

/// One script's tracks and what it does now.
struct Shown {
    name: String,
    tracks: [Track; 2],
    process: u32,
    holds: Bytes,
    needs: (Bytes, Bytes),
    lane: Option<u32>,
    token: Option<Nanos>,
    since: Nanos,
}

/// Writes the timeline.
///
/// # Errors
/// When the file can't be written.
pub fn timeline(path: &Path, events: &[Event]) -> anyhow::Result<()> {
    neap::files::write(path, |file| {
        let mut drawing = Drawing { writer: Writer::new(file)?, shown: BTreeMap::new() };
        let last = events.last().map_or(Nanos::ZERO, |event| event.at_ns);
        events.iter().try_for_each(|event| drawing.add(event))?;
        let there: Vec<u64> = drawing.shown.keys().copied().collect();
        there.into_iter().try_for_each(|script| drawing.left(script, last))?;
        drawing.writer.finish().map(|_| ())
    })?;
    output::written(path);
    Ok(())
}

struct Drawing<W: Write> {
    writer: Writer<W>,
    shown: BTreeMap<u64, Shown>,
}

impl<W: Write> Drawing<W> {
    fn add(&mut self, event: &Event) -> io::Result<()> {
        let now = event.at_ns;
        match &event.what {
            What::Began { .. } => Ok(()),
            What::Came { script, name, .. } => {
                let (process, tracks) = self.writer.process(name, ["token", "iterations"])?;
                let shown = Shown {
                    name: name.clone(),
                    tracks,
                    process,
                    holds: Bytes::ZERO,
                    needs: (Bytes::ZERO, Bytes::ZERO),
                    lane: None,
                    token: None,
                    since: now,
                };
                self.shown.insert(*script, shown);
                Ok(())
            }
            What::Needs { script, persistent_bytes, ephemeral_bytes } => {
                if let Some(shown) = self.shown.get_mut(script) {
                    shown.needs = (*persistent_bytes, *ephemeral_bytes);
                }
                Ok(())
            }
            What::Admitted { script, lane } => {
                if self.shown.get(script).is_some_and(|s| s.token.is_some() && s.lane.is_none()) {
                    self.turns(*script, now, true)?;
                }
                if let Some(shown) = self.shown.get_mut(script) {
                    shown.lane = Some(*lane);
                }
                Ok(())
            }
            What::Token { script } => self.turns(*script, now, true),
            What::Passed { script, .. } => self.turns(*script, now, false),
            What::Iteration { script, took_ns, holds_bytes } => {
                if let Some(shown) = self.shown.get(script) {
                    let start = now.saturating_sub(*took_ns);
                    let span = Span { name: "iteration", start, duration: *took_ns, args: &[] };
                    self.writer.span(shown.tracks[1], &span)?;
                }
                self.holds(*script, *holds_bytes, now)
            }
            What::GaveBack { script, holds_bytes } => self.holds(*script, *holds_bytes, now),
            What::Left { script } => self.left(*script, now),
        }
    }

    /// A script gets the token or passes it on: what it did until now ends.
    fn turns(&mut self, script: u64, now: Nanos, runs: bool) -> io::Result<()> {
        let Some(shown) = self.shown.get_mut(&script) else { return Ok(()) };
        let name = match (shown.token, shown.lane) {
            (Some(_), Some(lane)) => format!("lane {lane}"),
            (Some(_), None) => "measured alone".to_owned(),
            (None, _) => "waits".to_owned(),
        };
        let args = [
            ("persistent_bytes", Value::Number(shown.needs.0.0)),
            ("ephemeral_bytes", Value::Number(shown.needs.1.0)),
        ];
        let (start, duration) = (shown.since, now.saturating_sub(shown.since));
        if duration > Nanos::ZERO {
            let span = Span { name: &name, start, duration, args: &args };
            self.writer.span(shown.tracks[0], &span)?;
        }
        (shown.since, shown.token) = (now, runs.then_some(now));
        Ok(())
    }

    fn holds(&mut self, script: u64, bytes: Bytes, now: Nanos) -> io::Result<()> {
        let Some(shown) = self.shown.get_mut(&script) else { return Ok(()) };
        shown.holds = bytes;
        let (name, process) = (shown.name.clone(), shown.process);
        let values = [(name.as_str(), bytes.0)];
        self.writer.counter(process, "holds", now, &values)
    }

    fn left(&mut self, script: u64, now: Nanos) -> io::Result<()> {
        self.turns(script, now, false)?;
        self.holds(script, Bytes::ZERO, now)?;
        self.shown.remove(&script);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_lanes_and_tokens_are_in_one_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.json");
        let event = |at, what| Event { at_ns: Nanos(at), what };
        let events = [
            event(0, What::began(Bytes(9), "fair")),
            event(1000, What::Came { script: 1, name: "a".to_owned(), work_ns: None }),
            event(2000, What::Token { script: 1 }),
            event(3000, What::Admitted { script: 1, lane: 4 }),
            event(5000, What::Passed { script: 1, why: None }),
            event(9000, What::Left { script: 1 }),
        ];
        timeline(&path, &events).expect("written");
        let form: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).expect("text")).expect("JSON");
        let spans = form["traceEvents"].as_array().expect("events");
        let names: Vec<_> = spans.iter().filter(|e| e["ph"] == "X").map(|e| &e["name"]).collect();
        assert_eq!(names, ["waits", "measured alone", "lane 4", "waits"]);
    }
}
