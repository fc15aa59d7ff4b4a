//! `neap train`: trains a predictor from a table of measured latencies.

use std::fmt;
use std::path::PathBuf;

use anyhow::Context;
use neap::device::latency;
use neap::device::predictor::train::{self, Options};
use neap::device::predictor::{Fit, Model};
use neap::report::table::{Side, Table};
use serde::Serialize;

use crate::output::{self, Answer, Ending, note};
use crate::settings::Outputs;

/// Train a predictor of latencies on measured ones, and report its errors on shapes that it did not
/// see.
#[derive(clap::Args)]
pub struct Flags {
    /// Tables that `neap profile` wrote.
    #[arg(required = true, value_name = "LATENCIES.csv")]
    tables: Vec<PathBuf>,
    /// The predictor's file; without it the errors are only reported.
    #[arg(short, long, value_name = "FILE.predictor.json")]
    output: Option<PathBuf>,
    /// Number of training steps for each kind.
    #[arg(long, value_name = "N", default_value_t = Options::default().steps,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps: u32,
    /// Seed of the first weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    let inputs: Vec<_> = flags.tables.iter().map(PathBuf::as_path).collect();
    Outputs::new(&inputs, &[flags.output.as_deref()])?;
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
            "note: {} rows have no `flops` and `bytes`, or a key of another format; they are left \
             out",
            trained.unread
        ));
    }
    let report = Report {
        device: trained.predictor.device.clone(),
        fit: trained.fit,
        models: trained.predictor.models.iter().map(ModelReport::new).collect(),
    };
    let mut ending = Ending::reporting(&report, as_json);
    if let Some(path) = &flags.output {
        ending.then(|| {
            trained.predictor.write(path)?;
            output::written(path);
            Ok(())
        });
    }
    ending.with(Answer::Yes)
}

#[derive(Serialize)]
struct Report {
    device: String,
    /// Over the held-out shapes of all kinds together.
    fit: Option<Fit>,
    models: Vec<ModelReport>,
}

/// What was learned about one kind of operator, and its errors on shapes kept out of training.
#[derive(Serialize)]
struct ModelReport {
    kind: String,
    rows: u64,
    held_out_rows: u64,
    held_out_covered: u64,
    median_error_per_mille: u64,
    p90_error_per_mille: u64,
    roofline_median_error_per_mille: Option<u64>,
    fit: Option<Fit>,
}

impl ModelReport {
    fn new(m: &Model) -> Self {
        Self {
            kind: m.kind.clone(),
            rows: m.rows,
            held_out_rows: m.held_out.rows,
            held_out_covered: m.held_out.covered,
            median_error_per_mille: m.held_out.median_error_per_mille,
            p90_error_per_mille: m.held_out.p90_error_per_mille,
            roofline_median_error_per_mille: m.held_out.roofline_median_error_per_mille,
            fit: m.held_out.fit,
        }
    }
}

fn r2(fit: &Fit) -> String {
    format!("{:.3}", fit.r2_per_mille as f64 / 1e3)
}

fn mse(fit: &Fit) -> String {
    format!("{:.4}", fit.mse_millionths as f64 / 1e6)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&[
            ("kind", Side::Left),
            ("learned from", Side::Right),
            ("held out", Side::Right),
            ("covered", Side::Right),
            ("median error", Side::Right),
            ("9 in 10", Side::Right),
            ("roofline's median", Side::Right),
            ("R²", Side::Right),
            ("MSE", Side::Right),
        ]);
        let percent = |per_mille: u64| format!("{}.{} %", per_mille / 10, per_mille % 10);
        for m in &self.models {
            table.row([
                m.kind.clone(),
                m.rows.to_string(),
                m.held_out_rows.to_string(),
                m.held_out_covered.to_string(),
                percent(m.median_error_per_mille),
                percent(m.p90_error_per_mille),
                m.roofline_median_error_per_mille.map_or_else(|| "-".to_owned(), percent),
                m.fit.map_or_else(|| "-".to_owned(), |fit| r2(&fit)),
                m.fit.map_or_else(|| "-".to_owned(), |fit| mse(&fit)),
            ]);
        }
        write!(f, "{table}")?;
        let Some(fit) = &self.fit else { return Ok(()) };
        write!(
            f,
            "\nall kinds together, by the logarithm of the time: R² {}, MSE {}",
            r2(fit),
            mse(fit)
        )
    }
}
