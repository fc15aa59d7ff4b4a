//! Random jobs through the scheduler, with simulated workers that obey its orders after random
//! times and check memory on their own; and real jobs through the whole service.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::sim::share::scheduler::{Coming, Needs, Order, Scheduler};
use crate::sim::share::spots::{Memory, Spot};
use crate::sim::share::{check, policy};
use crate::units::{Bytes, Nanos};

/// What a simulated worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Outside,
    Inside,
    Running,
    Leaving,
    Ending,
}

struct Body {
    needs: Needs,
    next: Option<Needs>,
    doing: Doing,
    spot: Option<Spot>,
    left: u32,
    time: u64,
    service: u64,
    ended: Option<u64>,
}

type Asked = (u64, u64, u32, u64, u32);

/// Needs of a job, of which one in three shares its lane.
fn needs(persistent: u64, ephemeral: u64, kind: usize, plan: usize) -> Needs {
    let shares = kind.is_multiple_of(3);
    Needs { persistent: Bytes(persistent), ephemeral: Bytes(ephemeral), shares, plan }
}

/// Simulated workers, which obey orders and check memory.
struct World {
    scheduler: Scheduler,
    bodies: BTreeMap<u32, Body>,
    arena: u64,
    one: bool,
    now: u64,
}

impl World {
    /// A device to which these jobs were submitted.
    fn with(policy: &str, arena: u64, turn: u64, jobs: &[Asked]) -> Self {
        let policy = policy::find(policy).unwrap();
        let scheduler = Scheduler::new(policy, Bytes(arena), Nanos(10_000), Nanos(turn));
        let one = policy.style.in_turn();
        let mut world = Self { scheduler, bodies: BTreeMap::new(), arena, one, now: 0 };
        (0..).zip(jobs).for_each(|(job, asked)| world.submit(job, *asked));
        world.obey();
        world
    }

    /// Submits a job: its persistent and ephemeral bytes, its iterations and the time of each, its
    /// utilisation.
    fn submit(&mut self, job: u32, (kept, ephemeral, left, time, utilisation): Asked) {
        let needs = needs(kept, ephemeral, utilisation as usize, 0);
        let coming = Coming { needs, utilisation, iterations: left, iteration: Nanos(time) };
        let taken = self.scheduler.submit(job, &coming, Nanos(self.now));
        assert_eq!(taken, kept + ephemeral <= self.arena);
        if taken {
            let (doing, next, spot, service, ended) = (Doing::Outside, None, None, 0, None);
            self.bodies.insert(job, Body { needs, next, doing, spot, left, time, service, ended });
        }
    }

    fn obey(&mut self) {
        for (job, order) in self.scheduler.decide(Nanos(self.now)) {
            let body = self.bodies.get_mut(&job).unwrap();
            let (from, to): (&[Doing], Doing) = match order {
                Order::Enter(..) => (&[Doing::Outside], Doing::Inside),
                Order::Go => (&[Doing::Inside], Doing::Running),
                Order::Leave => (&[Doing::Inside], Doing::Leaving),
                Order::Stop => (&[Doing::Inside, Doing::Outside], Doing::Ending),
            };
            assert!(from.contains(&body.doing), "{order:?}, and it is {:?}", body.doing);
            body.doing = to;
            if let Order::Enter(spot, plan) = order {
                body.needs = body.next.take_if(|n| n.plan == plan).unwrap_or(body.needs);
                assert_eq!(body.needs.plan, plan);
                body.spot = Some(spot);
            }
            assert!(body.left > 0 || to != Doing::Running);
            self.look();
        }
        let need = |job| self.bodies[&job].needs.bytes();
        let Memory { lanes, layout } = &self.scheduler.memory;
        check::check(&lanes.picture(Bytes(self.arena), need, |item| layout.as_ref()?.at(item)))
            .unwrap();
    }

    /// Checks that no two jobs share a byte.
    fn look(&self) {
        // A range, its job, and the lane that the job passes on within its iterations.
        let mut held: Vec<(u64, u64, u32, Option<u32>)> = Vec::new();
        for (job, body) in &self.bodies {
            let Some(spot) = body.spot else { continue };
            let passed = body.needs.shares.then_some(spot.lane);
            held.push((spot.persistent.0, spot.persistent.0 + body.needs.persistent.0, *job, None));
            if body.doing == Doing::Running {
                let end = spot.ephemeral.0 + body.needs.ephemeral.0;
                held.push((spot.ephemeral.0, end, *job, passed));
            }
        }
        held.retain(|h| h.0 < h.1);
        held.sort_unstable();
        assert!(held.iter().all(|h| h.1 <= self.arena));
        for (index, one) in held.iter().enumerate() {
            for two in held[index + 1..].iter().filter(|two| two.0 < one.1) {
                let passed = one.3.is_some() && one.3 == two.3;
                assert!(passed, "jobs {} and {} share bytes", one.2, two.2);
            }
        }
        let running = self.bodies.values().filter(|b| b.doing == Doing::Running).count();
        assert!(!self.one || running <= 1);
    }

    /// Makes one possible event happen, chosen by a number. Returns false if none is possible.
    fn happen(&mut self, choice: u64) -> bool {
        let busy = |b: &Body| matches!(b.doing, Doing::Running | Doing::Leaving | Doing::Ending);
        let can: Vec<u32> =
            self.bodies.iter().filter(|(_, b)| busy(b)).map(|(id, _)| *id).collect();
        let at = choice.checked_rem(can.len() as u64);
        let Some(job) = at.map(|at| can[at as usize]) else { return false };
        let body = self.bodies.get_mut(&job).unwrap();
        match body.doing {
            Doing::Running => {
                self.now += body.time;
                body.left -= 1;
                body.service += body.time;
                body.doing = Doing::Inside;
                self.scheduler.ran(job, Nanos(body.time));
                if body.left == 0 {
                    // The service learns of its end later.
                    self.obey();
                    self.end(job);
                }
            }
            Doing::Leaving => {
                (body.doing, body.spot) = (Doing::Outside, None);
                self.scheduler.left(job);
            }
            _ => self.end(job),
        }
        self.obey();
        true
    }

    /// Goes on until all jobs have ended. Returns when each ended.
    fn finish(&mut self) -> Vec<Option<u64>> {
        while self.happen(0) {}
        self.bodies.values().map(|body| body.ended).collect()
    }

    fn end(&mut self, job: u32) {
        let body = self.bodies.get_mut(&job).unwrap();
        (body.doing, body.spot, body.ended) = (Doing::Outside, None, Some(self.now));
        self.scheduler.ended(job);
    }

    fn replan(&mut self, job: u32, persistent: u64, ephemeral: u64) {
        let there = |b: &&mut Body| b.ended.is_none() && persistent + ephemeral <= self.arena;
        let Some(body) = self.bodies.get_mut(&job).filter(there) else { return };
        let plan = body.next.map_or(body.needs.plan, |n| n.plan) + 1;
        let needs = needs(persistent, ephemeral, plan, plan);
        body.next = Some(needs);
        self.scheduler.replanned(job, needs);
    }
}

#[derive(Clone, Debug)]
enum Act {
    Submit(Asked),
    Happen(u64),
    Stop(u32),
    Replan(u32, u64, u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => (0u64..60, 0u64..60, 1u32..6, 1u64..200, 1u32..1001).prop_map(Act::Submit),
        6 => any::<u64>().prop_map(Act::Happen),
        1 => (0u32..12).prop_map(Act::Stop),
        1 => (0u32..12, 0u64..60, 0u64..60).prop_map(|(job, p, e)| Act::Replan(job, p, e)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000,
        max_shrink_iters: 400,
        ..ProptestConfig::default()
    })]
    #[test]
    fn whatever_comes_and_goes_bytes_are_one_jobs_and_everyone_ends(
        acts in proptest::collection::vec(act(), 1..60),
        which in 0usize..5,
        turn in 0u64..300,
        seed in any::<u64>(),
    ) {
        let mut world = World::with(policy::ALL[which].name, 100, turn, &[]);
        let mut next = 0;
        for act in acts {
            match act {
                Act::Submit(asked) => {
                    world.submit(next, asked);
                    next += 1;
                }
                Act::Happen(choice) => _ = world.happen(choice),
                Act::Stop(job) => {
                    if world.bodies.get(&job).is_some_and(|b| b.ended.is_none()) {
                        world.scheduler.stop(job);
                    }
                }
                Act::Replan(job, p, e) => world.replan(job, p, e),
            }
            world.obey();
        }
        let mut steps = 0u64;
        while world.happen(seed.wrapping_mul(steps | 1) >> 7) {
            steps += 1;
            prop_assert!(steps < 3_000, "it goes on for ever");
        }
        for (job, body) in &world.bodies {
            let (policy, doing) = (policy::ALL[which].name, body.doing);
            prop_assert!(body.ended.is_some(), "{job} never ends under {policy}: {doing:?}");
        }
        prop_assert_eq!(world.scheduler.memory.lanes.used(), Bytes::ZERO);
    }
}

#[test]
fn shortest_remaining_time_goes_first_and_gives_way() {
    let mut world = World::with("srtf", 100, 0, &[(10, 20, 10, 10, 1000)]);
    world.happen(0);
    // It comes later with less work, and finishes before the first job continues.
    world.submit(1, (10, 20, 2, 10, 1000));
    world.submit(2, (10, 20, 4, 10, 1000));
    assert_eq!(world.finish(), [Some(160), Some(40), Some(80)]);
}

#[test]
fn first_in_first_out_waits_for_the_end() {
    let jobs = [(10, 20, 5, 10, 1000), (10, 20, 1, 10, 1000)];
    let mut world = World::with("fifo", 100, 0, &jobs);
    assert_eq!(world.scheduler.waits_for(1).as_deref(), Some("the jobs before it to end"));
    assert_eq!(world.finish(), [Some(50), Some(60)]);
}

#[test]
fn fair_gives_the_same_service_even_where_not_all_fit() {
    for (arena, turn) in [(100, 0), (40, 200)] {
        let jobs = [7, 8, 9].map(|time| (20, 10, 2000, time, 1000));
        let mut world = World::with("fair", arena, turn, &jobs);
        while world.now < 9_000 {
            assert!(world.happen(0));
        }
        let service: Vec<u64> = world.bodies.values().map(|b| b.service).collect();
        let (least, most) = (service.iter().min().unwrap(), service.iter().max().unwrap());
        assert!(most - least <= turn + 20, "{service:?}");
    }
}

#[test]
fn a_preempting_arrival_that_fits_only_alone_sends_out_what_is_kept() {
    let (present, arrival) = ((40, 30, 50, 10, 1000), (50, 45, 2, 10, 1000));
    let mut world = World::with("neap", 100, 0, &[present]);
    world.happen(0);
    world.submit(1, arrival);
    world.obey();
    // The running iteration ends, its job leaves, and the other one enters.
    while world.bodies[&1].doing != Doing::Running {
        assert!(world.happen(0));
    }
    assert_eq!((world.bodies[&0].doing, world.bodies[&0].spot), (Doing::Outside, None));
    let ended = world.finish();
    assert!(ended[1] < ended[0]);
    // Under srtf no memory moves: the job waits until the other one ends.
    let mut world = World::with("srtf", 100, 0, &[present]);
    world.submit(1, arrival);
    world.obey();
    assert!(world.scheduler.waits_for(1).unwrap().starts_with("room: it needs 50 B + 45 B"));
    let ended = world.finish();
    assert!(ended[1] > ended[0]);
}

#[test]
fn a_new_plan_is_taken_up_where_others_have_to_move_for_it() {
    let mut world = World::with("fair", 80, 0, &[(20, 20, 50, 10, 1000); 2]);
    world.replan(0, 30, 10);
    world.replan(1, 25, 10);
    for _ in 0..20 {
        assert!(world.happen(0));
    }
    assert!(world.bodies.values().all(|body| body.needs.plan == 1 && body.left > 30));
    assert!(world.finish().iter().all(Option::is_some));
}
