//! The mechanisms by which jobs share a device, and the room that each has.

use super::jobs::Job;
use super::lanes::{Join, Lanes, MOST, Mode};
use super::memory::Need;
use super::policy::Style;
use crate::units::{Bytes, Nanos, id32, saturated};

/// How jobs share a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// One job has the device until it ends.
    Exclusive,
    /// Equal partitions of memory and compute, one process in each.
    Static,
    /// A process for each job, with its own memory and context. Kernels run side by side, and no
    /// job gives way.
    Mps,
    /// As `Mps`, but more memory is promised than the device has. The excess is paged in and out in
    /// every iteration.
    MpsOc,
    /// One job on the device. At a switch, persistent memory is copied out and in.
    Checkpoint,
    /// Salus's lanes.
    Lanes,
}

/// The mechanisms by name.
pub const NAMES: [(&str, Mechanism); 6] = [
    ("exclusive", Mechanism::Exclusive),
    ("static", Mechanism::Static),
    ("mps", Mechanism::Mps),
    ("mps-oc", Mechanism::MpsOc),
    ("checkpoint", Mechanism::Checkpoint),
    ("lanes", Mechanism::Lanes),
];

/// The most processes at once: the limit of MPS from Volta on.
const PROCESSES: u64 = 48;

/// Nanoseconds to copy bytes at a rate in bytes per second.
fn transfer(bytes: Bytes, rate: u64) -> u128 {
    (u128::from(bytes.0) * 1_000_000_000).div_ceil(u128::from(rate.max(1)))
}

/// The device and how it is shared.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes that all jobs together may use.
    pub capacity: Bytes,
    /// Link from host to device, bytes per second.
    pub h2d: u64,
    /// Link from device to host, bytes per second.
    pub d2h: u64,
    /// Bandwidth of the device's memory, bytes per second, reads and writes together.
    pub memory_bandwidth: u64,
    /// How jobs share the device.
    pub mechanism: Mechanism,
    /// The rules for lanes.
    pub mode: Mode,
    /// Bytes of one process's context.
    pub context: Bytes,
    /// Number of static partitions, 1 to 48.
    pub partitions: u32,
    /// The memory that `MpsOc` promises, in per cent of the device.
    pub overcommit: u32,
    /// Length of a turn, where jobs take turns by moving their persistent memory.
    pub turn: Nanos,
    /// How long after its submission a job is overdue.
    pub patience: Nanos,
}

/// A P100 of 16 GiB in lanes, and the default of `neap share`.
impl Default for Settings {
    fn default() -> Self {
        Self {
            capacity: Bytes(16 << 30),
            h2d: 12_200_000_000,
            d2h: 12_900_000_000,
            memory_bandwidth: 732_000_000_000,
            mechanism: Mechanism::Lanes,
            mode: Mode::Neap,
            context: Bytes(300 << 20),
            partitions: 2,
            overcommit: 200,
            turn: Nanos(10_000_000_000),
            patience: Nanos(28_800_000_000_000),
        }
    }
}

impl Settings {
    /// Nanoseconds to copy `out` bytes to the host and `into` bytes to the device.
    #[must_use]
    pub fn copies(&self, out: Bytes, into: Bytes) -> u64 {
        saturated(transfer(out, self.d2h) + transfer(into, self.h2d)).min(u64::MAX / 16)
    }

    /// Nanoseconds to copy bytes within the device, which reads and writes each.
    #[must_use]
    pub fn packing(&self, bytes: Bytes) -> u64 {
        saturated(transfer(bytes + bytes, self.memory_bandwidth)).min(u64::MAX / 16)
    }

    /// The nearest style to a policy's that the mechanism can do.
    #[must_use]
    pub fn style(&self, style: Style) -> Style {
        match (self.mechanism, style) {
            (Mechanism::Lanes, style) => style,
            (Mechanism::Checkpoint, Style::UntilBusy { preempts }) => Style::One { preempts },
            (Mechanism::Checkpoint, Style::All) | (Mechanism::Exclusive, _) => {
                Style::One { preempts: false }
            }
            (Mechanism::Checkpoint, style) => style,
            (_, Style::One { .. }) => Style::One { preempts: false },
            // The device itself switches between processes that run at once.
            (_, Style::Rotating | Style::All) => Style::All,
            (_, Style::UntilBusy { .. }) => Style::UntilBusy { preempts: false },
        }
    }

    /// How much longer a job takes in a part of the device, per mille.
    #[must_use]
    pub fn slowdown(&self, utilisation: u32) -> u32 {
        match self.mechanism {
            Mechanism::Static => (self.partitions * utilisation).max(1000),
            _ => 1000,
        }
    }

    /// The room of an empty device.
    #[must_use]
    pub fn room(&self, style: Style) -> Room {
        let (whole, partitions) = (self.capacity, u64::from(self.partitions));
        let mut processes = Processes {
            limit: whole,
            each: whole,
            most: PROCESSES,
            context: self.context,
            used: Bytes::ZERO,
            count: 0,
        };
        match self.mechanism {
            Mechanism::Lanes => {
                // The released scripts run the policies that take turns in one lane.
                let paper = self.mode == Mode::Paper;
                let most = match style {
                    Style::One { preempts: true } | Style::Rotating if paper => MOST,
                    Style::One { .. } | Style::Rotating => 1,
                    Style::All | Style::UntilBusy { .. } => MOST,
                };
                return Room::Lanes(Lanes::new(whole, self.mode, most));
            }
            Mechanism::Exclusive | Mechanism::Checkpoint => {
                (processes.most, processes.context) = (1, Bytes::ZERO);
            }
            Mechanism::Static => {
                processes.most = partitions;
                processes.each = Bytes(whole.0 / partitions.max(1));
            }
            Mechanism::Mps => {}
            Mechanism::MpsOc => processes.limit = Bytes(whole.0 / 100 * u64::from(self.overcommit)),
        }
        Room::Processes(processes)
    }

    /// The number of devices that hold all `jobs` at once, each job on the first device with room.
    /// `None` if a job fits on no device.
    #[must_use]
    pub fn devices<'a>(&self, jobs: impl Iterator<Item = &'a Job>) -> Option<usize> {
        // Partitions have the sizes that the jobs need, rather than equal sizes.
        let mechanism = match self.mechanism {
            Mechanism::Static => Mechanism::Mps,
            other => other,
        };
        let like = Self { mechanism, ..*self };
        let mut rooms: Vec<Room> = Vec::new();
        for (id, job) in jobs.enumerate() {
            let admits = |room: &mut Room| room.admit(id32(id), job.need(), Join::Serve);
            if !rooms.iter_mut().any(admits) {
                rooms.push(like.room(Style::All));
                if !rooms.last_mut().is_some_and(admits) {
                    return None;
                }
            }
        }
        Some(rooms.len())
    }
}

/// The memory in use on a device.
#[derive(Clone, Debug)]
pub enum Room {
    /// Divided into lanes.
    Lanes(Lanes),
    /// Divided among processes.
    Processes(Processes),
}

/// Memory in use by each process.
#[derive(Clone, Debug)]
pub struct Processes {
    limit: Bytes,
    each: Bytes,
    most: u64,
    context: Bytes,
    used: Bytes,
    count: u64,
}

impl Room {
    /// Whether a job with this need fits on the empty device.
    #[must_use]
    pub fn ever(&self, need: Need) -> bool {
        match self {
            Self::Lanes(lanes) => lanes.ever(need),
            Self::Processes(p) => need.0 + need.1 + p.context <= p.each.min(p.limit),
        }
    }

    /// Admits a job. Returns false if there is no room.
    pub fn admit(&mut self, id: u32, need: Need, join: Join) -> bool {
        match self {
            Self::Lanes(lanes) => lanes.admit(id, need, join).is_some(),
            Self::Processes(p) => {
                let bytes = need.0 + need.1 + p.context;
                let fits = p.count < p.most && bytes <= p.each && p.used + bytes <= p.limit;
                if fits {
                    p.count += 1;
                    p.used += bytes;
                }
                fits
            }
        }
    }

    /// Changes an admitted job's need from `from` to the larger `to`. Returns whether there is
    /// room; if not, nothing changes.
    pub fn grow(&mut self, id: u32, from: Need, to: Need) -> bool {
        match self {
            Self::Lanes(lanes) => lanes.grow(id, to),
            Self::Processes(p) => {
                let (had, bytes) = (from.0 + from.1, to.0 + to.1);
                let fits = bytes + p.context <= p.each && p.used - had + bytes <= p.limit;
                if fits {
                    p.used = p.used - had + bytes;
                }
                fits
            }
        }
    }

    /// Removes an admitted job.
    pub fn leave(&mut self, id: u32, need: Need) {
        match self {
            Self::Lanes(lanes) => lanes.leave(id),
            Self::Processes(p) => {
                p.count -= 1;
                p.used -= need.0 + need.1 + p.context;
            }
        }
    }

    /// Free bytes.
    #[must_use]
    pub fn free(&self) -> Bytes {
        match self {
            Self::Lanes(lanes) => lanes.free(),
            Self::Processes(p) => p.limit.saturating_sub(p.used),
        }
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> Bytes {
        match self {
            Self::Lanes(lanes) => lanes.capacity().saturating_sub(lanes.free()),
            Self::Processes(p) => p.used,
        }
    }
}
