//! The nominal timeline of a job, and how long its copies take on a link.
//!
//! For: planners that turn instants into slots of the [`super::ledger`] and back. Not for: what
//! really happens when something waits ([`crate::sim::engine`]).

use super::method::Given;
use crate::device::Link;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::Bytes;

/// When each operator starts if nothing waits, in nanoseconds.
#[derive(Clone, Debug)]
pub struct Clock<'a> {
    link: &'a Link,
    starts: Vec<u64>,
}

impl<'a> Clock<'a> {
    /// The timeline of what is given.
    #[must_use]
    pub fn new(given: &Given<'a>) -> Self {
        let mut starts = Vec::with_capacity(given.latencies.len() + 1);
        let mut now = 0;
        starts.push(0);
        for latency in given.latencies {
            now += latency.time.0.max(1);
            starts.push(now);
        }
        Self { link: given.link, starts }
    }

    /// The start of an operator.
    #[must_use]
    pub fn start(&self, operator: u32) -> u64 {
        self.starts[operator as usize]
    }

    /// The end of an operator.
    #[must_use]
    pub fn end(&self, operator: u32) -> u64 {
        self.starts[operator as usize + 1]
    }

    /// The end of the last operator.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The slot of the last operator that starts before an instant.
    #[must_use]
    pub fn slot_before(&self, instant: u64) -> u32 {
        let operators = self.starts.len() - 1;
        let started = self.starts[..operators].partition_point(|&t| t < instant);
        2 * u32::try_from(started.max(1) - 1).unwrap_or(u32::MAX / 2) + 1
    }

    /// The slot right after the last operator that has ended by an instant.
    #[must_use]
    pub fn place_by(&self, instant: u64) -> u32 {
        2 * u32::try_from(self.starts[1..].partition_point(|&t| t <= instant))
            .unwrap_or(u32::MAX / 2)
    }

    /// How long so many bytes take to the host while the other direction is busy too.
    #[must_use]
    pub fn out(&self, bytes: Bytes) -> u64 {
        copy_time(self.link, Direction::D2h, bytes, true).0
    }

    /// How long so many bytes take from the host while the other direction is busy too.
    #[must_use]
    pub fn back(&self, bytes: Bytes) -> u64 {
        copy_time(self.link, Direction::H2d, bytes, true).0
    }
}
