//! A device whose bytes several processes of a run share: which process has how many.
//!
//! A file in the run's folder holds a row for each process and device. Every change is made under
//! the file's lock, which the kernel takes from a process that dies. What a dead process had is
//! free again as soon as another one asks.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::config;
use crate::log;

/// The most rows; what more processes take is their own.
const ROWS: usize = 256;
/// A row: the process, the device, and its bytes there; 0 for no process.
const ROW: usize = 24;

/// The file, as one process has it open.
pub struct Together {
    file: Option<File>,
    process: u32,
}

/// The rows, while no other process changes them.
pub struct Rows<'a> {
    file: &'a File,
    process: u64,
    all: Vec<[u64; 3]>,
}

impl Together {
    pub fn new() -> Self {
        let process = std::process::id();
        let open = |folder: &std::path::PathBuf| {
            let path = folder.join("devices");
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).ok()
        };
        Self { file: config().folder.as_ref().and_then(open), process }
    }

    /// Whether this is a copy in a process that was forked: it has the parent's lock, and nothing
    /// on the device.
    pub fn is_copy(&self) -> bool {
        self.process != std::process::id()
    }

    /// Locks the rows; none outside `neap dry`.
    pub fn rows(&self) -> Option<Rows<'_>> {
        let file = self.file.as_ref()?;
        file.lock().ok()?;
        let mut bytes = [0; ROWS * ROW];
        let mut read = 0;
        while let Ok(more) = file.read_at(&mut bytes[read..], read as u64)
            && more > 0
        {
            read += more;
        }
        let word = |row: &[u8], at: usize| {
            u64::from_le_bytes(row[8 * at..][..8].try_into().unwrap_or_default())
        };
        let all = bytes[..read].chunks_exact(ROW).map(|r| [word(r, 0), word(r, 1), word(r, 2)]);
        Some(Rows { file, process: u64::from(self.process), all: all.collect() })
    }
}

impl Rows<'_> {
    /// What the other processes have on a device. Those that have died have nothing any more.
    pub fn others(&mut self, device: i32) -> u64 {
        let mut sum = 0;
        for at in 0..self.all.len() {
            let [process, on, bytes] = self.all[at];
            if process == 0 || process == self.process || on != device as u64 || bytes == 0 {
                continue;
            }
            if is_alive(process) {
                sum += bytes;
            } else {
                log::line(format_args!("gone {process} {on} {bytes} {}", now()));
                self.write(at, [0; 3]);
            }
        }
        sum
    }

    /// What this process has on a device from now on.
    pub fn put(&mut self, device: i32, bytes: u64) {
        let mine = |row: &[u64; 3]| row[0] == self.process && row[1] == device as u64;
        let free = || self.all.iter().position(|row| row[0] == 0).or(Some(self.all.len()));
        let at = self.all.iter().position(mine).or_else(free).filter(|at| *at < ROWS);
        if let Some(at) = at {
            self.write(at, [self.process, device as u64, bytes]);
        }
    }

    fn write(&mut self, at: usize, row: [u64; 3]) {
        let mut bytes = [0; ROW];
        for (to, word) in bytes.chunks_exact_mut(8).zip(row) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        if self.file.write_all_at(&bytes, (at * ROW) as u64).is_ok() {
            if at == self.all.len() {
                self.all.push(row);
            }
            self.all[at] = row;
        }
    }
}

impl Drop for Rows<'_> {
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

/// Nanoseconds, the same for all processes.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Whether a process has not ended; one that only waits to be asked for its exit code has.
fn is_alive(process: u64) -> bool {
    let Ok(about) = std::fs::read_to_string(format!("/proc/{process}/stat")) else { return false };
    let state = about.rsplit(')').next().unwrap_or_default().trim_start();
    !state.starts_with(['Z', 'X'])
}

/// What a process is called: the script that its command line names, or its program.
pub fn name() -> String {
    let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let words: Vec<String> =
        line.split(|b| *b == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
    let script = words.iter().find(|word| word.ends_with(".py")).or(words.first());
    let name = script.and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    name.replace(|c: char| c.is_whitespace() || c.is_control(), "_")
}
