//! The share of a job that may be swapped: the number behind the `@` of a job's file.

use std::fmt;
use std::str::FromStr;

use crate::contract::Plan;

/// The largest share of a job's tensors that may be swapped, in thousandths: at most 1,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

impl Share {
    /// All tensors may be swapped.
    pub const ALL: Self = Self(1000);

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
    fn key(job: Option<usize>) -> String {
        job.map_or_else(|| "swap-share".to_owned(), |job| format!("swap-share-{job}"))
    }

    /// The entry in a plan's record; `None` if there is no limit.
    #[must_use]
    pub fn record(self, job: Option<usize>) -> Option<(String, String)> {
        (self != Self::ALL).then(|| (Self::key(job), self.to_string()))
    }

    /// The share of a job of a plan, as recorded.
    ///
    /// # Errors
    /// When the recorded text is not a share.
    pub fn recorded(plan: &Plan, job: usize) -> Result<Self, String> {
        let key = Self::key((plan.jobs.len() > 1).then_some(job));
        let Some(text) = plan.options.get(&key) else { return Ok(Self::ALL) };
        text.parse().map_err(|()| format!("the plan records `{key}` as `{text}`"))
    }
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
