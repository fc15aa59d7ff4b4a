//! Small random jobs, and a generator of numbers that is the same everywhere.

use neap::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay, Role, Tensor};
use neap::units::{Bytes, OpId, TensorId};

/// SplitMix64.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, or 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    /// Between the two, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// Once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }
}

/// A view of all of a tensor as bytes.
pub fn operand(graph: &[Tensor], tensor: usize, version: u32) -> Operand {
    let bytes = graph[tensor].bytes.0;
    Operand {
        tensor: TensorId::from_index(tensor),
        version,
        dtype: Dtype::U8,
        offset: 0,
        shape: vec![bytes],
        stride: vec![1],
    }
}

/// A tensor of `bytes` bytes.
pub fn tensor(name: String, bytes: u64, role: Role) -> Tensor {
    Tensor {
        name,
        bytes: Bytes(bytes),
        role,
        dtype: Dtype::U8,
        shape: vec![bytes],
        kept_until: None,
    }
}

/// An operator without operands.
pub fn operator(name: String, phase: Phase) -> Operator {
    Operator {
        name,
        kind: "test::any".to_owned(),
        phase,
        args: Vec::new(),
        outputs: Vec::new(),
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay: Replay::Pure,
        random: false,
        ..Operator::default()
    }
}

/// A job of 4 to 12 operators: activations, in-place updates on them, several outputs and hidden ones,
/// running statistics, workspaces, kept gradients, parameters updated at the end.
pub fn graph(random: &mut Random) -> Graph {
    let mut tensors = Vec::new();
    let mut versions: Vec<u32> = Vec::new();
    let mut operators: Vec<Operator> = Vec::new();
    let bytes = |random: &mut Random| random.between(1, 2048) as u64;
    for (count, role, name) in [
        (1, Role::Input, "in"),
        (random.between(1, 3), Role::Parameter, "w"),
        (random.below(3), Role::Buffer, "stat"),
    ] {
        for i in 0..count {
            tensors.push(tensor(format!("{name}{i}"), bytes(random), role));
            versions.push(0);
        }
    }
    let long_lived = tensors.len();
    let parameters: Vec<usize> =
        (0..long_lived).filter(|t| tensors[*t].role == Role::Parameter).collect();
    let buffers: Vec<usize> =
        (0..long_lived).filter(|t| tensors[*t].role == Role::Buffer).collect();
    let total = random.between(4, 12);
    let updates = random.between(0, parameters.len().min(total - 2));
    for position in 0..total - updates {
        let mut op = operator(
            format!("op{position}"),
            if position * 2 < total { Phase::Forward } else { Phase::Backward },
        );
        let mut used: Vec<usize> = Vec::new();
        for _ in 0..random.between(1, 3) {
            // Recent tensors rather than old ones, but old ones too.
            let oldest = if random.once_in(2) { 0 } else { tensors.len().saturating_sub(3) };
            let t = random.between(oldest, tensors.len() - 1);
            if !used.contains(&t) {
                used.push(t);
                op.args.push(Arg::Tensor(operand(&tensors, t, versions[t])));
            }
        }
        let in_place: Vec<usize> = used.iter().copied().filter(|t| *t >= long_lived).collect();
        let mut generate = true;
        match random.below(6) {
            0 => {
                if let Some(&t) = random.pick(&in_place) {
                    versions[t] += 1;
                    op.outputs.push(Some(operand(&tensors, t, versions[t])));
                    generate = random.once_in(3);
                }
            }
            1 => {
                if let Some(&t) = random.pick(&buffers) {
                    if !used.contains(&t) {
                        op.args.push(Arg::Tensor(operand(&tensors, t, versions[t])));
                    }
                    versions[t] += 1;
                    op.hidden.push(operand(&tensors, t, versions[t]));
                    op.replay = if random.once_in(5) { Replay::Pure } else { Replay::SkipUpdates };
                }
            }
            2 if random.once_in(3) => op.replay = Replay::Never,
            _ => {}
        }
        if generate {
            for i in 0..if random.once_in(3) { random.between(2, 3) } else { 1 } {
                let t = tensors.len();
                let mut made = tensor(format!("t{t}"), bytes(random), Role::Activation);
                if random.once_in(6) {
                    made.kept_until = Some(OpId::from_index(random.below(position + 1)));
                    made.role = Role::Gradient;
                }
                tensors.push(made);
                versions.push(0);
                let made = operand(&tensors, t, 0);
                if i == 0 { op.outputs.push(Some(made)) } else { op.hidden.push(made) }
            }
        }
        if random.once_in(3) {
            op.workspace = Bytes(random.between(1, 3) as u64 * 512);
        }
        operators.push(op);
    }
    for &t in parameters.iter().take(updates) {
        let mut op = operator(format!("update{t}"), Phase::Optimize);
        op.args.push(Arg::Tensor(operand(&tensors, t, versions[t])));
        let gradient = random.between(0, tensors.len() - 1);
        if gradient != t {
            op.args.push(Arg::Tensors(vec![
                Some(operand(&tensors, gradient, versions[gradient])),
                None,
            ]));
        }
        versions[t] += 1;
        op.outputs.push(Some(operand(&tensors, t, versions[t])));
        op.replay = Replay::Never;
        operators.push(op);
    }
    Graph {
        name: "random".to_owned(),
        tensors,
        operators,
        optimizer: None,
        loss: None,
        recorded_peak: None,
        origin: None,
    }
}
