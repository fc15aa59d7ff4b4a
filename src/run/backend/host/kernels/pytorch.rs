//! Kernels against PyTorch: every call in fixtures/kernels.json.gz, with its results.

use std::path::Path;

use serde_json::Value;

use super::elements::Lane;
use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::is_floating;
use crate::backend::operators::error::invalid;
use crate::backend::operators::shapes::{at, each, row_major};
use crate::backend::operators::view::{Call, Operand, View};
use crate::job::{Arg, Dtype, Operator, Phase, Replay};

/// A storage that is aligned for every type, and the view on it.
pub struct Owned {
    #[allow(dead_code, reason = "the view points into it")]
    storage: Vec<u64>,
    pub view: View,
}

fn dtype(name: &str) -> Dtype {
    match name {
        "f32" => Dtype::F32,
        "bf16" => Dtype::Bf16,
        "f16" => Dtype::F16,
        "i64" => Dtype::I64,
        "i32" => Dtype::I32,
        "u8" => Dtype::U8,
        "bool" => Dtype::Bool,
        other => panic!("{other}"),
    }
}

fn sizes(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

fn value_of(value: &Value) -> f64 {
    match value.get("special").and_then(Value::as_str) {
        Some("inf") => f64::INFINITY,
        Some("-inf") => f64::NEG_INFINITY,
        Some(_) => f64::NAN,
        None => value.as_f64().unwrap_or_else(|| panic!("{value}")),
    }
}

impl Owned {
    pub fn new(dtype: Dtype, shape: &[usize], stride: &[usize], fill: u64) -> Self {
        let last: usize = shape.iter().zip(stride).map(|(n, s)| n.saturating_sub(1) * s).sum();
        let mut storage = vec![fill; (last + 1) * dtype.size() as usize / 8 + 1];
        let view = View {
            data: storage.as_mut_ptr().cast(),
            dtype,
            shape: shape.to_vec(),
            stride: stride.to_vec(),
        };
        Self { storage, view }
    }

    pub fn read(record: &Value) -> Self {
        let owned = Self::blank(record);
        for (i, value) in record["data"].as_array().unwrap().iter().enumerate() {
            let number = value_of(value);
            // SAFETY: the storage has as many elements as the record says.
            unsafe {
                if is_floating(&owned.view) {
                    f32::store(owned.view.dtype, at(&owned.view, i), 1, &[number as f32]);
                } else {
                    i64::store(owned.view.dtype, at(&owned.view, i), 1, &[value.as_i64().unwrap()]);
                }
            }
        }
        owned
    }

    /// Of the same shape, filled with what no kernel may leave behind.
    fn blank(record: &Value) -> Self {
        Self::new(
            dtype(record["dtype"].as_str().unwrap()),
            &sizes(&record["shape"]),
            &sizes(&record["stride"]),
            0x7fc0_1234_7fc0_1234,
        )
    }

    pub fn floats(shape: &[usize], data: &[f32]) -> Self {
        let owned = Self::new(Dtype::F32, shape, &row_major(shape), 0);
        // SAFETY: callers give as many numbers as the shape has.
        unsafe { f32::store(Dtype::F32, owned.view.data, 1, data) };
        owned
    }

    pub fn to_vec(&self) -> Vec<f64> {
        let mut all = Vec::new();
        each(&self.view.shape, &[&self.view.stride], |[offset]| {
            all.push(super::elements::read(&self.view, offset))
        });
        all
    }
}

/// An operator's call with its storages.
pub struct Bench {
    pub operator: Operator,
    pub args: Vec<Operand>,
    pub outputs: Vec<Option<View>>,
    pub hidden: Vec<View>,
    pub batch: Vec<Vec<u8>>,
    pub iteration: u64,
    pub key: u64,
}

impl Bench {
    pub fn new(
        kind: &str,
        args: Vec<Arg>,
        operands: Vec<Operand>,
        outputs: &[&Owned],
        hidden: &[&Owned],
    ) -> Self {
        let operator = Operator {
            name: "tested".into(),
            kind: kind.into(),
            phase: Phase::Forward,
            args,
            outputs: Vec::new(),
            hidden: Vec::new(),
            workspace: crate::units::Bytes(0),
            replay: Replay::Pure,
            random: false,
            ..Operator::default()
        };
        let outputs = outputs.iter().map(|o| Some(o.view.clone())).collect();
        let hidden = hidden.iter().map(|o| o.view.clone()).collect();
        Self { operator, args: operands, outputs, hidden, batch: Vec::new(), iteration: 0, key: 0 }
    }

    pub fn run(&self) -> Result<(), KernelError> {
        self.run_on(&|call| {
            crate::backend::host::widen::run(
                super::find(&call.operator.kind).ok_or("no kernel")?,
                call,
            )
        })
    }

    /// On another device.
    pub fn run_on(
        &self,
        device: &dyn Fn(&Call<'_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        device(&Call {
            operator: &self.operator,
            args: &self.args,
            outputs: &self.outputs,
            hidden: &self.hidden,
            iteration: self.iteration,
            position: 0,
            steps_done: 0,
            random_key: self.key,
            replay: false,
            optimizer: None,
            batch: &self.batch,
        })
    }
}

/// A plain argument; tensors are `None` here and operands there.
fn plain(value: &Value, owned: &mut Vec<Owned>) -> (Arg, Operand) {
    let list = |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect();
    let Some((key, v)) = value.as_object().and_then(|o| o.iter().next()) else {
        return (Arg::None, Operand::Plain);
    };
    let arg = match key.as_str() {
        "tensor" => {
            owned.push(Owned::read(v));
            return (Arg::None, Operand::Tensor(owned.last().unwrap().view.clone()));
        }
        "tensors" => {
            let views = v.as_array().unwrap().iter().map(|t| {
                (!t.is_null()).then(|| {
                    owned.push(Owned::read(t));
                    owned.last().unwrap().view.clone()
                })
            });
            return (Arg::None, Operand::Tensors(views.collect()));
        }
        // Two keys: "float" comes first.
        "float" if value.get("host").is_some() => {
            let dtype = if v.as_bool().unwrap() { Dtype::F64 } else { Dtype::I64 };
            Arg::Host { dtype, shape: vec![], value: value["host"].as_f64(), input: None }
        }
        "int" => Arg::Int(v.as_i64().unwrap()),
        "float" => Arg::Float(value_of(v)),
        "bool" => Arg::Bool(v.as_bool().unwrap()),
        "text" => Arg::Text(v.as_str().unwrap().into()),
        "ints" => Arg::Ints(list(v)),
        "bools" => Arg::Bools(v.as_array().unwrap().iter().map(|x| x.as_bool().unwrap()).collect()),
        "floats" => Arg::Floats(v.as_array().unwrap().iter().map(value_of).collect()),
        other => panic!("{other}"),
    };
    (arg, Operand::Plain)
}

fn compare(got: &Owned, expected: &Owned, tolerance: f64) -> Result<(), KernelError> {
    let (got, expected) = (got.to_vec(), expected.to_vec());
    // Sums cancel: what counts is the size of the tensor's numbers.
    let scale =
        expected.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs())).min(1.0);
    for (i, (&g, &e)) in got.iter().zip(&expected).enumerate() {
        let close =
            g == e || g.is_nan() && e.is_nan() || (g - e).abs() <= tolerance * e.abs().max(scale);
        if !close {
            return Err(invalid!("element {i} is {g}, should be {e}"));
        }
    }
    Ok(())
}

fn check(
    case: &Value,
    device: &dyn Fn(&Call<'_>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let mut owned = Vec::new();
    let (args, operands): (Vec<_>, Vec<_>) =
        case["args"].as_array().unwrap().iter().map(|a| plain(a, &mut owned)).unzip();
    let expected: Vec<Option<Owned>> = case["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| o.get("tensor").map(Owned::read))
        .collect();
    let mut outputs: Vec<Option<Owned>> = case["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| o.get("tensor").map(Owned::blank))
        .collect();
    let hidden_expected: Vec<Owned> =
        case["hidden"].as_array().unwrap().iter().map(Owned::read).collect();
    let hidden: Vec<Owned> = case["hidden"].as_array().unwrap().iter().map(Owned::blank).collect();
    let mut bench = Bench::new(
        case["kind"].as_str().unwrap(),
        args,
        operands,
        &[],
        &hidden.iter().collect::<Vec<_>>(),
    );
    if case["inplace"].as_bool().unwrap() {
        outputs[0] = Some(owned.swap_remove(0));
    }
    bench.outputs = outputs.iter().map(|o| o.as_ref().map(|o| o.view.clone())).collect();
    bench.run_on(device)?;
    let tolerance = case["tolerance"].as_f64().unwrap();
    for (i, (got, expected)) in outputs.iter().zip(&expected).enumerate() {
        if let (Some(got), Some(expected)) = (got, expected) {
            compare(got, expected, tolerance).map_err(|e| invalid!("output {i}: {e}"))?;
        }
    }
    for (i, (got, expected)) in hidden.iter().zip(&hidden_expected).enumerate() {
        compare(got, expected, tolerance).map_err(|e| invalid!("hidden {i}: {e}"))?;
    }
    Ok(())
}

#[test]
fn agrees_with_pytorch() {
    let run = |call: &Call<'_>| {
        let kernel = super::find(&call.operator.kind).ok_or("no kernel")?;
        crate::backend::host::widen::run(kernel, call)
    };
    every_case(&run, &|_| true);
}

/// Every recorded call that a device has.
pub fn every_case(
    device: &dyn Fn(&Call<'_>) -> Result<(), KernelError>,
    has: &dyn Fn(&Value) -> bool,
) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/kernels.json.gz");
    let cases: Vec<Value> =
        serde_json::from_slice(&crate::files::read(&path, 64 << 20).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for (i, case) in cases.iter().enumerate().filter(|(_, case)| has(case)) {
        if let Err(e) = check(case, device) {
            let brief: String = case["args"].to_string().chars().take(300).collect();
            wrong.push(format!("case {i} {}: {e}\n    {brief}", case["kind"]));
        }
    }
    assert!(cases.len() > 500);
    assert!(
        wrong.is_empty(),
        "{} of {} are wrong:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}
