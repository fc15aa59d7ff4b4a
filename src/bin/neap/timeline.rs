//! One iteration of a job as a Chrome trace: the same tracks whether it was simulated or measured.

use std::path::Path;

use neap::job::Graph;
use neap::report::timeline::{Span, Value, Writer};
use neap::sim::engine::Run;
use neap::sim::program::{Direction, Program};
use neap::units::{Bytes, Nanos};

use crate::output;

/// Writes compute, copies and memory; `budget` stands beside the memory where there is a plan.
pub fn write(
    path: &Path,
    graph: &Graph,
    program: &Program,
    run: &Run,
    curve: &[(Nanos, Bytes)],
    budget: Option<Bytes>,
) -> anyhow::Result<()> {
    neap::files::write(path, |f| {
        let mut writer = Writer::new(f)?;
        let (process, [compute, h2d, d2h]) =
            writer.process(&graph.name, ["compute", "h2d", "d2h"])?;
        for (step, &(start, end)) in program.steps.iter().zip(&run.steps) {
            let operator = graph.operator(step.operator);
            let again = if step.event.is_some() { "recompute" } else { "operator" };
            let args = [("kind", Value::Text(&operator.kind)), ("as", Value::Text(again))];
            let span = Span { name: &operator.name, start, duration: end - start, args: &args };
            writer.span(compute, &span)?;
        }
        for (copy, &(start, end)) in program.copies.iter().zip(&run.copies) {
            let track = if copy.direction == Direction::H2d { h2d } else { d2h };
            let args = [("bytes", Value::Number(copy.bytes.0))];
            let name = &graph.tensor(copy.tensor).name;
            writer.span(track, &Span { name, start, duration: end - start, args: &args })?;
        }
        for &(at, bytes) in curve {
            let mut values = vec![("resident_bytes", bytes.0)];
            values.extend(budget.map(|budget| ("budget_bytes", budget.0)));
            writer.counter(process, "memory", at, &values)?;
        }
        writer.finish().map(|_| ())
    })?;
    output::written(path);
    Ok(())
}
