//! Chooses a plan and division for each job, places them, and takes the fastest result that fits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::offers::{Choice, Offer, choices};
use super::{Overlapped, beside, cost, defect, held};
use crate::budget::{PlanError, Planned};
use crate::contract::Window;
use crate::device::Profile;
use crate::method::Method;
use crate::place::{self, Item};
use crate::sim::engine;
use crate::sim::program::Program;
use crate::sim::window;
use crate::together::{self, Jobs, Memo, Together};
use crate::units::{Bytes, Nanos, OpId};

/// The number of sizes of the window that are tried.
const SIZES: usize = 10;

/// How much of the time for which a plan holds the window counts as lost to other jobs, in
/// quarters.
const HOLDING: [u64; 2] = [0, 2];

/// How many times parts are made smaller because their layout is larger than their load.
const RETRIES: usize = 4;

/// A job hands the window over within an iteration where it does not need it for at least the
/// iteration's time divided by this number. `None`: it never does.
const GAPS: [Option<u64>; 3] = [None, Some(64), Some(u64::MAX)];

/// Addresses of a plan's items, and the heights of its own part and of its items in the window.
type Layout = (Vec<u64>, [u64; 2]);

/// The choices of each job.
pub(super) struct Options<'a> {
    jobs: &'a Jobs<'a>,
    /// For each job its entry in `choices`. Copies of a job share an entry.
    of: Vec<usize>,
    choices: Vec<Vec<Choice>>,
    offers: Vec<Vec<Offer>>,
}

/// For each job the number of its offer.
type Division = Vec<usize>;

/// A division with addresses.
struct Laid {
    bytes: u64,
    /// Its plans, which differ in when the window is handed over.
    plans: Vec<Together>,
}

impl<'a> Options<'a> {
    /// The choices with or without the smallest plan of every job, which takes longest to find.
    pub(super) fn new(
        jobs: &'a Jobs<'a>,
        devices: &[Profile],
        least: bool,
        memo: &Memo,
    ) -> Result<Self, PlanError> {
        let mut all = Self { jobs, of: Vec::new(), choices: Vec::new(), offers: Vec::new() };
        let mut known: Vec<(&str, &Method, u64)> = Vec::new();
        for (job, device) in jobs.jobs.iter().zip(devices) {
            let key = (&*job.file.1, &job.method, device.pinned_bytes.0);
            if let Some(same) = known.iter().position(|k| *k == key) {
                all.of.push(same);
                continue;
            }
            known.push(key);
            all.of.push(all.choices.len());
            let choices = choices(&jobs.request(job, device, jobs.budget), least, memo)?;
            let offers = choices.iter().enumerate().flat_map(|(pick, choice)| choice.offers(pick));
            all.offers.push(offers.collect());
            all.choices.push(choices);
        }
        Ok(all)
    }

    fn offer(&self, job: usize, offer: usize) -> &Offer {
        &self.offers[self.of[job]][offer]
    }

    fn choice(&self, job: usize, offer: usize) -> &Choice {
        &self.choices[self.of[job]][self.offer(job, offer).pick]
    }

    /// The sizes of the window to try.
    fn sizes(&self) -> Vec<u64> {
        let windows = self.offers.iter().flatten().map(|offer| offer.window);
        let all: BTreeSet<u64> = windows.filter(|&window| window > 0).collect();
        let all: Vec<u64> = all.into_iter().collect();
        let count = all.len();
        (1..=SIZES.min(count)).map(|k| all[count * k / SIZES.min(count) - 1]).collect()
    }

    /// A job's offers that fit in a window of this size.
    fn within(&self, job: usize, size: u64) -> impl Iterator<Item = usize> {
        let offers = &self.offers[self.of[job]];
        (0..offers.len()).filter(move |&i| offers[i].window <= size)
    }

    /// For every job the offer with the smallest own part.
    fn smallest(&self, size: u64) -> Division {
        let least = |job| self.within(job, size).min_by_key(|&i| (self.offer(job, i).own, i));
        (0..self.of.len()).map(|job| least(job).unwrap_or(0)).collect()
    }

    /// Starts with the fastest offers, and takes smaller ones where that costs least until they
    /// fit. `None` if they never fit.
    fn quickest(&self, size: u64, budget: u64, holding: u64) -> Option<Division> {
        let cost = |job: usize, i: usize| {
            let (choice, asked) = (self.choice(job, i), &self.jobs.jobs[job]);
            let time = u128::from(choice.time())
                + u128::from(self.offer(job, i).held) * u128::from(holding) / 4;
            let unplanned = choice.planned.plan.figures.unplanned_iteration_ns.0.max(1);
            time * u128::from(asked.priority.max(1)) * 1_000_000 / u128::from(unplanned)
        };
        let own = |job: usize, i: usize| self.offer(job, i).own;
        let quickest = |job| {
            self.within(job, size).min_by_key(|&i| (cost(job, i), own(job, i), i)).unwrap_or(0)
        };
        let mut division: Division = (0..self.of.len()).map(quickest).collect();
        while self.bytes(&division) > budget {
            let mut cheapest: Option<(u128, u128, usize, usize)> = None;
            for (job, &now) in division.iter().enumerate() {
                for i in self.within(job, size).filter(|&i| own(job, i) < own(job, now)) {
                    let lost = cost(job, i).saturating_sub(cost(job, now));
                    let given = u128::from(own(job, now) - own(job, i));
                    if cheapest.is_none_or(|(l, g, ..)| {
                        lost * g < l * given || (lost * g == l * given && given > g)
                    }) {
                        cheapest = Some((lost, given, job, i));
                    }
                }
            }
            let (_, _, job, i) = cheapest?;
            division[job] = i;
        }
        Some(division)
    }

    /// The bytes of a division by its loads. Its layout may be larger.
    fn bytes(&self, division: &Division) -> u64 {
        let offers = || division.iter().enumerate().map(|(job, &i)| self.offer(job, i));
        let own = offers().map(|o| o.own).fold(0, u64::saturating_add);
        own.saturating_add(offers().map(|o| o.window).max().unwrap_or(0))
    }

    /// The smallest arena.
    pub(super) fn least(&self) -> Result<Option<u64>, PlanError> {
        let (mut arenas, mut layouts) = (Vec::new(), BTreeMap::new());
        for size in self.sizes() {
            let laid = self.lay(&self.smallest(size), &mut layouts)?;
            arenas.extend(laid.filter(|laid| !laid.plans.is_empty()).map(|laid| laid.bytes));
        }
        Ok(arenas.into_iter().min())
    }

    /// Searches for divisions that are faster than the best so far. Returns whether the host's
    /// memory was too small for one of them.
    pub(super) fn search(
        &self,
        best: &mut Option<Overlapped>,
        lowest: &mut u64,
    ) -> Result<bool, PlanError> {
        let jobs = self.jobs;
        let apart = best.as_ref().and_then(|b| b.apart.clone());
        let (mut pinned, mut seen, mut layouts) = (false, BTreeSet::new(), BTreeMap::new());
        for size in self.sizes() {
            *lowest = (*lowest).min(self.bytes(&self.smallest(size)));
            for holding in HOLDING {
                let mut budget = jobs.budget.0 / 512 * 512;
                for attempt in 0..=RETRIES {
                    let division = match self.quickest(size, budget, holding) {
                        Some(division) if attempt < RETRIES => division,
                        None if attempt == 0 => break,
                        _ => self.smallest(size),
                    };
                    if seen.contains(&division) {
                        break;
                    }
                    let Some(laid) = self.lay(&division, &mut layouts)? else { break };
                    let over = laid.bytes.saturating_sub(jobs.budget.0);
                    if over > 0 {
                        *lowest = (*lowest).min(laid.bytes);
                        budget = budget.saturating_sub(over.max(512));
                        continue;
                    }
                    seen.insert(division);
                    for together in laid.plans {
                        let plan = &together.plan;
                        if plan.figures.pinned_bytes > jobs.device.pinned_bytes {
                            pinned = true;
                            continue;
                        }
                        let best_cost = best.as_ref().map(|b| cost(jobs, plan, &b.beside));
                        let slower = |times: &[Nanos]| {
                            best_cost.is_some_and(|best| cost(jobs, plan, times) >= best)
                        };
                        // No job is faster beside others than alone.
                        let alone = together.parts.iter().map(|part| part.run.iteration);
                        let alone: Vec<Nanos> = alone.collect();
                        if slower(&alone) {
                            continue;
                        }
                        let times = beside(jobs, &together.parts)?;
                        if slower(&times) {
                            continue;
                        }
                        let (held, apart) = (held(&together), apart.clone());
                        *best = Some(Overlapped { together, beside: times, apart, held });
                    }
                    break;
                }
            }
        }
        Ok(pinned)
    }

    /// Places a division; `None` if no item is in the window.
    fn lay(
        &self,
        division: &Division,
        layouts: &mut BTreeMap<(usize, usize), Layout>,
    ) -> Result<Option<Laid>, PlanError> {
        for (job, &i) in division.iter().enumerate() {
            let place = || place_both(self.choice(job, i), self.offer(job, i));
            layouts.entry((self.of[job], i)).or_insert_with(place);
        }
        let picked: Vec<&Layout> =
            self.of.iter().zip(division).map(|(&of, &i)| &layouts[&(of, i)]).collect();
        let offset = picked.iter().map(|l| l.1[0]).fold(0, u64::saturating_add);
        let size = picked.iter().map(|l| l.1[1]).max().unwrap_or(0);
        if size == 0 {
            return Ok(None);
        }
        let part = |(job, &i): (usize, &usize)| Arc::clone(&self.choice(job, i).planned);
        let parts: Vec<Arc<Planned>> = division.iter().enumerate().map(part).collect();
        let mut plans: Vec<Together> = Vec::new();
        for gap in GAPS {
            if let Some(made) = self.plan(division, &picked, &parts, (offset, size), gap)?
                && !plans.iter().any(|other| other.plan.jobs == made.plan.jobs)
            {
                plans.push(made);
            }
        }
        Ok(Some(Laid { bytes: offset.saturating_add(size), plans }))
    }

    /// The plan with a window of this offset and size; `None` if handing the window over makes a
    /// job slower alone.
    fn plan(
        &self,
        division: &Division,
        picked: &[&Layout],
        alone: &[Arc<Planned>],
        window: (u64, u64),
        gap: Option<u64>,
    ) -> Result<Option<Together>, PlanError> {
        let mut plan = together::joined(self.jobs, alone);
        let (mut base, mut peaks, mut peak) = (0, [0, 0], 0);
        let mut parts = Vec::with_capacity(plan.jobs.len());
        let mut gained = Nanos::ZERO;
        for (index, job) in plan.jobs.iter_mut().enumerate() {
            let (choice, (offsets, heights)) = (self.choice(index, division[index]), picked[index]);
            let shared = &self.offer(index, division[index]).shared;
            let base_of = |shared: bool| if shared { window.0 } else { base };
            let offsets = offsets.iter().zip(shared).map(|(at, shared)| at + base_of(*shared));
            let offsets: Vec<u64> = offsets.collect();
            job.placements = place::placements(&choice.planned.program, &choice.items, &offsets);
            let items = choice.items.iter().zip(shared).filter(|(_, shared)| **shared);
            let inside: BTreeSet<usize> = items.map(|(item, _)| item.1[0]).collect();
            if !inside.is_empty() {
                let hands_over_after = hand_overs(&choice.planned, &inside, gap);
                let (offset, bytes) = (Bytes(window.0), Bytes(window.1));
                job.window = Some(Window { offset, bytes, hands_over_after });
            }
            base += heights[0];
            let program = Program::placed(self.jobs.jobs[index].graph, job).map_err(defect)?;
            let Ok(run) = engine::nominal(&program, &self.jobs.device.link) else {
                return Ok(None);
            };
            // It may be faster, because other bytes are shared.
            if run.iteration > choice.planned.run.iteration {
                return Ok(None);
            }
            for (side, most) in peaks.iter_mut().enumerate() {
                let (mut some, mut index) = (program.clone(), 0..);
                some.residencies.retain(|_| {
                    index.next().is_some_and(|r| usize::from(inside.contains(&r)) == side)
                });
                let load = engine::peak(&engine::memory(&some, &run)).0;
                *most = if side == 0 { *most + load } else { load.max(*most) };
            }
            let mut part = Planned::clone(&choice.planned);
            let (faster, figures) = (part.run.iteration - run.iteration, &mut part.plan.figures);
            figures.arena_bytes = Bytes(heights[0]);
            figures.iteration_ns = run.iteration;
            figures.first_iteration_ns = figures.first_iteration_ns.saturating_sub(faster);
            figures.peak_bytes = engine::peak(&engine::memory(&program, &run));
            (peak, gained) = (peak + figures.peak_bytes.0, gained + faster);
            (part.program, part.run) = (program, run);
            parts.push(Arc::new(part));
        }
        plan.figures.iteration_ns = plan.figures.iteration_ns.saturating_sub(gained);
        plan.figures.first_iteration_ns = plan.figures.first_iteration_ns.saturating_sub(gained);
        plan.figures.arena_bytes = Bytes(window.0.saturating_add(window.1));
        plan.figures.peak_bytes = Bytes(peak.min(peaks[0] + peaks[1]));
        Ok(Some(Together { plan, parts }))
    }
}

/// Addresses of the items of a plan's own part, and of those in the window, both from 0.
fn place_both(choice: &Choice, offer: &Offer) -> Layout {
    let mut offsets = vec![0; choice.items.len()];
    let mut heights = [0, 0];
    for (side, height) in heights.iter_mut().enumerate() {
        let mine = |&i: &usize| usize::from(offer.shared[i]) == side && choice.items[i].0.bytes > 0;
        let which: Vec<usize> = (0..choice.items.len()).filter(mine).collect();
        if which.is_empty() {
            continue;
        }
        let items: Vec<Item> = which.iter().map(|&i| choice.items[i].0.clone()).collect();
        let layout = place::place(&items, [offer.own, offer.window][side]);
        which.iter().zip(&layout.offsets).for_each(|(&i, &offset)| offsets[i] = offset);
        *height = layout.height;
    }
    (offsets, heights)
}

/// The operators after which a job has no items in the window for long enough, in its run without
/// noise.
fn hand_overs(part: &Planned, inside: &BTreeSet<usize>, gap: Option<u64>) -> Vec<OpId> {
    let Some(gap) = gap else { return Vec::new() };
    let least = part.run.iteration.0 / gap;
    let places = window::places(&part.program);
    let mut lives: Vec<(usize, Nanos, Nanos)> = Vec::with_capacity(inside.len());
    for &r in inside {
        let (from, until) = engine::life(&part.program.residencies[r], &part.run);
        lives.extend(places[r].map(|place| (place, from, until)));
    }
    lives.sort();
    let mut next: Vec<Nanos> = lives.iter().map(|l| l.1).collect();
    for i in (1..next.len()).rev() {
        next[i - 1] = next[i - 1].min(next[i]);
    }
    let (mut ended, mut all) = (Nanos::ZERO, Vec::new());
    for (i, pair) in lives.windows(2).enumerate() {
        ended = ended.max(pair[0].2);
        if pair[0].0 < pair[1].0 && next[i + 1].0 >= ended.0.saturating_add(least) {
            all.push(OpId::from_index(pair[1].0 - 1));
        }
    }
    all
}
