//! Imports of real traces against what PyTorch's allocator did.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::*;
use crate::job::liveness::Liveness;
use crate::job::{Arg, Phase, Replay, Role};
use crate::units::Bytes;

fn truth() -> Option<PathBuf> {
    let folder = std::env::var_os("NEAP_TRUTH").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/truth"),
        PathBuf::from,
    );
    let found = folder.join("graphs").is_dir();
    if !found {
        println!("skipped: no truth in {}", folder.display());
    }
    found.then_some(folder)
}

fn traces(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.to_string_lossy().ends_with(".et.json.gz"));
    all.sort();
    all
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    PathBuf::from(path.to_str().unwrap().replace(".et.json.gz", ending))
}

fn bytes(graph: &Graph, role: Role) -> u64 {
    graph.tensors.iter().filter(|t| t.role == role).map(|t| t.bytes.0).sum()
}

fn peak_of(graph: &Graph) -> u64 {
    Liveness::new(graph).peak.0
}

/// Peak of the requests, rounded to blocks, less the library workspaces that are never freed.
fn requested(path: &Path) -> u64 {
    let text = String::from_utf8(crate::files::read(path, 1 << 30).unwrap()).unwrap();
    let (mut now, mut most, mut sizes) = (0u64, 0, BTreeMap::new());
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let id: u64 = fields[1].parse().unwrap();
        if fields[0] == "a" {
            let size = Bytes(fields[2].parse().unwrap()).in_blocks().0;
            sizes.insert(id, size);
            now += size;
            most = most.max(now);
        } else {
            now -= sizes.remove(&id).unwrap();
        }
    }
    most.saturating_sub(65 << 20)
}

#[test]
fn truth_graphs_import() {
    let Some(folder) = truth() else { return };
    for path in traces(&folder.join("graphs")) {
        let name = title(&path);
        let start = Instant::now();
        let recorded = import(&path, &Options { as_recorded: true, updates_early: false }).unwrap();
        let took = start.elapsed();
        let truth: serde_json::Value =
            serde_json::from_slice(&std::fs::read(beside(&path, ".truth.json")).unwrap()).unwrap();
        let graph = &recorded.graph;
        let peak = peak_of(graph);
        let allocated = truth["peaks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|p| p["peak_allocated_bytes"].as_u64().unwrap())
            .max()
            .unwrap();
        let allocated = allocated - 67_108_864;
        let requested = requested(&beside(&path, ".truth.events.csv.gz"));
        let lowered = import(&path, &Options::default()).unwrap();
        let early = import(&path, &Options { as_recorded: false, updates_early: true }).unwrap();
        println!(
            "{name}: {} operators, {took:?}; as recorded {peak}, {:.5} of allocated, {:.6} of requested; lowered {:.4}, early {:.4}; loss {}; {:?}",
            graph.operators.len(),
            peak as f64 / allocated as f64,
            peak as f64 / requested as f64,
            peak_of(&lowered.graph) as f64 / peak as f64,
            peak_of(&early.graph) as f64 / peak as f64,
            graph.loss.is_some(),
            lowered.notes
        );
        let (parameters, buffers) = (bytes(graph, Role::Parameter), bytes(graph, Role::Buffer));
        assert_eq!(Some(parameters), truth["parameter_bytes"].as_u64());
        assert_eq!(Some(buffers), truth["buffer_bytes"].as_u64());
        assert!(peak.abs_diff(allocated) * 50 <= allocated, "{name}");
        assert!(peak.abs_diff(requested) * 1000 <= requested, "{name}");
        assert!(peak_of(&lowered.graph) <= peak, "{name}");
        assert!(peak_of(&early.graph) <= peak_of(&lowered.graph), "{name}");
        assert_eq!(lowered.graph.recorded_peak, Some(Bytes(peak)));
        assert!(graph.loss.is_some(), "{name}");
    }
}

#[test]
fn truth_numbers_import() {
    let Some(folder) = truth() else { return };
    for path in traces(&folder.join("numbers")) {
        let lowered = import(&path, &Options::default()).unwrap();
        let graph = &lowered.graph;
        println!(
            "{}: {} operators, {:?} {:?}",
            graph.name,
            graph.operators.len(),
            graph.optimizer,
            lowered.notes
        );
        assert!(lowered.notes.is_empty() && graph.loss.is_some());
        let parameters = graph.tensors.iter().filter(|t| t.role == Role::Parameter).count();
        let updates: Vec<_> =
            graph.operators.iter().filter(|o| o.kind.starts_with("neap::")).collect();
        assert_eq!(updates.len(), parameters);
        assert!(
            graph
                .operators
                .iter()
                .all(|o| o.phase != Phase::Optimize || o.kind.starts_with("neap::"))
        );
        for update in updates {
            assert_eq!(update.args.len(), update.hidden.len() + 1);
            assert!(update.hidden.iter().all(|o| o.version == 1));
            let Arg::Tensor(gradient) = &update.args[1] else { panic!() };
            assert_eq!(graph.tensor(gradient.tensor).role, Role::Gradient);
        }
        let unknown = graph.operators.iter().flat_map(|o| o.args.iter().map(move |a| (o, a)));
        for (operator, arg) in unknown {
            // Attention's seed and offset stand for random state, not for numbers.
            if let Arg::Host { shape, value, input, .. } = arg {
                let known = value.is_some()
                    || input.is_some()
                    || !shape.is_empty()
                    || operator.kind.contains("attention");
                assert!(known, "{}: {arg:?}", operator.name);
            }
        }
    }
}

#[test]
fn truth_hyperparameters_are_recovered() {
    let Some(folder) = truth() else { return };
    for path in traces(&folder.join("numbers")) {
        let recorded = import(&path, &Options::default()).unwrap().graph.optimizer.unwrap();
        let recovered = without(&path, &["neap."]).graph.optimizer.unwrap();
        let (recorded, recovered) = (&recorded.groups[0], &recovered.groups[0]);
        assert_eq!(recovered.class, recorded.class, "{}", path.display());
        for (key, value) in &recovered.values {
            assert_eq!(recorded.values.get(key), Some(value), "{}: {key}", path.display());
        }
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

fn read_json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&crate::files::read(path, 1 << 30).unwrap()).unwrap()
}

fn import_json(trace: &serde_json::Value, options: &Options) -> Result<Imported, ImportError> {
    let file = tempfile::Builder::new().suffix(".et.json").tempfile().unwrap();
    serde_json::to_writer(&file, trace).unwrap();
    import(file.path(), options)
}

const FIXTURES: [(&str, u64, u64, u64); 3] = [
    ("tiny_cnn-adam.et.json.gz", 71_247_872 - WORKSPACES, 41_896, 272),
    ("tiny_gpt2-adamw.et.json.gz", 71_230_464 - WORKSPACES, 547_840, 0),
    ("resnet18-adam.et.json.gz", 292_055_552 - WORKSPACES, 44_726_568, 38_560),
];
/// What cuBLAS and cuDNN keep for good.
const WORKSPACES: u64 = 65 << 20;

/// Imports a trace without its `neap.*` names and without the marks of the framework in `hide`.
fn without(path: &Path, hide: &[&str]) -> Imported {
    let mut trace = read_json(path);
    for node in trace["nodes"].as_array_mut().unwrap() {
        if hide.iter().any(|prefix| node["name"].as_str().unwrap().starts_with(prefix)) {
            node["name"] = "annotation".into();
        }
    }
    import_json(&trace, &Options::default()).unwrap()
}

#[test]
fn generated_kernels_are_refused_with_what_to_do() {
    let mut trace = read_json(&fixture("tiny_cnn-adam.et.json.gz"));
    let nodes = trace["nodes"].as_array_mut().unwrap();
    let conv = nodes.iter_mut().find(|n| n["name"] == "aten::conv2d").unwrap();
    conv["name"] = "## Call CompiledFxGraph fcmxfkf ##".into();
    let error = import_json(&trace, &Options::default()).unwrap_err().to_string();
    for word in ["CompiledFxGraph", "TORCH_COMPILE_DISABLE=1", "aot_eager"] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn names_are_not_needed() {
    for (name, lr) in [
        ("tiny_cnn-adam.et.json.gz", 0.003),
        ("tiny_gpt2-adamw.et.json.gz", 0.003),
        ("resnet18-adam.et.json.gz", 1e-4),
    ] {
        let named = import(&fixture(name), &Options::default()).unwrap();
        assert!(named.notes.is_empty() && !named.graph.optimizer.as_ref().unwrap().recovered());
        for hide in [&["neap."][..], &["neap.", "Optimizer."]] {
            let bare = without(&fixture(name), hide);
            let optimizer = bare.graph.optimizer.clone().unwrap().groups.remove(0);
            assert_eq!(
                (optimizer.class.as_str(), optimizer.recovered),
                (named.graph.optimizer.as_ref().unwrap().groups[0].class.as_str(), true),
                "{name}"
            );
            assert_eq!((optimizer.values["lr"], optimizer.values["beta2"]), (lr, 0.999), "{name}");
            assert!(bare.notes.iter().any(|n| n.contains("recovered")));
            for role in [Role::Parameter, Role::OptimizerState, Role::Gradient, Role::Input] {
                let of = |g: &Graph| g.tensors.iter().filter(|t| t.role == role).count();
                assert_eq!(of(&bare.graph), of(&named.graph), "{name} {role:?}");
            }
            let kinds = |g: &Graph| {
                g.operators.iter().map(|o| (o.kind.clone(), o.phase, o.replay)).collect::<Vec<_>>()
            };
            assert_eq!(kinds(&bare.graph), kinds(&named.graph), "{name}");
        }
    }
}

#[test]
fn fixtures_match_the_allocator() {
    // Peaks of the requests of the same jobs, in blocks, less the libraries' workspaces.
    for (name, requested, parameters, buffers) in FIXTURES {
        let recorded = import(&fixture(name), &Options { as_recorded: true, updates_early: false })
            .unwrap()
            .graph;
        assert_eq!(
            (bytes(&recorded, Role::Parameter), bytes(&recorded, Role::Buffer)),
            (parameters, buffers),
            "{name}"
        );
        assert!(
            peak_of(&recorded).abs_diff(requested) * 1000 <= requested,
            "{name}: {} of {requested}",
            peak_of(&recorded)
        );
        let kept = recorded.tensors.iter().filter(|t| t.kept_until.is_some());
        assert!(kept.clone().count() > 0 && kept.clone().all(|t| t.role == Role::Gradient));
        let early = import(&fixture(name), &Options { as_recorded: false, updates_early: true })
            .unwrap()
            .graph;
        let first = |phase: Phase| early.operators.iter().position(|o| o.phase == phase).unwrap();
        let last = |phase: Phase| early.operators.iter().rposition(|o| o.phase == phase).unwrap();
        assert!(first(Phase::Optimize) < last(Phase::Backward), "{name}");
        assert!(peak_of(&early) <= peak_of(&recorded), "{name}");
    }
}

#[test]
fn inference_imports() {
    let graph =
        import(&fixture("tiny_cnn-inference.et.json.gz"), &Options::default()).unwrap().graph;
    assert!(graph.operators.iter().all(|o| o.phase == Phase::Forward && o.replay == Replay::Pure));
    assert!(graph.optimizer.is_none() && graph.loss.is_none());
    assert_eq!((bytes(&graph, Role::Parameter), bytes(&graph, Role::Buffer)), (41896, 272));
    assert_eq!(graph.tensors.iter().filter(|t| t.role == Role::Input).count(), 1);
    let bare = without(&fixture("tiny_cnn-inference.et.json.gz"), &["neap."]).graph;
    // No operator uses the counters of batches, so they are known by name only.
    assert_eq!((bytes(&bare, Role::Parameter), bytes(&bare, Role::Buffer)), (41896, 256));
}

#[test]
fn batch_norm_writes_what_its_schema_hides() {
    let graph = import(&fixture("tiny_cnn-adam.et.json.gz"), &Options::default()).unwrap().graph;
    let norm = graph.operators.iter().find(|o| o.kind == "aten::_batch_norm_impl_index").unwrap();
    let hidden: Vec<&str> =
        norm.hidden.iter().map(|o| graph.tensor(o.tensor).name.as_str()).collect();
    assert_eq!(hidden, ["stem.1.running_mean", "stem.1.running_var"]);
    assert_eq!(
        (norm.replay, norm.hidden[0].version, norm.outputs.len()),
        (Replay::SkipUpdates, 1, 5)
    );
    let counter = graph
        .operators
        .iter()
        .find(|o| o.kind == "aten::add_" && o.replay == Replay::Never)
        .unwrap();
    assert!(matches!(counter.args[1], Arg::Host { value: Some(v), .. } if v == 1.0));
    let input = &graph.operators[0];
    assert!(matches!(input.args[0], Arg::Host { input: Some(0), .. }));
}

/// A call for a hand-made trace: id, parent, name, schema, storages read, storages written; each of
/// 100 floats on the device.
fn call(
    id: u64,
    parent: u64,
    name: &str,
    schema: &str,
    reads: &[u64],
    writes: &[u64],
) -> serde_json::Value {
    let side = |storages: &[u64]| {
        let values: Vec<_> =
            storages.iter().map(|s| serde_json::json!([1, s, 0, 100, 4, "cuda:0"])).collect();
        let n = storages.len();
        serde_json::json!({"values": values, "shapes": vec![[100]; n], "types": vec!["Tensor(float)"; n], "strides": vec![[1]; n]})
    };
    serde_json::json!({"id": id, "name": name, "ctrl_deps": parent, "inputs": side(reads), "outputs": side(writes),
        "attrs": [{"name": "op_schema", "type": "string", "value": schema}]})
}

fn hand_made(calls: &[serde_json::Value]) -> Graph {
    import_json(
        &serde_json::json!({"schema": "1.1.1-chakra.0.0.4", "nodes": calls}),
        &Options::default(),
    )
    .unwrap()
    .graph
}

#[test]
fn recycled_ids_are_told_apart() {
    let unary = "aten::relu(Tensor self) -> Tensor";
    let graph = hand_made(&[
        call(1, 1, "root", "", &[], &[]),
        call(2, 1, "aten::relu", unary, &[50], &[60]),
        call(3, 1, "aten::relu", unary, &[60], &[70]),
        // The address of the first result again. A child of its maker reads it before anything
        // shows that it was made.
        call(4, 1, "aten::sum", "aten::sum(Tensor self) -> Tensor", &[70], &[60]),
        call(
            5,
            4,
            "aten::as_strided",
            "aten::as_strided(Tensor(a) self) -> Tensor(a)",
            &[60],
            &[60],
        ),
        call(6, 1, "aten::relu_", "aten::relu_(Tensor(a!) self) -> Tensor(a!)", &[60], &[60]),
        call(7, 1, "aten::view", "aten::view(Tensor(a) self) -> Tensor(a)", &[60], &[60]),
    ]);
    let names: Vec<&str> = graph.operators.iter().map(|o| o.name.as_str()).collect();
    assert_eq!(names, ["relu_0", "relu_1", "sum_0", "relu__0"]);
    let made: Vec<_> = graph
        .operators
        .iter()
        .map(|o| o.outputs[0].as_ref().map(|o| (o.tensor.0, o.version)).unwrap())
        .collect();
    assert_eq!(made, [(1, 0), (2, 0), (3, 0), (3, 1)]);
    assert_eq!(graph.operators[3].replay, Replay::Pure);
}

#[test]
fn operators_keep_hidden_results_and_count_scratch() {
    let schema = "aten::outer(Tensor self) -> Tensor";
    let graph = hand_made(&[
        call(1, 1, "root", "", &[], &[]),
        // A composite whose child returns a mask that is read later, so the child is the operator.
        call(2, 1, "aten::outer", schema, &[50], &[60]),
        call(3, 2, "aten::inner", "aten::inner(Tensor self) -> (Tensor, Tensor)", &[50], &[60, 61]),
        // It allocates its own result, and a child makes a tensor that is read later, so it stays
        // one operator. It also has 400 bytes of scratch.
        call(4, 1, "aten::outer", schema, &[60], &[70]),
        call(5, 4, "aten::inner", schema, &[60], &[71]),
        call(6, 4, "aten::inner", schema, &[71], &[72]),
        call(7, 1, "aten::use", "aten::use(Tensor a, Tensor b) -> Tensor", &[61, 72], &[80]),
    ]);
    let kinds: Vec<&str> = graph.operators.iter().map(|o| o.kind.as_str()).collect();
    assert_eq!(kinds, ["aten::inner", "aten::outer", "aten::use"]);
    assert_eq!((graph.operators[0].outputs.len(), graph.operators[0].hidden.len()), (2, 0));
    assert_eq!((graph.operators[1].hidden.len(), graph.operators[1].workspace), (1, Bytes(512)));
}

#[test]
fn traces_that_touch_no_device_are_refused() {
    let nothing = serde_json::json!({"schema": "1.1.1-chakra.0.0.4", "nodes": [call(1, 1, "root", "", &[], &[])]});
    assert!(import_json(&nothing, &Options::default()).unwrap_err().to_string().contains("GPU"));
}

#[test]
fn every_form_of_a_step_is_lowered() {
    // For-loop and fused forms, lists with all states of RMSprop, and a gradient that is negated.
    let updates =
        |graph: &Graph| graph.operators.iter().filter(|o| o.kind.starts_with("neap::")).count();
    for (name, class, key, value) in [
        ("tiny_cnn-adam-single", "Adam", "lr", 0.003),
        ("tiny_cnn-adamw-fused", "AdamW", "weight_decay", 0.01),
        ("tiny_cnn-rmsprop-centered", "RMSprop", "momentum", 0.9),
        ("tiny_cnn-sgd-maximize", "SGD", "maximize", 1.0),
    ] {
        let path = fixture(&format!("{name}.et.json.gz"));
        let named = import(&path, &Options::default()).unwrap();
        assert_eq!((updates(&named.graph), &named.notes[..]), (14, &[][..]), "{name}");
        let bare = without(&path, &["neap."]);
        let optimizer = &bare.graph.optimizer.as_ref().unwrap().groups[0];
        assert_eq!(
            (updates(&bare.graph), optimizer.class.as_str(), optimizer.values.get(key)),
            (14, class, Some(&value)),
            "{name}"
        );
    }
    // Two groups with different rates that the trace does not mark: they differ by their scalars.
    let path = fixture("tiny_cnn-groups.et.json.gz");
    for hide in [&["neap.scalar"][..], &["neap."]] {
        let groups = without(&path, hide);
        let optimizer = groups.graph.optimizer.as_ref().unwrap();
        let mut rates: Vec<f64> = optimizer.groups.iter().map(|g| g.values["lr"]).collect();
        rates.sort_by(f64::total_cmp);
        assert_eq!((updates(&groups.graph), &rates[..]), (14, &[0.001, 0.01][..]));
        for update in groups.graph.operators.iter().filter(|o| o.kind.starts_with("neap::")) {
            assert!(update.group.is_some_and(|g| g < 2), "{}", update.name);
        }
        assert!(groups.notes.iter().any(|n| n.contains("recovered")), "{:?}", groups.notes);
    }
}

#[test]
fn checkpointed_calls_without_end_are_placed() {
    let imported = import(&fixture("tiny_cnn-checkpoint.et.json.gz"), &Options::default()).unwrap();
    assert!(imported.notes[0].contains("never ended"));
    let convolutions = |phase: Phase| {
        imported
            .graph
            .operators
            .iter()
            .filter(|o| o.phase == phase && o.kind == "aten::conv2d")
            .count()
    };
    assert_eq!((convolutions(Phase::Forward), convolutions(Phase::Backward)), (4, 2));
}
