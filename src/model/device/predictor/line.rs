//! Time as a line in bytes: a fixed part, and a part for each byte that is read or written.
//!
//! Operators that compute little for each byte, such as updates, take such a time, and a few
//! measurements fix it better than a network's weights. Where it fits, the network learns only what
//! the line misses.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::features::Features;
use super::math::exp;

/// How often measurements are weighed anew by their errors.
const ROUNDS: u32 = 40;

/// Errors below this share all weigh the same.
const SMALL: f64 = 0.005;

/// The largest median error, as a share, with which a line is of use.
const FITS: f64 = 0.03;

/// Time by bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// The time of an operator without bytes, at least 0.
    pub fixed_ns: f64,
    /// The time of each byte, above 0.
    pub ns_per_byte: f64,
}

impl Line {
    /// The line with nearly the least sum of relative errors over pairs of bytes and nanoseconds.
    /// `None` where no line fits half of them well.
    pub(super) fn fit(all: &[(f64, f64)]) -> Option<Self> {
        let mut line = Self { fixed_ns: 0.0, ns_per_byte: 0.0 };
        let mut weights = vec![1.0; all.len()];
        for _ in 0..ROUNDS {
            // Least squares of relative errors: `u` and `v` are 1 / ns and bytes / ns.
            let (mut uu, mut uv, mut vv, mut u1, mut v1) = (0.0, 0.0, 0.0, 0.0, 0.0);
            for (&(bytes, ns), weight) in all.iter().zip(&weights) {
                let (u, v) = (1.0 / ns, bytes / ns);
                uu += weight * u * u;
                uv += weight * u * v;
                vv += weight * v * v;
                u1 += weight * u;
                v1 += weight * v;
            }
            let of = uu * vv - uv * uv;
            line.fixed_ns = (u1 * vv - v1 * uv) / of;
            line.ns_per_byte = (v1 * uu - u1 * uv) / of;
            for (&(bytes, ns), weight) in all.iter().zip(&mut weights) {
                *weight = 1.0 / (line.at(bytes) / ns - 1.0).abs().max(SMALL);
            }
        }
        let mut errors: Vec<f64> =
            all.iter().map(|&(bytes, ns)| (line.at(bytes) / ns - 1.0).abs()).collect();
        errors.sort_by(f64::total_cmp);
        let median = errors.get(errors.len() / 2)?;
        (line.possible() && *median <= FITS).then_some(line)
    }

    fn at(&self, bytes: f64) -> f64 {
        self.fixed_ns + self.ns_per_byte * bytes
    }

    /// The time of an operator, in nanoseconds.
    pub(super) fn predict(&self, features: &Features) -> f64 {
        self.at(bytes(features)).max(1.0)
    }

    pub(super) fn possible(&self) -> bool {
        self.fixed_ns.is_finite()
            && self.ns_per_byte.is_finite()
            && self.fixed_ns >= 0.0
            && self.ns_per_byte > 0.0
    }
}

/// The roofline's bytes of an operator.
pub(super) fn bytes(features: &Features) -> f64 {
    features.numbers.get("bytes").map_or(0.0, |&logarithm| exp(logarithm) - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_among_wild_measurements_and_where_there_is_none_not() {
        let at = |i: u64, ns: f64| ((1u64 << (6 + i % 16)) as f64, ns);
        let line = |i: u64| 1000.0 + 0.25 * at(i, 0.0).0;
        let wild: Vec<(f64, f64)> =
            (0..48).map(|i| at(i, line(i) * if i % 6 == 0 { 4.0 } else { 1.0 })).collect();
        let found = Line::fit(&wild).unwrap();
        assert!((found.fixed_ns / 1000.0 - 1.0).abs() < 0.01, "{found:?}");
        assert!((found.ns_per_byte / 0.25 - 1.0).abs() < 0.01, "{found:?}");
        let curve: Vec<(f64, f64)> = (0..48).map(|i| at(i, line(i) * line(i))).collect();
        assert_eq!(Line::fit(&curve), None);
        // All of one size fix no line.
        assert_eq!(Line::fit(&[(64.0, 10.0); 5]), None);
        assert_eq!(Line::fit(&[]), None);
    }
}
