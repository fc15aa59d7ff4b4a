//! Plans that are replaced between iterations: results stay, and a failing planner does no harm.

use super::*;

/// Runs with a link of 10 MB/s until iteration 4 and a fiftieth of that afterwards, and with a
/// planner of the test's own.
fn throttled(b: &Build, planner: &controller::Planner<'_>, iterations: u32) -> Outcome {
    let (mut job, arena) = plan(&b.graph, events(b));
    // Only the link should drift: operators are faster than this, and no sum falls by more than all
    // of it.
    job.latencies.iter_mut().for_each(|l| l.time = Nanos(10_000_000));
    let slow = 10_000_000;
    let link =
        Link { h2d: slow, d2h: slow, h2d_contended: slow, d2h_contended: slow, overhead_ns: 1000 };
    let plan = Plan {
        planner: "test".into(),
        options: BTreeMap::new(),
        device: Profile { link, ..profile() },
        budget: arena,
        jobs: vec![job],
        figures: crate::contract::Figures::default(),
    };
    let settings = Settings { throttle_later: vec![(4, 20)], ..settings(iterations) };
    let replan = Replan { planner, threshold_per_mille: 20_000 };
    let job = Job::new(kernels, &b.graph, &plan.device, &settings, None).unwrap();
    follow(job, &plan.device, (&plan.jobs[0], plan.budget), Some(&replan), &mut |_| {}).unwrap()
}

/// A plan without any copy, with the figures that the checker requires.
fn without_copies(b: &Build, device: &Profile, latencies: &[Latency]) -> Plan {
    let request = crate::plan::Request {
        file: (String::new(), crate::job::json::sha256(&b.graph)),
        ..crate::plan::Request::new(&b.graph, device, latencies, Bytes::ZERO)
    };
    crate::plan::unplanned(&request).unwrap().plan
}

#[test]
fn a_link_that_slows_down_brings_a_new_plan_and_the_same_results() {
    let b = net();
    let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &settings(12)).unwrap();
    let asked = std::sync::Mutex::new(Vec::new());
    let outcome = throttled(
        &b,
        &|device, latencies| {
            asked.lock().unwrap().push((device.link, latencies.len()));
            Ok(without_copies(&b, device, latencies))
        },
        12,
    );
    assert_eq!(bits(&outcome.losses), bits(&plain.losses));
    assert_eq!((&outcome.checksum, &outcome.state), (&plain.checksum, &plain.state));
    assert_eq!(outcome.iteration_ns.len(), 12);
    assert!(outcome.operator_ns.iter().all(|times| times.len() == 12));
    let change = outcome.changes.iter().find(|c| c.applied.is_some()).expect("the plan changes");
    assert!(change.seen >= 4 && change.applied > Some(change.seen), "{change:?}");
    assert!(
        change.drift.h2d_per_mille > 20_000 || change.drift.d2h_per_mille > 20_000,
        "{change:?}"
    );
    assert!(change.predicted_after < change.predicted_before, "{change:?}");
    // A copy of 12 kB takes 60 ms, and the new plan has none.
    assert!(
        change.measured_before > Some(Nanos(60_000_000))
            && change.measured_after < change.measured_before,
        "{change:?}"
    );
    let asked = asked.into_inner().unwrap();
    assert!(
        asked.iter().any(|(link, n)| link.h2d < 10_000_000 / 20 && *n == b.graph.operators.len()),
        "{asked:?}"
    );
}

#[test]
fn a_planner_that_fails_leaves_the_plan() {
    let b = net();
    let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &settings(8)).unwrap();
    let refusing = throttled(&b, &|_, _| Err("no room".to_owned()), 8);
    assert_eq!(refusing.checksum, plain.checksum);
    let because = |o: &Outcome| {
        o.changes.iter().filter_map(|c| c.kept_because.clone()).collect::<Vec<_>>().join("; ")
    };
    assert!(because(&refusing).contains("no room"), "{:?}", refusing.changes);
    let panicking = throttled(&b, &|_, _| panic!("a bug"), 8);
    assert!(because(&panicking).contains("panicked"), "{:?}", panicking.changes);
    let unsafe_plan = throttled(
        &b,
        &|device, latencies| {
            let mut plan = without_copies(&b, device, latencies);
            plan.jobs[0].placements.iter_mut().for_each(|p| p.offset = Bytes::ZERO);
            Ok(plan)
        },
        8,
    );
    assert_eq!(unsafe_plan.checksum, plain.checksum);
    assert!(because(&unsafe_plan).contains("refused"), "{:?}", unsafe_plan.changes);
}
