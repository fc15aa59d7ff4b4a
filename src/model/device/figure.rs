//! An operator's latency and the source of that figure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Nanos;

/// The longest latency of an operator: one hour. So the latencies of a million operators add up to
/// far less than 2^64 nanoseconds.
pub const LONGEST: Nanos = Nanos(3_600_000_000_000);

/// Where a latency came from.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The graph gives it (`duration_ns`).
    Graph,
    /// A row of the table given with `--latencies`.
    Measured,
    /// A predictor that learned from other shapes of the same kind.
    Predicted,
    /// The roofline: arithmetic and bytes against the device's peak rates.
    Roofline,
}

/// An operator's latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Latency {
    /// At least one nanosecond, at most [`LONGEST`].
    pub time: Nanos,
    /// Where the figure is from.
    pub source: Source,
}
