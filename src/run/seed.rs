//! Numbers made from a seed, a name and a position: the same on every machine and in every order.
//!
//! Element i of tensor NAME is `mix(mix(seed ^ fnv1a(NAME)) + i·G)`, with splitmix64's finaliser
//! and increment G.

#![expect(clippy::cast_possible_truncation, reason = "numbers become those of the tensor's type")]

use crate::job::{Dtype, Role, Tensor};
pub use crate::units::mix;

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The random numbers of one tensor.
#[derive(Clone, Copy, Debug)]
pub struct Source(u64);

impl Source {
    /// The numbers of the tensor called `name`.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(mix(seed ^ hash))
    }

    const fn bits(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_mul(GAMMA)))
    }

    /// Uniform from 0 to 1, in steps of 2^-24.
    #[must_use]
    pub fn uniform(self, index: u64) -> f64 {
        (self.bits(index) >> 40) as f64 / 16_777_216.0
    }

    /// Approximately normal: the sum of four uniform numbers, with mean 0 and variance 1, within
    /// ±3.5.
    #[must_use]
    pub fn normal(self, index: u64) -> f64 {
        let bits = self.bits(index);
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        (sum as f64 / 65536.0 - 2.0) * 1.732_050_807_568_877_2
    }

    /// A whole number below `limit`; 0 when that is 0.
    #[must_use]
    pub const fn below(self, index: u64, limit: u64) -> u64 {
        if limit == 0 { 0 } else { self.bits(index) % limit }
    }
}

/// The initial value of a long-lived tensor that no file provides: `elements` of its storage type.
///
/// Parameters are uniform within ±1/√fan-in (the product of all extents but the first). Norm
/// weights (one dimension, called `…weight`) are 1, other vectors are within ±0.01. Buffers:
/// variances are 1, the rest 0. Optimizer states are `state`. Batch data is as in [`batch`]. Other
/// tensors are 0.
#[must_use]
pub fn initial(seed: u64, tensor: &Tensor, state: f64, limit: u64) -> Vec<u8> {
    let elements = tensor.bytes.0 / tensor.dtype.size();
    let source = Source::new(seed, &tensor.name);
    let spread = |by: f64| move |i| (source.uniform(i) * 2.0 - 1.0) * by;
    match tensor.role {
        Role::Parameter if tensor.shape.len() > 1 => {
            let fan_in: u64 = tensor.shape.iter().skip(1).product();
            fill(tensor, elements, spread(1.0 / (fan_in.max(1) as f64).sqrt()))
        }
        Role::Parameter if tensor.name.ends_with("weight") => fill(tensor, elements, |_| 1.0),
        Role::Parameter => fill(tensor, elements, spread(0.01)),
        Role::Buffer if tensor.name.ends_with("var") => fill(tensor, elements, |_| 1.0),
        Role::OptimizerState => fill(tensor, elements, |_| state),
        Role::Input => batch(seed, &tensor.name, tensor.dtype, elements, limit),
        Role::Buffer | Role::Gradient | Role::Activation => fill(tensor, elements, |_| 0.0),
    }
}

fn fill(tensor: &Tensor, elements: u64, value: impl Fn(u64) -> f64) -> Vec<u8> {
    let mut all = Vec::with_capacity(usize::try_from(tensor.bytes.0).unwrap_or(0));
    (0..elements).for_each(|i| encode(value(i), tensor.dtype, &mut all));
    all
}

/// Batch data: floats approximately normal, whole numbers below `limit`, flags uniform.
#[must_use]
pub fn batch(seed: u64, name: &str, dtype: Dtype, elements: u64, limit: u64) -> Vec<u8> {
    let source = Source::new(seed, name);
    let mut all = Vec::new();
    for i in 0..elements {
        let value = match dtype {
            Dtype::I64 | Dtype::I32 | Dtype::I16 => source.below(i, limit) as f64,
            Dtype::I8 | Dtype::U8 => source.below(i, limit.min(128)) as f64,
            Dtype::Bool => source.below(i, 2) as f64,
            _ => source.normal(i),
        };
        encode(value, dtype, &mut all);
    }
    all
}

/// Appends `value` as one little-endian element of `dtype`. A complex element gets imaginary part
/// 0.
fn encode(value: f64, dtype: Dtype, to: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => to.extend((value as f32).to_le_bytes()),
        Dtype::F64 => to.extend(value.to_le_bytes()),
        Dtype::Bf16 => to.extend((((value as f32).to_bits() >> 16) as u16).to_le_bytes()),
        Dtype::F16 => to.extend(half(value as f32).to_le_bytes()),
        Dtype::I64 => to.extend((value as i64).to_le_bytes()),
        Dtype::I32 => to.extend((value as i32).to_le_bytes()),
        Dtype::I16 => to.extend((value as i16).to_le_bytes()),
        Dtype::I8 => to.extend((value as i8).to_le_bytes()),
        Dtype::U8 | Dtype::Bool => to.push(value as u8),
        Dtype::C64 => to.extend((value as f32).to_le_bytes().into_iter().chain([0; 4])),
        Dtype::C128 => to.extend(value.to_le_bytes().into_iter().chain([0; 8])),
    }
}

/// Converts to IEEE half, rounding towards zero. Values that are too large become the largest half.
fn half(value: f32) -> u16 {
    let sign = u16::from(value.is_sign_negative()) << 15;
    let size = value.abs();
    let bits = if size >= 65_504.0 {
        0x7bff
    } else if size < 6.103_515_6e-5 {
        (size * 16_777_216.0) as u16
    } else {
        ((size.to_bits() >> 13) - (112 << 10)) as u16
    };
    sign | bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    fn tensor(name: &str, role: Role, shape: &[u64]) -> Tensor {
        let bytes = Bytes(shape.iter().product::<u64>() * 4);
        Tensor {
            name: name.into(),
            bytes,
            role,
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            kept_until: None,
        }
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    #[test]
    fn spread_as_documented_and_named() {
        let w = floats(&initial(1, &tensor("a.weight", Role::Parameter, &[40, 25, 2, 2]), 0.0, 0));
        assert_eq!(w.len(), 4000);
        assert!(
            w.iter().all(|x| x.abs() <= 0.1)
                && w.iter().any(|x| *x > 0.09)
                && w.iter().any(|x| *x < -0.09)
        );
        assert_ne!(
            w,
            floats(&initial(1, &tensor("b.weight", Role::Parameter, &[40, 25, 2, 2]), 0.0, 0))
        );
        assert_ne!(
            w,
            floats(&initial(2, &tensor("a.weight", Role::Parameter, &[40, 25, 2, 2]), 0.0, 0))
        );
        assert_eq!(
            floats(&initial(1, &tensor("n.weight", Role::Parameter, &[2]), 0.0, 0)),
            [1.0, 1.0]
        );
        assert_eq!(
            floats(&initial(1, &tensor("n.running_var", Role::Buffer, &[1]), 0.0, 0)),
            [1.0]
        );
        assert_eq!(
            floats(&initial(1, &tensor("sum:n", Role::OptimizerState, &[1]), 0.5, 0)),
            [0.5]
        );
        let x = floats(&batch(3, "input:x", Dtype::F32, 10_000, 0));
        let mean = x.iter().sum::<f32>() / 1e4;
        let variance = x.iter().map(|v| v * v).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        let labels = batch(3, "input:y", Dtype::I64, 100, 10);
        assert!(labels.chunks_exact(8).all(|c| c[0] < 10 && c[1..] == [0; 7]));
    }

    #[test]
    fn halves() {
        for (value, bits) in [
            (1.5, 0x3e00),
            (-2.0, 0xc000),
            (65_504.0, 0x7bff),
            (5.960_464_5e-8, 1),
            (6.103_515_6e-5, 0x400),
            (0.0, 0),
        ] {
            assert_eq!(half(value), bits, "{value}");
        }
    }
}
