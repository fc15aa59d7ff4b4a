//! What each kernel computes and moves, in closed form from a launch's parameters.
//!
//! *Bytes* are all that threads load from and store to tensors and to the memory beside the arena,
//! caches not considered; a test counts them as the kernels run ([`counted`]). *Operations* are
//! those of the source: 1 for an addition, multiplication, division or comparison, 10 for a
//! function such as `expf`, as the roofline counts them; in attention those of whole tiles. What
//! finds an element's place is not counted.

mod counted;
mod table;

use super::launch::{Family, Launch};
use super::params::{
    Attention, BatchNorm, Index, Map, Operand, Params, Pool, Reduce, Rows, Update,
};

/// What a launch does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub flops: u64,
    pub bytes: u64,
}

fn work(flops: i64, bytes: i64) -> Work {
    Work { flops: flops.try_into().unwrap(), bytes: bytes.try_into().unwrap() }
}

/// The structure that a launch's bytes were made from.
fn params<P: Params>(launch: &Launch) -> P {
    assert_eq!(launch.params.len(), size_of::<P>(), "{}", launch.kernel);
    // SAFETY: the bytes were made from such a structure.
    unsafe { launch.params.as_ptr().cast::<P>().read_unaligned() }
}

/// Bytes of an element by its type's number, as `params::code` has it.
fn sized(dtype: i32) -> i64 {
    [4, 2, 8, 4, 1, 1, 2, 8][usize::try_from(dtype).unwrap()]
}

/// Bytes of an element; none of what is not there.
fn size(o: &Operand) -> i64 {
    if o.number == 1 { 0 } else { sized(o.dtype) }
}

fn threads(launch: &Launch) -> i64 {
    i64::from(launch.block[0]) * i64::from(launch.block[1])
}

/// Parts by which a first launch cuts a sum (one where a launch does all), and whether this is the
/// second.
fn cut(count: i64, second: i32) -> (i64, bool, bool) {
    (count, count > 1 && second == 0, second == 1)
}

/// What a launch does, where a model's kernels include it. Targets and indices are taken to be all
/// good ones, each largest element of a pool's window to be one element.
///
/// # Panics
/// For a kernel that has no closed form yet.
pub fn charged(launch: &Launch) -> Work {
    match launch.family {
        Family::Pointwise => pointwise(launch),
        Family::Reduce => reduce(launch),
        Family::Softmax => softmax(launch),
        Family::Norm if launch.kernel.starts_with("batch") => batch_norm(launch),
        Family::Norm => layer_norm(launch),
        Family::Pool => pool(launch),
        Family::Index => index(launch),
        Family::Optimizer => update(launch),
        Family::Attention | Family::AttentionBlocked => attention(launch),
        Family::Matrix | Family::AttentionMma => panic!("no closed form of {}", launch.kernel),
    }
}

fn pointwise(launch: &Launch) -> Work {
    let p: Map = params(launch);
    let name = launch.kernel.get(2..).unwrap_or_default();
    let each = match name {
        _ if launch.kernel.starts_with("i_") => 0,
        "copy" | "arange" => 0,
        "add" | "sub" | "mul" | "div" | "relu" | "threshold_backward" => 1,
        "add_scaled" | "cube" => 2,
        "square" => 1,
        "tanh" => 10,
        "tanh_backward" => 3,
        "gelu_tanh" => 18,
        "gelu_tanh_backward" => 35,
        other => panic!("no count of the operations of {other}"),
    };
    // What an operator computes from the element's number has numbers for operands.
    work(each * p.count, p.count * p.o.iter().map(size).sum::<i64>())
}

fn reduce(launch: &Launch) -> Work {
    let p: Reduce = params(launch);
    assert!(!["reduce_place", "running_f_sum", "running_i_sum"].contains(&launch.kernel.as_str()));
    let (parts, first, second) = cut(p.parts.count, p.parts.second);
    let terms = p.kept * if second { parts } else { p.reduced };
    let read = terms * if second { 8 } else { size(&p.from) };
    let written = if first { p.kept * parts * 8 } else { p.kept * size(&p.out) };
    let flops = if launch.kernel.contains("_f_") { terms } else { 0 };
    work(flops, read + written)
}

fn softmax(launch: &Launch) -> Work {
    let p: Rows = params(launch);
    let [out, a, b, c, d, _] = p.o.each_ref().map(size);
    let (all, log) = (p.rows * p.length, p.flags & 1 == 1);
    let each_row = p.k[1] == 0;
    match launch.kernel.as_str() {
        "softmax" => {
            // The row's facts are one pass, its results another.
            let flops = if log { 14 + 2 } else { 14 + 12 };
            work(flops * all, all * (2 * a + out))
        }
        "softmax_backward" => {
            let (flops, saved) = if log { (13, b) } else { (4, 2 * b) };
            work(flops * all, all * (2 * a + saved + out))
        }
        "likelihood" => {
            assert_eq!(p.k[3], 0, "from scores that are no logarithms");
            let result = if each_row { p.rows * out } else { out };
            work(4 * p.rows, p.rows * (b + c + a) + result + d)
        }
        "likelihood_backward" => {
            let weights = match (p.k[1], p.o[4].number) {
                (1, 1) => p.rows * (b + c),
                (1, _) => threads(launch) * d,
                _ => 0,
            };
            work(2 * p.rows, weights + p.rows * (b + a + c + out))
        }
        "squared_error" => work(4 * p.rows, p.rows * (a + b) + out),
        other => panic!("no closed form of {other}"),
    }
}

fn batch_norm(launch: &Launch) -> Work {
    let p: BatchNorm = params(launch);
    let (parts, first, second) = cut(p.parts.count, p.parts.second);
    let channels = i64::from(launch.grid) / parts;
    let (all, blocks) = (p.elements * channels, i64::from(launch.grid));
    let by_thread = |operands: &[&Operand]| {
        blocks * threads(launch) * operands.iter().map(|o| size(o)).sum::<i64>()
    };
    let by_channel =
        |operands: &[&Operand]| channels * operands.iter().map(|o| size(o)).sum::<i64>();
    let (x, y, out) = (size(&p.x), size(&p.y), size(&p.out));
    let forward = launch.kernel == "batch_norm";
    let summed = !forward || p.training == 1;
    // One pass for sums, another for results.
    let (mut flops, mut bytes) = (0, 0);
    if summed && !second {
        flops += all * if forward { 3 } else { 4 };
        bytes += all * if forward { x } else { x + y };
    }
    if first {
        bytes += 16 * blocks;
    }
    if second {
        bytes += 16 * blocks * parts;
    }
    if !forward || !summed {
        bytes += by_thread(&[&p.mean, &p.deviation]);
    }
    if first {
        return work(flops, bytes);
    }
    if forward && p.update == 1 {
        bytes += 2 * by_channel(&[&p.mean, &p.deviation]);
    }
    bytes += by_channel(&[&p.first, &p.second]);
    if forward {
        work(flops + 3 * all, bytes + all * (x + out) + by_thread(&[&p.weight, &p.bias]))
    } else if p.out.number == 1 {
        work(flops, bytes)
    } else {
        work(flops + 5 * all, bytes + all * (x + y + out) + by_thread(&[&p.weight]))
    }
}

fn layer_norm(launch: &Launch) -> Work {
    let p: Rows = params(launch);
    let sizes = p.o.each_ref().map(size);
    let all = p.rows * p.length;
    match launch.kernel.as_str() {
        "layer_norm" => {
            let [out, x, weight, bias, mean, deviation] = sizes;
            work(7 * all, all * (2 * x + weight + bias + out) + p.rows * (mean + deviation))
        }
        "layer_norm_backward" => {
            let [out, gradient, x, mean, deviation, weight] = sizes;
            let of_rows = p.rows * threads(launch) * (mean + deviation);
            work(13 * all, all * (2 * (gradient + x + weight) + out) + of_rows)
        }
        "layer_norm_weights" => {
            let [weight, gradient, x, mean, deviation, bias] = sizes;
            let (parts, first, second) = cut(p.parts.count, p.parts.second);
            let read = if second {
                p.length * parts * 16
            } else {
                all * (gradient + x + mean + deviation)
            };
            let written = p.length * if first { 16 * parts } else { weight + bias };
            work(if second { 2 * p.length * parts } else { 5 * all }, read + written)
        }
        other => panic!("no closed form of {other}"),
    }
}

fn pool(launch: &Launch) -> Work {
    let p: Pool = params(launch);
    assert!(p.dilation == [1, 1], "no closed form of a pool with dilation");
    // By dimension: window by window, the pixels under it.
    let spans = |i: usize| -> Vec<(i32, i32)> {
        let window = |o: i32| {
            if p.adaptive == 1 {
                let end = ((o + 1) * p.size[i] + p.out[i] - 1) / p.out[i];
                return (o * p.size[i] / p.out[i], end);
            }
            let start = o * p.stride[i] - p.padding[i];
            (start.max(0), (start + p.kernel[i]).min(p.size[i]))
        };
        (0..p.out[i]).map(window).collect()
    };
    let under = |i: usize| spans(i).iter().map(|s| i64::from(s.1 - s.0)).sum::<i64>();
    let outputs = i64::from(p.out[0]) * i64::from(p.out[1]);
    let (pixels, pooled, index) = (size(&p.pixels), size(&p.pooled), size(&p.index));
    match launch.kernel.as_str() {
        "max_pool" => {
            let images = p.count / outputs;
            let seen = images * under(0) * under(1);
            work(seen, seen * pixels + p.count * (pooled + index))
        }
        "average_pool" => {
            let seen = p.count / outputs * under(0) * under(1);
            work(seen + p.count, seen * pixels + p.count * pooled)
        }
        "average_pool_backward" => {
            let images = p.count / (i64::from(p.size[0]) * i64::from(p.size[1]));
            let seen = images * under(0) * under(1);
            work(2 * seen, seen * pooled + p.count * pixels)
        }
        "max_pool_backward" => {
            let images = p.count / (i64::from(p.size[0]) * i64::from(p.size[1]));
            let seen = images * under(0) * under(1);
            // Each window's gradient goes to one pixel.
            work(seen, seen * index + images * outputs * pooled + p.count * pixels)
        }
        other => panic!("no closed form of {other}"),
    }
}

fn index(launch: &Launch) -> Work {
    if launch.kernel.ends_with("look_up") {
        let p: Index = params(launch);
        let numbers = p.index.iter().take(p.indices as usize).map(size).sum::<i64>();
        return work(0, p.count * (numbers + size(&p.from) + size(&p.out)));
    }
    let p: Rows = params(launch);
    assert_eq!(launch.kernel, "embedding_backward");
    let [out, gradient, numbers, ..] = p.o.each_ref().map(size);
    let (blocks, all) = (i64::from(launch.grid), p.rows * p.length);
    // Each block looks through all numbers once.
    work(all, blocks * p.rows * numbers + p.k[1] * p.length * out + all * gradient)
}

fn update(launch: &Launch) -> Work {
    let p: Update = params(launch);
    let each = match launch.kernel.as_str() {
        "update_adam" => 24,
        "update_sgd" => 8,
        other => panic!("no count of the operations of {other}"),
    };
    let (mut flops, mut bytes) = (0, 0);
    for one in &p.of[..usize::try_from(p.tensors).unwrap()] {
        let kept = |k: usize| k == 0 || k > 1 && !one.state[k - 2].is_null();
        let moved = |k: usize| sized(i32::from(one.dtype[k])) * if kept(k) { 2 } else { 1 };
        let present = (0..5).filter(|&k| k == 1 || kept(k));
        flops += each * one.count;
        bytes += one.count * present.map(moved).sum::<i64>();
    }
    work(flops, bytes)
}

/// Tiles of 64 queries by 64 keys; operations as for whole tiles.
fn attention(launch: &Launch) -> Work {
    let p: Attention = params(launch);
    let [batch, heads, queries, keys] = [p.batch, p.heads, p.queries, p.keys].map(i64::from);
    let [width, value_width] = [p.width, p.value_width].map(i64::from);
    let [q, k, v, out] = [&p.q, &p.k, &p.v, &p.out].map(size);
    let (gradient, sums) = (size(&p.gradient), size(&p.sums));
    if launch.kernel == "attention_deltas" {
        let rows = batch * heads * queries;
        return work(2 * rows * value_width, rows * (value_width * (gradient + out) + 4));
    }
    assert!(launch.family == Family::AttentionBlocked && p.bias.number == 1 && p.dropout == 0);
    let tile = 64;
    let tiles = |n: i64| (0..n).step_by(64).map(move |first| (first, tile.min(n - first)));
    let sees = |query: i64, key: i64| p.causal == 0 || key < query + tile;
    let facts = 16 * (sums + 4);
    // Rows of queries and of keys of each pair of tiles that is gone through.
    let pairs: Vec<(i64, i64)> = tiles(queries)
        .flat_map(|(query, m)| {
            tiles(keys).filter(move |(key, _)| sees(query, *key)).map(move |(_, n)| (m, n))
        })
        .collect();
    let [m, n] = [pairs.iter().map(|p| p.0).sum::<i64>(), pairs.iter().map(|p| p.1).sum()];
    let by_pair = |products: i64| pairs.len() as i64 * tile * tile * (2 * products + 12);
    let keys_of = width * k + value_width * v;
    let queries_of = width * q + value_width * gradient;
    let (flops, bytes) = match launch.kernel.as_str() {
        "attention_64" => (
            by_pair(width + value_width),
            n * keys_of + queries * (width * q + value_width * out + sums),
        ),
        "attention_back_queries_64" => (
            by_pair(2 * width + value_width),
            n * keys_of + queries * (queries_of + width * size(&p.dq) + facts),
        ),
        "attention_back_keys_64" => {
            assert_eq!(p.group, [1, 1], "of shared heads");
            let results = width * size(&p.dk) + value_width * size(&p.dv);
            let flops = by_pair(2 * width + 2 * value_width);
            (flops, m * (queries_of + facts) + keys * (keys_of + results))
        }
        other => panic!("no closed form of {other}"),
    };
    work(batch * heads * flops, batch * heads * bytes)
}
