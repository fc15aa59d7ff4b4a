//! NCCL: collectives whose small operands are really exchanged, through files in the run's folder.
//!
//! A rank writes what it gives to a file that appears by renaming, and waits for the others' files.
//! Operands above [`BACKED`] bytes are address space only, and so nothing is exchanged for them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::config::config;
use crate::device::current;
use crate::launch::tick;
use crate::memory::BACKED;
use crate::reduce::{self, Kind};
use crate::state::with;
use crate::sys::{self, SUCCESS, Status, put};

/// `ncclInvalidArgument`
const INVALID: Status = 4;
/// `ncclRemoteError`
const REMOTE: Status = 6;
/// How long a rank waits for another. Real ranks meet within seconds; one that is gone never comes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A communicator of this process.
pub struct Communicator {
    name: String,
    rank: usize,
    ranks: usize,
    device: c_int,
    /// Collectives so far, and splits.
    calls: u64,
    splits: u64,
    sent: HashMap<usize, u64>,
    received: HashMap<usize, u64>,
}

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

type Handle = *mut Communicator;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(out: *mut UniqueId) -> Status {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("nccl-{}-{count}", std::process::id());
    let mut id = UniqueId([0; 128]);
    id.0[..name.len()].copy_from_slice(name.as_bytes());
    unsafe { put(out, id) };
    SUCCESS
}

unsafe fn create(out: *mut Handle, name: String, ranks: usize, rank: usize) -> Status {
    let made = Communicator {
        name,
        rank,
        ranks,
        device: current(),
        calls: 0,
        splits: 0,
        sent: HashMap::new(),
        received: HashMap::new(),
    };
    unsafe { put(out, Box::into_raw(Box::new(made))) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    out: *mut Handle,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> Status {
    let end = id.0.iter().position(|b| *b == 0).unwrap_or(id.0.len());
    let name = String::from_utf8_lossy(&id.0[..end]).into_owned();
    if !name.starts_with("nccl-") || name.contains('/') {
        return INVALID;
    }
    unsafe { create(out, name, ranks as usize, rank as usize) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut Handle,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    _config: *mut c_void,
) -> Status {
    unsafe { ncclCommInitRank(out, ranks, id, rank) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    out: *mut Handle,
    ranks: c_int,
    rank: c_int,
    _count: c_int,
    ids: *const UniqueId,
    _config: *mut c_void,
) -> Status {
    // SAFETY: the caller gives at least one.
    unsafe { ncclCommInitRank(out, ranks, *ids, rank) }
}

/// One process, several devices: each is alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(
    out: *mut Handle,
    count: c_int,
    _devices: *const c_int,
) -> Status {
    for i in 0..count as usize {
        // SAFETY: the caller gives room for `count` handles.
        unsafe { create(out.add(i), format!("nccl-{}-all", std::process::id()), 1, 0) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    communicator: Handle,
    color: c_int,
    key: c_int,
    out: *mut Handle,
    _config: *mut c_void,
) -> Status {
    // SAFETY: the caller gives a communicator of ours.
    let parent = unsafe { &mut *communicator };
    let mut mine = color.to_le_bytes().to_vec();
    mine.extend(key.to_le_bytes());
    let Some(all) = parent.exchange(&mine) else { return REMOTE };
    parent.splits += 1;
    let int = |b: &[u8]| b.try_into().map(c_int::from_le_bytes).unwrap_or(0);
    let mut members: Vec<(c_int, usize)> = all
        .iter()
        .enumerate()
        .filter(|(_, b)| b.len() == 8 && int(&b[..4]) == color)
        .map(|(rank, b)| (int(&b[4..]), rank))
        .collect();
    members.sort_unstable();
    if color < 0 {
        unsafe { put(out, std::ptr::null_mut()) };
        return SUCCESS;
    }
    let rank = members.iter().position(|(_, r)| *r == parent.rank).unwrap_or(0);
    let name = format!("{}.{}.{color}", parent.name, parent.splits);
    unsafe { create(out, name, members.len(), rank) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(communicator: Handle) -> Status {
    if !communicator.is_null() {
        // SAFETY: made by `create`, destroyed once.
        drop(unsafe { Box::from_raw(communicator) });
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(communicator: Handle) -> Status {
    unsafe { ncclCommDestroy(communicator) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(communicator: Handle, out: *mut c_int) -> Status {
    unsafe { put(out, (*communicator).ranks as c_int) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(communicator: Handle, out: *mut c_int) -> Status {
    unsafe { put(out, (*communicator).rank as c_int) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(communicator: Handle, out: *mut c_int) -> Status {
    unsafe { put(out, (*communicator).device) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(_: Handle, out: *mut Status) -> Status {
    unsafe { put(out, SUCCESS) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    _communicator: Handle,
    _at: *mut c_void,
    _bytes: usize,
    out: *mut *mut c_void,
) -> Status {
    unsafe { put(out, crate::library::dummy()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(out: *mut c_int) -> Status {
    if let Some(found) = sys::real(c"libnccl.so.2", c"ncclGetVersion") {
        // SAFETY: NCCL's own function of this type, which needs no device.
        let real: extern "C" fn(*mut c_int) -> Status = unsafe { std::mem::transmute(found) };
        return real(out);
    }
    unsafe { put(out, 22707) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(status: Status) -> *const c_char {
    match status {
        SUCCESS => c"no error".as_ptr(),
        REMOTE => c"another rank of this run under neap's dry device did not come".as_ptr(),
        _ => c"refused by neap's dry device".as_ptr(),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: Handle) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(out: *mut *mut c_void, bytes: usize) -> Status {
    unsafe { crate::transfer::cudaMalloc(out, bytes) }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(at: *mut c_void) -> Status {
    crate::transfer::cudaFree(at)
}

impl Communicator {
    fn path(&self, what: std::fmt::Arguments<'_>) -> Option<PathBuf> {
        Some(config().folder.as_ref()?.join(format!("{}-{what}", self.name)))
    }

    /// Gives `mine` to all ranks and takes theirs; none where one does not come.
    fn exchange(&mut self, mine: &[u8]) -> Option<Vec<Vec<u8>>> {
        let call = self.calls;
        self.calls += 1;
        if self.ranks == 1 {
            return Some(vec![mine.to_vec()]);
        }
        write(&self.path(format_args!("{call}-{}", self.rank))?, mine)?;
        let mut all = Vec::new();
        for rank in 0..self.ranks {
            all.push(read(&self.path(format_args!("{call}-{rank}"))?)?);
        }
        // A rank that has come to this call has read all of the call before.
        if let Some(before) = call.checked_sub(1) {
            let _ = fs::remove_file(self.path(format_args!("{before}-{}", self.rank))?);
        }
        Some(all)
    }

    fn send(&mut self, peer: usize, bytes: &[u8]) -> Option<()> {
        let count = self.sent.entry(peer).or_default();
        *count += 1;
        let count = *count;
        write(&self.path(format_args!("from-{}-to-{peer}-{count}", self.rank))?, bytes)
    }

    fn receive(&mut self, peer: usize) -> Option<Vec<u8>> {
        let count = self.received.entry(peer).or_default();
        *count += 1;
        let count = *count;
        let path = self.path(format_args!("from-{peer}-to-{}-{count}", self.rank))?;
        let bytes = read(&path);
        let _ = fs::remove_file(path);
        bytes
    }
}

fn write(path: &PathBuf, bytes: &[u8]) -> Option<()> {
    let new = path.with_extension(format!("new{}", std::process::id()));
    fs::write(&new, bytes).ok()?;
    fs::rename(new, path).ok()
}

fn read(path: &PathBuf) -> Option<Vec<u8>> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(50);
    loop {
        if let Ok(bytes) = fs::read(path) {
            return Some(bytes);
        }
        if start.elapsed() > PATIENCE {
            crate::log::line(format_args!("note a rank did not come: {}", path.display()));
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// The bytes of a small operand. What kernels made is 0 and so stays.
fn operand(at: usize, bytes: usize) -> Vec<u8> {
    if bytes == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's buffer on the device, which is mapped.
    unsafe { std::slice::from_raw_parts(at as *const u8, bytes) }.to_vec()
}

/// Puts a result where the caller wants it; only what is not 0 counts as copied.
fn result(at: usize, bytes: &[u8]) {
    let (start, end) = (at as u64, (at + bytes.len()) as u64);
    with(|s| {
        s.memory.forget(start, end);
        if bytes.iter().any(|b| *b != 0) {
            // SAFETY: the caller's buffer on the device, which is mapped.
            unsafe { std::ptr::copy(bytes.as_ptr(), at as *mut u8, bytes.len()) };
            s.memory.note(start, end);
        }
    });
}

fn small(bytes: usize) -> bool {
    bytes as u64 <= BACKED
}

/// A collective: what each rank gives, and what becomes of all that.
fn collective(
    communicator: Handle,
    send: (usize, usize),
    receive: usize,
    combine: impl FnOnce(&Communicator, Vec<Vec<u8>>) -> Vec<u8>,
) -> Status {
    tick();
    // SAFETY: the caller gives a communicator of ours.
    let communicator = unsafe { &mut *communicator };
    if !small(send.1 * communicator.ranks) {
        return SUCCESS;
    }
    let Some(all) = communicator.exchange(&operand(send.0, send.1)) else { return REMOTE };
    if all.iter().any(|b| b.len() != send.1) {
        return INVALID;
    }
    let bytes = combine(communicator, all);
    result(receive, &bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    send: usize,
    receive: usize,
    count: usize,
    kind: c_int,
    operation: c_int,
    communicator: Handle,
    _stream: *mut c_void,
) -> Status {
    let kind = Kind::from_nccl(kind);
    collective(communicator, (send, count * kind.bytes()), receive, |_, all| {
        reduce::all(kind, operation, all)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    send: usize,
    receive: usize,
    count: usize,
    kind: c_int,
    operation: c_int,
    root: c_int,
    communicator: Handle,
    _stream: *mut c_void,
) -> Status {
    let kind = Kind::from_nccl(kind);
    // SAFETY: the caller gives a communicator of ours.
    let is_root = unsafe { (*communicator).rank } == root as usize;
    let to = if is_root { receive } else { send };
    collective(communicator, (send, count * kind.bytes()), to, |c, mut all| {
        if is_root { reduce::all(kind, operation, all) } else { all.swap_remove(c.rank) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    send: usize,
    receive: usize,
    count: usize,
    kind: c_int,
    root: c_int,
    communicator: Handle,
    _stream: *mut c_void,
) -> Status {
    let kind = Kind::from_nccl(kind);
    // SAFETY: the caller gives a communicator of ours.
    let is_root = unsafe { (*communicator).rank } == root as usize;
    let from = if is_root { send } else { receive };
    collective(communicator, (from, count * kind.bytes()), receive, |_, mut all| {
        all.swap_remove(root as usize)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBcast(
    at: usize,
    count: usize,
    kind: c_int,
    root: c_int,
    communicator: Handle,
    stream: *mut c_void,
) -> Status {
    ncclBroadcast(at, at, count, kind, root, communicator, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    send: usize,
    receive: usize,
    count: usize,
    kind: c_int,
    communicator: Handle,
    _stream: *mut c_void,
) -> Status {
    let kind = Kind::from_nccl(kind);
    collective(communicator, (send, count * kind.bytes()), receive, |_, all| all.concat())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    send: usize,
    receive: usize,
    count: usize,
    kind: c_int,
    operation: c_int,
    communicator: Handle,
    _stream: *mut c_void,
) -> Status {
    let kind = Kind::from_nccl(kind);
    // SAFETY: the caller gives a communicator of ours.
    let ranks = unsafe { (*communicator).ranks };
    let part = count * kind.bytes();
    collective(communicator, (send, part * ranks), receive, |c, all| {
        reduce::all(kind, operation, all)[c.rank * part..][..part].to_vec()
    })
}

/// A send or a receive that waits for the end of its group.
enum Waiting {
    Send(Handle, usize, usize, usize),
    Receive(Handle, usize, usize, usize),
}

thread_local! {
    static GROUP: RefCell<(u32, Vec<Waiting>)> = const { RefCell::new((0, Vec::new())) };
}

/// Sends go first, so that two ranks which send to each other do not wait for each other.
fn carry_out(waiting: Vec<Waiting>) -> Status {
    for one in &waiting {
        if let Waiting::Send(communicator, at, bytes, peer) = one {
            // SAFETY: the caller gave a communicator of ours.
            let sent = unsafe { &mut **communicator }.send(*peer, &operand(*at, *bytes));
            if sent.is_none() {
                return REMOTE;
            }
        }
    }
    for one in &waiting {
        if let Waiting::Receive(communicator, at, bytes, peer) = one {
            // SAFETY: the caller gave a communicator of ours.
            match unsafe { &mut **communicator }.receive(*peer) {
                Some(got) if got.len() == *bytes => result(*at, &got),
                Some(_) => return INVALID,
                None => return REMOTE,
            }
        }
    }
    SUCCESS
}

fn later(one: Waiting) -> Status {
    tick();
    let now = GROUP.with_borrow_mut(|(depth, all)| {
        all.push(one);
        if *depth == 0 { std::mem::take(all) } else { Vec::new() }
    });
    carry_out(now)
}

/// Defines sends and receives, which wait alike.
macro_rules! messages {
    ($($name:ident $waiting:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            at: usize,
            count: usize,
            kind: c_int,
            peer: c_int,
            communicator: Handle,
            _stream: *mut c_void,
        ) -> Status {
            let bytes = count * Kind::from_nccl(kind).bytes();
            if !small(bytes) {
                return SUCCESS;
            }
            later(Waiting::$waiting(communicator, at, bytes, peer as usize))
        }
    )* };
}

messages! {
    ncclSend Send
    ncclRecv Receive
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> Status {
    GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Status {
    let now = GROUP.with_borrow_mut(|(depth, all)| {
        *depth = depth.saturating_sub(1);
        if *depth == 0 { std::mem::take(all) } else { Vec::new() }
    });
    carry_out(now)
}
