//! Attention by each of its kernels against the host's.

use super::{Bench, Tensor, noise};
use crate::backend::cuda::emit;
use crate::backend::cuda::launch::{Action, Actions};
use crate::backend::cuda::shim::{call, present};
use crate::backend::host::kernels::find;
use crate::backend::host::widen;
use crate::job::{Arg, Dtype};

/// One attention and its gradients: several tiles, none of them full.
#[derive(Clone, Copy)]
struct Case {
    dtype: Dtype,
    width: usize,
    value_width: usize,
    /// Query heads for each head of keys and values.
    group: usize,
    causal: bool,
    dropout: f64,
    mask: Option<Dtype>,
    /// What the kernels' names end in, forward and backward.
    kernels: [&'static str; 2],
}

const QUERIES: usize = 77;
const KEYS: usize = 139;

/// Close to the host's, relative to the largest element: products on tensor cores round weights to
/// the type, which the host doesn't.
fn compare(bench: &Bench<'_>) -> Vec<Vec<f32>> {
    let (ours, hosts) = (
        bench.after(call),
        bench.after(|call| widen::run(find(&call.operator.kind).unwrap(), call)),
    );
    let mut before = bench.tensors.clone();
    for &at in bench.written {
        let dtype = bench.tensors[at].dtype;
        let ulp = match dtype {
            Dtype::Bf16 => 1.0 / 128.0,
            Dtype::F16 => 1.0 / 1024.0,
            _ => 1e-5,
        };
        let finite = hosts[at].iter().filter(|x| x.is_finite());
        let most = finite.fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(most > 0.02 && before[at].values() != ours[at], "{}: {most}", bench.kind);
        for (i, (x, y)) in ours[at].iter().zip(&hosts[at]).enumerate() {
            assert!(
                x == y || (x - y).abs() <= ulp * most,
                "{}: {dtype:?} tensor {at}, element {i}: {x}, not {y}, of {most}",
                bench.kind
            );
        }
    }
    ours
}

fn check(case: &Case) {
    let Case { dtype, width, value_width, group, causal, dropout, mask, .. } = *case;
    let tensor =
        |heads, rows, columns, salt| Tensor::new(dtype, &[1, heads, rows, columns], noise(salt));
    let (q, k) = (tensor(2, QUERIES, width, 1), tensor(2 / group, KEYS, width, 2));
    let (v, out) = (tensor(2 / group, KEYS, value_width, 3), tensor(2, QUERIES, value_width, 4));
    // PyTorch takes cuDNN's in bf16 and f16, whose row sums are columns.
    let cudnn = dtype != Dtype::F32 && mask.is_none();
    let rows: &[usize] = if cudnn { &[1, 2, QUERIES, 1] } else { &[1, 2, QUERIES] };
    let sums = Tensor::new(Dtype::F32, rows, |_| 0.0);
    let bias = mask.map(|dtype| {
        let noise = noise(7);
        // Query 5 sees nothing where it is a mask.
        let seen = |i, x| f32::from(x > 0.0 && i / KEYS % QUERIES != 5);
        let of = |i| if dtype == Dtype::Bool { seen(i, noise(i)) } else { noise(i) };
        Tensor::new(dtype, &[1, 2, QUERIES, KEYS], of)
    });
    let (none, no) = (Arg::None, Arg::Bool(causal));
    let options = [Arg::Bool(true), Arg::Float(dropout), no.clone()];
    let inputs = || [q.clone(), k.clone(), v.clone()].into_iter().chain(bias.clone());
    let last = 3 + usize::from(bias.is_some());
    let bench = Bench {
        kind: if cudnn {
            "aten::_scaled_dot_product_cudnn_attention"
        } else {
            "aten::_scaled_dot_product_efficient_attention"
        },
        tensors: inputs().chain([out, sums]).collect(),
        list: 0,
        results: 2,
        plain: bias.is_none().then(|| none.clone()).into_iter().chain(options).collect(),
        written: &[last, last + 1],
        group: None,
        done: 0,
    };
    let mut after = compare(&bench);
    // By name, so that each kernel is surely tried.
    assert_eq!(named(&bench, true), format!("attention{}", case.kernels[0]));
    let (sums, out) = (after.pop().unwrap(), after.pop().unwrap());
    let gradient = tensor(2, QUERIES, value_width, 5);
    let saved = [
        Tensor::new(dtype, &[1, 2, QUERIES, value_width], |i| out[i]),
        Tensor::new(Dtype::F32, rows, |i| sums[i]),
    ];
    let results = [q.clone(), k.clone(), v.clone()];
    let (share, all) = (Arg::Float(dropout), Arg::Bools(vec![true, true, true, false]));
    let (kind, plain) = if bias.is_some() {
        let plain = vec![none.clone(), none, share, all, no];
        ("aten::_scaled_dot_product_efficient_attention_backward", plain)
    } else {
        let (queries, keys) = (Arg::Int(QUERIES as i64), Arg::Int(KEYS as i64));
        let (absent, kind) = if cudnn {
            (5, "aten::_scaled_dot_product_cudnn_attention_backward")
        } else {
            (2, "aten::_scaled_dot_product_flash_attention_backward")
        };
        let mut plain = vec![none; absent];
        plain.extend([queries, keys, share, no]);
        (kind, plain)
    };
    let bench = Bench {
        kind,
        tensors: std::iter::once(gradient).chain(inputs()).chain(saved).chain(results).collect(),
        list: 0,
        results: 3,
        plain,
        written: &[last + 3, last + 4, last + 5],
        group: None,
        done: 0,
    };
    compare(&bench);
    assert_eq!(named(&bench, true), format!("attention_back_keys{}", case.kernels[1]));
}

/// The last kernel of a call.
fn named(bench: &Bench<'_>, ampere: bool) -> String {
    let mut name = String::new();
    bench.after(|call| {
        let mut actions = Actions::new(std::ptr::null_mut(), 1);
        actions.ampere = ampere;
        emit::find(&call.operator.kind).ok_or("no such operator")?(call, &mut actions)?;
        if let Some(Action::Launch(launch)) = actions.list.last() {
            name.clone_from(&launch.kernel);
        }
        Ok(())
    });
    name
}

const USUAL: Case = Case {
    dtype: Dtype::F32,
    width: 64,
    value_width: 64,
    group: 1,
    causal: false,
    dropout: 0.0,
    mask: None,
    kernels: ["_64"; 2],
};

#[test]
fn attention_in_f32_agrees_with_the_host() {
    if !present() {
        return;
    }
    // Fours of columns come whole, or one by one.
    check(&Case { causal: true, ..USUAL });
    check(&Case { width: 20, value_width: 31, dropout: 0.3, ..USUAL });
    check(&Case { mask: Some(Dtype::Bool), width: 8, ..USUAL });
    check(&Case { mask: Some(Dtype::F32), causal: true, group: 2, value_width: 12, ..USUAL });
    // Several tiles of queries and keys, whose columns come in pieces.
    check(&Case { width: 256, value_width: 160, kernels: ["_256"; 2], ..USUAL });
    check(&Case { width: 72, causal: true, dropout: 0.2, kernels: ["_128"; 2], ..USUAL });
}

#[test]
fn attention_on_tensor_cores_agrees_with_the_host() {
    if !present() {
        return;
    }
    let (bf16, f16) = (["_bf16_64"; 2], ["_f16_64"; 2]);
    let half = Case { dtype: Dtype::Bf16, kernels: bf16, ..USUAL };
    let other = Case { dtype: Dtype::F16, kernels: f16, ..USUAL };
    check(&Case { causal: true, ..half });
    check(&Case { dropout: 0.3, ..other });
    // Eights of columns come whole, or one by one.
    check(&Case { width: 24, value_width: 43, group: 2, ..other });
    check(&Case { mask: Some(Dtype::Bool), ..other });
    check(&Case { mask: Some(Dtype::Bf16), causal: true, ..half });
    check(&Case { width: 128, causal: true, kernels: ["_bf16_128", "_128"], ..half });
    check(&Case { value_width: 96, kernels: ["_f16_128", "_128"], ..other });
    check(&Case { width: 192, value_width: 130, kernels: ["_256"; 2], ..half });
}

/// A GPU before Ampere has neither instructions for bf16 nor 96 KiB of shared memory for a block.
#[test]
fn older_gpus_have_attention_without_tensor_cores() {
    for (dtype, width) in [(Dtype::Bf16, 64), (Dtype::F32, 64), (Dtype::F16, 128)] {
        let tensor = || Tensor::new(dtype, &[1, 2, 3, width], noise(1));
        let bench = Bench {
            kind: "aten::scaled_dot_product_attention",
            tensors: vec![tensor(), tensor(), tensor(), tensor()],
            list: 0,
            results: 1,
            plain: vec![Arg::None, Arg::Float(0.0), Arg::Bool(true)],
            written: &[3],
            group: None,
            done: 0,
        };
        assert_eq!(named(&bench, false), "attention_128");
        assert_ne!(named(&bench, true), "attention_128");
    }
}
