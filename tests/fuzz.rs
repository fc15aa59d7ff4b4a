//! Damaged files through the library: any answer will do, but no panic, hang or boundless memory. `NEAP_CASES` raises the number.

use std::path::Path;

use crate::common::cases;
use crate::common::random::Random;
use neap::contract::{check::check, json as plan_json};
use neap::job::{chakra, json};
use neap::sim::allocator::{Config, replay::Replay};
use neap::sim::{engine, program::Program, sequence::Reader};
use neap::units::Bytes;

impl Random {
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
                    let Some(from) = text[at..].iter().position(u8::is_ascii_digit).map(|p| at + p)
                    else {
                        continue;
                    };
                    let to = text[from..]
                        .iter()
                        .position(|b| !b.is_ascii_digit())
                        .map_or(text.len(), |p| from + p);
                    let numbers = [
                        "0",
                        "-1",
                        "1e400",
                        "4294967296",
                        "9223372036854775807",
                        "18446744073709551615",
                        "4611686018427387904",
                    ];
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

fn graph_and_simulate(path: &Path) {
    let Ok(graph) = json::read(path) else { return };
    let device = neap::device::builtin::find("host").unwrap();
    let latencies = neap::device::latency::latencies(&graph, &device, None);
    let _ = neap::job::liveness::Liveness::of(&graph);
    if let Ok(program) = Program::new(&graph, &latencies, &[]) {
        let _ = engine::run(
            &program,
            &device.link,
            &engine::Durations::nominal(&program, &device.link),
        );
    }
}

fn plan_and_check(path: &Path) {
    let Ok((plan, graphs)) = plan_json::load(path, &[]) else { return };
    let _ = check(&plan, &graphs);
    for (job, graph) in plan.jobs.iter().zip(&graphs) {
        if let Ok(program) = Program::placed(graph, job) {
            let _ = engine::run(
                &program,
                &plan.device.link,
                &engine::Durations::nominal(&program, &plan.device.link),
            );
        }
    }
}

#[test]
fn damaged_files_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let trace =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_cnn-inference.et.json.gz");
    let mut recorded = Vec::new();
    std::io::Read::read_to_end(&mut neap::files::open(&trace).unwrap(), &mut recorded).unwrap();
    let at = |name: &str| folder.path().join(name);
    json::write(
        &at("g.graph.json"),
        &chakra::import(&trace, &chakra::Options::default()).unwrap().graph,
    )
    .unwrap();
    let graph = std::fs::read(at("g.graph.json")).unwrap();
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(["plan", "g.graph.json", "--budget", "min", "-o", "p.plan.json"])
        .current_dir(folder.path())
        .status();
    assert!(status.unwrap().success());
    let plan = std::fs::read(at("p.plan.json")).unwrap();
    for seed in 0..cases(500) {
        let mut random = Random(seed);
        let (source, name) =
            [(&recorded, "t.json"), (&graph, "x.graph.json"), (&plan, "x.plan.json")]
                [random.below(3)];
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

/// Replays a table as far as it can be read, on a small device.
fn replay_table(text: Vec<u8>, config: &Config) {
    let Ok(mut reader) = Reader::over(Path::new("x.csv"), Box::new(std::io::Cursor::new(text)))
    else {
        return;
    };
    let mut replay = Replay::new(config, Bytes(100 << 20), None);
    while let Ok(Some(request)) = reader.request() {
        replay.step(request);
        assert!(replay.allocator().stats().reserved <= Bytes(100 << 20));
    }
    drop(replay.allocator().segments());
}

#[test]
fn damaged_event_tables_and_settings_are_answered() {
    let rows = |random: &mut Random, answers: bool| {
        let (mut text, mut live) = ("op,id,bytes,stream".to_owned(), Vec::new());
        text += if answers { ",result,allocated,reserved,segments\n" } else { "\n" };
        let tail = if answers { ",ok,512,2097152,1\n" } else { "\n" };
        for id in 0..30 {
            if random.below(12) == 0 {
                text += &format!("e,,,{tail}");
            }
            if !live.is_empty() && random.below(2) == 0 {
                let at = random.below(live.len());
                text += &format!("f,{},,{tail}", live.swap_remove(at));
            }
            let largest = 1 << random.below(28);
            text += &format!("a,{id},{},{}{tail}", random.below(largest), random.below(3));
            live.push(id);
        }
        text.into_bytes()
    };
    let settings = "expandable_segments:True,garbage_collection_threshold:0.5,large_segment_size_mb:32,max_split_size_mb:64,\
        max_non_split_rounding_mb:40,per_process_memory_fraction:0.7,roundup_power2_divisions:[1:4,16:0,>:2],backend:native";
    let options: Vec<&str> =
        ["expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:8", ""]
            .to_vec();
    for seed in 0..cases(500) * 80 {
        let mut random = Random(seed ^ 0xA110_CA7E);
        let answers = random.below(3) == 0;
        let table = rows(&mut random, answers);
        let text = if random.below(8) == 0 { table } else { random.damage(&table) };
        let damaged = String::from_utf8_lossy(&random.damage(settings.as_bytes())).into_owned();
        let config = damaged.parse().unwrap_or_else(|_| options[random.below(4)].parse().unwrap());
        let result = std::panic::catch_unwind(|| replay_table(text, &config));
        assert!(result.is_ok(), "seed {seed} makes it panic");
    }
}

fn predict_with(path: &Path, graph: &neap::job::Graph) {
    use neap::device::latency::{Sources, latencies_from};
    let Ok(predictor) = neap::device::predictor::Predictor::read(path) else { return };
    let device = neap::device::builtin::find("host").unwrap();
    let found = latencies_from(
        graph,
        &device,
        &Sources { predictor: Some(&predictor), ..Sources::default() },
    );
    assert!(found.iter().all(|l| (1..=neap::device::latency::LONGEST.0).contains(&l.time.0)));
}

fn look_up_and_train(path: &Path, graph: &neap::job::Graph) {
    use neap::device::latency::{Table, latencies, rows};
    use neap::device::predictor::train::{Options, fit};
    let Ok(rows) = rows(path) else { return };
    let device = neap::device::builtin::find("host").unwrap();
    let _ = latencies(graph, &device, Some(&Table::of_rows(&rows)));
    let _ = fit(&rows, &Options { steps: 2, seed: 0 });
}

#[test]
fn damaged_tables_and_predictors_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let neap = |arguments: &[&str]| {
        let status = std::process::Command::new(env!("CARGO_BIN_EXE_neap"))
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(
            status.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&status.stderr)
        );
    };
    neap(&[
        "profile",
        "--sweep",
        "relu,max_pool2d",
        "--samples",
        "30",
        "--rounds",
        "1",
        "--repeats",
        "1",
        "-o",
        "t.csv",
    ]);
    neap(&["train", "t.csv", "--steps", "20", "-o", "p.predictor.json"]);
    let table = std::fs::read(folder.path().join("t.csv")).unwrap();
    let predictor = std::fs::read(folder.path().join("p.predictor.json")).unwrap();
    let graphs = neap::run::sweep::samples("relu", 5, 9).unwrap();
    for seed in 0..cases(200) {
        let mut random = Random(seed ^ 0x7AB1E);
        let which = random.below(2);
        let path = folder.path().join(["x.csv", "x.predictor.json"][which]);
        std::fs::write(&path, random.damage([&table, &predictor][which])).unwrap();
        let graph = &graphs[random.below(graphs.len())];
        let result = std::panic::catch_unwind(|| {
            if which == 0 { look_up_and_train(&path, graph) } else { predict_with(&path, graph) }
        });
        assert!(result.is_ok(), "seed {seed} makes it panic");
    }
}
