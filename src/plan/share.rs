//! Limits on a job's swaps: the numbers behind the `@` of a job's file.

use std::fmt;
use std::str::FromStr;

use crate::contract::Plan;

/// A share of a job's tensors that may be swapped, or of all jobs' swaps, in thousandths: at most
/// 1,000.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

impl Share {
    /// Nothing of it.
    pub const NONE: Self = Self(0);

    /// All of it.
    pub const ALL: Self = Self(1000);

    /// A share in thousandths, at most 1,000.
    #[must_use]
    pub const fn of_thousandths(share: u32) -> Self {
        Self(if share > 1000 { 1000 } else { share })
    }

    /// The share in thousandths.
    #[must_use]
    pub const fn thousandths(self) -> u32 {
        self.0
    }

    /// Weight of the job's lost time, in thousandths: a job that may swap half as much counts
    /// twice.
    #[must_use]
    pub fn priority(self) -> u64 {
        1_000_000 / u64::from(self.0.max(1))
    }

    /// The key in a plan's record; it contains the job's number if the plan has several jobs.
    fn key(of: Of, job: Option<usize>) -> String {
        let name = match of {
            Of::Tensors => "swap-share",
            Of::Swaps => "swap-limit",
        };
        job.map_or_else(|| name.to_owned(), |job| format!("{name}-{job}"))
    }

    /// The entry in a plan's record; `None` if there is no limit.
    #[must_use]
    pub fn record(self, of: Of, job: Option<usize>) -> Option<(String, String)> {
        (self != Self::ALL).then(|| (Self::key(of, job), self.to_string()))
    }

    /// The share of a job of a plan, as recorded.
    ///
    /// # Errors
    /// When the recorded text is not a share.
    pub fn recorded(plan: &Plan, of: Of, job: usize) -> Result<Self, String> {
        let key = Self::key(of, (plan.jobs.len() > 1).then_some(job));
        let Some(text) = plan.options.get(&key) else { return Ok(Self::ALL) };
        text.parse().map_err(|()| format!("the plan records `{key}` as `{text}`"))
    }
}

/// What a [`Share`] is a share of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// The job's tensors.
    Tensors,
    /// All jobs' swaps.
    Swaps,
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

impl FromStr for Share {
    type Err = ();

    /// Reads a decimal from 0 to 1 with at most three places.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if whole.len() != 1 || fraction.len() > 3 || !digits(whole) || !digits(fraction) {
            return Err(());
        }
        let share = format!("{whole}{fraction:0<3}").parse().map_err(|_| ())?;
        if share > 1000 { Err(()) } else { Ok(Self(share)) }
    }
}
