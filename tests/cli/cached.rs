//! The cache from which `neap dry` and `neap torch` run what they have unpacked: only what is the caller's, whole.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

/// A folder with a cache in it.
struct Room(TempDir);

impl Room {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn cache(&self) -> PathBuf {
        self.0.path().join("above/cache")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
        command.args(arguments).current_dir(self.0.path());
        command.env("XDG_CACHE_HOME", self.cache()).env_remove("NEAP_CACHE");
        command
    }

    /// Runs `neap torch` around a line of shell.
    fn torch(&self, line: &str) -> Output {
        let flags = ["torch", "--budget", "1GiB", "--", "sh", "-c", line];
        let output = self.command(&flags).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output
    }

    /// The folder that is unpacked.
    fn unpacked(&self) -> PathBuf {
        let found = entries(&self.cache().join("neap"));
        let [one] = &found[..] else { panic!("{found:?}") };
        one.clone()
    }

    /// What `neap cache` says of the folder that this executable unpacks.
    fn cached(&self, what: &str) -> Value {
        let output = self.command(&["--json", "cache", what]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What the start-up hook of a script holds.
const HOOK: &str = "cat ${PYTHONPATH%%:*}/sitecustomize.py";
const PLANTED: &str = "print('planted')\n";

#[test]
fn nothing_is_run_from_a_cache_that_others_can_change() {
    let room = Room::new();
    let fresh = room.torch(HOOK).stdout;
    assert!(!fresh.is_empty());
    let unpacked = room.unpacked();
    std::fs::write(unpacked.join("site-torch/sitecustomize.py"), PLANTED).unwrap();
    let above = room.cache().parent().unwrap().to_owned();
    for (path, bits) in
        [(&above, 0o777), (&room.cache(), 0o770), (&room.cache().join("neap"), 0o702)]
    {
        mode(path, bits);
        let output = room.torch(HOOK);
        assert_eq!(output.stdout, fresh, "{}", path.display());
        let text = said(&output);
        let named = path.canonicalize().unwrap().display().to_string();
        assert!(text.contains(&named) && text.contains("nothing is run from the cache"), "{text}");
        // What is in it stays as it is.
        let kept = std::fs::read_to_string(unpacked.join("site-torch/sitecustomize.py")).unwrap();
        assert_eq!(kept, PLANTED);
        mode(path, 0o700);
    }
    // Another user's, which only root can try.
    const OTHER: u32 = 65_534;
    if chown(&above, Some(OTHER), Some(OTHER)).is_ok() {
        let output = room.torch(HOOK);
        assert!(said(&output).contains("belongs to another user"), "{}", said(&output));
        assert_eq!(output.stdout, fresh);
        chown(&above, Some(0), Some(0)).unwrap();
    }
    // In a folder as /tmp is, where none may touch what is another's, the cache is used.
    mode(&above, 0o1777);
    assert!(said(&room.torch(HOOK)).contains("unpacked again"));
    assert!(!said(&room.torch(HOOK)).contains("cache"));
}

#[test]
fn what_is_unpacked_is_the_users_alone_whatever_the_umask_is() {
    let room = Room::new();
    let line = r#"umask 000; "$0" torch --budget 1GiB -- sh -c 'stat -c %a $NEAP_TORCH_DIR'"#;
    let mut command = Command::new("sh");
    command.args(["-c", line, env!("CARGO_BIN_EXE_neap")]).env_remove("NEAP_CACHE");
    let output = command.env("XDG_CACHE_HOME", room.cache()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "700\n", "{output:?}");
    let mut left = vec![room.cache()];
    let mut seen = 0;
    while let Some(path) = left.pop() {
        let about = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!(about.mode() & 0o077, 0, "{}: {:o}", path.display(), about.mode());
        if about.is_dir() {
            left.extend(entries(&path));
        }
        seen += 1;
    }
    assert!(seen > 40, "{seen} files");
}

#[test]
fn a_damaged_cache_is_unpacked_again() {
    let room = Room::new();
    let fresh = room.torch(HOOK).stdout;
    let root = room.unpacked();
    let library = std::fs::read(root.join("libneap_dry.so")).unwrap();
    let module = root.join("python/neap/torch/_fit.py");
    let source = std::fs::read(&module).unwrap();
    let state = || room.cached("list")["packages"][0]["state"].clone();
    let pipe = |path: &Path| {
        std::fs::remove_file(path).unwrap();
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let damages: [(&str, &dyn Fn()); 8] = [
        ("empty library", &|| std::fs::write(root.join("libneap_dry.so"), "").unwrap()),
        ("one other byte", &|| {
            let mut other = library.clone();
            *other.last_mut().unwrap() ^= 1;
            std::fs::write(root.join("libneap_dry.so"), other).unwrap();
        }),
        ("module cut off", &|| std::fs::write(&module, &source[..100]).unwrap()),
        ("module missing", &|| std::fs::remove_file(&module).unwrap()),
        ("a pipe", &|| pipe(&module)),
        ("another module", &|| std::fs::write(root.join("site-torch/json.py"), PLANTED).unwrap()),
        ("a link", &|| {
            std::fs::remove_dir_all(root.join("python")).unwrap();
            std::os::unix::fs::symlink("/usr", root.join("python")).unwrap();
        }),
        ("written to by others", &|| mode(&module, 0o666)),
    ];
    for (what, damage) in damages {
        assert_eq!(state(), "whole", "before {what}");
        damage();
        assert_eq!(state(), "damaged", "{what}");
        let output = room.torch(HOOK);
        assert!(said(&output).contains("was damaged; it has been unpacked again"), "{what}");
        assert_eq!(output.stdout, fresh, "{what}");
        assert!(std::fs::read(root.join("libneap_dry.so")).unwrap() == library, "{what}");
        assert!(std::fs::read(&module).unwrap() == source, "{what}");
        let left = entries(&room.cache().join("neap"));
        assert_eq!(left, std::slice::from_ref(&root), "{what}");
    }
    // Bytecode that Python keeps there is no damage.
    std::fs::create_dir(root.join("python/neap/torch/__pycache__")).unwrap();
    std::fs::write(root.join("python/neap/torch/__pycache__/_fit.cpython-312.pyc"), "x").unwrap();
    assert_eq!(state(), "whole");
    assert!(!said(&room.torch(HOOK)).contains("damaged"));
}

#[test]
fn the_cache_lists_and_clears_what_was_unpacked_and_planned() {
    let room = Room::new();
    room.torch("true");
    let folder = room.cache().join("neap");
    std::fs::create_dir_all(folder.join("torch")).unwrap();
    std::fs::write(folder.join("torch/0123.json"), "{}").unwrap();
    std::fs::write(folder.join("torch/0123.json.77.tmp"), "{").unwrap();
    std::fs::create_dir_all(folder.join(".new-x/python")).unwrap();
    std::fs::create_dir_all(folder.join("dry-00")).unwrap();
    std::fs::create_dir_all(folder.join("mine")).unwrap();
    let listed = room.cached("list");
    assert_eq!(listed["plans"].as_array().unwrap().len(), 2, "{listed:#}");
    let states: Vec<&str> = listed["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["state"].as_str().unwrap())
        .collect();
    assert_eq!(states, ["unfinished", "of another version", "whole"], "{listed:#}");
    assert!(listed["total_bytes"].as_u64().unwrap() > 500_000, "{listed:#}");
    // What a running script uses stays.
    let flags = ["torch", "--budget", "1GiB", "--", "sh", "-c", "echo ready; read line"];
    let mut script = room.command(&flags);
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut script = script.spawn().unwrap();
    let mut ready = [0; 6];
    std::io::Read::read_exact(script.stdout.as_mut().unwrap(), &mut ready).unwrap();
    let cleared = room.cached("clear");
    assert_eq!(cleared["packages"].as_array().unwrap().len(), 2, "{cleared:#}");
    assert_eq!(room.cached("list")["packages"].as_array().unwrap().len(), 1);
    drop(script.stdin.take());
    script.wait().unwrap();
    assert_eq!(room.cached("clear")["packages"].as_array().unwrap().len(), 1);
    assert_eq!(room.cached("list")["total_bytes"], 0);
    assert_eq!(entries(&folder.join("torch")), Vec::<PathBuf>::new());
    assert!(folder.join("mine").exists());
}

#[test]
fn a_relative_cache_is_found_from_every_folder() {
    let room = Room::new();
    let line = "cd /; ls ${PYTHONPATH%%:*} && ls -d $NEAP_CACHE/dry-*";
    let flags = ["torch", "--budget", "1GiB", "--", "sh", "-c", line];
    for (name, value) in [("XDG_CACHE_HOME", "relative"), ("NEAP_CACHE", "other")] {
        let output = room.command(&flags).env(name, value).output().unwrap();
        assert!(output.status.success(), "{name}: {output:?}");
        assert!(room.0.path().join(value).is_dir());
    }
}

#[test]
fn a_signal_before_the_command_starts_it_not_and_leaves_nothing() {
    let room = Room::new();
    let temporary = room.0.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    // At many moments of its first milliseconds.
    for wait in 0..40 {
        let mut command = room.command(&["torch", "--budget", "1GiB", "--", "sleep", "100"]);
        command.env("TMPDIR", &temporary).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        let number = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &number]).status().unwrap().success());
        let began = std::time::Instant::now();
        child.wait().unwrap();
        assert!(began.elapsed() < Duration::from_secs(60), "after {wait} ms");
        assert_eq!(entries(&temporary), Vec::<PathBuf>::new(), "after {wait} ms");
    }
}
