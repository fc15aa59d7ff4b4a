//! `neap torch` around any command. What acts inside Python has tests of its own (`python/tests`).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli::folder::fixture;

/// Runs `neap torch` with these flags around a line of shell, allocator settings as given.
fn torch(flags: &[&str], line: &str, settings: Option<&str>) -> Output {
    let folder = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.arg("torch").args(flags).args(["--", "sh", "-c", line]).current_dir(folder.path());
    command.env("XDG_CACHE_HOME", folder.path()).env_remove("NEAP_CACHE");
    command.env_remove("PYTORCH_CUDA_ALLOC_CONF").env_remove("PYTORCH_ALLOC_CONF");
    settings.inspect(|text| {
        command.env("PYTORCH_CUDA_ALLOC_CONF", text);
    });
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_exit_code_is_the_commands() {
    for code in [0, 1, 7] {
        let found = torch(&["--budget", "1GiB"], &format!("exit {code}"), None);
        assert_eq!(found.status.code(), Some(code), "{}", text(&found.stderr));
        assert!(text(&found.stderr).contains("no Python process of this command"));
    }
    let found = torch(&["--budget", "1GiB"], "kill -9 $$", None);
    assert_eq!(found.status.code(), Some(128 + 9));
}

#[test]
fn a_signal_is_not_taken_for_a_script_that_trains_nothing() {
    let ended = torch(&["--budget", "1GiB"], "kill -TERM $$", None);
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(143), "{said}");
    assert!(said.contains("signal 15 ended the command before its report"), "{said}");
}

#[test]
fn the_script_finds_what_was_asked_for() {
    let line = "echo $NEAP_TORCH_BUDGET $NEAP_TORCH_RECOMPUTE $NEAP_TORCH_EARLY \
                $PYTORCH_CUDA_ALLOC_CONF; \
                p=${PYTHONPATH%%:*}; test -e $p/sitecustomize.py && echo hook; \
                p=${PYTHONPATH#*:}; test -e ${p%%:*}/neap/torch/_fit.py && echo package";
    let found = torch(&["--budget", "1GiB"], line, None);
    let expected = "1073741824 1 0 expandable_segments:True\nhook\npackage\n";
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    let flags = ["--budget", "62.5%", "--no-recompute", "--early-updates"];
    let found = torch(&flags, line, Some("max_split_size_mb:64"));
    let expected = "62.500% 0 1 max_split_size_mb:64\nhook\npackage\n";
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
}

#[test]
fn reports_of_all_processes_are_the_answer_with_json() {
    let line = "echo said; echo '{\"pid\": 1}' > $NEAP_TORCH_DIR/report-1.json; \
                echo '{\"pid\": 2}' > $NEAP_TORCH_DIR/report-2.json; echo no > \
                $NEAP_TORCH_DIR/report-3.json";
    let found = torch(&["--budget", "1GiB", "--json"], line, None);
    let reports: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(reports, json!([{"pid": 1}, {"pid": 2}]));
    assert!(text(&found.stderr).contains("said"));
}

#[test]
fn reports_that_are_pipes_or_of_any_size_are_left_out() {
    let line = "cd $NEAP_TORCH_DIR; mkfifo card-1 report-1.json; truncate -s 2G report-2.json; \
                echo '{\"pid\": 3}' > report-3.json; exit 1";
    let found = torch(&["--budget", "1GiB", "--json"], &format!("({line})"), None);
    let reports: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!((reports, found.status.code()), (json!([{"pid": 3}]), Some(1)));
}

#[test]
fn numbers_without_meaning_do_not_end_the_planning_on_the_dry_device() {
    // A script that runs out of memory, makes any plan, and claims to have reserved all bytes.
    let line = "most=18446744073709551615; \
                if test -n \"$NEAP_TORCH_PLAN_ONLY\"; then \
                    echo \"{\\\"budget_bytes\\\": $most}\" > $NEAP_TORCH_SAVE_PLAN; \
                elif test -n \"$NEAP_TORCH_PLAN\"; then \
                    test -n \"$NEAP_DRY_DIR\" && ended=0 || ended=7; \
                    echo \"{\\\"peak_reserved_bytes\\\": $most}\" > $NEAP_TORCH_DIR/report-1.json; \
                    echo \"devices $NEAP_DRY_DEVICES\" >> devices; exit $ended; \
                else \
                    echo \"{\\\"devices\\\": 4294967295, \\\"memory_bytes\\\": $most, \
                        \\\"available_bytes\\\": $most}\" > $NEAP_TORCH_DIR/card-1; exit 1; \
                fi";
    let found = torch(&["--budget", "1GiB"], line, None);
    let said = text(&found.stderr);
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(found.status.code(), Some(7), "{said}");
    assert!(said.contains("starting the command again"), "{said}");
}

#[test]
fn bad_use_runs_nothing() {
    let folder = TempDir::new().unwrap();
    let write = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let other = write("other.json", "{\"format\": \"neap.plan\"}");
    let newer = write("newer.json", "{\"format\": \"neap.torch.schedule\", \"version\": 9}");
    let broken = write("broken.json", "{");
    let socket = folder.path().join("gpu");
    let socket = socket.to_str().unwrap();
    let dead = folder.path().join("dead");
    drop(UnixListener::bind(&dead).unwrap());
    let dead = dead.to_str().unwrap();
    let cases: [(&[&str], &str); 20] = [
        (&["--serve", socket], "--budget"),
        (&["--serve", socket, "--budget", "60%"], "in bytes"),
        (&["--serve", &broken, "--budget", "1GiB"], "is not a socket"),
        (&["--join", socket], "start `neap torch --serve"),
        (&["--join", dead], "no process listens"),
        (&["--join", socket, "--budget", "1GiB"], "--budget"),
        (&[], "--budget"),
        (&["--budget", "min"], "not a budget to run in"),
        (&["--budget", "much"], "budget"),
        (&["--budget", "1GiB", "--device", "abacus"], "abacus"),
        (&["--plan", "/nowhere.json"], "cannot be read"),
        (&["--plan", &broken], "is not JSON"),
        (&["--plan", &other], "neap.torch.schedule"),
        (&["--plan", &newer], "version 9"),
        (&["--serve", socket, "--budget", "1GiB", "--log", "l.jsonl"], "add --mode lanes"),
        (&["--budget", "1GiB", "--mode", "lanes"], "--serve"),
        (
            &["--serve", socket, "--budget", "1GiB", "--mode", "lanes", "--policy", "neap"],
            "give fifo, srtf, pack or fair",
        ),
        (&["--serve", socket, "--budget", "1GiB", "--mode", "lanes", "--strict"], "as they are"),
        (&["--serve", socket, "--budget", "1GiB", "--needs", "1GiB+1GiB"], "--mode lanes"),
        (&["--serve", socket, "--budget", "1GiB", "--needs", "1GiB"], "1.5GiB+6GiB"),
    ];
    for (flags, word) in cases {
        let found = torch(flags, "touch ran; echo ran", None);
        let said = text(&found.stderr);
        assert_eq!(found.status.code(), Some(2), "{flags:?}: {said}");
        assert!(said.contains(word), "{flags:?}: {said}");
        assert!(found.stdout.is_empty(), "{flags:?} ran the command");
    }
}

/// `neap torch --serve`, ended with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A script that joins, with what it reads.
struct Script(UnixStream, BufReader<UnixStream>);

impl Script {
    fn join(socket: &Path, form: &Value) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut script = Self(stream.try_clone().unwrap(), BufReader::new(stream));
        script.say(form);
        script
    }

    fn say(&mut self, form: &Value) {
        self.0.write_all(format!("{form}\n").as_bytes()).unwrap();
    }

    /// The next line.
    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// The bytes of the next offer, taken.
    fn take(&mut self) -> u64 {
        let offer = self.hear();
        let bytes = offer["share_bytes"].as_u64().unwrap();
        self.say(&json!({"took_bytes": bytes}));
        bytes
    }
}

fn serve(socket: &Path, flags: &[&str]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
    command.args(["torch", "--serve"]).arg(socket).args(flags);
    let server = Server(command.stderr(Stdio::null()).spawn().unwrap());
    for _ in 0..600 {
        if socket.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    server
}

#[test]
fn scripts_in_a_lane_take_turns_and_their_log_is_replayed() {
    let folder = TempDir::new().unwrap();
    let (socket, log) = (folder.path().join("gpu"), folder.path().join("log.jsonl"));
    let log = log.to_str().unwrap();
    let flags = ["--budget", "1000MiB", "--mode", "lanes", "--policy", "fair", "--log", log];
    let server = serve(&socket, &flags);
    let mib = |n: u64| n << 20;
    let needs = |kept: u64, within: u64| json!({ "needs": [mib(kept), mib(within)] });
    let ended = |holds: u64, waits: bool| {
        let bytes = mib(holds);
        json!({"ended": {"holds_bytes": bytes, "peak_bytes": bytes, "waits": waits}})
    };
    let mut asks = Script::join(&socket, &json!({"asks": "mode"}));
    assert_eq!(asks.hear(), json!({"mode": "lanes"}));
    let mut first = Script::join(&socket, &json!({"join": "first", "lane": needs(100, 600)}));
    assert_eq!(first.hear(), json!({"go": {"kept": true}}));
    first.say(&ended(700, false));
    // The second one's bytes are there only if the first gives its free memory back.
    let mut second = Script::join(&socket, &json!({"join": "second", "lane": needs(200, 500)}));
    assert_eq!(first.hear(), json!("back"));
    first.say(&ended(700, true));
    assert_eq!(first.hear(), json!("give_back"));
    first.say(&json!({"gave_back_bytes": mib(100)}));
    assert_eq!(second.hear(), json!({"go": {"kept": false}}));
    // What has no room, has no token, or is no script of lanes is left out.
    let mut large = Script::join(&socket, &json!({"join": "large", "lane": needs(900, 900)}));
    assert!(large.hear()["refused"].as_str().unwrap().contains("of 1000.0 MiB here"));
    let mut liar = Script::join(&socket, &json!({"join": "liar", "lane": needs(1, 1)}));
    liar.say(&ended(1, true));
    assert!(liar.hear()["refused"].as_str().unwrap().contains("without the token"));
    let mut shares = Script::join(&socket, &json!({"join": "shares", "fixed_bytes": 5}));
    assert!(shares.hear()["refused"].as_str().unwrap().contains("lanes"));
    // One that dies with the token leaves it to the other.
    drop(second);
    assert_eq!(first.hear(), json!({"go": {"kept": true}}));
    drop(first);
    let both = |text: &str| text.matches("\"left\"").count() == 3;
    for _ in 0..600 {
        if both(&std::fs::read_to_string(log).unwrap()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(server);
    let mut share = Command::new(env!("CARGO_BIN_EXE_neap"));
    let found = share.args(["share", log, "--policies", "fair,srtf", "--json"]).output().unwrap();
    let form: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!((&form["jobs"], &form["capacity_bytes"]), (&json!(2), &json!(mib(1000))));
    let rows = form["policies"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| &row["mechanism"]).collect();
    assert_eq!(names, ["lanes", "lanes", "logged"]);
    assert!(rows.iter().all(|row| row["done"] == 2 && row["moved_bytes"] == 0), "{form}");
}

#[test]
fn scripts_divide_a_budget_as_they_come_and_go() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("gpu");
    let budget = 800u64 << 20;
    let _server = serve(&socket, &["--budget", &budget.to_string()]);
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others may not join");
    let again = torch(&["--budget", "1GiB", "--serve", socket.to_str().unwrap()], "true", None);
    assert!(text(&again.stderr).contains("listens on"), "{}", text(&again.stderr));

    let graph = json!({"join": "first", "graph": fixture("mlp.graph.json")});
    let mut first = Script::join(&socket, &graph);
    assert_eq!(first.take(), budget);
    let mut second =
        Script::join(&socket, &json!({"join": "second", "graph": fixture("mlp.graph.json")}));
    let all = first.take() + second.take();
    assert!((budget - 1..=budget).contains(&all), "{all}");
    // A process that talks nonsense, and one whose graph can't be read, change nothing.
    Script::join(&socket, &json!({"hello": 1}));
    Script::join(&socket, &json!({"join": "third", "graph": "/nowhere"}));
    let mut fixed = Script::join(&socket, &json!({"join": "fourth", "fixed_bytes": 100 << 20}));
    assert_eq!(fixed.take(), 100 << 20);
    let all = first.take() + second.take();
    assert!(((700 << 20) - 1..=700 << 20).contains(&all), "{all}");
    // One that dies says nothing more.
    drop((fixed, second));
    while first.take() != budget {}
}
