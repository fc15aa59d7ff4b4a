//! Sums over scores: the spread of errors, the rate of failures, and the memory conserved.

use std::collections::BTreeMap;

use super::{BARE, MARGIN, Run, Score};

/// The spread of absolute values; all zero if there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// The median, or the mean of the middle two. For relative errors this is the paper's MRE.
    pub median: f64,
    /// The 90th percentile: the least value that nine tenths of the values don't exceed.
    pub p90: f64,
    /// The largest.
    pub worst: f64,
}

impl Spread {
    /// The spread of `values`.
    #[must_use]
    pub fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut all: Vec<f64> = values.into_iter().map(f64::abs).collect();
        all.sort_unstable_by(f64::total_cmp);
        let Some(&worst) = all.last() else { return Self::default() };
        let n = all.len();
        Self {
            median: f64::midpoint(all[(n - 1) / 2], all[n / 2]),
            p90: all[(n * 9).div_ceil(10) - 1],
            worst,
        }
    }
}

/// The outcome of estimates over runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fate {
    /// Number of runs: jobs times devices.
    pub runs: u64,
    /// How many of them failed, without and with the margin.
    pub failed: [u64; 2],
    /// Sum of the bytes conserved ([`Run::conserved`]).
    pub conserved: [i128; 2],
    /// The same sum by [`Run::conserved_leniently`].
    pub lenient: [i128; 2],
}

impl Fate {
    /// The outcome of `runs`.
    #[must_use]
    pub fn new<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Self {
        let mut fate = Self::default();
        for run in runs {
            fate.runs += 1;
            for with in [BARE, MARGIN] {
                fate.failed[with] += u64::from(run.fails(with));
                fate.conserved[with] += i128::from(run.conserved(with));
                fate.lenient[with] += i128::from(run.conserved_leniently(with));
            }
        }
        fate
    }

    /// PEF: the share of runs that failed; `None` without runs.
    #[must_use]
    pub fn failure(&self, with: usize) -> Option<f64> {
        (self.runs > 0).then(|| self.failed[with] as f64 / self.runs as f64)
    }

    /// MCP by Eq. 7 as printed: bytes conserved for each run, rounded toward zero; `None` without
    /// runs.
    #[must_use]
    pub fn mcp(&self, with: usize) -> Option<i64> {
        self.mean(self.conserved[with])
    }

    /// As [`Fate::mcp`], except that a job that dies under its cap costs nothing.
    #[must_use]
    pub fn lenient_mcp(&self, with: usize) -> Option<i64> {
        self.mean(self.lenient[with])
    }

    fn mean(&self, sum: i128) -> Option<i64> {
        (self.runs > 0).then(|| i64::try_from(sum / i128::from(self.runs)).unwrap_or(i64::MAX))
    }
}

/// A model's errors and failures: one point of the four-quadrant plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The model.
    pub name: String,
    /// Number of jobs.
    pub jobs: usize,
    /// Errors of the reserved peak.
    pub error: Spread,
    /// The outcome of its runs.
    pub fate: Fate,
}

/// Groups scores by `key`, in the order of the keys.
#[must_use]
pub fn by(scores: &[Score], key: impl Fn(&Score) -> String) -> Vec<Group> {
    let mut groups: BTreeMap<String, Vec<&Score>> = BTreeMap::new();
    for score in scores {
        groups.entry(key(score)).or_default().push(score);
    }
    groups
        .into_iter()
        .map(|(name, all)| Group {
            name,
            jobs: all.len(),
            error: Spread::new(all.iter().map(|s| s.reserved_error())),
            fate: Fate::new(all.iter().flat_map(|s| &s.runs)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(Spread::new([]), Spread::default());
        assert_eq!(Spread::new([-0.5]), Spread { median: 0.5, p90: 0.5, worst: 0.5 });
        assert_eq!(
            Spread::new((1..=10).map(f64::from)),
            Spread { median: 5.5, p90: 9.0, worst: 10.0 }
        );
        assert_eq!(
            Spread::new((1..=11).map(|n| -f64::from(n))),
            Spread { median: 6.0, p90: 10.0, worst: 11.0 }
        );
    }
}
