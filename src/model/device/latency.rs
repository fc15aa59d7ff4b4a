//! The latency of each operator, from the best source available.
//!
//! Sources in this order: the graph itself (`duration_ns`), a measured table (`--latencies
//! FILE.csv`), a learned [`super::predictor`] (`--predictor FILE`), the [`super::roofline`]. A
//! table's rows are found by [`key`], which names an operator's kind and shapes. So a table
//! measured on one graph serves every other.

pub use super::figure::{LONGEST, Latency, Source};
pub use super::key::key;
use super::predictor::Predictor;
pub use super::table::{LatencyError, Row, Table, rows};
use super::{Profile, roofline};
use crate::job::{Graph, Operator};
use crate::units::Nanos;

/// The sources that come before the roofline.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sources<'a> {
    /// Measured latencies.
    pub table: Option<&'a Table>,
    /// A predictor for operators that the table lacks.
    pub predictor: Option<&'a Predictor>,
    /// How busy other jobs keep the device meanwhile, in percent.
    pub load_percent: u32,
}

/// A latency for each of the graph's operators, in their order, from a table or the roofline.
#[must_use]
pub fn latencies(graph: &Graph, device: &Profile, table: Option<&Table>) -> Vec<Latency> {
    latencies_from(graph, device, &Sources { table, ..Sources::default() })
}

/// A latency for each of the graph's operators, in their order.
#[must_use]
pub fn latencies_from(graph: &Graph, device: &Profile, sources: &Sources<'_>) -> Vec<Latency> {
    let of = |operator: &Operator| {
        let (time, source) = if let Some(time) = operator.duration_ns {
            (Nanos(time), Source::Graph)
        } else if let Some(time) =
            sources.table.and_then(|t| t.time(operator, sources.load_percent))
        {
            (time, Source::Measured)
        } else if let Some(time) =
            sources.predictor.and_then(|p| p.predict(operator, sources.load_percent))
        {
            (time, Source::Predicted)
        } else {
            (roofline::time(operator, device), Source::Roofline)
        };
        Latency { time: time.clamp(Nanos(1), LONGEST), source }
    };
    graph.operators.iter().map(of).collect()
}
