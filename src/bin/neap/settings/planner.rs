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
    /// neap, tensile: Start copies as late as possible even if there is room earlier.
    #[arg(long)]
    no_prefetch: bool,
    /// neap: Recompute only from tensors on the device, not from other recomputed ones.
    #[arg(long)]
    no_chains: bool,
    /// neap: Let each recompute make only one tensor.
    #[arg(long)]
    no_share: bool,
    /// neap: Never keep a tensor longer so that recomputes can read it.
    #[arg(long)]
    no_extend: bool,
    /// neap: Never undo a choice.
    #[arg(long)]
    no_drop: bool,
    /// neap, one job: Keep the framework's order of operators.
    #[arg(long)]
    no_reorder: bool,
    /// neap, one job: Never run an update with a large part of all states later than its gradient
    /// allows.
    #[arg(long)]
    no_delay: bool,
    /// neap, one job: Never make a gradient later than the framework does.
    #[arg(long)]
    no_late_gradients: bool,
    /// neap, one job: Keep operators and tensors whole.
    #[arg(long)]
    no_split: bool,
    /// neap, one job: Never try pieces of less than 32 MiB where the link takes long for one.
    #[arg(long)]
    no_finer: bool,
    /// neap, one job: Never make a gradient in pieces, each just before its part of the update.
    #[arg(long)]
    no_split_gradients: bool,
    /// neap: Never choose what is streamed over the link before all else.
    #[arg(long)]
    no_stream: bool,
    /// neap: Never keep tensors over the end of the iteration to let them leave in the next
    /// forward.
    #[arg(long)]
    no_linger: bool,
    /// neap: Never make parameters leave before large tensors, or come back only after them.
    #[arg(long)]
    no_apart: bool,
    /// neap, one job: Never plan a slow job a second time, without tensors that are kept longer for
    /// recomputes.
    #[arg(long)]
    no_twice: bool,
    /// neap, one job: Never plan a slow job once more from what a linear program says of its
    /// tensors.
    #[arg(long)]
    no_guide: bool,
    /// neap, one job: In that plan, swap the largest tensors first, rather than those that relieve
    /// most operators.
    #[arg(long)]
    no_widest: bool,
    /// neap, one job: Never copy parameters out after their updates too, so that they leave in the
    /// forward without a copy.
    #[arg(long)]
    no_ahead: bool,
    /// neap: Never let copies run at other instants to make room on the link for one more.
    #[arg(long)]
    no_shift: bool,
    /// neap: Never begin to copy a tensor out before its last use.
    #[arg(long)]
    no_early: bool,
    /// neap: Never change single choices of a plan that is slower than the unplanned job.
    #[arg(long)]
    no_polish: bool,
    /// neap, for PyTorch's allocator: Never change two choices of a plan at once.
    #[arg(long)]
    no_pairs: bool,
    /// neap: Never look for a quicker plan by changes at random, which is done with more effort
    /// than 64 and where the plan adds little time.
    #[arg(long)]
    no_random: bool,
    /// neap, for PyTorch's allocator: Never leave out swaps that leave its memory in pieces.
    #[arg(long)]
    no_mend: bool,
    /// neap: Never use another planner's plan, even where neap's own search finds none.
    #[arg(long)]
    no_portfolio: bool,
    /// neap, several jobs: Plan them in only one way, however they run beside each other.
    #[arg(long, alias = "no-joint")]
    no_together: bool,
    /// neap, several jobs: Never plan for the share of the link that each job gets.
    #[arg(long)]
    no_link_share: bool,
    /// neap: How many steps of improvement to make; 16 by default.
    #[arg(long, value_name = "STEPS")]
    effort: Option<u32>,
    /// tensile: Search for in-time swaps as long as there are any.
    #[arg(long)]
    no_stop_rule: bool,
    /// tensile: The largest share of tensors that may be swapped, in percent; 100 by default.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    max_swap_rate: Option<u32>,
    /// neap, tensile: Keep tensors below this size on the device while anything else helps; 64KiB
    /// by default.
    #[arg(long, value_name = "BYTES")]
    min_swap: Option<Bytes>,
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
        let method = planner.with(switches.iter().map(|(k, v)| (*k, v.as_str()))).map_err(|e| {
            let SwitchError::Unknown { switch, .. } = &e else { return anyhow::Error::new(e) };
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
