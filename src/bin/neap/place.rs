//! `neap place`: addresses for a bare problem.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{anyhow, bail};
use neap::plan::place::problem::Problem;
use neap::plan::place::search::{Options, Outcome, Spent, Technique};
use neap::plan::place::{self, Layout};
use serde_json::json;

use crate::output::{self, Answer, note};
use crate::settings;

/// Give every item of known size and life an offset, so that those alive at once never overlap.
#[derive(clap::Args)]
pub struct Flags {
    /// The items (CSV with id,lower,upper,size and optionally alignment,offset; may be gzipped).
    problem: PathBuf,
    /// The size that everything must fit into; the least that can be found if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    capacity: Option<u64>,
    /// Where to write id,lower,upper,size,offset; only reported if not given.
    #[arg(short, long, value_name = "FILE.csv")]
    output: Option<PathBuf>,
    /// How many steps the search may take; a million take a few milliseconds.
    #[arg(long, value_name = "STEPS", default_value_t = 1_000_000_000)]
    effort: u64,
    /// Search techniques to leave out, to see what each is worth: partition, decompose, sections, monotone, support, dominance,
    /// lowest, free, twins, jump, portfolio, restarts, weights, shuffle.
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

/// What there is to say.
struct Found {
    layout: Option<Layout>,
    /// Proved: nothing lower, or with a capacity that it can't be met.
    proved: bool,
    bound: u64,
    spent: Spent,
}

pub fn main(flags: &Flags, as_json: bool) -> anyhow::Result<Answer> {
    settings::outputs(&[&flags.problem], &[flags.output.as_deref()])?;
    let problem = Problem::read(&flags.problem)?;
    let items = problem.items();
    let (moment, load) = problem.fullest();
    let options =
        Options { effort: flags.effort, without: flags.without.iter().map(|n| n.0).collect() };
    let found = match flags.capacity {
        Some(capacity) => {
            let within = place::within(&items, capacity, &options);
            let proved = within.outcome == Outcome::Impossible;
            let layout =
                if let Outcome::Placed(layout) = within.outcome { Some(layout) } else { None };
            Found {
                layout,
                proved,
                bound: if proved { capacity + 1 } else { load },
                spent: within.spent,
            }
        }
        None => {
            let least = place::least(&items, &options);
            Found {
                proved: least.bound == least.layout.height,
                bound: least.bound,
                layout: Some(least.layout),
                spent: least.spent,
            }
        }
    };
    if let Some(layout) = &found.layout {
        let height = problem.check(layout, flags.capacity.unwrap_or(u64::MAX));
        if height.as_ref() != Ok(&layout.height) {
            let why =
                height.map_or_else(|e| e, |h| format!("its height is {h}, not {}", layout.height));
            bail!(
                "the layout did not pass the checker ({why}); this is a defect of neap, please report it with the problem"
            );
        }
        if let Some(output) = &flags.output {
            neap::files::write(output, |out| problem.write(layout, out)).map_err(|e| anyhow!(e))?;
        }
    }
    tell(flags, &found, items.len(), load, as_json)?;
    if found.layout.is_some() {
        return Ok(Answer::Yes);
    }
    let capacity = flags.capacity.unwrap_or_default();
    let file = flags.problem.display();
    note(&if load > capacity {
        format!("{file}: does not fit into {capacity}: from {moment} on {load} are alive at once")
    } else if found.proved {
        format!("{file}: does not fit into {capacity}: the search looked at every case")
    } else {
        format!(
            "{file}: not placed within {capacity}, nor proved impossible; give a larger --effort than {}, or more capacity",
            flags.effort
        )
    });
    Ok(Answer::No)
}

fn tell(
    flags: &Flags,
    found: &Found,
    items: usize,
    load: u64,
    as_json: bool,
) -> anyhow::Result<()> {
    let height = found.layout.as_ref().map(|l| l.height);
    if as_json {
        return output::json(&json!({
            "file": flags.problem.display().to_string(),
            "items": items,
            "placed": found.layout.is_some(),
            "proved": found.proved,
            "capacity_bytes": flags.capacity,
            "height_bytes": height,
            "load_bytes": load,
            "bound_bytes": found.bound,
            "gap_bytes": height.map(|h| h - load),
            "nodes": found.spent.nodes,
            "steps": found.spent.steps,
        }));
    }
    let Some(height) = height else { return Ok(()) };
    let share = u128::from(height - load) * 10_000 / u128::from(load.max(1));
    let mut lines = vec![
        format!("items     {items}"),
        format!("height    {height}"),
        format!("load      {load} alive at once, {}.{:02} % less", share / 100, share % 100),
    ];
    if flags.capacity.is_none() {
        let word = if found.proved {
            "nothing lower is possible".to_owned()
        } else {
            format!("nothing below {} is possible", found.bound)
        };
        lines.push(format!("proved    {word}"));
    }
    lines.push(format!("search    {} nodes, {} steps", found.spent.nodes, found.spent.steps));
    output::data(&lines.join("\n"))?;
    if let Some(output) = &flags.output {
        note(&format!("written: {}", output.display()));
    }
    Ok(())
}
