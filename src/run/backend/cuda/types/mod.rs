//! Calls in bf16 and f16, and in several types at once, on CUDA's kernels against the host's.

mod attention;

use super::emit;
use super::launch::{Action, Actions};
use super::shim::{self, call, present};
use crate::backend::host::kernels::elements::Lane;
use crate::backend::host::kernels::find;
use crate::backend::host::widen;
use crate::backend::operators::KernelError;
use crate::backend::operators::shapes::{count, row_major};
use crate::backend::operators::view::{Call, Operand, View};
use crate::job::{self, Arg, Dtype, Group, Operator};
use crate::units::TensorId;

/// A tensor with its own storage.
#[derive(Clone)]
struct Tensor {
    words: Vec<u64>,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Tensor {
    fn new(dtype: Dtype, shape: &[usize], value: impl Fn(usize) -> f32) -> Self {
        let size = shape.iter().product::<usize>();
        let mut words = vec![0u64; size + 1];
        let values: Vec<f32> = (0..size).map(value).collect();
        let data = words.as_mut_ptr().cast();
        // SAFETY: there is a word for each element.
        unsafe {
            match dtype {
                Dtype::I32 | Dtype::I64 => {
                    let values: Vec<i64> = values.iter().map(|&x| x as i64).collect();
                    i64::store(dtype, data, 1, &values);
                }
                _ => f32::store(dtype, data, 1, &values),
            }
        }
        Self { words, dtype, shape: shape.to_vec() }
    }

    fn view(&mut self) -> View {
        View {
            data: self.words.as_mut_ptr().cast(),
            dtype: self.dtype,
            shape: self.shape.clone(),
            stride: row_major(&self.shape),
        }
    }

    fn values(&mut self) -> Vec<f32> {
        let view = self.view();
        let mut values = vec![0.0; count(&view)];
        // SAFETY: as above.
        unsafe { f32::load(self.dtype, view.data, 1, &mut values) };
        values
    }
}

fn noise(salt: usize) -> impl Fn(usize) -> f32 {
    move |i| ((i * 7919 + salt * 104_729) % 1009) as f32 / 504.0 - 1.0
}

/// A call of tensors and plain arguments that writes the tensors `written`.
struct Bench<'a> {
    kind: &'a str,
    tensors: Vec<Tensor>,
    /// How many of the first tensors are one list.
    list: usize,
    /// How many of the last tensors are results and no arguments.
    results: usize,
    plain: Vec<Arg>,
    written: &'a [usize],
    group: Option<Group>,
    done: u64,
}

impl Bench<'_> {
    /// What each tensor holds after the call.
    fn after(&self, run: impl FnOnce(&Call<'_>) -> Result<(), KernelError>) -> Vec<Vec<f32>> {
        let mut tensors = self.tensors.clone();
        let views: Vec<View> = tensors.iter_mut().map(Tensor::view).collect();
        let (listed, others) = views[..views.len() - self.results].split_at(self.list);
        let mut args = Vec::new();
        if self.list > 0 {
            args.push(Operand::Tensors(listed.iter().cloned().map(Some).collect()));
        }
        args.extend(others.iter().cloned().map(Operand::Tensor));
        // Updates ask the graph for their parameter's type.
        let parameter = self.group.as_ref().map(|_| self.tensors[0].dtype);
        let first = parameter.map_or(Arg::None, |dtype| {
            Arg::Tensor(job::Operand {
                tensor: TensorId(0),
                version: 0,
                dtype,
                offset: 0,
                shape: vec![],
                stride: vec![],
            })
        });
        let others = args.iter().skip(1).map(|_| Arg::None);
        let blank = std::iter::once(first).chain(others).chain(self.plain.iter().cloned());
        let operator =
            Operator { kind: self.kind.into(), args: blank.collect(), ..Operator::default() };
        args.extend(self.plain.iter().map(|_| Operand::Plain));
        let outputs: Vec<Option<View>> =
            self.written.iter().map(|&at| Some(views[at].clone())).collect();
        run(&Call {
            operator: &operator,
            args: &args,
            outputs: &outputs,
            hidden: &[],
            iteration: 0,
            position: 0,
            steps_done: self.done,
            random_key: 0,
            replay: false,
            optimizer: self.group.as_ref(),
            batch: &[],
        })
        .unwrap_or_else(|e| panic!("{}: {e}", self.kind));
        tensors.iter_mut().map(Tensor::values).collect()
    }

    /// Both devices round at the same places. Sums in another order may differ in the last place of
    /// each type.
    fn agrees(&self, sums: bool) {
        let host = |call: &Call<'_>| widen::run(find(&call.operator.kind).unwrap(), call);
        let (ours, hosts) = (self.after(call), self.after(host));
        for (at, (a, b)) in ours.iter().zip(&hosts).enumerate() {
            let dtype = self.tensors[at].dtype;
            let ulp = match dtype {
                Dtype::Bf16 => 1.0 / 128.0,
                Dtype::F16 => 1.0 / 1024.0,
                _ => 2e-6,
            };
            for (i, (x, y)) in a.iter().zip(b).enumerate() {
                let near = sums && (x - y).abs() <= ulp * y.abs().max(0.01);
                let close = x == y || x.is_nan() && y.is_nan() || near;
                assert!(close, "{}: {dtype:?} tensor {at}, element {i}: {x}, not {y}", self.kind);
            }
        }
        let mut before = self.tensors.clone();
        assert!(self.written.iter().any(|&at| before[at].values() != ours[at]), "{}", self.kind);
    }
}

/// Hyperparameters that suit each of the rules.
fn group() -> Group {
    let values = [
        ("lr", 0.05),
        ("beta1", 0.9),
        ("beta2", 0.99),
        ("eps", 1e-6),
        ("weight_decay", 0.1),
        ("momentum", 0.8),
        ("dampening", 0.0),
        ("alpha", 0.9),
        ("momentum_decay", 0.004),
    ];
    let flags = ["nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay"];
    let flags = flags.map(|name| (name, 0.0));
    let values = values.into_iter().chain(flags).map(|(name, x)| (name.to_owned(), x));
    Group { values: values.collect(), ..Group::default() }
}

/// Parameters, gradients and states in the types that scripts give them: all in half precision;
/// half-precision parameters with f32 states; f32 master weights with half-precision gradients.
#[test]
fn optimizers_take_each_mix_of_types() {
    if !present() {
        return;
    }
    let f = Dtype::F32;
    let mixes =
        [Dtype::Bf16, Dtype::F16].into_iter().flat_map(|h| [[h, h, h], [h, h, f], [f, h, f]]);
    let rules = [("neap::adamw", 2), ("neap::sgd", 1), ("neap::rmsprop", 2), ("neap::nadam", 2)];
    for ([parameter, gradient, state], (kind, states)) in
        mixes.flat_map(|mix| rules.map(|rule| (mix, rule)))
    {
        // More than a chunk of the kernel's, so that several blocks work.
        let shape = [3, 1500];
        let mut tensors =
            vec![Tensor::new(parameter, &shape, noise(1)), Tensor::new(gradient, &shape, noise(2))];
        for at in 0..states {
            tensors.push(Tensor::new(state, &shape, move |i| noise(3 + at)(i).abs() / 4.0));
        }
        let written: Vec<usize> = (0..tensors.len()).filter(|&at| at != 1).collect();
        let bench = Bench {
            kind,
            tensors,
            list: 0,
            results: 0,
            plain: vec![],
            written: &written,
            group: Some(group()),
            done: 3,
        };
        bench.agrees(false);
    }
}

#[test]
fn gradients_are_unscaled_and_the_scale_follows() {
    if !present() {
        return;
    }
    for (bad, dtype) in [
        (None, Dtype::F32),
        (Some(f32::INFINITY), Dtype::F16),
        (Some(f32::NAN), Dtype::Bf16),
        (Some(f32::NEG_INFINITY), Dtype::F32),
    ] {
        let spoilt =
            move |i: usize| bad.filter(|_| i == 1100).unwrap_or_else(|| noise(5)(i) * 64.0);
        let tensors = vec![
            Tensor::new(dtype, &[7, 300], spoilt),
            Tensor::new(Dtype::F32, &[5], noise(6)),
            Tensor::new(Dtype::F32, &[1], |_| 0.0),
            Tensor::new(Dtype::F32, &[], |_| 1.0 / 64.0),
        ];
        let kind = "aten::_amp_foreach_non_finite_check_and_unscale_";
        let written = [0, 1, 2];
        let bench = Bench {
            kind,
            tensors,
            list: 2,
            results: 0,
            plain: vec![],
            written: &written,
            group: None,
            done: 0,
        };
        bench.agrees(false);
        assert_eq!(bench.after(call)[2], [f32::from(u8::from(bad.is_some()))]);
    }
    // A bad step; a good one; the last good one before it grows; growth beyond all numbers.
    for (scale, good, found, expected) in [
        (1024.0, 4.0, 1.0, (512.0, 0.0)),
        (1024.0, 4.0, 0.0, (1024.0, 5.0)),
        (1024.0, 9.0, 0.0, (2048.0, 0.0)),
        (3e38, 9.0, 0.0, (3e38, 0.0)),
    ] {
        let tensors = vec![
            Tensor::new(Dtype::F32, &[], |_| scale),
            Tensor::new(Dtype::I32, &[], |_| good),
            Tensor::new(Dtype::F32, &[], |_| found),
        ];
        let plain = vec![Arg::Float(2.0), Arg::Float(0.5), Arg::Int(10)];
        let kind = "aten::_amp_update_scale_";
        let bench = Bench {
            kind,
            tensors,
            list: 0,
            results: 0,
            plain,
            written: &[0, 1],
            group: None,
            done: 0,
        };
        bench.agrees(false);
        let after = bench.after(call);
        assert_eq!((after[0][0], after[1][0]), expected);
    }
}

/// The two steps that replace a product with its bias where the library has no such product.
fn bias_first(call: &Call<'_>) -> Result<(), KernelError> {
    let mut actions = Actions::new(std::ptr::null_mut(), 1);
    emit::find(&call.operator.kind).unwrap()(call, &mut actions)?;
    let [Action::Gemm(product)] = &actions.list[..] else { panic!("{:?}", actions.list) };
    let (spread, rest) = product.bias_first()?.unwrap();
    assert!(rest.bias.is_null() && rest.bias_first()?.is_none());
    shim::run(&[Action::Launch(spread), Action::Gemm(rest)], 2);
    Ok(())
}

/// A layer's bias goes with its product: one call of the library, whatever the batch.
#[test]
fn a_bias_goes_with_its_product() {
    fn in_one_call(call: &Call<'_>) -> Result<(), KernelError> {
        let mut actions = Actions::new(std::ptr::null_mut(), 1);
        emit::find(&call.operator.kind).unwrap()(call, &mut actions)?;
        let [Action::Gemm(product)] = &actions.list[..] else { panic!("{:?}", actions.list) };
        assert!(!product.bias.is_null() && product.beta == 0.0 && product.batch == 1);
        Ok(())
    }
    if !present() {
        return;
    }
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        // All above zero, so that sums don't cancel out.
        let tensor = |shape: &[usize], salt| {
            let noise = noise(salt);
            Tensor::new(dtype, shape, move |i| noise(i).abs() + 0.1)
        };
        let (linear, added) = (
            [tensor(&[3, 5, 7], 1), tensor(&[11, 7], 2), tensor(&[11], 3), tensor(&[3, 5, 11], 4)],
            [tensor(&[11], 3), tensor(&[5, 7], 1), tensor(&[7, 11], 2), tensor(&[5, 11], 4)],
        );
        for (kind, tensors) in [("aten::linear", linear), ("aten::addmm", added)] {
            let bench = Bench {
                kind,
                tensors: tensors.to_vec(),
                list: 0,
                results: 1,
                plain: vec![],
                written: &[3],
                group: None,
                done: 0,
            };
            bench.after(in_one_call);
            bench.agrees(true);
            assert_eq!(bench.after(bias_first), bench.after(shim::call), "{kind} {dtype:?}");
        }
    }
}
