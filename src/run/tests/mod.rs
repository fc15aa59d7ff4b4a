//! Small graphs with kernels of their own: planned runs equal unplanned ones, whatever the copies
//! do.

use std::collections::BTreeMap;

use super::backend::host::kernels::Kernel;
use super::backend::operators::KernelError;
use super::backend::operators::view::{Call, Operand as Seen, View};
use super::*;
use crate::contract::{Event, Latency, Source, Trigger};
use crate::device::Rates;
use crate::job::{Arg, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::plan::emit::Emitted;
use crate::plan::place;
use crate::units::{OpId, TensorId};

mod jobs;
mod races;
mod replan;
mod windows;

use jobs::*;

#[test]
fn planned_equals_unplanned() {
    let b = net();
    let bare = plan(&b.graph, Vec::new());
    let plain = go(&b.graph, &bare, &settings(4)).unwrap();
    assert_eq!((plain.losses.len(), plain.iteration_ns.len(), plain.checksum.len()), (4, 4, 64));
    assert!(plain.losses.windows(2).all(|w| w[0] != w[1]), "{:?}", plain.losses);
    assert_eq!(plain.peak_bytes, bare.1);
    assert_eq!(plain.late_copies, 0);
    assert!(plain.operator_ns.iter().all(|times| times.len() == 4));
    let planned = plan(&b.graph, events(&b));
    for poison in [false, true] {
        let with = go(&b.graph, &planned, &Settings { poison, ..settings(4) }).unwrap();
        assert_eq!(bits(&with.losses), bits(&plain.losses));
        assert_eq!(with.checksum, plain.checksum);
        assert_eq!(with.state, plain.state);
        assert!(with.peak_bytes <= planned.1 && with.peak_bytes > Bytes::ZERO);
        assert!(with.resident_peak_bytes <= with.peak_bytes, "{:?}", with.resident_peak_bytes);
    }
}

#[test]
fn a_job_that_runs_for_long_keeps_some_times_of_each_operator() {
    use super::executor::KEPT;
    let b = net();
    let iterations = u32::try_from(KEPT).unwrap() + 300;
    let ran = go(&b.graph, &plan(&b.graph, Vec::new()), &settings(iterations)).unwrap();
    assert_eq!((ran.timed_iterations, ran.losses.len()), (iterations, iterations as usize));
    assert!(ran.operator_ns.iter().all(|times| times.len() == KEPT));
}

fn bits(losses: &[f32]) -> Vec<u32> {
    losses.iter().map(|l| l.to_bits()).collect()
}

#[test]
fn late_copies_cost_time_only() {
    let b = net();
    let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &settings(3)).unwrap();
    let slow = Settings { throttle_per_mille: 5, ..settings(3) };
    let late = go(&b.graph, &plan(&b.graph, events(&b)), &slow).unwrap();
    assert!(late.late_copies >= 3, "{}", late.late_copies);
    assert_eq!(late.checksum, plain.checksum);
    // 12 kB at 5 MB/s take 2.4 ms, and several such copies wait for each other.
    assert!(late.iteration_ns.iter().all(|t| *t > Nanos(6_000_000)), "{:?}", late.iteration_ns);
}

#[test]
fn failing_operators_end_the_run_by_name() {
    for (kind, says) in [("t::fail", "enough"), ("t::broken", "a bug at 2")] {
        let mut b = net();
        b.graph.operators[7].kind = kind.into();
        let error = go(
            &b.graph,
            &plan(&b.graph, events(&b)),
            &Settings { throttle_per_mille: 5, ..settings(5) },
        )
        .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("op7") && text.contains(kind) && text.contains(says), "{text}");
    }
}

#[test]
fn what_cannot_run_is_said_first() {
    let mut b = net();
    b.graph.operators[4].kind = "t::unheard".into();
    b.graph.operators[9].kind = "t::unheard".into();
    let bare = plan(&b.graph, Vec::new());
    let text = go(&b.graph, &bare, &settings(1)).unwrap_err().to_string();
    assert_eq!(text, "the host device lacks `t::unheard` (2 operators, first `op4`)");
    let mut b = net();
    b.graph.operators[4].args.push(Arg::Host {
        dtype: Dtype::F64,
        shape: vec![],
        value: None,
        input: None,
    });
    let text = go(&b.graph, &bare, &settings(1)).unwrap_err().to_string();
    assert!(text.contains("`op4`") && text.contains("neap.scalar"), "{text}");
    let (op, dtype) = (&mut b.graph.operators[4], Dtype::I64);
    *op.args.last_mut().unwrap() = Arg::Host { dtype, shape: vec![], value: None, input: None };
    assert_eq!(support::unknown_numbers(&b.graph), ["op4"]);
    b.graph.operators[4].kind = "aten::_scaled_dot_product_efficient_attention_backward".into();
    assert!(support::unknown_numbers(&b.graph).is_empty());
    let b = net();
    let text =
        go(&b.graph, &(bare.0.clone(), Bytes(bare.1.0 - 1)), &settings(1)).unwrap_err().to_string();
    assert!(text.contains("beyond the arena"), "{text}");
    let mut planned = plan(&b.graph, events(&b));
    planned.0.host_slots.remove(&b.id("x"));
    assert!(go(&b.graph, &planned, &settings(1)).unwrap_err().to_string().contains("no slot"));
}

#[test]
fn a_plan_that_would_deadlock_is_refused() {
    let b = net();
    let (mut job, arena) = plan(&b.graph, events(&b));
    // In the opposite order of placements early residencies would wait for later ones.
    job.placements.reverse();
    let text = go(&b.graph, &(job, arena), &settings(1)).unwrap_err().to_string();
    assert!(text.contains("deadlocks") || text.contains("stays"), "{text}");
}

#[test]
fn a_thousand_iterations() {
    let b = net();
    let planned = plan(&b.graph, events(&b));
    let quick = Settings { link_rate: Rate::Unlimited, ..settings(1000) };
    let mut told = 0;
    let outcome =
        run_with(kernels, &b.graph, &planned.0, planned.1, &profile(), &quick, &mut |i| told = i)
            .unwrap();
    let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &quick).unwrap();
    assert_eq!((told, outcome.losses.len()), (1000, 1000));
    assert_eq!(outcome.checksum, plain.checksum);
}

#[test]
fn weights_come_in_and_go_out() {
    let b = net();
    let bare = plan(&b.graph, Vec::new());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let first = go(&b.graph, &bare, &Settings { save: Some(path.clone()), ..settings(3) }).unwrap();
    let saved = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&saved).unwrap();
    let mut state = first.state.unwrap();
    assert_eq!(tensors.len(), 3);
    for (key, value) in &state {
        assert_eq!(tensors.tensor(key).unwrap().data(), value.data);
    }
    // Without batch data in the file they can't be used.
    let again = Settings { weights: Some(path.clone()), ..settings(2) };
    let text = go(&b.graph, &bare, &again).unwrap_err().to_string();
    assert!(text.contains("has no `input:x`") && text.contains("buffer:mean"), "{text}");
    let data = seed::batch(7, "input:x", Dtype::F32, N, 0);
    state.insert("input:x".into(), Value { dtype: Dtype::F32, shape: vec![N], data });
    let write = |state: &BTreeMap<String, Value>| {
        let shapes = state.iter().map(|(k, v)| (k.clone(), (v.dtype, v.shape.clone()))).collect();
        weights::save(&path, &shapes, |key| Ok(state[key].data.clone())).unwrap();
    };
    write(&state);
    let continued = go(&b.graph, &plan(&b.graph, events(&b)), &again).unwrap();
    // Dropout starts from iteration 0 again, so only a run without it would continue exactly; but
    // it differs from a fresh run.
    assert_ne!(bits(&continued.losses), bits(&first.losses[..2]));
    let same = go(&b.graph, &bare, &again).unwrap();
    assert_eq!(same.checksum, continued.checksum);
    state.get_mut("parameter:w1").unwrap().dtype = Dtype::I32;
    write(&state);
    let text = go(&b.graph, &bare, &again).unwrap_err().to_string();
    assert!(text.contains("`parameter:w1` is I32 [3000]; the graph wants F32 [3000]"), "{text}");
    let whole = std::fs::read(&path).unwrap();
    for damaged in [
        &whole[..4],
        &whole[..40],
        &whole[..whole.len() - 1],
        b"[[[[[[[[[[[[[[",
        &[&whole[..], b"x"].concat(),
    ] {
        std::fs::write(&path, damaged).unwrap();
        assert!(matches!(go(&b.graph, &bare, &again).unwrap_err(), RunError::Weights(_)));
    }
}

#[test]
fn backward_draws_what_forward_drew() {
    let b = net();
    let keys = support::random_keys(&b.graph);
    assert_eq!(keys, [0, 1, 2, 3, 4, 5, 6, 7, 3, 9, 10, 11, 12]);
}

#[test]
fn indices_stay_below_every_table() {
    let mut b = net();
    assert_eq!(support::index_limit(&b.graph), None);
    b.graph.operators[1].kind = "aten::embedding".into();
    assert_eq!(support::index_limit(&b.graph), Some(N));
}

#[test]
fn random_jobs_with_jitter_equal_their_unplanned_runs() {
    let mut swaps = 0;
    for case in 0..150 {
        let (b, events) = random_job(case);
        swaps += events.len();
        let plain = go(&b.graph, &plan(&b.graph, Vec::new()), &settings(3)).unwrap();
        let shaken = Settings { jitter: Nanos(80_000), poison: case % 2 == 0, ..settings(3) };
        let with = go(&b.graph, &plan(&b.graph, events), &shaken)
            .unwrap_or_else(|e| panic!("case {case}: {e}"));
        assert_eq!(with.checksum, plain.checksum, "case {case}");
    }
    assert!(swaps > 300, "{swaps}");
}

#[test]
fn load_changes_no_result() {
    let b = net();
    let bare = plan(&b.graph, Vec::new());
    let loaded = go(&b.graph, &bare, &Settings { load_percent: 50, ..settings(3) }).unwrap();
    assert_eq!(loaded.checksum, go(&b.graph, &bare, &settings(3)).unwrap().checksum);
}

#[test]
fn a_stop_ends_the_run_at_the_iteration_boundary() {
    let b = net();
    let (job, arena) = plan(&b.graph, Vec::new());
    let asked = settings(5);
    let stop = asked.stop.clone();
    let mut after_two = |done| {
        if done == 2 {
            stop.request();
        }
    };
    let stopped =
        run_with(kernels, &b.graph, &job, arena, &profile(), &asked, &mut after_two).unwrap();
    assert!(stopped.stopped);
    assert_eq!(stopped.iteration_ns.len(), 2);
    let whole = go(&b.graph, &(job, arena), &settings(2)).unwrap();
    assert!(!whole.stopped);
    assert_eq!((stopped.checksum, stopped.losses), (whole.checksum, whole.losses));
}
