//! Damaged files through the library, and damaged lines to the server of `neap torch --serve`: any answer will do, but no
//! panic, hang or boundless memory. Each test is a target that `tools/fuzz` runs for as long as it is asked to; fuzz_pickle.rs and
//! fuzz_trace.rs are two more.

use std::path::Path;

use crate::common::random::Random;
use crate::common::seeds;
use neap::contract::{check::check, json as plan_json};
use neap::job::{chakra, json};
use neap::sim::allocator::{Config, replay::Replay};
use neap::sim::{engine, program::Program, sequence::Reader};
use neap::units::Bytes;

impl Random {
    /// One to three bits flipped, stretches cut out or copied elsewhere, or numbers replaced.
    pub fn damage(&mut self, text: &[u8]) -> Vec<u8> {
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
    let _ = neap::job::liveness::Liveness::new(&graph);
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

/// Hands each damaged form of `source` to `take`, as this file.
fn damaged(
    source: &[u8],
    path: &Path,
    deep: u64,
    take: impl Fn(&Path) + std::panic::RefUnwindSafe,
) {
    for seed in seeds(deep) {
        // A file written over is flushed to the disk by some file systems; a new one isn't.
        let _ = std::fs::remove_file(path);
        std::fs::write(path, Random(seed).damage(source)).unwrap();
        let result = std::panic::catch_unwind(|| take(path));
        assert!(result.is_ok(), "seed {seed}: it makes it panic");
    }
}

/// A folder with a recorded trace `t.json`, its graph and a plan for it.
fn made() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let trace =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_cnn-inference.et.json.gz");
    let mut recorded = Vec::new();
    std::io::Read::read_to_end(&mut neap::files::open(&trace).unwrap(), &mut recorded).unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("t.json"), recorded).unwrap();
    json::write(
        &at("g.graph.json"),
        &chakra::import(&trace, &chakra::Options::default()).unwrap().graph,
    )
    .unwrap();
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(["plan", "g.graph.json", "--budget", "min", "-o", "p.plan.json"])
        .current_dir(folder.path())
        .output();
    assert!(status.unwrap().status.success());
    folder
}

/// The same for one of these files.
fn damaged_one(name: &str, take: impl Fn(&Path) + std::panic::RefUnwindSafe) {
    let folder = made();
    let source = std::fs::read(folder.path().join(name)).unwrap();
    damaged(&source, &folder.path().join(format!("x.{name}")), 200, take);
}

#[test]
fn execution_trace() {
    damaged_one("t.json", |path| drop(chakra::import(path, &chakra::Options::default())));
}

#[test]
fn graph() {
    damaged_one("g.graph.json", graph_and_simulate);
}

#[test]
fn plan() {
    damaged_one("p.plan.json", plan_and_check);
}

const JOBS: &str = "job,workload,graph,estimate,persistent_bytes,ephemeral_bytes,error_percent,iteration_s,submit_s,\
    duration_s,iterations,utilisation,priority,kill_s,rate_per_s\n\
    a,resnet,,,,,10,0.1,0,12.5,,0.5,2,60,\nb,,,,300MiB,1GiB,,0.25,1.000000001,,40,1,,,\n\
    \"c, \"\"quoted\"\"\",vgg,,,,,,,3,9,,,,,2.5\nd,resnet,,,,,,,1e3,-1,,,,,\n";
const MEMORY: &str =
    "workload,persistent_bytes,ephemeral_bytes\nresnet,104857600,2147483648\nvgg,1048576,3\n";
const PLACES: &str =
    "id,lower,upper,size,alignment,offset\na,0,4,512,512,\nb,2,9,1024,,0\nc,5,7,65536,256,\n";

#[test]
fn job_table() {
    use neap::sim::share::{jobs, memory};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.csv");
    damaged(JOBS.as_bytes(), &path, 2000, |path| {
        drop(jobs::read(path, &memory::Memory::new(), 5));
    });
}

#[test]
fn memory_table() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.csv");
    damaged(MEMORY.as_bytes(), &path, 2000, |path| drop(neap::sim::share::memory::read(path)));
}

#[test]
fn placement_table() {
    let folder = tempfile::tempdir().unwrap();
    damaged(PLACES.as_bytes(), &folder.path().join("x.csv"), 2000, |path| {
        drop(neap::plan::place::problem::Problem::read(path).map(|found| found.items()));
    });
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
fn event_table() {
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
    for seed in seeds(40_000) {
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
fn latency_table_and_predictor() {
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
    for seed in seeds(200) {
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

#[cfg(target_os = "linux")]
#[test]
fn protocol() {
    use std::io::{Read, Write};

    use crate::cli::folder::fixture;
    use crate::cli::served::{Client, Server, fixed, graph};
    use serde_json::json;

    let server = Server::start(1 << 30);
    let lines = [
        graph("g", fixture("mlp.graph.json")).to_string(),
        fixed("f", 1 << 20).to_string(),
        json!({"took_bytes": 1 << 20}).to_string(),
        json!({"join": "both", "graph": "/dev/null", "fixed_bytes": -1}).to_string(),
    ];
    for seed in seeds(2_000) {
        let mut random = Random(seed ^ 0x5E12_E12E);
        let mut client = Client::new(&server);
        let mut sent = Vec::new();
        for _ in 0..=random.below(4) {
            let line = lines[random.below(lines.len())].as_bytes();
            sent.extend(if random.below(2) == 0 { random.damage(line) } else { line.to_vec() });
            sent.push(b'\n');
        }
        // The server may have ended the connection meanwhile.
        let _ = client.0.get_mut().write_all(&sent);
        if random.below(2) == 0 {
            let _ = client.0.get_mut().shutdown(std::net::Shutdown::Write);
            let mut all = Vec::new();
            let _ = client.0.read_to_end(&mut all);
        }
        drop(client);
        if seed % 16 == 0 {
            let mut honest = Client::joins(&server, &fixed("honest", 1 << 10));
            let heard = honest.hears();
            assert_eq!(heard["share_bytes"], 1 << 10, "seed {seed}: {heard}, after {sent:?}");
        }
    }
    let mut last = Client::joins(&server, &graph("last", fixture("mlp.graph.json")));
    assert_eq!(last.takes(), 1 << 30);
    assert!(!server.said().contains("panicked"), "{}", server.said());
}
