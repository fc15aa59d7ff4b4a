//! A small network of four layers and its trainer.
//!
//! It adds, multiplies, divides and takes square roots in one fixed order, from seeded numbers. So
//! the same rows give the same weights on every machine. Hidden units are leaky rectifiers, which
//! fit laws that are linear in logarithms.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::mix;

/// Units of the three hidden layers. The fourth layer has one output.
const HIDDEN: [usize; 3] = [64, 64, 32];

/// Slope of a hidden unit for inputs below zero.
const LEAK: f64 = 0.1;

/// Rows in one training step.
const BATCH: usize = 16;

/// The learning rate of the first step. It falls linearly to zero.
const RATE: f64 = 0.003;

/// Weight decay, as a share of the learning rate. Without it, a few hundred rows do not determine
/// the network.
const DECAY: f64 = 0.3;

/// Errors beyond this, in standard deviations of the target, have a constant gradient, so that a
/// few wild measurements do not bend the fit.
const HUBER: f64 = 0.05;

/// One layer: an output is its bias plus its weights times the inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// For each output, its weight of each input.
    pub weights: Vec<Vec<f32>>,
    /// The bias of each output.
    pub bias: Vec<f32>,
}

/// The network's output for these inputs. Inputs beyond the first layer's are ignored.
#[must_use]
pub fn answer(layers: &[Layer], inputs: &[f64]) -> f64 {
    let mut values = inputs.to_vec();
    for (depth, layer) in layers.iter().enumerate() {
        let last = depth + 1 == layers.len();
        let one = |(weights, &bias): (&Vec<f32>, &f32)| {
            let sum = weights
                .iter()
                .zip(&values)
                .fold(f64::from(bias), |sum, (&w, &x)| sum + f64::from(w) * x);
            if last { sum } else { leaky(sum) }
        };
        values = layer.weights.iter().zip(&layer.bias).map(one).collect();
    }
    values.first().copied().unwrap_or(0.0)
}

/// Checks that the layers fit together, take `inputs` numbers and have one output.
///
/// # Errors
/// One sentence that names the layer.
pub fn check(layers: &[Layer], inputs: usize) -> Result<(), String> {
    let mut width = inputs;
    for (depth, layer) in layers.iter().enumerate() {
        let problem = |what: &str| Err(format!("layer {depth}: {what}"));
        if layer.weights.is_empty() || layer.weights.len() != layer.bias.len() {
            return problem("it must have as many biases as rows of weights, and at least one");
        }
        if layer.weights.iter().any(|row| row.len() != width) {
            return Err(format!(
                "layer {depth}: each row must have {width} weights, one for each input"
            ));
        }
        if !layer.weights.iter().flatten().chain(&layer.bias).all(|w| w.is_finite()) {
            return problem("a weight is not finite");
        }
        width = layer.weights.len();
    }
    if layers.is_empty() || width != 1 {
        Err("the last layer must give one number".to_owned())
    } else {
        Ok(())
    }
}

fn leaky(x: f64) -> f64 {
    if x > 0.0 { x } else { LEAK * x }
}

/// A layer in training: its weights followed by its biases, with Adam's two moments of each.
struct Trained {
    inputs: usize,
    outputs: usize,
    weights: Vec<f64>,
    gradient: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
}

impl Trained {
    /// Random weights, uniform within ±√(6 / inputs), and biases of zero.
    fn new(inputs: usize, outputs: usize, seed: u64) -> Self {
        let count = inputs * outputs;
        let spread = (6.0 / inputs.max(1) as f64).sqrt();
        let even = |i: usize| {
            (mix(mix(seed).wrapping_add(i as u64)) >> 40) as f64 / 16_777_216.0 * 2.0 - 1.0
        };
        let mut weights: Vec<f64> = (0..count).map(|i| even(i) * spread).collect();
        weights.resize(count + outputs, 0.0);
        let zero = vec![0.0; count + outputs];
        Self { inputs, outputs, weights, gradient: zero.clone(), first: zero.clone(), second: zero }
    }

    fn forward(&self, from: &[f64], to: &mut [f64], last: bool) {
        for (o, to) in to.iter_mut().enumerate() {
            let row = &self.weights[o * self.inputs..(o + 1) * self.inputs];
            let sum = row
                .iter()
                .zip(from)
                .fold(self.weights[self.inputs * self.outputs + o], |sum, (w, x)| sum + w * x);
            *to = if last { sum } else { leaky(sum) };
        }
    }

    /// Adds to the gradients, and writes the gradient of the inputs to `back`.
    fn backward(&mut self, from: &[f64], flow: &[f64], back: &mut [f64]) {
        back.fill(0.0);
        for (o, &flow) in flow.iter().enumerate() {
            let row = o * self.inputs..(o + 1) * self.inputs;
            for ((gradient, weight), (x, back)) in self.gradient[row.clone()]
                .iter_mut()
                .zip(&self.weights[row])
                .zip(from.iter().zip(back.iter_mut()))
            {
                *gradient += flow * x;
                *back += flow * weight;
            }
            self.gradient[self.inputs * self.outputs + o] += flow;
        }
    }

    /// A step of Adam. `decay` holds beta1 and beta2 to the power of the number of steps.
    fn step(&mut self, rate: f64, decay: [f64; 2]) {
        for (((weight, gradient), first), second) in self
            .weights
            .iter_mut()
            .zip(&mut self.gradient)
            .zip(&mut self.first)
            .zip(&mut self.second)
        {
            let g = *gradient / BATCH as f64;
            *first = 0.9 * *first + 0.1 * g;
            *second = 0.999 * *second + 0.001 * g * g;
            *weight -=
                rate * (*first / (1.0 - decay[0])) / ((*second / (1.0 - decay[1])).sqrt() + 1e-8);
            *weight -= rate * DECAY * *weight;
            *gradient = 0.0;
        }
    }

    fn layer(&self) -> Layer {
        let (weights, bias) = self.weights.split_at(self.inputs * self.outputs);
        #[expect(clippy::cast_possible_truncation, reason = "rounded once, to what is written")]
        let single = |all: &[f64]| all.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let rows =
            (0..self.outputs).map(|o| single(&weights[o * self.inputs..(o + 1) * self.inputs]));
        Layer { weights: rows.collect(), bias: single(bias) }
    }
}

/// Fits a network to rows of inputs and their targets, in `steps` steps.
#[must_use]
pub fn train(inputs: &[Vec<f64>], targets: &[f64], steps: u32, seed: u64) -> Vec<Layer> {
    let width = inputs.first().map_or(0, Vec::len);
    let widths = [width, HIDDEN[0], HIDDEN[1], HIDDEN[2], 1];
    let mut layers: Vec<Trained> = widths
        .windows(2)
        .enumerate()
        .map(|(i, w)| Trained::new(w[0], w[1], mix(seed ^ i as u64)))
        .collect();
    let mut values: Vec<Vec<f64>> = widths.iter().map(|&w| vec![0.0; w]).collect();
    let mut flows = values.clone();
    let mut order: Vec<usize> = (0..inputs.len()).collect();
    let mut decay = [1.0, 1.0];
    let mut at = order.len();
    let mut round = 0;
    for step in 0..steps {
        for _ in 0..BATCH.min(order.len() * BATCH) {
            if at == order.len() {
                shuffle(&mut order, mix(seed ^ 0x5eed).wrapping_add(round));
                (at, round) = (0, round + 1);
            }
            let row = order[at];
            at += 1;
            values[0].copy_from_slice(&inputs[row]);
            for depth in 0..layers.len() {
                let (before, after) = values.split_at_mut(depth + 1);
                layers[depth].forward(&before[depth], &mut after[0], depth + 1 == layers.len());
            }
            flows[layers.len()][0] =
                ((values[layers.len()][0] - targets[row]) / HUBER).clamp(-1.0, 1.0);
            for depth in (0..layers.len()).rev() {
                let (before, after) = flows.split_at_mut(depth + 1);
                layers[depth].backward(&values[depth], &after[0], &mut before[depth]);
                if depth > 0 {
                    for (flow, &value) in before[depth].iter_mut().zip(&values[depth]) {
                        *flow *= if value > 0.0 { 1.0 } else { LEAK };
                    }
                }
            }
        }
        decay = [decay[0] * 0.9, decay[1] * 0.999];
        let rate = RATE * f64::from(steps - step) / f64::from(steps);
        layers.iter_mut().for_each(|layer| layer.step(rate, decay));
    }
    layers.iter().map(Trained::layer).collect()
}

/// The Fisher–Yates shuffle.
fn shuffle(order: &mut [usize], seed: u64) {
    for i in (1..order.len()).rev() {
        let with = mix(seed ^ (i as u64) << 20) % (i as u64 + 1);
        order.swap(i, usize::try_from(with).unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learns_a_law_and_the_same_one_twice() {
        let inputs: Vec<Vec<f64>> = (0..100)
            .map(|i| vec![f64::from(i % 10) / 5.0 - 1.0, f64::from(i / 10) / 5.0 - 1.0])
            .collect();
        let law = |x: &[f64]| (0.7 * x[0] + 0.2).max(0.5 * x[1]);
        let targets: Vec<f64> = inputs.iter().map(|x| law(x)).collect();
        let layers = train(&inputs, &targets, 300, 1);
        check(&layers, 2).unwrap();
        let error = |x: &[f64]| (answer(&layers, x) - law(x)).abs();
        assert!(
            inputs.iter().all(|x| error(x) < 0.1),
            "{:?}",
            inputs.iter().map(|x| error(x)).fold(0.0, f64::max)
        );
        assert!(error(&[0.33, -0.71]) < 0.05);
        assert_eq!(layers, train(&inputs, &targets, 300, 1));
        assert_ne!(layers, train(&inputs, &targets, 300, 2));
    }

    #[test]
    fn layers_that_do_not_fit_are_refused() {
        let good = train(&[vec![0.0, 1.0]], &[0.0], 1, 0);
        type Damage = fn(&mut Vec<Layer>);
        let broken: [(&str, Damage); 5] = [
            ("weights", |l| l[1].weights[0].clear()),
            ("biases", |l| l[0].bias.clear()),
            ("one number", |l| drop(l.pop())),
            ("one number", Vec::clear),
            ("finite", |l| l[2].bias[0] = f32::INFINITY),
        ];
        for (want, damage) in broken {
            let mut layers = good.clone();
            damage(&mut layers);
            assert!(check(&layers, 2).unwrap_err().contains(want), "{want}");
        }
        assert!(check(&good, 3).is_err());
    }
}
