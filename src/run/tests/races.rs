//! Checks waits against the bytes that items touch. Two items that touch the same bytes, and of
//! which one writes, must run in a fixed order. Every wait must be needed for such an order.
//!
//! The test derives the order from streams and waits alone, and the bytes from graph and script.

use std::ops::Range;

use super::*;
use crate::backend::{Item, Script, Stream, Work};
use crate::plan::pinned;

/// Bytes of the arena (`false`) or the host store that an item touches, and whether it writes them.
type Access = (bool, Range<u64>, bool);

fn accesses(graph: &Graph, item: &Item) -> Vec<Access> {
    let range = |at: Bytes, bytes: Bytes| at.0..at.0 + bytes.0;
    let work = match &item.work {
        Work::Copy { device, host, bytes } => {
            let up = item.stream == Stream::H2d;
            return vec![(false, range(*device, *bytes), up), (true, range(*host, *bytes), !up)];
        }
        Work::Step(work) => work,
    };
    let operator = graph.operator(work.operator);
    let mut all: Vec<Access> =
        work.begins.iter().map(|&(at, bytes)| (false, range(at, bytes), true)).collect();
    let reads = operator.reads().map(|o| (o, false));
    for (operand, writes) in reads.chain(operator.writes().map(|o| (o, true))) {
        // A replay leaves some writes out.
        if let Some((_, at)) = work.addresses.iter().find(|(t, _)| *t == operand.tensor) {
            all.push((false, range(*at, Bytes(operand.end_byte().unwrap())), writes));
        }
    }
    all
}

/// Pairs of items that touch the same bytes, one of them writing.
fn conflicts(graph: &Graph, script: &Script) -> Vec<(usize, usize)> {
    let all: Vec<Vec<Access>> = script.items.iter().map(|i| accesses(graph, i)).collect();
    let meet = |a: &Access, b: &Access| {
        a.0 == b.0 && (a.2 || b.2) && a.1.start.max(b.1.start) < a.1.end.min(b.1.end)
    };
    let pairs = (0..all.len()).flat_map(|i| (0..i).map(move |j| (j, i)));
    pairs.filter(|&(i, j)| all[i].iter().any(|a| all[j].iter().any(|b| meet(a, b)))).collect()
}

/// The first of `pairs` whose order is left to chance.
fn race(script: &Script, pairs: &[(usize, usize)]) -> Option<(usize, usize)> {
    // By item, what has ended before it starts.
    let mut before = vec![vec![false; script.items.len()]; script.items.len()];
    let mut last = [None; 3];
    for &item in &script.order {
        let stream = script.items[item].stream.index();
        let mut known = vec![false; script.items.len()];
        for &earlier in script.items[item].waits.iter().chain(&last[stream]) {
            known[earlier] = true;
            known.iter_mut().zip(&before[earlier]).for_each(|(known, &more)| *known |= more);
        }
        before[item] = known;
        last[stream] = Some(item);
    }
    pairs.iter().copied().find(|&(a, b)| !before[a][b] && !before[b][a])
}

/// How many waits protect bytes, and how many only keep a copy's time.
fn waits(graph: &Graph, script: &mut Script, name: &str) -> (usize, usize) {
    let pairs = conflicts(graph, script);
    assert_eq!(race(script, &pairs), None, "{name}");
    let (mut needed, mut timed) = (0, 0);
    for item in 0..script.items.len() {
        for at in 0..script.items[item].waits.len() {
            let wait = script.items[item].waits.remove(at);
            if race(script, &pairs).is_some() {
                needed += 1;
            } else {
                let trigger = script.items[item].trigger;
                assert_eq!(trigger, Some(wait), "{name}: item {item} waits for nothing");
                timed += 1;
            }
            script.items[item].waits.insert(at, wait);
        }
    }
    (needed, timed)
}

/// The script of a plan; of one that puts host copies in as few bytes as it can, if `tight`.
fn made(graph: &Graph, (job, arena): &(JobPlan, Bytes), tight: bool) -> Script {
    let mut job = job.clone();
    if tight {
        let mut program = Program::placed(graph, &job).unwrap();
        job.host_slots = pinned::place(&mut program, &profile().link, Bytes(1)).unwrap().offsets;
    }
    let program = Program::placed(graph, &job).unwrap();
    executor::script(graph, &job, &program, *arena, &[]).unwrap()
}

#[test]
fn every_wait_that_protects_bytes_is_there_and_no_other() {
    let b = net();
    let (mut needed, mut timed) =
        waits(&b.graph, &mut made(&b.graph, &plan(&b.graph, events(&b)), false), "net");
    assert!(needed > 5, "{needed}");
    for case in 0..150 {
        let (b, events) = random_job(case);
        let mut script = made(&b.graph, &plan(&b.graph, events), case % 2 == 1);
        let counts = waits(&b.graph, &mut script, &format!("case {case}"));
        (needed, timed) = (needed + counts.0, timed + counts.1);
    }
    println!("{needed} waits protect bytes, and each shows when left out; {timed} keep a time");
    assert!(needed > 300 && timed > 0, "{needed}, {timed}");
}

/// A copy is submitted right after what it waits for, and not behind steps that come later: a
/// device's launch queue is limited.
#[test]
fn no_copy_is_submitted_behind_later_steps() {
    let mut copies = 0;
    for case in 0..150 {
        let (b, events) = random_job(case);
        let script = made(&b.graph, &plan(&b.graph, events), false);
        let mut place = vec![0; script.items.len()];
        script.order.iter().enumerate().for_each(|(at, &item)| place[item] = at);
        for stream in [Stream::H2d, Stream::D2h] {
            let mut before = None;
            for &copy in &script.streams[stream.index()] {
                let item = &script.items[copy];
                let after = item.waits.iter().chain(&item.trigger).chain(&before);
                let from = after.map(|&earlier| place[earlier] + 1).max().unwrap_or(0);
                let steps = script.order[from..place[copy]]
                    .iter()
                    .filter(|&&i| script.items[i].stream == Stream::Compute)
                    .count();
                assert!(steps <= 1, "case {case}: {steps} steps before copy {copy}");
                copies += 1;
                before = Some(copy);
            }
        }
    }
    assert!(copies > 300, "{copies}");
}
