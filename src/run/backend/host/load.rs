//! Others at work: threads that compute and copy for a share of the time, so that latencies can be
//! measured under load.
//!
//! One thread multiplies and adds within the caches, one copies through memory.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// Work and rest alternate this often: finer than most operators, coarser than the scheduler.
const PERIOD: Duration = Duration::from_millis(2);

/// Beyond the caches that one core has for itself.
const COPIED: usize = 8 << 20;

/// Starts the threads, which end when `stop` is set; none for a load of zero.
pub fn spawn<'scope>(scope: &'scope Scope<'scope, '_>, percent: u32, stop: &'scope AtomicBool) {
    if percent == 0 {
        return;
    }
    let work = PERIOD * percent.min(100) / 100;
    scope.spawn(move || {
        let mut values = [1.0f32; 4096];
        turns(work, stop, || {
            for value in &mut values {
                *value = value.mul_add(0.999, 0.001);
            }
            black_box(&values);
        });
    });
    scope.spawn(move || {
        let (from, mut to) = (vec![1u8; COPIED], vec![0u8; COPIED]);
        let mut at = 0;
        turns(work, stop, || {
            let end = at + COPIED / 64;
            to[at..end].copy_from_slice(&from[at..end]);
            black_box(&to[at..end]);
            at = end % COPIED;
        });
    });
}

/// Runs `one` over and over for `work` of each period.
fn turns(work: Duration, stop: &AtomicBool, mut one: impl FnMut()) {
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        while began.elapsed() < work {
            one();
        }
        thread::sleep(PERIOD - work);
    }
}
