//! Making a graph: everything that later code takes for granted is checked here, once.
//!
//! [`Graph::new`] is the only way from parts to a graph.

use std::collections::HashSet;

use super::graph::{Arg, Graph, GraphError, Operand, Operator, Tensor};
use super::optimizer::Optimizer;
use super::order;
use crate::units::{Bytes, OpId, TensorId};

/// Sizes and sums of sizes, and sums of durations, stay at or below this.
const LIMIT: u64 = 1 << 62;

impl Graph {
    /// A graph of these parts: checked, workspaces rounded up to blocks, and operators put into one
    /// deterministic order of execution ([`super::order`]; a listing that is already in a valid
    /// order is kept exactly). `kept_until` refers to the operators as given.
    ///
    /// # Errors
    /// When names repeat, an id or version does not exist, a version is written twice or never, a
    /// view reaches outside its storage, sizes or times overflow, or operators wait for each other.
    pub fn new(
        name: String,
        mut tensors: Vec<Tensor>,
        mut operators: Vec<Operator>,
        optimizer: Option<Optimizer>,
        loss: Option<Operand>,
        recorded_peak: Option<Bytes>,
    ) -> Result<Self, GraphError> {
        if u32::try_from(tensors.len()).is_err()
            || u32::try_from(operators.len()).is_err()
            || recorded_peak.is_some_and(|b| b.0 > LIMIT)
        {
            return Err(GraphError::TooLarge);
        }
        unique("tensors", tensors.iter().map(|t| t.name.as_str()))?;
        unique("operators", operators.iter().map(|o| o.name.as_str()))?;
        sizes(&tensors, &mut operators)?;
        let groups = optimizer.as_ref().map_or(0, |o| o.groups.len());
        if optimizer.is_some() && groups == 0 {
            return Err(GraphError::Optimizer("it has no parameter group; leave it out".into()));
        }
        for operator in &operators {
            operands(operator, &tensors).and_then(|()| group(operator, groups)).map_err(
                |problem| GraphError::Operator { operator: operator.name.clone(), problem },
            )?;
        }
        let versions = Versions::of(&tensors, &operators)?;
        for tensor in tensors.iter().enumerate().filter(|(_, t)| t.kept_until.is_some()) {
            kept(tensor, &versions, operators.len())?;
        }
        if let Some(loss) = &loss {
            view(loss, &tensors)
                .and_then(|()| versions.exists(loss, &tensors))
                .map_err(GraphError::Loss)?;
        }
        let before = order::dependencies(&tensors, &operators, &versions)?;
        let listed = order::order(&operators, &before)?;
        reorder(&mut tensors, &mut operators, &listed);
        Ok(Self { name, tensors, operators, optimizer, loss, recorded_peak })
    }

    /// Gives operators at least these workspaces, rounded up to blocks: what a library's algorithms
    /// want beyond what was recorded. The graph's file and hash are those without.
    ///
    /// # Errors
    /// When sizes overflow; the graph may then have some of them.
    pub fn reserve(
        &mut self,
        wanted: impl IntoIterator<Item = (OpId, Bytes)>,
    ) -> Result<(), GraphError> {
        for (id, bytes) in wanted {
            if let Some(operator) = self.operators.get_mut(id.index()) {
                operator.workspace = operator.workspace.max(bytes);
            }
        }
        sizes(&self.tensors, &mut self.operators)
    }
}

fn unique<'a>(what: &'static str, names: impl Iterator<Item = &'a str>) -> Result<(), GraphError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(GraphError::DuplicateName { what, name: name.to_owned() });
        }
    }
    Ok(())
}

/// The product of a shape's extents, zeros counted as one so that every order of multiplying is
/// safe; `None` above the limit.
fn volume(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |all, &n| all.checked_mul(n.max(1)).filter(|&x| x <= LIMIT / 16))
}

/// The parameter group that it names must be there.
fn group(operator: &Operator, groups: usize) -> Result<(), String> {
    match operator.group {
        Some(group) if group as usize >= groups => {
            Err(format!("it names parameter group {group}, and the optimizer has {groups}"))
        }
        _ => Ok(()),
    }
}

fn sizes(tensors: &[Tensor], operators: &mut [Operator]) -> Result<(), GraphError> {
    let mut total = 0u64;
    let mut add = |bytes: Bytes| {
        total = if bytes.0 > LIMIT { LIMIT } else { total + bytes.in_blocks().0 };
        if total >= LIMIT { Err(GraphError::TooLarge) } else { Ok(()) }
    };
    for tensor in tensors {
        if volume(&tensor.shape).is_none() {
            let problem =
                format!("its shape {:?} has more elements than can be counted", tensor.shape);
            return Err(GraphError::Tensor { tensor: tensor.name.clone(), problem });
        }
        add(tensor.bytes)?;
    }
    let mut duration = 0u64;
    for operator in operators {
        add(operator.workspace)?;
        operator.workspace = operator.workspace.in_blocks();
        duration = duration.saturating_add(operator.duration_ns.unwrap_or(0));
        if duration >= LIMIT {
            let problem =
                "with it, all durations together exceed 2^62 ns; check `duration_ns`".to_owned();
            return Err(GraphError::Operator { operator: operator.name.clone(), problem });
        }
    }
    Ok(())
}

fn operands(operator: &Operator, tensors: &[Tensor]) -> Result<(), String> {
    for operand in operator.reads().chain(operator.writes()) {
        view(operand, tensors)?;
    }
    for arg in &operator.args {
        if let Arg::Host { shape, .. } = arg
            && volume(shape).is_none()
        {
            return Err(format!(
                "a host argument's shape {shape:?} has more elements than can be counted"
            ));
        }
    }
    Ok(())
}

/// Checks that a view lies inside its storage.
fn view(operand: &Operand, tensors: &[Tensor]) -> Result<(), String> {
    let Some(tensor) = tensors.get(operand.tensor.index()) else {
        return Err(format!("refers to tensor {} of {}", operand.tensor.0, tensors.len()));
    };
    let Operand { offset, shape, stride, .. } = operand;
    if shape.len() != stride.len() {
        return Err(format!(
            "its view of `{}` has shape {shape:?} but stride {stride:?}; give one step for each dimension",
            tensor.name
        ));
    }
    if volume(shape).is_none() {
        return Err(format!(
            "its view of `{}` has more elements than can be counted: {shape:?}",
            tensor.name
        ));
    }
    match operand.end_byte() {
        Some(end) if end <= tensor.bytes.0 => Ok(()),
        end => Err(format!(
            "its view of `{}` (offset {offset}, shape {shape:?}, stride {stride:?}) ends at byte {}, but the tensor has {} bytes",
            tensor.name,
            end.map_or("2^64 or later".to_owned(), |e| e.to_string()),
            tensor.bytes.0
        )),
    }
}

fn kept(
    (id, tensor): (usize, &Tensor),
    versions: &Versions,
    operators: usize,
) -> Result<(), GraphError> {
    let fail = |problem: &str| {
        Err(GraphError::Tensor { tensor: tensor.name.clone(), problem: problem.to_owned() })
    };
    if tensor.kept_until.is_some_and(|op| op.index() >= operators) {
        return fail("`kept_until` names an operator that the graph does not have");
    }
    if versions.generator(TensorId::of(id)).is_none() {
        return fail(
            "`kept_until` is for tensors that the iteration generates; nothing generates this one, so it stays anyway",
        );
    }
    Ok(())
}

/// Who writes which version of each tensor.
pub(super) struct Versions {
    /// Tensor, version, operator; sorted. The versions of each tensor are consecutive, from 0 or 1.
    writes: Vec<(u32, u32, u32)>,
    /// Where each tensor's part of `writes` begins, and one end.
    starts: Vec<usize>,
}

impl Versions {
    fn of(tensors: &[Tensor], operators: &[Operator]) -> Result<Self, GraphError> {
        let mut writes = Vec::new();
        for (index, operator) in operators.iter().enumerate() {
            writes.extend(operator.writes().map(|o| (o.tensor.0, o.version, OpId::of(index).0)));
        }
        writes.sort_unstable();
        // One operator may mention what it writes several times, through several views.
        writes.dedup();
        let mut starts = vec![writes.len(); tensors.len() + 1];
        for (position, &(tensor, ..)) in writes.iter().enumerate().rev() {
            starts[tensor as usize] = position;
        }
        for tensor in (0..tensors.len()).rev() {
            starts[tensor] = starts[tensor].min(starts[tensor + 1]);
        }
        let all = Self { writes, starts };
        for (index, tensor) in tensors.iter().enumerate() {
            all.consecutive(TensorId::of(index)).map_err(|(operator, problem)| {
                GraphError::Operator {
                    operator: operators[operator as usize].name.clone(),
                    problem: format!("{problem} of tensor `{}`", tensor.name),
                }
            })?;
        }
        for operator in operators {
            let fail = |problem| GraphError::Operator { operator: operator.name.clone(), problem };
            for operand in operator.reads() {
                all.exists(operand, tensors).map_err(fail)?;
            }
        }
        Ok(all)
    }

    /// The writes of a tensor: version and operator, by version.
    pub(super) fn writes(&self, tensor: TensorId) -> impl Iterator<Item = (u32, u32)> {
        self.slice(tensor).iter().map(|&(_, version, operator)| (version, operator))
    }

    /// Who writes a version, if anyone.
    pub(super) fn writer(&self, tensor: TensorId, version: u32) -> Option<u32> {
        let all = self.slice(tensor);
        let first = all.first()?.1;
        all.get(version.checked_sub(first)? as usize).map(|w| w.2)
    }

    /// Who generates a tensor, if anyone.
    pub(super) fn generator(&self, tensor: TensorId) -> Option<u32> {
        self.writer(tensor, 0)
    }

    fn slice(&self, tensor: TensorId) -> &[(u32, u32, u32)] {
        &self.writes[self.starts[tensor.index()]..self.starts[tensor.index() + 1]]
    }

    fn consecutive(&self, tensor: TensorId) -> Result<(), (u32, String)> {
        let mut next = None;
        for (version, operator) in self.writes(tensor) {
            match next {
                None if version > 1 => {
                    return Err((
                        operator,
                        format!("writes version {version}, but nothing writes version 1"),
                    ));
                }
                Some(n) if version < n => {
                    return Err((
                        operator,
                        format!("writes version {version}, which another operator writes too,"),
                    ));
                }
                Some(n) if version > n => {
                    return Err((
                        operator,
                        format!("writes version {version}, but nothing writes version {n}"),
                    ));
                }
                _ => {}
            }
            // Cannot wrap: versions are consecutive so far, and there are fewer writes than 2^32.
            next = version.checked_add(1);
        }
        Ok(())
    }

    fn exists(&self, operand: &Operand, tensors: &[Tensor]) -> Result<(), String> {
        if operand.version == 0 || self.writer(operand.tensor, operand.version).is_some() {
            return Ok(());
        }
        let name = &tensors[operand.tensor.index()].name;
        Err(format!("reads version {} of tensor `{name}`, which nothing writes", operand.version))
    }
}

/// Puts operators into the order `listed`, and what refers to them along.
fn reorder(tensors: &mut [Tensor], operators: &mut Vec<Operator>, listed: &[u32]) {
    if listed.is_sorted() {
        return;
    }
    let mut new = vec![0; listed.len()];
    for (position, &old) in listed.iter().enumerate() {
        new[old as usize] = position;
    }
    for until in tensors.iter_mut().filter_map(|t| t.kept_until.as_mut()) {
        *until = OpId::of(new[until.index()]);
    }
    let mut numbered: Vec<_> = std::mem::take(operators).into_iter().zip(new).collect();
    numbered.sort_unstable_by_key(|(_, position)| *position);
    *operators = numbered.into_iter().map(|(operator, _)| operator).collect();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::job::{Dtype, Phase, Replay, Role};

    fn tensor(index: usize) -> Tensor {
        Tensor {
            name: format!("t{index}"),
            bytes: Bytes(64),
            role: Role::Activation,
            dtype: Dtype::F32,
            shape: vec![4, 4],
            kept_until: None,
        }
    }

    fn operand(tensor: u32, version: u32) -> Operand {
        Operand {
            tensor: TensorId(tensor),
            version,
            dtype: Dtype::F32,
            offset: 0,
            shape: vec![4, 4],
            stride: vec![4, 1],
        }
    }

    fn operator(name: &str, reads: &[(u32, u32)], writes: &[(u32, u32)]) -> Operator {
        Operator {
            name: name.to_owned(),
            kind: "custom".to_owned(),
            phase: Phase::Forward,
            args: reads.iter().map(|&(t, v)| Arg::Tensor(operand(t, v))).collect(),
            outputs: writes.iter().map(|&(t, v)| Some(operand(t, v))).collect(),
            hidden: Vec::new(),
            workspace: Bytes(1),
            replay: Replay::Pure,
            random: false,
            ..Operator::default()
        }
    }

    fn make(tensors: usize, operators: Vec<Operator>) -> Result<Graph, GraphError> {
        Graph::new("g".to_owned(), (0..tensors).map(tensor).collect(), operators, None, None, None)
    }

    fn refusal(tensors: usize, operators: Vec<Operator>) -> String {
        make(tensors, operators).unwrap_err().to_string()
    }

    #[test]
    fn updates_wait_for_all_readers_of_what_they_replace() {
        let listing = vec![
            operator("update", &[], &[(0, 1)]),
            operator("read new", &[(0, 1)], &[(2, 0)]),
            operator("read old", &[(0, 0)], &[(1, 0)]),
        ];
        let graph = make(3, listing).unwrap();
        assert_eq!(
            graph.operators.iter().map(|o| &*o.name).collect::<Vec<_>>(),
            ["read old", "update", "read new"]
        );
        assert_eq!(graph.operators[0].workspace, Bytes(512));
    }

    #[test]
    fn workspaces_are_reserved_in_blocks_and_never_shrink() {
        let listing = vec![operator("a", &[], &[(0, 0)]), operator("b", &[], &[(1, 0)])];
        let mut graph = make(2, listing).unwrap();
        let reserve =
            |graph: &mut Graph, index, bytes| graph.reserve([(OpId(index), Bytes(bytes))]);
        reserve(&mut graph, 1, 1000).unwrap();
        reserve(&mut graph, 1, 100).unwrap();
        reserve(&mut graph, 9, 5000).unwrap();
        assert_eq!(graph.operators.iter().map(|o| o.workspace.0).collect::<Vec<_>>(), [512, 1024]);
        for huge in [u64::MAX, LIMIT + 1, LIMIT] {
            assert!(matches!(reserve(&mut graph.clone(), 0, huge), Err(GraphError::TooLarge)));
        }
        reserve(&mut graph, 0, LIMIT / 2).unwrap();
        assert!(
            matches!(reserve(&mut graph, 1, LIMIT / 2), Err(GraphError::TooLarge)),
            "all together"
        );
    }

    #[test]
    fn kept_until_follows_its_operator_and_comes_before_the_generation() {
        let mut tensors: Vec<_> = (0..2).map(tensor).collect();
        tensors[0].kept_until = Some(OpId(1));
        let listing =
            vec![operator("generate", &[], &[(0, 0)]), operator("zero_grad", &[], &[(1, 0)])];
        let graph = Graph::new("g".to_owned(), tensors, listing, None, None, None).unwrap();
        assert_eq!(
            (&*graph.operators[0].name, graph.tensors[0].kept_until),
            ("zero_grad", Some(OpId(0)))
        );
    }

    #[test]
    fn a_circle_is_named_in_order() {
        let listing = vec![
            operator("fine", &[], &[(3, 0)]),
            operator("c", &[(1, 0), (3, 0)], &[(2, 0)]),
            operator("a", &[(2, 0)], &[(0, 0)]),
            operator("b", &[(0, 0)], &[(1, 0)]),
            operator("downstream", &[(1, 0)], &[(4, 0)]),
        ];
        match make(5, listing) {
            Err(GraphError::Cycle { operators }) => assert_eq!(operators, ["c", "a", "b"]),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn contradictions_are_refused() {
        for (expected, listing) in [
            ("two operators are named `x`", vec![operator("x", &[], &[]), operator("x", &[], &[])]),
            ("refers to tensor 9", vec![operator("x", &[(9, 0)], &[])]),
            ("nothing writes version 1", vec![operator("x", &[], &[(0, 2)])]),
            (
                "nothing writes version 1 of",
                vec![operator("x", &[], &[(0, 0)]), operator("y", &[], &[(0, u32::MAX)])],
            ),
            (
                "another operator writes too",
                vec![operator("x", &[], &[(0, 0)]), operator("y", &[], &[(0, 0)])],
            ),
            ("reads version 3", vec![operator("x", &[(0, 3)], &[])]),
            ("which it writes itself", vec![operator("x", &[(0, 0)], &[(0, 0)])]),
            ("one call writes a tensor once", vec![operator("x", &[], &[(0, 0), (0, 1)])]),
            // Reads what is two updates old when its own update runs.
            (
                "in a circle: y -> stale",
                vec![operator("y", &[], &[(0, 1)]), operator("stale", &[(0, 0)], &[(0, 2)])],
            ),
        ] {
            let found = refusal(1, listing);
            assert!(found.contains(expected), "{found}\n{expected}");
        }
    }

    #[test]
    fn views_and_sizes_are_bounded() {
        let with = |change: &dyn Fn(&mut Operand)| {
            let mut it = operand(0, 0);
            change(&mut it);
            let mut op = operator("x", &[], &[]);
            op.args.push(Arg::Tensor(it));
            refusal(1, vec![op])
        };
        assert!(with(&|o| o.offset = 1).contains("ends at byte 68, but the tensor has 64 bytes"));
        assert!(with(&|o| o.offset = u64::MAX).contains("2^64 or later"));
        assert!(with(&|o| o.stride = vec![u64::MAX, 1]).contains("2^64 or later"));
        assert!(with(&|o| o.stride = vec![1]).contains("one step for each dimension"));
        assert!(
            with(&|o| (o.shape, o.stride) = (vec![1 << 40, 1 << 40, 0], vec![0; 3]))
                .contains("more elements than can be counted")
        );
        let mut huge = tensor(0);
        huge.bytes = Bytes(u64::MAX);
        let made = Graph::new("g".to_owned(), vec![huge], vec![], None, None, None);
        assert!(matches!(made, Err(GraphError::TooLarge)));
        let mut slow = operator("slow", &[], &[]);
        slow.duration_ns = Some(u64::MAX);
        assert!(refusal(0, vec![slow]).contains("duration_ns"));
        let mut work = operator("work", &[], &[]);
        work.workspace = Bytes(u64::MAX);
        assert!(matches!(make(0, vec![work]), Err(GraphError::TooLarge)));
    }

    #[test]
    fn one_call_may_write_one_tensor_through_two_views() {
        assert!(make(1, vec![operator("split", &[], &[(0, 0), (0, 0)])]).is_ok());
    }

    /// A job in a valid order: each operator reads some earlier results, updates some tensor or
    /// not, and makes one.
    fn jobs() -> impl Strategy<Value = Vec<Operator>> {
        let step = (
            prop::collection::vec(any::<prop::sample::Index>(), 0..4),
            prop::option::of(any::<prop::sample::Index>()),
        );
        prop::collection::vec(step, 1..40).prop_map(|steps| {
            let mut version = vec![0u32];
            let mut operators = Vec::new();
            for (index, (reads, update)) in steps.into_iter().enumerate() {
                let reads: Vec<_> = reads
                    .iter()
                    .map(|i| i.index(version.len()))
                    .map(|t| (t as u32, version[t]))
                    .collect();
                let mut writes = vec![(version.len() as u32, 0)];
                if let Some(t) = update.map(|i| i.index(version.len())) {
                    version[t] += 1;
                    writes.push((t as u32, version[t]));
                }
                version.push(0);
                operators.push(operator(&format!("o{index}"), &reads, &writes));
            }
            operators
        })
    }

    proptest! {
        #[test]
        fn a_valid_listing_is_kept_and_a_shuffled_one_made_valid(listing in jobs(), keys in prop::collection::vec(any::<u32>(), 40)) {
            let graph = make(listing.len() + 1, listing.clone()).unwrap();
            prop_assert!(graph.operators.iter().map(|o| &o.name).eq(listing.iter().map(|o| &o.name)));
            let mut shuffled: Vec<_> = keys.iter().zip(listing.clone()).collect();
            shuffled.sort_by_key(|(key, _)| **key);
            let shuffled: Vec<_> = shuffled.into_iter().map(|(_, o)| o).collect();
            let graph = make(listing.len() + 1, shuffled).unwrap();
            // Run it: what is read must be at its version, what is written at the one before.
            let mut version: Vec<Option<u32>> = vec![None; listing.len() + 1];
            version[0] = Some(0);
            for o in &graph.operators {
                for read in o.reads() {
                    prop_assert_eq!(version[read.tensor.index()], Some(read.version));
                }
                for write in o.writes() {
                    prop_assert_eq!(version[write.tensor.index()], write.version.checked_sub(1));
                    version[write.tensor.index()] = Some(write.version);
                }
            }
        }

        #[test]
        fn a_circle_is_found_and_is_one(mut listing in jobs(), from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
            let (a, b) = (from.index(listing.len()), to.index(listing.len()));
            let (early, late) = (a.min(b), a.max(b));
            prop_assume!(early < late);
            // The late one waits for the early one; now the early one waits for the late one too.
            listing[late].args.push(Arg::Tensor(operand(early as u32 + 1, 0)));
            listing[early].args.push(Arg::Tensor(operand(late as u32 + 1, 0)));
            let n = listing.len() + 1;
            let Err(GraphError::Cycle { operators }) = make(n, listing.clone()) else { return Err(TestCaseError::fail("no cycle")) };
            prop_assert!(operators.len() > 1);
            // Each waits for the one before: it reads what that makes, or replaces what that reads
            // or makes.
            let by_name = |name: &str| listing.iter().find(|o| o.name == name).unwrap();
            for (first, then) in operators.iter().zip(operators.iter().cycle().skip(1)) {
                let (first, then) = (by_name(first), by_name(then));
                let reads = then.reads().any(|r| first.writes().any(|w| (w.tensor, w.version) == (r.tensor, r.version)));
                let replaces = then.writes().any(|w| first.reads().chain(first.writes()).any(|r| (r.tensor, r.version + 1) == (w.tensor, w.version)));
                prop_assert!(reads || replaces, "{} does not wait for {}", then.name, first.name);
            }
        }
    }

    #[test]
    fn a_hundred_thousand_operators_are_put_in_order_quickly() {
        // Every operator reads one shared tensor, which the last one updates.
        let n = 100_000u32;
        let mut listing: Vec<_> = (0..n)
            .map(|i| {
                operator(
                    &format!("o{i}"),
                    &[(n, 0), (i.saturating_sub(1), 0)][..if i == 0 { 1 } else { 2 }],
                    &[(i, 0)],
                )
            })
            .collect();
        listing.insert(0, operator("update", &[], &[(n, 1)]));
        listing.reverse();
        let graph = make(n as usize + 1, listing).unwrap();
        assert_eq!(
            (&*graph.operators[0].name, &*graph.operators[n as usize].name),
            ("o0", "update")
        );
    }
}
