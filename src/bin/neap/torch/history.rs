//! What the scripts that share one GPU have held since the server began, as a view of a page: the
//! bytes that are promised, a row for each script, and how many wait. Its size is bounded however
//! long the server runs: of scripts that have gone the last are kept.

use std::collections::VecDeque;

use neap::report::page::{Cell, Chart, Course, Kind, Lane, Limit, Span, Table, Unit, View};
use neap::units::{Bytes, Nanos};

/// How many scripts are kept.
const MOST: usize = 1000;
/// How many changes of its share are kept of one script.
const CHANGES: usize = 1000;

/// A script that came.
struct Script {
    id: u64,
    name: String,
    /// From when on it has held which bytes; none while it waits.
    held: VecDeque<(Nanos, Bytes)>,
    came: Nanos,
    gone: Option<Nanos>,
}

/// What has been held by whom.
pub struct History {
    budget: Bytes,
    scripts: VecDeque<Script>,
    memory: Course,
    counts: Course,
    /// The bytes, and how many scripts wait and have a share, at the last change.
    last: Option<[u64; 3]>,
}

impl History {
    /// No script has come yet.
    pub fn new(budget: Bytes) -> Self {
        Self {
            budget,
            scripts: VecDeque::new(),
            memory: Course::new("promised", &["promised"], &[]),
            counts: Course::new("", &[], &["waiting", "with a share"]),
            last: None,
        }
    }

    /// Notes who is there at an instant, and which bytes each holds.
    pub fn note<'m>(&mut self, now: Nanos, there: impl Iterator<Item = (u64, &'m str, Bytes)>) {
        let there: Vec<_> = there.collect();
        for script in self.scripts.iter_mut().filter(|script| script.gone.is_none()) {
            if !there.iter().any(|&(id, ..)| id == script.id) {
                script.gone = Some(now);
            }
        }
        for &(id, name, bytes) in &there {
            let known = self.scripts.iter_mut().find(|one| one.id == id && one.gone.is_none());
            if let Some(script) = known {
                if script.held.back().is_none_or(|last| last.1 != bytes) {
                    if script.held.len() == CHANGES {
                        script.held.pop_front();
                    }
                    script.held.push_back((now, bytes));
                }
                continue;
            }
            if self.scripts.len() >= MOST
                && let Some(oldest) = self.scripts.iter().position(|one| one.gone.is_some())
            {
                self.scripts.remove(oldest);
            }
            let held = VecDeque::from([(now, bytes)]);
            self.scripts.push_back(Script {
                id,
                name: name.to_owned(),
                held,
                came: now,
                gone: None,
            });
        }
        let all = there.iter().fold(0u64, |sum, one| sum.saturating_add(one.2.0));
        let waiting = there.iter().filter(|one| one.2 == Bytes::ZERO).count() as u64;
        let values = [all, waiting, there.len() as u64 - waiting];
        if self.last != Some(values) {
            self.last = Some(values);
            self.memory.add(now.0, &values[..1]);
            self.counts.add(now.0, &values[1..]);
        }
    }

    /// What has been noted until now.
    pub fn view(&self, now: Nanos) -> View {
        let (mut memory, mut counts) = (self.memory.clone(), self.counts.clone());
        memory.end_at(now.0);
        counts.end_at(now.0);
        let memory = Chart {
            name: "Memory that scripts may reserve".to_owned(),
            course: memory,
            limits: vec![Limit { name: "budget".to_owned(), value: self.budget.0 }],
            lanes: self.scripts.iter().map(|script| script.lane(now)).collect(),
            ..Chart::default()
        };
        let counts = Chart {
            name: "Scripts".to_owned(),
            unit: Unit::Count,
            course: counts,
            ..Chart::default()
        };
        View {
            name: "scripts".to_owned(),
            about: "The bytes that are promised, a row for each script, and how many wait for a \
                    share; from the start of the server on."
                .to_owned(),
            charts: vec![memory, counts],
            tables: vec![Table {
                name: "Scripts that joined".to_owned(),
                columns: vec![
                    ("script", Kind::Text),
                    ("came", Kind::Nanos),
                    ("gone", Kind::Nanos),
                    ("waited", Kind::Nanos),
                    ("largest share", Kind::Bytes),
                ],
                rows: self.scripts.iter().map(|script| script.row(now)).collect(),
            }],
        }
    }
}

impl Script {
    fn spans(&self, now: Nanos) -> impl Iterator<Item = Span> {
        let end = self.gone.unwrap_or(now);
        let ends = self.held.iter().skip(1).map(|held| held.0).chain([end]);
        self.held.iter().zip(ends).map(|(&(from, bytes), until)| Span {
            name: self.name.clone(),
            kind: if bytes == Bytes::ZERO { "waiting" } else { "running" },
            from: from.0,
            until: until.0,
            bytes: (bytes > Bytes::ZERO).then_some(bytes),
        })
    }

    fn lane(&self, now: Nanos) -> Lane {
        Lane { name: self.name.clone(), spans: self.spans(now).collect() }
    }

    fn row(&self, now: Nanos) -> Vec<Cell> {
        let waits = self.spans(now).filter(|span| span.kind == "waiting");
        let waited: u64 = waits.map(|span| span.until.saturating_sub(span.from)).sum();
        let most = self.held.iter().map(|held| held.1).max().unwrap_or_default();
        vec![
            self.name.as_str().into(),
            self.came.into(),
            self.gone.into(),
            waited.into(),
            most.into(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn who_held_what_is_shown_from_coming_to_going() {
        let mut history = History::new(Bytes(100));
        history.note(at(1), [(7, "<b>a", Bytes(100))].into_iter());
        history.note(at(2), [(7, "<b>a", Bytes(100)), (8, "b", Bytes(0))].into_iter());
        history.note(at(3), [(7, "<b>a", Bytes(60)), (8, "b", Bytes(40))].into_iter());
        history.note(at(5), [(8, "b", Bytes(40))].into_iter());
        let view = serde_json::to_value(history.view(at(6))).unwrap();
        let memory = &view["charts"][0];
        assert_eq!(memory["peaks"], json!([{ "name": "promised", "at": at(1), "value": 100 }]));
        assert_eq!((&memory["end"], &memory["limits"][0]["value"]), (&json!(at(6)), &json!(100)));
        let rows = json!([["<b>a", at(1), at(5), 0, 100], ["b", at(2), null, at(1), 40]]);
        assert_eq!(view["tables"][0]["rows"], rows);
        let spans = &memory["lanes"][1]["spans"];
        let first = json!({ "name": "b", "kind": "waiting", "from": at(2), "until": at(3) });
        assert_eq!(spans[0], first);
        assert_eq!(spans[1]["kind"], "running");
        assert_eq!(
            view["charts"][1]["peaks"][0],
            json!({ "name": "waiting", "at": at(2), "value": 1 })
        );
    }

    #[test]
    fn a_server_that_runs_for_long_keeps_the_last() {
        let mut history = History::new(Bytes(100));
        for id in 0..3 * MOST as u64 {
            history.note(at(id), [(id, "a", Bytes(1))].into_iter());
        }
        for change in 0..3 * CHANGES as u64 {
            history.note(at(9000 + change), [(9000, "b", Bytes(change % 7))].into_iter());
        }
        assert_eq!((history.scripts.len(), history.scripts[MOST - 1].held.len()), (MOST, CHANGES));
    }
}
