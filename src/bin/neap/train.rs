//! `neap train`: a table of measured latencies becomes a predictor.

use std::path::PathBuf;

use anyhow::Context;
use neap::device::latency;
use neap::device::predictor::train::{self, Options};
use neap::report::table::{Side, Table};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::settings;

/// Train a predictor of latencies on measured ones, and say how well it does on shapes that it did not see.
#[derive(clap::Args)]
pub struct Flags {
    /// Tables that `neap profile` wrote.
    #[arg(required = true, value_name = "LATENCIES.csv")]
    tables: Vec<PathBuf>,
    /// Where to write it; only reported if not given.
    #[arg(short, long, value_name = "FILE.predictor.json")]
    output: Option<PathBuf>,
    /// How many steps to train each kind for.
    #[arg(long, value_name = "N", default_value_t = Options::default().steps, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps: u32,
    /// Where the first weights come from.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let inputs: Vec<_> = flags.tables.iter().map(PathBuf::as_path).collect();
    settings::outputs(&inputs, &[flags.output.as_deref()])?;
    let mut rows = Vec::new();
    for table in &flags.tables {
        rows.extend(latency::rows(table)?);
    }
    let options = Options { steps: flags.steps, seed: flags.seed };
    let trained =
        train::fit(&rows, &options).with_context(|| flags.tables[0].display().to_string())?;
    for (kind, shapes) in &trained.too_few {
        note(&format!(
            "note: {kind} has {shapes} shapes, fewer than {}; it gets no model",
            train::FEWEST
        ));
    }
    if trained.unread > 0 {
        note(&format!(
            "note: {} rows have no `flops` and `bytes`, or a key of another making; they are left out",
            trained.unread
        ));
    }
    if let Some(output) = &flags.output {
        trained.predictor.write(output)?;
        note(&format!("written: {}", output.display()));
    }
    let models = &trained.predictor.models;
    if as_json {
        let one = |m: &neap::device::predictor::Model| {
            json!({
                "kind": m.kind,
                "rows": m.rows,
                "held_out_rows": m.held_out.rows,
                "held_out_covered": m.held_out.covered,
                "median_error_per_mille": m.held_out.median_error_per_mille,
                "p90_error_per_mille": m.held_out.p90_error_per_mille,
                "roofline_median_error_per_mille": m.held_out.roofline_median_error_per_mille,
            })
        };
        output::json(
            &json!({ "device": trained.predictor.device, "models": models.iter().map(one).collect::<Vec<_>>() }),
        )?;
        return Ok(Answer::Yes);
    }
    let mut table = Table::new(&[
        ("kind", Side::Left),
        ("learned from", Side::Right),
        ("held out", Side::Right),
        ("covered", Side::Right),
        ("median error", Side::Right),
        ("9 in 10", Side::Right),
        ("roofline's median", Side::Right),
    ]);
    let percent = |per_mille: u64| format!("{}.{} %", per_mille / 10, per_mille % 10);
    for m in models {
        table.row([
            m.kind.clone(),
            m.rows.to_string(),
            m.held_out.rows.to_string(),
            m.held_out.covered.to_string(),
            percent(m.held_out.median_error_per_mille),
            percent(m.held_out.p90_error_per_mille),
            m.held_out.roofline_median_error_per_mille.map_or_else(|| "-".to_owned(), percent),
        ]);
    }
    output::data(&table.to_string())?;
    Ok(Answer::Yes)
}
