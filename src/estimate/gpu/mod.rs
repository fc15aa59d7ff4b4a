//! The GPU model: edits the blocks of the CPU trace into those that the same job uses on a GPU.
//!
//! Every block of the CPU trace is kept unless one of the [`Rule`]s changes it: kernels whose
//! scratch exists on only one of the two, memory that a GPU library holds, the multi-tensor form of
//! the optimizer. Each rule is a switch and reports what it changed ([`Effect`]). No rule depends
//! on a model's name.

mod attention;
mod kernels;
mod optimizer;
mod reduction;

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::calls::Calls;
use super::inputs::Inputs;
use super::lives::{Key, Lives};
use super::trace::{Op, Trace};

pub use optimizer::{Step, step_class};

/// The properties of a GPU on which the scratch of its kernels depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// The major number of its compute capability.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u64,
    /// Threads that one multiprocessor runs at once.
    pub threads: u64,
}

impl Class {
    /// The workspace that PyTorch gives each cuBLAS handle, through its caching allocator. On
    /// Blackwell as since 2.13; up to 2.11 it was as before Hopper.
    #[must_use]
    pub const fn cublas_workspace(self) -> u64 {
        if self.capability >= 9 { 32 << 20 } else { (8 << 20) + (128 << 10) }
    }
}

macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident = $name:literal, $does:literal;)*) => {
        /// A difference between a CPU trace and the GPU's requests.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Rule {
            $($(#[$doc])* $rule,)*
        }

        impl Rule {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$rule),*];

            /// Its name on the command line.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$rule => $name),* }
            }

            /// What it does, in half a sentence.
            #[must_use]
            pub const fn does(self) -> &'static str {
                match self { $(Self::$rule => $does),* }
            }
        }
    };
}

rules! {
    /// Parameters, buffers and optimizer states from before the trace began.
    Before = "before", "parameters, buffers and states from before the trace";
    /// cuBLAS workspaces.
    Workspaces = "workspaces", "a cuBLAS workspace for each thread that multiplies";
    /// Scratch of the CPU's kernels.
    Scratch = "scratch", "scratch of the CPU's kernels left out";
    /// Numbers that Python passes to operators.
    Numbers = "numbers", "numbers and counters that stay on the host left out";
    /// Convolutions and batch norms.
    Convolutions = "convolutions", "layout copies of the CPU's convolutions left out";
    /// Dropout's mask.
    Dropout = "dropout", "dropout keeps one byte an element, not a number";
    /// Attention's kernel.
    Attention = "attention", "attention by the kernel that a GPU chooses";
    /// Reductions across thread blocks.
    Reductions = "reductions", "scratch of the GPU's reductions";
    /// The product in softmax's backward.
    Softmax = "softmax", "the product in softmax's backward";
    /// Multi-tensor optimizers.
    Optimizer = "optimizer", "the optimizer's multi-tensor form";
    /// The allowance for cuDNN.
    Cudnn = "cudnn", "an allowance for cuDNN around every convolution";
}

/// What a rule changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// Number of blocks changed.
    pub blocks: u64,
    /// Bytes left out, summed over blocks.
    pub removed: u64,
    /// Bytes added, summed over blocks.
    pub added: u64,
    /// The largest block it added.
    pub largest: u64,
}

/// The rules that apply, and their figures.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The GPU.
    pub class: Class,
    /// Rules that are switched off.
    pub without: Vec<Rule>,
    /// Bytes of cuDNN's workspace around each convolution call; 0 for none.
    pub cudnn_workspace: u64,
}

/// The edited blocks, and what the rules did.
#[derive(Debug)]
pub struct Edited {
    /// The blocks.
    pub lives: Lives,
    /// What each rule changed.
    pub effects: BTreeMap<Rule, Effect>,
    /// Optimizer steps that were recognised, in order.
    pub steps: Vec<Step>,
    /// Sentences about what could not be found out.
    pub notes: Vec<String>,
}

/// Edits the blocks of `trace` into those that the job uses on a GPU.
#[must_use]
pub fn edit(trace: &Trace, calls: &Calls, settings: &Settings) -> Edited {
    let lives = Lives::new(trace, calls);
    let mut editor = Editor {
        trace,
        calls,
        settings,
        kinds: trace.texts.iter().map(|t| Kind::from_name(t)).collect(),
        inputs: HashMap::new(),
        multiplied: [false; 2],
        biased: false,
        edited: Edited { lives, effects: BTreeMap::new(), steps: Vec::new(), notes: Vec::new() },
    };
    editor.edit();
    editor.edited
}

/// The prefix of the name of an operator that runs a backward node.
pub const NODE: &str = "autograd::engine::evaluate_function: ";

/// Kinds of operators that rules handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Other,
    Attention,
    Convolution,
    ConvolutionBackward,
    Norm,
    Dropout,
    Reduction,
    SoftmaxBackward,
    Multiplication,
}

impl Kind {
    fn from_name(name: &str) -> Self {
        match name.strip_prefix("aten::").unwrap_or("") {
            "scaled_dot_product_attention" => Self::Attention,
            "_convolution"
            | "mkldnn_convolution"
            | "_slow_conv2d_forward"
            | "slow_conv3d_forward" => Self::Convolution,
            "convolution_backward" => Self::ConvolutionBackward,
            "native_batch_norm"
            | "native_batch_norm_backward"
            | "native_group_norm"
            | "native_group_norm_backward" => Self::Norm,
            "dropout" => Self::Dropout,
            "sum" | "mean" | "amax" | "amin" | "prod" | "any" | "all" | "var" | "std" | "norm"
            | "linalg_vector_norm" => Self::Reduction,
            "_softmax_backward_data" => Self::SoftmaxBackward,
            "mm" | "addmm" | "bmm" | "baddbmm" | "dot" | "mv" | "addmv" => Self::Multiplication,
            _ => Self::Other,
        }
    }
}

struct Editor<'a> {
    trace: &'a Trace,
    calls: &'a Calls,
    settings: &'a Settings,
    /// Kinds by text id.
    kinds: Vec<Kind>,
    /// Parsed arguments, by their position in the trace. This map is never iterated.
    inputs: HashMap<u32, Rc<Inputs>>,
    /// Whether the forward and the backward thread have a cuBLAS workspace.
    multiplied: [bool; 2],
    /// Whether cuBLASLt has its workspace.
    biased: bool,
    edited: Edited,
}

impl Editor<'_> {
    fn edit(&mut self) {
        let steps = self.optimizer_steps();
        let groups =
            if self.applies(Rule::Attention) { self.attention_groups() } else { HashMap::new() };
        for thread in 0..self.calls.threads().len() {
            let ops = &self.calls.threads()[thread];
            let mut at = 0;
            while at < ops.len() {
                let op = ops[at];
                let claimed = steps.iter().any(|s| s.holds(self.op(op))) || self.rule(op, &groups);
                at = if claimed { self.calls.after(op) } else { at + 1 };
            }
        }
        self.scratch_and_numbers(&steps);
        for step in &steps {
            self.optimizer(step);
        }
        self.edited.steps = steps;
    }

    /// Applies the rules to one operator. Returns true when they need not look inside it.
    fn rule(&mut self, op: u32, groups: &HashMap<u32, attention::Group>) -> bool {
        match self.kind(op) {
            Kind::Other => false,
            Kind::Attention => groups.get(&op).is_some_and(|g| self.attention(op, g)),
            Kind::Convolution => self.convolution(op),
            Kind::ConvolutionBackward => self.convolution_backward(op),
            Kind::Norm => self.norm(op),
            Kind::Dropout => self.dropout(op),
            Kind::Reduction => self.reduction(op),
            Kind::SoftmaxBackward => self.softmax_backward(op),
            Kind::Multiplication => self.multiplication(op),
        }
    }

    fn op(&self, op: u32) -> &Op {
        &self.trace.ops[op as usize]
    }

    fn name(&self, op: u32) -> &str {
        self.trace.text(self.op(op).name)
    }

    fn kind(&self, op: u32) -> Kind {
        self.kinds[self.op(op).name.0 as usize]
    }

    fn applies(&self, rule: Rule) -> bool {
        !self.settings.without.contains(&rule)
    }

    fn inputs(&mut self, op: u32) -> Rc<Inputs> {
        let args = self.op(op).args;
        let trace = self.trace;
        Rc::clone(
            self.inputs
                .entry(args)
                .or_insert_with(|| Rc::new(Inputs::new(trace, trace.args[args as usize]))),
        )
    }

    /// Whether the operator runs a backward node.
    fn is_backward(&self, op: u32) -> bool {
        self.name(self.calls.outermost(op)).starts_with(NODE)
    }

    /// The blocks allocated inside `op`, in order.
    fn taken(&self, op: u32) -> Vec<u32> {
        let (trace, lives) = (self.trace, &self.edited.lives);
        self.calls
            .events_of(trace, op)
            .filter(|&e| trace.memory[e as usize].bytes > 0)
            .map(|e| lives.of_event[e as usize])
            .filter(|&l| l != super::lives::NO_LIFE)
            .collect()
    }

    /// Whether a block allocated inside `op` is freed inside it.
    fn is_transient(&self, life: u32, op: u32) -> bool {
        self.edited.lives.list[life as usize].end.is_some_and(|k| k.time <= self.op(op).end)
    }

    fn effect(&mut self, rule: Rule) -> &mut Effect {
        self.edited.effects.entry(rule).or_default()
    }

    fn drop(&mut self, life: u32, rule: Rule) {
        let life = &mut self.edited.lives.list[life as usize];
        if !life.dropped {
            life.dropped = true;
            let bytes = life.bytes;
            let effect = self.effect(rule);
            effect.blocks += 1;
            effect.removed = effect.removed.saturating_add(bytes);
        }
    }

    fn add(&mut self, bytes: u64, start: Key, end: Option<Key>, op: u32, rule: Rule) -> u32 {
        let effect = self.effect(rule);
        effect.blocks += 1;
        effect.added = effect.added.saturating_add(bytes);
        effect.largest = effect.largest.max(bytes);
        self.edited.lives.add(bytes, start, end, op, rule.name())
    }

    /// Adds blocks that are all alive just before `op` ends, and are freed in reverse.
    fn add_transients(&mut self, sizes: &[u64], op: u32, rule: Rule) {
        self.add_transients_at(self.op(op).end, sizes, op, rule);
    }

    /// As [`Self::add_transients`], just before the events at `time`.
    fn add_transients_at(&mut self, time: u64, sizes: &[u64], op: u32, rule: Rule) {
        let starts: Vec<Key> = sizes.iter().map(|_| self.edited.lives.key(time, 0)).collect();
        for (&bytes, &start) in sizes.iter().zip(&starts).rev() {
            let end = self.edited.lives.key(time, 0);
            if bytes > 0 {
                self.add(bytes, start, Some(end), op, rule);
            }
        }
    }

    fn drop_transients(&mut self, op: u32, rule: Rule) {
        for life in self.taken(op) {
            if self.is_transient(life, op) {
                self.drop(life, rule);
            }
        }
    }
}
