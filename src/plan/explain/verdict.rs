//! Why each way of treating a gap is ruled out, or what it would cost.

use std::fmt;

use super::{Explained, Gap};
use crate::job::Replay;
use crate::sim::engine::copy_time;
use crate::sim::program::Direction;
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// The verdict on one way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The plan does it.
    Chosen,
    /// Possible. It would add at least this time; zero if the budget is met without it.
    Possible(Nanos),
    /// Ruled out.
    Against(Reason),
}

/// Why a way is ruled out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// This operator uses the tensor at the peak, so its bytes can't be freed then.
    InUse(String),
    /// If it were kept, more bytes would be resident than the budget allows.
    AboveBudget {
        /// The bytes that would be resident.
        bytes: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// A switch of the planner forbids it.
    Switch(String),
    /// It is smaller than the smallest tensor that the planner swaps.
    Small {
        /// That size.
        least: Bytes,
    },
    /// The pinned host memory is used up.
    Pinned {
        /// The bytes that it needs.
        wanted: Bytes,
        /// The bytes that are left.
        left: Bytes,
    },
    /// The copies take longer than the time available.
    Short {
        /// The direction: `out`, `back`, or both.
        way: &'static str,
        /// The time that the copies take.
        needed: Nanos,
        /// The time available.
        available: Nanos,
    },
    /// Other copies keep the link busy during that time.
    Busy {
        /// `swap` or `recompute`.
        way: &'static str,
        /// The time that the copies take.
        needed: Nanos,
        /// The time that other copies leave.
        free: Nanos,
    },
    /// No operator of the iteration generates it.
    NoProducer,
    /// This operator, which made it, may not run twice.
    Never(String),
    /// Running the operator again would change another tensor a second time.
    Changes {
        /// The operator.
        operator: String,
        /// The tensor.
        tensor: String,
    },
    /// An input was overwritten in place since then.
    Overwritten {
        /// The input.
        input: String,
        /// The operator that overwrote it.
        by: String,
    },
    /// These inputs are not on the device then.
    InputsGone(Vec<String>),
}

impl Reason {
    /// The reason in one word, for scripts.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::InUse(_) => "in_use",
            Self::AboveBudget { .. } => "above_budget",
            Self::Switch(_) => "switch",
            Self::Small { .. } => "small",
            Self::Pinned { .. } => "pinned",
            Self::Short { .. } => "short",
            Self::Busy { .. } => "busy",
            Self::NoProducer => "no_producer",
            Self::Never(_) => "never",
            Self::Changes { .. } => "changes",
            Self::Overwritten { .. } => "overwritten",
            Self::InputsGone(_) => "inputs_gone",
        }
    }

    /// The time that copies need and the time available, if that is the reason.
    #[must_use]
    pub const fn times(&self) -> Option<(Nanos, Nanos)> {
        match self {
            Self::Short { needed, available, .. } => Some((*needed, *available)),
            Self::Busy { needed, free, .. } => Some((*needed, *free)),
            _ => None,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(operator) => write!(f, "`{operator}` works on it at the peak"),
            Self::AboveBudget { bytes, budget } => {
                write!(
                    f,
                    "{bytes} ({} bytes) would stand then, more than the budget of {budget} ({} bytes)",
                    bytes.0, budget.0
                )
            }
            Self::Switch(name) => write!(f, "switched off (--no-{name})"),
            Self::Small { least } => write!(f, "smaller than the least swap of {least}"),
            Self::Pinned { wanted, left } => {
                write!(f, "its host copy takes {wanted} and {left} of the pinned budget is left")
            }
            Self::Short { way, needed, available } => {
                let late = needed.saturating_sub(*available);
                write!(
                    f,
                    "the copy {way} takes {needed} and there is {available}: {late} of waiting"
                )
            }
            Self::Busy { way, needed, free } => {
                let late = needed.saturating_sub(*free);
                write!(
                    f,
                    "the copy {way} takes {needed} and other copies leave {free} of the link: {late} of waiting"
                )
            }
            Self::NoProducer => write!(f, "nothing in the iteration makes it"),
            Self::Never(operator) => write!(f, "`{operator}` must not run twice"),
            Self::Changes { operator, tensor } => {
                write!(f, "`{operator}` would update `{tensor}` a second time")
            }
            Self::Overwritten { input, by } => {
                write!(f, "its input `{input}` has been overwritten by `{by}`")
            }
            Self::InputsGone(inputs) => {
                let (shown, more) = inputs.split_at(inputs.len().min(3));
                let names: Vec<String> = shown.iter().map(|n| format!("`{n}`")).collect();
                let more = if more.is_empty() {
                    String::new()
                } else {
                    format!(" and {} more", more.len())
                };
                write!(f, "its inputs are gone: {}{more}", names.join(", "))
            }
        }
    }
}

impl Explained<'_> {
    fn name(&self, operator: OpId) -> String {
        self.graph.operator(operator).name.clone()
    }

    /// The parts of a gap, one or two half-open intervals.
    fn parts(&self, gap: &Gap) -> Vec<(Nanos, Nanos)> {
        let (start, end) = (self.run.steps[gap.after].1, self.run.steps[gap.before].0);
        if gap.round {
            vec![(start, self.run.iteration), (Nanos::ZERO, end)]
        } else {
            vec![(start, end)]
        }
    }

    fn off(&self, switch: &str) -> bool {
        self.plan.options.get(switch).is_some_and(|v| v == "false")
    }

    /// If the tensor were kept: compares the bytes resident while it is now away with the budget.
    pub(super) fn keep(&self, tensor: TensorId, gap: &Gap) -> Verdict {
        let bytes = self.graph.tensor(tensor).bytes.in_blocks();
        let mine: Vec<(Nanos, Nanos)> = self
            .program
            .residencies
            .iter()
            .filter(|r| r.tensor == Some(tensor))
            .map(|r| crate::sim::engine::life(r, &self.run))
            .collect();
        let parts = self.parts(gap);
        let mut most = Bytes::ZERO;
        for (index, &(from, level)) in self.memory.iter().enumerate() {
            let until = self.memory.get(index + 1).map_or(self.run.iteration, |p| p.0);
            let inside = parts.iter().any(|p| from < p.1 && until > p.0);
            let away = !mine.iter().any(|life| life.0 <= from && until <= life.1);
            if inside && away {
                most = most.max(level + bytes);
            }
        }
        let budget = self.plan.budget;
        if most > budget {
            return Verdict::Against(Reason::AboveBudget { bytes: most, budget });
        }
        Verdict::Possible(Nanos::ZERO)
    }

    /// If the tensor were swapped.
    pub(super) fn swap(&self, tensor: TensorId, gap: &Gap) -> Verdict {
        if let Some(reason) = self.swap_ruled_out(tensor, gap) {
            return Verdict::Against(reason);
        }
        let link = &self.plan.device.link;
        let size = self.graph.tensor(tensor).bytes;
        let out = if self.clean(tensor, gap) {
            Nanos::ZERO
        } else {
            copy_time(link, Direction::D2h, size, false)
        };
        let back = copy_time(link, Direction::H2d, size, false);
        let short =
            |way, needed, available| Verdict::Against(Reason::Short { way, needed, available });
        if out + back > gap.length {
            return short("out and back", out + back, gap.length);
        }
        // It must be gone before the peak and may not be back before its end.
        let parts = self.parts(gap);
        let (mut outs, mut backs) = (parts.clone(), parts);
        if gap.at_peak {
            outs = self.between(&outs, gap, true);
            backs = self.between(&backs, gap, false);
        }
        for (way, direction, needed, windows) in
            [("out", Direction::D2h, out, outs), ("back", Direction::H2d, back, backs)]
        {
            let available: Nanos = windows.iter().map(|w| w.1.saturating_sub(w.0)).sum();
            if needed > available {
                return short(way, needed, available);
            }
            let free = available.saturating_sub(self.busy(direction, &windows));
            if needed > free {
                return Verdict::Against(Reason::Busy { way, needed, free });
            }
        }
        Verdict::Possible(Nanos::ZERO)
    }

    fn swap_ruled_out(&self, tensor: TensorId, gap: &Gap) -> Option<Reason> {
        let bytes = self.graph.tensor(tensor).bytes.in_blocks();
        for switch in ["swap", "across"] {
            if self.off(switch) && (gap.round || switch == "swap") {
                return Some(Reason::Switch(switch.to_owned()));
            }
        }
        if matches!(self.plan.planner.as_str(), "neap" | "tensile") {
            let given = self.plan.options.get("min-swap").and_then(|v| v.parse().ok()).map(Bytes);
            let least = given.unwrap_or(crate::neap::Options::default().min_swap);
            if bytes < least {
                return Some(Reason::Small { least });
            }
        }
        let slots = &self.plan.jobs[0].host_slots;
        let left = self.plan.device.pinned_bytes.saturating_sub(self.plan.figures.pinned_bytes);
        (!slots.contains_key(&tensor) && bytes > left)
            .then_some(Reason::Pinned { wanted: bytes, left })
    }

    /// The part of a gap's intervals that is before the peak, or after it.
    fn between(&self, parts: &[(Nanos, Nanos)], gap: &Gap, before: bool) -> Vec<(Nanos, Nanos)> {
        let (from, until) = self.peak;
        // Round the end, the first interval comes first in the tensor's life, although its clock
        // time is later.
        let holder = parts.iter().position(|p| p.0 <= from && from < p.1).unwrap_or(0);
        let mut all = Vec::new();
        for (index, &(start, end)) in parts.iter().enumerate() {
            match (index.cmp(&holder), before) {
                (std::cmp::Ordering::Less, true) | (std::cmp::Ordering::Greater, false) => {
                    all.push((start, end))
                }
                (std::cmp::Ordering::Equal, true) => all.push((start, from.max(start))),
                (std::cmp::Ordering::Equal, false) => all.push((until.min(end), end)),
                _ => {}
            }
        }
        debug_assert!(gap.at_peak, "only a gap over the peak is divided by it");
        all
    }

    fn busy(&self, direction: Direction, windows: &[(Nanos, Nanos)]) -> Nanos {
        let copies = self
            .program
            .copies
            .iter()
            .zip(&self.run.copies)
            .filter(|(c, _)| c.direction == direction);
        let within = |life: &(Nanos, Nanos)| {
            windows.iter().map(|w| life.1.min(w.1).saturating_sub(life.0.max(w.0))).sum::<Nanos>()
        };
        copies.map(|(_, life)| within(life)).sum()
    }

    /// Whether the host has the tensor's version when the gap begins: it was copied since it was
    /// last written, or it was never written.
    fn clean(&self, tensor: TensorId, gap: &Gap) -> bool {
        let writes = |s: usize| {
            let step = &self.program.steps[s];
            step.binds.iter().any(|b| b.0 == tensor)
                && self.graph.operator(step.operator).writes().any(|w| w.tensor == tensor)
        };
        let begun = self.run.steps[gap.after].1;
        let copies = self.program.copies.iter().zip(&self.run.copies);
        let last = copies
            .filter(|(c, life)| c.tensor == tensor && life.0 < begun)
            .map(|(_, life)| life.0)
            .max();
        match last {
            Some(copy) => !(0..=gap.after).any(|s| writes(s) && self.run.steps[s].0 >= copy),
            None => gap.round && !(0..self.program.steps.len()).any(writes),
        }
    }

    /// If the tensor were recomputed from the tensors present before the step that ends the gap.
    pub(super) fn recompute(&self, tensor: TensorId, gap: &Gap) -> Verdict {
        if self.off("recompute") {
            return Verdict::Against(Reason::Switch("recompute".to_owned()));
        }
        let made_by = |op: usize| self.graph.operators[op].generates().any(|g| g.tensor == tensor);
        if gap.round || !(0..self.graph.operators.len()).any(made_by) {
            return Verdict::Against(Reason::NoProducer);
        }
        let until = self.turns.partition_point(|&turn| turn <= gap.after);
        let operators: Vec<OpId> = (0..until)
            .map(OpId::from_index)
            .filter(|&op| self.graph.operator(op).writes().any(|w| w.tensor == tensor))
            .collect();
        let generators = self.graph.generators();
        let mut gone = Vec::new();
        for &id in &operators {
            let operator = self.graph.operator(id);
            if operator.replay == Replay::Never {
                return Verdict::Against(Reason::Never(operator.name.clone()));
            }
            let left_out = |t: TensorId| {
                operator.replay == Replay::SkipUpdates && generators[t.index()].is_none()
            };
            if let Some(other) =
                operator.updates().find(|u| u.tensor != tensor && !left_out(u.tensor))
            {
                let tensor = self.graph.tensor(other.tensor).name.clone();
                return Verdict::Against(Reason::Changes {
                    operator: operator.name.clone(),
                    tensor,
                });
            }
            for read in operator.reads().filter(|r| {
                r.tensor != tensor
                    && !(left_out(r.tensor) && operator.updates().any(|u| u.tensor == r.tensor))
            }) {
                let later = |op: &OpId| {
                    op.0 > id.0
                        && self.turns[op.index()] < gap.before
                        && self.graph.operator(*op).updates().any(|u| u.tensor == read.tensor)
                };
                let input = || self.graph.tensor(read.tensor).name.clone();
                if let Some(by) = (0..self.graph.operators.len()).map(OpId::from_index).find(later)
                {
                    return Verdict::Against(Reason::Overwritten {
                        input: input(),
                        by: self.name(by),
                    });
                }
                if !self.there(read.tensor, gap.before) && !gone.contains(&input()) {
                    gone.push(input());
                }
            }
        }
        if !gone.is_empty() {
            return Verdict::Against(Reason::InputsGone(gone));
        }
        Verdict::Possible(
            operators.iter().map(|op| self.plan.jobs[0].latencies[op.index()].time).sum(),
        )
    }

    /// The reason why a tensor in use at the peak can't be freed.
    #[must_use]
    pub fn in_use(&self) -> Reason {
        Reason::InUse(self.step(self.peak_step).map_or_else(String::new, |(op, _)| self.name(op)))
    }
}
