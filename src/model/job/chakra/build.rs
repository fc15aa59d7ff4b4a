//! Makes operators and tensors from the chosen calls: operands with versions, generated and hidden
//! outputs, in-place writes, workspaces, host operands, phases.

use std::collections::{HashMap, HashSet};

use super::names::{Context, Names};
use super::parse::{Node, Trace};
use super::select::{Declared, writes};
use super::storage::Life;
use super::value::{Value, View};
use crate::job::{Arg, Operand, Operator, Phase, Replay, Role, Tensor};
use crate::units::{Bytes, OpId, TensorId, id32};

/// A graph under construction, and facts that the trace adds to it.
#[derive(Debug, Default)]
pub(super) struct Built {
    pub name: String,
    pub tensors: Vec<Tensor>,
    pub operators: Vec<Operator>,
    pub loss: Option<Operand>,
    /// For each operator, the number of the optimizer step around it, from 1; 0 if there is none.
    pub step: Vec<u16>,
    /// For each tensor, what the trace shows of it.
    pub facts: Vec<Facts>,
    /// The tensor of each life that became one.
    pub tensor_of: HashMap<u32, TensorId>,
    /// The first operator after `zero_grad`, or 0 when no operator follows.
    pub zero_grad: Option<OpId>,
    pub notes: Vec<String>,
}

/// What a gradient scaler does at the end of a step; its first arguments are its two states.
pub(super) const SCALER: &str = "aten::_amp_update_scale_";

/// What the trace shows of one tensor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    /// An operator of the iteration generates it.
    pub generated: bool,
    /// The trace names it.
    pub named: bool,
    /// Autograd hands it to a parameter as its gradient.
    pub accumulated: bool,
    /// A normalisation takes it as running statistics.
    pub statistics: bool,
}

struct Builder<'a> {
    trace: &'a Trace,
    lives: &'a [Life],
    names: &'a Names,
    declared: &'a Declared,
    /// The lives that each call makes.
    made_by: HashMap<usize, Vec<u32>>,
    tensor_of: HashMap<u32, TensorId>,
    version: Vec<u32>,
    numbers: HashMap<String, usize>,
    copies: u32,
    out: Built,
}

pub(super) fn build(
    trace: &Trace,
    lives: &[Life],
    names: &Names,
    declared: &Declared,
    chosen: &[usize],
    name: String,
) -> Built {
    let mut made_by: HashMap<usize, Vec<u32>> = HashMap::new();
    for (id, life) in lives.iter().enumerate().filter(|(_, l)| !l.host) {
        made_by.entry(life.maker.unwrap_or(usize::MAX)).or_default().push(id32(id));
    }
    let mut builder = Builder {
        trace,
        lives,
        names,
        declared,
        made_by,
        tensor_of: HashMap::new(),
        version: Vec::new(),
        numbers: HashMap::new(),
        copies: 0,
        out: Built { name, ..Built::default() },
    };
    for named in &names.named {
        let id = builder.tensor(named.life, false);
        let tensor = &mut builder.out.tensors[id.index()];
        (tensor.name, tensor.role) = (named.name.clone(), named.role);
        builder.out.facts[id.index()].named = true;
    }
    for &at in chosen {
        builder.operator(at);
    }
    builder.finish(chosen)
}

impl Builder<'_> {
    /// The tensor of a life, which is added when first seen.
    fn tensor(&mut self, life: u32, generated: bool) -> TensorId {
        if let Some(&id) = self.tensor_of.get(&life) {
            return id;
        }
        let id = TensorId::from_index(self.out.tensors.len());
        let Life { bytes, dtype, shape, .. } = &self.lives[life as usize];
        let (role, kept_until) = (Role::Activation, None);
        self.out.tensors.push(Tensor {
            name: String::new(),
            bytes: Bytes(*bytes),
            role,
            dtype: *dtype,
            shape: shape.clone(),
            kept_until,
        });
        self.out.facts.push(Facts { generated, ..Facts::default() });
        self.version.push(0);
        self.tensor_of.insert(life, id);
        id
    }

    /// A view as an operand of the tensor's current version.
    fn operand(&mut self, view: &View) -> Operand {
        let tensor = self.tensor(view.life, false);
        let version = self.version[tensor.index()];
        Operand {
            tensor,
            version,
            dtype: view.dtype,
            offset: view.offset,
            shape: view.shape.clone(),
            stride: view.stride.clone(),
        }
    }

    /// A call and all calls inside it.
    fn inside(&self, at: usize) -> impl Iterator<Item = usize> + use<'_> {
        (at..=self.trace.nodes[at].end).filter(move |&n| self.trace.inside(n, at))
    }

    /// The storages that a call writes in place and does not make: one view for each life in the
    /// order of writing, and whether they are running statistics.
    fn written_in_place(&self, at: usize, made: &HashSet<u32>) -> Vec<(View, bool)> {
        let mut written: Vec<(View, bool)> = Vec::new();
        let mut lives: HashSet<u32> = HashSet::new();
        for inner in self.inside(at) {
            for (view, statistics) in writes(&self.trace.nodes[inner]) {
                if !made.contains(&view.life) && lives.insert(view.life) {
                    written.push((view.clone(), statistics));
                }
            }
        }
        written
    }

    fn operator(&mut self, at: usize) {
        let trace = self.trace;
        let node = &trace.nodes[at];
        let context = self.names.context[at];
        let index = self.out.operators.len();
        let short = node.name.rsplit("::").next().unwrap_or(&node.name);
        let number = self.numbers.entry(short.to_owned()).or_default();
        let name = format!("{short}_{number}");
        *number += 1;

        let input = self.host_copy(at);
        let args = node.inputs.iter().map(|value| self.argument(value, &context, input)).collect();
        self.gradients(at, &context, node);
        self.statistics(node);

        // The storages that it makes: declared outputs, hidden outputs (read later, or not
        // declared), or scratch.
        let all_made: Vec<u32> =
            self.inside(at).filter_map(|n| self.made_by.get(&n)).flatten().copied().collect();
        let escapes =
            |life: u32| self.lives[life as usize].last_read.is_some_and(|read| read > node.end);
        let undeclared = all_made.iter().copied().filter(|&l| !self.declared.has(at, l));
        let (hidden_made, scratch): (Vec<u32>, Vec<u32>) = undeclared.partition(|&l| escapes(l));
        let workspace = self.workspace(&scratch);
        let made: HashSet<u32> = all_made.into_iter().collect();

        let written = self.written_in_place(at, &made);
        let written_lives: HashSet<u32> = written.iter().map(|(view, _)| view.life).collect();
        let long_lived = |this: &Self, v: &View| {
            this.tensor_of.get(&v.life).is_none_or(|t| !this.out.facts[t.index()].generated)
        };
        let lasting: Vec<bool> = written
            .iter()
            .filter(|(v, _)| long_lived(self, v))
            .map(|(_, statistics)| *statistics)
            .collect();
        let replay = match &lasting[..] {
            [] => Replay::Pure,
            all if all.iter().all(|s| *s) => Replay::SkipUpdates,
            _ => Replay::Never,
        };

        let mut outputs = Vec::new();
        let mut done: HashSet<u32> = HashSet::new();
        let mut made_here = 0;
        for value in &node.outputs {
            let views: Vec<Option<&View>> = match value {
                Value::Tensors(list) => list.iter().map(Option::as_ref).collect(),
                Value::Tensor(view) => vec![Some(view)],
                // A number among the results keeps its place.
                _ => vec![None],
            };
            for view in views {
                let Some(view) = view.filter(|v| !v.host && v.end > 0) else {
                    outputs.push(None);
                    continue;
                };
                let generated = made.contains(&view.life);
                outputs.push(match (generated, written_lives.contains(&view.life)) {
                    // A view of an argument that the call does not write.
                    (false, false) => None,
                    // A second view of a result that has an output already.
                    _ if !done.insert(view.life) => Some(self.operand(view)),
                    (true, _) => Some(self.generate(at, view, &name, &mut made_here, input)),
                    (false, true) => Some(self.update(view)),
                });
            }
        }
        let mut hidden = Vec::new();
        for life in hidden_made {
            let view = self.mention(at, life);
            hidden.push(self.generate(at, &view, &name, &mut made_here, input));
        }
        for (view, _) in written.iter().filter(|(v, _)| !done.contains(&v.life)) {
            hidden.push(self.update(view));
        }
        if self.names.zero_grad.is_some_and(|z| z < at) && self.out.zero_grad.is_none() {
            self.out.zero_grad = Some(OpId::from_index(index));
        }
        let (phase, random) = (context.phase(), random(node));
        self.out.step.push(context.step);
        let kind = node.name.clone();
        let module = context.module.and_then(|mark| self.annotated(mark, "neap.module:"));
        self.out.operators.push(Operator {
            name,
            kind,
            phase,
            args,
            outputs,
            hidden,
            workspace,
            replay,
            random,
            module,
            ..Operator::default()
        });
    }

    fn argument(&mut self, value: &Value, context: &Context, input: Option<(u32, u32)>) -> Arg {
        match value {
            Value::None => Arg::None,
            Value::Tensor(view) if view.end == 0 => Arg::None,
            Value::Tensor(view) if view.host => {
                // The number is the call's own, or the one that its forward call saved at the same
                // address.
                let number = context
                    .scalar
                    .or_else(|| self.names.saved.get(&(context.sequence, view.storage)).copied());
                Arg::Host {
                    dtype: view.dtype,
                    shape: view.shape.clone(),
                    value: number.filter(|_| view.shape.is_empty()),
                    input: input.filter(|(life, _)| *life == view.life).map(|(_, n)| n),
                }
            }
            Value::Tensor(view) => Arg::Tensor(self.operand(view)),
            Value::Tensors(list) => {
                let device = |v: &Option<View>| v.clone().filter(|v| !v.host && v.end > 0);
                Arg::Tensors(list.iter().map(|v| device(v).map(|v| self.operand(&v))).collect())
            }
            Value::Int(v) => Arg::Int(*v),
            Value::Float(v) => Arg::Float(*v),
            Value::Bool(v) => Arg::Bool(*v),
            Value::Ints(v) => Arg::Ints(v.clone()),
            Value::Floats(v) => Arg::Floats(v.clone()),
            Value::Bools(v) => Arg::Bools(v.clone()),
            Value::Text(v) => Arg::Text(v.clone()),
        }
    }

    /// When the call copies batch data from the host: the life that it copies, and the number of
    /// the copy. A 0-dim number is no batch data.
    fn host_copy(&mut self, at: usize) -> Option<(u32, u32)> {
        let copies = |n: usize| {
            let node = &self.trace.nodes[n];
            match (node.name.as_str(), &node.inputs[..]) {
                ("aten::copy_", [Value::Tensor(to), Value::Tensor(from), ..])
                    if from.host && !to.host && from.end > 0 && !from.shape.is_empty() =>
                {
                    Some(from.life)
                }
                _ => None,
            }
        };
        let from = self.inside(at).find_map(copies)?;
        // The copy may go through a host tensor made on the way, such as a pinned or converted one.
        let shown = |life: u32| {
            self.trace.nodes[at].inputs.iter().flat_map(Value::views).any(|v| v.life == life)
        };
        let own = self.trace.nodes[at]
            .inputs
            .iter()
            .flat_map(Value::views)
            .find(|v| v.host && v.end > 0 && !v.shape.is_empty());
        let life = if shown(from) { from } else { own?.life };
        self.copies += 1;
        Some((life, self.copies - 1))
    }

    /// Records that autograd hands a tensor to a parameter. Steps in its hooks don't.
    fn gradients(&mut self, at: usize, context: &Context, node: &Node) {
        if context.accumulate && context.step == 0 {
            // A copy or a sum of the arriving gradient: the tensor that is made or written is the
            // gradient.
            let made: Vec<u32> = node
                .outputs
                .iter()
                .flat_map(Value::views)
                .filter(|v| !v.host && v.end > 0)
                .map(|v| v.life)
                .collect();
            let fresh =
                |l: &u32| self.lives[*l as usize].maker.is_some_and(|m| self.trace.inside(m, at));
            let lives: Vec<(u32, bool)> = made.iter().map(|l| (*l, fresh(l))).collect();
            for (life, generated) in lives {
                let id = self.tensor(life, generated);
                self.out.facts[id.index()].accumulated = true;
            }
        }
    }

    fn statistics(&mut self, node: &Node) {
        let Some(signature) = &node.signature else { return };
        for name in ["running_mean", "running_var"] {
            if let Some(Value::Tensor(view)) =
                signature.position(name).and_then(|at| node.inputs.get(at))
                && let Some(id) = self.tensor_of.get(&view.life)
            {
                self.out.facts[id.index()].statistics = true;
            }
        }
    }

    /// The most bytes of `lives` that exist at once, each rounded to blocks.
    fn workspace(&self, lives: &[u32]) -> Bytes {
        let mut changes: Vec<(usize, bool, u64)> = Vec::new();
        for life in lives.iter().map(|&l| &self.lives[l as usize]) {
            let bytes = Bytes(life.bytes).in_blocks().0;
            changes.push((life.maker.unwrap_or(0), true, bytes));
            changes.push((life.last_seen + 1, false, bytes));
        }
        // At one position, ends come before starts.
        changes.sort_unstable();
        let (mut now, mut most) = (0u64, 0);
        for (_, grows, bytes) in changes {
            now = if grows { now.saturating_add(bytes) } else { now.saturating_sub(bytes) };
            most = most.max(now);
        }
        Bytes(most)
    }

    /// The view through which the life is first seen where it is made.
    fn mention(&self, at: usize, life: u32) -> View {
        let views =
            self.inside(at).flat_map(|n| self.trace.nodes[n].outputs.iter().flat_map(Value::views));
        let found = views.filter(|v| v.life == life).max_by_key(|v| v.end).cloned();
        found.unwrap_or_else(|| {
            let l = &self.lives[life as usize];
            let stride = crate::job::graph::contiguous(&l.shape);
            View {
                storage: 0,
                life,
                host: false,
                dtype: l.dtype,
                offset: 0,
                shape: l.shape.clone(),
                stride,
                end: l.bytes,
            }
        })
    }

    /// The text of an annotation after `prefix`.
    fn annotated(&self, mark: u32, prefix: &str) -> Option<String> {
        self.trace.nodes[mark as usize].name.strip_prefix(prefix).map(str::to_owned)
    }

    fn generate(
        &mut self,
        at: usize,
        view: &View,
        operator: &str,
        count: &mut usize,
        input: Option<(u32, u32)>,
    ) -> Operand {
        let id = self.tensor(view.life, true);
        self.out.facts[id.index()].generated = true;
        let name = match (input, *count) {
            (Some((_, n)), 0) => {
                let mark = self.names.context[at].input;
                let named = mark.and_then(|mark| self.annotated(mark, "neap.input:"));
                named.unwrap_or_else(|| format!("input_{n}"))
            }
            (_, 0) => operator.to_owned(),
            (_, n) => format!("{operator}.{n}"),
        };
        let tensor = &mut self.out.tensors[id.index()];
        tensor.dtype = view.dtype;
        tensor.shape.clone_from(&view.shape);
        tensor.name = name;
        if input.is_some() && *count == 0 {
            tensor.role = Role::Input;
        }
        *count += 1;
        self.operand(view)
    }

    fn update(&mut self, view: &View) -> Operand {
        let id = self.tensor(view.life, false);
        self.version[id.index()] += 1;
        self.operand(view)
    }

    fn finish(mut self, chosen: &[usize]) -> Built {
        // A tensor that autograd's accumulation reads without copying is itself the gradient.
        for (at, node) in self.trace.nodes.iter().enumerate() {
            let context = self.names.context[at];
            if node.name != "torch::autograd::AccumulateGrad" || !context.included {
                continue;
            }
            let from = chosen.partition_point(|&c| c < at);
            if chosen[from..]
                .iter()
                .take_while(|&&c| c <= node.end)
                .any(|&c| self.trace.inside(c, at) && self.names.context[c].step == 0)
            {
                continue;
            }
            for view in node.inputs.iter().flat_map(Value::views) {
                if let Some(id) = self.tensor_of.get(&view.life) {
                    self.out.facts[id.index()].accumulated = true;
                }
            }
        }
        if self.names.zero_grad.is_some() {
            self.out.zero_grad.get_or_insert(OpId(0));
        }
        self.phases();
        self.loss();
        self.out.tensor_of = self.tensor_of;
        self.out
    }

    /// If no step is marked, operators after the last backward operator belong to the optimize
    /// phase.
    fn phases(&mut self) {
        let last = self.out.operators.iter().rposition(|o| o.phase == Phase::Backward);
        for operator in last.map_or(&mut [][..], |last| &mut self.out.operators[last + 1..]) {
            operator.phase = Phase::Optimize;
        }
    }

    /// The loss is what `ones_like` reads just before the first backward that accumulates
    /// gradients. A backward before it, whose gradients are part of the loss, accumulates none.
    fn loss(&mut self) {
        let operators = &self.out.operators;
        let starts = |at: usize| {
            operators[at].kind == "aten::ones_like"
                && operators[at].phase != Phase::Backward
                && operators.get(at + 1).is_some_and(|next| next.phase == Phase::Backward)
        };
        let seeds: Vec<usize> = (0..operators.len()).filter(|&at| starts(at)).collect();
        let accumulates = |at: usize| {
            let end = seeds.iter().find(|next| **next > at).copied().unwrap_or(operators.len());
            let made = operators[at..end].iter().flat_map(Operator::writes);
            made.into_iter().any(|o| self.out.facts[o.tensor.index()].accumulated)
        };
        let seed = seeds.iter().find(|at| accumulates(**at)).or(seeds.first());
        if let Some(Arg::Tensor(loss)) = seed.and_then(|at| operators[*at].args.first()) {
            self.out.loss = Some(self.unscaled(loss).clone());
        }
    }

    /// The loss before a gradient scaler scaled it.
    fn unscaled<'b>(&'b self, loss: &'b Operand) -> &'b Operand {
        let tensor = |arg: Option<&'b Arg>| match arg {
            Some(Arg::Tensor(operand)) => Some(operand),
            _ => None,
        };
        let operators = &self.out.operators;
        let scales = |scale: &Operand| {
            operators.iter().any(|o| {
                o.kind == SCALER && tensor(o.args.first()).is_some_and(|s| s.tensor == scale.tensor)
            })
        };
        let maker = operators.iter().find(|o| o.generates().any(|g| g.tensor == loss.tensor));
        let parts = maker.filter(|o| o.kind == "aten::mul");
        match parts.map(|o| (tensor(o.args.first()), tensor(o.args.get(1)))) {
            Some((Some(own), Some(scale))) if scales(scale) => own,
            _ => loss,
        }
    }
}

/// Whether a call draws random numbers.
fn random(node: &Node) -> bool {
    let short = node.name.rsplit("::").next().unwrap_or("");
    let flag = |name: &str| {
        node.signature.as_ref().and_then(|s| s.position(name)).and_then(|at| node.inputs.get(at))
    };
    if short.contains("backward") {
        return false;
    }
    if short.contains("dropout") && !matches!(flag("train"), Some(Value::Bool(false))) {
        return true;
    }
    if matches!(flag("dropout_p"), Some(Value::Float(p)) if *p > 0.0)
        || matches!(flag("dropout"), Some(Value::Float(p)) if *p > 0.0)
    {
        return true;
    }
    const DRAWS: [&str; 13] = [
        "rand",
        "bernoulli",
        "normal_",
        "uniform_",
        "multinomial",
        "random_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "poisson",
        "binomial",
        "rrelu_with_noise",
    ];
    DRAWS.iter().any(|d| short == *d || short.strip_suffix('_') == Some(d))
        || ["rand_", "randn", "randint", "randperm"].iter().any(|d| short.starts_with(d))
        || short == "normal"
}
