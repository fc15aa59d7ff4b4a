//! The host device's three streams: a thread each, and the state they meet in.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::backend::window::{Member, Windows};
use crate::backend::{Failure, Measured, Script, Stream};
use crate::units::{Bytes, Nanos};

/// What the threads know together.
struct State {
    /// The clock of this iteration.
    started: Instant,
    iteration: u64,
    /// How many of each stream's items have been enqueued, and how many have ended.
    queued: [usize; 3],
    ended: [usize; 3],
    /// By item.
    done: Vec<bool>,
    times: Vec<(Nanos, Nanos)>,
    /// The item that each stream waits for.
    waiting: [Option<usize>; 3],
    late: u64,
    /// The stretch for which the window is held, and how long was waited for it.
    held: Option<usize>,
    window: Nanos,
    loss: Option<f32>,
    high: Bytes,
    failure: Option<Failure>,
}

/// What a stream says of an item that it has run.
#[derive(Default)]
pub struct Done {
    /// The captured loss.
    pub loss: Option<f32>,
    /// When it began, if that was later than its turn on its stream: other jobs used the link.
    pub began: Option<Instant>,
}

/// The streams of one device.
pub struct Streams<'a> {
    script: &'a Script,
    window: Option<(&'a Windows, Member)>,
    state: Mutex<State>,
    /// One for each stream, and one for the thread that waits for the end.
    changed: [Condvar; 4],
    /// Set once, when threads are to go home.
    pub stop: AtomicBool,
}

const END: usize = 3;

impl<'a> Streams<'a> {
    /// Nothing enqueued.
    #[must_use]
    pub fn new(script: &'a Script, window: Option<(&'a Windows, Member)>) -> Self {
        let state = State {
            started: Instant::now(),
            iteration: 0,
            queued: [0; 3],
            ended: [0; 3],
            done: vec![false; script.items.len()],
            times: vec![(Nanos::ZERO, Nanos::ZERO); script.items.len()],
            waiting: [None; 3],
            late: 0,
            held: None,
            window: Nanos::ZERO,
            loss: None,
            high: Bytes::ZERO,
            failure: None,
        };
        Self {
            script,
            window,
            state: Mutex::new(state),
            changed: Default::default(),
            stop: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'g>(&self, of: usize, state: MutexGuard<'g, State>) -> MutexGuard<'g, State> {
        self.changed[of].wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends all threads home.
    pub fn stop(&self) {
        let _state = self.lock();
        self.stop.store(true, Ordering::Relaxed);
        self.changed.iter().for_each(Condvar::notify_all);
    }

    /// Ends the run with the first failure.
    pub fn fail(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.stop();
    }

    /// The end of the highest bytes touched so far.
    pub fn high(&self) -> Bytes {
        self.lock().high
    }

    /// Bytes up to `end` have been touched.
    pub fn touch(&self, end: Bytes) {
        let mut state = self.lock();
        state.high = state.high.max(end);
    }

    /// Starts an iteration's clock.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn begin(&self, iteration: u64) -> Result<(), Failure> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.iteration = iteration;
        state.queued = [0; 3];
        state.ended = [0; 3];
        state.done.fill(false);
        (state.late, state.window, state.loss) = (0, Nanos::ZERO, None);
        state.started = Instant::now();
        Ok(())
    }

    /// Puts an item on its stream.
    ///
    /// # Errors
    /// When the device has failed, or the item is not the next of its stream.
    pub fn enqueue(&self, item: usize) -> Result<(), Failure> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let stream = self.script.items[item].stream.index();
        if self.script.streams[stream].get(state.queued[stream]) != Some(&item) {
            return Err(Failure::Device(format!("item {item} is out of turn on its stream")));
        }
        state.queued[stream] += 1;
        // A thread that waits for work names no item.
        if state.waiting[stream].is_none() {
            self.changed[stream].notify_all();
        }
        Ok(())
    }

    /// Waits until all that was enqueued has ended.
    ///
    /// # Errors
    /// The first failure.
    pub fn finish(&self, measured: &mut Measured) -> Result<(), Failure> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.queued == state.ended {
                break;
            }
            state = self.wait(END, state);
        }
        measured.items.clear();
        measured.items.extend_from_slice(&state.times);
        measured.iteration = state.times.iter().map(|t| t.1).max().unwrap_or_default();
        (measured.late, measured.window) = (state.late, state.window);
        measured.loss = state.loss;
        Ok(())
    }

    /// Runs a stream until the device stops: `run` is given each item, when its waits are over,
    /// with the iteration.
    pub fn serve(&self, stream: Stream, mut run: impl FnMut(usize, u64) -> Result<Done, Failure>) {
        while let Some((item, iteration, started)) = self.next(stream) {
            let begin = Instant::now();
            let result = run(item, iteration);
            let end = since(started);
            match result {
                Ok(Done { loss, began }) => {
                    let begin = between(started, began.unwrap_or(begin));
                    self.ended(stream, item, (begin, Nanos(end.0.max(begin.0 + 1))), loss);
                }
                Err(failure) => return self.fail(failure),
            }
        }
    }

    /// Waits for the next item, then for all that it waits for, then for its instant.
    fn next(&self, stream: Stream) -> Option<(usize, u64, Instant)> {
        let s = stream.index();
        let mut state = self.lock();
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if state.ended[s] < state.queued[s] {
                break;
            }
            state = self.wait(s, state);
        }
        let index = self.script.streams[s][state.ended[s]];
        let item = &self.script.items[index];
        state.late += u64::from(item.fetches.iter().any(|&f| !state.done[f]));
        for &wait in item.waits.iter().chain(&item.trigger) {
            while !state.done[wait] {
                state.waiting[s] = Some(wait);
                state = self.wait(s, state);
                if self.stop.load(Ordering::Relaxed) {
                    return None;
                }
            }
        }
        state.waiting[s] = None;
        if let (Some(stretch), Some((windows, member))) = (item.stretch, self.window)
            && state.held != Some(stretch)
        {
            // The stretch before is over, because the item waited for its end.
            drop(state);
            let waited = windows.wait(member, &self.stop)?;
            state = self.lock();
            // Another stream of the job may have waited for the same stretch.
            if state.held.replace(stretch) != Some(stretch) {
                state.window += Nanos(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX / 2));
            }
        }
        state.high = state.high.max(item.top);
        Some((index, state.iteration, state.started))
    }

    fn ended(&self, stream: Stream, item: usize, times: (Nanos, Nanos), loss: Option<f32>) {
        let mut state = self.lock();
        state.done[item] = true;
        state.times[item] = times;
        state.loss = loss.or(state.loss);
        state.ended[stream.index()] += 1;
        self.let_go(&mut state, item);
        for (other, changed) in self.changed.iter().take(END).enumerate() {
            if state.waiting[other] == Some(item) {
                changed.notify_all();
            }
        }
        if state.ended == state.queued {
            self.changed[END].notify_all();
        }
    }

    /// Passes the window on if its stretch is over with this item.
    fn let_go(&self, state: &mut State, item: usize) {
        let (Some(stretch), Some((windows, member))) = (state.held, self.window) else { return };
        let ends = &self.script.stretches[stretch];
        if ends.contains(&item) && ends.iter().all(|&end| state.done[end]) {
            state.held = None;
            windows.let_go(member);
        }
    }
}

fn since(started: Instant) -> Nanos {
    between(started, Instant::now())
}

fn between(started: Instant, now: Instant) -> Nanos {
    let passed = now.saturating_duration_since(started);
    Nanos(u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX / 2))
}
