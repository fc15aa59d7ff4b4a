//! Values of flags: budgets, shares, times.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use neap::device::Profile;
use neap::sim::share::policy::{self, Policy};
use neap::sim::share::rows;
use neap::units::{Bytes, Nanos};

use crate::output::note;

/// Reads the name of one of `all`.
pub fn named<T>(
    all: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = (&'static str, T)>
where
    T: Copy + Send + Sync + 'static,
{
    let names = PossibleValuesParser::new(all.iter().map(|one| one.0));
    names.try_map(|name| all.iter().find(|one| one.0 == name).copied().ok_or("there is none"))
}

/// Reads the name of a sharing policy.
pub fn policy() -> impl TypedValueParser<Value = &'static Policy> {
    let names = PossibleValuesParser::new(policy::names());
    names.try_map(|name| policy::find(&name).ok_or("there is none"))
}

/// A budget as the user writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// A number of bytes.
    Bytes(Bytes),
    /// A share of the unplanned peak, in thousandths of a percent.
    Share(u64),
    /// The lowest budget that can be met.
    Minimum,
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text == "min" {
            return Ok(Self::Minimum);
        }
        let Some(percent) = text.strip_suffix('%') else {
            return match text.parse::<Bytes>() {
                Ok(Bytes(0)) => Err(
                    "a budget of 0 can't hold anything; give bytes (12GiB), a share (60%) or `min`"
                        .to_owned(),
                ),
                Ok(bytes @ Bytes(..=100)) if text.bytes().all(|b| b.is_ascii_digit()) => {
                    Err(format!(
                        "`{text}` is a budget of {} bytes; did you mean {text}%? Give a share of \
                         the unplanned peak ({text}%), bytes with their unit (12GiB) or `min`",
                        bytes.0
                    ))
                }
                Ok(bytes) => Ok(Self::Bytes(bytes)),
                Err(_) => Err(format!(
                    "`{text}` is not a budget; give bytes (12GiB), a share of the unplanned peak \
                     (60%) or `min`"
                )),
            };
        };
        match thousandths(percent) {
            Some(0) => Err("a budget of 0 % can't hold anything; give a share such as 60%, bytes \
                            (12GiB) or `min`"
                .to_owned()),
            Some(share) if share <= 10_000_000 => Ok(Self::Share(share)),
            _ => Err(format!("`{text}` is not a share; give a percentage from 0.001% to 10000%")),
        }
    }
}

impl Budget {
    /// The budget in bytes, for a job with this unplanned peak on this device; `None` for the
    /// minimum.
    ///
    /// # Errors
    /// When explicit bytes are more than the device offers.
    pub fn resolve(self, peak: Bytes, device: &Profile) -> anyhow::Result<Option<Bytes>> {
        let available = device.available();
        match self {
            Self::Minimum => Ok(None),
            Self::Bytes(bytes) if bytes > available => bail!(
                "--budget: {bytes} ({} bytes) is more than {} offers, {available} ({} bytes) after \
                 the context's reserve; lower it or name another --device",
                bytes.0,
                device.name,
                available.0
            ),
            Self::Bytes(bytes) => Ok(Some(bytes)),
            Self::Share(share) => {
                let bytes = Bytes(
                    u64::try_from(u128::from(peak.0) * u128::from(share) / 100_000)
                        .unwrap_or(u64::MAX),
                );
                if bytes > available {
                    note(&format!(
                        "note: {bytes} is more than {} offers; the budget is {available}",
                        device.name
                    ));
                }
                Ok(Some(bytes.min(available)))
            }
        }
    }
}

/// A budget as the user wrote it, and its bytes.
pub struct NamedBudget(pub Budget, pub Bytes);

impl fmt::Display for NamedBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Budget::Share(share) if share % 1000 == 0 => write!(f, "{}%", share / 1000),
            Budget::Share(share) => write!(f, "{}.{:03}%", share / 1000, share % 1000),
            Budget::Minimum => f.write_str("min"),
            Budget::Bytes(_) => write!(f, "{}", self.1.0),
        }
    }
}

/// Reads a decimal with at most three places as thousandths.
pub fn thousandths(text: &str) -> Option<u64> {
    let (whole, fraction) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
    if whole.is_empty()
        || fraction.len() > 3
        || !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit())
    {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let fraction: u64 = format!("{fraction:0<3}").parse().ok()?;
    whole.checked_mul(1000)?.checked_add(fraction)
}

/// Reads the largest deviation of a latency, in thousandths of a percent.
///
/// # Errors
/// When it isn't a percentage up to 100.
pub fn deviation(text: &str) -> Result<u64, String> {
    let problem = || format!("`{text}` is not a share; give a percentage from 0% to 100%");
    let share = thousandths(text.strip_suffix('%').ok_or_else(problem)?).ok_or_else(problem)?;
    if share > 100_000 { Err(problem()) } else { Ok(share) }
}

/// Writes a share in thousandths of a percent in the form of a flag, such as `12.5%`.
pub fn percent(share: u64) -> String {
    let decimals = format!("{}.{:03}", share / 1000, share % 1000);
    format!("{}%", decimals.trim_end_matches('0').trim_end_matches('.'))
}

/// Reads a positive duration in seconds.
///
/// # Errors
/// When it is not a number from 0.001 to 10⁹.
pub fn seconds(text: &str) -> Result<Nanos, String> {
    let time = rows::decimal(text).filter(|t| (1_000_000..=1_000_000_000_000_000_000).contains(t));
    time.map(|t| Nanos(t as u64))
        .ok_or_else(|| format!("`{text}` is not a time; give seconds from 0.001 to 1000000000"))
}

/// Reads an instant in seconds, which may be 0.
///
/// # Errors
/// As [`seconds`].
pub fn instant(text: &str) -> Result<Nanos, String> {
    if text.trim() == "0" {
        Ok(Nanos::ZERO)
    } else {
        seconds(text).map_err(|e| e.replace("give seconds", "give 0, or seconds"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_read() {
        assert_eq!("60%".parse(), Ok(Budget::Share(60_000)));
        assert_eq!("12.5%".parse(), Ok(Budget::Share(12_500)));
        assert_eq!("min".parse(), Ok(Budget::Minimum));
        assert_eq!("1KiB".parse(), Ok(Budget::Bytes(Bytes(1024))));
        assert!("60".parse::<Budget>().is_err_and(|e| e.contains("did you mean 60%?")));
        for bad in
            ["0", "0%", "-5%", "", "%", "1e3%", "5.1234%", "nan%", "max", "99999999999999999999%"]
        {
            assert!(bad.parse::<Budget>().is_err(), "{bad}");
        }
    }
}
