//! Which libraries are opened where several are there.

use std::path::Path;
use std::process::Command;

use super::{built, faked, json, with};
use crate::cli::folder::Folder;

/// Makes a library of one function that answers with a number. It carries its name inside, as
/// NVIDIA's do, by which the loader knows what is open already.
fn answering(path: &Path, function: &str, number: u32) {
    let source = path.with_extension("c");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&source, format!("unsigned long {function}(void) {{ return {number}; }}"))
        .unwrap();
    let mut make = Command::new("cc");
    let name = path.file_name().unwrap().to_str().unwrap();
    make.arg(format!("-Wl,-soname,{name}")).args(["-shared", "-fPIC", "-o"]).arg(path).arg(&source);
    assert!(make.status().unwrap().success());
}

/// cuDNN's main library opens its parts by bare name, so that a part of another version on the
/// loader's path could come in.
#[test]
fn the_parts_of_cudnn_come_from_its_own_folder() {
    let Some(folder) = faked() else { return };
    folder.import("tiny_cnn-inference.et.json.gz", &[]);
    // As the wheels have them: each library in a folder of its own.
    let wheel = |name: &str| folder.path("env/lib/python3.11/site-packages/nvidia").join(name);
    for (library, package) in
        [("libnvrtc.so.13", "cu13"), ("libcublasLt.so.13", "cu13"), ("libcudnn.so.9", "cudnn")]
    {
        let to = wheel(package).join("lib");
        std::fs::create_dir_all(&to).unwrap();
        std::fs::rename(folder.path(library), to.join(library)).unwrap();
    }
    answering(&wheel("cudnn").join("lib/libcudnn_ops.so.9"), "cudnnGetOpsVersion", 91_300);
    // On the loader's path, which has the driver too.
    answering(&folder.path("libcudnn_ops.so.9"), "cudnnGetOpsVersion", 90_100);
    let nvidia = wheel("cudnn");
    for libraries in ["env", nvidia.to_str().unwrap()] {
        let run = ["run", "job.graph.json", "--on", "cuda", "--cuda-libs", libraries];
        let report = json(&folder, &run);
        assert!(report["notes"].to_string().contains("cuDNN 91300"), "{report}");
    }
    // The test library sees it where the other part is all there is.
    std::fs::remove_file(wheel("cudnn").join("lib/libcudnn_ops.so.9")).unwrap();
    let answer =
        with(&folder, &[], &["run", "job.graph.json", "--on", "cuda", "--cuda-libs", "env"]);
    assert_eq!(answer.code, Some(2), "{answer:?}");
    assert!(answer.stderr.contains("cuDNN does not start: status 1001"), "{}", answer.stderr);
}

/// An environment made for CUDA 12 is refused, and the error says what to install.
#[test]
fn libraries_of_cuda_12_are_refused() {
    let Some(_) = faked() else { return };
    let cache = built().path().join("none");
    let run = |folder: &Folder| {
        let run = ["run", "job.graph.json", "--on", "cuda", "--cuda-libs", "."];
        // No other environment of this machine is searched.
        let alone = [("NEAP_CACHE", cache.to_str().unwrap()), ("PATH", ""), ("HOME", "/none")];
        with(folder, &alone, &run)
    };
    for (library, wanted) in [
        ("libcublasLt.so.", "cuBLASLt at ./libcublasLt.so.12 is version 12; version 13 is needed"),
        ("libnvrtc.so.", "NVRTC at ./libnvrtc.so.12 is version 12; version 13 is needed"),
    ] {
        let folder = faked().unwrap();
        folder.import("tiny_cnn-inference.et.json.gz", &[]);
        std::fs::remove_file(folder.path(&format!("{library}13"))).unwrap();
        folder.write(&format!("{library}12"), "");
        let answer = run(&folder);
        assert_eq!(answer.code, Some(2), "{answer:?}");
        assert!(
            answer.stderr.contains(wanted) && answer.stderr.contains("pip install"),
            "{}",
            answer.stderr
        );
    }
}
