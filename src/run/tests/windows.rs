//! Jobs that pass a window on within their iterations compute what they compute alone.

use std::thread;

use super::*;
use crate::plan::together::{self, Memo};
use crate::plan::{Method, Share, overlap};
use crate::session::{End, Next, Pilot};
use crate::start::Shared;

/// Runs to the end without a pause.
struct On;

impl Pilot for On {
    fn next(&mut self, _: u32) -> Next {
        Next::Go
    }

    fn ended(&mut self, _: u32, _: &backend::Measured) {}
}

/// Runs all jobs of a plan at once in one arena.
fn side_by_side(
    graphs: &[Graph],
    plan: &crate::contract::Plan,
    settings: &Settings,
) -> Vec<Outcome> {
    let (arena, device) = (plan.figures.arena_bytes, profile());
    let shared = Shared::new(&settings.target, arena, &settings.host(&device)).unwrap();
    let run = |id: usize| {
        let job = &plan.jobs[id];
        let mut session =
            session::Job::new(kernels, &graphs[id], &device, settings, Some(&shared)).unwrap();
        session.member = Some((0, u32::try_from(id).unwrap()));
        let program = Program::placed(&graphs[id], job).unwrap();
        match session.session(job, arena, &program, 0, &mut On).unwrap() {
            End::Done(outcome) => *outcome,
            _ => panic!("job {id} did not run to its end"),
        }
    };
    thread::scope(|scope| {
        let all: Vec<_> = (0..graphs.len()).map(|id| scope.spawn(move || run(id))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

#[test]
fn random_jobs_that_pass_a_window_on_equal_their_unplanned_runs() {
    let (mut windows, mut stretches, mut waited) = (0, 0, Nanos::ZERO);
    for case in 0..8 {
        let graphs: Vec<Graph> =
            (0..2 + case % 2).map(|job| random_job(7 * case + job).0.graph).collect();
        let latencies: Vec<Vec<Latency>> = graphs.iter().map(latencies).collect();
        let jobs = graphs.iter().zip(&latencies).enumerate().map(|(id, (graph, latencies))| {
            together::Job {
                graph,
                file: (String::new(), format!("{case} {id}")),
                latencies,
                method: Method::default(),
                priority: 1000,
                swap_limit: Share::ALL,
            }
        });
        let device = profile();
        let asked = together::Jobs {
            jobs: jobs.collect(),
            device: &device,
            budget: device.memory_bytes,
            recorded_options: BTreeMap::new(),
        };
        let plan = overlap::minimum(&asked, &Memo::on_all_cores()).unwrap().together.plan;
        windows += usize::from(plan.jobs.iter().filter(|job| job.window.is_some()).count() > 1);
        for (graph, job) in graphs.iter().zip(&plan.jobs) {
            stretches += Program::placed(graph, job).unwrap().stretches.count();
        }
        let shaken = Settings { jitter: Nanos(80_000), poison: case % 4 != 0, ..settings(6) };
        for (graph, outcome) in graphs.iter().zip(side_by_side(&graphs, &plan, &shaken)) {
            let plain = go(graph, &super::plan(graph, Vec::new()), &settings(6)).unwrap();
            assert_eq!(outcome.checksum, plain.checksum, "case {case}");
            assert_eq!(bits(&outcome.losses), bits(&plain.losses), "case {case}");
            waited += outcome.window_ns;
        }
    }
    assert!(windows > 5 && stretches > 3 * windows, "{windows} windows, {stretches} stretches");
    assert!(waited > Nanos::ZERO, "no job ever waited for a window");
}
