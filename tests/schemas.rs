//! The published schemas are those of the code, and the hand-written fixtures are what they say.

use std::path::{Path, PathBuf};

use neap::job::json;
use neap::job::liveness::Liveness;
use neap::job::{Phase, Role};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The committed schemas; `NEAP_BLESS=1 cargo test --test suite schemas::` writes them anew.
#[test]
fn committed_schemas_are_those_of_the_code() {
    for (name, text) in neap::report::schemas::all() {
        let path = root().join("schemas").join(name);
        if std::env::var_os("NEAP_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == text,
            "schemas/{name} is not what the code says; NEAP_BLESS=1 cargo test --test suite schemas:: writes it anew"
        );
    }
}

#[test]
fn the_hand_written_mlp_reads_and_trains() {
    let graph = json::read(&root().join("fixtures/mlp.graph.json")).unwrap();
    let live = Liveness::new(&graph);
    assert_eq!(
        graph.operators.iter().filter(|o| o.phase == Phase::Optimize).count(),
        6,
        "one update for each weight and bias"
    );
    // 1024 -> 4096 -> 4096 -> 1024, with biases.
    let weights = (1024 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 1024 + 1024) * 4;
    assert_eq!(live.role(Role::Parameter).0, weights);
    assert_eq!(live.role(Role::OptimizerState).0, weights);
    assert!(
        live.floor.0 < live.peak.0 * 6 / 10,
        "planning has something to gain: floor {}, peak {}",
        live.floor,
        live.peak
    );
    assert!(live.peak < live.no_free);
    let back = tempfile::tempdir().unwrap();
    json::write(&back.path().join("x"), &graph).unwrap();
    assert_eq!(json::read(&back.path().join("x")).unwrap(), graph);
}

/// The fixture uses only what its schema knows: a small check of the schema itself, by names of fields.
#[test]
fn the_graph_schema_knows_every_field_of_the_fixture() {
    let text = std::fs::read_to_string(Path::new(&root()).join("fixtures/mlp.graph.json")).unwrap();
    let fixture: serde_json::Value = serde_json::from_str(&text).unwrap();
    let schema: serde_json::Value =
        serde_json::from_str(&neap::report::schemas::all()[1].1).unwrap();
    let check = |object: &serde_json::Value, properties: &serde_json::Value| {
        for key in object.as_object().unwrap().keys() {
            assert!(properties.get(key).is_some(), "{key}");
        }
    };
    check(&fixture, &schema["properties"]);
    fixture["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .for_each(|t| check(t, &schema["$defs"]["Tensor"]["properties"]));
    fixture["operators"]
        .as_array()
        .unwrap()
        .iter()
        .for_each(|o| check(o, &schema["$defs"]["Operator"]["properties"]));
}
