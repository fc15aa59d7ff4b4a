//! Plans all jobs of the service again, in the background.

use std::sync::Arc;
use std::time::Instant;

use super::feedback::{Request as Asked, predicted};
use super::record::Planning;
use super::worker::Work;
use super::{Message, Notice, Service, Stage, coming};
use crate::backend::Measured;
use crate::contract::{JobPlan, Latency};
use crate::controller::WORTH;
use crate::device::Profile;
use crate::sim::share::lanes::JobId;
use crate::units::{Nanos, id32};

/// New plans, or why there are none.
pub(super) struct Made {
    plans: Result<Vec<JobPlan>, String>,
    /// Predicted time of an iteration of every job under the old plans and under the new ones.
    predicted: Option<(Nanos, Nanos)>,
    took: Nanos,
}

impl Service<'_, '_> {
    /// Learns from a job's iteration, and plans all jobs again when something has drifted.
    pub(super) fn learn(&mut self, id: JobId, measured: &Measured) {
        if self.options.planner.is_none() {
            return;
        }
        let present = |id: usize| self.seats[id].stage == Stage::There;
        let drifted = self.feedback.learn(id as usize, measured, present);
        if let Some(what) = drifted.filter(|_| self.planning.is_none()) {
            self.why.push(format!("`{}`: {what}", self.seats[id as usize].name));
            self.plan();
        }
    }

    /// The set of jobs has changed: plans all of them again in the background, if there is a
    /// planner.
    pub(super) fn changed(&mut self, why: String) {
        self.asked += 1;
        self.why.push(why);
        self.plan();
    }

    fn plan(&mut self) {
        let Some(planner) = self.options.planner.filter(|_| self.planning.is_none()) else {
            return;
        };
        let present = |id: usize| self.seats[id].stage == Stage::There;
        let jobs: Vec<JobId> = (0..self.seats.len()).filter(|id| present(*id)).map(id32).collect();
        if jobs.is_empty() {
            return;
        }
        let device =
            Profile { link: self.feedback.planning(present), ..self.options.device.clone() };
        let seats = || jobs.iter().map(|&id| &self.seats[id as usize]);
        let old: Vec<JobPlan> = seats().map(|s| s.plans[s.plans.len() - 1].clone()).collect();
        let works: Vec<(Arc<Work>, Vec<Latency>)> = seats()
            .zip(&jobs)
            .map(|(seat, &id)| (Arc::clone(&seat.work), self.feedback.latencies(id as usize)))
            .collect();
        let (number, arena, sender) = (self.asked, self.options.arena, self.mailbox.sender.clone());
        self.planning = Some((number, jobs, std::mem::take(&mut self.why)));
        self.scope.spawn(move || {
            let began = Instant::now();
            let asked: Vec<Asked<'_>> =
                works.iter().map(|(work, latencies)| Asked { work, latencies }).collect();
            let plans = planner(&asked, &device, arena);
            let time = |plans: &[JobPlan]| predicted(&asked, plans, &device.link).ok();
            let predicted = plans.as_ref().ok().and_then(|new| Some((time(&old)?, time(new)?)));
            let took = Nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
            let made = Box::new(Made { plans, predicted, took });
            let _ = sender.send(Message::Planned(number, made));
        });
    }

    pub(super) fn planned(&mut self, number: u64, made: Made, notice: &mut dyn FnMut(Notice<'_>)) {
        let Some((_, jobs, mut why)) = self.planning.take() else { return };
        if number != self.asked {
            // The set of jobs has changed meanwhile.
            why.append(&mut self.why);
            self.why = why;
            return self.plan();
        }
        let drifted = std::mem::replace(&mut self.planned_for, number) == number;
        let mut changed = Vec::new();
        let plans = made.plans.and_then(|plans| {
            let gains = |(before, after): (Nanos, Nanos)| {
                after.0 <= before.0 - before.0 / 1000 * WORTH || before.0 == 0
            };
            if drifted && !made.predicted.is_some_and(gains) {
                return Err(format!("the new plans would gain less than {} %", WORTH / 10));
            }
            for (&id, plan) in jobs.iter().zip(plans) {
                let seat = &mut self.seats[id as usize];
                let last = &seat.plans[seat.plans.len() - 1];
                // New latencies alone change nothing that the job does.
                if *last == (JobPlan { latencies: last.latencies.clone(), ..plan.clone() }) {
                    continue;
                }
                let needs = coming(&seat.work, &plan, seat.plans.len())
                    .map_err(|e| format!("`{}`: {e}", seat.name))?
                    .needs;
                seat.plans.push(plan);
                self.scheduler.replanned(id, needs);
                changed.push(id);
            }
            Ok(())
        });
        let planning = Planning {
            at: self.now(),
            why: why.join(", "),
            kept_because: plans.err(),
            predicted_before: made.predicted.map(|p| p.0),
            predicted_after: made.predicted.map(|p| p.1),
            took: made.took,
            jobs: Vec::new(),
        };
        notice(Notice::Planned(self.records.planned(planning, &changed)));
    }
}
