//! The socket on which scripts that share a GPU join.
//!
//! A script sends one JSON object a line: first `{"join": NAME, "graph": FILE}`, perhaps with
//! `"limits": [S, L]` ([`Limits`]), or `{"join": NAME, "fixed_bytes": B}`, then `{"took_bytes": B}`
//! each time when it keeps to an offer. It is sent [`Offer`]s, one a line, or `{"refused": WHY}`
//! before its connection ends. A script has gone when its connection ends, however that came about.
//!
//! Where the server has lanes in place of shares ([`tokens`]) a script says `{"join": NAME,
//! "lane": {…}}`, then what its iterations do, and the server says when it has the token.
//! `{"asks": "mode"}` is answered with which of the two it is.
//!
//! One thread divides. It waits for nothing but the next event: graphs are read and plans are made
//! beside it, each for a limited time, and what a script does not read in time ends its connection.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf, absolute};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::private;
use neap::report::page::View;
use neap::sim::share::tokens;
use neap::units::{Bytes, Nanos, saturated};
use serde::{Deserialize, Serialize};

use super::history::History;
use super::passing::{Asked, Passing, Story};
use super::shares::{Limits, Need, Next, Offers, Shares};
use crate::output::note;

/// The longest line that is read.
const LINE: u64 = 64 << 10;
/// The longest path that can be connected to, in bytes.
const LONGEST_PATH: usize = 107;
/// How long nothing is accepted after that failed.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the server waits for a script to make room for an offer by reading earlier ones.
/// Hundreds of them have room, so a script without has not read for long, and all others wait.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a process that has connected may take to say what it is.
const FIRST_LINE: Duration = Duration::from_secs(10);

/// How long a process may take to end once its connection has: its memory is free only then. One
/// that goes on without its connection is not waited for any longer. In milliseconds.
const ENDING_MS: i32 = 500;

/// How long a graph may take to read.
const READING: Duration = Duration::from_secs(60);
/// How long a plan of all scripts may take.
const PLANNING: Duration = Duration::from_secs(120);
/// How many readings and plans are under way at once, those included that took too long and go on.
/// Others wait for one of them to end.
const MOST: usize = 16;

/// What a script says. Other keys are of a later neap's, and are not looked at.
#[derive(Deserialize)]
#[serde(untagged)]
enum Said {
    Graph {
        join: String,
        graph: PathBuf,
        #[serde(default)]
        limits: Limits,
    },
    Fixed {
        join: String,
        fixed_bytes: u64,
    },
    Took {
        took_bytes: u64,
    },
    Lane {
        join: String,
        lane: tokens::Asked,
    },
    Measured {
        measured: tokens::Measured,
    },
    Ended {
        ended: tokens::Ended,
    },
    GaveBack {
        gave_back_bytes: u64,
    },
    Asks {
        asks: String,
    },
}

/// What scripts get.
pub enum Mode {
    /// A share each, planned by this device's times.
    Shares(Profile),
    /// A lane, and its token in turn.
    Lanes(Asked),
}

/// What is asked for by who asks for the mode.
const ASKS: &str = "mode";

/// The answer to that.
#[derive(Serialize, Deserialize)]
struct Answers {
    mode: String,
}

/// The two modes as the answer names them.
const LANES: &str = "lanes";
const SHARES: &str = "shares";

/// Why a script gets no share.
#[derive(Serialize)]
pub struct Refusal {
    pub refused: String,
}

/// What has happened at the socket, to the connection of this number.
pub enum Event {
    Came(u64, Arc<UnixStream>),
    Joins(u64, String, Result<Need, String>),
    Took(u64, Bytes),
    Left(u64),
    /// A plan of all for the change of this number.
    Planned(u64, Result<Vec<u64>, String>),
    Lane(u64, String, tokens::Asked),
    Measured(u64, tokens::Measured),
    Ended(u64, tokens::Ended),
    GaveBack(u64, Bytes),
}

/// A socket on which scripts join, until it is dropped.
pub struct Server {
    path: PathBuf,
    file: Option<(u64, u64)>,
    scripts: Arc<AtomicUsize>,
    history: Arc<Record>,
    budget: Bytes,
    /// What happened in lanes.
    story: Option<Story>,
}

/// What has happened since an instant.
pub struct Record {
    began: Instant,
    history: Mutex<History>,
}

impl Record {
    pub fn now(&self) -> Nanos {
        Nanos(saturated(self.began.elapsed().as_nanos()))
    }

    pub fn with<T>(&self, work: impl FnOnce(&mut History, Nanos) -> T) -> T {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut history, self.now())
    }
}

impl Server {
    /// Listens on a new socket, which only this user may use.
    ///
    /// # Errors
    /// When there is something at the path already, or no socket can be made there, or the log
    /// can't be written.
    pub fn start(path: &Path, budget: Bytes, mode: Mode) -> anyhow::Result<Self> {
        let listener = bind(path)?;
        let scripts = Arc::new(AtomicUsize::new(0));
        let history = Mutex::new(History::new(budget));
        let history = Arc::new(Record { began: Instant::now(), history });
        let (own, file) = (path.to_owned(), file(path));
        let mut server = Self { path: own, file, scripts, history, budget, story: None };
        // What can't be joined is no server: the error removes it.
        absolute(path)
            .and_then(UnixStream::connect)
            .with_context(|| format!("--serve: {} can't be joined", path.display()))?;
        let (sender, receiver) = mpsc::channel();
        let (count, events) = (Arc::clone(&server.scripts), sender.clone());
        let record = Arc::clone(&server.history);
        let device = match mode {
            Mode::Shares(device) => {
                let device = Arc::new(device);
                let shares = Shares::new(budget, Arc::clone(&device));
                thread::spawn(move || {
                    let streams = BTreeMap::new();
                    Division { shares, events, streams, record }.go_on(&receiver, &count)
                });
                Some(device)
            }
            Mode::Lanes(asked) => {
                let mut passing = Passing::new(budget, &asked, record)?;
                server.story = Some(passing.story());
                thread::spawn(move || passing.go_on(&receiver, &count));
                None
            }
        };
        thread::spawn(move || accept(&listener, &sender, device.as_ref()));
        Ok(server)
    }

    /// Whether scripts have lanes.
    pub const fn has_lanes(&self) -> bool {
        self.story.is_some()
    }

    /// What happened so far, where scripts have lanes.
    pub fn happened(&self) -> Vec<neap::sim::share::events::Event> {
        let story = self.story.iter();
        story.flat_map(|all| all.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect()
    }

    /// How many scripts have joined.
    pub fn scripts(&self) -> usize {
        self.scripts.load(Ordering::SeqCst)
    }

    /// What it divides.
    pub const fn budget(&self) -> Bytes {
        self.budget
    }

    /// Who has held what since it began.
    pub fn view(&self) -> View {
        self.history.with(|history, now| history.view(now))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Unless another server has taken its place meanwhile.
        if file(&self.path) == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// What tells a file from others at the same path.
fn file(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|about| (about.dev(), about.ino()))
}

fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    let name = path.display();
    let found = fs::symlink_metadata(path).ok();
    if found.as_ref().is_some_and(|found| !found.file_type().is_socket()) {
        bail!("--serve: {name} exists and is not a socket of neap's; name another path");
    }
    let folder = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => bail!("--serve: {name} is not a path for a socket"),
    };
    let length = absolute(path).map_or(usize::MAX, |whole| whole.as_os_str().len());
    if length > LONGEST_PATH {
        bail!("--serve: {name} is too long for a socket's path; use a shorter path");
    }
    let listens = || format!("--serve: a neap listens on {name} already; --join {name} joins it");
    // Others must not connect before the permissions are set: it is made in a folder of this
    // user's, and then gets its name.
    let made = private::temporary(".neap-", Some(folder))
        .with_context(|| format!("--serve: {} cannot be written to", folder.display()))?;
    if let Some(found) = found {
        let dead = |path: &Path| {
            let refused = UnixStream::connect(path).err().map(|error| error.kind());
            refused == Some(io::ErrorKind::ConnectionRefused)
        };
        if !dead(path) {
            bail!(listens());
        }
        if found.uid() != private::user() {
            bail!("--serve: {name} is a socket of another user's; name another path");
        }
        // A server of this user's ended without removing it. Out of the way it is looked at once
        // more, since another server may have taken its place meanwhile.
        let old = made.path().join("old");
        fs::rename(path, &old).with_context(|| format!("--serve: {name} can't be removed"))?;
        if !dead(&old) {
            let _ = fs::hard_link(&old, path);
            bail!(listens());
        }
    }
    let first = made.path().join("s");
    let listener = UnixListener::bind(&first)
        .with_context(|| format!("--serve: no socket can be made at {name}; use a shorter path"))?;
    fs::set_permissions(&first, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::hard_link(&first, path))
        .with_context(|| format!("--serve: no socket can be made at {name}"))?;
    Ok(listener)
}

/// Whether the server of this user's that listens on a path has lanes.
///
/// # Errors
/// When none listens; the error names the remedy.
pub fn has_lanes(path: &Path) -> anyhow::Result<bool> {
    let name = path.display();
    match UnixStream::connect(path) {
        Ok(stream) => match peer(&stream) {
            Some((_, user)) if user == private::user() => Ok(asked_mode(&stream) == LANES),
            _ => bail!("--join: a process of another user listens on {name}; name another socket"),
        },
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => bail!(
            "--join: no process listens on {name} any more; start `neap torch --serve {name} \
             --budget BYTES`"
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
            "--join: there is no {name}; start `neap torch --serve {name} --budget BYTES` first"
        ),
        Err(error) => Err(error).with_context(|| format!("--join: {name} can't be joined")),
    }
}

/// What a server says that its scripts get; nothing where it is none of this neap's.
fn asked_mode(mut stream: &UnixStream) -> String {
    let _ = stream.set_read_timeout(Some(FIRST_LINE));
    let mut line = Vec::new();
    let answer = stream.write_all(b"{\"asks\":\"mode\"}\n").and_then(|()| {
        let mut reader = BufReader::new(stream).take(LINE);
        reader.read_until(b'\n', &mut line)
    });
    let answer = answer.ok().and_then(|_| serde_json::from_slice::<Answers>(&line).ok());
    answer.map_or_else(String::new, |answer| answer.mode)
}

/// The process and the user at a socket's other end.
fn peer(stream: &UnixStream) -> Option<(i32, u32)> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `found`, which has as many.
    let done = unsafe {
        let at = (&raw mut found).cast();
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            at,
            &raw mut length,
        )
    };
    (done == 0).then_some((found.pid, found.uid))
}

/// Waits until the process at a socket's other end has ended, for some time at most.
fn until_ended(stream: &UnixStream) {
    let Some((process, _)) = peer(stream) else { return };
    // SAFETY: this makes a file descriptor, or gives -1.
    let found = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let Ok(found @ 0..) = i32::try_from(found) else { return };
    // SAFETY: it was made above, and nothing else closes it.
    let found = unsafe { OwnedFd::from_raw_fd(found) };
    let mut ends = libc::pollfd { fd: found.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `ends` is one entry, which outlives the call.
    unsafe { libc::poll(&raw mut ends, 1, ENDING_MS) };
}

fn accept(listener: &UnixListener, events: &Sender<Event>, device: Option<&Arc<Profile>>) {
    let mut id = 0;
    loop {
        // Without room for another file it is tried again: a script that has gone makes room.
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        id += 1;
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let stream = Arc::new(stream);
        if events.send(Event::Came(id, Arc::clone(&stream))).is_err() {
            return;
        }
        let (own, device) = (events.clone(), device.cloned());
        let listening = thread::Builder::new().spawn(move || {
            listen(id, &stream, &own, device.as_ref());
            until_ended(&stream);
            let _ = own.send(Event::Left(id));
        });
        if listening.is_err() {
            let _ = events.send(Event::Left(id));
        }
    }
}

/// Reads what a script says until it goes.
fn listen(id: u64, stream: &UnixStream, events: &Sender<Event>, device: Option<&Arc<Profile>>) {
    let _ = stream.set_read_timeout(Some(FIRST_LINE));
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match reader.by_ref().take(LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let said = serde_json::from_slice(&line).ok().filter(|_| line.ends_with(b"\n"));
        let event = match said {
            Some(Said::Took { took_bytes }) => Event::Took(id, Bytes(took_bytes)),
            Some(Said::Fixed { join, fixed_bytes }) => {
                Event::Joins(id, join, Ok(Need::Fixed(Bytes(fixed_bytes))))
            }
            Some(Said::Graph { join, graph, limits }) => {
                let none = || Err("this server has lanes".to_owned());
                Event::Joins(
                    id,
                    join,
                    device.map_or_else(none, |device| read(graph, device, limits)),
                )
            }
            Some(Said::Lane { join, lane }) => Event::Lane(id, join, lane),
            Some(Said::Measured { measured }) => Event::Measured(id, measured),
            Some(Said::Ended { ended }) => Event::Ended(id, ended),
            Some(Said::GaveBack { gave_back_bytes }) => Event::GaveBack(id, Bytes(gave_back_bytes)),
            Some(Said::Asks { asks }) => {
                if asks != ASKS {
                    return;
                }
                let mode = if device.is_some() { SHARES } else { LANES }.to_owned();
                send(stream, &Answers { mode });
                return;
            }
            None => {
                note("neap: a process that joined is no script of this neap's; it is left out");
                return;
            }
        };
        if matches!(event, Event::Joins(..) | Event::Lane(..)) {
            let _ = reader.get_ref().set_read_timeout(None);
        }
        if events.send(event).is_err() {
            return;
        }
    }
}

/// What a script with this graph needs.
fn read(path: PathBuf, device: &Arc<Profile>, limits: Limits) -> Result<Need, String> {
    let device = Arc::clone(device);
    let late = format!("{}: it takes longer than {READING:?} to read", path.display());
    let began = Instant::now();
    within(READING, move || {
        loop {
            match neap::job::json::read_regular(&path) {
                Ok(graph) => return Ok(Need::new(graph, &device, limits)),
                Err(error) if error.wants_room() && began.elapsed() < READING => {
                    thread::sleep(PAUSE);
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    })
    .unwrap_or(Err(late))
}

/// What `work` gives, if it takes no longer than `limit`; else it goes on, and is not waited for.
fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
    /// One that is under way; also where it panics.
    struct One;
    impl Drop for One {
        fn drop(&mut self) {
            UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let latest = Instant::now() + limit;
    let free = |many| (many < MOST).then_some(many + 1);
    while UNDER_WAY.fetch_update(Ordering::SeqCst, Ordering::SeqCst, free).is_err() {
        if Instant::now() >= latest {
            return None;
        }
        thread::sleep(PAUSE / 10);
    }
    let one = One;
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new()
        .spawn(move || {
            let _one = one;
            let _ = sender.send(work());
        })
        .ok()?;
    receiver.recv_timeout(latest.saturating_duration_since(Instant::now())).ok()
}

/// Divides the budget among the scripts whenever one comes or goes.
struct Division {
    shares: Shares,
    streams: BTreeMap<u64, Arc<UnixStream>>,
    events: Sender<Event>,
    record: Arc<Record>,
}

impl Division {
    fn go_on(&mut self, events: &Receiver<Event>, scripts: &AtomicUsize) {
        while let Ok(event) = events.recv() {
            match event {
                Event::Came(id, stream) => drop(self.streams.insert(id, stream)),
                Event::Joins(id, name, need) => {
                    match need.and_then(|need| self.shares.join(id, &name, need)) {
                        Ok(next) => self.follow(next),
                        Err(why) => self.refuse(id, &name, why),
                    }
                }
                Event::Took(id, bytes) => {
                    let offers = self.shares.took(id, bytes);
                    self.tell(offers);
                }
                Event::Left(id) => self.gone(id),
                Event::Planned(change, arenas) => {
                    let offers = self.shares.planned(change, arenas);
                    self.tell(offers);
                }
                Event::Lane(id, name, _) => {
                    self.refuse(id, &name, "this server gives shares, and no lanes".to_owned());
                }
                Event::Measured(..) | Event::Ended(..) | Event::GaveBack(..) => {}
            }
            self.record.with(|history, now| history.note(now, self.shares.holding()));
            scripts.store(self.shares.count(), Ordering::SeqCst);
        }
    }

    fn follow(&mut self, next: Next) {
        self.tell(next.offers);
        let Some(planning) = next.plan else { return };
        let (events, change) = (self.events.clone(), planning.change);
        let waiting = thread::Builder::new().spawn(move || {
            let late = || Err(format!("a plan of all takes longer than {PLANNING:?}"));
            let made = within(PLANNING, move || planning.make()).unwrap_or_else(late);
            let _ = events.send(Event::Planned(change, made));
        });
        if waiting.is_err() {
            let offers = self.shares.planned(change, Err("no thread is left".to_owned()));
            self.tell(offers);
        }
    }

    fn refuse(&mut self, id: u64, name: &str, why: String) {
        note(&format!("neap: {name} can't join: {why}"));
        if let Some(stream) = self.streams.get(&id) {
            send(stream, &Refusal { refused: why });
        }
        self.gone(id);
    }

    fn gone(&mut self, id: u64) {
        if let Some(stream) = self.streams.remove(&id) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        let next = self.shares.left(id);
        self.follow(next);
    }

    fn tell(&mut self, offers: Offers) {
        for (id, offer) in offers {
            if !self.streams.get(&id).is_some_and(|stream| send(stream, &offer)) {
                // It has gone, which changes the others' shares.
                self.gone(id);
            }
        }
    }
}

pub fn send(mut stream: &UnixStream, what: &impl Serialize) -> bool {
    let Ok(mut line) = serde_json::to_vec(what) else { return false };
    line.push(b'\n');
    stream.write_all(&line).is_ok()
}
