//! A world as the planner's graph, in which only what PyTorch can carry out is a tensor:
//! activations that nothing but autograd holds between forward and backward, optimizer states, and
//! parameters that may leave. All other bytes are workspace of the operators during which they
//! stand.

use std::collections::BTreeSet;

use super::loans::{self, Loan};
use super::problem::Phase;
use super::updates;
use super::world::{Change, World, blocks};
use crate::contract::{Latency, Source};
use crate::job::{self, Arg, Dtype, Graph, GraphError, Operand, Replay, Role, Tensor};
use crate::units::{Bytes, Nanos, TensorId};

/// The planner's graph, and what its tensors are.
pub struct Planned {
    /// The graph.
    pub graph: Graph,
    /// The time of each step.
    pub latencies: Vec<Latency>,
    /// The parameters that may leave.
    pub loans: Vec<Loan>,
}

/// What a tensor of the graph stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Is {
    /// Of [`World::states`].
    State(usize),
    /// What can't leave.
    Held,
    /// Of [`Planned::loans`].
    Loan(usize),
    /// Of [`World::movable`].
    Activation(usize),
}

impl Planned {
    /// What a tensor stands for.
    #[must_use]
    pub fn is(&self, world: &World<'_>, tensor: TensorId) -> Is {
        let (states, loans) = (world.states.len(), self.loans.len());
        match tensor.index() {
            n if n < states => Is::State(n),
            n if n == states => Is::Held,
            n if n <= states + loans => Is::Loan(n - states - 1),
            n => Is::Activation(n - states - loans - 1),
        }
    }
}

/// A tensor that a step uses, with whether the step writes it.
type Touch = (usize, bool);

/// The graph of a world. With `divisible` the optimizer's step runs in several calls.
///
/// # Errors
/// When the recording contradicts itself.
pub fn graph(world: &World<'_>, divisible: bool) -> Result<Planned, GraphError> {
    let count = world.steps.len();
    let storages = &world.problem.storages;
    let loans = loans::loans(world);
    let backward = loans::backward(world);
    let mut change = Change::new(count);
    let mut touches: Vec<Vec<Touch>> = vec![Vec::new(); count];
    let mut makes: Vec<Vec<usize>> = vec![Vec::new(); count];
    let states = world.states.len();
    let mut tensors = Vec::with_capacity(states + 1 + loans.len() + world.movable.len());
    let written = |place: usize, members: &[usize]| {
        let step = &world.steps[place];
        !step.again && members.iter().any(|s| world.operator(step).writes.contains(s))
    };
    for (number, one) in world.movable.iter().enumerate() {
        let tensor = states + 1 + loans.len() + number;
        change.stand(-storages[one.storage].blocks().cast_signed(), one.born, one.gone);
        makes[one.born].push(tensor);
        for (place, changed) in one.touches() {
            touches[place].push((tensor, changed || written(place, &[one.storage])));
        }
    }
    for (number, loan) in loans.iter().enumerate() {
        let uses: BTreeSet<usize> = loan.uses.iter().copied().collect();
        let away = backward.map_or(0..0, |(_, first, after)| first..after);
        change.stand(-blocks(loan.bytes), 0, count);
        for place in (0..count).filter(|place| uses.contains(place) || !away.contains(place)) {
            touches[place].push((states + 1 + number, written(place, &loan.members)));
        }
    }
    let calls = updates::calls(world, divisible);
    let here = updates::here(world, &calls);
    for (number, state) in world.states.iter().enumerate() {
        change.stand(-state.blocks().cast_signed(), 0, count);
        for place in updates::while_here(state, &here) {
            let own = state.uses.contains(&place);
            touches[place].push((number, own && written(place, &[state.storage])));
        }
    }
    let mut rest = change.added_to(&world.resident);
    for (place, more) in updates::scratch(world, &calls) {
        rest[place] += more;
    }
    let constant = rest.iter().copied().min().unwrap_or(0).max(0).cast_unsigned() / 512 * 512;
    for state in &world.states {
        let name = &storages[state.storage].name;
        let name = state.part.map_or_else(|| name.clone(), |part| part_of(name, part));
        tensors.push(tensor(name, Role::OptimizerState, state.bytes));
    }
    let held = tensors.len();
    tensors.push(tensor("held".to_owned(), Role::Buffer, constant));
    tensors.extend(loans.iter().map(|l| tensor(l.name.clone(), Role::Parameter, l.bytes)));
    tensors.extend(world.movable.iter().map(|one| {
        let about = &storages[one.storage];
        tensor(about.name.clone(), Role::Activation, about.bytes)
    }));
    let mut versions = vec![0; tensors.len()];
    let mut operators = Vec::with_capacity(count);
    let mut latencies = Vec::with_capacity(count);
    for (place, step) in world.steps.iter().enumerate() {
        let mut args = vec![Arg::Tensor(operand(held, 0))];
        let mut hidden = Vec::new();
        for &(tensor, written) in &touches[place] {
            args.push(Arg::Tensor(operand(tensor, versions[tensor])));
            if written {
                versions[tensor] += 1;
                hidden.push(operand(tensor, versions[tensor]));
            }
        }
        let free = rest[place] - constant.cast_signed();
        let time = world.operator(step).ns / u64::from(step.piece.count);
        latencies.push(Latency { time: Nanos(time), source: Source::Graph });
        operators.push(job::Operator {
            name: world.name(step),
            phase: match world.phase(step) {
                Phase::Forward => job::Phase::Forward,
                Phase::Backward => job::Phase::Backward,
                Phase::Optimize => job::Phase::Optimize,
            },
            args,
            outputs: makes[place].iter().map(|&tensor| Some(operand(tensor, 0))).collect(),
            hidden,
            workspace: Bytes(free.max(0).cast_unsigned()),
            replay: Replay::Never,
            duration_ns: Some(time),
            ..job::Operator::default()
        });
    }
    let graph = Graph::new(world.problem.name.clone(), tensors, operators, None, None, None)?;
    Ok(Planned { graph, latencies, loans })
}

/// The name of a part of a state such as `exp_avg:layer.weight`.
fn part_of(state: &str, part: u32) -> String {
    match state.split_once(':') {
        Some((kind, parameter)) => format!("{kind}[{part}]:{parameter}"),
        None => format!("{state}[{part}]:"),
    }
}

fn tensor(name: String, role: Role, bytes: u64) -> Tensor {
    let (bytes, shape) = (Bytes(bytes), vec![bytes]);
    Tensor { name, bytes, role, dtype: Dtype::U8, shape, kept_until: None }
}

fn operand(tensor: usize, version: u32) -> Operand {
    let (shape, stride) = (vec![0], vec![1]);
    Operand {
        tensor: TensorId::from_index(tensor),
        version,
        dtype: Dtype::U8,
        offset: 0,
        shape,
        stride,
    }
}

/// Which states leave if these do: those of a parameter leave together.
#[must_use]
pub fn leaving_together(world: &World<'_>, moved: &BTreeSet<usize>) -> Vec<bool> {
    let owners: BTreeSet<String> = moved.iter().map(|&state| parameter(world, state)).collect();
    (0..world.states.len()).map(|state| owners.contains(&parameter(world, state))).collect()
}

/// The name of the parameter whose state this is.
#[must_use]
pub fn parameter(world: &World<'_>, state: usize) -> String {
    let name = &world.problem.storages[world.states[state].storage].name;
    name.split_once(':').map_or(&**name, |(_, parameter)| parameter).to_owned()
}

impl World<'_> {
    /// The name of a step, unique in the world.
    #[must_use]
    pub fn name(&self, step: &super::world::Step) -> String {
        let name = &self.operator(step).name;
        match (step.again, step.piece.count) {
            (true, _) => format!("again:{name}"),
            (false, 1) => name.clone(),
            (false, _) => format!("{name}[{}]", step.piece.number),
        }
    }
}
