//! What must hold of lanes and engine for every input.

use rand_core::Rng;
use rand_pcg::Pcg64;

use super::check::{Picture, Resident, check};
use super::contention::WHOLE;
use super::engine::{Keep, simulate};
use super::jobs::{Growth, Job};
use super::lanes::{Join, Lanes, Mode};
use super::layout::{Item, Layout};
use super::mechanism::{Mechanism, Settings};
use super::policy;
use super::progressive::{self, End};
use super::result::{Outcome, Verdict};
use crate::units::{Bytes, Nanos};

const GIB: u64 = 1 << 30;
const S: u64 = 1_000_000_000;

fn job(name: &str, submit: u64, work: u64, gib: (u64, u64)) -> Job {
    Job {
        name: name.into(),
        submit: Nanos(submit * S),
        work: Nanos(work * S),
        iteration: Nanos(S / 10),
        persistent: Bytes(gib.0 * GIB),
        ephemeral: Bytes(gib.1 * GIB),
        utilisation: WHOLE,
        priority: 0,
        kill: None,
        rate: None,
        growth: None,
    }
}

fn settings(mechanism: Mechanism, mode: Mode) -> Settings {
    Settings { mechanism, mode, ..Settings::default() }
}

fn run(jobs: &[Job], name: &str, settings: &Settings) -> Outcome {
    simulate(jobs, policy::find(name).unwrap(), settings, Keep::default())
}

/// What the lanes say, with the needs that were asked for, for the checker.
fn picture(capacity: u64, lanes: &Lanes, layout: &Layout, needs: &[(u64, u64)]) -> Picture {
    let at = |item: Item| layout.items().find(|i| i.0 == item).map(|i| i.1.0);
    let resident = |(id, persistent, lane): (u32, Bytes, Option<u32>)| {
        let (asked, ephemeral) = needs[id as usize];
        assert!(
            persistent.0 >= asked,
            "job {id} asked for {asked} persistent bytes and is held to {persistent}"
        );
        Resident { persistent: persistent.0, at: at(Item::Persistent(id)), ephemeral, lane }
    };
    Picture {
        capacity,
        residents: lanes.residents().map(resident).collect(),
        lanes: lanes.lanes().map(|(id, l)| (id, l.size.0, at(Item::Lane(id)))).collect(),
    }
}

#[test]
fn a_million_changes_are_safe_down_to_addresses() {
    let deep = std::env::var_os("NEAP_DEEP").is_some();
    let changes: u64 = if deep { 1_000_000 } else { 30_000 };
    let (mut done, mut grown, mut refused, mut packed) = (0, 0, 0, 0);
    for seed in 0.. {
        if done >= changes {
            break;
        }
        let mut random = Pcg64::new(seed, 3);
        let mut below = |n: u64| random.next_u64() % n.max(1);
        let capacity = 1000 + below(1 << 34);
        let mode = if below(2) == 0 { Mode::Paper } else { Mode::Neap };
        let mut lanes = Lanes::new(Bytes(capacity), mode, 1 + below(6) as usize);
        let mut layout = Layout::new(Bytes(capacity));
        let mut needs: Vec<(u64, u64)> = Vec::new();
        for _ in 0..1000 {
            let size = |below: &mut dyn FnMut(u64) -> u64| {
                let large = below(4) == 0;
                below(if large { capacity } else { capacity / 8 })
            };
            let resident = |lanes: &Lanes, n: u64| {
                lanes.residents().nth(n as usize % lanes.residents().count().max(1)).map(|r| r.0)
            };
            match below(10) {
                0..5 => {
                    let need = (size(&mut below), size(&mut below));
                    needs.push(need);
                    let join = [Join::Own, Join::Share, Join::Serve][below(3) as usize];
                    let before = lanes.residents().count();
                    let got =
                        lanes.admit(needs.len() as u32 - 1, Bytes(need.0), Bytes(need.1), join);
                    refused += u64::from(got.is_none());
                    assert_eq!(lanes.residents().count(), before + usize::from(got.is_some()));
                }
                5..7 => {
                    if let Some(id) = resident(&lanes, below(64)) {
                        lanes.leave(id);
                    }
                }
                7 => {
                    if let Some(id) = resident(&lanes, below(64)) {
                        lanes.park(id);
                    }
                }
                8 => {
                    if let Some(id) = resident(&lanes, below(64)) {
                        let more = (
                            needs[id as usize].0 + below(capacity / 16),
                            needs[id as usize].1 + below(capacity / 16),
                        );
                        let in_lane = lanes.residents().any(|r| r.0 == id && r.2.is_some());
                        if lanes.grow(id, Bytes(more.0), Bytes(more.1)) {
                            grown += 1;
                            needs[id as usize] =
                                if in_lane { more } else { (more.0, needs[id as usize].1) };
                        }
                    }
                }
                _ => {
                    if let Some(id) = resident(&lanes, below(64)) {
                        let need = needs[id as usize];
                        lanes.admit(id, Bytes(need.0), Bytes(need.1), Join::Share);
                    }
                }
            }
            packed += layout.follow(&lanes).defragmentations;
            done += 1;
            let picture = picture(capacity, &lanes, &layout, &needs);
            assert!(
                picture.residents.iter().all(|r| r.at.is_some())
                    && picture.lanes.iter().all(|l| l.2.is_some()),
                "seed {seed}: something lies nowhere"
            );
            if let Err(why) = check(&picture) {
                panic!("seed {seed}, change {done}: {why}");
            }
        }
    }
    println!("{done} changes: {grown} growths, {refused} refusals, {packed} defragmentations");
    assert!(grown > 0 && refused > 0 && packed > 0);
}

/// Algorithm 1 as the paper prints it: joins the best lane without looking at persistent memory.
struct Printed {
    capacity: u64,
    residents: Vec<Resident>,
    lanes: Vec<(u32, u64, Option<u64>)>,
}

impl Printed {
    fn admit(&mut self, persistent: u64, ephemeral: u64) -> bool {
        let held: u64 = self.residents.iter().map(|r| r.persistent).sum();
        let sizes: u64 = self.lanes.iter().map(|l| l.1).sum();
        let lane = if held + persistent + sizes + ephemeral <= self.capacity {
            self.lanes.push((self.lanes.len() as u32, ephemeral, None));
            self.lanes.len() - 1
        } else if let Some((at, _)) =
            self.lanes.iter().enumerate().filter(|(_, l)| l.1 >= ephemeral).min_by_key(|(_, l)| l.1)
        {
            at
        } else if let Some(at) = (0..self.lanes.len())
            .find(|&at| held + persistent + sizes - self.lanes[at].1 + ephemeral <= self.capacity)
        {
            self.lanes[at].1 = ephemeral;
            at
        } else {
            return false;
        };
        self.residents.push(Resident { persistent, at: None, ephemeral, lane: Some(lane as u32) });
        true
    }
}

#[test]
fn the_algorithm_as_printed_is_caught_and_ours_refuses() {
    let mut printed = Printed { capacity: 16, residents: Vec::new(), lanes: Vec::new() };
    let mut ours = Lanes::new(Bytes(16), Mode::Paper, 8);
    for (persistent, ephemeral) in [(6, 9), (5, 4)] {
        let admitted = printed.admit(persistent, ephemeral);
        assert!(admitted);
        let id = ours.residents().count() as u32;
        let right = ours.admit(id, Bytes(persistent), Bytes(ephemeral), Join::Share).is_some();
        let picture = Picture {
            capacity: 16,
            residents: printed.residents.clone(),
            lanes: printed.lanes.clone(),
        };
        assert_eq!(
            check(&picture).is_ok(),
            right,
            "the checker and the algorithm made right must agree"
        );
    }
    assert_eq!(ours.residents().count(), 1);
}

#[test]
fn each_branch_of_algorithm_1_is_reached() {
    let mut lanes = Lanes::new(Bytes(100), Mode::Paper, 8);
    let mut admit = |job, persistent, ephemeral| {
        let lane = lanes.admit(job, Bytes(persistent), Bytes(ephemeral), Join::Share);
        (lane, lanes.free())
    };
    // Two lanes are opened.
    assert_eq!(admit(0, 10, 40), (Some(0), Bytes(50)));
    assert_eq!(admit(1, 10, 20), (Some(1), Bytes(20)));
    // There is no room for a third: the smallest lane that fits is joined.
    assert_eq!(admit(2, 10, 15), (Some(1), Bytes(10)));
    // None is large enough: the largest is widened.
    assert_eq!(admit(3, 5, 45), (Some(0), Bytes(0)));
    // Then a job would not be safe on any branch.
    assert_eq!(admit(4, 1, 1), (None, Bytes(0)));
}

#[test]
fn the_checker_sees_each_kind_of_harm() {
    let resident =
        |persistent, at, ephemeral, lane| Resident { persistent, at: Some(at), ephemeral, lane };
    let good = Picture {
        capacity: 20,
        residents: vec![resident(5, 0, 6, Some(1)), resident(4, 5, 9, None)],
        lanes: vec![(1, 6, Some(14))],
    };
    check(&good).unwrap();
    type Change = fn(&mut Picture);
    let harm: [(&str, Change); 5] = [
        ("promised", |p| p.residents[1].persistent = 10),
        ("needs", |p| p.residents[0].ephemeral = 7),
        ("overlap", |p| p.residents[1].at = Some(4)),
        ("behind", |p| p.lanes[0].2 = Some(15)),
        ("does not exist", |p| p.residents[0].lane = Some(2)),
    ];
    for (word, change) in harm {
        let mut bad = good.clone();
        change(&mut bad);
        assert!(check(&bad).unwrap_err().contains(word), "{word}");
    }
}

#[test]
fn progressive_allocation_deadlocks_without_lanes_only() {
    let two = [(Bytes(2), Bytes(10), 5); 2];
    assert_eq!(progressive::run(Bytes(16), &two, Bytes(1), false), End::Deadlock(vec![0, 1]));
    assert_eq!(progressive::run(Bytes(16), &two, Bytes(1), true), End::Done);
    let mut deadlocks = 0;
    for seed in 0..300 {
        let mut random = Pcg64::new(seed, 9);
        let mut below = |n: u64| random.next_u64() % n;
        let jobs: Vec<_> = (0..2 + below(5))
            .map(|_| (Bytes(below(20)), Bytes(1 + below(80)), 1 + below(6) as u32))
            .collect();
        let step = Bytes(1 + below(9));
        deadlocks += u32::from(progressive::run(Bytes(100), &jobs, step, false) != End::Done);
        assert_eq!(progressive::run(Bytes(100), &jobs, step, true), End::Done, "seed {seed}");
    }
    assert!(deadlocks > 30, "{deadlocks}");
}

#[test]
fn equal_jobs_share_equally_and_the_total_is_constant() {
    // Salus, Fig. 11: 15 s alone, 15 s at a half, then thirds.
    let jobs = [job("a", 0, 60, (1, 1)), job("b", 15, 60, (1, 1)), job("c", 30, 60, (1, 1))];
    let ends: Vec<f64> = run(&jobs, "fair", &settings(Mechanism::Lanes, Mode::Neap))
        .jobs
        .iter()
        .map(|j| j.end.0 as f64 / 1e9)
        .collect();
    // a: 15 + 15/2 done at 30 s, 37.5 left at a third; b then has 15 left at a half; c the rest.
    for (end, want) in ends.iter().zip([142.5, 172.5, 180.0]) {
        assert!((end - want).abs() < 0.02 * 37.5 / 3.0, "{ends:?}");
    }
    // What everyone was served of each span of 5 s: all are ended at its end.
    let served = |until: u64, mode| {
        let ended = jobs.clone().map(|j| Job { kill: Some(Nanos(until * S).max(j.submit)), ..j });
        let outcome = run(&ended, "fair", &settings(Mechanism::Lanes, mode));
        outcome.jobs.iter().map(|j| j.served.0 as f64 / 1e9).collect::<Vec<_>>()
    };
    for mode in [Mode::Neap, Mode::Paper] {
        for from in (0..140).step_by(5) {
            let shares = served(from + 5, mode)
                .iter()
                .zip(served(from, mode))
                .map(|(b, a)| (b - a) / 5.0)
                .collect::<Vec<_>>();
            let there = 1 + usize::from(from >= 15) + usize::from(from >= 30);
            let want = 1.0 / there as f64;
            for (job, share) in shares.iter().enumerate() {
                let want = if job < there { want } else { 0.0 };
                assert!((share - want).abs() <= 0.02 * want, "{mode:?}, from {from} s: {shares:?}");
            }
            assert!(
                (shares.iter().sum::<f64>() - 1.0).abs() < 0.001,
                "{mode:?}, from {from} s: {shares:?}"
            );
        }
    }
}

#[test]
fn a_hole_that_is_too_small_is_made_larger_and_that_takes_time() {
    // a's hole below b and what lies free above b: 11 GiB in two pieces of which neither takes c's
    // 7.
    let mut jobs = [job("a", 0, 10, (4, 1)), job("b", 0, 60, (4, 1)), job("c", 5, 10, (7, 1))];
    jobs.iter_mut().for_each(|j| j.utilisation = 100);
    // a ends when b is within an iteration.
    jobs[0].work = Nanos(10_050_000_000);
    let settings = settings(Mechanism::Lanes, Mode::Neap);
    let outcome = simulate(
        &jobs,
        policy::find("pack").unwrap(),
        &settings,
        Keep { proof: true, ..Keep::default() },
    );
    assert_eq!(
        (outcome.harm.clone(), outcome.packs, outcome.packed),
        (None, 1, u128::from(4 * GIB))
    );
    // Every byte is read and written; before that, b's iteration ends.
    let copies = (2 * 4 * GIB).div_ceil(732);
    let near =
        |end: Nanos, want: u64| assert!(end.0.abs_diff(want) < 10, "{end} is not {}", Nanos(want));
    near(outcome.jobs[0].end, 10_050_000_000);
    near(outcome.jobs[1].end, 60 * S + copies);
    near(outcome.jobs[2].end, 10_050_000_000 + 50_000_000 + copies + 10 * S);
}

/// A job that needs `gib` from the end of its third iteration on.
fn outgrowing(name: &str, work: u64, admitted: (u64, u64), gib: (u64, u64)) -> Job {
    let growth = Growth { need: (Bytes(gib.0 * GIB), Bytes(gib.1 * GIB)), after: 3 };
    Job { growth: Some(Box::new(growth)), utilisation: 100, ..job(name, 0, work, admitted) }
}

#[test]
fn who_outgrows_its_admission_grows_or_leaves_and_waits() {
    let explained = Keep { reasons: Some(0), proof: true, ..Keep::default() };
    let lanes = settings(Mechanism::Lanes, Mode::Neap);
    let go = |jobs: &[Job], name: &str, settings: &Settings| {
        simulate(jobs, policy::find(name).unwrap(), settings, explained)
    };
    let other = Job { utilisation: 100, ..job("b", 0, 20, (2, 7)) };
    // There is room.
    let outcome = go(&[outgrowing("a", 10, (2, 3), (2, 5)), other.clone()], "pack", &lanes);
    assert_eq!(
        (outcome.grew, outcome.outgrown, outcome.jobs[0].end.0, outcome.jobs[0].switches),
        (1, 0, 10 * S, 0)
    );
    assert!(
        outcome.reasons.iter().any(|r| r.0.0.abs_diff(3 * S / 10) < 10 && r.1.contains("goes on")),
        "{:?}",
        outcome.reasons
    );
    // There is none before the other one ends; what it did stands, and what it holds goes to the
    // host and comes back.
    let outcome = go(&[outgrowing("a", 10, (2, 3), (3, 5)), other.clone()], "pack", &lanes);
    assert_eq!(
        (outcome.grew, outcome.outgrown, outcome.jobs[0].switches, outcome.harm.clone()),
        (1, 1, 1, None)
    );
    assert_eq!(outcome.moved, u128::from(5 * GIB), "2 GiB out, 3 GiB in");
    assert_eq!(outcome.jobs[1].end.0, 20 * S);
    let end = outcome.jobs[0].end.0;
    assert!((29_700_000_000..30_200_000_000).contains(&end), "{end}");
    assert!(
        outcome.reasons.iter().any(|r| r.1.contains("leaves and waits with its true need")),
        "{:?}",
        outcome.reasons
    );
    // In a process of its own it is the same.
    let outcome = go(
        &[outgrowing("a", 10, (2, 3), (3, 5)), other.clone()],
        "pack",
        &settings(Mechanism::Mps, Mode::Neap),
    );
    assert_eq!((outcome.outgrown, outcome.jobs[0].verdict), (1, Verdict::Done));
    // More than the device has.
    let outcome = go(&[outgrowing("a", 10, (2, 3), (3, 14)), other.clone()], "pack", &lanes);
    assert_eq!((outcome.jobs[0].verdict, outcome.jobs[0].served.0), (Verdict::Outgrew, 3 * S / 10));
    assert!(
        outcome.jobs[0].end.0.abs_diff(3 * S / 10) < 10 && outcome.jobs[1].end.0 == 20 * S,
        "{outcome:?}"
    );
    // Under neap a waiting job lends its room first.
    let waits = Job { utilisation: WHOLE, ..job("w", 0, 100, (6, 6)) };
    let mut grows = outgrowing("a", 10, (2, 3), (6, 6));
    (grows.submit, grows.utilisation) = (Nanos(5 * S), WHOLE);
    let outcome = go(&[waits, grows], "neap", &lanes);
    assert_eq!(
        (outcome.grew, outcome.outgrown, outcome.moved),
        (1, 0, u128::from(12 * GIB)),
        "6 GiB out and in"
    );
    // What it outgrows after its end never matters.
    let short = Job { work: Nanos(3 * S / 10), ..outgrowing("a", 1, (2, 3), (2, 9)) };
    assert_eq!(go(&[short, other], "pack", &lanes).grew, 0);
}

#[test]
fn services_and_turns_fit_beside_each_other() {
    // 6 GiB of turns beside a service of 10: with a second job of 5 they move in turns, and one of
    // 7 waits for the service's end.
    let mut service = job("s", 0, 50, (8, 2));
    service.rate = Some(1000);
    let jobs = [service, job("a", 0, 20, (4, 2)), job("b", 1, 20, (3, 2)), job("c", 2, 20, (7, 2))];
    let outcome = simulate(
        &jobs,
        policy::find("fair").unwrap(),
        &settings(Mechanism::Lanes, Mode::Neap),
        Keep { proof: true, ..Keep::default() },
    );
    assert_eq!(outcome.harm, None);
    assert_eq!(outcome.jobs[2].start, Some(Nanos(S)));
    assert_eq!(outcome.jobs[3].start, Some(Nanos(50 * S)));
    assert!(
        outcome.moved > 0 && outcome.jobs.iter().all(|j| j.verdict == Verdict::Done),
        "{outcome:?}"
    );
}

#[test]
fn an_arrival_that_fits_only_alone() {
    let jobs = [job("long", 0, 100, (4, 6)), job("big", 10, 5, (8, 7))];
    // neap: at the end of the iteration what is persistent of the resident goes to the host, and
    // comes back for its next turn.
    let outcome = run(&jobs, "neap", &settings(Mechanism::Lanes, Mode::Neap));
    assert_eq!(outcome.jobs[0].switches, 1);
    assert_eq!(outcome.moved, u128::from(8 * GIB), "4 GiB out and in");
    let ends = [outcome.jobs[0].end.0, outcome.jobs[1].end.0];
    assert!(
        (15 * S..16 * S).contains(&ends[1]) && (105 * S..106 * S).contains(&ends[0]),
        "{ends:?}"
    );
    // Without moving (the paper's mode, and srtf always) it stays, and the arrival waits for its
    // end.
    for (name, mode) in [("neap", Mode::Paper), ("srtf", Mode::Neap)] {
        let outcome = run(&jobs, name, &settings(Mechanism::Lanes, mode));
        assert_eq!(
            (outcome.jobs[0].end.0, outcome.jobs[1].start.unwrap().0, outcome.moved),
            (100 * S, 100 * S, 0),
            "{name}"
        );
    }
}

#[test]
fn no_job_starves_longer_than_the_stated_bound() {
    // Jobs of 2 s come every 2 s for ever: shortest-first alone would never come back to the long
    // one.
    let mut jobs: Vec<Job> = (0..2000).map(|i| job(&format!("s{i}"), i * 2, 2, (1, 4))).collect();
    jobs.insert(1, job("long", 0, 50, (2, 8)));
    for mode in [Mode::Neap, Mode::Paper] {
        let patient = Settings { patience: Nanos(300 * S), ..settings(Mechanism::Lanes, mode) };
        let end = run(&jobs, "neap", &patient).jobs[1].end.0;
        // Patience, the work left of what is older (one short job) or resident, an iteration,
        // copies; then its own work.
        assert!(end <= (300 + 2 + 50 + 1) * S, "{mode:?}: {end}");
        let starved = run(&jobs, "srtf", &patient).jobs[1].end.0;
        assert!(starved > 4000 * S, "srtf: {starved}");
    }
}

#[test]
fn priorities_kills_and_verdicts() {
    let mut jobs = vec![
        job("a", 0, 10, (1, 1)),
        job("b", 0, 10, (1, 1)),
        job("never", 0, 1, (10, 10)),
        job("empty", 0, 0, (1, 1)),
    ];
    jobs[1].priority = 1;
    jobs[0].kill = Some(Nanos(12 * S));
    for name in policy::names() {
        for (_, mechanism) in super::mechanism::NAMES {
            let outcome = run(&jobs, name, &settings(mechanism, Mode::Neap));
            let verdicts: Vec<Verdict> = outcome.jobs.iter().map(|j| j.verdict).collect();
            assert_eq!(
                verdicts[1..],
                [Verdict::Done, Verdict::NeverFits, Verdict::Empty],
                "{name} {mechanism:?}"
            );
            assert_eq!(
                (verdicts[0], outcome.jobs[0].end.0),
                (Verdict::Killed, 12 * S),
                "{name} {mechanism:?}"
            );
        }
    }
    let outcome = run(&jobs, "srtf", &settings(Mechanism::Lanes, Mode::Neap));
    assert_eq!(outcome.jobs[1].end.0, 10 * S, "the higher priority goes first");
}

#[test]
fn every_job_ends_once_no_time_is_made_up_and_every_change_is_proved() {
    let (mut proved, mut packs, mut outgrown) = (0, 0, 0);
    for seed in 0..if std::env::var_os("NEAP_DEEP").is_some() { 60 } else { 12 } {
        let mut random = Pcg64::new(seed, 5);
        let mut below = |n: u64| random.next_u64() % n;
        let mut jobs: Vec<Job> = (0..40)
            .map(|i| {
                let mut job =
                    job(&format!("{i}"), below(200), 1 + below(60), (below(6), 1 + below(9)));
                job.utilisation = 1 + below(1000) as u32;
                job.iteration = Nanos(1 + below(S));
                job.priority = below(2) as i32;
                if below(10) == 0 {
                    job.rate = Some(500);
                } else if below(4) == 0 {
                    let need = (
                        job.persistent + Bytes(below(4) * GIB),
                        job.ephemeral + Bytes(below(4) * GIB),
                    );
                    job.growth = Some(Box::new(Growth { need, after: 1 + below(20) }));
                }
                job
            })
            .collect();
        jobs.sort_by_key(|j| j.submit);
        for name in policy::names() {
            for (_, mechanism) in super::mechanism::NAMES {
                for mode in [Mode::Neap, Mode::Paper, Mode::AsReleased] {
                    let settings =
                        Settings { patience: Nanos(100 * S), ..settings(mechanism, mode) };
                    let go = || {
                        simulate(
                            &jobs,
                            policy::find(name).unwrap(),
                            &settings,
                            Keep { proof: true, ..Keep::default() },
                        )
                    };
                    let outcome = go();
                    assert_eq!(outcome, go());
                    assert_eq!(outcome.harm, None, "seed {seed}, {name}, {mechanism:?}, {mode:?}");
                    (proved, packs, outgrown) = (
                        proved + outcome.proved,
                        packs + outcome.packs,
                        outgrown + outcome.outgrown,
                    );
                    for (job, result) in jobs.iter().zip(&outcome.jobs) {
                        let what = format!(
                            "seed {seed}, {name}, {mechanism:?}, {mode:?}, job {}",
                            job.name
                        );
                        match result.verdict {
                            Verdict::Done => assert!(
                                result.end.0 + job.iteration.0 / 1000 + 1000
                                    >= result.start.unwrap().0 + job.work.0,
                                "{what}: too soon"
                            ),
                            Verdict::NeverFits => {}
                            Verdict::Outgrew => assert!(job.growth.is_some(), "{what}"),
                            other => panic!("{what}: {other:?}"),
                        }
                    }
                    // Compute in use is work done: no mechanism creates any.
                    let asked: u128 =
                        jobs.iter().map(|j| u128::from(j.work.0) * u128::from(j.utilisation)).sum();
                    assert!(
                        outcome.busy <= asked * 1000 / 990 + u128::from(800 * S) * 1000 * 4,
                        "seed {seed}, {name}, {mechanism:?}"
                    );
                }
            }
        }
    }
    println!("{proved} changes proved, {packs} defragmentations, {outgrown} jobs that left");
    assert!(proved > 0 && packs > 0 && outgrown > 0);
}
