//! Bytes, nanoseconds and ids as integer newtypes, with parsing and display.
//!
//! The types keep units apart in signatures, and give sizes and times one spelling in output. Sums
//! of validated quantities stay below 2^63: [`crate::job`] checks that when a graph is built.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The block size to which every tensor and workspace is rounded up (`PyTorch`'s `kMinBlockSize`).
pub const BLOCK: u64 = 512;

/// A number of bytes.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A duration or an instant, in nanoseconds since the start of the iteration.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(transparent)]
pub struct Nanos(pub u64);

/// A list's index as an id of 32 bits.
///
/// # Panics
/// When the list has 2^32 entries or more, which the limits on the size of files exclude.
#[must_use]
pub fn id32(index: usize) -> u32 {
    u32::try_from(index).expect("lists have fewer than 2^32 entries")
}

/// A sum of 64-bit numbers as one of them; the greatest where it is greater.
#[must_use]
pub fn saturated(sum: u128) -> u64 {
    u64::try_from(sum).unwrap_or(u64::MAX)
}

/// `whole * part / of`, rounded down; the greatest number where it is greater.
#[must_use]
pub fn scaled(whole: u64, part: u64, of: u64) -> u64 {
    saturated(u128::from(whole) * u128::from(part) / u128::from(of.max(1)))
}

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);

    /// Rounded up to a multiple of [`BLOCK`]: the bytes that a tensor of this size occupies.
    #[must_use]
    pub const fn in_blocks(self) -> Self {
        Self(self.0.div_ceil(BLOCK) * BLOCK)
    }

    /// `self - other`, or zero when `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Nanos {
    /// The start of the iteration, or a duration of zero.
    pub const ZERO: Self = Self(0);

    /// `self - other`, or zero when `other` is later.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

macro_rules! arithmetic {
    ($t:ident) => {
        impl Add for $t {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl Sub for $t {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl AddAssign for $t {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        impl SubAssign for $t {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }
        impl Sum for $t {
            fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
                Self(all.map(|x| x.0).sum())
            }
        }
    };
}
arithmetic!(Bytes);
arithmetic!(Nanos);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&bytesize::ByteSize(self.0).display().iec().to_string())
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0;
        let text = match n {
            0..1_000 => format!("{n} ns"),
            1_000..1_000_000 => format!("{}.{:02} µs", n / 1_000, n % 1_000 / 10),
            1_000_000..1_000_000_000 => {
                format!("{}.{:02} ms", n / 1_000_000, n % 1_000_000 / 10_000)
            }
            _ => format!("{}.{:03} s", n / 1_000_000_000, n % 1_000_000_000 / 1_000_000),
        };
        f.pad(&text)
    }
}

/// A text that is not a size.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is not a size: write bytes as a number with an optional unit, such as 12GiB, 500MB or 1048576"
)]
pub struct ParseBytesError(String);

impl FromStr for Bytes {
    type Err = ParseBytesError;

    /// Reads `12GiB`, `500 MB`, `1048576`. Signs, NaN and sizes above 2^62 are errors.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        if !trimmed.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(error());
        }
        let size: bytesize::ByteSize = trimmed.parse().map_err(|_| error())?;
        if size.0 > 1 << 62 { Err(error()) } else { Ok(Self(size.0)) }
    }
}

/// Splitmix64: one step from `x` and the finaliser, for pseudorandom numbers that are the same on
/// every machine.
#[must_use]
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Apart, as ids are made everywhere.
#[cold]
fn too_many() -> u32 {
    panic!("fewer than 2^32 entries")
}

macro_rules! id {
    ($(#[$doc:meta])* $t:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $t(pub u32);

        impl $t {
            /// The position in its table.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The id with position `index`.
            ///
            /// # Panics
            /// When `index` is above `u32::MAX`, which the graph's limits exclude.
            #[inline]
            #[must_use]
            pub fn from_index(index: usize) -> Self {
                Self(u32::try_from(index).unwrap_or_else(|_| too_many()))
            }
        }
    };
}
id! {
    /// A tensor's position in [`crate::job::Graph::tensors`].
    TensorId
}
id! {
    /// An operator's position in [`crate::job::Graph::operators`], which is the order of execution.
    OpId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_and_print() {
        assert_eq!("12GiB".parse::<Bytes>().unwrap(), Bytes(12 << 30));
        assert_eq!("1.5 KiB".parse::<Bytes>().unwrap(), Bytes(1536));
        assert_eq!("77".parse::<Bytes>().unwrap(), Bytes(77));
        for bad in ["", "-1", "GiB", "1 parsec", "nan", "1e400", "99999999999999GiB"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
        assert_eq!(Bytes(1).in_blocks(), Bytes(512));
        assert_eq!(Bytes(512).in_blocks(), Bytes(512));
        assert_eq!(Bytes(0).in_blocks(), Bytes(0));
    }

    #[test]
    fn times_print() {
        assert_eq!(Nanos(1_234_567).to_string(), "1.23 ms");
        assert_eq!(Nanos(12).to_string(), "12 ns");
        assert_eq!(Nanos(3_004_000_000).to_string(), "3.004 s");
    }
}
