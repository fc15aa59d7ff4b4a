//! Graphs of one operator each, whose shapes are those of a job's operators with other extents.
//! From them a predictor learns the kinds that a job has, without a list of kinds.
//!
//! Equal extents of an operator change alike, so that most shapes stay consistent. Those that do
//! not (the sides of a pooling and of what it returns) are refused by the operator's own checks.
//! Where too few are left, one extent at a time changes.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::roofline;
use crate::job::{Arg, Graph, Operand, Operator, Role, Tensor};
use crate::units::{Bytes, TensorId, mix};

/// The most flops of a sample: as many as the largest convolution of VGG-16's backward has with 16
/// images of 224 x 224.
const MOST_FLOPS: u128 = 128_000_000_000;

/// The most bytes of all tensors of a sample.
const MOST_BYTES: u64 = 1 << 30;

/// Smaller extents stay: they are kernels, channels of images, heads, or arguments.
const SMALLEST: u64 = 8;

/// At most one sample in this many is an operator of the job as it is.
const OWN: u32 = 3;

/// How many operators with all extents changed are tried for each shape that is asked for, and how
/// many with one, if any was not usable.
const TRIES: u32 = 4;

/// For each kind of operator of `graph` up to `count` different operators like its own that are
/// usable, as graphs of one operator each.
pub fn samples(
    graph: &Graph,
    count: u32,
    seed: u64,
    mut usable: impl FnMut(&Graph) -> bool,
) -> Vec<Graph> {
    let mut kinds: BTreeMap<&str, Vec<&Operator>> = BTreeMap::new();
    for operator in &graph.operators {
        kinds.entry(&operator.kind).or_default().push(operator);
    }
    let mut all = Vec::new();
    for (kind, of_kind) in kinds {
        let mut draw = kind.bytes().fold(mix(seed), |hash, byte| mix(hash ^ u64::from(byte)));
        let (mut seen, mut found, mut refused) = (BTreeSet::new(), 0, 0);
        let own = own(&of_kind, count / OWN);
        let tries = count.saturating_mul(TRIES);
        for number in 0..tries.saturating_mul(2) {
            if found == count || number >= tries && refused == 0 {
                break;
            }
            draw = mix(draw);
            let like = of_kind[usize::try_from(draw % of_kind.len() as u64).unwrap_or(0)];
            let (like, mut extents) = match own.get(number as usize) {
                Some(like) => (*like, BTreeMap::new()),
                None => (like, changed(like, draw)),
            };
            if number >= tries {
                extents.retain(|old, new| old != new);
                let one = usize::try_from(mix(draw) % extents.len().max(1) as u64).unwrap_or(0);
                extents = extents.into_iter().skip(one).take(1).collect();
            }
            let sample = isolated(graph, like, &extents).filter(|sample| {
                let bytes = sample.tensors.iter().fold(0u64, |a, t| a.saturating_add(t.bytes.0));
                bytes <= MOST_BYTES && roofline::flops(&sample.operators[0]) <= MOST_FLOPS
            });
            let Some(mut sample) = sample else { continue };
            if !seen.insert(crate::device::latency::key(&sample.operators[0])) {
                continue;
            }
            if usable(&sample) {
                sample.name = format!("{kind} {number}");
                all.push(sample);
                found += 1;
            } else {
                refused += 1;
            }
        }
    }
    all
}

/// At most `most` of the job's own operators of a kind that differ, from the smallest to the
/// largest, so that what is learned reaches as far as the job.
fn own<'a>(of_kind: &[&'a Operator], most: u32) -> Vec<&'a Operator> {
    let mut by_key = BTreeMap::new();
    for &operator in of_kind {
        by_key.entry(crate::device::latency::key(operator)).or_insert(operator);
    }
    let mut own: Vec<&Operator> = by_key.into_values().collect();
    own.sort_by_key(|operator| (roofline::bytes(operator), roofline::flops(operator)));
    let (count, most) = (own.len(), (most as usize).max(1));
    if count <= most {
        return own;
    }
    let last = (most - 1).max(1);
    (0..most).map(|number| own[number * (count - 1) / last]).collect()
}

/// Another extent for each extent of the operator: a third stays, the others are between a
/// sixteenth and the double, by eighths of an octave.
fn changed(operator: &Operator, seed: u64) -> BTreeMap<u64, u64> {
    let extents: BTreeSet<u64> = operator
        .reads()
        .chain(operator.writes())
        .flat_map(|operand| operand.shape.iter().copied())
        .filter(|extent| *extent >= SMALLEST)
        .collect();
    let other = |extent: u64| {
        let draw = mix(seed ^ mix(extent));
        let (octave, eighth) = ((draw >> 8) % 5, (draw >> 16) % 8);
        let near = (extent * 2) >> octave;
        if draw.is_multiple_of(3) { extent } else { (near * (8 + eighth) / 16).max(1) }
    };
    extents.into_iter().map(|extent| (extent, other(extent))).collect()
}

/// The operator alone with other extents; `None` if it makes no graph.
fn isolated(graph: &Graph, operator: &Operator, extents: &BTreeMap<u64, u64>) -> Option<Graph> {
    let mut tensors: BTreeMap<TensorId, (TensorId, Tensor, u32)> = BTreeMap::new();
    for operand in operator.reads() {
        enter(graph, operand, operand.version, extents, &mut tensors)?;
    }
    for operand in operator.writes() {
        // A write in place also reads the version before.
        enter(graph, operand, operand.version.saturating_sub(1), extents, &mut tensors)?;
    }
    let generated: BTreeSet<TensorId> = operator.generates().map(|o| o.tensor).collect();
    for (id, (_, tensor, _)) in &mut tensors {
        let stays = !matches!(tensor.role, Role::Activation | Role::Gradient);
        if !stays && !generated.contains(id) {
            tensor.role = if operator.updates().any(|o| o.tensor == *id) {
                Role::Buffer
            } else {
                Role::Input
            };
        }
    }
    let moved = |operand: &Operand| -> Option<Operand> {
        let (id, _, first) = tensors.get(&operand.tensor)?;
        let shape: Vec<u64> = operand.shape.iter().map(|e| *extents.get(e).unwrap_or(e)).collect();
        Some(Operand {
            tensor: *id,
            version: operand.version - first,
            dtype: operand.dtype,
            offset: 0,
            stride: strides(&shape, operand),
            shape,
        })
    };
    let args = operator.args.iter().map(|arg| {
        Some(match arg {
            Arg::Tensor(operand) => Arg::Tensor(moved(operand)?),
            Arg::Tensors(list) => {
                let one =
                    |o: &Option<Operand>| o.as_ref().map_or(Some(None), |o| moved(o).map(Some));
                Arg::Tensors(list.iter().map(one).collect::<Option<_>>()?)
            }
            Arg::Ints(all) => {
                let other = |n: &i64| {
                    let found = u64::try_from(*n).ok().and_then(|n| extents.get(&n));
                    found.map_or(Some(*n), |other| i64::try_from(*other).ok())
                };
                Arg::Ints(all.iter().map(other).collect::<Option<_>>()?)
            }
            other => other.clone(),
        })
    });
    let output = |o: &Option<Operand>| o.as_ref().map_or(Some(None), |o| moved(o).map(Some));
    let alone = Operator {
        args: args.collect::<Option<_>>()?,
        outputs: operator.outputs.iter().map(output).collect::<Option<_>>()?,
        hidden: operator.hidden.iter().map(moved).collect::<Option<_>>()?,
        workspace: Bytes::ZERO,
        duration_ns: None,
        ..operator.clone()
    };
    let mut in_order: Vec<(TensorId, Tensor)> =
        tensors.into_values().map(|(id, tensor, _)| (id, tensor)).collect();
    in_order.sort_by_key(|(id, _)| *id);
    let tensors = in_order.into_iter().map(|(_, tensor)| tensor).collect();
    Graph::new(String::new(), tensors, vec![alone], graph.optimizer.clone(), None, None).ok()
}

/// Notes the tensor of an operand, its bytes, and the version from which the operator starts.
fn enter(
    graph: &Graph,
    operand: &Operand,
    version: u32,
    extents: &BTreeMap<u64, u64>,
    tensors: &mut BTreeMap<TensorId, (TensorId, Tensor, u32)>,
) -> Option<()> {
    let shape: Vec<u64> = operand.shape.iter().map(|e| *extents.get(e).unwrap_or(e)).collect();
    let elements = shape.iter().try_fold(1u64, |all, n| all.checked_mul(*n))?;
    let span = span(&shape, &strides(&shape, operand)).unwrap_or(0);
    // A part of a larger tensor: of that it is only known how far the part reaches.
    let (elements, shape) = if span > elements { (span, vec![span]) } else { (elements, shape) };
    let bytes = Bytes(elements.checked_mul(operand.dtype.size())?);
    let id = TensorId::from_index(tensors.len());
    let of = graph.tensor(operand.tensor);
    let (_, tensor, first) = tensors.entry(operand.tensor).or_insert_with(|| {
        let kept = Tensor { kept_until: None, dtype: operand.dtype, ..of.clone() };
        (id, Tensor { bytes: Bytes::ZERO, shape: Vec::new(), ..kept }, version)
    });
    *first = version.min(*first);
    if bytes > tensor.bytes {
        (tensor.bytes, tensor.shape, tensor.dtype) = (bytes, shape, operand.dtype);
    }
    Some(())
}

/// Strides of a view whose dimensions lie in memory in the same order as the operand's. What the
/// operand leaves out (it is a part of a larger tensor) is left out in the same proportion, and
/// dimensions that `expand` repeats stay repeated.
fn strides(shape: &[u64], like: &Operand) -> Vec<u64> {
    let mut order: Vec<usize> = (0..shape.len()).filter(|&d| like.stride[d] > 0).collect();
    order.sort_by_key(|&d| (like.stride[d], std::cmp::Reverse(d)));
    let mut strides = vec![0; shape.len()];
    let mut next = order.first().map_or(1, |&d| like.stride[d]);
    for (place, &dimension) in order.iter().enumerate() {
        strides[dimension] = next;
        let own = like.shape[dimension].max(1);
        let whole = match order.get(place + 1) {
            Some(&outer) => (like.stride[outer] / like.stride[dimension].max(1)).max(own),
            None => own,
        };
        next *= (shape[dimension].max(1) * whole).div_ceil(own);
    }
    strides
}

/// The elements from a view's first to its last.
fn span(shape: &[u64], strides: &[u64]) -> Option<u64> {
    let last = shape.iter().zip(strides).try_fold(0u64, |all, (extent, stride)| {
        all.checked_add(extent.checked_sub(1)?.checked_mul(*stride)?)
    });
    last?.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::chakra;

    fn job(file: &str) -> Graph {
        let path =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(file);
        chakra::import(&path, &Default::default()).expect("a fixture").graph
    }

    #[test]
    fn each_kind_gets_different_operators_like_its_own() {
        let graph = job("tiny_gpt2-adamw.et.json.gz");
        let all = samples(&graph, 5, 1, |_| true);
        let kinds: BTreeSet<&str> = graph.operators.iter().map(|o| &*o.kind).collect();
        let varied: BTreeSet<&str> = all.iter().map(|sample| &*sample.operators[0].kind).collect();
        assert_eq!(kinds, varied);
        let keys: BTreeSet<String> =
            all.iter().map(|sample| crate::device::latency::key(&sample.operators[0])).collect();
        assert_eq!(keys.len(), all.len());
        let own: BTreeSet<String> =
            graph.operators.iter().map(crate::device::latency::key).collect();
        assert!(keys.difference(&own).count() > keys.len() / 2, "few other shapes");
        for sample in &all {
            assert!(
                sample.operators.len() == 1 && roofline::flops(&sample.operators[0]) <= MOST_FLOPS
            );
        }
        let again: Vec<String> =
            samples(&graph, 5, 1, |_| true).into_iter().map(|g| g.name).collect();
        assert_eq!(again, all.into_iter().map(|g| g.name).collect::<Vec<_>>());
    }

    #[test]
    fn operators_whose_extents_depend_on_each_other_get_as_many() {
        let graph = job("tiny_cnn-adam.et.json.gz");
        let device = crate::device::builtin::find("host").expect("a device");
        let runs = |sample: &Graph| {
            let (settings, spare) = (crate::Settings::default(), crate::Spare::default());
            crate::profile::alone(sample, &device, &settings, &spare).is_ok()
        };
        let pools = |sample: &Graph| sample.operators[0].kind.contains("max_pool2d");
        let all = samples(&graph, 12, 1, |sample| !pools(sample) || runs(sample));
        assert_eq!(all.iter().filter(|sample| pools(sample)).count(), 24);
    }

    #[test]
    fn a_part_of_a_tensor_stays_a_part() {
        let like = |shape: &[u64], stride: &[u64]| Operand {
            tensor: TensorId(0),
            version: 0,
            dtype: crate::job::Dtype::F32,
            offset: 5,
            shape: shape.to_vec(),
            stride: stride.to_vec(),
        };
        // Every second row of 8 of a transposed matrix, and a dimension that is repeated.
        let part = like(&[16, 32, 8], &[1024, 1, 64]);
        assert_eq!(strides(&[16, 32, 8], &part), [1024, 1, 64]);
        assert_eq!(strides(&[4, 16, 8], &part), [512, 1, 32]);
        assert_eq!(span(&[4, 16, 8], &[512, 1, 32]), Some(3 * 512 + 15 + 7 * 32 + 1));
        assert_eq!(strides(&[3, 7], &like(&[4, 8], &[0, 1])), [0, 1]);
        assert_eq!(strides(&[3, 7], &like(&[4, 8], &[8, 1])), [7, 1]);
    }

    #[test]
    fn the_jobs_own_operators_are_among_them() {
        let graph = job("tiny_gpt2-adamw.et.json.gz");
        let own: BTreeSet<String> =
            graph.operators.iter().map(crate::device::latency::key).collect();
        let all = samples(&graph, 30, 1, |_| true);
        let kept = all
            .iter()
            .filter(|sample| own.contains(&crate::device::latency::key(&sample.operators[0])));
        assert!(kept.count() * 3 > own.len() * 2);
    }

    #[test]
    fn an_update_in_place_stays_one() {
        let graph = job("tiny_cnn-adam.et.json.gz");
        let all = samples(&graph, 3, 1, |_| true);
        let update = all.iter().find(|g| g.operators[0].kind == "neap::adam").expect("an update");
        assert!(update.operators[0].updates().count() >= 3 && update.optimizer.is_some());
    }
}
