//! Builds the parts of `neap dry` that the executable contains: the device library (one call of
//! rustc, no dependencies) and the Python package. On other systems than Linux both are left out,
//! and the command says so. It also gives the binary the commit from which it is built.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=dry/src");
    println!("cargo:rerun-if-changed=python");
    version();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets the folder"));
    let mut files = Vec::new();
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        device(&root, &out);
        python(&root.join("python"), "neap", &mut files);
        let library = fs::read(out.join("libneap_dry.so")).expect("it was built");
        compress(&library, &out.join("libneap_dry.so.gz"));
    }
    let (mut text, mut all) = (String::from("&[\n"), Vec::new());
    for (name, file) in files {
        let content = fs::read(file).expect("the file is there");
        writeln!(text, "    ({name:?}, {}),", content.len()).expect("a string takes it");
        all.extend(content);
    }
    text.push_str("]\n");
    // As one, since the files have much in common.
    compress(&all, &out.join("python.gz"));
    fs::write(out.join("python_files.rs"), text).expect("OUT_DIR is writable");
}

/// The executable contains its files compressed; they are unpacked once.
fn compress(content: &[u8], to: &Path) {
    let file = fs::File::create(to).expect("OUT_DIR is writable");
    let mut gzip = flate2::write::GzEncoder::new(file, flate2::Compression::best());
    gzip.write_all(content).expect("OUT_DIR is writable");
    gzip.finish().expect("OUT_DIR is writable");
}

/// Sets NEAP_VERSION for `neap --version`. A release archive has no repository; then it is the
/// version alone.
fn version() {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !text.is_empty()).then_some(text)
    };
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) =
            git(&["rev-parse", "--git-path", name]).filter(|p| Path::new(p).exists())
        {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).map(|commit| format!(" ({commit})"));
    println!(
        "cargo:rustc-env=NEAP_VERSION={}{}",
        env!("CARGO_PKG_VERSION"),
        commit.unwrap_or_default()
    );
}

/// Compiles dry/src/lib.rs to a shared object for the target.
fn device(root: &Path, out: &Path) {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.arg(root.join("dry/src/lib.rs")).arg("-o").arg(out.join("libneap_dry.so"));
    command.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "neap_dry"]);
    // For size: what it does for a call of PyTorch is little beside the call.
    command.args(["-C", "opt-level=s", "-C", "codegen-units=1"]);
    command.args(["-C", "panic=abort", "-C", "strip=symbols"]);
    command.args(["-C", "link-arg=-Wl,-soname,libneap_dry.so", "--cap-lints", "allow"]);
    command.arg("--target").arg(env::var("TARGET").expect("cargo sets TARGET"));
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut flag = std::ffi::OsString::from("linker=");
        flag.push(linker);
        command.arg("-C").arg(flag);
    }
    let status = command.status().expect("rustc can be started");
    assert!(status.success(), "the device library of `neap dry` (dry/) does not compile");
}

/// The package's files, by their path below `python/`, sorted.
fn python(folder: &Path, package: &str, files: &mut Vec<(String, PathBuf)>) {
    let Ok(entries) = fs::read_dir(folder.join(package)) else { return };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.sort();
    for path in paths {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = format!("{package}/{file}");
        if path.is_dir() && file != "__pycache__" {
            python(folder, &name, files);
        } else if file.ends_with(".py") || file == "py.typed" {
            files.push((name, path));
        }
    }
}
