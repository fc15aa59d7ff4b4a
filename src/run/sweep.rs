//! Graphs of one operator each, of one kind and many shapes, from which a predictor learns.
//!
//! Shapes are drawn uniformly by their logarithm from a seed, the same on every machine. Shapes
//! with more than [`MOST_FLOPS`] or [`MOST_BYTES`] are skipped.

use crate::device::roofline;
use crate::job::graph::contiguous;
use crate::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::units::{Bytes, TensorId, mix};

/// The most flops of a sample: larger operators would take most of the sweep's time.
pub const MOST_FLOPS: u128 = 2_000_000_000;

/// The most bytes of all tensors of a sample.
pub const MOST_BYTES: u64 = 64 << 20;

/// A short name, the operator's kind, and a function that draws a sample.
type Kind = (&'static str, &'static str, fn(&mut Draw) -> Parts);

/// The kinds that can be swept.
const KINDS: [Kind; 14] = [
    ("conv2d", "aten::conv2d", |d| convolution(d, false)),
    ("convolution_backward", "aten::convolution_backward", |d| convolution(d, true)),
    ("mm", "aten::mm", mm),
    ("addmm", "aten::addmm", addmm),
    ("linear", "aten::linear", linear),
    ("bmm", "aten::bmm", bmm),
    ("batch_norm", "aten::_batch_norm_impl_index", batch_norm),
    ("batch_norm_backward", "aten::cudnn_batch_norm_backward", batch_norm_backward),
    ("layer_norm", "aten::native_layer_norm", layer_norm),
    ("max_pool2d", "aten::max_pool2d_with_indices", max_pool),
    ("relu", "aten::relu", |d| elementwise(d, 1, &[])),
    ("threshold_backward", "aten::threshold_backward", |d| elementwise(d, 2, &[Arg::Int(0)])),
    ("add", "aten::add", |d| elementwise(d, 2, &[Arg::Int(1)])),
    ("tanh", "aten::tanh", |d| elementwise(d, 1, &[])),
];

/// The names that [`samples`] knows.
#[must_use]
pub fn names() -> Vec<&'static str> {
    KINDS.iter().map(|k| k.0).collect()
}

/// `count` graphs of one operator of a kind, which is a name of [`names`] or the framework's;
/// `None` for other kinds.
#[must_use]
pub fn samples(kind: &str, count: u32, seed: u64) -> Option<Vec<Graph>> {
    let (name, kind, draw) = KINDS.iter().find(|(name, full, _)| *name == kind || *full == kind)?;
    let mut draws =
        Draw(mix(name.bytes().fold(mix(seed), |hash, byte| mix(hash ^ u64::from(byte)))));
    let mut graphs = Vec::new();
    // Most draws are small enough. The bound ends the loop for a kind whose draws never are.
    for _ in 0..count.saturating_mul(50) {
        if graphs.len() == count as usize {
            break;
        }
        let parts = draw(&mut draws);
        let bytes = parts.tensors.iter().fold(0u64, |all, t| all.saturating_add(t.bytes.0));
        let graph = parts.graph(kind, graphs.len());
        if let Some(graph) =
            graph.filter(|g| bytes <= MOST_BYTES && roofline::flops(&g.operators[0]) <= MOST_FLOPS)
        {
            graphs.push(graph);
        }
    }
    Some(graphs)
}

/// A square matrix product.
#[must_use]
pub fn product(extent: u64) -> Graph {
    let mut p = Parts::default();
    p.matrix(extent, extent, false);
    p.matrix(extent, extent, false);
    p.output(Dtype::F32, &[extent, extent]);
    p.sure("aten::mm")
}

/// A 3 x 3 convolution that keeps the size of its images.
#[must_use]
pub fn square_convolution(batch: u64, channels: u64, side: u64) -> Graph {
    let mut p = Parts::default();
    p.input(&[batch, channels, side, side]);
    p.input(&[channels, channels, 3, 3]);
    p.args.push(Arg::None);
    for both in [1, 1, 1] {
        p.ints(&[both, both]);
    }
    p.args.push(Arg::Int(1));
    p.output(Dtype::F32, &[batch, channels, side, side]);
    p.sure("aten::conv2d")
}

/// An addition that waits for memory: `mebibytes` MiB a tensor.
#[must_use]
pub fn large_add(mebibytes: u64) -> Graph {
    addition(mebibytes << 18)
}

/// An operator that does next to nothing.
#[must_use]
pub fn smallest() -> Graph {
    addition(1)
}

fn addition(elements: u64) -> Graph {
    let mut p = Parts::default();
    p.input(&[elements]);
    p.input(&[elements]);
    p.args.push(Arg::Int(1));
    p.output(Dtype::F32, &[elements]);
    p.sure("aten::add")
}

/// A deterministic sequence of random numbers.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % n.max(1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn one<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap_or(0)]
    }

    /// A number from `low` to `high`, uniform by octaves and in steps of an eighth of one.
    fn log(&mut self, low: u64, high: u64) -> u64 {
        let octaves = u64::from((high / low.max(1)).max(1).ilog2()) + 1;
        let octave = low << self.below(octaves);
        (octave + octave * self.below(8) / 8).clamp(low, high)
    }
}

/// The parts of an operator.
#[derive(Default)]
struct Parts {
    tensors: Vec<Tensor>,
    args: Vec<Arg>,
    outputs: Vec<Option<Operand>>,
    hidden: Vec<Operand>,
    replay: Replay,
}

impl Parts {
    fn tensor(&mut self, name: &str, role: Role, dtype: Dtype, shape: &[u64]) -> Operand {
        let bytes = shape.iter().fold(dtype.size(), |all, &n| all.saturating_mul(n));
        let tensor = TensorId::from_index(self.tensors.len());
        self.tensors.push(Tensor {
            name: name.to_owned(),
            bytes: Bytes(bytes),
            role,
            dtype,
            shape: shape.to_vec(),
            kept_until: None,
        });
        Operand {
            tensor,
            version: 0,
            dtype,
            offset: 0,
            shape: shape.to_vec(),
            stride: contiguous(shape),
        }
    }

    /// Adds a tensor argument.
    fn input(&mut self, shape: &[u64]) -> Operand {
        let name = format!("in{}", self.tensors.len());
        let operand = self.tensor(&name, Role::Input, Dtype::F32, shape);
        self.args.push(Arg::Tensor(operand.clone()));
        operand
    }

    /// Adds a matrix argument, if `transposed` as a view of its transpose.
    fn matrix(&mut self, rows: u64, columns: u64, transposed: bool) {
        if transposed {
            let mut operand = self.input(&[columns, rows]);
            self.args.pop();
            (operand.shape, operand.stride) = (vec![rows, columns], vec![1, rows]);
            self.args.push(Arg::Tensor(operand));
        } else {
            self.input(&[rows, columns]);
        }
    }

    fn output(&mut self, dtype: Dtype, shape: &[u64]) {
        let name = format!("out{}", self.tensors.len());
        let operand = self.tensor(&name, Role::Activation, dtype, shape);
        self.outputs.push(Some(operand));
    }

    fn ints(&mut self, all: &[u64]) {
        self.args
            .push(Arg::Ints(all.iter().map(|&x| i64::try_from(x).unwrap_or(i64::MAX)).collect()));
    }

    /// Adds running statistics, which the operator updates.
    fn running(&mut self, channels: u64) {
        for name in ["running_mean", "running_var"] {
            let operand = self.tensor(name, Role::Buffer, Dtype::F32, &[channels]);
            self.args.push(Arg::Tensor(operand.clone()));
            self.hidden.push(Operand { version: 1, ..operand });
        }
        self.replay = Replay::SkipUpdates;
    }

    /// The graph of parts that are known to be valid. If they were not, an empty graph, which every
    /// runner refuses.
    fn sure(self, kind: &str) -> Graph {
        let nothing = || Graph {
            name: String::new(),
            tensors: Vec::new(),
            operators: Vec::new(),
            optimizer: None,
            loss: None,
            recorded_peak: None,
            origin: None,
        };
        self.graph(kind, 0).unwrap_or_else(nothing)
    }

    fn graph(self, kind: &str, index: usize) -> Option<Graph> {
        let operator = Operator {
            name: format!("{}_{index}", kind.rsplit("::").next().unwrap_or(kind)),
            kind: kind.to_owned(),
            phase: Phase::Forward,
            args: self.args,
            outputs: self.outputs,
            hidden: self.hidden,
            workspace: Bytes::ZERO,
            replay: self.replay,
            random: false,
            ..Operator::default()
        };
        Graph::new(format!("{kind} {index}"), self.tensors, vec![operator], None, None, None).ok()
    }
}

fn convolution(d: &mut Draw, backward: bool) -> Parts {
    let kernel = d.one(&[1, 1, 3, 3, 3, 5, 7]);
    let stride = d.one(&[1, 1, 1, 2]);
    let (batch, side) = (d.log(1, 16), d.log(kernel.max(4), 64));
    let depthwise = kernel > 1 && d.one_in(6);
    let mut channels_in = if d.one_in(8) { 3 } else { d.log(8, 384) };
    let channels_out = if depthwise { channels_in } else { d.log(8, 384) };
    let groups = if depthwise { channels_in } else { 1 };
    let padding = if d.one_in(5) { 0 } else { kernel / 2 };
    let out = (side + 2 * padding - kernel) / stride + 1;
    let bias = d.one_in(4);
    let mut p = Parts::default();
    let image = [batch, channels_in, side, side];
    let result = [batch, channels_out, out, out];
    if depthwise {
        channels_in = 1;
    }
    let weight = [channels_out, channels_in, kernel, kernel];
    if backward {
        p.input(&result);
    }
    p.input(&image);
    p.input(&weight);
    if backward {
        p.ints(&[if bias { channels_out } else { 0 }]);
    } else if bias {
        p.input(&[channels_out]);
    } else {
        p.args.push(Arg::None);
    }
    p.ints(&[stride, stride]);
    p.ints(&[padding, padding]);
    p.ints(&[1, 1]);
    if backward {
        p.args.push(Arg::Bool(false));
        p.ints(&[0, 0]);
    }
    p.args.push(Arg::Int(i64::try_from(groups).unwrap_or(1)));
    if backward {
        let image_too = !d.one_in(6);
        p.args.push(Arg::Bools(vec![image_too, true, bias]));
        if image_too {
            p.output(Dtype::F32, &image);
        } else {
            p.outputs.push(None);
        }
        p.output(Dtype::F32, &weight);
        if bias {
            p.output(Dtype::F32, &[channels_out]);
        } else {
            p.outputs.push(None);
        }
    } else {
        p.output(Dtype::F32, &result);
    }
    p
}

fn mm(d: &mut Draw) -> Parts {
    let (m, k, n) = (d.log(8, 2048), d.log(8, 2048), d.log(8, 2048));
    let transposed = d.below(3);
    let mut p = Parts::default();
    p.matrix(m, k, transposed == 1);
    p.matrix(k, n, transposed == 2);
    p.output(Dtype::F32, &[m, n]);
    p
}

fn addmm(d: &mut Draw) -> Parts {
    let (m, k, n) = (d.log(8, 2048), d.log(8, 2048), d.log(8, 2048));
    let transposed = d.one_in(2);
    let mut p = Parts::default();
    p.input(&[n]);
    p.input(&[m, k]);
    p.matrix(k, n, transposed);
    p.args.extend([Arg::Int(1), Arg::Int(1)]);
    p.output(Dtype::F32, &[m, n]);
    p
}

fn linear(d: &mut Draw) -> Parts {
    let (m, k, n) = (d.log(8, 2048), d.log(8, 2048), d.log(8, 2048));
    let mut p = Parts::default();
    p.input(&[m, k]);
    p.input(&[n, k]);
    if d.one_in(4) {
        p.args.push(Arg::None);
    } else {
        p.input(&[n]);
    }
    p.output(Dtype::F32, &[m, n]);
    p
}

fn bmm(d: &mut Draw) -> Parts {
    let (b, m, k, n) = (d.log(2, 64), d.log(8, 512), d.log(8, 512), d.log(8, 512));
    let mut p = Parts::default();
    p.input(&[b, m, k]);
    p.input(&[b, k, n]);
    p.output(Dtype::F32, &[b, m, n]);
    p
}

/// Draws a batch of images: batch, channels, side.
fn images(d: &mut Draw) -> (u64, u64, u64) {
    (d.log(1, 32), d.log(8, 512), d.log(4, 112))
}

fn batch_norm(d: &mut Draw) -> Parts {
    let (batch, channels, side) = images(d);
    let mut p = Parts::default();
    p.input(&[batch, channels, side, side]);
    p.input(&[channels]);
    p.input(&[channels]);
    p.running(channels);
    p.args.extend([Arg::Bool(true), Arg::Float(0.1), Arg::Float(1e-5), Arg::Bool(true)]);
    p.output(Dtype::F32, &[batch, channels, side, side]);
    p.output(Dtype::F32, &[channels]);
    p.output(Dtype::F32, &[channels]);
    p.outputs.extend([None, None]);
    p
}

fn batch_norm_backward(d: &mut Draw) -> Parts {
    let (batch, channels, side) = images(d);
    let mut p = Parts::default();
    p.input(&[batch, channels, side, side]);
    p.input(&[batch, channels, side, side]);
    for _ in 0..5 {
        p.input(&[channels]);
    }
    p.args.extend([Arg::Float(1e-5), Arg::None]);
    p.output(Dtype::F32, &[batch, channels, side, side]);
    p.output(Dtype::F32, &[channels]);
    p.output(Dtype::F32, &[channels]);
    p
}

fn layer_norm(d: &mut Draw) -> Parts {
    let (batch, length, width) = (d.log(1, 16), d.log(8, 512), d.log(32, 2048));
    let mut p = Parts::default();
    p.input(&[batch, length, width]);
    p.ints(&[width]);
    p.input(&[width]);
    p.input(&[width]);
    p.args.push(Arg::Float(1e-5));
    p.output(Dtype::F32, &[batch, length, width]);
    p.output(Dtype::F32, &[batch, length, 1]);
    p.output(Dtype::F32, &[batch, length, 1]);
    p
}

fn max_pool(d: &mut Draw) -> Parts {
    let (batch, channels, side) = images(d);
    let kernel = d.one(&[2, 3]);
    let stride = d.one(&[1, 2, 2]);
    let padding = if kernel == 3 { d.one(&[0, 1]) } else { 0 };
    let out = (side + 2 * padding - kernel) / stride + 1;
    let mut p = Parts::default();
    p.input(&[batch, channels, side, side]);
    p.ints(&[kernel, kernel]);
    p.ints(&[stride, stride]);
    p.ints(&[padding, padding]);
    p.ints(&[1, 1]);
    p.args.push(Arg::Bool(false));
    p.output(Dtype::F32, &[batch, channels, out, out]);
    p.output(Dtype::I64, &[batch, channels, out, out]);
    p
}

fn elementwise(d: &mut Draw, inputs: usize, then: &[Arg]) -> Parts {
    let shape = if d.one_in(2) {
        let (batch, channels, side) = images(d);
        vec![batch, channels, side, side]
    } else {
        vec![d.log(1, 16), d.log(8, 512), d.log(32, 4096)]
    };
    let mut p = Parts::default();
    for _ in 0..inputs {
        p.input(&shape);
    }
    p.args.extend_from_slice(then);
    p.output(Dtype::F32, &shape);
    p
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{builtin, latency, predictor::features::Features};
    use crate::{Settings, Spare, profile};

    #[test]
    fn every_kind_runs_and_reads_back_as_features() {
        let device = builtin::find("host").unwrap();
        for name in names() {
            let mut graphs = samples(name, 20, 1).unwrap();
            assert_eq!(graphs.len(), 20, "{name}");
            assert_eq!(graphs, samples(name, 20, 1).unwrap(), "{name} is not the same twice");
            assert_ne!(graphs, samples(name, 20, 2).unwrap());
            graphs.sort_by_key(|g| {
                roofline::flops(&g.operators[0]).max(roofline::bytes(&g.operators[0]))
            });
            // In an unoptimised build only small ones are quick.
            for graph in &graphs[..3] {
                let row = profile::alone(graph, &device, &Settings::default(), &Spare::default())
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
                assert!(
                    row.ns >= 1
                        && row.roofline_ns.is_some()
                        && row.key == latency::key(&graph.operators[0])
                );
                assert!(Features::new(&row.key, 0, 0, 0).is_some(), "{}", row.key);
            }
        }
        assert!(samples("aten::mm", 1, 0).is_some() && samples("nothing", 1, 0).is_none());
    }
}
