//! A job's place in the arena, and the time to change it.

use std::collections::BTreeSet;
use std::rc::Rc;

use crate::device::Profile;
use crate::job::Graph;
use crate::sim::engine::{self, Durations};
use crate::sim::program::{Begin, Direction, Program};
use crate::units::{Nanos, TensorId};

/// A job's plan at its place in the arena.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) part: Part,
    pub(super) base: u64,
}

impl Seat {
    pub(super) fn touches(&self, other: &Self) -> bool {
        self.base < other.base + other.part.bytes && other.base < self.base + self.part.bytes
    }

    /// The tensors on the device between iterations.
    fn persistent(&self) -> BTreeSet<TensorId> {
        self.part
            .program
            .residencies
            .iter()
            .filter(|r| r.begin == Begin::Iteration)
            .filter_map(|r| r.tensor)
            .collect()
    }
}

/// A job's iteration under its plan.
#[derive(Clone)]
pub(super) struct Part {
    pub(super) program: Rc<Program>,
    /// Without noise.
    pub(super) durations: Rc<Durations>,
    /// How long the iteration was planned to take alone.
    pub(super) planned: Nanos,
    pub(super) bytes: u64,
}

/// The time to change from one plan's boundary to another's.
pub(super) fn moving(graph: &Graph, device: &Profile, from: Option<&Seat>, to: &Seat) -> Nanos {
    let alone = |direction, tensor: &TensorId| {
        engine::copy_time(&device.link, direction, graph.tensor(*tensor).bytes, false)
    };
    let there = to.persistent();
    let Some(from) = from else {
        return there.iter().map(|tensor| alone(Direction::H2d, tensor)).sum();
    };
    let here = from.persistent();
    // Bytes that stay on the device are read and written once.
    let moved: u128 =
        here.intersection(&there).map(|t| 2 * u128::from(graph.tensor(*t).bytes.0)).sum();
    let on_device = (moved * 1_000_000_000).div_ceil(u128::from(device.memory_bandwidth.max(1)));
    let out: Nanos = here.difference(&there).map(|tensor| alone(Direction::D2h, tensor)).sum();
    let back: Nanos = there.difference(&here).map(|tensor| alone(Direction::H2d, tensor)).sum();
    Nanos(u64::try_from(on_device).unwrap_or(u64::MAX / 4)) + out + back
}
