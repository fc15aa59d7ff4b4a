//! Finds the operator and the module of each block, and the memory that each module uses.
//!
//! A block belongs to the innermost module call around the operator that requested it. In backward
//! it belongs to the module around the forward operator with the same sequence number. This
//! explains a forecast (largest blocks, memory of each layer) and changes nothing in it.

use neap_model::units::id32;
use std::collections::HashMap;

use super::answer::Answer;
use super::calls::NONE;
use super::forecast::{Block, Forecast, Job};
use super::gpu::NODE;
use super::roles::Role;
use super::trace::Text;
use crate::sim::requests::Request;

/// The name for blocks that belong to no module: those of the optimizer, the input, and blocks from
/// before the trace.
pub const NO_MODULE: &str = "(none)";

/// How many operators before a gradient's accumulation are searched for the node that made the
/// gradient.
const BACK: usize = 4096;

/// The module calls around each operator.
#[derive(Debug)]
pub struct Places<'a> {
    job: &'a Job,
    /// The enclosing module call of each module call, or [`NONE`].
    parent: Vec<u32>,
    /// Each thread's module calls, in order.
    threads: Vec<Vec<u32>>,
    /// The path of each module call, an index into `paths`.
    path: Vec<u32>,
    /// The enclosing path and the name. Enclosing paths come first.
    paths: Vec<(u32, Text)>,
    /// The forward operator of each sequence number. This map is never iterated.
    forward: HashMap<i64, u32>,
}

impl<'a> Places<'a> {
    /// Nests the module calls of a job.
    #[must_use]
    pub fn new(job: &'a Job) -> Self {
        let Job { trace, calls, .. } = job;
        let count = trace.modules.iter().map(|m| usize::from(m.thread.0) + 1).max().unwrap_or(0);
        let mut places = Self {
            job,
            parent: vec![NONE; trace.modules.len()],
            threads: vec![Vec::new(); count],
            path: Vec::with_capacity(trace.modules.len()),
            paths: Vec::new(),
            forward: HashMap::new(),
        };
        let mut known = HashMap::new();
        let mut stacks: Vec<Vec<u32>> = vec![Vec::new(); count];
        for (index, module) in trace.modules.iter().enumerate() {
            let stack = &mut stacks[usize::from(module.thread.0)];
            while stack
                .pop_if(|top| {
                    trace.modules[*top as usize].end < module.end
                        || trace.modules[*top as usize].end <= module.start
                })
                .is_some()
            {}
            let outer = stack.last().copied().unwrap_or(NONE);
            places.parent[index] = outer;
            let around = places.path.get(outer as usize).copied().unwrap_or(NONE);
            let path = *known.entry((around, module.name)).or_insert_with(|| {
                places.paths.push((around, module.name));
                id32(places.paths.len() - 1)
            });
            places.path.push(path);
            places.threads[usize::from(module.thread.0)].push(id32(index));
            stack.push(id32(index));
        }
        if !trace.modules.is_empty() {
            // PyTorch counts the number up when it makes a node, so the last operator that starts
            // with a number made the node.
            let mut backward = vec![false; trace.ops.len()];
            for (index, op) in trace.ops.iter().enumerate() {
                let parent = calls.parent[index];
                backward[index] = if parent == NONE {
                    trace.text(op.name).starts_with(NODE)
                } else {
                    backward[parent as usize]
                };
                if op.sequence >= 0 && !backward[index] {
                    places.forward.insert(op.sequence, id32(index));
                }
            }
        }
        places
    }

    /// The innermost module call to which an operator belongs, an index into the trace's modules.
    #[must_use]
    pub fn module(&self, op: u32) -> Option<u32> {
        let Job { trace, calls, .. } = self.job;
        let outermost = calls.outermost(op);
        if !trace.text(trace.ops[outermost as usize].name).starts_with(NODE) {
            return self.around(op);
        }
        if let Some(&forward) = self.forward.get(&trace.ops[outermost as usize].sequence) {
            return self.around(forward);
        }
        // A gradient's accumulation has no number. It follows the node that made the gradient.
        let list = &calls.threads()[usize::from(trace.ops[outermost as usize].thread.0)];
        let here = list.partition_point(|&o| o < outermost);
        let nodes =
            list[..here].iter().rev().take(BACK).filter(|&&o| calls.parent[o as usize] == NONE);
        let made = nodes.take_while(|&&o| trace.text(trace.ops[o as usize].name).starts_with(NODE));
        made.into_iter()
            .find_map(|&o| self.forward.get(&trace.ops[o as usize].sequence))
            .and_then(|&f| self.around(f))
    }

    fn around(&self, op: u32) -> Option<u32> {
        let trace = &self.job.trace;
        let op = &trace.ops[op as usize];
        let list = self.threads.get(usize::from(op.thread.0))?;
        let after = list.partition_point(|&m| trace.modules[m as usize].start <= op.start);
        let mut at = *list[..after].last()?;
        while trace.modules[at as usize].end < op.end {
            at = self.parent[at as usize];
            if at == NONE {
                return None;
            }
        }
        Some(at)
    }

    /// The names of a module call and those around it, outermost first: `GPT2Model_0/GPT2Block_3`.
    #[must_use]
    pub fn path(&self, module: u32) -> String {
        self.spell(self.path[module as usize])
    }

    fn spell(&self, mut path: u32) -> String {
        let mut names = Vec::new();
        while path != NONE {
            let (around, name) = self.paths[path as usize];
            names.push(self.job.trace.text(name));
            path = around;
        }
        names.reverse();
        names.join("/")
    }

    /// The outermost operator around `op`. For a backward node, its name without the prefix.
    #[must_use]
    pub fn operator(&self, op: u32) -> &'a str {
        let trace = &self.job.trace;
        let name = trace.text(trace.ops[self.job.calls.outermost(op) as usize].name);
        name.strip_prefix(NODE).unwrap_or(name)
    }

    fn path_of(&self, block: Block) -> u32 {
        block.op.and_then(|op| self.module(op)).map_or(NONE, |m| self.path[m as usize])
    }

    /// The phase of the iteration in which the peak is.
    #[must_use]
    pub fn phase(&self, forecast: &Forecast, answer: &Answer) -> &'static str {
        if forecast.starts.first().is_none_or(|&s| answer.peak_index < s) {
            return "before the first iteration";
        }
        let block = match forecast.requests.get(answer.peak_index) {
            Some(&Request::Allocate { id, .. }) => forecast.blocks[id as usize],
            _ => return "outside any phase",
        };
        // Repeated iterations have times of their own, but the operators of the recorded iteration.
        let time = block
            .op
            .map_or(forecast.times[answer.peak_index], |op| self.job.trace.ops[op as usize].start);
        let Some(iteration) = self.job.phases.at(time).map(|i| &self.job.phases.iterations[i])
        else {
            return "outside any phase";
        };
        match iteration.backward {
            _ if iteration.steps.iter().any(|s| s.holds(time)) => "optimizer step",
            Some(backward) if backward.holds(time) => "backward",
            Some(backward) if time > backward.end => "after backward",
            _ => "forward",
        }
    }

    /// The memory of each module in the iteration of the peak (in everything, if there are no
    /// iterations), as requested. Modules are in the order of their first call, [`NO_MODULE`] last.
    /// Memory of a module does not count again for the modules around it.
    #[must_use]
    pub fn by_module(&self, forecast: &Forecast, answer: &Answer) -> Vec<Usage> {
        let none = self.paths.len();
        let mut rows = vec![Usage::default(); none + 1];
        let row = |path: u32| if path == NONE { none } else { path as usize };
        for (path, usage) in rows.iter_mut().enumerate() {
            usage.module = if path == none { NO_MODULE.to_owned() } else { self.spell(id32(path)) };
        }
        let iteration = answer.peak_iteration(forecast);
        let from = if iteration == 0 { 0 } else { forecast.starts[iteration - 1] };
        let to = forecast.starts.get(iteration).copied().unwrap_or(forecast.requests.len());
        let spans = &self.job.phases.iterations;
        let span = spans.get(iteration.clamp(1, spans.len().max(1)) - 1).map(|i| i.span);
        for (index, module) in self.job.trace.modules.iter().enumerate() {
            if span.is_some_and(|s| s.holds(module.start)) {
                rows[self.path[index] as usize].calls += 1;
            }
        }
        for request in &forecast.requests[from..to] {
            let Request::Allocate { id, .. } = *request else { continue };
            let block = forecast.blocks[id as usize];
            let usage = &mut rows[row(self.path_of(block))];
            match block.role {
                Role::Activation => {
                    usage.activations = usage.activations.saturating_add(block.bytes)
                }
                Role::Gradient => usage.gradients = usage.gradients.saturating_add(block.bytes),
                Role::Temporary => {
                    usage.largest_temporary = usage.largest_temporary.max(block.bytes)
                }
                _ => {}
            }
        }
        for &id in &answer.alive {
            let block = forecast.blocks[id as usize];
            let usage = &mut rows[row(self.path_of(block))];
            usage.at_peak = usage.at_peak.saturating_add(block.bytes);
        }
        rows
    }
}

/// The memory of one module without the modules inside it, in requested bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The module's path, or [`NO_MODULE`].
    pub module: String,
    /// How many times it is called in the iteration.
    pub calls: u64,
    /// Sum of the blocks that it keeps for backward.
    pub activations: u64,
    /// Its largest block that is freed in the same phase.
    pub largest_temporary: u64,
    /// Sum of the gradients that it leaves for the optimizer.
    pub gradients: u64,
    /// Its bytes at the peak.
    pub at_peak: u64,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::answer::peaks;
    use super::super::gpu::{Class, Settings};
    use super::super::trace::{Limits, parse};
    use super::*;
    use crate::sim::allocator::Config;

    fn settings() -> Settings {
        Settings {
            class: Class { capability: 9, multiprocessors: 132, threads: 2048 },
            without: Vec::new(),
            cudnn_workspace: 0,
        }
    }

    /// Two layers, the second inside the first; backward on a thread of its own.
    fn job() -> Job {
        let event = |category: &str, name: &str, thread: u32, start: u32, end: u32, args: &str| {
            format!(
                r#"{{"ph":"X","cat":"{category}","name":"{name}","pid":1,"tid":{thread},"ts":{start},"dur":{},"args":{{{args}}}}}"#,
                end - start
            )
        };
        let memory = |time: u32, thread: u32, address: u32, bytes: i64| {
            format!(
                r#"{{"ph":"i","cat":"cpu_instant_event","name":"[memory]","pid":1,"tid":{thread},"ts":{time},"s":"t","args":{{"Device Type":0,"Addr":{address},"Bytes":{bytes}}}}}"#
            )
        };
        let op = |name: &str, thread, start, end, sequence: i64| {
            event("cpu_op", name, thread, start, end, &format!(r#""Sequence number":{sequence}"#))
        };
        let node = |name: &str, start, end, sequence| {
            op(&format!("{NODE}{name}"), 2, start, end, sequence)
        };
        let events = [
            event("python_function", "nn.Module: Outer_0", 1, 10, 90, ""),
            event("python_function", "nn.Module: Inner_0", 1, 20, 50, ""),
            // It has number 7 too, but makes no node.
            op("aten::empty_like", 1, 12, 14, 7),
            op("aten::relu", 1, 30, 40, 7),
            op("aten::clamp_min", 1, 31, 39, 7),
            op("aten::sum", 1, 60, 70, 8),
            node("SumBackward0", 100, 110, 8),
            node("ReluBackward0", 120, 130, 7),
            op("aten::threshold_backward", 2, 121, 129, 3),
            node("torch::autograd::AccumulateGrad", 140, 150, -1),
            op("aten::clone", 2, 141, 149, -1),
            op("aten::ones", 1, 200, 210, -1),
            memory(35, 1, 4096, 1000),
            memory(65, 1, 8192, 10),
            memory(125, 2, 16384, 600),
            memory(145, 2, 32768, 400),
            memory(205, 1, 65536, 5),
        ];
        let text = format!(r#"{{"traceEvents":[{}]}}"#, events.join(","));
        Job::new(
            parse(std::io::Cursor::new(text.into_bytes()), Path::new("test"), &Limits::default())
                .unwrap(),
        )
    }

    #[test]
    fn backward_belongs_to_the_module_whose_forward_made_the_node() {
        let job = job();
        let places = Places::new(&job);
        let found = |name: &str| {
            let op =
                job.trace.ops.iter().position(|o| job.trace.text(o.name) == name).unwrap() as u32;
            (places.operator(op), places.module(op).map(|m| places.path(m)))
        };
        let path = |text: &str| Some(text.to_owned());
        assert_eq!(found("aten::clamp_min"), ("aten::relu", path("Outer_0/Inner_0")));
        assert_eq!(found("aten::sum"), ("aten::sum", path("Outer_0")));
        assert_eq!(found("aten::threshold_backward"), ("ReluBackward0", path("Outer_0/Inner_0")));
        assert_eq!(found(&format!("{NODE}SumBackward0")), ("SumBackward0", path("Outer_0")));
        assert_eq!(
            found("aten::clone"),
            ("torch::autograd::AccumulateGrad", path("Outer_0/Inner_0"))
        );
        assert_eq!(found("aten::ones"), ("aten::ones", None));
    }

    fn check_sums(job: &Job) -> Vec<Usage> {
        let mut forecast = Forecast::new(job, &settings());
        let answer = peaks(job, &mut forecast, &Config::default());
        let rows = Places::new(job).by_module(&forecast, &answer);
        assert_eq!(
            rows.iter().map(|r| r.at_peak).sum::<u64>(),
            answer.by_role.values().sum::<u64>()
        );
        assert_eq!(answer.by_role.values().sum::<u64>(), answer.at_peak.requested.0);
        let iteration = answer.peak_iteration(&forecast);
        let from = forecast.starts[iteration - 1];
        let to = forecast.starts.get(iteration).copied().unwrap_or(forecast.requests.len());
        let sum = |role| -> u64 {
            let ids = forecast.requests[from..to].iter().filter_map(|r| {
                if let Request::Allocate { id, .. } = r { Some(*id) } else { None }
            });
            ids.map(|id| forecast.blocks[id as usize])
                .filter(|b| b.role == role)
                .map(|b| b.bytes)
                .sum()
        };
        assert_eq!(rows.iter().map(|r| r.activations).sum::<u64>(), sum(Role::Activation));
        assert_eq!(rows.iter().map(|r| r.gradients).sum::<u64>(), sum(Role::Gradient));
        assert_eq!(rows.last().unwrap().module, NO_MODULE);
        rows
    }

    #[test]
    fn a_profile_of_modules_adds_up() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fixtures/traces/tiny_cnn-adam-8-32-start.profile.json.gz");
        let job = Job::read(&path, &Limits::default()).unwrap();
        let rows = check_sums(&job);
        let row = |name: &str| rows.iter().find(|r| r.module.ends_with(name)).unwrap();
        // 3 × 16 kernels of 3 × 3; the output of 8 × 16 × 32 × 32 is kept; one call in each
        // iteration.
        let first = row("Sequential_0/Conv2d_0");
        assert_eq!(
            (first.gradients, first.activations, first.calls),
            (3 * 16 * 9 * 4, 8 * 16 * 32 * 32 * 4, 1)
        );
        assert!(row("CrossEntropyLoss_0").activations > 0);
        let small = self::job();
        assert_eq!(
            check_sums(&small).iter().map(|r| (r.module.as_str(), r.calls)).collect::<Vec<_>>(),
            [("Outer_0", 1), ("Outer_0/Inner_0", 1), (NO_MODULE, 0)]
        );
    }
}
