//! The host device's link: real copies, paced to a rate, and sleeping to the microsecond.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::device::Link;
use crate::sim::engine::rate;
use crate::sim::program::Direction;

/// How much is copied between looks at the clock.
const CHUNK: usize = 256 << 10;

/// The last stretch before an instant is spun through; a sleep may come back this much late.
const SPIN: Duration = Duration::from_micros(50);

/// How fast copies go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkRate {
    /// As fast as memory can be copied.
    Unlimited,
    /// As this link says, contention and overhead included.
    Of(Link),
}

/// What both directions share.
pub struct Pace {
    rate: LinkRate,
    /// Thousandths of the rate.
    throttle: AtomicU64,
    busy: [AtomicBool; 2],
    /// Of several jobs' copies one goes at a time in each direction.
    turns: [Mutex<()>; 2],
}

impl Pace {
    /// A link at `throttle` thousandths of `rate`; zero counts as one.
    #[must_use]
    pub fn new(rate: LinkRate, throttle: u32) -> Self {
        let throttle = AtomicU64::new(u64::from(throttle).max(1));
        Self { rate, throttle, busy: Default::default(), turns: Default::default() }
    }

    /// From the next copy on the link goes at `throttle` thousandths; zero counts as one.
    pub fn throttle(&self, throttle: u32) {
        self.throttle.store(u64::from(throttle).max(1), Ordering::Relaxed);
    }

    /// Copies `bytes` and returns when that many would have arrived. Gives up early when `stop` is
    /// set. Returns when it had its turn.
    ///
    /// # Safety
    /// Both stretches are valid for `bytes`, don't overlap, and no other thread writes either
    /// meanwhile.
    pub unsafe fn copy(
        &self,
        direction: Direction,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        stop: &AtomicBool,
    ) -> Instant {
        let (own, other) = match direction {
            Direction::H2d => (0, 1),
            Direction::D2h => (1, 0),
        };
        let _turn = self.turns[own].lock().unwrap_or_else(PoisonError::into_inner);
        self.busy[own].store(true, Ordering::Relaxed);
        let start = Instant::now();
        let throttle = u128::from(self.throttle.load(Ordering::Relaxed));
        let overhead = match &self.rate {
            LinkRate::Of(link) => u128::from(link.overhead_ns) * 1000 / throttle,
            LinkRate::Unlimited => 0,
        };
        let mut due = overhead;
        let mut done = 0;
        while done < bytes && !stop.load(Ordering::Relaxed) {
            let chunk = CHUNK.min(bytes - done);
            let before = Instant::now();
            // SAFETY: the caller vouches for both stretches, and the chunk is inside.
            unsafe { to.add(done).copy_from_nonoverlapping(from.add(done), chunk) };
            done += chunk;
            due += match &self.rate {
                LinkRate::Of(link) => {
                    let contended = self.busy[other].load(Ordering::Relaxed);
                    let slow = u128::from(rate(link, direction, contended).max(1)) * throttle;
                    chunk as u128 * 1_000_000_000_000 / slow
                }
                LinkRate::Unlimited => before.elapsed().as_nanos() * 1000 / throttle,
            };
            sleep_until(after(start, u64::try_from(due).unwrap_or(u64::MAX)), stop);
        }
        self.busy[own].store(false, Ordering::Relaxed);
        start
    }
}

/// `start` plus `nanos`; a century later when that can't be said.
#[must_use]
pub fn after(start: Instant, nanos: u64) -> Instant {
    start
        .checked_add(Duration::from_nanos(nanos))
        .unwrap_or_else(|| start + Duration::from_secs(100 * 365 * 86_400))
}

/// Sleeps until `instant`, or until soon after `stop` is set. Spins at the end, so as not to come
/// late.
pub fn sleep_until(instant: Instant, stop: &AtomicBool) {
    loop {
        let left = instant.saturating_duration_since(Instant::now());
        if left.is_zero() || stop.load(Ordering::Relaxed) {
            return;
        }
        if left > SPIN {
            thread::sleep((left - SPIN).min(Duration::from_millis(50)));
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(pace: &Pace, bytes: usize) -> Duration {
        let from: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
        let mut to = vec![0; bytes];
        let start = Instant::now();
        // SAFETY: two vectors of that length.
        unsafe {
            pace.copy(
                Direction::H2d,
                from.as_ptr(),
                to.as_mut_ptr(),
                bytes,
                &AtomicBool::new(false),
            )
        };
        let took = start.elapsed();
        assert_eq!(from, to);
        took
    }

    #[test]
    fn never_faster_than_the_rate() {
        let link = Link {
            h2d: 1 << 30,
            d2h: 1 << 30,
            h2d_contended: 1 << 29,
            d2h_contended: 1 << 29,
            overhead_ns: 1000,
        };
        let bytes = 1 << 20;
        let alone = Duration::from_nanos(1000 + 1_000_000_000 / 1024 - 1);
        assert!(timed(&Pace::new(LinkRate::Of(link), 1000), bytes) >= alone);
        assert!(timed(&Pace::new(LinkRate::Of(link), 50), bytes) >= alone * 20);
        timed(&Pace::new(LinkRate::Unlimited, 1000), bytes);
        let later = Pace::new(LinkRate::Of(link), 1000);
        later.throttle(50);
        assert!(timed(&later, bytes) >= alone * 20);
    }
}
