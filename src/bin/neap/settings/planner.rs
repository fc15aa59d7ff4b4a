//! The planner and its switches.

use std::collections::BTreeMap;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use neap::plan::Method;
use neap::plan::method::SwitchError;
use neap::units::Bytes;
use serde_json::Value;

/// Reads a planner's name; the help shows what each planner does.
pub fn named() -> impl TypedValueParser<Value = Method> {
    let all = Method::all();
    let values = all.iter().map(|m| PossibleValue::new(m.name()).help(m.about()));
    PossibleValuesParser::new(values).map(|name| Method::named(&name).unwrap_or_default())
}

/// The planner's heuristics, which can be switched off one by one. A field's name is the switch's
/// name in the planner's options, with `no-` before it if it switches something off.
#[derive(clap::Args, serde::Serialize)]
#[command(next_help_heading = "Planner switches")]
#[serde(rename_all = "kebab-case")]
pub struct Switches {
    /// neap, tensile: Never swap.
    #[arg(long)]
    no_swap: bool,
    /// neap, tensile: Keep parameters and optimizer states on the device round the end of the
    /// iteration.
    #[arg(long)]
    no_across: bool,
    /// neap, tensile: Never recompute.
    #[arg(long)]
    no_recompute: bool,
    /// neap, tensile: Never swap a tensor for which an operator would have to wait.
    #[arg(long)]
    no_passive: bool,
    /// tensile: Search one timetable for both directions of the link, which then carries one
    /// tensor at a time, as the paper has it.
    #[arg(long)]
    no_duplex: bool,
    /// neap, one job: Keep the framework's order of operators.
    #[arg(long)]
    no_reorder: bool,
    /// neap, one job: Keep operators and tensors whole.
    #[arg(long)]
    no_split: bool,
    /// neap: Never begin to copy a tensor out before its last use.
    #[arg(long)]
    no_early: bool,
    /// neap: How many steps of improvement to make; 16 by default.
    #[arg(long, value_name = "STEPS")]
    effort: Option<u32>,
    /// tensile: Search for in-time swaps as long as there are any.
    #[arg(long)]
    no_stop_rule: bool,
    /// tensile: The largest share of tensors that may be swapped, in percent; 100 by default.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    max_swap_rate: Option<u32>,
    /// tensile, several jobs: The largest part of all tensors swapped that may be one job's, in
    /// percent (the paper's max swapping rate); 100 by default.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub max_swap_part: Option<u32>,
    /// neap, tensile: Keep tensors below this size on the device while anything else helps; 64KiB
    /// by default.
    #[arg(long, value_name = "BYTES")]
    min_swap: Option<Bytes>,
    /// Parts of the planner's search to leave out, as bench/ablation does.
    #[arg(long, hide = true, value_name = "NAME", value_delimiter = ',')]
    #[serde(skip)]
    without: Vec<String>,
}

impl Switches {
    /// The planner with its switches, and the switches that differ from their defaults.
    ///
    /// # Errors
    /// When the planner does not have a switch that is given.
    pub fn resolve(&self, planner: &Method) -> anyhow::Result<(Method, BTreeMap<String, String>)> {
        let given: BTreeMap<String, Value> = serde_json::from_value(serde_json::to_value(self)?)?;
        let mut switches = Vec::new();
        for (flag, value) in &given {
            match value {
                Value::Bool(true) => {
                    switches.push((flag.trim_start_matches("no-"), "false".to_owned()))
                }
                Value::Number(number) => switches.push((flag.as_str(), number.to_string())),
                _ => {}
            }
        }
        switches.extend(self.without.iter().map(|part| (part.as_str(), "false".to_owned())));
        let method = planner.with(switches.iter().map(|(k, v)| (*k, v.as_str()))).map_err(|e| {
            let SwitchError::Unknown { switch, .. } = &e else { return anyhow::Error::new(e) };
            if self.without.contains(switch) {
                return anyhow::anyhow!("--without {switch}: {e}");
            }
            let off = format!("no-{switch}");
            let flag = if given.contains_key(&off) { &off } else { switch };
            anyhow::anyhow!(
                "--{flag}: --planner {} has no such switch; leave it out or name another planner",
                planner.name()
            )
        })?;
        let changed = method.switches();
        Ok((method, changed))
    }
}
