//! The two simulators of many jobs against each other: by iterations (`sim::share`) and by operators (`plan::live`), where
//! memory is ample, so that policies alone decide.

use crate::common::random::{self, Random};
use neap::device::{Link, builtin, latency, roofline};
use neap::job::json::sha256;
use neap::plan::live::{Arrival, Conditions, Live};
use neap::plan::together::Job as Planned;
use neap::plan::{Method, Share};
use neap::sim::share::engine::{Keep, simulate};
use neap::sim::share::jobs::Job;
use neap::sim::share::mechanism::Settings;
use neap::sim::share::policy;
use neap::units::{Bytes, Nanos};

const MIXES: u64 = 20;

/// Makespan, mean time to the first iteration, mean time to the end.
type Times = [u64; 3];

/// The same mix of jobs under each policy: the mix's number, the policy, and both simulators' times.
fn mix(seed: u64) -> Vec<(&'static str, Times, Times)> {
    let mut random = Random(seed ^ 0x7e50_1076);
    // Jobs are in place as soon as they launch: the simulator by iterations has no time for that.
    let mut device = builtin::find("host").expect("built in");
    let fast = 1 << 50;
    device.link = Link { h2d: fast, d2h: fast, overhead_ns: 0, ..device.link };
    let graphs: Vec<_> = (0..random.between(3, 9)).map(|_| random::graph(&mut random)).collect();
    let latencies: Vec<_> =
        graphs.iter().map(|graph| latency::latencies(graph, &device, None)).collect();
    let (mut arrivals, mut jobs, mut at) = (Vec::new(), Vec::new(), 0);
    for (index, (graph, latencies)) in graphs.iter().zip(&latencies).enumerate() {
        let iteration: Nanos = latencies.iter().map(|latency| latency.time).sum();
        let iterations = random.between(400, 2_000) as u32;
        let work = iteration.0 * u64::from(iterations);
        at += random.below(work as usize) as u64;
        arrivals.push(Arrival {
            job: Planned {
                graph,
                file: (String::new(), sha256(graph)),
                latencies,
                method: Method::default(),
                priority: 1000,
                swap_limit: Share::ALL,
            },
            submitted: Nanos(at),
            iterations,
        });
        jobs.push(Job {
            name: index.to_string().into(),
            submit: Nanos(at),
            work: Nanos(work),
            iteration,
            need: (Bytes(1), Bytes(1)),
            utilisation: roofline::utilisation(&graph.operators, latencies, &device),
            priority: 0,
            kill: None,
            rate: None,
            growth: None,
        });
    }
    let under = |policy: &'static policy::Policy| {
        let outcome = Live::new(&arrivals, &device, Bytes(1 << 50))
            .under(Conditions { policy, ..Conditions::default() })
            .run()
            .unwrap_or_else(|error| panic!("mix {seed}, {}: {error}", policy.name));
        let since = |of: fn(&neap::plan::live::Story) -> u64| {
            let times = jobs.iter().zip(&outcome.jobs).map(|(job, story)| of(story) - job.submit.0);
            times.sum::<u64>() / jobs.len() as u64
        };
        let ended = |story: &neap::plan::live::Story| story.ended.expect("it ends").0;
        let last = outcome.jobs.iter().map(ended).max().expect("a job");
        let fine = [last - jobs[0].submit.0, since(|story| story.iterations[0].0.0), since(ended)];
        let coarse = simulate(&jobs, policy, &Settings::default(), Keep::default()).figures(&jobs);
        (policy.name, fine, [coarse.makespan, coarse.queuing, coarse.completion])
    };
    policy::ALL.iter().map(under).collect()
}

#[test]
fn operators_and_iterations_agree_within_two_per_cent() {
    let mut worst = [0f64; 3];
    for seed in 0..MIXES {
        for (policy, fine, coarse) in mix(seed) {
            // A mean queuing time may be zero; it is part of the time to the end.
            let of = [coarse[0], coarse[2], coarse[2]];
            for index in 0..3 {
                let off = fine[index].abs_diff(coarse[index]) as f64 / of[index] as f64;
                worst[index] = worst[index].max(off);
                assert!(
                    off <= 0.02,
                    "mix {seed}, {policy}: by operators {fine:?} ns, by iterations {coarse:?} ns"
                );
            }
        }
    }
    println!("{MIXES} mixes, largest differences of makespan, queuing, completion: {worst:.4?}");
}
