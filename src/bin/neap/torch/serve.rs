//! The socket on which scripts that share a GPU join.
//!
//! A script sends one JSON object a line: first `{"join": NAME, "graph": FILE}` or `{"join": NAME,
//! "fixed_bytes": B}`, then `{"took_bytes": B}` each time when it keeps to an offer. It is sent
//! [`Offer`]s, one a line. A script has gone when its connection ends, however that came about.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, bail};
use neap::device::Profile;
use neap::units::Bytes;
use serde::Deserialize;

use super::shares::{Need, Offer, Offers, Shares};
use crate::output::note;

/// The longest line that is read.
const LINE: u64 = 64 << 10;
/// How long a script may take to read an offer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a script says.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Said {
    Graph { join: String, graph: PathBuf },
    Fixed { join: String, fixed_bytes: u64 },
    Took { took_bytes: u64 },
}

enum Event {
    Came(u64, UnixStream),
    Said(u64, Said),
    Left(u64),
}

/// A socket on which scripts join, until it is dropped.
pub struct Server {
    path: PathBuf,
    scripts: Arc<AtomicUsize>,
}

impl Server {
    /// Listens on a new socket, which only this user may use.
    ///
    /// # Errors
    /// When there is something at the path already, or no socket can be made there.
    pub fn start(path: &Path, budget: Bytes, device: Profile) -> anyhow::Result<Self> {
        let listener = bind(path)?;
        let scripts = Arc::new(AtomicUsize::new(0));
        let (sender, receiver) = mpsc::channel();
        let count = Arc::clone(&scripts);
        thread::spawn(move || divide(Shares::new(budget, device), &receiver, &count));
        thread::spawn(move || accept(&listener, &sender));
        Ok(Self { path: path.to_owned(), scripts })
    }

    /// How many scripts have joined.
    pub fn scripts(&self) -> usize {
        self.scripts.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    let name = path.display();
    let kind = fs::symlink_metadata(path).map(|found| found.file_type());
    if kind.is_ok_and(|kind| !kind.is_socket()) {
        bail!("--serve: {name} exists and is not a socket of neap's; name another path");
    }
    match UnixStream::connect(path) {
        Ok(_) => bail!("--serve: a neap listens on {name} already; --join {name} joins it"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => bail!(
            "--serve: {name} is a socket on which no process listens any more; remove it, or name \
             another"
        ),
        // Nothing is there, or what is there can't be used, which linking finds.
        Err(_) => {}
    }
    let folder = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => bail!("--serve: {name} is not a path for a socket"),
    };
    // Others must not connect before the permissions are set: it is made in a folder of this
    // user's, and then gets its name.
    let made = tempfile::Builder::new()
        .prefix(".neap-")
        .tempdir_in(folder)
        .with_context(|| format!("--serve: {} cannot be written to", folder.display()))?;
    let first = made.path().join("s");
    let listener = UnixListener::bind(&first)
        .with_context(|| format!("--serve: no socket can be made at {name}; use a shorter path"))?;
    fs::set_permissions(&first, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::hard_link(&first, path))
        .with_context(|| format!("--serve: no socket can be made at {name}"))?;
    Ok(listener)
}

/// Whether a server listens on a path.
///
/// # Errors
/// When none does; the error names the remedy.
pub fn reachable(path: &Path) -> anyhow::Result<()> {
    let name = path.display();
    match UnixStream::connect(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => bail!(
            "--join: no process listens on {name} any more; remove it and start `neap torch \
             --serve {name} --budget BYTES`"
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
            "--join: there is no {name}; start `neap torch --serve {name} --budget BYTES` first"
        ),
        Err(error) => Err(error).with_context(|| format!("--join: {name} can't be joined")),
    }
}

fn accept(listener: &UnixListener, events: &Sender<Event>) {
    for (id, stream) in (0u64..).zip(listener.incoming().flatten()) {
        let Ok(writer) = stream.try_clone() else { continue };
        let _ = writer.set_write_timeout(Some(PATIENCE));
        if events.send(Event::Came(id, writer)).is_err() {
            return;
        }
        let events = events.clone();
        thread::spawn(move || {
            listen(id, stream, &events);
            let _ = events.send(Event::Left(id));
        });
    }
}

/// Reads what a script says until it goes.
fn listen(id: u64, stream: UnixStream, events: &Sender<Event>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match reader.by_ref().take(LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        match serde_json::from_slice(&line) {
            Ok(said) if line.ends_with(b"\n") => {
                if events.send(Event::Said(id, said)).is_err() {
                    return;
                }
            }
            _ => {
                note("neap: a process that joined is no script of this neap's; it is left out");
                return;
            }
        }
    }
}

/// Divides the budget among the scripts whenever one comes or goes.
fn divide(mut shares: Shares, events: &Receiver<Event>, scripts: &AtomicUsize) {
    let mut streams: BTreeMap<u64, UnixStream> = BTreeMap::new();
    while let Ok(event) = events.recv() {
        let mut offers = match event {
            Event::Came(id, stream) => {
                streams.insert(id, stream);
                Vec::new()
            }
            Event::Said(id, Said::Took { took_bytes }) => shares.took(id, Bytes(took_bytes)),
            Event::Said(id, said) => join(&mut shares, id, said, &mut streams),
            Event::Left(id) => gone(&mut shares, id, &mut streams),
        };
        while let Some((id, offer)) = offers.pop() {
            if !tell(streams.get_mut(&id), &offer) {
                // It has gone, which changes the others' shares.
                offers.extend(gone(&mut shares, id, &mut streams));
            }
        }
        scripts.store(shares.count(), Ordering::SeqCst);
    }
}

fn join(
    shares: &mut Shares,
    id: u64,
    said: Said,
    streams: &mut BTreeMap<u64, UnixStream>,
) -> Offers {
    let (name, need) = match said {
        Said::Fixed { join, fixed_bytes } => (join, Need::Fixed(Bytes(fixed_bytes))),
        Said::Graph { join, graph } => match neap::job::json::read(&graph) {
            Ok(graph) => (join, Need::of(graph, shares.device())),
            Err(error) => {
                note(&format!("neap: {join} can't join: {error}"));
                return gone(shares, id, streams);
            }
        },
        Said::Took { .. } => return Vec::new(),
    };
    shares.join(id, name, need)
}

fn gone(shares: &mut Shares, id: u64, streams: &mut BTreeMap<u64, UnixStream>) -> Offers {
    if let Some(stream) = streams.remove(&id) {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
    shares.left(id)
}

fn tell(stream: Option<&mut UnixStream>, offer: &Offer) -> bool {
    let (Some(stream), Ok(mut line)) = (stream, serde_json::to_vec(offer)) else { return false };
    line.push(b'\n');
    stream.write_all(&line).is_ok()
}
