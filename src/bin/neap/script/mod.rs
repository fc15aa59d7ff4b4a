//! `neap script`: what the Python package asks while a script trains. It is no interface for
//! people: the forms change with every version.

mod curves;
pub mod page;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::PathBuf;

use anyhow::{Context, bail};
use neap::device::latency::{Row, Table};
use neap::device::{Source, builtin, profile};
use neap::job::json::{self, LARGEST};
use neap::plan::script::{self, Ask, Problem};
use neap::units::{Bytes, Nanos};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::output::{self, Answer};
use crate::settings::{self, DeviceFlags};

/// Answer what the Python package asks.
#[derive(clap::Args)]
#[command(hide = true)]
pub struct Flags {
    #[command(subcommand)]
    question: Question,
}

#[derive(clap::Subcommand)]
enum Question {
    /// The nanoseconds of each operator of a graph, and where they come from.
    Times {
        graph: PathBuf,
        #[command(flatten)]
        device: DeviceFlags,
    },
    /// Write measured times of a graph's operators, nanoseconds by name on stdin, as a table.
    Table {
        graph: PathBuf,
        output: PathBuf,
        /// Whose roofline stands beside them.
        #[arg(long)]
        device: String,
        /// What they were measured on.
        #[arg(long)]
        on: String,
    },
    /// The built-in device that a card is, by the driver's name for it.
    Card { name: String },
    /// A plan for the iteration on stdin.
    Plan {
        #[arg(long)]
        device: String,
    },
    /// The report on stdin as a page.
    Page,
    /// The iteration on stdin as a graph in which only what can move is a tensor.
    Graph { output: PathBuf },
}

/// What comes on stdin.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    problem: Problem,
    #[serde(default)]
    ask: Option<Ask>,
}

/// What stands on stdin.
fn given<T: DeserializeOwned>() -> anyhow::Result<T> {
    let mut text = Vec::new();
    let most = LARGEST + 1;
    io::stdin().lock().take(most).read_to_end(&mut text).context("stdin")?;
    if text.len() as u64 == most {
        bail!("stdin: larger than {}", Bytes(LARGEST));
    }
    serde_json::from_slice(&text).context("stdin")
}

impl Asked {
    fn read() -> anyhow::Result<Self> {
        let asked: Self = given()?;
        asked.problem.validate().context("stdin")?;
        Ok(asked)
    }
}

pub fn main(flags: &Flags) -> anyhow::Result<Answer> {
    match &flags.question {
        Question::Times { graph, device } => {
            let mut graph = settings::graph(graph)?;
            let latencies = device.resolve(&mut graph)?.latencies;
            let times: BTreeMap<&str, (u64, Source)> = graph
                .operators
                .iter()
                .zip(&latencies)
                .map(|(operator, latency)| (&*operator.name, (latency.time.0, latency.source)))
                .collect();
            output::raw(&serde_json::to_vec(&times)?)?;
        }
        Question::Table { graph, output, device, on } => {
            let (graph, device) = (settings::graph(graph)?, profile::load(device)?);
            let times: BTreeMap<String, u64> = given()?;
            let rows: Vec<Row> = graph
                .operators
                .iter()
                .filter_map(|operator| Some((operator, Nanos(*times.get(&operator.name)?))))
                .map(|(operator, time)| Row::new(operator, on, time).beside(operator, &device))
                .collect();
            Table::write(output, &rows)?;
        }
        Question::Card { name } => {
            output::raw(&serde_json::to_vec(
                &serde_json::json!({ "device": builtin::like(name) }),
            )?)?;
        }
        Question::Plan { device } => {
            let Asked { problem, ask } = Asked::read()?;
            let ask = ask.context("stdin: it asks for nothing")?;
            let answer = script::plan(&problem, &profile::load(device)?, &ask)?;
            output::raw(&serde_json::to_vec(&answer)?)?;
        }
        Question::Page => {
            let told: page::Told = given()?;
            output::raw(page::from_reports(told.title, vec![told.report])?.html()?.as_bytes())?;
        }
        Question::Graph { output } => {
            let problem = Asked::read()?.problem;
            json::write(output, &script::graph(&problem)?)?;
        }
    }
    Ok(Answer::Yes)
}
