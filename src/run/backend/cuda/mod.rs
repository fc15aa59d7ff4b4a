//! The CUDA device: one arena, one pinned pool, three streams, and libraries found at run time.
//!
//! Everything is made once for each script: descriptors, launches with their parameters, events. An
//! iteration then only records and launches. Each stream records its end. Where items are timed,
//! each records an event at its end. Otherwise only those for which another stream waits do, and
//! these events keep no time. An item's start is the latest end of the items before it on its
//! stream and of those that it waits for.

mod canary;
pub mod conv;
mod conv_product;
pub(crate) mod driver;
pub mod emit;
mod ends;
pub mod gemm;
pub mod kernels;
pub mod launch;
pub mod libs;
mod load;
#[cfg(test)]
mod occupancy;
pub mod params;
pub mod pool;
pub(crate) mod prepare;
#[cfg(test)]
mod shim;
#[cfg(test)]
mod traffic;
mod turns;
#[cfg(test)]
mod types;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::host::calls::number;
use super::{Device, Failure, Measured, Memory, Script, Stream, Work};
use crate::backend::operators::KernelError;
use crate::backend::operators::error::data_error;
use crate::backend::window::{Member, Windows};
use crate::job::Graph;
use crate::units::{Bytes, Nanos, OpId};
use canary::Canaries;
use driver::{Context, Event, Fault, PinnedMemory, Queue};
use ends::Ends;
use load::{Load, LoadError};
use pool::{Pool, Spare};
use prepare::{Library, Prepared, Ready};
use turns::Turns;

/// Options of the CUDA device.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The folder to search first for libraries.
    pub libs: Option<PathBuf>,
    /// Whether to round the factors of f32 products to TF32.
    pub tf32: bool,
    /// Whether to fill memory with a pattern where a residency begins without content, and to check
    /// what lies behind each tensor's end.
    pub poison: bool,
    /// Algorithms that convolutions must use, in the order of an operator's passes; any other is an
    /// error.
    pub algorithms: BTreeMap<OpId, Vec<i32>>,
    /// Where the job passes its window on to other jobs in shared memory.
    pub member: Option<Member>,
    /// For how much of the time other streams have work, in percent.
    pub load_percent: u32,
}

/// Bytes of the pinned buffer for the captured loss and for the word in which kernels report
/// errors.
const WORDS: usize = 64;
/// The loss's position in that buffer.
const LOSS: usize = 8;

/// A CUDA device with a script loaded.
pub struct Cuda<'a> {
    graph: &'a Graph,
    script: &'a Script,
    canaries: Option<Canaries>,
    // The order of the fields is the order in which they are dropped: first objects of a library,
    // then memories and events, the context last.
    prepared: Prepared,
    arena: driver::DeviceMemory,
    pinned: PinnedMemory,
    words: PinnedMemory,
    base: Event,
    ends: Ends,
    turns: Option<Turns>,
    queues: [Queue; 3],
    iteration: u64,
    /// Whether the items of this iteration are timed.
    timed: bool,
    high: Bytes,
    /// Something was written from pageable memory, which may still be on its way.
    written: bool,
    captured: Option<crate::job::Dtype>,
    times: Vec<(Nanos, Nanos)>,
    /// The device's name and its libraries' versions, for the user.
    pub notes: Vec<String>,
    /// How long it took to pin the host store, if none was left for it.
    pub pinning: Nanos,
    context: Context,
}

/// A sentence about operators that the libraries don't carry out.
fn plain(graph: &Graph, prepared: &Prepared) -> Option<String> {
    let first = graph.operator(*prepared.fallbacks.first()?);
    Some(format!(
        "{} of {} operators run on neap's plain kernels in place of cuBLASLt or cuDNN, which is slow; \
         the first is `{}` ({})",
        prepared.fallbacks.len(),
        graph.operators.len(),
        first.name,
        first.kind
    ))
}

fn fail(fault: Fault) -> Failure {
    Failure::Device(fault.0)
}

fn loaded(error: LoadError) -> Failure {
    Failure::Device(error.to_string())
}

/// An arena that the devices of several jobs may use at once, each with its own part and streams.
/// It is freed by the thread that made it.
pub struct Shared {
    lent: driver::Lent,
    // Before the context, so that it is dropped first.
    pool: Pool,
    windows: Arc<Windows>,
    _owner: Owner,
}

/// Fields that stay on the maker's thread. The memory comes before its context, so it is dropped
/// first.
struct Owner {
    _arena: driver::DeviceMemory,
    _context: Context,
}

// SAFETY: other threads see the address and size in `lent`, and the pool, which has a lock; the
// owner is made and dropped on one thread, since `Shared` is not `Send`.
unsafe impl Sync for Shared {}

impl Shared {
    /// An arena of `bytes` bytes.
    ///
    /// # Errors
    /// When there is no driver or no device, or too little memory.
    pub fn new(bytes: Bytes) -> Result<Self, Failure> {
        crate::device::present::cuda_devices().map_err(Failure::Device)?;
        let context = Context::new(0).map_err(fail)?;
        let arena = context.allocate(bytes).map_err(fail)?;
        let owner = Owner { _arena: arena, _context: context };
        let (lent, pool, windows) = (owner._arena.lend(), Pool::default(), Arc::default());
        Ok(Self { lent, pool, windows, _owner: owner })
    }
}

/// Makes a CUDA device for `script`, in `shared` memory if there is one, and runs `body` with it.
/// Its pinned memory stays with the shared memory, or in `spare`.
///
/// # Errors
/// When there is no driver or no device, a library is missing or of another version, there is too
/// little memory, an operator can't be prepared, or the load fails. Errors of `body` are part of
/// its result.
pub fn with_device<R>(
    graph: &Graph,
    script: &Script,
    batch: &[Vec<u8>],
    options: &Options,
    (shared, spare): (Option<&Shared>, &Spare),
    body: impl FnOnce(&mut Cuda<'_>) -> R,
) -> Result<R, Failure> {
    crate::device::present::cuda_devices().map_err(Failure::Device)?;
    let pool = shared.map_or_else(|| spare.pool().map_err(fail), |shared| Ok(&shared.pool))?;
    let window = shared.zip(options.member).map(|(s, member)| (Arc::clone(&s.windows), member));
    let _left = turns::left(window.as_ref());
    let mut device = Cuda::new(graph, script, batch, options, shared, pool)?;
    let turns = window.clone().map(|window| Turns::new(window, script, &device.context));
    device.turns = turns.transpose().map_err(fail)?;
    let wanted = options.load_percent > 0;
    let load = wanted.then(|| Load::start(options.load_percent, options.libs.as_deref()));
    let load = load.transpose().map_err(loaded)?;
    let result = body(&mut device);
    let ended = load.map_or(Ok(()), Load::stop);
    device.leave(pool);
    ended.map_err(loaded)?;
    Ok(result)
}

impl<'a> Cuda<'a> {
    fn new(
        graph: &'a Graph,
        script: &'a Script,
        batch: &[Vec<u8>],
        options: &Options,
        shared: Option<&Shared>,
        pool: &Pool,
    ) -> Result<Self, Failure> {
        let context = Context::new(0).map_err(fail)?;
        let queues = [
            context.queue().map_err(fail)?,
            context.queue().map_err(fail)?,
            context.queue().map_err(fail)?,
        ];
        let arena = shared.map_or_else(
            || context.allocate(script.arena).map_err(fail),
            |s| Ok(s.lent.memory()),
        )?;
        let words = pool.take(&context, WORDS).map_err(fail)?;
        let prepared = Prepared::new(
            graph,
            script,
            batch,
            options,
            &context,
            &arena,
            &words,
            &queues[Stream::Compute.index()],
        )?;
        let store = usize::try_from(script.store.0)
            .map_err(|_| Failure::Device(format!("a host store of {}", script.store)))?;
        let began = Instant::now();
        let pinned = pool.take(&context, store + prepared.uploads.len()).map_err(fail)?;
        let pinning = Nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        pinned.write(store, &prepared.uploads).map_err(fail)?;
        let ends = Ends::new(script, &context).map_err(fail)?;
        let canaries = || Canaries::new(graph, script, &prepared.fused, &context);
        let canaries = options.poison.then(canaries).transpose().map_err(fail)?;
        let mut notes = vec![format!("on {}; {}", context.name, prepared.versions)];
        notes.extend(plain(graph, &prepared));
        Ok(Self {
            graph,
            script,
            canaries,
            prepared,
            arena,
            pinned,
            words,
            base: context.event(true).map_err(fail)?,
            ends,
            turns: None,
            queues,
            iteration: 0,
            timed: false,
            high: Bytes::ZERO,
            written: false,
            captured: None,
            times: vec![(Nanos::ZERO, Nanos::ZERO); script.items.len()],
            notes,
            pinning,
            context,
        })
    }

    /// Gives pinned memory to `pool`; unpins it where a copy that failed may still use it.
    fn leave(self, pool: &Pool) {
        if self.queues.iter().try_for_each(Queue::wait_for_all).is_ok() {
            pool.give(self.pinned);
            pool.give(self.words);
        }
    }

    /// The algorithm and workspace of each pass of the convolutions, by operator: the library's
    /// number of the algorithm, 1000 for matrix products, or -1 for the plain kernels.
    #[must_use]
    pub fn algorithms(&self) -> &BTreeMap<OpId, Vec<(i32, Bytes)>> {
        &self.prepared.algorithms
    }

    /// Operators that neap's plain kernels carry out in the libraries' place.
    #[must_use]
    pub fn fallbacks(&self) -> usize {
        self.prepared.fallbacks.len()
    }

    /// How cuBLASLt carries out each shape of product.
    #[must_use]
    pub fn products(&self) -> Vec<crate::Product> {
        let product = |ready: &Ready| match ready {
            Ready::Library(Library::Gemm(plan), _) => plan.product,
            _ => None,
        };
        let all: BTreeSet<_> = self.prepared.items.iter().flatten().filter_map(product).collect();
        all.into_iter().collect()
    }

    /// Device memory that libraries work in, beside the arena.
    #[must_use]
    pub fn scratch(&self) -> Bytes {
        self.prepared.scratch.size()
    }

    fn step(&mut self, item: usize) -> Result<(), Failure> {
        let Work::Step(work) = &self.script.items[item].work else { return Ok(()) };
        let queue = &self.queues[Stream::Compute.index()];
        if let Some(canaries) = &self.canaries {
            for &(offset, bytes) in &work.begins {
                queue
                    .fill(self.arena.at(offset, bytes).map_err(fail)?, 0xff, bytes.0 as usize)
                    .map_err(fail)?;
            }
            canaries.set(item, queue, &self.arena).map_err(fail)?;
        }
        let scratch = self.prepared.scratch.at(Bytes::ZERO, Bytes::ZERO).map_err(fail)?;
        let scratch = scratch as *mut c_void;
        let outside = |problem: KernelError| Failure::Operator { operator: work.operator, problem };
        for action in &mut self.prepared.items[item] {
            let done = match action {
                Ready::Launch(function, launch) => launch
                    .fill(self.iteration, self.graph.optimizer.as_ref())
                    .and_then(|()| Ok(queue.launch(*function, launch)?)),
                Ready::Copy { from, to, bytes } => {
                    queue.copy(*to, *from, *bytes).map_err(KernelError::from)
                }
                Ready::Zero { to, bytes } => queue.fill(*to, 0, *bytes).map_err(KernelError::from),
                Ready::Upload { to, at, bytes } => {
                    let from = Bytes(self.script.store.0 + *at as u64);
                    self.pinned
                        .at(from, Bytes(*bytes as u64))
                        .and_then(|from| queue.copy_in(*to, from, *bytes))
                        .map_err(KernelError::from)
                }
                Ready::Library(call, replay) => replay.run(queue, || match &*call {
                    Library::Gemm(plan) => match &self.prepared.cublaslt {
                        // SAFETY: the stream is of this context; the operands are the script's.
                        Some(library) => unsafe { library.run(plan, scratch, queue.raw()) },
                        None => Err("cuBLASLt is not open".into()),
                    },
                    Library::Conv(plan, workspace) => match &self.prepared.cudnn {
                        // SAFETY: as above; the workspace is the step's and has the plan's size.
                        Some(library) => unsafe {
                            library.run(plan, workspace.map_or(scratch, |w| w as *mut c_void))
                        },
                        None => Err("cuDNN is not open".into()),
                    },
                }),
            };
            done.map_err(outside)?;
        }
        if let Some(canaries) = &self.canaries {
            canaries.keep(item, queue, &self.arena).map_err(fail)?;
        }
        if let Some(capture) = work.capture {
            let from = self.arena.at(capture.offset, Bytes(capture.dtype.size())).map_err(fail)?;
            let to = self.words.at(Bytes(LOSS as u64), Bytes(8)).map_err(fail)?;
            queue.copy_out(to, from, capture.dtype.size() as usize).map_err(fail)?;
            self.captured = Some(capture.dtype);
        }
        Ok(())
    }

    /// The start and end of each item: its end by its event, its start by the items before it.
    fn clock(&mut self) -> Result<(), Fault> {
        let mut previous = [Nanos::ZERO; 3];
        for &index in &self.script.order {
            let item = &self.script.items[index];
            let stream = item.stream.index();
            let waits = item.waits.iter().chain(&item.trigger);
            let turn = self.turns.as_ref();
            let begun = turn.map(|turn| turn.begun_by(self.script, index, &self.base));
            let start = waits.map(|&w| self.times[w].1).chain(begun.transpose()?).max();
            let start = start.unwrap_or_default().max(previous[stream]);
            let end = Nanos(self.base.until(&self.ends.items[index])?).max(Nanos(start.0 + 1));
            self.times[index] = (start, end);
            previous[stream] = end;
        }
        // A fused update ran at its first item; its time is divided in proportion to the elements.
        for group in &self.prepared.fused {
            let (Some(first), Some(last)) = (group.first(), group.last()) else { continue };
            let (start, end) = (self.times[first.0].0, self.times[last.0].1);
            let (all, mut done) =
                (group.iter().map(|g| u128::from(g.1)).sum::<u128>().max(1), 0u128);
            for &(item, elements) in group {
                let at = |part: u128| {
                    Nanos(
                        start.0
                            + u64::try_from(u128::from(end.0 - start.0) * part / all).unwrap_or(0),
                    )
                };
                self.times[item] = (at(done), at(done + u128::from(elements)));
                done += u128::from(elements);
            }
        }
        Ok(())
    }

    /// How many steps would have started earlier without the wait for what they read.
    fn late(&self) -> u64 {
        let mut previous = Nanos::ZERO;
        let mut late = 0;
        for &index in &self.script.streams[Stream::Compute.index()] {
            let fetches = &self.script.items[index].fetches;
            late += u64::from(fetches.iter().any(|&f| self.times[f].1 > previous));
            previous = self.times[index].1;
        }
        late
    }
}

impl Device for Cuda<'_> {
    fn write(&mut self, memory: Memory, offset: Bytes, data: &[u8]) -> Result<(), Failure> {
        match memory {
            Memory::Device => {
                let size = Bytes(data.len() as u64);
                self.arena.write(offset, data).map_err(fail)?;
                self.written = true;
                self.high = self.high.max(offset + size.in_blocks());
                Ok(())
            }
            Memory::Host => self.pinned.write(offset.0 as usize, data).map_err(fail),
        }
    }

    fn read(&mut self, memory: Memory, offset: Bytes, into: &mut [u8]) -> Result<(), Failure> {
        match memory {
            Memory::Device => self.arena.read(offset, into).map_err(fail),
            Memory::Host => self.pinned.read(offset.0 as usize, into).map_err(fail),
        }
    }

    fn begin(&mut self, iteration: u64, timed: bool) -> Result<(), Failure> {
        (self.iteration, self.timed, self.captured) = (iteration, timed, None);
        self.words.write(0, &[0; WORDS]).map_err(fail)?;
        self.turns.iter_mut().for_each(Turns::begin);
        if std::mem::take(&mut self.written) {
            self.context.wait_for_all().map_err(fail)?;
        }
        let [compute, others @ ..] = &self.queues;
        compute.record(&self.base).map_err(fail)?;
        others.iter().try_for_each(|queue| queue.wait(&self.base)).map_err(fail)
    }

    fn enqueue(&mut self, index: usize) -> Result<(), Failure> {
        let Some(item) = self.script.items.get(index) else {
            return Err(Failure::Device(format!("item {index} is not in the script")));
        };
        let stream = item.stream.index();
        if let Some(turns) = &mut self.turns {
            turns.before(self.script, index, &self.queues).map_err(fail)?;
        }
        // A copy's trigger is among them, unless it follows from others.
        for event in item.waits.iter().filter_map(|&wait| self.ends.event(wait, self.timed)) {
            self.queues[stream].wait(event).map_err(fail)?;
        }
        match item.work {
            Work::Step(_) => self.step(index)?,
            Work::Copy { device, host, bytes } => {
                let (device, host) = (
                    self.arena.at(device, bytes).map_err(fail)?,
                    self.pinned.at(host, bytes).map_err(fail)?,
                );
                let size = usize::try_from(bytes.0)
                    .map_err(|_| Failure::Device(format!("a copy of {bytes}")))?;
                match item.stream {
                    Stream::H2d => self.queues[stream].copy_in(device, host, size),
                    _ => self.queues[stream].copy_out(host, device, size),
                }
                .map_err(fail)?;
            }
        }
        self.high = self.high.max(item.top);
        let event = self.ends.event(index, self.timed);
        event.map_or(Ok(()), |event| self.queues[stream].record(event)).map_err(fail)?;
        let turns = self.turns.as_ref();
        turns.map_or(Ok(()), |t| t.behind(self.script, index, &self.queues)).map_err(fail)
    }

    fn finish(&mut self, measured: &mut Measured) -> Result<(), Failure> {
        self.ends.record(self.script, &self.queues).map_err(fail)?;
        self.queues.iter().try_for_each(Queue::wait_for_all).map_err(fail)?;
        let mut words = [0; WORDS];
        self.words.read(0, &mut words).map_err(fail)?;
        let status = i64::from_ne_bytes(std::array::from_fn(|i| words[i]));
        if let Some(operator) = u32::try_from(status).ok().and_then(|s| s.checked_sub(1)) {
            let problem = data_error!("an index or class number is out of range");
            return Err(Failure::Operator { operator: OpId(operator), problem });
        }
        self.canaries.iter().try_for_each(|canaries| canaries.check(self.graph))?;
        (measured.gap, measured.iteration) =
            self.ends.passed(self.script, &self.base).map_err(fail)?;
        measured.items.clear();
        measured.late = 0;
        measured.window = self.turns.as_ref().map_or(Nanos::ZERO, Turns::waited);
        if self.timed {
            self.clock().map_err(fail)?;
            measured.items.extend_from_slice(&self.times);
            let last = self.times.iter().map(|t| t.1).max().unwrap_or_default();
            measured.iteration = measured.iteration.max(last);
            measured.late = self.late();
        }
        // SAFETY: eight bytes were copied out of the pinned words, of which the capture filled the
        // size of its type.
        measured.loss = self.captured.map(|dtype| unsafe { number(words[LOSS..].as_ptr(), dtype) });
        Ok(())
    }

    fn high_water(&self) -> Bytes {
        self.high
    }
}
