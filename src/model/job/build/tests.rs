//! Listings in any order give the same graph; circles are found.

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
    let reserve = |graph: &mut Graph, index, bytes| graph.reserve([(OpId(index), Bytes(bytes))]);
    reserve(&mut graph, 1, 1000).unwrap();
    reserve(&mut graph, 1, 100).unwrap();
    reserve(&mut graph, 9, 5000).unwrap();
    assert_eq!(graph.operators.iter().map(|o| o.workspace.0).collect::<Vec<_>>(), [512, 1024]);
    for huge in [u64::MAX, LIMIT + 1, LIMIT] {
        assert!(matches!(reserve(&mut graph.clone(), 0, huge), Err(GraphError::TooLarge)));
    }
    reserve(&mut graph, 0, LIMIT / 2).unwrap();
    assert!(matches!(reserve(&mut graph, 1, LIMIT / 2), Err(GraphError::TooLarge)), "all together");
}

#[test]
fn kept_until_follows_its_operator_and_comes_before_the_generation() {
    let mut tensors: Vec<_> = (0..2).map(tensor).collect();
    tensors[0].kept_until = Some(OpId(1));
    let listing = vec![operator("generate", &[], &[(0, 0)]), operator("zero_grad", &[], &[(1, 0)])];
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

/// A job in a valid order: each operator reads some earlier results, updates some tensor or not,
/// and makes one.
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
    fn a_valid_listing_is_kept_and_a_shuffled_one_made_valid(
        listing in jobs(),
        keys in prop::collection::vec(any::<u32>(), 40),
    ) {
        let graph = make(listing.len() + 1, listing.clone()).unwrap();
        prop_assert!(
            graph.operators.iter().map(|o| &o.name).eq(listing.iter().map(|o| &o.name))
        );
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
    fn a_circle_is_found_and_is_one(
        mut listing in jobs(),
        from in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(),
    ) {
        let (a, b) = (from.index(listing.len()), to.index(listing.len()));
        let (early, late) = (a.min(b), a.max(b));
        prop_assume!(early < late);
        // The late one waits for the early one; now the early one waits for the late one too.
        listing[late].args.push(Arg::Tensor(operand(early as u32 + 1, 0)));
        listing[early].args.push(Arg::Tensor(operand(late as u32 + 1, 0)));
        let n = listing.len() + 1;
        let Err(GraphError::Cycle { operators }) = make(n, listing.clone()) else {
            return Err(TestCaseError::fail("no cycle"));
        };
        prop_assert!(operators.len() > 1);
        // Each waits for the one before: it reads what that makes, or replaces what that reads or
        // makes.
        let by_name = |name: &str| listing.iter().find(|o| o.name == name).unwrap();
        for (first, then) in operators.iter().zip(operators.iter().cycle().skip(1)) {
            let (first, then) = (by_name(first), by_name(then));
            let reads = then.reads().any(|r| {
                first.writes().any(|w| (w.tensor, w.version) == (r.tensor, r.version))
            });
            let replaces = then.writes().any(|w| {
                first
                    .reads()
                    .chain(first.writes())
                    .any(|r| (r.tensor, r.version + 1) == (w.tensor, w.version))
            });
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
    assert_eq!((&*graph.operators[0].name, &*graph.operators[n as usize].name), ("o0", "update"));
}
