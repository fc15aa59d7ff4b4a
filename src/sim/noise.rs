//! Latency jitter: each step and copy takes up to a given share more or less time than planned.
//!
//! The jitter is uniform in `±share`, drawn in integers from a seeded generator, so that runs
//! repeat on any machine.

use rand_core::Rng;
use rand_pcg::Pcg64;

use super::engine::Durations;
use crate::units::Nanos;

/// The size and the seed of the jitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// The largest deviation, in thousandths of a percent (20 % is 20,000).
    pub share: u64,
    /// Seed of the generator.
    pub seed: u64,
}

/// 100 %, in thousandths of a percent.
pub const WHOLE: u64 = 100_000;

impl Noise {
    /// The durations of run number `run`.
    #[must_use]
    pub fn apply(&self, nominal: &Durations, run: u64) -> Durations {
        let mut generator = Pcg64::new(u128::from(self.seed), u128::from(run));
        let mut factor = || WHOLE - self.share + generator.next_u64() % (2 * self.share + 1);
        let scale = |value: u128, factor: u64| value * u128::from(factor) / u128::from(WHOLE);
        Durations {
            steps: nominal
                .steps
                .iter()
                .map(|s| {
                    Nanos(
                        u64::try_from(scale(u128::from(s.0), factor()))
                            .unwrap_or(u64::MAX / 4)
                            .max(1),
                    )
                })
                .collect(),
            copies: nominal.copies.iter().map(|&c| scale(c, factor()).max(1)).collect(),
        }
    }
}

/// The value at or below which `percent` per cent of the sorted values lie, by nearest rank.
#[must_use]
pub fn percentile(sorted: &[Nanos], percent: usize) -> Nanos {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_within_its_share_and_repeats() {
        let nominal = Durations { steps: vec![Nanos(1_000_000); 200], copies: vec![1_000_000; 10] };
        let noise = Noise { share: 20_000, seed: 7 };
        let once = noise.apply(&nominal, 3);
        assert!(once.steps.iter().all(|s| (800_000..=1_200_000).contains(&s.0)));
        assert!(
            once.steps.iter().any(|s| s.0 < 850_000) && once.steps.iter().any(|s| s.0 > 1_150_000)
        );
        assert_eq!(once.steps, noise.apply(&nominal, 3).steps);
        assert_ne!(once.steps, noise.apply(&nominal, 4).steps);
    }

    #[test]
    fn percentiles_by_nearest_rank() {
        let sorted: Vec<Nanos> = (1..=100).map(Nanos).collect();
        assert_eq!(percentile(&sorted, 50), Nanos(50));
        assert_eq!(percentile(&sorted, 95), Nanos(95));
        assert_eq!(percentile(&sorted[..1], 99), Nanos(1));
    }
}
