//! The dense operators against what PyTorch answered (`fixtures/kernels-dense.py`), and against
//! plain loops.

use serde_json::Value;

use super::find;
use crate::backend::operators::KernelError;
use crate::backend::operators::view::{Call, Operand, View};
use crate::job::{Arg, Dtype, Group, Operator, Phase, Replay};

/// Memory of one tensor in a test, aligned for any element.
struct Memory {
    words: Vec<u64>,
    view: View,
}

impl Memory {
    fn new(dtype: Dtype, shape: &[usize], stride: &[usize], values: &[f64]) -> Self {
        let mut words = vec![0u64; values.len().max(1)];
        for (i, &value) in values.iter().enumerate() {
            // SAFETY: there is a word for each value, and no element is wider.
            unsafe {
                match dtype {
                    Dtype::F32 => *words.as_mut_ptr().cast::<f32>().add(i) = value as f32,
                    Dtype::I64 => *words.as_mut_ptr().cast::<i64>().add(i) = value as i64,
                    other => panic!("no {other:?} here"),
                }
            }
        }
        let view = View {
            data: words.as_mut_ptr().cast(),
            dtype,
            shape: shape.into(),
            stride: stride.into(),
        };
        Self { words, view }
    }

    fn blank(dtype: Dtype, shape: &[usize], stride: &[usize]) -> Self {
        let last: usize = shape.iter().zip(stride).map(|(&n, &s)| n.saturating_sub(1) * s).sum();
        Self::new(dtype, shape, stride, &vec![-77.0; last + 1])
    }

    fn filled(shape: &[usize], values: &[f64]) -> Self {
        let stride: Vec<usize> =
            (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect();
        Self::new(Dtype::F32, shape, &stride, values)
    }

    fn values(&self) -> Vec<f64> {
        assert!(!self.words.is_empty());
        let mut values = Vec::new();
        super::strided::runs(&self.view.shape, [&self.view.stride], |[at], [step], n| {
            for i in 0..n {
                let at = at + i * step;
                // SAFETY: inside the memory that `new` made for the view.
                values.push(unsafe {
                    if self.view.dtype == Dtype::F32 {
                        f64::from(*self.view.data.cast::<f32>().add(at))
                    } else {
                        *self.view.data.cast::<i64>().add(at) as f64
                    }
                });
            }
        });
        values
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn extents(value: &Value) -> Vec<usize> {
    numbers(value).into_iter().map(|x| x as usize).collect()
}

fn dtype(value: &Value) -> Dtype {
    if value["dtype"] == "int64" { Dtype::I64 } else { Dtype::F32 }
}

fn memory(value: &Value) -> Memory {
    Memory::new(
        dtype(value),
        &extents(&value["shape"]),
        &extents(&value["stride"]),
        &numbers(&value["memory"]),
    )
}

fn scalar(value: &Value) -> Arg {
    match value {
        Value::Bool(b) => Arg::Bool(*b),
        Value::Number(n) => n.as_i64().map_or_else(|| Arg::Float(n.as_f64().unwrap()), Arg::Int),
        Value::Array(list) if list.iter().all(Value::is_boolean) && !list.is_empty() => {
            Arg::Bools(list.iter().map(|b| b.as_bool().unwrap()).collect())
        }
        Value::Array(list) if list.iter().all(Value::is_i64) => {
            Arg::Ints(list.iter().map(|n| n.as_i64().unwrap()).collect())
        }
        Value::Array(_) => Arg::Floats(numbers(value)),
        _ => Arg::None,
    }
}

fn operator(kind: &str, args: Vec<Arg>) -> Operator {
    Operator {
        name: kind.into(),
        kind: kind.into(),
        phase: Phase::Forward,
        args,
        outputs: Vec::new(),
        hidden: Vec::new(),
        workspace: crate::units::Bytes::default(),
        replay: Replay::Pure,
        random: false,
        ..Operator::default()
    }
}

fn call<'a>(
    operator: &'a Operator,
    args: &'a [Operand],
    outputs: &'a [Option<View>],
    hidden: &'a [View],
) -> Call<'a> {
    Call {
        operator,
        args,
        outputs,
        hidden,
        iteration: 0,
        position: 0,
        steps_done: 0,
        random_key: 0,
        replay: false,
        optimizer: None,
        batch: &[],
    }
}

fn close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: number of elements");
    let scale = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance * scale, "{what}: element {i} is {g}, not {e}");
    }
}

fn check(number: usize, case: &Value, device: &dyn Fn(&Call<'_>) -> Result<(), KernelError>) {
    let kind = case["kind"].as_str().unwrap();
    let given = case["args"].as_array().unwrap();
    // Memory by (argument, entry).
    let mut memories: Vec<((usize, usize), Memory)> = Vec::new();
    let mut operands = Vec::new();
    for (at, arg) in given.iter().enumerate() {
        if !arg["tensor"].is_null() {
            let memory = memory(&arg["tensor"]);
            operands.push(Operand::Tensor(memory.view.clone()));
            memories.push(((at, 0), memory));
        } else if let Some(list) = arg["tensors"].as_array() {
            let first = memories.len();
            memories.extend(list.iter().enumerate().map(|(i, t)| ((at, i), memory(t))));
            operands.push(Operand::Tensors(
                memories[first..].iter().map(|(_, m)| Some(m.view.clone())).collect(),
            ));
        } else {
            operands.push(Operand::Plain);
        }
    }
    let made: Vec<Option<Memory>> = case["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| {
            (!o.is_null())
                .then(|| Memory::blank(dtype(o), &extents(&o["shape"]), &extents(&o["stride"])))
        })
        .collect();
    let updates: Vec<(&Memory, Vec<f64>)> = case["updates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|update| {
            let at = update["at"].as_u64().map_or_else(
                || (extents(&update["at"])[0], extents(&update["at"])[1]),
                |at| (at as usize, 0),
            );
            (
                &memories.iter().find(|(place, _)| *place == at).unwrap().1,
                numbers(&update["values"]),
            )
        })
        .collect();
    let operator = operator(kind, given.iter().map(scalar).collect());
    let outputs: Vec<Option<View>> =
        made.iter().map(|m| m.as_ref().map(|m| m.view.clone())).collect();
    let hidden: Vec<View> = updates.iter().map(|(m, _)| m.view.clone()).collect();
    let optimizer: Option<Group> =
        case.get("optimizer").map(|o| serde_json::from_value(o.clone()).unwrap());
    let call = Call {
        steps_done: case["steps_done"].as_u64().unwrap_or(0),
        optimizer: optimizer.as_ref(),
        ..call(&operator, &operands, &outputs, &hidden)
    };
    device(&call).unwrap_or_else(|e| panic!("case {number}, {kind}: {e}"));
    // One optimizer step differs from PyTorch's by fused multiplications at most.
    let tolerance =
        if kind.starts_with("neap::") || kind.contains("foreach") { 1.2e-7 } else { 1e-6 };
    for (i, (made, expected)) in made.iter().zip(case["outputs"].as_array().unwrap()).enumerate() {
        if let Some(made) = made {
            close(
                &format!("case {number}, {kind}: output {i}"),
                &made.values(),
                &numbers(&expected["values"]),
                tolerance,
            );
        }
    }
    for (i, (made, expected)) in updates.iter().enumerate() {
        close(&format!("case {number}, {kind}: update {i}"), &made.values(), expected, tolerance);
    }
}

#[test]
fn every_case_agrees_with_pytorch() {
    every_case(&|call| find(&call.operator.kind).ok_or("no kernel")?(call));
}

/// Every recorded call on a device.
pub fn every_case(device: &dyn Fn(&Call<'_>) -> Result<(), KernelError>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/kernels-dense.json");
    let cases: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 100);
    cases.iter().enumerate().for_each(|(number, case)| check(number, case, device));
}

/// Small deterministic values around zero.
fn noise(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f64 / (1u64 << 24) as f64 - 0.5) as f32 as f64
        })
        .collect()
}

/// Convolution by definition, and its two gradients, of images [n, c, h, w] with square odd
/// kernels, stride 1 and "same" padding.
fn plain(x: &[f64], w: &[f64], g: &[f64], [n, c, size, o, k]: [usize; 5]) -> [Vec<f64>; 3] {
    let (mut y, mut dx, mut dw) =
        (vec![0.0; n * o * size * size], vec![0.0; x.len()], vec![0.0; w.len()]);
    let pad = k / 2;
    for (image, out, channel) in
        (0..n).flat_map(|a| (0..o).flat_map(move |b| (0..c).map(move |d| (a, b, d))))
    {
        for (kh, kw) in (0..k).flat_map(|a| (0..k).map(move |b| (a, b))) {
            let wi = ((out * c + channel) * k + kh) * k + kw;
            for oh in (0..size).filter(|oh| (pad..size + pad).contains(&(oh + kh))) {
                for ow in (0..size).filter(|ow| (pad..size + pad).contains(&(ow + kw))) {
                    let xi = ((image * c + channel) * size + oh + kh - pad) * size + ow + kw - pad;
                    let yi = ((image * o + out) * size + oh) * size + ow;
                    y[yi] += x[xi] * w[wi];
                    dx[xi] += g[yi] * w[wi];
                    dw[wi] += g[yi] * x[xi];
                }
            }
        }
    }
    [y, dx, dw]
}

fn convolve(dims: [usize; 5]) {
    let [n, c, size, o, k] = dims;
    let (xs, ws, ys) = ([n, c, size, size], [o, c, k, k], [n, o, size, size]);
    let count = |s: &[usize; 4]| s.iter().product::<usize>();
    let (x, w, g) = (noise(count(&xs), 1), noise(count(&ws), 2), noise(count(&ys), 3));
    let [y, dx, dw] = plain(&x, &w, &g, dims);
    let (x, w, g) = (Memory::filled(&xs, &x), Memory::filled(&ws, &w), Memory::filled(&ys, &g));
    let one = || Arg::Ints(vec![1, 1]);
    let pad = || Arg::Ints(vec![k as i64 / 2; 2]);
    let out = Memory::filled(&ys, &vec![-77.0; y.len()]);
    let forward = operator(
        "aten::conv2d",
        vec![Arg::None, Arg::None, Arg::None, one(), pad(), one(), Arg::Int(1)],
    );
    let args = [Operand::Tensor(x.view.clone()), Operand::Tensor(w.view.clone()), Operand::Plain];
    find("aten::conv2d").unwrap()(&call(&forward, &args, &[Some(out.view.clone())], &[])).unwrap();
    close(&format!("forward {dims:?}"), &out.values(), &y, 2e-6);
    let (xo, wo) =
        (Memory::filled(&xs, &vec![-77.0; dx.len()]), Memory::filled(&ws, &vec![-77.0; dw.len()]));
    let mut settings = vec![Arg::None; 4];
    settings.extend([
        one(),
        pad(),
        one(),
        Arg::Bool(false),
        Arg::Ints(vec![0, 0]),
        Arg::Int(1),
        Arg::Bools(vec![true, true, false]),
    ]);
    let backward = operator("aten::convolution_backward", settings);
    let args = [
        Operand::Tensor(g.view.clone()),
        Operand::Tensor(x.view.clone()),
        Operand::Tensor(w.view.clone()),
    ];
    let outputs = [Some(xo.view.clone()), Some(wo.view.clone()), None];
    find("aten::convolution_backward").unwrap()(&call(&backward, &args, &outputs, &[])).unwrap();
    close(&format!("input gradient {dims:?}"), &xo.values(), &dx, 2e-6);
    close(&format!("weight gradient {dims:?}"), &wo.values(), &dw, 2e-6);
}

#[test]
fn convolutions_larger_than_a_tile_agree_with_plain_loops() {
    convolve([1, 128, 40, 3, 3]); // several tiles of one image, several chunks of kernel elements
    convolve([30, 3, 7, 4, 3]); // tiles across images
    convolve([2, 9, 40, 5, 1]); // pointwise, in place
    convolve([25, 6, 7, 5, 1]); // pointwise, across images
}

/// The error of a call with these shapes.
fn refusal(kind: &str, args: Vec<Arg>, shapes: &[&[usize]], outputs: &[&[usize]]) -> String {
    let of = |shape: &[usize]| Memory::filled(shape, &vec![1.0; shape.iter().product()]);
    let memories: Vec<Memory> = shapes.iter().map(|s| of(s)).collect();
    let made: Vec<Memory> = outputs.iter().map(|s| of(s)).collect();
    let mut operands: Vec<Operand> =
        memories.iter().map(|m| Operand::Tensor(m.view.clone())).collect();
    operands.resize(args.len().max(operands.len()), Operand::Plain);
    let operator = operator(kind, args);
    let outputs: Vec<Option<View>> = made.iter().map(|m| Some(m.view.clone())).collect();
    find(kind).unwrap()(&call(&operator, &operands, &outputs, &[])).unwrap_err().to_string()
}

#[test]
fn contradictory_calls_are_refused() {
    let ints = |n: &[i64]| Arg::Ints(n.to_vec());
    let conv = |stride: i64, padding: i64, groups: i64| {
        vec![
            Arg::None,
            Arg::None,
            Arg::None,
            ints(&[stride, stride]),
            ints(&[padding, padding]),
            ints(&[1, 1]),
            Arg::Int(groups),
        ]
    };
    let x: &[usize] = &[1, 2, 4, 4];
    for (args, shapes, out) in [
        (conv(1, 0, 1), [x, &[3, 1, 3, 3]], &[1, 3, 2, 2]),
        (conv(1, 0, 0), [x, &[3, 2, 3, 3]], &[1, 3, 2, 2]),
        (conv(0, 0, 1), [x, &[3, 2, 3, 3]], &[1, 3, 2, 2]),
        (conv(1, -1, 1), [x, &[3, 2, 3, 3]], &[1, 3, 2, 2]),
        (conv(1, i64::MAX, 1), [x, &[3, 2, 3, 3]], &[1, 3, 2, 2]),
        (conv(1, 0, 1), [x, &[3, 2, 5, 5]], &[1, 3, 2, 2]),
        (conv(1, 0, 1), [x, &[3, 2, 3, 3]], &[1, 3, 2, 3]),
        (conv(1, 0, 1), [x, &[3, 2, 3, 0]], &[1, 3, 2, 5]),
        (conv(1, 0, 1), [x, &[3, 2]], &[1, 3, 2, 2]),
    ] {
        let message = refusal("aten::conv2d", args, &shapes, &[out]);
        assert!(!message.is_empty());
    }
    assert!(refusal("aten::mm", vec![], &[&[2, 3], &[2, 3]], &[&[2, 3]]).contains("inner extent"));
    assert!(
        refusal("aten::mm", vec![], &[&[2, 3], &[3, 2]], &[&[2, 3]]).contains("[2, 2] is needed")
    );
    assert!(
        refusal("aten::linear", vec![], &[&[2, 3], &[4, 3], &[5]], &[&[2, 4]])
            .contains("broadcast")
    );
    assert!(refusal("aten::addmm", vec![], &[&[4], &[], &[]], &[&[2, 4]]).contains("matrices"));
    assert!(
        refusal(
            "aten::max_pool2d",
            vec![Arg::None, ints(&[2]), ints(&[0])],
            &[x],
            &[&[1, 2, 2, 2]]
        )
        .contains("out of range")
    );
    assert!(
        refusal(
            "aten::max_pool2d",
            vec![Arg::None, ints(&[2]), ints(&[]), ints(&[2])],
            &[x],
            &[&[1, 2, 2, 2]]
        )
        .contains("half")
    );
    let batch_norm = vec![
        Arg::None,
        Arg::None,
        Arg::None,
        Arg::None,
        Arg::None,
        Arg::Bool(true),
        Arg::Float(0.1),
        Arg::Float(1e-5),
    ];
    assert!(
        refusal("aten::cudnn_batch_norm", batch_norm, &[x, &[2], &[2], &[2], &[2]], &[x])
            .contains("does not say")
    );
    assert!(refusal("neap::sgd", vec![], &[&[2], &[2]], &[]).contains("needs the job's optimizer"));
}

#[test]
fn an_output_over_an_argument_is_refused() {
    let (a, b) = (Memory::filled(&[2, 2], &[1.0; 4]), Memory::filled(&[2, 2], &[1.0; 4]));
    let operator = operator("aten::mm", vec![]);
    let args = [Operand::Tensor(a.view.clone()), Operand::Tensor(b.view.clone())];
    let error = find("aten::mm").unwrap()(&call(&operator, &args, &[Some(a.view.clone())], &[]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("over another operand"), "{error}");
}

#[test]
fn an_index_outside_the_image_is_refused() {
    let (g, x, out) = (
        Memory::filled(&[1, 1, 1], &[1.0]),
        Memory::filled(&[1, 2, 2], &[1.0; 4]),
        Memory::filled(&[1, 2, 2], &[0.0; 4]),
    );
    let index = Memory::new(Dtype::I64, &[1, 1, 1], &[1, 1, 1], &[4.0]);
    let settings = vec![Arg::None, Arg::None, Arg::Ints(vec![2])];
    let operator = operator("aten::max_pool2d_with_indices_backward", settings);
    let mut args = vec![Operand::Tensor(g.view.clone()), Operand::Tensor(x.view.clone())];
    args.extend(vec![Operand::Plain; 5]);
    args.push(Operand::Tensor(index.view.clone()));
    let error =
        find(&operator.kind).unwrap()(&call(&operator, &args, &[Some(out.view.clone())], &[]))
            .unwrap_err()
            .to_string();
    assert!(error.contains("index 4 is outside"), "{error}");
}

#[test]
fn other_element_types_are_refused() {
    let (mut a, out) = (Memory::filled(&[2, 2], &[1.0; 4]), Memory::filled(&[2, 2], &[0.0; 4]));
    a.view.dtype = Dtype::Bf16;
    let operator = operator("aten::mm", vec![]);
    let args = [Operand::Tensor(a.view.clone()), Operand::Tensor(a.view.clone())];
    let error = find("aten::mm").unwrap()(&call(&operator, &args, &[Some(out.view.clone())], &[]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("f32 only"), "{error}");
}

#[test]
fn a_recompute_leaves_running_statistics_alone() {
    let x = Memory::filled(&[2, 1, 1, 2], &[1.0, 2.0, 3.0, 6.0]);
    let (mean, variance, out) = (
        Memory::filled(&[1], &[0.0]),
        Memory::filled(&[1], &[1.0]),
        Memory::filled(&[2, 1, 1, 2], &[0.0; 4]),
    );
    let mut settings = vec![Arg::None; 5];
    settings.extend([Arg::Bool(true), Arg::Float(0.5), Arg::Float(0.5)]);
    let operator = operator("aten::cudnn_batch_norm", settings);
    let args = [
        Operand::Tensor(x.view.clone()),
        Operand::Plain,
        Operand::Plain,
        Operand::Tensor(mean.view.clone()),
        Operand::Tensor(variance.view.clone()),
    ];
    let (outputs, hidden) = ([Some(out.view.clone())], [mean.view.clone(), variance.view.clone()]);
    let kernel = find(&operator.kind).unwrap();
    kernel(&Call { replay: true, ..call(&operator, &args, &outputs, &hidden) }).unwrap();
    assert_eq!((mean.values(), variance.values()), (vec![0.0], vec![1.0]));
    // Mean 3, variance 14 / 4, so the deviation with eps is 2.
    assert_eq!(out.values(), [-1.0, -0.5, 0.0, 1.5]);
    kernel(&call(&operator, &args, &outputs, &hidden)).unwrap();
    assert_eq!(mean.values(), [1.5]);
    close("running_var", &variance.values(), &[0.5 + 0.5 * 14.0 / 3.0], 1e-7);
}
