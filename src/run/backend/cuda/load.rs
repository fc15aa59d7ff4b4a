//! Other work on the GPU while operators are measured, as `neap profile --load` asks for it.
//!
//! Three streams of their own, each driven by a thread: one multiplies and adds in registers on
//! every multiprocessor, one copies from pinned memory, one copies to it. Each has work queued for
//! the load's share of the time: a burst of launches or copies, and then a rest whose length
//! follows from how long the GPU took for the burst. How the GPU divides itself between that work
//! and the job's is not decided here.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUfunction;

use super::driver::{Context, DeviceMemory, Event, Fault, Module, PinnedMemory, Queue};
use super::kernels::{self, Nvrtc};
use super::launch::{Family, Launch, Vary};
use super::libs;
use super::params::{Busy, bytes};
use crate::units::{Bytes, Nanos, scaled};

/// A burst and the rest after it, while nothing holds the burst up: as on the host.
const PERIOD: Nanos = Nanos(2_000_000);
/// The length of one launch, on a GPU without other work.
const LAUNCH: Nanos = Nanos(100_000);
/// Launches or copies of a burst at most.
const MOST: u64 = 256;
/// One copy: large enough for the link's whole rate, and short beside a period.
const COPIED: Bytes = Bytes(2 << 20);
/// Blocks for each multiprocessor: with theirs, most threads are still free for the job.
const BLOCKS: u32 = 2;
/// Threads of a block.
const THREADS: u32 = 256;

/// Why there is no load, or why it ended early.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LoadError {
    /// Its memory, streams or kernel can't be had, or its first burst fails.
    #[error("--load: the GPU's other work does not start: {0}")]
    Start(String),
    /// It failed beside the measurement.
    #[error("--load: the GPU failed while it had other work: {0}")]
    Run(String),
    /// A thread of it is gone.
    #[error("--load: a thread that drives the GPU's other work panicked")]
    Thread,
}

/// How many launches or copies of this length a burst has.
fn burst(percent: u32, one: Nanos) -> u32 {
    let work = scaled(PERIOD.0, u64::from(percent), 100);
    u32::try_from((work / one.0.max(1)).clamp(1, MOST)).unwrap_or(1)
}

/// When the next burst is due, and how long its stream rests from `now` until then. The last one
/// was due at `due`, and the GPU took `busy` for it. A burst that comes late shortens the rest
/// after it; what is late by more than a period is forgiven.
fn next(percent: u32, due: Nanos, busy: Nanos, now: Nanos) -> (Nanos, Nanos) {
    let whole = Nanos(scaled(busy.0, 100, u64::from(percent.max(1))));
    let due = Nanos(due.0.saturating_add(whole.0)).max(now.saturating_sub(PERIOD));
    (due, due.saturating_sub(now))
}

/// What a stream does over and over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Compute,
    CopyIn,
    CopyOut,
}

/// The same with its memory.
enum Work {
    Compute {
        function: CUfunction,
        launch: Launch,
        memory: DeviceMemory,
        /// Outlives the function.
        _module: Module,
    },
    CopyIn(PinnedMemory, DeviceMemory),
    CopyOut(PinnedMemory, DeviceMemory),
}

impl Work {
    fn new(kind: Kind, context: &Context, libs: Option<&Path>) -> Result<Self, Fault> {
        if kind == Kind::Compute {
            return Self::compute(context, libs);
        }
        let (pinned, memory) = (context.pin(COPIED.0 as usize)?, context.allocate(COPIED)?);
        Ok(match kind {
            Kind::CopyOut => Self::CopyOut(pinned, memory),
            _ => Self::CopyIn(pinned, memory),
        })
    }

    fn compute(context: &Context, libs: Option<&Path>) -> Result<Self, Fault> {
        let open = || Nvrtc::open(&libs::folders(libs)).map_err(|e| e.to_string());
        let code = kernels::code([Family::Pointwise], &context.arch, open).map_err(Fault)?;
        let missing = || Fault("its kernel was not compiled".to_owned());
        let module = context.load(code.get(&Family::Pointwise).ok_or_else(missing)?)?;
        let kernel = "busy".to_owned();
        let function = module.kernel(&kernel, 0)?;
        let grid = BLOCKS * context.multiprocessors.max(1);
        let memory = context.allocate(Bytes(u64::from(grid * THREADS) * 4))?;
        let out = memory.at(Bytes::ZERO, memory.size())? as *mut u8;
        let launch = Launch {
            family: Family::Pointwise,
            kernel,
            grid,
            block: [THREADS, 1],
            params: bytes(&Busy { rounds: 1024, out }),
            vary: Vary::Nothing,
            beside: None,
            shared: 0,
        };
        Ok(Self::Compute { function, launch, memory, _module: module })
    }

    fn submit(&mut self, queue: &Queue) -> Result<(), Fault> {
        let size = COPIED.0 as usize;
        match self {
            Self::Compute { function, launch, .. } => queue.launch(*function, launch),
            Self::CopyIn(pinned, memory) => queue.copy_in(
                memory.at(Bytes::ZERO, COPIED)?,
                pinned.at(Bytes::ZERO, COPIED)?,
                size,
            ),
            Self::CopyOut(pinned, memory) => queue.copy_out(
                pinned.at(Bytes::ZERO, COPIED)?,
                memory.at(Bytes::ZERO, COPIED)?,
                size,
            ),
        }
    }

    /// Makes a launch, which took `one`, about as long as it should be.
    fn fit(&mut self, one: Nanos) -> Result<(), Fault> {
        if let Self::Compute { launch, memory, .. } = self {
            let rounds = scaled(1024, LAUNCH.0, one.0.max(1)).clamp(1, 1 << 24);
            let out = memory.at(Bytes::ZERO, memory.size())? as *mut u8;
            launch.params = bytes(&Busy { rounds: rounds as i64, out });
        }
        Ok(())
    }
}

/// One stream of the load.
struct Lane {
    /// Start and end of this burst and of the one before.
    ends: [(Event, Event); 2],
    work: Work,
    queue: Queue,
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Before its memory goes.
        let _ = self.queue.wait_for_all();
    }
}

impl Lane {
    fn new(kind: Kind, context: &Context, libs: Option<&Path>) -> Result<Self, Fault> {
        let pair = || Ok((context.alarm()?, context.alarm()?));
        let (ends, queue) = ([pair()?, pair()?], context.queue()?);
        Ok(Self { ends, work: Work::new(kind, context, libs)?, queue })
    }

    fn submit(&mut self, turn: usize, count: u32) -> Result<(), Fault> {
        let (begin, end) = &self.ends[turn % 2];
        self.queue.record(begin)?;
        (0..count).try_for_each(|_| self.work.submit(&self.queue))?;
        self.queue.record(end)
    }

    /// Waits for the end of a burst. Returns for how long the stream had its work queued.
    fn lasted(&self, turn: usize) -> Result<Nanos, Fault> {
        let (begin, end) = &self.ends[turn % 2];
        end.wait()?;
        Ok(Nanos(begin.until(end)?))
    }

    /// Measures one launch or copy. Returns how many make a burst.
    fn calibrate(&mut self, percent: u32) -> Result<u32, Fault> {
        let mut one = Nanos::ZERO;
        // The first loads code and wakes the GPU. The last has its final length.
        for turn in 0..3 {
            self.submit(turn, 1)?;
            one = self.lasted(turn)?;
            if turn == 1 {
                self.work.fit(one)?;
            }
        }
        Ok(burst(percent, one))
    }

    /// Bursts and rests until the other end of `stopped` is gone.
    fn serve(&mut self, percent: u32, count: u32, stopped: &Receiver<()>) -> Result<(), Fault> {
        let (began, mut due) = (Instant::now(), Nanos::ZERO);
        for turn in 0.. {
            self.submit(turn, count)?;
            let mut rest = Nanos::ZERO;
            if percent < 100 {
                let busy = self.lasted(turn)?;
                let now = Nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
                (due, rest) = next(percent, due, busy, now);
            } else if turn > 0 {
                // A burst is still queued when the next one is submitted.
                self.lasted(turn - 1)?;
            }
            let stop = stopped.recv_timeout(Duration::from_nanos(rest.0));
            if stop != Err(RecvTimeoutError::Timeout) {
                break;
            }
        }
        self.queue.wait_for_all()
    }
}

/// One thread, from the first to the last call of the driver.
fn drive(
    (kind, percent, libs): (Kind, u32, Option<&Path>),
    ready: Sender<()>,
    stopped: &Receiver<()>,
) -> Result<(), LoadError> {
    let start = |fault: Fault| LoadError::Start(fault.0);
    let context = Context::new(0).map_err(start)?;
    let mut lane = Lane::new(kind, &context, libs).map_err(start)?;
    let count = lane.calibrate(percent).map_err(start)?;
    let _ = ready.send(());
    drop(ready);
    lane.serve(percent, count, stopped).map_err(|fault| LoadError::Run(fault.0))
}

/// A thread, which ends when the sender is gone.
type Driver = (Sender<()>, JoinHandle<Result<(), LoadError>>);

/// The load. It ends when it is dropped.
pub struct Load(Vec<Driver>);

impl Load {
    /// Starts the threads, and waits until each of them has measured its work.
    ///
    /// # Errors
    /// When the GPU has no memory for it, or fails.
    pub fn start(percent: u32, libs: Option<&Path>) -> Result<Self, LoadError> {
        let (ready, all) = channel();
        let mut load = Self(Vec::new());
        for kind in [Kind::Compute, Kind::CopyIn, Kind::CopyOut] {
            let (ready, libs) = (ready.clone(), libs.map(Path::to_path_buf));
            let (stop, stopped) = channel();
            let run = move || drive((kind, percent, libs.as_deref()), ready, &stopped);
            let thread = Builder::new().name("load".to_owned()).spawn(run);
            load.0.push((stop, thread.map_err(|e| LoadError::Start(e.to_string()))?));
        }
        drop(ready);
        if all.iter().count() < load.0.len() {
            load.end()?;
        }
        Ok(load)
    }

    /// Ends it: its streams are empty and its memory is given back.
    ///
    /// # Errors
    /// The first failure of a thread.
    pub fn stop(mut self) -> Result<(), LoadError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), LoadError> {
        let (stops, threads): (Vec<_>, Vec<_>) = self.0.drain(..).unzip();
        drop(stops);
        let ended = threads.into_iter().map(|t| t.join().unwrap_or(Err(LoadError::Thread)));
        ended.fold(Ok(()), Result::and)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_fills_its_share_of_a_period() {
        assert_eq!(burst(50, LAUNCH), 10);
        assert_eq!(burst(100, Nanos(76_000)), 26);
        // At least one, and no more than the driver takes at once.
        assert_eq!(burst(1, Nanos(320_000)), 1);
        assert_eq!(burst(100, Nanos::ZERO), 256);
    }

    /// The share holds although bursts are not as long as they were measured, the host is slow to
    /// see their ends, and it wakes late.
    #[test]
    fn a_stream_has_work_for_its_share_of_the_time() {
        for percent in [1, 10, 50, 90] {
            let (mut now, mut due, mut worked) = (0, Nanos::ZERO, 0);
            for turn in 0..2000 {
                let busy = 300_000 + 41_000 * (turn % 17);
                worked += busy;
                let rest;
                (due, rest) = next(percent, due, Nanos(busy), Nanos(now + busy + 12_000));
                now += busy + 12_000 + rest.0 + 20_000 * (turn % 3);
            }
            let share = worked as f64 / now as f64 * 100.0;
            assert!((share - f64::from(percent)).abs() < 0.1, "{share} for {percent} %");
        }
    }

    #[test]
    fn a_long_delay_is_not_made_up_for() {
        // A host that slept for a second: one burst comes early, by at most a period.
        let (due, rest) = next(50, Nanos(0), Nanos(1_000_000), Nanos(1_000_000_000));
        assert_eq!((due, rest), (Nanos(998_000_000), Nanos::ZERO));
        let (_, rest) = next(50, due, Nanos(1_000_000), Nanos(1_001_000_000));
        assert_eq!(rest, Nanos::ZERO);
        let (_, rest) = next(50, Nanos(0), Nanos(1_000_000), Nanos(1_000_000));
        assert_eq!(rest, Nanos(1_000_000));
        assert_eq!(next(100, Nanos(0), Nanos(5), Nanos(5)), (Nanos(5), Nanos::ZERO));
    }
}
