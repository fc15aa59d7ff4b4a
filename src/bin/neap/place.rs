//! `neap place`: addresses for items with given sizes and lifetimes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{anyhow, bail};
use neap::plan::place::problem::Problem;
use neap::plan::place::search::{Options, Outcome, Spent, Technique};
use neap::plan::place::{self, Item, Layout};
use serde::Serialize;

use crate::output::{self, Answer, Ending, note};
use crate::progress;
use crate::settings::Outputs;

/// Give every item of known size and lifetime an offset, so that items alive at the same time never
/// overlap.
#[derive(clap::Args)]
pub struct Flags {
    /// The items (CSV with id,lower,upper,size and optionally alignment,offset; may be gzipped).
    problem: PathBuf,
    /// The size into which everything must fit; by default the smallest that can be found.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    capacity: Option<u64>,
    /// The output file, with columns id,lower,upper,size,offset; without it the layout is only
    /// reported.
    #[arg(short, long, value_name = "FILE.csv")]
    output: Option<PathBuf>,
    /// The largest number of steps of the search; a million take a few milliseconds.
    #[arg(long, value_name = "STEPS", default_value_t = 1_000_000_000)]
    effort: u64,
    /// Search techniques to switch off, to see what each is worth: partition, decompose, sections,
    /// monotone, support, dominance, lowest, free, twins, jump, portfolio, restarts, weights,
    /// shuffle.
    #[arg(long, value_name = "TECHNIQUE,...", value_delimiter = ',')]
    without: Vec<Named>,
}

/// A technique by its name.
#[derive(Clone, Copy)]
struct Named(Technique);

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Technique::ALL.iter().find(|(_, name)| *name == text.trim());
        found.map(|(technique, _)| Self(*technique)).ok_or_else(|| {
            let names: Vec<&str> = Technique::ALL.iter().map(|(_, name)| *name).collect();
            format!("`{text}` is not a technique; there are {}", names.join(", "))
        })
    }
}

/// The result of a search.
struct Found {
    layout: Option<Layout>,
    /// Whether a lower height, or any layout within the capacity, is proved impossible.
    proved: bool,
    bound: u64,
    spent: Spent,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    Outputs::new(&[&flags.problem], &[flags.output.as_deref()])?;
    let problem = Problem::read(&flags.problem)?;
    let items = problem.items();
    let (moment, load) = problem.fullest();
    let options =
        Options { effort: flags.effort, without: flags.without.iter().map(|n| n.0).collect() };
    let working = progress::working(&format!("placing {} items", items.len()));
    let found = search(&items, flags.capacity, load, &options);
    working.finish_and_clear();
    if let Some(layout) = &found.layout {
        let height = problem.check(layout, flags.capacity.unwrap_or(u64::MAX));
        if height.as_ref() != Ok(&layout.height) {
            let why =
                height.map_or_else(|e| e, |h| format!("its height is {h}, not {}", layout.height));
            bail!(
                "the layout did not pass the checker ({why}); this is a defect of neap, please \
                 report it with the problem"
            );
        }
    }
    let mut ending = Ending::default();
    ending.then(|| match (as_json, &found.layout) {
        (false, None) => Ok(()),
        _ => output::report(&Report::new(flags, &found, items.len(), load), as_json),
    });
    let Some(layout) = &found.layout else {
        refuse(flags, &found, load, moment);
        return ending.with(Answer::No);
    };
    if let Some(output) = &flags.output {
        ending.then(|| {
            neap::files::write(output, |out| problem.write(layout, out)).map_err(|e| anyhow!(e))?;
            output::written(output);
            Ok(())
        });
    }
    ending.with(Answer::Yes)
}

fn search(items: &[Item], capacity: Option<u64>, load: u64, options: &Options) -> Found {
    let Some(capacity) = capacity else {
        let least = place::least(items, options);
        return Found {
            proved: least.bound == least.layout.height,
            bound: least.bound,
            layout: Some(least.layout),
            spent: least.spent,
        };
    };
    let within = place::within(items, capacity, options);
    let proved = within.outcome == Outcome::Impossible;
    let layout = if let Outcome::Placed(layout) = within.outcome { Some(layout) } else { None };
    Found { layout, proved, bound: if proved { capacity + 1 } else { load }, spent: within.spent }
}

/// Prints why there is no layout.
fn refuse(flags: &Flags, found: &Found, load: u64, moment: u64) {
    let capacity = flags.capacity.unwrap_or_default();
    let file = flags.problem.display();
    note(&if load > capacity {
        format!("{file}: does not fit into {capacity}: from {moment} on {load} are alive at once")
    } else if found.proved {
        format!("{file}: does not fit into {capacity}: the search tried every case")
    } else {
        format!(
            "{file}: not placed within {capacity}, nor proved impossible; give a larger --effort \
             than {}, or more capacity",
            flags.effort
        )
    });
}

#[derive(Serialize)]
struct Report {
    file: String,
    items: usize,
    placed: bool,
    proved: bool,
    capacity_bytes: Option<u64>,
    height_bytes: Option<u64>,
    /// The largest sum of the sizes of items alive at the same time.
    load_bytes: u64,
    bound_bytes: u64,
    gap_bytes: Option<u64>,
    nodes: u64,
    steps: u64,
}

impl Report {
    fn new(flags: &Flags, found: &Found, items: usize, load: u64) -> Self {
        let height = found.layout.as_ref().map(|l| l.height);
        Self {
            file: flags.problem.display().to_string(),
            items,
            placed: found.layout.is_some(),
            proved: found.proved,
            capacity_bytes: flags.capacity,
            height_bytes: height,
            load_bytes: load,
            bound_bytes: found.bound,
            gap_bytes: height.map(|h| h - load),
            nodes: found.spent.nodes,
            steps: found.spent.steps,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gap = self.gap_bytes.unwrap_or_default();
        let share = u128::from(gap) * 10_000 / u128::from(self.load_bytes.max(1));
        writeln!(f, "items     {}", self.items)?;
        writeln!(f, "height    {}", self.height_bytes.unwrap_or_default())?;
        writeln!(
            f,
            "load      {} alive at once, {}.{:02} % less",
            self.load_bytes,
            share / 100,
            share % 100
        )?;
        if self.capacity_bytes.is_none() {
            match self.proved {
                true => writeln!(f, "proved    nothing lower is possible")?,
                false => writeln!(f, "proved    nothing below {} is possible", self.bound_bytes)?,
            }
        }
        write!(f, "search    {} nodes, {} steps", self.nodes, self.steps)
    }
}
