//! Every kernel compiled by NVRTC for compute_90 and assembled by ptxas for sm_90, without a GPU: no errors, no spills.
//!
//! The compiler comes from `tools/cuda-wheels`; where it can't be had, this is skipped, unless `NEAP_REQUIRE_NVRTC` is set.
use std::path::{Path, PathBuf};
use std::process::Command;

use neap::run::backend::cuda::kernels::Nvrtc;
use neap::run::backend::cuda::launch::Family;
use neap::run::backend::cuda::libs::{self, Which};

/// The folder with lib/ and bin/, or why there is none.
fn compiler() -> Result<PathBuf, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/cuda-wheels");
    let output =
        Command::new(&script).output().map_err(|e| format!("{}: {e}", script.display()))?;
    if !output.status.success() {
        return Err(format!("{}: {}", script.display(), String::from_utf8_lossy(&output.stderr)));
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// What ptxas says of each kernel: name, registers, bytes of stack, whether any spills.
fn assemble(
    ptxas: &Path,
    ptx: &[u8],
    folder: &Path,
    family: Family,
) -> Vec<(String, u32, u32, bool)> {
    let source = folder.join(format!("{}.ptx", family.name()));
    std::fs::write(&source, ptx.strip_suffix(b"\0").unwrap_or(ptx)).unwrap();
    let output = Command::new(ptxas)
        .args(["-arch=sm_90", "-v", "--warn-on-spills", "-o"])
        .arg(source.with_extension("cubin"))
        .arg(&source)
        .output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {said}", family.name());
    assert!(!said.contains("spilled"), "{}: {said}", family.name());
    let (mut kernels, mut entry, mut stack, mut spills) = (Vec::new(), String::new(), 0, false);
    for line in said.lines() {
        let number = |before: &str| {
            line.split(before)
                .next()
                .and_then(|s| s.rsplit([' ', ':']).find(|w| !w.is_empty())?.parse().ok())
        };
        if line.contains("Compiling entry function") {
            entry = line.split('\'').nth(1).unwrap().to_owned();
        } else if line.contains("bytes stack frame") {
            stack = number(" bytes stack frame").unwrap();
            spills = !line.contains(" 0 bytes spill stores, 0 bytes spill loads");
        } else if line.contains("Used ") {
            kernels.push((entry.clone(), number(" registers").unwrap(), stack, spills));
        }
    }
    kernels
}

#[test]
fn every_kernel_compiles_and_none_spills() {
    let required = std::env::var_os("NEAP_REQUIRE_NVRTC").is_some();
    let home = match compiler() {
        Ok(home) => home,
        Err(why) => {
            assert!(!required, "NVRTC is required, and not there: {why}");
            println!("skipped: kernels are not compiled: {why}");
            return;
        }
    };
    let nvrtc = Nvrtc::new(&libs::open(Which::Nvrtc, &[home.join("lib")]).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut compiled = 0;
    for family in Family::ALL {
        let ptx = nvrtc.compile(family, "compute_90").unwrap_or_else(|e| panic!("{e}"));
        let kernels = assemble(&home.join("bin/ptxas"), &ptx, folder.path(), family);
        assert!(!kernels.is_empty(), "{}: no kernel", family.name());
        let most = kernels.iter().map(|k| k.1).max().unwrap();
        let stack: Vec<String> =
            kernels.iter().filter(|k| k.2 > 0).map(|k| format!("{} {} bytes", k.0, k.2)).collect();
        println!(
            "{}: {} kernels, at most {most} registers; stack: {}",
            family.name(),
            kernels.len(),
            stack.join(", ")
        );
        for (name, registers, _, spills) in &kernels {
            assert!(!spills, "{name} spills");
            assert!(*registers > 0 && *registers < 255, "{name}: {registers} registers");
        }
        compiled += kernels.len();
    }
    assert!(compiled > 140, "{compiled} kernels");
    println!("{compiled} kernels");
}
