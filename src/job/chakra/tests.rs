//! Imports of real traces against what PyTorch's allocator did.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::*;
use crate::job::{Arg, Phase, Role};
use crate::units::Bytes;

fn truth() -> Option<PathBuf> {
    let folder =
        std::env::var_os("NEAP_TRUTH").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/truth"), PathBuf::from);
    let found = folder.join("graphs").is_dir();
    if !found {
        println!("skipped: no truth in {}", folder.display());
    }
    found.then_some(folder)
}

fn traces(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
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
    most - (65 << 20)
}

#[test]
fn truth_graphs_import() {
    let Some(folder) = truth() else { return };
    let extra = std::env::var_os("NEAP_TRACES").map(PathBuf::from);
    for path in traces(&folder.join("graphs")).into_iter().chain(extra.iter().flat_map(|f| traces(f))) {
        let name = title(&path);
        let start = Instant::now();
        let recorded = import(&path, &Options { as_recorded: true, updates_early: false }).unwrap();
        let took = start.elapsed();
        let truth: serde_json::Value = serde_json::from_slice(&std::fs::read(beside(&path, ".truth.json")).unwrap()).unwrap();
        let graph = &recorded.graph;
        let peak = roles::peak(graph).0;
        let allocated = truth["peaks"].as_array().unwrap().iter().map(|p| p["peak_allocated_bytes"].as_u64().unwrap()).max().unwrap();
        let allocated = allocated - 67_108_864;
        let requested = requested(&beside(&path, ".truth.events.csv.gz"));
        let lowered = import(&path, &Options::default()).unwrap();
        let early = import(&path, &Options { as_recorded: false, updates_early: true }).unwrap();
        println!(
            "{name}: {} operators, {took:?}; as recorded {peak}, {:.5} of allocated, {:.6} of requested; lowered {:.4}, early {:.4}; loss {}; {:?}",
            graph.operators.len(),
            peak as f64 / allocated as f64,
            peak as f64 / requested as f64,
            roles::peak(&lowered.graph).0 as f64 / peak as f64,
            roles::peak(&early.graph).0 as f64 / peak as f64,
            graph.loss.is_some(),
            lowered.notes
        );
        let (parameters, buffers) = (bytes(graph, Role::Parameter), bytes(graph, Role::Buffer));
        if extra.is_some() {
            println!("  parameters {parameters} / {}, buffers {buffers} / {}", truth["parameter_bytes"], truth["buffer_bytes"]);
            continue;
        }
        assert_eq!(Some(parameters), truth["parameter_bytes"].as_u64());
        assert_eq!(Some(buffers), truth["buffer_bytes"].as_u64());
        assert!(peak.abs_diff(allocated) * 50 <= allocated, "{name}");
        assert!(peak.abs_diff(requested) * 1000 <= requested, "{name}");
        assert!(roles::peak(&lowered.graph).0 <= peak, "{name}");
        assert!(roles::peak(&early.graph) <= roles::peak(&lowered.graph), "{name}");
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
        println!("{}: {} operators, {:?} {:?}", graph.name, graph.operators.len(), graph.optimizer, lowered.notes);
        assert!(lowered.notes.is_empty() && graph.loss.is_some());
        let parameters = graph.tensors.iter().filter(|t| t.role == Role::Parameter).count();
        let updates: Vec<_> = graph.operators.iter().filter(|o| o.kind.starts_with("neap::")).collect();
        assert_eq!(updates.len(), parameters);
        assert!(graph.operators.iter().all(|o| o.phase != Phase::Optimize || o.kind.starts_with("neap::")));
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
                let known = value.is_some() || input.is_some() || !shape.is_empty() || operator.kind.contains("attention");
                assert!(known, "{}: {arg:?}", operator.name);
            }
        }
    }
}
