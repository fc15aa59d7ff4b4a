//! Plans in which some swaps are left out, so that an allocator's free memory is not in pieces.
//!
//! A large request finds no block that is free as a whole where small tensors that come and go lie
//! in between. So a plan is made for a target below the budget, and replayed until the allocator
//! would reserve more than the budget. There the run of blocks is looked for that has room for the
//! request and the fewest bytes of tensors that the plan moves; these tensors stay on the device
//! from then on, and the replay begins again ([`Requests`]). Where nothing can stay, the operator
//! that makes the request counts as if it needed more memory than was free while it ran, and the
//! plan is made anew. When the allocator reserves no more than the budget, more tensors stay as
//! long as that holds, and the iteration takes less time. Each step is judged by the placed plan's
//! own run, because copies that wait for addresses change the order of requests.

mod requests;

use std::cell::LazyCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::polish::Basis;
use super::{Memory, PlanError, Planned, Request, Search, finish, nominal, placed, simulated};
use crate::contract::Event;
use crate::emit::Emitted;
use crate::method::Method;
use crate::neap;
use crate::neap::improve::clear::{clear, may_leave};
use crate::planner::{Decision, Given};
use crate::residency::Residencies;
use crate::sim::program::Program;
use crate::sim::reserved::{self, FIRST_BLOCK, Framework, Holder, Timeline};
use crate::units::{Bytes, Nanos, OpId, TensorId};
use requests::{Growth, Requests};

/// Targets from which plans are mended, by how many parts of the budget they lie below it.
const BELOW: [u64; 5] = [16, 12, 10, 8, 6];
const FAR_BELOW: [u64; 3] = [48, 32, 24];
const PARTS: u64 = 256;

/// The same for plans that are made thoroughly.
const CLOSE: RangeInclusive<u64> = 3..=24;

/// When a plan is made anew, an operator seems to need this part of the budget more than was free.
const MORE: u64 = 256;

/// How often the placed plan is looked at, and how many runs of blocks are cleared before each.
const LOOKS: usize = 8;
const CLEARED: usize = 60;

/// How often more tensors are tried that stay, and the fewest bytes that are worth it.
const FILLS: usize = 40;
const LEAST: u64 = 4 << 20;

/// A plan that takes longer than the best by this part is not mended: tensors that stay seldom save
/// more.
const LONGER: u64 = 12;

/// Requests of at most this many bytes are served from segments of their own.
const SMALL: Bytes = Bytes(1 << 20);

/// Plans for an allocator of graphs with more operators than this are looked for with less effort.
const LARGE: usize = 2000;

impl Request<'_> {
    /// Whether the framework's graph has more than [`LARGE`] operators.
    pub(crate) fn is_large(&self) -> bool {
        self.graph.framework().operators.len() > LARGE
    }
}

/// What became of a decision.
pub(super) enum Mended {
    Fits(Box<Kept>),
    /// The allocator needs too much for what this operator makes. There would be room if these
    /// tensors were away, if any.
    Short(OpId, Vec<TensorId>),
    /// Nothing helps.
    Not,
}

/// A plan, the tensors that stay in it, and the framework with the first block that it counts on.
pub(super) struct Kept {
    pub planned: Planned,
    tensors: BTreeSet<TensorId>,
    framework: Framework,
}

/// A decision with tensors that stay, placed and run.
struct Look {
    height: u64,
    time: Nanos,
    reserved: u64,
    requests: Timeline,
    framework: Framework,
}

impl Search<'_> {
    /// The quickest plan that comes of mending plans for a few targets, as the planner makes them
    /// and with lingering.
    pub(super) fn mended(&mut self, fits: &mut Option<Planned>) -> Result<(), PlanError> {
        let Some(framework) = self.framework else { return Ok(()) };
        let Method::Neap(options) = &self.request.method else { return Ok(()) };
        if !options.mend {
            return Ok(());
        }
        let lingering = neap::Options { lingering: true, ..options.clone() };
        // With plans for the lower targets Llama 1 B, which is large, had slower ones. Clearing
        // takes minutes there.
        let large = self.request.is_large();
        let close: Vec<u64> = CLOSE.collect();
        let sets: &[&[u64]] = match (options.thorough, large) {
            (true, _) => &[&close],
            (false, true) => &[&BELOW],
            (false, false) => &[&BELOW, &FAR_BELOW],
        };
        for targets in sets {
            let kinds = [Some(options), options.linger.then_some(&lingering)].into_iter().flatten();
            let ways = kinds.flat_map(|options| [(options, false), (options, true)]);
            for (options, clears) in ways.filter(|(_, clears)| !clears || !large) {
                let mut memory = Memory::Nothing;
                for below in *targets {
                    if options.thorough {
                        memory = Memory::Nothing;
                    }
                    let target = (self.budget - self.budget / PARTS * below) / 512 * 512;
                    self.mended_at(target, (options, clears), framework, &mut memory, fits)?;
                }
            }
        }
        Ok(())
    }

    /// Plans for a target until one can be mended, at most as often as there are steps of effort.
    /// What is in the way of a request is away in the next plan, if that is wanted; otherwise its
    /// operator needs more memory.
    fn mended_at(
        &mut self,
        target: u64,
        (options, clears): (&neap::Options, bool),
        framework: &Framework,
        memory: &mut Memory,
        fits: &mut Option<Planned>,
    ) -> Result<(), PlanError> {
        let request = self.request;
        let method = Method::Neap(options.clone());
        let mut graph = request.graph.clone();
        let mut away = Vec::new();
        for turn in 1..=u64::from(options.effort) {
            let given = Given {
                graph: &graph,
                latencies: request.latencies,
                link: &request.device.link,
                pinned: request.device.pinned_bytes,
                target,
            };
            let warm = memory.warm().filter(|_| !away.is_empty());
            let cleared = warm.and_then(|warm| clear(&given, options, warm, &away));
            let decided = match cleared {
                Some((residencies, warm)) => {
                    *memory = Memory::Warm(warm);
                    Decision::new(&residencies, target)
                }
                None => method.decide(&given, memory),
            };
            if !decided.reached {
                break;
            }
            match self.mend(&decided.emitted, framework)? {
                Mended::Fits(kept) => {
                    let Kept { mut planned, tensors, framework } = *kept;
                    planned.basis = Basis::new(&method, target, memory, Some(&framework))
                        .map(|basis| Arc::new(basis.keeping(&tensors, graph)));
                    self.quicker(fits, planned);
                    break;
                }
                Mended::Short(operator, way) => {
                    let free = target.saturating_sub(decided.loads[operator.index()]);
                    // With a need that grows from plan to plan Llama 1 B had slower plans.
                    let parts = if request.is_large() { 1 } else { turn };
                    let way = if clears { way } else { Vec::new() };
                    // What left stays away, since the operator seems to need its memory.
                    let left: Bytes = way.iter().map(|t| graph.tensor(*t).bytes.in_blocks()).sum();
                    let more = if way.is_empty() { self.budget / MORE * parts } else { left.0 };
                    away = way.into_iter().map(|tensor| (tensor, operator)).collect();
                    graph.operators[operator.index()].workspace += Bytes(free + more).in_blocks();
                }
                Mended::Not => break,
            }
        }
        Ok(())
    }

    pub(super) fn mend(
        &self,
        emitted: &Emitted,
        framework: &Framework,
    ) -> Result<Mended, PlanError> {
        let graph = self.request.graph;
        let (may, fresh) = (movable(emitted), LazyCell::new(|| Residencies::new(graph)));
        let mut kept = BTreeSet::new();
        for _ in 0..LOOKS {
            let Some(look) = self.look(emitted, &kept, framework)? else { break };
            if self.too_slow(look.time) {
                break;
            }
            if look.reserved <= self.budget {
                if look.height > self.budget {
                    break;
                }
                let most = self.fill(emitted, &may, &kept, &look, framework)?;
                for tensors in [most, kept] {
                    let planned = self.write(without(emitted, &tensors), &look.framework)?;
                    if let Some(planned) = planned {
                        let framework = look.framework;
                        return Ok(Mended::Fits(Box::new(Kept { planned, tensors, framework })));
                    }
                }
                break;
            }
            let requests = Requests::new(&look.requests, graph);
            let maker = |request| match look.requests.holder(request) {
                Holder::Tensor(tensor) => graph.generators()[tensor.index()],
                Holder::Workspace(operator) => Some(operator),
                Holder::Library | Holder::First => None,
            };
            let leaves = |request, tensor| {
                maker(request).is_some_and(|operator| may_leave(&fresh, tensor, operator))
            };
            let mut more = kept.clone();
            let mut last = None;
            for _ in 0..CLEARED {
                last = requests.growth(&look.framework, self.budget, &more, &may, leaves);
                let Some(Growth { between, .. }) = &last else { break };
                if between.is_empty() {
                    break;
                }
                more.extend(between);
            }
            if let Some(growth) = last {
                let maker = maker(growth.request);
                return Ok(maker.map_or(Mended::Not, |by| Mended::Short(by, growth.way)));
            }
            if more == kept {
                break;
            }
            kept = more;
        }
        Ok(Mended::Not)
    }

    fn too_slow(&self, time: Nanos) -> bool {
        self.rival.is_some_and(|rival| time.0 - time.0 / LONGER >= rival.0)
    }

    /// The decision without the copies of `kept`; `None` where it has no meaning then.
    fn look(
        &self,
        emitted: &Emitted,
        kept: &BTreeSet<TensorId>,
        framework: &Framework,
    ) -> Result<Option<Look>, PlanError> {
        let request = self.request;
        let emitted = without(emitted, kept);
        let Ok(program) = Program::new(request.graph, request.latencies, &emitted.events) else {
            return Ok(None);
        };
        let (program, _, height) = placed(program, &emitted, self.budget)?;
        let run = nominal(&program, &request.device.link)?;
        let mut framework = framework.clone();
        let mut requests = reserved::planned(request.graph, &program, &run, &framework);
        if !framework.config.expandable {
            let small = requests.reserved_by(&framework, SMALL);
            framework.first = Bytes(self.budget.saturating_sub(small.0) >> 21 << 21);
            requests = reserved::planned(request.graph, &program, &run, &framework);
        }
        let reserved = requests.settle(&framework).at_peak.reserved.0;
        Ok(Some(Look { height, time: run.iteration, reserved, requests, framework }))
    }

    /// As many more tensors stay as the budget has room for, the largest first.
    fn fill(
        &self,
        emitted: &Emitted,
        may: &BTreeSet<TensorId>,
        kept: &BTreeSet<TensorId>,
        look: &Look,
        framework: &Framework,
    ) -> Result<BTreeSet<TensorId>, PlanError> {
        let bytes = |t: &TensorId| self.request.graph.tensor(*t).bytes.in_blocks().0;
        let mut kept = kept.clone();
        let mut order: Vec<TensorId> = may.difference(&kept).copied().collect();
        order.sort_by_key(|t| (Reverse(bytes(t)), *t));
        // One first block takes the whole budget, whatever is cut out of it.
        let room = |look: &Look| {
            let first = look.framework.first > Bytes::ZERO;
            let held = if first { look.requests.allocated().0 } else { look.reserved };
            self.budget.saturating_sub(held.max(look.height))
        };
        let (mut time, mut left) = (look.time, room(look));
        for turn in 1..=FILLS {
            if left < LEAST || order.is_empty() {
                break;
            }
            let (mut more, mut free) = (kept.clone(), left);
            for tensor in &order {
                if bytes(tensor) <= free {
                    free -= bytes(tensor);
                    more.insert(*tensor);
                }
            }
            let tried = if more == kept { None } else { self.look(emitted, &more, framework)? };
            let fits =
                |look: &Look| look.height.max(look.reserved) <= self.budget && look.time < time;
            if let Some(look) = tried.filter(fits) {
                time = look.time;
                left = room(&look);
                kept = more;
                order.retain(|t| !kept.contains(t));
                continue;
            }
            // Other tensors, and every third time fewer bytes.
            let by = order.len().min(7);
            order.rotate_left(by);
            if turn % 3 == 0 {
                left /= 2;
            }
        }
        Ok(kept)
    }

    /// The decision as a plan, if it keeps within the budget and is quicker than the rival.
    pub(super) fn write(
        &self,
        emitted: Emitted,
        framework: &Framework,
    ) -> Result<Option<Planned>, PlanError> {
        let request = self.request;
        let Ok(program) = Program::new(request.graph, request.latencies, &emitted.events) else {
            return Ok(None);
        };
        let (program, placements, height) = placed(program, &emitted, self.budget)?;
        let mut planned = finish(request, self.liveness, emitted, program, placements, height)?;
        planned.reserved = simulated(request.graph, &planned, Some(framework));
        if framework.first > Bytes::ZERO {
            let first = framework.first.0.to_string();
            planned.plan.options.insert(FIRST_BLOCK.to_owned(), first);
        }
        let quicker = self.rival.is_none_or(|rival| planned.run.iteration < rival);
        let fits = planned.bound().0 <= self.budget && !planned.fails();
        Ok(Some(planned).filter(|_| quicker && fits))
    }
}

/// Tensors whose every departure ends in a swap-in, and that are not made again.
fn movable(emitted: &Emitted) -> BTreeSet<TensorId> {
    let mut away: BTreeMap<TensorId, i64> = BTreeMap::new();
    let mut made = BTreeSet::<TensorId>::new();
    for event in &emitted.events {
        match event {
            Event::SwapOut { tensor, .. } | Event::Release { tensor, .. } => {
                *away.entry(*tensor).or_default() += 1
            }
            Event::SwapIn { tensor, .. } => *away.entry(*tensor).or_default() -= 1,
            Event::Recompute { keep, .. } => made.extend(keep),
        }
    }
    away.into_iter().filter(|(t, count)| *count == 0 && !made.contains(t)).map(|of| of.0).collect()
}

/// The decision without what moves these tensors.
fn without(emitted: &Emitted, kept: &BTreeSet<TensorId>) -> Emitted {
    let mut left = Emitted::default();
    for (at, event) in emitted.events.iter().enumerate() {
        let stays = match event {
            Event::SwapOut { tensor, .. }
            | Event::SwapIn { tensor, .. }
            | Event::Release { tensor, .. } => kept.contains(tensor),
            Event::Recompute { .. } => false,
        };
        if stays {
            continue;
        }
        if let Some(until) = emitted.leaving_until.get(&at) {
            left.leaving_until.insert(left.events.len(), *until);
        }
        left.events.push(event.clone());
    }
    left
}
