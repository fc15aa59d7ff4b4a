//! What must hold of lanes, their addresses and the checker.

use rand_core::Rng;
use rand_pcg::Pcg64;

use super::super::check::{Picture, Resident, check};
use super::super::lanes::{Join, Lanes, Mode};
use super::super::layout::Layout;
use super::super::memory::Need;
use super::GIB;
use crate::units::{Bytes, id32};

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
        let arena = Bytes(capacity);
        let mode = [Mode::Paper, Mode::Neap, Mode::AsReleased][below(3) as usize];
        let mut lanes = Lanes::new(arena, mode, 1 + below(6) as usize);
        let mut layout = Layout::new(arena);
        let mut needs: Vec<Need> = Vec::new();
        for _ in 0..1000 {
            let size = |below: &mut dyn FnMut(u64) -> u64| {
                let large = below(4) == 0;
                Bytes(below(if large { capacity } else { capacity / 8 }))
            };
            let (change, count) = (below(10), lanes.residents().len());
            if change < 5 {
                let need = (size(&mut below), size(&mut below));
                needs.push(need);
                let join = [Join::Own, Join::Share, Join::Serve][below(3) as usize];
                let got = lanes.admit(needs.len() as u32 - 1, need, join);
                refused += u64::from(got.is_none());
                if let Some(lane) = got.filter(|_| join == Join::Own) {
                    let members = lanes.lanes()[&lane].members.len();
                    assert_eq!(members, 1, "seed {seed}: not a lane of its own");
                }
                assert_eq!(lanes.residents().len(), count + usize::from(got.is_some()));
            }
            let mut any = || lanes.residents().keys().nth(below(64) as usize % count.max(1));
            if let Some(&id) = if change < 5 { None } else { any() } {
                let had = needs[id as usize];
                match change {
                    5 | 6 => lanes.leave(id),
                    7 => lanes.park(id),
                    8 => {
                        let mut more = |bytes| bytes + Bytes(below(capacity / 16));
                        let more = (more(had.0), more(had.1));
                        let in_lane = lanes.lane_of(id).is_some();
                        if lanes.grow(id, more) {
                            assert!(in_lane, "seed {seed}: a job without a lane has no iteration");
                            grown += 1;
                            needs[id as usize] = more;
                        }
                    }
                    _ => _ = lanes.admit(id, had, Join::Share),
                }
            }
            packed += layout.follow(&lanes).defragmentations;
            done += 1;
            for (&id, (persistent, _)) in lanes.residents() {
                let asked = needs[id as usize].0;
                assert!(*persistent >= asked, "job {id} asked for {asked}, holds {persistent}");
            }
            let picture = lanes.picture(arena, |id| needs[id as usize], |item| layout.at(item));
            let lie = picture.residents.iter().all(|r| r.at.is_some());
            let lie = lie && picture.lanes.iter().all(|l| l.2.is_some());
            assert!(lie, "seed {seed}: something lies nowhere");
            if let Err(why) = check(&picture) {
                panic!("seed {seed}, change {done}: {why}");
            }
        }
    }
    println!("{done} changes: {grown} growths, {refused} refusals, {packed} defragmentations");
    assert!(grown > 0 && refused > 0 && packed > 0);
}

/// Algorithm 1 as the paper prints it: joins the best lane without looking at persistent memory.
fn as_printed(device: &mut Picture, persistent: u64, ephemeral: u64) -> bool {
    let lanes = &mut device.lanes;
    let held = persistent + device.residents.iter().map(|r| r.persistent).sum::<u64>();
    let sizes: u64 = lanes.iter().map(|l| l.1).sum();
    let best =
        (0..lanes.len()).filter(|&at| lanes[at].1 >= ephemeral).min_by_key(|&at| lanes[at].1);
    let safe = |&at: &usize| held + sizes - lanes[at].1 + ephemeral <= device.capacity;
    let lane = if held + sizes + ephemeral <= device.capacity {
        lanes.push((lanes.len() as u32, ephemeral, None));
        lanes.len() - 1
    } else if let Some(best) = best {
        best
    } else if let Some(at) = (0..lanes.len()).find(safe) {
        lanes[at].1 = ephemeral;
        at
    } else {
        return false;
    };
    let lane = Some(lane as u32);
    device.residents.push(Resident { persistent, at: None, ephemeral, lane });
    true
}

#[test]
fn the_algorithm_as_printed_is_caught_and_ours_refuses() {
    let mut printed = Picture { capacity: 16, ..Picture::default() };
    let mut ours = Lanes::new(Bytes(16), Mode::Paper, 8);
    for (persistent, ephemeral) in [(6, 9), (5, 4)] {
        assert!(as_printed(&mut printed, persistent, ephemeral));
        let id = ours.residents().len() as u32;
        let right = ours.admit(id, (Bytes(persistent), Bytes(ephemeral)), Join::Share).is_some();
        let safe = check(&printed).is_ok();
        assert_eq!(safe, right, "the checker and the algorithm made right must agree");
    }
    assert_eq!(ours.residents().len(), 1);
}

#[test]
fn each_branch_of_algorithm_1_is_reached() {
    let mut lanes = Lanes::new(Bytes(100), Mode::Paper, 8);
    let mut admit = |job, persistent, ephemeral| {
        let lane = lanes.admit(job, (Bytes(persistent), Bytes(ephemeral)), Join::Share);
        (lane, lanes.free())
    };
    // Two lanes are opened.
    assert_eq!(admit(0, 10, 40), (Some(0), Bytes(50)));
    assert_eq!(admit(1, 10, 20), (Some(1), Bytes(20)));
    // There is no room for a third: the smallest lane that fits is joined.
    assert_eq!(admit(2, 10, 15), (Some(1), Bytes(10)));
    // None is large enough: the smallest that can be is widened.
    assert_eq!(admit(3, 5, 45), (Some(0), Bytes(0)));
    // Then a job would not be safe on any branch.
    assert_eq!(admit(4, 1, 1), (None, Bytes(0)));
}

/// Where a lane's jobs do not take turns, two of them would run in it at once.
#[test]
fn a_job_that_needs_a_lane_of_its_own_joins_none_in_the_released_code() {
    let mut lanes = Lanes::new(Bytes(16 * GIB), Mode::AsReleased, 8);
    let mut admit = |job, join| lanes.admit(job, (Bytes::ZERO, Bytes(10 * GIB)), join);
    assert_eq!(admit(0, Join::Own), Some(0));
    assert_eq!(admit(1, Join::Own), None);
    assert_eq!(admit(1, Join::Share), Some(0));
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

/// Persistent and ephemeral bytes of a job, and its iterations.
type Progressive = (u64, u64, u32);

/// Jobs that take `step` bytes at a time, in turn, as frameworks do (Salus's Fig. 6, without
/// times). With `lanes`, no job starts an iteration that would break the safety condition. Returns
/// the jobs that hold memory and wait for each other's for ever; `None` if all jobs end.
fn deadlock(capacity: u64, jobs: &[Progressive], step: u64, lanes: bool) -> Option<Vec<usize>> {
    let mut admission = Lanes::new(Bytes(capacity), Mode::Neap, 1);
    let mut left: Vec<u32> = jobs.iter().map(|j| j.2).collect();
    let mut held = vec![0u64; jobs.len()];
    let mut runner: Option<usize> = None;
    while left.iter().any(|left| *left > 0) {
        let mut moved = false;
        for (at, &(persistent, ephemeral, _)) in jobs.iter().enumerate() {
            if left[at] == 0 {
                continue;
            }
            if lanes {
                let need = (Bytes(persistent), Bytes(ephemeral));
                if admission.admit(id32(at), need, Join::Share).is_none()
                    || *runner.get_or_insert(at) != at
                {
                    continue;
                }
            }
            let want = (persistent + ephemeral - held[at]).min(step);
            if held.iter().sum::<u64>() + want > capacity {
                continue;
            }
            held[at] += want;
            moved = true;
            if held[at] == persistent + ephemeral {
                // The iteration ends: the job gives its ephemeral bytes back, and after its last
                // iteration all its bytes.
                left[at] -= 1;
                held[at] = if left[at] == 0 { 0 } else { persistent };
                runner = None;
                if left[at] == 0 {
                    admission.leave(id32(at));
                }
            }
        }
        if !moved {
            return Some((0..jobs.len()).filter(|&j| left[j] > 0 && held[j] > 0).collect());
        }
    }
    None
}

#[test]
fn progressive_allocation_deadlocks_without_lanes_only() {
    let two = [(2, 10, 5); 2];
    assert_eq!(deadlock(16, &two, 1, false), Some(vec![0, 1]));
    assert_eq!(deadlock(16, &two, 1, true), None);
    let mut deadlocks = 0;
    for seed in 0..300 {
        let mut random = Pcg64::new(seed, 9);
        let mut below = |n: u64| random.next_u64() % n;
        let count = 2 + below(5);
        let mut job = |_| (below(20), 1 + below(80), 1 + below(6) as u32);
        let jobs: Vec<Progressive> = (0..count).map(&mut job).collect();
        let step = 1 + below(9);
        deadlocks += u32::from(deadlock(100, &jobs, step, false).is_some());
        assert_eq!(deadlock(100, &jobs, step, true), None, "seed {seed}");
    }
    assert!(deadlocks > 30, "{deadlocks}");
}

#[test]
fn the_released_code_keeps_a_reserve_and_adds_margins() {
    let lanes = Lanes::new(Bytes(1000), Mode::AsReleased, 1);
    assert_eq!(lanes.capacity(), Bytes(0), "more is kept in reserve");
    let lanes = Lanes::new(Bytes(16 * GIB), Mode::AsReleased, 1);
    assert_eq!(lanes.charge((Bytes(100), Bytes(90))), (Bytes(110), Bytes(100)));
}
