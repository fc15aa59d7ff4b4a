//! The mechanisms by which jobs share a device, and the memory that each has.

use super::jobs::Job;
use super::lanes::{Join, Lanes, MOST, Mode};
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
const PROCESSES: usize = 48;

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
    /// Whether persistent memory stays on the device whatever the policy: that of processes.
    pub stays: bool,
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
            stays: false,
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
            // The iterations of jobs that share a lane alternate.
            (Mechanism::Lanes, Style::All) if self.mode == Mode::Paper => Style::Rotating,
            (Mechanism::Lanes, style) => style,
            (Mechanism::Exclusive, _) => Style::One,
            (Mechanism::Checkpoint, style) if style.in_turn() => style,
            (Mechanism::Checkpoint, Style::UntilBusy) => Style::Best,
            (Mechanism::Checkpoint, _) => Style::One,
            (_, Style::One | Style::Best) => Style::One,
            (_, Style::Fill | Style::UntilBusy) => Style::Fill,
            // The device itself switches between processes that run at once.
            _ => Style::All,
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

    /// The memory of an empty device. A process has a lane of its own, and its context is
    /// persistent.
    #[must_use]
    pub fn room(&self, style: Style) -> Lanes {
        let whole = self.capacity;
        let part = Bytes(whole.0 / u64::from(self.partitions.max(1)));
        let (promised, each, most, context) = match self.mechanism {
            Mechanism::Lanes => {
                // The released scripts run the policies that take turns in one lane.
                let turns = style.in_turn() && self.mode != Mode::Paper;
                let one = turns || style == Style::One;
                return Lanes::new(whole, self.mode, if one { 1 } else { MOST });
            }
            Mechanism::Exclusive | Mechanism::Checkpoint => (whole, whole, 1, Bytes::ZERO),
            Mechanism::Static => (whole, part, self.partitions as usize, self.context),
            Mechanism::Mps => (whole, whole, PROCESSES, self.context),
            Mechanism::MpsOc => {
                let promised = Bytes(whole.0 / 100 * u64::from(self.overcommit));
                (promised, whole, PROCESSES, self.context)
            }
        };
        Lanes::of_processes(promised, each, most, context)
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
        let mut rooms: Vec<Lanes> = Vec::new();
        for (id, job) in jobs.enumerate() {
            let admits = |room: &mut Lanes| room.admit(id32(id), job.need, Join::Serve).is_some();
            if !rooms.iter_mut().any(admits) {
                let mut room = like.room(Style::All);
                admits(&mut room).then(|| rooms.push(room))?;
            }
        }
        Some(rooms.len())
    }
}
