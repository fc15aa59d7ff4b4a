//! What scripts whose turns were logged would do under a policy.
//!
//! Simulated scripts do the work of the log, each iteration as long as it was, and say to
//! [`Tokens`] what real ones say to a server. So a prediction and what happened differ by nothing
//! but the time that messages and giving memory back take.

use std::collections::{BTreeMap, BTreeSet};

use super::courses::{self, Course};
use super::events::Event;
use super::policy::Policy;
use super::result::{Moment, Outcome};
use super::tokens::{Asked, Ended, Measured, Say, Tokens};
use crate::units::{Bytes, Nanos};

/// A simulated script.
#[derive(Default)]
struct Body {
    /// How many of its iterations have ended.
    done: usize,
    /// Whether it goes on until it is asked back, and whether it was asked.
    kept: bool,
    asked_back: bool,
    /// Whether its needs are known.
    known: bool,
    /// What it keeps between iterations.
    keeps: Bytes,
}

/// The scripts of a log, the server's decisions, and what has happened.
struct Replay<'l> {
    courses: &'l BTreeMap<u64, Course>,
    tokens: Tokens,
    bodies: BTreeMap<u64, Body>,
    /// When each script comes, or ends its iteration; after the last one, when it is gone.
    next: BTreeSet<(Nanos, u64)>,
    now: Nanos,
    events: Vec<Event>,
}

/// What would have happened, event by event, had the scripts of a log shared `budget` under
/// `policy`.
#[must_use]
pub fn events(courses: &BTreeMap<u64, Course>, policy: &Policy, budget: Bytes) -> Vec<Event> {
    let mut replay = Replay {
        courses,
        tokens: Tokens::new(budget, policy, None),
        bodies: BTreeMap::new(),
        next: courses.iter().map(|(id, course)| (course.came, *id)).collect(),
        now: Nanos::ZERO,
        events: Vec::new(),
    };
    while let Some((now, id)) = replay.next.pop_first() {
        replay.now = now;
        match replay.bodies.contains_key(&id) {
            true => replay.ends(id),
            false => replay.comes(id),
        }
        replay.obey();
    }
    replay.events
}

/// What became of the scripts of a log by these events. With `moments` also the memory that was
/// promised over time, and with `proof` whether that was ever more than its capacity.
#[must_use]
pub fn outcome(
    courses: &BTreeMap<u64, Course>,
    events: &[Event],
    moments: bool,
    proof: Option<Bytes>,
) -> Outcome {
    let mut all: BTreeMap<u64, Course> = BTreeMap::new();
    let (mut seen, mut last): (Vec<Moment>, _) = (Vec::new(), Nanos::ZERO);
    for event in events {
        last = event.at_ns;
        // A replay has no event of a script that is not there.
        let _ = Course::follow(&mut all, &event.what, last);
        if moments || proof.is_some() {
            let moment = courses::moment(&all, last);
            seen.pop_if(|before| before.at == last);
            seen.push(moment);
        }
    }
    // One that was refused, as it could never fit, is there too, and has not run.
    for (id, course) in courses {
        all.entry(*id).or_insert_with(|| Course::new(&course.name, course.came)).leave(last);
    }
    let mut outcome = courses::outcome(&all);
    if let Some(capacity) = proof {
        outcome.proved = seen.len() as u64;
        let beyond = seen.iter().find(|moment| moment.promised() > capacity);
        outcome.harm = beyond.map(|moment| {
            (moment.at, format!("{} are promised, of {capacity}", moment.promised()))
        });
    }
    outcome.moments = if moments { seen } else { Vec::new() };
    outcome
}

impl Replay<'_> {
    fn comes(&mut self, id: u64) {
        let Some(course) = self.courses.get(&id) else { return };
        let keeps = course.said.unwrap_or_default().0;
        let body = Body { known: course.said.is_some(), keeps, ..Body::default() };
        self.bodies.insert(id, body);
        let needs = course.said.map(|need| (need.0.0, need.1.0));
        let asked = Asked { needs, work_ns: course.said_work.map(|work| work.0) };
        // One that could never fit is refused: it takes no part.
        let _ = self.tokens.came(id, &course.name, asked, self.now);
    }

    /// A script with the token begins its next iteration, or its end.
    fn goes_on(&mut self, id: u64) {
        let (Some(course), Some(body)) = (self.courses.get(&id), self.bodies.get(&id)) else {
            return;
        };
        let time = course.steps.get(body.done).map_or(course.tail, |step| step.took);
        self.next.insert((Nanos(self.now.0.saturating_add(time.0)), id));
    }

    /// An iteration ends, or after the last one the script.
    fn ends(&mut self, id: u64) {
        let (Some(course), Some(body)) = (self.courses.get(&id), self.bodies.get_mut(&id)) else {
            return;
        };
        let Some(step) = course.steps.get(body.done) else {
            return self.tokens.left(id, self.now);
        };
        body.done += 1;
        let is_last = body.done == course.steps.len() && course.tail == Nanos::ZERO;
        let waits = body.known && (!body.kept || body.asked_back);
        let goes_on = if let (false, Some((kept, within))) = (body.known, step.shows) {
            (body.known, body.keeps) = (true, kept);
            let found = Measured { persistent_bytes: kept.0, ephemeral_bytes: within.0 };
            self.tokens.measured(id, found, self.now).map(|()| false)
        } else {
            let peak_bytes = step.shows.map_or(0, |need| (need.0 + need.1).0);
            let ended = Ended { holds_bytes: step.holds.0, peak_bytes, waits };
            self.tokens.ended(id, ended, self.now).map(|()| !waits)
        };
        match goes_on {
            _ if is_last => self.tokens.left(id, self.now),
            Ok(true) => self.goes_on(id),
            Ok(false) => {}
            Err(_) => self.tokens.left(id, self.now),
        }
    }

    /// Scripts do what the server says, and it decides again.
    fn obey(&mut self) {
        loop {
            let next = self.tokens.take();
            self.events.extend(next.log);
            if next.say.is_empty() {
                return;
            }
            for (id, say) in next.say {
                self.hears(id, &say);
            }
        }
    }

    fn hears(&mut self, id: u64, say: &Say) {
        let Some(body) = self.bodies.get_mut(&id) else { return };
        match say {
            Say::Go { kept, .. } => {
                (body.kept, body.asked_back) = (*kept, false);
                self.goes_on(id);
            }
            Say::Back => body.asked_back = true,
            Say::GiveBack => self.tokens.gave_back(id, body.keeps, self.now),
        }
    }
}
