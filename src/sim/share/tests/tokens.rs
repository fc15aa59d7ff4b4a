//! Scripts that take turns in lanes, as simulated ones have it.

use std::collections::BTreeMap;

use super::super::courses::Course;
use super::super::engine::{self, Keep};
use super::super::events::Event;
use super::super::jobs::Job;
use super::super::mechanism::Settings;
use super::super::policy::find;
use super::super::replay;
use super::super::scheduler::{Coming, Needs, Order, Scheduler};
use super::super::tokens::{Asked, Ended, FIRST, GIVING, LEAST, Measured, Say, Tokens};
use crate::units::{Bytes, Nanos};

const SECOND: u64 = 1_000_000_000;

/// A script that obeys: how long its iterations take, how many it has, what it needs.
#[derive(Clone, Copy)]
struct Script {
    comes: u64,
    iteration: u64,
    iterations: u32,
    needs: (u64, u64),
    /// Whether it says beforehand what it needs.
    says: bool,
}

/// What a script does now.
struct Body {
    script: Script,
    holds: u64,
    left: u32,
    /// When its iteration ends, if it has the token.
    ends: Option<u64>,
    kept: bool,
    back: bool,
    measured: bool,
    start: Option<u64>,
    end: Option<u64>,
}

/// Scripts that obey, and the server.
struct World {
    tokens: Tokens,
    bodies: BTreeMap<u64, Body>,
    budget: u64,
    now: u64,
    log: Vec<Event>,
    gave_back: u32,
}

impl World {
    fn new(policy: &str, budget: u64) -> Self {
        let tokens = Tokens::new(Bytes(budget), find(policy).unwrap(), None);
        let (bodies, log) = (BTreeMap::new(), Vec::new());
        Self { tokens, bodies, budget, now: 0, log, gave_back: 0 }
    }

    /// Runs these scripts to their ends.
    fn run(&mut self, scripts: &[Script]) {
        let mut coming: Vec<(u64, Script)> = (1..).zip(scripts.iter().copied()).collect();
        coming.sort_by_key(|(_, script)| script.comes);
        coming.reverse();
        loop {
            let ends = self.bodies.iter().filter_map(|(id, body)| Some((body.ends?, *id))).min();
            let comes = coming.last().map(|(id, script)| (script.comes, *id));
            let Some((now, id)) = ends.into_iter().chain(comes).min() else { break };
            self.now = now;
            if comes == Some((now, id)) {
                let (id, script) = coming.pop().unwrap();
                self.comes(id, script);
            } else {
                self.ends(id);
            }
            self.obey();
        }
        let ended = self.bodies.values().filter(|body| body.end.is_some()).count();
        assert_eq!(ended, scripts.len(), "a script waits for ever");
    }

    fn comes(&mut self, id: u64, script: Script) {
        let body = Body {
            script,
            holds: 0,
            left: script.iterations,
            ends: None,
            kept: false,
            back: false,
            measured: script.says,
            start: None,
            end: None,
        };
        self.bodies.insert(id, body);
        let work = script.iteration * u64::from(script.iterations);
        let asked = Asked { needs: script.says.then_some(script.needs), work_ns: Some(work) };
        self.tokens.came(id, &format!("script {id}"), asked, Nanos(self.now)).unwrap();
    }

    /// An iteration ends, and perhaps the script.
    fn ends(&mut self, id: u64) {
        let now = Nanos(self.now);
        let body = self.bodies.get_mut(&id).unwrap();
        body.ends = None;
        body.left -= 1;
        let (kept, within) = body.script.needs;
        body.holds = kept + within;
        if body.left == 0 {
            (body.end, body.holds) = (Some(self.now), 0);
            return self.tokens.left(id, now);
        }
        if !body.measured {
            (body.measured, body.holds) = (true, kept);
            let found = Measured { persistent_bytes: kept, ephemeral_bytes: within };
            return self.tokens.measured(id, found, now).unwrap();
        }
        let waits = !body.kept || body.back;
        if !waits {
            body.ends = Some(self.now + body.script.iteration);
        }
        let peak_bytes = kept + within;
        let ended = Ended { holds_bytes: body.holds, peak_bytes, waits };
        self.tokens.ended(id, ended, now).unwrap();
    }

    fn obey(&mut self) {
        loop {
            let next = self.tokens.take();
            self.log.extend(next.log);
            if next.say.is_empty() {
                break;
            }
            for (id, say) in next.say {
                self.hears(id, say);
                self.look();
            }
        }
    }

    fn hears(&mut self, id: u64, say: Say) {
        let body = self.bodies.get_mut(&id).unwrap();
        match say {
            Say::Go { kept, most_bytes } => {
                assert!(body.ends.is_none() && body.end.is_none());
                (body.kept, body.back) = (kept, false);
                body.start.get_or_insert(self.now);
                body.ends = Some(self.now + body.script.iteration);
                body.holds = body.script.needs.0 + body.script.needs.1;
                assert_eq!(most_bytes.is_some(), !body.measured);
                assert!(most_bytes.is_none_or(|most| most.0 >= body.holds), "no room to measure");
            }
            Say::Back => body.back = true,
            Say::GiveBack => {
                assert!(body.ends.is_none(), "it is asked within an iteration");
                body.holds = body.script.needs.0;
                self.gave_back += 1;
                self.tokens.gave_back(id, Bytes(body.holds), Nanos(self.now));
            }
        }
    }

    /// The device never has to hold more than the budget.
    fn look(&self) {
        let held: u64 = self.bodies.values().map(|body| body.holds).sum();
        assert!(held <= self.budget, "{held} bytes are held of {}", self.budget);
    }

    fn order_of_ends(&self) -> Vec<u64> {
        let mut all: Vec<(u64, u64)> =
            self.bodies.iter().map(|(id, body)| (body.end.unwrap(), *id)).collect();
        all.sort_unstable();
        all.into_iter().map(|one| one.1).collect()
    }
}

/// Three scripts, and the least budget that lets them share one lane.
fn three(says: bool) -> ([Script; 3], u64) {
    let script = |comes, iteration, iterations, needs| Script {
        comes: comes * SECOND,
        iteration: iteration * SECOND / 100,
        iterations,
        needs,
        says,
    };
    let all = [
        script(0, 30, 30, (100, 700)),
        script(3, 50, 20, (300, 900)),
        script(6, 20, 25, (200, 400)),
    ];
    (all, 600 + 900)
}

fn jobs(scripts: &[Script]) -> Vec<Job> {
    let job = |(number, script): (usize, &Script)| Job {
        name: format!("script {}", number + 1).into(),
        submit: Nanos(script.comes),
        work: Nanos(script.iteration * u64::from(script.iterations)),
        iteration: Nanos(script.iteration),
        need: (Bytes(script.needs.0), Bytes(script.needs.1)),
        utilisation: 1,
        priority: 0,
        kill: None,
        rate: None,
        growth: None,
    };
    scripts.iter().enumerate().map(job).collect()
}

/// When each of these jobs ends as `neap run` has it: workers that do at once what the scheduler
/// orders, and whose memory may move.
fn ends_of_workers(scripts: &[Script], policy: &str, budget: u64) -> Vec<(u64, u64)> {
    let of = |id: u32| scripts[id as usize - 1];
    let never = Nanos(u64::MAX / 2);
    let mut scheduler = Scheduler::new(find(policy).unwrap(), Bytes(budget), never, never);
    let mut coming: Vec<(u64, u32)> =
        (1..).zip(scripts).map(|(id, script)| (script.comes, id)).collect();
    coming.reverse();
    let mut running: BTreeMap<u32, u64> = BTreeMap::new();
    let mut left: BTreeMap<u32, u32> = (1..).zip(scripts.iter().map(|s| s.iterations)).collect();
    let mut ends = Vec::new();
    loop {
        let ended = running.iter().map(|(id, end)| (*end, *id)).min();
        let Some((now, id)) = ended.into_iter().chain(coming.last().copied()).min() else { break };
        if coming.pop_if(|next| *next == (now, id)).is_some() {
            let (persistent, ephemeral) = (Bytes(of(id).needs.0), Bytes(of(id).needs.1));
            let needs = Needs { persistent, ephemeral, ..Needs::default() };
            let (iterations, iteration) = (of(id).iterations, Nanos(of(id).iteration));
            let coming = Coming { needs, utilisation: 1, iterations, iteration };
            assert!(scheduler.submit(id, &coming, Nanos(now)));
        } else {
            running.remove(&id);
            scheduler.ran(id, Nanos(of(id).iteration));
            let more = left.get_mut(&id).unwrap();
            *more -= 1;
            if *more == 0 {
                scheduler.ended(id);
                ends.push((now, u64::from(id)));
            }
        }
        let mut orders = scheduler.decide(Nanos(now));
        while !orders.is_empty() {
            for (job, order) in orders {
                match order {
                    Order::Enter(..) => {}
                    Order::Go => _ = running.insert(job, now + of(job).iteration),
                    Order::Leave => scheduler.left(job),
                    Order::Stop => unreachable!("nothing stops a job"),
                }
            }
            orders = scheduler.decide(Nanos(now));
        }
    }
    ends
}

/// One trace through the server's decisions, the runner's and the simulator's: the same order, and
/// the same times to within an iteration of each other script.
#[test]
fn server_and_runner_do_what_the_simulator_predicts_under_each_policy() {
    for policy in ["fifo", "srtf", "pack", "fair"] {
        let (scripts, budget) = three(true);
        let mut world = World::new(policy, budget);
        world.run(&scripts);
        let jobs = jobs(&scripts);
        let settings = Settings { capacity: Bytes(budget), stays: true, ..Settings::default() };
        let outcome = engine::simulate(&jobs, find(policy).unwrap(), &settings, Keep::default());
        let mut ends: Vec<(Nanos, u64)> =
            (1..).zip(&outcome.jobs).map(|(id, result)| (result.end, id)).collect();
        ends.sort_unstable();
        let predicted: Vec<u64> = ends.iter().map(|one| one.1).collect();
        assert_eq!(world.order_of_ends(), predicted, "{policy}");
        let workers = ends_of_workers(&scripts, policy, budget);
        assert_eq!(workers.iter().map(|one| one.1).collect::<Vec<_>>(), predicted, "{policy}");
        for ((end, id), (ran, _)) in ends.into_iter().zip(workers) {
            assert!(ran.abs_diff(end.0) <= SECOND, "{policy}: {id} ran until {ran}, not {end:?}");
            let real = world.bodies[&id].end.unwrap();
            assert!(real.abs_diff(end.0) <= SECOND, "{policy}: {id} ends at {real}, not {end:?}");
        }
    }
}

#[test]
fn scripts_that_are_measured_first_stay_within_the_budget() {
    for policy in ["fifo", "srtf", "pack", "fair"] {
        let (scripts, budget) = three(false);
        let mut world = World::new(policy, budget);
        world.run(&scripts);
        assert_eq!(policy == "fifo", world.gave_back == 0, "{policy}");
    }
}

#[test]
fn a_log_is_replayed_as_it_happened() {
    for (policy, says) in
        ["fifo", "srtf", "pack", "fair"].iter().flat_map(|p| [(p, false), (p, true)])
    {
        let (mut scripts, budget) = three(says);
        // The second one comes while the first has the token: who goes on depends on the policy.
        scripts[1].comes = 2 * scripts[0].iteration;
        let mut world = World::new(policy, budget);
        world.run(&scripts);
        let mut courses: BTreeMap<u64, Course> = BTreeMap::new();
        for Event { at_ns, what } in &world.log {
            Course::follow(&mut courses, what, *at_ns).unwrap();
        }
        let again = replay::events(&courses, find(policy).unwrap(), Bytes(budget));
        assert_eq!(again, world.log, "{policy}");
        let outcome = replay::outcome(&courses, &again, true, Some(Bytes(budget)));
        let ends: Vec<u64> = outcome.jobs.iter().map(|job| job.end.0).collect();
        assert_eq!(ends, world.bodies.values().map(|b| b.end.unwrap()).collect::<Vec<_>>());
        assert!(outcome.harm.is_none() && outcome.proved > 0, "{policy}: {:?}", outcome.harm);
        let most = outcome.moments.iter().map(|moment| moment.promised()).max().unwrap();
        let less = Some(most - Bytes(1));
        assert!(replay::outcome(&courses, &again, false, less).harm.is_some());
    }
}

#[test]
fn memory_is_given_back_only_where_the_next_needs_it() {
    let (scripts, _) = three(true);
    let mut world = World::new("fair", 800 + 1200 + 600);
    world.run(&scripts);
    assert_eq!(world.gave_back, 0);
}

#[test]
fn a_script_that_fits_only_alone_goes_on_to_its_end_while_others_wait() {
    let script =
        |comes, needs| Script { comes, iteration: SECOND, iterations: 4, needs, says: false };
    // Beside what the second keeps the first can't run: the second ends before it goes on.
    let mut world = World::new("fair", 1000);
    world.run(&[script(0, (100, 800)), script(1, (300, 100))]);
    assert_eq!(world.order_of_ends(), [2, 1]);
}

fn one(policy: &str) -> Tokens {
    let mut tokens = Tokens::new(Bytes(1000), find(policy).unwrap(), None);
    let asked = Asked { needs: Some((100, 300)), work_ns: None };
    tokens.came(1, "one", asked, Nanos(0)).unwrap();
    assert_eq!(tokens.take().say, [(1, Say::Go { kept: true, most_bytes: None })]);
    tokens
}

#[test]
fn a_token_that_is_held_too_long_goes_on_and_comes_back() {
    let mut tokens = one("fair");
    let asked = Asked { needs: Some((100, 300)), work_ns: None };
    tokens.came(2, "two", asked, Nanos(5)).unwrap();
    assert_eq!(tokens.take().say, [(1, Say::Back)]);
    tokens.passed(LEAST);
    assert_eq!(tokens.take().say, [], "an iteration was never seen, so it may take ten minutes");
    tokens.passed(FIRST + Nanos(6));
    let next = tokens.take();
    assert_eq!(next.say, [(2, Say::Go { kept: false, most_bytes: None })]);
    assert!(next.notes[0].contains("one has held the token"), "{:?}", next.notes);
    // It ends its iteration after all, and waits for its turn.
    let ended = Ended { holds_bytes: 100, peak_bytes: 400, waits: true };
    tokens.ended(1, ended, FIRST + Nanos(7)).unwrap();
    assert_eq!(tokens.take().say, []);
    tokens.ended(2, ended, FIRST + Nanos(8)).unwrap();
    assert_eq!(tokens.take().say, [(1, Say::Go { kept: false, most_bytes: None })]);
}

#[test]
fn a_script_that_dies_with_the_token_frees_its_lane() {
    let mut tokens = one("srtf");
    tokens.came(2, "two", Asked::default(), Nanos(5)).unwrap();
    tokens.take();
    tokens.left(1, Nanos(6));
    let most_bytes = Some(Bytes(1000));
    assert_eq!(tokens.take().say, [(2, Say::Go { kept: true, most_bytes })]);
    tokens.left(2, Nanos(7));
    assert_eq!((tokens.count(), tokens.scheduler.memory.lanes.used()), (0, Bytes(0)));
}

#[test]
fn one_that_does_not_give_memory_back_is_waited_for_only_so_long() {
    let mut tokens = Tokens::new(Bytes(800), find("fair").unwrap(), None);
    let asked = Asked { needs: Some((200, 300)), work_ns: None };
    tokens.came(1, "one", asked, Nanos(0)).unwrap();
    tokens.came(2, "two", asked, Nanos(1)).unwrap();
    tokens.take();
    tokens.ended(1, Ended { holds_bytes: 500, peak_bytes: 500, waits: true }, Nanos(9)).unwrap();
    assert_eq!(tokens.take().say, [(1, Say::GiveBack)]);
    tokens.passed(GIVING);
    assert_eq!(tokens.take().say, []);
    tokens.passed(GIVING + Nanos(10));
    assert_eq!(tokens.take().say, [(2, Say::Go { kept: false, most_bytes: None })]);
}

#[test]
fn what_can_not_be_true_is_refused() {
    let mut tokens = one("fair");
    let ended = Ended { holds_bytes: 1, peak_bytes: 1, waits: true };
    let found = Measured { persistent_bytes: 1, ephemeral_bytes: 1 };
    for error in [
        tokens.ended(7, ended, Nanos(1)).unwrap_err(),
        tokens.measured(1, found, Nanos(1)).unwrap_err(),
        tokens.ended(1, Ended { holds_bytes: u64::MAX, ..ended }, Nanos(1)).unwrap_err(),
        tokens.came(1, "again", Asked::default(), Nanos(1)).unwrap_err(),
        {
            let asked = Asked { needs: Some((u64::MAX, u64::MAX)), work_ns: None };
            tokens.came(3, "large", asked, Nanos(1)).unwrap_err()
        },
        {
            tokens.ended(1, ended, Nanos(2)).unwrap();
            tokens.came(2, "two", Asked { needs: Some((9, 9)), work_ns: None }, Nanos(2)).unwrap();
            tokens.ended(2, ended, Nanos(3)).unwrap_err()
        },
    ] {
        assert!(!error.is_empty());
    }
    assert_eq!(tokens.count(), 2);
}
