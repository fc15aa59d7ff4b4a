//! What recorded calls can't show: randomness, batch data, and refusals.

use super::pytorch::{Bench, Owned};
use crate::backend::operators::view::{Operand, View};
use crate::job::{Arg, Dtype};

fn tensor(owned: &Owned) -> (Arg, Operand) {
    (Arg::None, Operand::Tensor(owned.view.clone()))
}

fn plain(arg: Arg) -> (Arg, Operand) {
    (arg, Operand::Plain)
}

fn bench(kind: &str, args: Vec<(Arg, Operand)>, outputs: &[&Owned], hidden: &[&Owned]) -> Bench {
    let (args, operands) = args.into_iter().unzip();
    Bench::new(&format!("aten::{kind}"), args, operands, outputs, hidden)
}

fn ramp(shape: &[usize], scale: f32) -> Owned {
    let n: usize = shape.iter().product();
    Owned::floats(
        shape,
        &(0..n).map(|i| ((i * 7919 + 13) % 101) as f32 / 50.0 * scale - scale).collect::<Vec<_>>(),
    )
}

#[test]
fn dropout_scales_what_it_keeps_and_its_gradient_uses_the_same_mask() {
    let (x, y) = (Owned::floats(&[40, 50], &[2.0; 2000]), ramp(&[40, 50], 0.0));
    let mask = Owned::new(Dtype::Bool, &[40, 50], &[50, 1], 0);
    let mut call = bench(
        "dropout",
        vec![tensor(&x), plain(Arg::Float(0.25)), plain(Arg::Bool(true))],
        &[&y],
        &[&mask],
    );
    (call.key, call.iteration) = (5, 1);
    call.run().unwrap();
    let (first, marks) = (y.to_vec(), mask.to_vec());
    let kept = marks.iter().sum::<f64>();
    assert!((1400.0..1600.0).contains(&kept), "{kept}");
    for (value, mark) in first.iter().zip(&marks) {
        assert_eq!(*value, mark * f64::from(2.0 * (1.0f32 / 0.75)));
    }
    call.run().unwrap();
    assert_eq!(y.to_vec(), first, "the same key draws the same mask");
    call.iteration = 2;
    call.run().unwrap();
    assert_ne!(y.to_vec(), first, "another iteration draws another");

    // The mask belongs to places in row-major order, not in memory.
    let turned = Owned::new(Dtype::F32, &[40, 50], &[1, 40], 0);
    (call.iteration, call.outputs) = (1, vec![Some(turned.view.clone())]);
    call.run().unwrap();
    assert_eq!(turned.to_vec(), first);

    let grad = ramp(&[40, 50], 0.0);
    bench(
        "native_dropout_backward",
        vec![tensor(&x), tensor(&mask), plain(Arg::Float(1.333_333))],
        &[&grad],
        &[],
    )
    .run()
    .unwrap();
    assert_eq!(grad.to_vec(), first, "the rounded factor is understood");
}

#[test]
fn attention_dropout_is_repeated_backward() {
    // With dropout the output is linear in v, so <grad, out> = <dv, v>; q and k by finite
    // differences.
    let shape = [1, 2, 7, 4];
    let (q, k, v, grad) =
        (ramp(&shape, 1.0), ramp(&shape, 0.7), ramp(&shape, 1.3), ramp(&shape, 0.9));
    let (out, sums) = (ramp(&shape, 0.0), ramp(&[1, 2, 7], 0.0));
    let tail = |p: f64| {
        vec![
            plain(Arg::None),
            plain(Arg::Bool(true)),
            plain(Arg::Float(p)),
            plain(Arg::Bool(true)),
            plain(Arg::None),
        ]
    };
    let forward = |q: &Owned, p: f64| {
        let args = [vec![tensor(q), tensor(&k), tensor(&v)], tail(p)].concat();
        let mut call = bench("_scaled_dot_product_efficient_attention", args, &[&out, &sums], &[]);
        call.key = 11;
        call.run().unwrap();
        out.to_vec()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    assert_ne!(forward(&q, 0.0), forward(&q, 0.5));
    let made = forward(&q, 0.5);
    let (dq, dk, dv) = (ramp(&shape, 0.0), ramp(&shape, 0.0), ramp(&shape, 0.0));
    let mut args: Vec<_> = [&grad, &q, &k, &v].map(tensor).to_vec();
    args.extend([
        plain(Arg::None),
        tensor(&out),
        tensor(&sums),
        plain(Arg::None),
        plain(Arg::None),
        plain(Arg::Float(0.5)),
    ]);
    args.extend([
        plain(Arg::Bools(vec![true, true, true, false])),
        plain(Arg::Bool(true)),
        plain(Arg::None),
    ]);
    let mut call =
        bench("_scaled_dot_product_efficient_attention_backward", args, &[&dq, &dk, &dv], &[]);
    call.key = 11;
    call.run().unwrap();
    let (through_out, through_v) = (dot(&grad.to_vec(), &made), dot(&dv.to_vec(), &v.to_vec()));
    assert!((through_out - through_v).abs() < 1e-5, "{through_out} {through_v}");
    let slope = dq.to_vec();
    for i in [0, 9, 27, 55] {
        let moved = |by: f32| {
            let mut data: Vec<f32> = q.to_vec().iter().map(|x| *x as f32).collect();
            data[i] += by;
            dot(&grad.to_vec(), &forward(&Owned::floats(&shape, &data), 0.5))
        };
        let expected = (moved(0.01) - moved(-0.01)) / 0.02;
        assert!((slope[i] - expected).abs() < 2e-3, "{i}: {} {expected}", slope[i]);
    }
}

#[test]
fn batch_data_crosses_and_must_fit() {
    let out = ramp(&[2, 2], 0.0);
    let source = |input| {
        plain(Arg::Host { dtype: Dtype::F32, shape: vec![2, 2], value: None, input: Some(input) })
    };
    let mut call = bench("to", vec![source(1)], &[&out], &[]);
    call.batch =
        vec![vec![], [1.0f32, 2.0, 3.0, 4.5].iter().flat_map(|x| x.to_le_bytes()).collect()];
    call.run().unwrap();
    assert_eq!(out.to_vec(), [1.0, 2.0, 3.0, 4.5]);
    let mut copied = bench("copy_", vec![tensor(&out), source(0)], &[&out], &[]);
    copied.batch = call.batch;
    assert!(copied.run().unwrap_err().to_string().contains("0 bytes where 16"));
    assert!(
        bench("_to_copy", vec![source(7)], &[&out], &[])
            .run()
            .unwrap_err()
            .to_string()
            .contains("no batch data")
    );
}

#[test]
fn refusals_are_errors() {
    let (a, b, out) = (ramp(&[2, 3], 1.0), ramp(&[2, 4], 1.0), ramp(&[2, 3], 1.0));
    let refused = |kind: &str, args, hint: &str| {
        let error = bench(kind, args, &[&out], &[]).run().unwrap_err().to_string();
        assert!(error.contains(hint), "{kind}: {error}");
    };
    let host = plain(Arg::Host { dtype: Dtype::F64, shape: vec![], value: None, input: None });
    refused("mul", vec![tensor(&a), host], "neap.scalar");
    refused("add", vec![tensor(&a), tensor(&b)], "broadcast");
    refused(
        "sum",
        vec![tensor(&b), plain(Arg::Ints(vec![0])), plain(Arg::Bool(false)), plain(Arg::None)],
        "reducing",
    );
    refused(
        "sum",
        vec![tensor(&b), plain(Arg::Ints(vec![5])), plain(Arg::Bool(false)), plain(Arg::None)],
        "dimension 5",
    );
    let cat = |dim| {
        vec![
            (Arg::None, Operand::Tensors(vec![Some(a.view.clone()), Some(b.view.clone())])),
            plain(Arg::Int(dim)),
        ]
    };
    refused("cat", cat(0), "2..4");
    refused("cat", cat(2), "dimension 2");
    refused("_softmax", vec![tensor(&b), plain(Arg::Int(1))], "differ");
    refused(
        "slice_backward",
        [vec![tensor(&b)], (0..5).map(|n| plain(Arg::Int(n))).collect()].concat(),
        "differ",
    );
    refused("_log_softmax", vec![], "not a tensor");
    let short = Owned::new(Dtype::I16, &[2, 3], &[3, 1], 0);
    refused("relu", vec![tensor(&short)], "a tensor is I16");

    let indices = Owned::new(Dtype::I64, &[2], &[1], 3);
    refused(
        "index_select",
        vec![tensor(&a), plain(Arg::Int(0)), tensor(&indices)],
        "index 3 into 2 rows",
    );
    refused(
        "embedding_dense_backward",
        vec![tensor(&a), tensor(&indices), plain(Arg::Int(2)), plain(Arg::Int(-1))],
        "index 3 into 2 rows",
    );
    refused(
        "nll_loss_backward",
        vec![tensor(&Owned::floats(&[], &[1.0])), tensor(&a), tensor(&indices)],
        "target 3 is not one of 3",
    );
    let view = View { shape: vec![2], stride: vec![1], ..b.view.clone() };
    refused(
        "gather",
        vec![tensor(&a), plain(Arg::Int(0)), (Arg::None, Operand::Tensor(view))],
        "not whole numbers",
    );
    assert!(super::find("aten::no_such_operator").is_none());
    assert!(super::find("neap::adamw_b").is_none());
}

#[test]
fn rows_of_an_embedding_s_gradient_are_those_of_the_whole() {
    let gradient = ramp(&[9, 2], 0.3);
    let indices = Owned::new(Dtype::I64, &[9], &[1], 0);
    for place in 0..9 {
        // SAFETY: the storage has nine elements of the type.
        unsafe { indices.view.data.cast::<i64>().add(place).write_unaligned(place as i64 * 3 % 5) };
    }
    let made = |rows: usize, of: Arg| {
        let out = Owned::floats(&[rows, 2], &vec![7.0; rows * 2]);
        let args = vec![tensor(&gradient), tensor(&indices), plain(of), plain(Arg::Int(3))];
        bench("embedding_backward", args, &[&out], &[]).run().map(|()| out.to_vec())
    };
    let whole = made(5, Arg::Int(5)).unwrap();
    assert!(whole.iter().filter(|x| **x == 0.0).count() == 2, "the padding row alone: {whole:?}");
    let pieces = [(0, 2), (2, 2), (4, 1)];
    let pieces = pieces.map(|(first, rows)| made(rows, Arg::Ints(vec![first, 5])).unwrap());
    assert_eq!(pieces.concat(), whole);
    for rows in [[4, 5], [-1, 5], [0, -5]] {
        assert!(made(2, Arg::Ints(rows.to_vec())).is_err(), "{rows:?}");
    }
}

#[test]
fn empty_memory_is_zeroed_and_nothing_is_copied_for_nothing() {
    let out = ramp(&[3], 1.0);
    bench("empty_like", vec![tensor(&out)], &[&out], &[]).run().unwrap();
    assert_eq!(out.to_vec(), [0.0; 3]);
    let none = Owned::new(Dtype::F32, &[0, 3], &[3, 1], 0);
    bench("relu", vec![tensor(&none)], &[&none], &[]).run().unwrap();
    bench(
        "sum",
        vec![tensor(&none), plain(Arg::Ints(vec![0])), plain(Arg::Bool(false)), plain(Arg::None)],
        &[&out],
        &[],
    )
    .run()
    .unwrap();
    assert_eq!(out.to_vec(), [0.0; 3]);
}

#[test]
fn gradients_are_unscaled_and_the_scale_moves() {
    let (a, b) = (Owned::floats(&[2], &[8.0, -4.0]), Owned::floats(&[1], &[f32::INFINITY]));
    let (found, factor) = (Owned::floats(&[1], &[0.0]), Owned::floats(&[1], &[0.25]));
    let unscale = |list: &[&Owned]| {
        let views = Operand::Tensors(list.iter().map(|o| Some(o.view.clone())).collect());
        let args = vec![(Arg::None, views), tensor(&found), tensor(&factor)];
        let written: Vec<&Owned> = list.iter().copied().chain([&found]).collect();
        bench("_amp_foreach_non_finite_check_and_unscale_", args, &[], &written).run().unwrap();
    };
    let (scale, tracker) = (Owned::floats(&[1], &[16.0]), Owned::new(Dtype::I32, &[1], &[1], 0));
    let update = || {
        let numbers = [Arg::Float(2.0), Arg::Float(0.5), Arg::Int(2)].map(plain);
        let args = [vec![tensor(&scale), tensor(&tracker), tensor(&found)], numbers.into()];
        bench("_amp_update_scale_", args.concat(), &[&scale], &[&tracker]).run().unwrap();
        (scale.to_vec()[0], tracker.to_vec()[0])
    };
    unscale(&[&a]);
    assert_eq!((a.to_vec(), found.to_vec()), (vec![2.0, -1.0], vec![0.0]));
    assert_eq!([update(), update()], [(16.0, 1.0), (32.0, 0.0)]);
    unscale(&[&a, &b]);
    assert_eq!(found.to_vec(), [1.0]);
    assert_eq!(update(), (16.0, 0.0));
}

#[test]
fn bernoulli_draws_by_counter() {
    let p = Owned::floats(&[40, 50], &[0.25; 2000]);
    let (first, second) = (ramp(&[40, 50], 0.0), ramp(&[40, 50], 0.0));
    let draw = |out: &Owned, iteration| {
        let mut call = bench("bernoulli_", vec![tensor(out), tensor(&p)], &[out], &[]);
        (call.key, call.iteration) = (5, iteration);
        call.run().unwrap();
        out.to_vec()
    };
    let ones = draw(&first, 1);
    assert!((420.0..580.0).contains(&ones.iter().sum::<f64>()));
    assert_eq!(draw(&second, 1), ones, "a replay draws the same");
    assert_ne!(draw(&second, 2), ones);
}

#[test]
fn every_operator_is_listed_once() {
    let all = super::list();
    assert!(all.len() > 330, "{}", all.len());
    for pair in all.windows(2) {
        assert_ne!(pair[0].kind, pair[1].kind);
    }
    for listed in all {
        assert!(super::find(&listed.kind).is_some(), "{}", listed.kind);
    }
}
