//! Puts the edited blocks into the one order of requests that the GPU's allocator gets.

use super::before::Before;
use super::lives::{Key, Lives};
use crate::sim::requests::Request;
use crate::units::{Bytes, id32};

/// The requests and their times.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Requests in order, all on one stream.
    pub requests: Vec<Request>,
    /// The time of each request, in nanoseconds since the trace's first event.
    pub times: Vec<u64>,
    /// How many of the requests come before the trace.
    pub before: usize,
    /// The block of each id, an index into [`Lives::list`]; `u32::MAX` for blocks from before the
    /// trace.
    pub lives: Vec<u32>,
}

impl Sequence {
    /// Orders the requests of all blocks.
    #[must_use]
    pub fn new(before: &Before, lives: &Lives) -> Self {
        let mut sequence = Self::default();
        for (bytes, _) in before.roles() {
            sequence.allocate(0, bytes, u32::MAX);
        }
        let mut order: Vec<(Key, bool, u32)> = Vec::with_capacity(lives.list.len() * 2);
        for (index, life) in lives.list.iter().enumerate().filter(|(_, l)| !l.dropped) {
            if life.end.is_some_and(|end| end <= life.start) {
                continue;
            }
            order.push((life.start, true, id32(index)));
            order.extend(life.end.map(|end| (end, false, id32(index))));
        }
        order.sort_unstable();
        sequence.before = sequence.requests.len()
            + order.partition_point(|(k, _, _)| k.time == 0 && k.side == 0 && k.order == 0);
        let mut ids = vec![u32::MAX; lives.list.len()];
        for (key, is_start, life) in order {
            if is_start {
                ids[life as usize] =
                    sequence.allocate(key.time, lives.list[life as usize].bytes, life);
            } else {
                sequence.requests.push(Request::Free { id: ids[life as usize] });
                sequence.times.push(key.time);
            }
        }
        sequence
    }

    fn allocate(&mut self, time: u64, bytes: u64, life: u32) -> u32 {
        let id = id32(self.lives.len());
        self.lives.push(life);
        self.requests.push(Request::Allocate { id, bytes: Bytes(bytes), stream: 0 });
        self.times.push(time);
        id
    }
}
