use super::super::builtin;
use super::*;
use crate::job::graph::contiguous;
use crate::job::{Phase, Replay};
use crate::units::{Bytes, TensorId};

/// A contiguous f32 view of its own tensor.
fn view(tensor: u32, shape: &[u64]) -> Operand {
    Operand {
        tensor: TensorId(tensor),
        version: 0,
        dtype: Dtype::F32,
        offset: 0,
        shape: shape.to_vec(),
        stride: contiguous(shape),
    }
}

fn arg(tensor: u32, shape: &[u64]) -> Arg {
    Arg::Tensor(view(tensor, shape))
}

fn operator(kind: &str, args: Vec<Arg>, outputs: Vec<Operand>) -> Operator {
    Operator {
        name: "o".to_owned(),
        kind: kind.to_owned(),
        phase: Phase::Forward,
        args,
        outputs: outputs.into_iter().map(Some).collect(),
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay: Replay::Pure,
        random: false,
        ..Operator::default()
    }
}

fn backward(mask: [bool; 3], transposed: bool) -> Operator {
    let ints = || Arg::Ints(vec![1, 1]);
    operator(
        "aten::convolution_backward",
        vec![
            arg(0, &[2, 8, 5, 5]),
            arg(1, &[2, 4, 5, 5]),
            arg(2, &[8, 2, 3, 3]),
            Arg::None,
            ints(),
            ints(),
            ints(),
            Arg::Bool(transposed),
            ints(),
            Arg::Int(2),
            Arg::Bools(mask.to_vec()),
        ],
        vec![view(3, &[2, 4, 5, 5])],
    )
}

#[test]
fn flops_by_kind() {
    let q = &[2, 3, 10, 4];
    let kv = &[2, 3, 20, 4];
    let cases = [
        // Two groups: 18 weights for each output channel.
        (
            operator(
                "aten::conv2d",
                vec![arg(0, &[2, 4, 5, 5]), arg(1, &[8, 2, 3, 3])],
                vec![view(2, &[2, 8, 5, 5])],
            ),
            2 * 400 * 18,
        ),
        (backward([true, true, true], false), 2 * (2 * 400 * 18) + 400),
        (backward([false, true, false], false), 2 * 400 * 18),
        (backward([false, true, false], true), 2 * 200 * 18),
        (
            operator(
                "aten::linear",
                vec![arg(0, &[7, 5]), arg(1, &[3, 5])],
                vec![view(2, &[7, 3])],
            ),
            2 * 21 * 5,
        ),
        (
            operator(
                "aten::addmm",
                vec![arg(0, &[3]), arg(1, &[7, 5]), arg(2, &[5, 3])],
                vec![view(3, &[7, 3])],
            ),
            2 * 21 * 5,
        ),
        (
            operator(
                "aten::bmm",
                vec![arg(0, &[4, 7, 5]), arg(1, &[4, 5, 3])],
                vec![view(2, &[4, 7, 3])],
            ),
            2 * 84 * 5,
        ),
        (
            operator(
                "aten::_scaled_dot_product_efficient_attention",
                vec![arg(0, q), arg(1, kv), arg(2, kv)],
                vec![],
            ),
            2 * 6 * 10 * 20 * 8,
        ),
        (
            operator(
                "aten::_scaled_dot_product_efficient_attention_backward",
                vec![arg(3, q), arg(0, q), arg(1, kv), arg(2, kv)],
                vec![],
            ),
            2 * 6 * 10 * 20 * 20,
        ),
        (
            operator(
                "aten::max_pool2d_with_indices",
                vec![arg(0, &[1, 1, 6, 6]), Arg::Ints(vec![3, 2])],
                vec![view(1, &[1, 1, 2, 3])],
            ),
            6 * 6,
        ),
        (operator("aten::native_layer_norm", vec![arg(0, &[5, 4])], vec![view(1, &[5, 4])]), 160),
        (operator("aten::relu_", vec![arg(0, &[9])], vec![view(0, &[9])]), 9),
        (
            operator(
                "aten::_foreach_sqrt",
                vec![Arg::Tensors(vec![Some(view(0, &[9]))])],
                vec![view(1, &[9])],
            ),
            90,
        ),
        (operator("neap::adamw", vec![arg(0, &[9]), arg(1, &[9])], vec![view(0, &[9])]), 126),
        (
            operator(
                "aten::cat",
                vec![Arg::Tensors(vec![Some(view(0, &[9]))])],
                vec![view(1, &[9])],
            ),
            0,
        ),
        (operator("mine::unheard_of", vec![arg(0, &[9])], vec![view(1, &[9])]), 0),
    ];
    for (operator, want) in cases {
        assert_eq!(flops(&operator), want, "{}", operator.kind);
    }
}

#[test]
fn bytes_count_views_once_and_writes() {
    let add = operator("aten::add", vec![arg(0, &[10]), arg(0, &[10])], vec![view(1, &[10])]);
    assert_eq!(bytes(&add), 80);
    let mut expanded = view(0, &[10, 7]);
    expanded.stride = vec![1, 0];
    assert_eq!(
        bytes(&operator("aten::clone", vec![Arg::Tensor(expanded)], vec![view(1, &[10, 7])])),
        40 + 280
    );
    let mut updated = view(0, &[10]);
    updated.version = 1;
    assert_eq!(bytes(&operator("aten::relu_", vec![arg(0, &[10])], vec![updated.clone()])), 80);
    assert_eq!(bytes(&operator("aten::zero_", vec![arg(0, &[10])], vec![updated])), 40);
    let lookup =
        operator("aten::embedding", vec![arg(0, &[1000, 4]), arg(1, &[3])], vec![view(2, &[3, 4])]);
    assert_eq!(bytes(&lookup), 48 + 12 + 48);
}

#[test]
fn time_is_the_slowest_of_arithmetic_memory_and_link() {
    let mut device = builtin::find("a6000").unwrap();
    (device.efficiency_percent, device.launch_overhead_ns) = (50, 100);
    (device.flops.f32, device.memory_bandwidth) = (1_000_000_000_000, 100_000_000_000);
    (device.link.h2d, device.link.overhead_ns) = (10_000_000_000, 7);
    // 2·300·100·200 flops at 0.5 flops per ps; (20,000 + 60,000 + 30,000 elements)·4 bytes at 50
    // bytes per ns.
    let mm = operator(
        "aten::mm",
        vec![arg(0, &[100, 200]), arg(1, &[200, 300])],
        vec![view(2, &[100, 300])],
    );
    assert_eq!(time(&mm, &device), Nanos(100 + 24_000));
    let add = operator("aten::neg", vec![arg(0, &[1001])], vec![view(1, &[1001])]);
    assert_eq!(time(&add, &device), Nanos(100 + 161), "160.16 ns, rounded up");
    let host = Arg::Host { dtype: Dtype::F32, shape: vec![1000], value: None, input: Some(0) };
    assert_eq!(
        time(&operator("aten::to", vec![host], vec![view(0, &[1000])]), &device),
        Nanos(100 + 7 + 400)
    );
    device.launch_overhead_ns = 0;
    assert_eq!(time(&operator("aten::nothing", vec![], vec![]), &device), Nanos(1));
}

#[test]
fn absurd_sizes_neither_overflow_nor_pass_an_hour() {
    let mut huge = view(0, &[1 << 40, 1 << 40, 1 << 40]);
    huge.stride = vec![0, 0, 0];
    let all = vec![
        Arg::Tensor(huge.clone()),
        Arg::Tensor(huge.clone()),
        Arg::Tensor(huge.clone()),
        Arg::Tensor(huge.clone()),
    ];
    for kind in [
        "conv2d",
        "convolution_backward",
        "mm",
        "addmm",
        "_efficient_attention_backward",
        "avg_pool2d",
        "sum",
        "adam",
        "exp",
        "x",
    ] {
        let mut device = builtin::find("host").unwrap();
        device.flops.f32 = 1;
        let slow = operator(kind, all.clone(), vec![huge.clone()]);
        assert!((1..=LONGEST.0).contains(&time(&slow, &device).0), "{kind}");
    }
    let window = Arg::Ints(vec![i64::MAX, i64::MIN]);
    assert_eq!(flops(&operator("avg_pool2d", vec![arg(0, &[1]), window], vec![huge])), 0);
}
