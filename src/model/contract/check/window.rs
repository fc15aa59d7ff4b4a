//! Checks the window that jobs hold in turn: what is placed in it, and that each holder releases
//! it.
//!
//! For one job it proves that no residency is in the window at the iteration's boundary, that none
//! lies across its border, and that every stretch waits for the one before. With these waits,
//! [`super::order`] shows that a stretch can end without a later stretch having begun. So the
//! holder lets go of the window whatever time anything takes, and the line of jobs moves on.

use crate::units::saturated;
use std::collections::{BTreeMap, BTreeSet};

use super::Refusals;
use super::memory::Spot;
use super::program::{Kind, Program, Wait, Why};
use super::refusal::Refusal;
use crate::contract::plan::{JobPlan, Place};
use crate::job::Graph;

/// The placements of a job in and outside the window.
#[derive(Default)]
pub(super) struct Inside {
    /// The window's first byte and the one after its last.
    pub window: Option<(u128, u128)>,
    /// The ranges of the arena outside the window.
    pub own: Vec<(u128, u128)>,
    /// Residencies in the window.
    pub residencies: BTreeSet<usize>,
    /// Steps (by task) whose workspace is in the window.
    pub workspaces: BTreeSet<usize>,
}

/// Checks that the operators after which the window is handed over exist and are in order.
pub(super) fn ids(job: &JobPlan, graph: &Graph, refusals: &mut Refusals) {
    let Some(window) = &job.window else { return };
    let operators = graph.operators.len();
    if let Some(id) = window.hands_over_after.iter().find(|id| id.index() >= operators) {
        refusals.add(Refusal::WindowOperator { id: id.0, operators });
    }
    if window.hands_over_after.windows(2).any(|pair| pair[0] >= pair[1]) {
        refusals.add(Refusal::WindowOrder);
    }
}

/// Separates placements in the window from others, and lets each stretch wait for the one before.
pub(super) fn read(
    job: &JobPlan,
    program: &mut Program,
    spots: &BTreeMap<Place, Spot>,
    budget: u128,
    refusals: &mut Refusals,
) -> Inside {
    let mut inside = Inside::default();
    let (low, high) = job.window.as_ref().map_or((0, 0), |w| {
        (u128::from(w.offset.0), u128::from(w.offset.0) + u128::from(w.bytes.0))
    });
    if low < high {
        inside.window = Some((low, high));
    }
    if high > budget {
        refusals.add(Refusal::WindowBeyondBudget { end: high, budget: saturated(budget) });
    }
    // For each part of the iteration between two hand-overs: the tasks that begin a residency in
    // the window, and the tasks at whose end these residencies end.
    let mut parts: BTreeMap<usize, (BTreeSet<usize>, BTreeSet<usize>)> = BTreeMap::new();
    for placement in &job.placements {
        let Some(spot) = spots.get(&placement.place) else { continue };
        let start = u128::from(placement.offset.0);
        let end = start + spot.size;
        if end <= low || high <= start || start == end {
            inside.own.push((start, end));
            continue;
        }
        let place = || program.place(placement.place);
        if start < low || high < end {
            refusals.add(Refusal::WindowBorder { place: place() });
            continue;
        }
        let residency =
            spot.body.filter(|&body| spot.head.is_none() && !program.residencies[body].stays);
        let (begin, ends): (usize, Vec<usize>) =
            match (residency.and_then(|r| Some((r, program.residencies[r].begin?))), spot.step) {
                (Some((residency, begin)), _) => {
                    inside.residencies.insert(residency);
                    (begin, program.residencies[residency].ends(&program.tasks).collect())
                }
                (None, Some(step)) => {
                    inside.workspaces.insert(step);
                    (step, vec![step])
                }
                (None, None) => {
                    refusals.add(Refusal::WindowAtBoundary { place: place() });
                    continue;
                }
            };
        let stretch = stretch(job, program.tasks[begin].kind);
        let part = parts.entry(stretch).or_default();
        part.0.insert(begin);
        part.1.extend(ends);
    }
    let mut before: Option<BTreeSet<usize>> = None;
    for (begins, mut ends) in parts.into_values() {
        for task in begins {
            // A step that ends one stretch and begins the next would wait for itself: a circle.
            program.tasks[task]
                .waits
                .extend(before.iter().flatten().map(|&task| Wait { task, why: Why::Window }));
        }
        // Steps run in order, so waiting for the last one is enough.
        let steps: Vec<usize> = ends
            .iter()
            .copied()
            .filter(|t| matches!(program.tasks[*t].kind, Kind::Step { .. }))
            .collect();
        for step in steps.iter().rev().skip(1) {
            ends.remove(step);
        }
        before = Some(ends);
    }
    inside
}

/// The number of the stretch to which a task belongs.
fn stretch(job: &JobPlan, kind: Kind) -> usize {
    let after = |event: usize| job.events[event].trigger().after;
    let handed = |over: &dyn Fn(u32) -> bool| {
        job.window.iter().flat_map(|w| &w.hands_over_after).filter(|op| over(op.0)).count()
    };
    match kind {
        Kind::Step { operator, event: None } => handed(&|op| (op as usize) < operator),
        Kind::Step { event: Some(event), .. }
        | Kind::In { event, .. }
        | Kind::Out { event, .. } => handed(&|op| after(event).is_some_and(|k| op <= k.0)),
    }
}
