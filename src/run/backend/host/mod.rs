//! The embedded host device: two memories, threads for streams, real copies, real arithmetic.
//!
//! [`with_device`] runs a function with a device whose threads end with the function.

pub mod arena;
pub mod calls;
pub mod kernels;
pub mod link;
pub mod load;
pub mod streams;
pub mod widen;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crate::backend::window::{Left, Member, Windows};
use arena::Arena;
use calls::{Lookup, Prepared};
use link::{LinkRate, Pace, after, sleep_until};
use streams::{Done, Streams};

use super::operators::KernelError;
use super::{Device, Failure, Measured, Memory, Script, Stream, Work};
use crate::job::Graph;
use crate::sim::program::Direction;
use crate::units::{Bytes, Nanos};

/// Options of the host device.
#[derive(Clone, Debug)]
pub struct Options {
    /// The rate of copies.
    pub link: LinkRate,
    /// The share of that rate, in thousandths.
    pub throttle_per_mille: u32,
    /// Other shares from these iterations on, in order.
    pub throttle_later: Vec<(u64, u32)>,
    /// Threads that compute and copy besides, for this share of the time in percent.
    pub load_percent: u32,
    /// Whether to fill memory with [`arena::POISON`] where a residency begins without content.
    pub poison: bool,
    /// The longest random sleep before each copy, to vary the order of events.
    pub jitter: Nanos,
    /// Where the job passes its window on to other jobs; otherwise its bytes are its own.
    pub member: Option<Member>,
}

struct Host<'a> {
    script: &'a Script,
    arena: &'a Arena,
    store: &'a Arena,
    streams: &'a Streams<'a>,
    pace: &'a Pace,
    options: &'a Options,
}

/// Ends the threads however the function ends.
struct Home<'a>(&'a Streams<'a>);

impl Drop for Home<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// An arena that the devices of several jobs may use at once, each a part of its own, the link
/// between the two memories, and the windows that jobs hold in turn.
pub struct Shared {
    arena: Arena,
    pace: Pace,
    windows: Windows,
}

impl Shared {
    /// An arena of `bytes` bytes.
    ///
    /// # Errors
    /// When the machine has too little memory.
    pub fn new(bytes: Bytes, options: &Options) -> Result<Self, Failure> {
        let arena = take("arena", bytes, options.poison)?;
        let pace = Pace::new(options.link.clone(), options.throttle_per_mille);
        Ok(Self { arena, pace, windows: Windows::default() })
    }
}

fn take(what: &str, bytes: Bytes, poison: bool) -> Result<Arena, Failure> {
    Arena::new(bytes, poison)
        .ok_or_else(|| Failure::Device(format!("this machine has no {bytes} for the {what}")))
}

/// Makes a host device for `script`, in `shared` memory if there is one, and runs `body` with it.
///
/// # Errors
/// When the machine has too little memory. Errors of `body` are part of its result.
pub fn with_device<R>(
    graph: &Graph,
    script: &Script,
    kernels: Lookup,
    batch: &[Vec<u8>],
    options: &Options,
    shared: Option<&Shared>,
    body: impl FnOnce(&mut dyn Device) -> R,
) -> Result<R, Failure> {
    let own = if shared.is_none() { Some(Shared::new(script.arena, options)?) } else { None };
    let Some(Shared { arena, pace, windows }) = shared.or(own.as_ref()) else {
        return Err(Failure::Device("there is no arena".to_owned()));
    };
    let store = take("host store", script.store, options.poison)?;
    let window = options.member.map(|member| (windows, member));
    let _left = Left(window);
    let streams = Streams::new(script, window);
    Ok(thread::scope(|scope| {
        let _home = Home(&streams);
        scope.spawn(|| compute(graph, script, arena, &streams, kernels, batch, options.poison));
        scope.spawn(|| copy(Direction::H2d, script, arena, &store, &streams, pace, options.jitter));
        scope.spawn(|| copy(Direction::D2h, script, arena, &store, &streams, pace, options.jitter));
        load::spawn(scope, options.load_percent, &streams.stop);
        body(&mut Host { script, arena, store: &store, streams: &streams, pace, options })
    }))
}

fn compute(
    graph: &Graph,
    script: &Script,
    arena: &Arena,
    streams: &Streams<'_>,
    kernels: Lookup,
    batch: &[Vec<u8>],
    poison: bool,
) {
    // One for each item, found by the item's position; copies have none.
    let mut prepared = Vec::with_capacity(script.items.len());
    for item in &script.items {
        prepared.push(match &item.work {
            Work::Copy { .. } => None,
            Work::Step(work) => match Prepared::new(graph, work, arena, kernels) {
                Ok(step) => Some((work.operator, step)),
                Err(failure) => return streams.fail(failure),
            },
        });
    }
    streams.serve(Stream::Compute, |item, iteration| {
        let Some((operator, step)) = &prepared[item] else { return Ok(Done::default()) };
        let result = catch_unwind(AssertUnwindSafe(|| step.run(graph, iteration, batch, poison)));
        let problem = match result {
            Ok(Ok(loss)) => return Ok(Done { loss, began: None }),
            Ok(Err(problem)) => problem,
            Err(panic) => KernelError::Device(format!("its kernel panicked: {}", message(&*panic))),
        };
        Err(Failure::Operator { operator: *operator, problem })
    });
}

fn message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no reason given")
}

fn copy(
    direction: Direction,
    script: &Script,
    arena: &Arena,
    store: &Arena,
    streams: &Streams<'_>,
    pace: &Pace,
    jitter: Nanos,
) {
    let stream = match direction {
        Direction::H2d => Stream::H2d,
        Direction::D2h => Stream::D2h,
    };
    streams.serve(stream, |item, iteration| {
        let Work::Copy { device, host, bytes } = script.items[item].work else {
            return Ok(Done::default());
        };
        if jitter > Nanos::ZERO {
            let nanos = crate::seed::mix(iteration << 32 ^ item as u64) % jitter.0;
            sleep_until(after(std::time::Instant::now(), nanos), &streams.stop);
        }
        let outside = || Failure::Device(format!("a copy of {bytes} lies outside its memories"));
        let device = arena.at(device, bytes).ok_or_else(outside)?;
        let host = store.at(host, bytes).ok_or_else(outside)?;
        let (from, to) = match direction {
            Direction::H2d => (host, device),
            Direction::D2h => (device, host),
        };
        let bytes = usize::try_from(bytes.0).map_err(|_| outside())?;
        // SAFETY: both ranges are inside their allocations, which differ; the plan's waits keep
        // writers away meanwhile.
        let began = unsafe { pace.copy(direction, from, to, bytes, &streams.stop) };
        Ok(Done { loss: None, began: Some(began) })
    });
}

impl Host<'_> {
    fn at(&self, memory: Memory, offset: Bytes, len: usize) -> Result<*mut u8, Failure> {
        let (arena, name) = match memory {
            Memory::Device => (self.arena, "arena"),
            Memory::Host => (self.store, "host store"),
        };
        let outside =
            || Failure::Device(format!("{len} bytes at {} lie outside the {name}", offset.0));
        arena.at(offset, Bytes(len as u64)).ok_or_else(outside)
    }
}

impl Device for Host<'_> {
    fn write(&mut self, memory: Memory, offset: Bytes, data: &[u8]) -> Result<(), Failure> {
        let to = self.at(memory, offset, data.len())?;
        // SAFETY: the range is inside the memory; no iteration runs, so no thread touches it.
        unsafe { to.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        if memory == Memory::Device {
            self.streams.touch(offset + Bytes(data.len() as u64).in_blocks());
        }
        Ok(())
    }

    fn read(&mut self, memory: Memory, offset: Bytes, into: &mut [u8]) -> Result<(), Failure> {
        let from = self.at(memory, offset, into.len())?;
        // SAFETY: the range is inside the memory; no iteration runs, so no thread touches it.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(from, into.len()) };
        Ok(())
    }

    fn begin(&mut self, iteration: u64, _: bool) -> Result<(), Failure> {
        if let Some((_, throttle)) =
            self.options.throttle_later.iter().rev().find(|(from, _)| *from <= iteration)
        {
            self.pace.throttle(*throttle);
        }
        self.streams.begin(iteration)
    }

    fn enqueue(&mut self, item: usize) -> Result<(), Failure> {
        if item >= self.script.items.len() {
            return Err(Failure::Device(format!("item {item} is not in the script")));
        }
        self.streams.enqueue(item)
    }

    fn finish(&mut self, measured: &mut Measured) -> Result<(), Failure> {
        self.streams.finish(measured)
    }

    fn high_water(&self) -> Bytes {
        self.streams.high()
    }
}
