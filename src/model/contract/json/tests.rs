use crate::units::Nanos;
use proptest::prelude::*;

use super::*;
use crate::contract::plan::{Figures, Source};
use crate::device::{Link, Profile, Rates};

/// Where the graph of [`sample`] and other small fixtures are.
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

pub fn device() -> Profile {
    Profile {
        name: "small".to_owned(),
        source: "made up".to_owned(),
        memory_bytes: Bytes(1 << 33),
        reserve_bytes: Bytes(1 << 20),
        flops: Rates { f32: 1 << 40, f16: 1 << 41, f64: 1 << 35 },
        memory_bandwidth: 1 << 38,
        efficiency_percent: 60,
        link: Link {
            h2d: 1 << 33,
            d2h: 1 << 33,
            h2d_contended: 1 << 32,
            d2h_contended: 1 << 32,
            overhead_ns: 10_000,
        },
        launch_overhead_ns: 5000,
        pinned_bytes: Bytes(1 << 34),
        multiprocessors: None,
    }
}

/// A plan of the hand-written graph with an example of everything; it need not be safe.
pub fn sample() -> (Plan, Vec<Graph>) {
    let graph = json::read(&fixtures().join("mlp.graph.json")).unwrap();
    let names = Names::new(&graph);
    let (tensor, op) = (|n: &str| names.tensor(n).unwrap(), |n: &str| names.operator(n).unwrap());
    let after = |n: &str| Trigger { after: Some(op(n)) };
    let start = Trigger { after: None };
    let events = vec![
        Event::SwapIn { tensor: tensor("m.w1"), trigger: start },
        Event::SwapOut { tensor: tensor("z1"), trigger: after("gelu1") },
        Event::Release { tensor: tensor("h1"), trigger: after("linear2") },
        Event::SwapIn { tensor: tensor("z1"), trigger: after("linear2") },
        Event::Recompute {
            operator: op("gelu1"),
            trigger: after("linear2"),
            keep: vec![tensor("h1")],
        },
        Event::SwapOut { tensor: tensor("m.w1"), trigger: after("update.w1") },
    ];
    let placements = vec![
        Placement { place: Place::Tensor { tensor: tensor("z1"), residency: 0 }, offset: Bytes(0) },
        Placement {
            place: Place::Tensor { tensor: tensor("z1"), residency: 1 },
            offset: Bytes(512),
        },
        // The recompute is step 3, so that everything after it is one later.
        Placement {
            place: Place::Workspace { step: op("linear3.weight").0 + 1 },
            offset: Bytes(1024),
        },
    ];
    let job = JobPlan {
        graph: "mlp.graph.json".to_owned(),
        graph_sha256: json::sha256(&graph),
        arrangement: Default::default(),
        whole: Default::default(),
        latencies: graph
            .operators
            .iter()
            .map(|o| Latency { time: Nanos(o.duration_ns.unwrap()), source: Source::Graph })
            .collect(),
        libraries: BTreeMap::from([(
            op("linear1"),
            Chosen { algorithms: vec![1, -1], workspace: Bytes(1000) },
        )]),
        events,
        placements,
        host_slots: BTreeMap::from([(tensor("z1"), Bytes(0)), (tensor("m.w1"), Bytes(1 << 26))]),
        window: Some(Window {
            offset: Bytes(1024),
            bytes: Bytes(4096),
            hands_over_after: vec![op("gelu1"), op("linear2")],
        }),
    };
    let plan = Plan {
        planner: "none".to_owned(),
        options: BTreeMap::from([("rate".to_owned(), "1/2".to_owned())]),
        device: device(),
        budget: Bytes(1 << 30),
        jobs: vec![job],
        figures: Figures { peak_bytes: Bytes(5), iteration_ns: Nanos(6), ..Figures::default() },
    };
    (plan, vec![graph])
}

fn back(text: &str, graphs: &[Graph]) -> Result<Plan, String> {
    let file: PlanFile<'_> = serde_json::from_str(text).map_err(|e| e.to_string())?;
    resolve(file, graphs).map_err(|e| e.to_string())
}

#[test]
fn a_plan_and_its_graph_load_from_files() {
    let (mut plan, graphs) = sample();
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("plans")).unwrap();
    let (path, graph_path) =
        (folder.path().join("plans/x.plan.json"), folder.path().join("y.graph.json"));
    json::write(&graph_path, &graphs[0]).unwrap();
    plan.jobs[0].graph = relative(&path, &graph_path).unwrap();
    assert_eq!(plan.jobs[0].graph, "../y.graph.json");
    write(&path, &plan, &graphs).unwrap();
    let (loaded, raised) = load(&path, &[]).unwrap();
    assert_eq!(loaded, plan);
    let linear1 = graphs[0].operators.iter().position(|o| o.name == "linear1").unwrap();
    assert_eq!(
        (graphs[0].operators[linear1].workspace, raised[0].operators[linear1].workspace),
        (Bytes::ZERO, Bytes(1024))
    );
    assert_eq!(raised[0].operators[linear1 + 1..], graphs[0].operators[linear1 + 1..]);
    assert_eq!(
        load(&path, &[fixtures().join("mlp.graph.json")]).unwrap().0,
        plan,
        "the override says the same"
    );
    let problem = |graphs: &[PathBuf]| load(&path, graphs).unwrap_err().to_string();
    assert!(
        problem(&[graph_path.clone(), graph_path.clone()])
            .contains("has 1 jobs, but 2 graphs are given")
    );
    assert!(problem(&[folder.path().join("none")]).contains("none"));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(
        &path,
        text.replacen("\"workspace_bytes\":1000", "\"workspace_bytes\":4611686018427387904", 1),
    )
    .unwrap();
    assert!(
        problem(&[]).contains("with its `workspace_bytes`, all tensors together are larger"),
        "{}",
        problem(&[])
    );
    std::fs::write(&path, text).unwrap();
    let mut other = graphs[0].clone();
    other.operators[0].duration_ns = Some(1);
    json::write(&graph_path, &other).unwrap();
    assert!(problem(&[]).contains("was made for another graph"));
}

#[test]
fn hostile_values_are_refused() {
    let (plan, graphs) = sample();
    let text = String::from_utf8(to_bytes(&plan, &graphs)).unwrap();
    for (from, to, expected) in [
        (
            "\"offset_bytes\":512",
            "\"offset_bytes\":18446744073709551615",
            "placement 1: `offset_bytes` is 18446744073709551615",
        ),
        ("\"offset_bytes\":512", "\"offset_bytes\":18446744073709551616", "invalid type"),
        ("\"offset_bytes\":512", "\"offset_bytes\":-1", "invalid value"),
        (
            "\"offset_bytes\":67108864",
            "\"offset_bytes\":4611686018427387905",
            "host slot of `m.w1`",
        ),
        ("\"budget_bytes\":1073741824", "\"budget_bytes\":9223372036854775808", "`budget_bytes`"),
        ("\"peak_bytes\":5", "\"peak_bytes\":9223372036854775808", "`figures.peak_bytes`"),
        ("\"efficiency_percent\":60", "\"efficiency_percent\":0", "`device`: `efficiency_percent`"),
        ("\"tensor\":\"z1\"", "\"tensor\":\"zz\"", "the graph has no tensor named `zz`"),
        (
            "\"after\":\"gelu1\"",
            "\"after\":\"gelu9\"",
            "event 1: the graph has no operator named `gelu9`",
        ),
        (",\"after\":\"gelu1\"", "", "missing field `after`"),
        ("\"keep\":[\"h1\"]", "\"delay_ns\":5,\"keep\":[\"h1\"]", "unknown field `delay_ns`"),
        ("\"step\":8", "\"step\":7", "that step is not this operator"),
        ("\"step\":8", "\"step\":4294967295", "that step is not this operator"),
        ("\"residency\":1", "\"step\":1", "a placement has"),
        ("\"ns\":3435000", "\"ns\":0", "is impossible"),
        ("\"ns\":3435000", "\"ns\":18446744073709551615", "is impossible"),
        (
            "{\"operator\":\"linear1\",\"ns\"",
            "{\"operator\":\"linear2\",\"ns\"",
            "operator `linear2` is given twice",
        ),
        (
            "{\"operator\":\"linear1\",\"ns\":3435000,\"source\":\"graph\",\"algorithm\":[1,-1],\"workspace_bytes\":1000},",
            "",
            "operator `linear1` has no latency",
        ),
        (
            "\"workspace_bytes\":1000",
            "\"workspace_bytes\":4611686018427387905",
            "operator `linear1` names impossible algorithms",
        ),
        ("\"algorithm\":[1,-1],", "", "operator `linear1` names impossible algorithms"),
        (
            "\"algorithm\":[1,-1]",
            "\"algorithm\":[1,-2]",
            "operator `linear1` names impossible algorithms",
        ),
        ("\"algorithm\":[1,-1]", "\"algorithm\":[1,4294967296]", "invalid value"),
        (
            "\"bytes\":4096",
            "\"bytes\":4611686018427387905",
            "job 0 (`mlp`): `window`: `bytes` is 4611686018427387905",
        ),
        (
            "[\"gelu1\",\"linear2\"]",
            "[\"gelu9\",\"linear2\"]",
            "job 0 (`mlp`): `window`: the graph has no operator named `gelu9`",
        ),
        ("neap.plan", "neap.graph", "a `neap.plan` file is expected"),
        (
            "{\"tensor\":\"m.w1\",\"offset_bytes\"",
            "{\"tensor\":\"z1\",\"offset_bytes\"",
            "tensor `z1` has two host slots",
        ),
    ] {
        assert!(text.contains(from), "{from}\n{text}");
        let found = back(&text.replacen(from, to, 1), &graphs).unwrap_err();
        assert!(found.contains(expected), "{found}\n{expected}");
    }
    assert!(back(&text, &[]).unwrap_err().contains("1 jobs, but there are 0 graphs"));
}

#[test]
fn steps_are_operators_and_recomputes_in_program_order() {
    let again = |operator, after: Option<u32>| Event::Recompute {
        operator: OpId(operator),
        trigger: Trigger { after: after.map(OpId) },
        keep: vec![],
    };
    let events = [again(5, None), again(0, Some(1)), again(1, Some(1)), again(9, Some(2))];
    assert_eq!(steps(&events, 3).iter().map(|op| op.0).collect::<Vec<_>>(), [5, 0, 1, 0, 1, 2, 9]);
}

proptest! {
    #[test]
    fn what_is_written_reads_back_exactly(
        events in prop::collection::vec(
            (
                0u8..4,
                0u32..31,
                0u32..23,
                prop::option::of(0u32..23),
                prop::collection::vec(0u32..31, 0..3),
            ),
            0..20,
        ),
        places in
            prop::collection::vec((any::<bool>(), 0u32..31, any::<u32>(), 0u64..=1 << 62), 0..20),
        text in any::<String>(),
    ) {
        let (mut plan, graphs) = sample();
        let job = &mut plan.jobs[0];
        job.events = events
            .into_iter()
            .map(|(kind, tensor, operator, after, keep)| {
                let trigger = Trigger { after: after.map(OpId) };
                let tensor = TensorId(tensor);
                match kind {
                    0 => Event::SwapOut { tensor, trigger },
                    1 => Event::SwapIn { tensor, trigger },
                    2 => Event::Release { tensor, trigger },
                    _ => Event::Recompute {
                        operator: OpId(operator),
                        trigger,
                        keep: keep.into_iter().map(TensorId).collect(),
                    },
                }
            })
            .collect();
        let steps = u32::try_from(steps(&job.events, graphs[0].operators.len()).len()).unwrap();
        job.placements = places
            .into_iter()
            .map(|(workspace, tensor, n, offset)| Placement {
                place: if workspace {
                    Place::Workspace { step: n % steps }
                } else {
                    Place::Tensor { tensor: TensorId(tensor), residency: n }
                },
                offset: Bytes(offset),
            })
            .collect();
        job.host_slots = job
            .placements
            .iter()
            .filter_map(|p| match p.place {
                Place::Tensor { tensor, .. } => Some((tensor, p.offset)),
                Place::Workspace { .. } => None,
            })
            .collect();
        (plan.planner, plan.jobs[0].graph) = (text.clone(), text);
        let bytes = to_bytes(&plan, &graphs);
        let again = back(std::str::from_utf8(&bytes).unwrap(), &graphs).unwrap();
        prop_assert_eq!(&again, &plan);
        prop_assert_eq!(to_bytes(&again, &graphs), bytes);
    }

    #[test]
    fn damaged_text_never_panics(at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let (plan, graphs) = sample();
        let mut text = to_bytes(&plan, &graphs);
        let at = at.index(text.len());
        text[at] = to;
        let _ = back(&String::from_utf8_lossy(&text), &graphs);
    }
}
