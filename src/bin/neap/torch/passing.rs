//! The server's side of lanes: passes what scripts say to [`Tokens`], tells them what follows, and
//! writes what happened.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use neap::report::plain;
use neap::sim::share::events::Event as Happened;
use neap::sim::share::policy::Policy;
use neap::sim::share::tokens::{Next, Tokens};
use neap::units::{Bytes, Nanos};

use super::serve::{Event, Record, Refusal, send};
use crate::output::note;

/// How often is looked whether a token was held for too long.
const LOOK: Duration = Duration::from_millis(200);
/// How much is kept for a timeline.
const MOST: usize = 2_000_000;

/// How scripts take turns, as the user asked for.
pub struct Asked {
    pub policy: &'static Policy,
    /// How long a token may be held.
    pub limit: Option<Nanos>,
    /// Where the log goes.
    pub log: Option<PathBuf>,
}

/// What happened so far, for a timeline.
pub type Story = Arc<Mutex<Vec<Happened>>>;

/// Takes turns among the scripts of a socket.
pub struct Passing {
    tokens: Tokens,
    streams: BTreeMap<u64, Arc<UnixStream>>,
    record: Arc<Record>,
    story: Story,
    log: Option<Log>,
}

/// The file of what happened.
struct Log {
    file: BufWriter<File>,
    path: PathBuf,
}

impl Passing {
    /// No script yet.
    ///
    /// # Errors
    /// When the log can't be written.
    pub fn new(budget: Bytes, asked: &Asked, record: Arc<Record>) -> anyhow::Result<Self> {
        let open = |path: &Path| {
            let file = File::create(path)
                .with_context(|| format!("--log: {} can't be written", path.display()))?;
            anyhow::Ok(Log { file: BufWriter::new(file), path: path.to_owned() })
        };
        let log = asked.log.as_deref().map(open).transpose()?;
        let tokens = Tokens::new(budget, asked.policy, asked.limit);
        Ok(Self { tokens, streams: BTreeMap::new(), record, story: Story::default(), log })
    }

    /// What happens from now on, too.
    pub fn story(&self) -> Story {
        Arc::clone(&self.story)
    }

    /// Reacts to events until there is no server any more.
    pub fn go_on(&mut self, events: &Receiver<Event>, scripts: &AtomicUsize) {
        loop {
            match events.recv_timeout(LOOK) {
                Ok(event) => self.react(event),
                Err(RecvTimeoutError::Timeout) => self.tokens.passed(self.record.now()),
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.follow();
            let holding = self.tokens.holding();
            self.record.with(|history, now| history.note(now, holding));
            scripts.store(self.tokens.count(), Ordering::SeqCst);
        }
    }

    fn react(&mut self, event: Event) {
        let now = self.record.now();
        match event {
            Event::Came(id, stream) => drop(self.streams.insert(id, stream)),
            Event::Lane(id, name, asked) => {
                if let Err(why) = self.tokens.came(id, &plain(&name), asked, now) {
                    self.refuse(id, why);
                }
            }
            Event::Measured(id, found) => {
                let result = self.tokens.measured(id, found, now);
                self.unless(id, result);
            }
            Event::Ended(id, ended) => {
                let result = self.tokens.ended(id, ended, now);
                self.unless(id, result);
            }
            Event::GaveBack(id, holds) => self.tokens.gave_back(id, holds, now),
            Event::Left(id) => self.gone(id),
            Event::Joins(id, ..) => {
                self.refuse(id, "this server has lanes; join with the same neap".to_owned());
            }
            Event::Took(..) | Event::Planned(..) => {}
        }
    }

    fn unless(&mut self, id: u64, result: Result<(), String>) {
        if let Err(why) = result {
            self.refuse(id, why);
        }
    }

    fn refuse(&mut self, id: u64, why: String) {
        note(&format!("neap: a script is refused: {why}"));
        if let Some(stream) = self.streams.get(&id) {
            send(stream, &Refusal { refused: why });
        }
        self.gone(id);
    }

    fn gone(&mut self, id: u64) {
        if let Some(stream) = self.streams.remove(&id) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        self.tokens.left(id, self.record.now());
    }

    /// Does what follows, and what follows from that.
    fn follow(&mut self) {
        loop {
            let Next { say, log, notes } = self.tokens.take();
            self.write(&log);
            notes.iter().for_each(|line| note(line));
            if say.is_empty() {
                return;
            }
            for (id, what) in say {
                if !self.streams.get(&id).is_some_and(|stream| send(stream, &what)) {
                    self.gone(id);
                }
            }
        }
    }

    fn write(&mut self, events: &[Happened]) {
        if events.is_empty() {
            return;
        }
        let mut story = self.story.lock().unwrap_or_else(PoisonError::into_inner);
        let room = MOST.saturating_sub(story.len());
        story.extend(events.iter().take(room).cloned());
        drop(story);
        let Some(log) = &mut self.log else { return };
        let line = |file: &mut BufWriter<File>, event: &Happened| {
            serde_json::to_writer(&mut *file, event)?;
            file.write_all(b"\n")
        };
        let mut written = events.iter().try_for_each(|event| line(&mut log.file, event));
        written = written.and_then(|()| log.file.flush());
        if let Err(error) = written {
            note(&format!("neap: --log: {}: {error}; nothing more is logged", log.path.display()));
            self.log = None;
        }
    }
}
