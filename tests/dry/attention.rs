//! Attention as PyTorch calls it on an H100 in bf16: cuDNN's operators, which no CPU has.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{python, run, script, stderr};

fn neap(arguments: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_neap")).args(arguments).output();
    let output = output.expect("neap starts");
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    bytes.chunks_exact(4).map(four).collect()
}

/// A tensor of a safetensors file.
fn saved(path: &Path, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("a saved file");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let (header, data) = bytes[8..].split_at(usize::try_from(length).expect("a length"));
    let header: Value = serde_json::from_slice(header).expect("a header");
    let at = |end: usize| header[name]["data_offsets"][end].as_u64().expect("a place") as usize;
    numbers(&data[at(0)..at(1)])
}

/// Recorded on the device of a dry run; trained by the host with and without a plan, and by PyTorch's own kernels on the
/// CPU from the same values.
#[test]
fn cudnns_attention_trains_as_pytorch_does() {
    let Some(python) = python("cudnns_attention_trains_as_pytorch_does") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("text").to_owned();
    let (job, plan) = (path("job.graph.json"), path("job.plan.json"));
    let done = run(&python, &["--steps", "4", "--record", &job], "attention.py", &[]);
    assert_eq!(done.status.code(), Some(0), "{}", stderr(&done));
    let graph = std::fs::read_to_string(&job).expect("a graph");
    for kind in ["attention", "attention_backward"] {
        let kind = format!("\"aten::_scaled_dot_product_cudnn_{kind}\"");
        assert!(graph.contains(&kind), "PyTorch took another operator than {kind}");
    }
    let cpu = Command::new(&python).arg(script("attention.py")).arg(folder.path()).status();
    assert!(cpu.expect("Python starts").success());
    let expected = numbers(&std::fs::read(path("after.bin")).expect("PyTorch's weight"));
    let before = path("before.safetensors");
    neap(&["plan", &job, "--device", "h100", "--budget", "min", "-o", &plan]);
    let mut after = Vec::new();
    for (subject, name) in [(&job, "plain"), (&plan, "planned")] {
        let to = path(name);
        let run = ["run", subject, "--on", "host", "--iterations", "6", "--weights", &before];
        neap(&[&run[..], &["--save", &to]].concat());
        after.push(saved(Path::new(&to), "parameter:group0.0"));
    }
    assert_eq!(after[0], after[1]);
    let initial = saved(Path::new(&before), "parameter:group0.0");
    let most = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
    let (moved, off) = (most(&initial, &expected), most(&after[0], &expected));
    assert!(expected.len() == 64 * 192 && off < moved / 100.0, "{off} off, of {moved}");
}
