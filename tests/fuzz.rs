//! Damaged files through the library: any answer will do, but no panic, hang or boundless memory. `NEAP_CASES` raises the number.

use std::path::Path;

use neap::job::{chakra, json};
use neap::schedule::{check::check, json as plan_json};
use neap::sim::{engine, program::Program};

/// SplitMix64: seeded, so that a case that fails can be run again.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n.max(1) as u64) as usize
    }

    /// One to three bits flipped, stretches cut out or copied elsewhere, or numbers replaced.
    fn damage(&mut self, text: &[u8]) -> Vec<u8> {
        let mut text = text.to_vec();
        for _ in 0..=self.below(3) {
            let at = self.below(text.len());
            let end = (at + 1 + self.below(40)).min(text.len());
            match self.below(4) {
                0 => text[at] ^= 1 << self.below(8),
                1 => drop(text.drain(at..end)),
                2 => {
                    let piece = text[at..end].to_vec();
                    let to = self.below(text.len());
                    text.splice(to..to, piece);
                }
                _ => {
                    let Some(from) = text[at..].iter().position(u8::is_ascii_digit).map(|p| at + p) else { continue };
                    let to = text[from..].iter().position(|b| !b.is_ascii_digit()).map_or(text.len(), |p| from + p);
                    let numbers = ["0", "-1", "1e400", "4294967296", "9223372036854775807", "18446744073709551615", "4611686018427387904"];
                    text.splice(from..to, numbers[self.below(numbers.len())].bytes());
                }
            }
            if text.is_empty() {
                text.push(b'{');
            }
        }
        text
    }
}

fn cases() -> u64 {
    std::env::var("NEAP_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(500)
}

fn graph_and_simulate(path: &Path) {
    let Ok(graph) = json::read(path) else { return };
    let device = neap::device::builtin::find("host").unwrap();
    let latencies = neap::device::latency::latencies(&graph, &device, None);
    let _ = neap::job::liveness::Liveness::of(&graph);
    if let Ok(program) = Program::new(&graph, &latencies, &[]) {
        let _ = engine::run(&program, &device.link, &engine::Durations::nominal(&program, &device.link));
    }
}

fn plan_and_check(path: &Path) {
    let Ok((plan, graphs)) = plan_json::load(path, &[]) else { return };
    let _ = check(&plan, &graphs);
    for (job, graph) in plan.jobs.iter().zip(&graphs) {
        if let Ok(program) = Program::placed(graph, job) {
            let _ = engine::run(&program, &plan.device.link, &engine::Durations::nominal(&program, &plan.device.link));
        }
    }
}

#[test]
fn damaged_files_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_cnn-inference.et.json.gz");
    let mut recorded = Vec::new();
    std::io::Read::read_to_end(&mut neap::files::open(&trace).unwrap(), &mut recorded).unwrap();
    let at = |name: &str| folder.path().join(name);
    json::write(&at("g.graph.json"), &chakra::import(&trace, &chakra::Options::default()).unwrap().graph).unwrap();
    let graph = std::fs::read(at("g.graph.json")).unwrap();
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(["plan", "g.graph.json", "--budget", "min", "-o", "p.plan.json"])
        .current_dir(folder.path())
        .status();
    assert!(status.unwrap().success());
    let plan = std::fs::read(at("p.plan.json")).unwrap();
    for seed in 0..cases() {
        let mut random = Random(seed);
        let (source, name) = [(&recorded, "t.json"), (&graph, "x.graph.json"), (&plan, "x.plan.json")][random.below(3)];
        let path = at(name);
        std::fs::write(&path, random.damage(source)).unwrap();
        let result = std::panic::catch_unwind(|| match name {
            "t.json" => drop(chakra::import(&path, &chakra::Options::default())),
            "x.graph.json" => graph_and_simulate(&path),
            _ => plan_and_check(&path),
        });
        assert!(result.is_ok(), "seed {seed}: {name} makes it panic");
    }
}
