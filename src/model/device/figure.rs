//! How long an operator takes, and where that figure is from.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Nanos;

/// The longest an operator may take: an hour. With it, the times of a million operators still add
/// up far below 2^64 nanoseconds.
pub const LONGEST: Nanos = Nanos(3_600_000_000_000);

/// Where a latency came from.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The graph's author wrote it down.
    Graph,
    /// A row of the table given with `--latencies`.
    Measured,
    /// Learned from other shapes of the same kind.
    Predicted,
    /// Arithmetic and bytes against the device's peaks.
    Roofline,
}

/// How long an operator takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Latency {
    /// At least one nanosecond, at most [`LONGEST`].
    pub time: Nanos,
    /// Where the figure is from.
    pub source: Source,
}
