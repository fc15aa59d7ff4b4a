//! `neap dry` against the truth that was made with PyTorch on another fake device.
//!
//! These tests need a Python with a CUDA build of PyTorch, named by NEAP_TORCH_PYTHON, and the truth (NEAP_TRUTH, or
//! `../shared/truth`). Without them each says that it was skipped.

mod attention;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The Python to run scripts with, or nothing: then the test is skipped, and says so.
fn python(test: &str) -> Option<PathBuf> {
    let python = std::env::var_os("NEAP_TORCH_PYTHON").map(PathBuf::from);
    if python.is_none() {
        println!("skipped: {test}: NEAP_TORCH_PYTHON names no Python with PyTorch");
    }
    python
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dry").join(name)
}

fn truth() -> Option<PathBuf> {
    let named = std::env::var_os("NEAP_TRUTH").map(PathBuf::from);
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|p| p.join("shared/truth"));
    named.or_else(beside).filter(|p| p.is_dir())
}

fn neap(flags: &[&str], command: &[&std::ffi::OsStr]) -> Output {
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.arg("dry").args(flags).arg("--").args(command);
    neap.output().expect("neap starts")
}

fn run(python: &Path, flags: &[&str], name: &str, arguments: &[&str]) -> Output {
    let script = script(name);
    let mut command = vec![python.as_os_str(), script.as_os_str()];
    command.extend(arguments.iter().map(std::ffi::OsStr::new));
    neap(flags, &command)
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("no report ({e}): {}", String::from_utf8_lossy(&output.stderr)))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Requests of a table in order, streams numbered by appearance.
fn requests(path: &Path) -> Vec<String> {
    let bytes = neap::files::read(path, 1 << 30).expect("the table is there");
    let mut streams = Vec::new();
    let text = String::from_utf8(bytes).expect("a table is text");
    let rows = text.lines().skip(1).map(|row| {
        let mut cells: Vec<&str> = row.split(',').take(4).collect();
        let stream = cells.pop().unwrap_or_default().to_owned();
        let at = streams.iter().position(|s| *s == stream).unwrap_or_else(|| {
            streams.push(stream);
            streams.len() - 1
        });
        format!("{},{at}", cells.join(","))
    });
    rows.collect()
}

/// Peaks to the byte, and every request to the allocator in order, for the jobs that NEAP_DRY_JOBS names or a small
/// one.
#[test]
fn equals_the_truth() {
    let Some(python) = python("equals_the_truth") else { return };
    let Some(truth) = truth() else {
        println!("skipped: equals_the_truth: there is no truth (NEAP_TRUTH)");
        return;
    };
    let named = std::env::var("NEAP_DRY_JOBS").unwrap_or("jobs/vgg16-sgd-32-86-backward".into());
    let folder = tempfile::tempdir().expect("a folder");
    for job in named.split(',') {
        let base = truth.join(job);
        let events = folder.path().join("events.csv");
        let flags = ["--json", "--events", events.to_str().expect("text")];
        let name = base.file_name().expect("a job has a name").to_string_lossy().replace('-', ":");
        let report = report(&run(&python, &flags, "train.py", &[&name]));
        let text = std::fs::read(format!("{}.truth.json", base.display())).expect("the truth");
        let expected: Value = serde_json::from_slice(&text).expect("the truth is JSON");
        let peak = |key: &str| {
            expected["peaks"].as_array().into_iter().flatten().filter_map(|p| p[key].as_u64()).max()
        };
        for key in ["peak_reserved_bytes", "peak_allocated_bytes"] {
            assert_eq!(report[key].as_u64(), peak(key), "{job}: {key}");
        }
        let expected = requests(Path::new(&format!("{}.truth.events.csv.gz", base.display())));
        let got = requests(&events);
        // The truth ends with the last iteration; the script's own end frees what it holds.
        let first = expected.iter().zip(&got).position(|(a, b)| a != b);
        assert_eq!(first, None, "{job}: the first request that differs");
        assert!(got.len() >= expected.len(), "{job}: {} of {}", got.len(), expected.len());
    }
}

/// What `neap replay --smallest-device` finds for a table of requests, in bytes.
fn smallest_by_replay(events: &str) -> u64 {
    let mut replay = Command::new(env!("CARGO_BIN_EXE_neap"));
    let output = replay.args(["replay", "--smallest-device", "--json", events]).output();
    let form = report(&output.expect("neap starts"));
    form["smallest_device_bytes"].as_u64().expect("a smallest device")
}

/// At the capacity that `neap replay` finds the script fits; a page of 2 MiB below, it ends in PyTorch's own
/// exception. For a small script, and for the jobs that NEAP_DRY_JOBS names.
#[test]
fn the_smallest_device_does_and_one_page_less_does_not() {
    let Some(python) = python("the_smallest_device_does_and_one_page_less_does_not") else {
        return;
    };
    let named = std::env::var("NEAP_DRY_JOBS").unwrap_or_default();
    let jobs: Vec<String> = named
        .split(',')
        .filter_map(|job| Path::new(job).file_name())
        .map(|name| name.to_string_lossy().replace('-', ":"))
        .collect();
    let mut scripts = vec![("small.py", vec![])];
    scripts.extend(jobs.iter().map(|job| ("train.py", vec![job.as_str()])));
    let folder = tempfile::tempdir().expect("a folder");
    let events = below(&folder, "events.csv");
    for (name, arguments) in scripts {
        let whole = report(&run(&python, &["--json", "--events", &events], name, &arguments));
        let least = smallest_by_replay(&events);
        assert_eq!(whole["smallest_device_bytes"].as_u64(), Some(least), "{arguments:?}");
        let at = |bytes: u64| {
            run(&python, &["--json", "--device-bytes", &bytes.to_string()], name, &arguments)
        };
        let does = at(least);
        assert_eq!(does.status.code(), Some(0), "{}", stderr(&does));
        let fails = at(least - (2 << 20));
        assert_eq!(fails.status.code(), Some(1), "{}", stderr(&fails));
        let report = report(&fails);
        assert_eq!(report["processes"][0]["exception"]["type"], "OutOfMemoryError");
        assert_eq!(report["smallest_device_bytes"].as_u64(), Some(least), "{arguments:?}");
    }
}

#[test]
fn failures_are_told_apart() {
    let Some(python) = python("failures_are_told_apart") else { return };
    let crashed = run(&python, &[], "small.py", &["crash"]);
    assert_eq!(crashed.status.code(), Some(3), "{}", stderr(&crashed));
    assert!(stderr(&crashed).contains("ValueError"), "{}", stderr(&crashed));
    let ended = run(&python, &["--json", "--steps", "1"], "small.py", &[]);
    assert_eq!(ended.status.code(), Some(0), "{}", stderr(&ended));
    assert_eq!(report(&ended)["processes"][0]["steps"], 1);
}

#[test]
fn bad_use_is_said_in_one_line() {
    let missing = neap(&[], &["no-such-command-anywhere".as_ref()]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).contains("no such command"), "{}", stderr(&missing));
    let own = script("small.py");
    let over = neap(&["--record", own.to_str().expect("text")], &["true".as_ref(), own.as_ref()]);
    assert_eq!(over.status.code(), Some(2), "{}", stderr(&over));
    for bytes in ["0", "2097151", "5TiB"] {
        let size = neap(&["--device-bytes", bytes], &["true".as_ref()]);
        assert_eq!(size.status.code(), Some(2), "{}", stderr(&size));
        assert!(stderr(&size).contains("--device-bytes"), "{}", stderr(&size));
    }
    let nothing = neap(&[], &["true".as_ref()]);
    assert_eq!(nothing.status.code(), Some(3));
    assert!(stderr(&nothing).contains("no Python"), "{}", stderr(&nothing));
}

/// The device may not take Python's lock while the allocator holds its own.
#[test]
fn threads_that_allocate_do_not_wait_for_each_other() {
    let Some(python) = python("threads_that_allocate_do_not_wait_for_each_other") else { return };
    let script = script("threads.py");
    let command = ["timeout".as_ref(), "300".as_ref(), python.as_os_str(), script.as_os_str()];
    let output = neap(&["--json"], &command);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_tensor_goes_to_another_process() {
    let Some(python) = python("a_tensor_goes_to_another_process") else { return };
    let output = run(&python, &["--json"], "shared.py", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(report(&output)["peak_allocated_bytes"], 4_000_256);
}

#[test]
fn sparse_gradients_and_checkpoints_run() {
    let Some(python) = python("sparse_gradients_and_checkpoints_run") else { return };
    let output = run(&python, &["--json"], "traps.py", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report = report(&output);
    assert_eq!(report["processes"][0]["steps"], 3);
    assert_eq!(report["processes"][0]["problems"], serde_json::json!([]));
}

/// A path below a folder, as text.
fn below(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().expect("a path is text").to_owned()
}

#[test]
fn a_run_equals_its_own_snapshot_and_another_script_does_not() {
    let name = "a_run_equals_its_own_snapshot_and_another_script_does_not";
    let Some(python) = python(name) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (snapshot, picture) = (below(&folder, "own.pickle"), below(&folder, "picture.svg"));
    let written = run(&python, &["--snapshot", &snapshot, "--plot", &picture], "small.py", &[]);
    assert_eq!(written.status.code(), Some(0), "{}", stderr(&written));
    let drawn = std::fs::read_to_string(&picture).expect("the picture is there");
    assert!(drawn.contains("parameter") && drawn.contains("iteration 3"), "{drawn}");
    let page = below(&folder, "page.html");
    let mut viewer = Command::new(&python);
    viewer.args(["-m", "torch.cuda._memory_viz", "trace_plot", &snapshot, "-o", &page]);
    assert!(viewer.status().expect("Python starts").success(), "PyTorch's viewer opens it");
    let mut replay = Command::new(env!("CARGO_BIN_EXE_neap"));
    assert!(replay.args(["replay", &snapshot, "--check"]).status().expect("it starts").success());

    let same = run(&python, &["--json", "--check-against", &snapshot], "small.py", &[]);
    assert_eq!(same.status.code(), Some(0), "{}", stderr(&same));
    assert_eq!(report(&same)["against"]["equal"], true);
    let other = run(&python, &["--json", "--check-against", &snapshot], "small.py", &["wider"]);
    assert_eq!(other.status.code(), Some(1), "{}", stderr(&other));
    let against = &report(&other)["against"];
    let first = against["first_difference"].as_str().expect("a difference");
    assert!(first.contains("small.py:"), "{first}");
    assert!(against["run_peak_allocated_bytes"] != against["recorded_peak_allocated_bytes"]);
}

/// `docs/dry.svg` is what this run draws; NEAP_BLESS=1 writes it.
#[test]
fn the_picture_of_the_page_is_drawn_by_a_run() {
    let name = "the_picture_of_the_page_is_drawn_by_a_run";
    let Some(python) = python(name) else { return };
    let has = ["-c", "import torch, torchvision; assert torch.__version__ >= '2.11'"];
    if !Command::new(&python).args(has).output().is_ok_and(|o| o.status.success()) {
        println!("skipped: {name}: the picture is of PyTorch 2.11 and torchvision");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let drawn = below(&folder, "dry.svg");
    // The title names the command as a reader would type it.
    std::os::unix::fs::symlink(script("train.py"), folder.path().join("train.py")).expect("a link");
    let starter = folder.path().join("python");
    let text = format!("#!/bin/sh\nexec '{}' \"$@\"\n", python.display());
    std::fs::write(&starter, text).expect("it is written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&starter, mode).expect("it may run");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
    neap.current_dir(&folder).env("PATH", format!("{}:{path}", folder.path().display()));
    neap.args(["dry", "--json", "--plot", &drawn, "--", "python", "train.py"]);
    let output = neap.arg("resnet50:adam:16:224:start").output().expect("neap starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let drawn = std::fs::read_to_string(drawn).expect("the picture is there");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/dry.svg");
    if std::env::var_os("NEAP_BLESS").is_some() {
        std::fs::write(&page, &drawn).expect("the page can be written");
    }
    let kept = std::fs::read_to_string(&page).expect("the page has a picture");
    assert!(drawn == kept, "docs/dry.svg differs from what a run draws: NEAP_BLESS=1");
}

#[test]
fn what_the_device_cannot_know_is_no_exact_answer() {
    let Some(python) = python("what_the_device_cannot_know_is_no_exact_answer") else { return };
    let lines = "import torch; torch.linalg.inv(torch.eye(8).cuda())";
    let command = [python.as_os_str(), "-c".as_ref(), lines.as_ref()];
    let form = report(&neap(&["--json"], &command));
    assert!(form["certainty"].as_str().expect("a word").starts_with("estimate"), "{form}");
    let idle = &form["processes"][0]["did_nothing"];
    assert!(idle.to_string().contains("cusolver"), "{idle}");

    let mut pool = Command::new(env!("CARGO_BIN_EXE_neap"));
    pool.env("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync").args(["dry", "--json", "--"]);
    let output = pool.arg(&python).arg(script("small.py")).output().expect("neap starts");
    let form = report(&output);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(form["certainty"].as_str().expect("a word").starts_with("estimate"), "{form}");
    // Parameters, gradients and two states of 8 × 4 MiB each.
    assert!(form["peak_reserved_bytes"].as_u64() > Some(128 << 20), "{form}");
}

#[test]
fn an_interrupt_ends_the_run_and_leaves_nothing_behind() {
    let Some(python) = python("an_interrupt_ends_the_run_and_leaves_nothing_behind") else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let lines =
        "import torch, time; torch.ones(9, device='cuda'); print('up', flush=True); time.sleep(60)";
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    // Without a home the cache is in the run's own folder.
    command.env("TMPDIR", folder.path()).env_remove("HOME").env_remove("XDG_CACHE_HOME");
    command.arg("dry").arg("--").arg(&python).args(["-c", lines]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("neap starts");
    let mut up = [0; 2];
    child.stdout.as_mut().expect("piped").read_exact(&mut up).expect("the script comes up");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.expect("kill starts").success());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

/// A machine with a GPU has a driver on the loader's path. Here that is one which notes that it was loaded.
#[test]
fn the_driver_of_a_real_gpu_is_never_loaded() {
    let Some(python) = python("the_driver_of_a_real_gpu_is_never_loaded") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let source = below(&folder, "driver.c");
    let code = "#include <stdio.h>\n#include <stdlib.h>\n\
        __attribute__((constructor)) static void loaded(void) {\n\
            FILE *f = fopen(getenv(\"REAL_DRIVER_LOADED\"), \"a\"); fputs(\"loaded\\n\", f); fclose(f);\n}\n\
        int cuInit(unsigned flags) { abort(); }\nint nvmlInit_v2(void) { abort(); }\n";
    std::fs::write(&source, code).expect("it is written");
    for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o", &below(&folder, name), &source]);
        if !cc.arg(format!("-Wl,-soname,{name}")).status().is_ok_and(|s| s.success()) {
            println!("skipped: the_driver_of_a_real_gpu_is_never_loaded: there is no C compiler");
            return;
        }
    }
    let noted = below(&folder, "noted");
    let with_driver = |program: &Path| {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", folder.path()).env("REAL_DRIVER_LOADED", &noted);
        command
    };
    let mut dry = with_driver(Path::new(env!("CARGO_BIN_EXE_neap")));
    let output = dry.args(["dry", "--json", "--"]).arg(&python).arg(script("card.py")).output();
    let output = output.expect("neap starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!Path::new(&noted).exists(), "the real driver was loaded");
    // What the test stands on: without neap it would be.
    let mut plain = with_driver(&python);
    plain.args(["-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]);
    assert!(plain.status().expect("Python starts").success());
    assert!(Path::new(&noted).exists(), "the driver notes that it is loaded");
}

/// Python's flag `-I` keeps the device away: such a process sees no GPU instead of the real one.
#[test]
fn a_process_without_the_device_sees_no_real_gpu() {
    let Some(python) = python("a_process_without_the_device_sees_no_real_gpu") else { return };
    let prints = "import os; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))";
    for (own, flags, expected) in [
        (None, vec!["-I", "-c", prints], "sees \n"),
        (Some("1,0"), vec!["-I", "-c", prints], "sees \n"),
        (None, vec!["-c", prints], "sees None\n"),
        (Some("1,0"), vec!["-c", prints], "sees 1,0\n"),
        (Some(""), vec!["-c", prints], "sees \n"),
    ] {
        let mut dry = Command::new(env!("CARGO_BIN_EXE_neap"));
        dry.args(["dry", "--"]).arg(&python).args(&flags);
        match own {
            Some(own) => dry.env("CUDA_VISIBLE_DEVICES", own),
            None => dry.env_remove("CUDA_VISIBLE_DEVICES"),
        };
        let output = dry.output().expect("neap starts");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{own:?} {flags:?}");
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    }
    // A dry run within another shows its script the device too.
    let small = script("small.py");
    let inner = ["dry", "--steps", "1", "--"].map(std::ffi::OsStr::new);
    let mut command = vec![env!("CARGO_BIN_EXE_neap").as_ref()];
    command.extend(inner);
    command.extend([python.as_os_str(), small.as_os_str()]);
    let output = neap(&[], &command);
    assert!(stderr(&output).contains("exact: fits"), "{}", stderr(&output));
}

/// Where CUDA's runtime lies as an archive, if the wheels under this PyTorch have it.
fn runtime_archive(python: &Path) -> Option<PathBuf> {
    let find = "import glob, os, torch; print(*glob.glob(os.path.join(os.path.dirname(torch.__path__[0]), \
                'nvidia', '*', 'lib', 'libcudart_static.a')))";
    let output = Command::new(python).args(["-c", find]).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (!path.is_empty() && !path.contains(' ')).then(|| path.into())
}

#[test]
fn an_extension_with_a_runtime_of_its_own_is_named() {
    let name = "an_extension_with_a_runtime_of_its_own_is_named";
    let Some(python) = python(name) else { return };
    let Some(archive) = runtime_archive(&python) else {
        println!("skipped: {name}: there is no libcudart_static.a under this PyTorch");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let (source, library) = (below(&folder, "own.c"), below(&folder, "libown runtime.so"));
    let code = "int cudaMalloc(void **, unsigned long);\n\
                int take(void **at) { return cudaMalloc(at, 1 << 20); }\n";
    std::fs::write(&source, code).expect("it is written");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o", &library, &source]).arg(archive);
    cc.args(["-lrt", "-lpthread", "-ldl", "-Wl,--exclude-libs,ALL"]);
    if !cc.status().is_ok_and(|s| s.success()) {
        println!("skipped: {name}: there is no C compiler");
        return;
    }
    let lines = "import ctypes, sys, torch; torch.ones(9, device='cuda'); at = ctypes.c_void_p()\n\
                 assert ctypes.CDLL(sys.argv[1]).take(ctypes.byref(at)) != 0";
    let command = [python.as_os_str(), "-c".as_ref(), lines.as_ref(), library.as_ref()];
    let output = neap(&["--json"], &command);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let form = report(&output);
    assert_eq!(form["processes"][0]["own_runtimes"], serde_json::json!([library]));
    assert!(form["certainty"].as_str().expect("a word").contains("of their own"), "{form}");
    assert!(stderr(&output).contains("libown runtime.so"), "{}", stderr(&output));
}

/// The report of rank 0, pretended.
/// A PyTorch like those that are built for the CPU only: links to everything but the CUDA part, which
/// the loader finds in `LD_LIBRARY_PATH`.
fn without_cuda(python: &Path, site: &Path) -> (PathBuf, PathBuf) {
    let where_is = "import torch; print(torch.__path__[0])";
    let found = Command::new(python).args(["-c", where_is]).output().expect("python starts");
    let torch = PathBuf::from(String::from_utf8_lossy(&found.stdout).trim());
    let (own, libraries) = (site.join("torch"), torch.join("lib"));
    std::fs::create_dir_all(own.join("lib")).expect("a folder");
    let link = |folder: &Path, to: &Path, but: &str| {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            if entry.file_name() != but {
                std::os::unix::fs::symlink(entry.path(), to.join(entry.file_name()))
                    .expect("a link");
            }
        }
    };
    link(&torch, &own, "lib");
    link(&libraries, &own.join("lib"), "libtorch_cuda.so");
    let nvidia = torch.with_file_name("nvidia");
    std::os::unix::fs::symlink(nvidia, site.join("nvidia")).expect("a link");
    (site.to_owned(), libraries)
}

#[test]
fn a_pytorch_for_the_cpu_only_is_counted_on_fake_tensors() {
    const SCRIPT: &str = "
import copy, sys, torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 256
    def __getitem__(self, index): return torch.full((1024,), float(index))

device = 'cuda' if torch.cuda.is_available() or sys.argv[1:] else 'cpu'
layers = [torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10)]
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for data in DataLoader(Data(), 64, num_workers=1):
    loss = model(data.to(device)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert loss.item() == loss.item()
torch.save([model.state_dict(), optimizer.state_dict()], 'last.pt')
states = torch.load('last.pt')
copy.deepcopy(model).load_state_dict(states[0])
optimizer.load_state_dict(states[1])
";
    let Some(python) = python("a_pytorch_for_the_cpu_only") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (site, libraries) = without_cuda(&python, &folder.path().join("site"));
    let script = folder.path().join("train.py");
    std::fs::write(&script, SCRIPT).expect("a file");
    let dry = |flags: &[&str], arguments: &[&str], on_cpu: bool| {
        let mut neap = Command::new(env!("CARGO_BIN_EXE_neap"));
        neap.args(["--json", "dry"]).args(flags).arg("--").arg(&python).arg(&script);
        if on_cpu {
            neap.env("PYTHONPATH", &site).env("LD_LIBRARY_PATH", &libraries);
        }
        neap.args(arguments).output().expect("neap starts")
    };
    let counted = dry(&[], &[], true);
    assert_eq!(counted.status.code(), Some(0), "{}", stderr(&counted));
    assert!(stderr(&counted).contains("allocated only: may fit"), "{}", stderr(&counted));
    let counted = report(&counted);
    let weights = 4 * (1024 * 4096 + 4096 + 10 * 4096) + 512;
    assert_eq!(counted["allocated_only"]["parameter_bytes"], weights);
    let exact = report(&dry(&[], &[], false))["peak_allocated_bytes"].clone();
    let (counted, exact) = (counted["allocated_bytes"].as_u64(), exact.as_u64());
    let (counted, exact) = (counted.expect("a number"), exact.expect("a number"));
    assert!(counted.abs_diff(exact) < exact / 5, "{counted} counted, {exact} on the device");
    let recorded = folder.path().join("job.graph.json");
    let recorded = recorded.to_str().expect("a name");
    for (flags, arguments, code, says) in [
        (&["--device-bytes", "64MiB"][..], &[][..], 1, "does not fit"),
        (&["--record", recorded], &[], 2, "--record: this PyTorch is built for the CPU only"),
        (&[], &["cuda"], 3, "built for the CPU only"),
    ] {
        let output = dry(flags, arguments, true);
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(says), "{flags:?}: {}", stderr(&output));
    }
}

fn one_of_two_ranks(python: &Path, name: &str) -> Value {
    let alone = run(python, &["--json", "--ranks", "2"], name, &[]);
    assert_eq!(alone.status.code(), Some(0), "{}", stderr(&alone));
    report(&alone)
}

/// The report of two ranks that PyTorch's launcher starts, on a port that is free.
fn two_ranks(python: &Path, name: &str) -> Value {
    let script = script(name);
    let launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"];
    let mut command = vec![python.as_os_str()];
    command.extend(launcher.iter().map(std::ffi::OsStr::new));
    command.push(script.as_os_str());
    let both = neap(&["--json", "--devices", "2"], &command);
    assert_eq!(both.status.code(), Some(0), "{}", stderr(&both));
    report(&both)
}

#[test]
fn ranks_exchange_objects() {
    let Some(python) = python("ranks_exchange_objects") else { return };
    one_of_two_ranks(&python, "objects.py");
    two_ranks(&python, "objects.py");
}

#[test]
fn one_of_two_pretended_ranks_takes_what_one_of_two_real_ranks_does() {
    let name = "one_of_two_pretended_ranks_takes_what_one_of_two_real_ranks_does";
    let Some(python) = python(name) else { return };
    let (alone, both) = (one_of_two_ranks(&python, "ddp.py"), two_ranks(&python, "ddp.py"));
    assert_eq!(both["processes"].as_array().map(Vec::len), Some(2));
    let certainty = alone["certainty"].as_str().expect("a word");
    let late = alone["processes"][0]["late_bucket_bytes"].as_u64().expect("a number");
    assert_eq!(certainty.contains("more while DDP replaces its first buckets"), late > 0);
    // Four layers of 256 × 256 and a bias; PyTorch before 2.8 frees buckets at once.
    assert!([0, 4 * (256 * 256 + 256) * 4].contains(&late), "{late}");
    for key in ["peak_allocated_bytes", "peak_reserved_bytes"] {
        assert_eq!(alone[key], both[key], "{key}");
        for rank in both["processes"].as_array().into_iter().flatten() {
            let own = rank["devices"].as_array().into_iter().flatten().map(|d| d[key].as_u64());
            assert_eq!(own.max().flatten(), alone[key].as_u64(), "{key} of {}", rank["rank"]);
        }
    }
}
