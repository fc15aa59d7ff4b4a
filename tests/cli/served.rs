//! `neap torch --serve` among processes that are no scripts of neap's, and signals at any moment.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli::folder::fixture;

/// A server on a socket in a folder of its own.
pub struct Server {
    child: Child,
    folder: TempDir,
}

impl Server {
    pub fn start(budget: u64) -> Self {
        Self::by(&[&budget.to_string()])
    }

    /// With this budget, and what else the command gets.
    fn by(more: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
        command.args(["torch", "--serve", "gpu", "--budget"]).current_dir(folder.path());
        command.args(more);
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let server = Self { child, folder };
        server.until(|| server.socket().exists());
        server
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("gpu")
    }

    pub fn said(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    fn until(&self, holds: impl Fn() -> bool) {
        let began = Instant::now();
        while !holds() {
            assert!(began.elapsed() < Duration::from_secs(60), "{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill(&self, signal: &str) {
        let number = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &number]).status().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that has connected.
pub struct Client(pub BufReader<UnixStream>);

impl Client {
    pub fn new(server: &Server) -> Self {
        let stream = UnixStream::connect(server.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn joins(server: &Server, form: &Value) -> Self {
        let mut client = Self::new(server);
        client.say(form.to_string().as_bytes());
        client
    }

    fn say(&mut self, line: &[u8]) {
        self.0.get_mut().write_all(&[line, b"\n"].concat()).unwrap();
    }

    /// What it is sent next; null where its connection has ended.
    pub fn hears(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        if line.is_empty() { Value::Null } else { serde_json::from_str(&line).unwrap() }
    }

    /// The share that it is offered, which it takes.
    pub fn takes(&mut self) -> u64 {
        let bytes = self.hears()["share_bytes"].as_u64().unwrap();
        self.say(json!({"took_bytes": bytes}).to_string().as_bytes());
        bytes
    }
}

pub fn fixed(name: &str, bytes: u64) -> Value {
    json!({"join": name, "fixed_bytes": bytes})
}

pub fn graph(name: &str, path: impl AsRef<Path>) -> Value {
    json!({"join": name, "graph": path.as_ref()})
}

#[test]
fn a_graph_that_is_no_file_keeps_no_one_waiting() {
    let server = Server::start(1 << 30);
    let pipe = server.folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut liars = Vec::new();
    for path in [&pipe, Path::new("/dev/zero"), Path::new("/dev/tty"), server.folder.path()] {
        // More than may be under way at once.
        for _ in 0..20 {
            liars.push(Client::joins(&server, &graph("liar", path)));
        }
    }
    let mut honest = Client::joins(&server, &graph("honest", fixture("mlp.graph.json")));
    assert_eq!(honest.takes(), 1 << 30);
    for liar in &mut liars {
        let why = liar.hears()["refused"].as_str().unwrap().to_owned();
        assert!(why.contains("cannot be read"), "{why}");
        assert_eq!(liar.hears(), Value::Null);
    }
}

#[test]
fn a_plan_larger_than_the_budget_is_refused_and_others_keep_what_they_have() {
    let server = Server::start(800 << 20);
    let mut honest = Client::joins(&server, &graph("honest", fixture("mlp.graph.json")));
    assert_eq!(honest.takes(), 800 << 20);
    for bytes in [4 << 30, u64::MAX, 0] {
        let mut big = Client::joins(&server, &fixed("big", bytes));
        let why = big.hears()["refused"].as_str().unwrap().to_owned();
        assert!(why.contains("the plan of big is for") && why.contains("800.0 MiB"), "{why}");
        assert_eq!(big.hears(), Value::Null);
    }
    assert!(server.said().contains("big can't join"), "{}", server.said());
    // Those that fit are granted until nothing is left.
    let mut some = Client::joins(&server, &fixed("some", 500 << 20));
    assert_eq!((some.takes(), honest.takes()), (500 << 20, 300 << 20));
    let mut more = Client::joins(&server, &fixed("more", u64::MAX - (499 << 20)));
    assert!(more.hears()["refused"].is_string());
    let mut rest = Client::joins(&server, &fixed("rest", 300 << 20));
    assert_eq!(rest.takes(), 300 << 20);
    let offer = honest.hears();
    assert!(offer["why"].as_str().unwrap().contains("take the whole budget"), "{offer}");
    assert!(server.said().contains("take the whole budget"), "{}", server.said());
}

#[test]
fn names_and_keys_of_others_do_no_harm() {
    let server = Server::start(1 << 30);
    let mut honest = Client::joins(&server, &graph("honest", fixture("mlp.graph.json")));
    assert_eq!(honest.takes(), 1 << 30);
    let name = format!("x\u{1b}[31m\nerror: forged{}", "y".repeat(60_000));
    let mut later = fixed(&name, 1 << 20);
    later["colour"] = json!(["of", "a", "later", "neap"]);
    let mut long = Client::joins(&server, &later);
    assert_eq!(long.takes(), 1 << 20);
    let offer = honest.hears();
    let why = offer["why"].as_str().unwrap();
    assert!(why.len() < 400 && why.ends_with(" has come") && !why.contains('\n'), "{why}");
    assert!(!server.said().contains('\u{1b}') && !server.said().contains("\nerror"));
    // Who joins twice is left out.
    long.say(fixed("twice", 1).to_string().as_bytes());
    assert!(long.hears()["refused"].as_str().unwrap().contains("joined already"));
    assert_eq!(long.hears(), Value::Null);
}

#[test]
fn signals_at_any_moment_leave_no_socket() {
    for (first, second) in [("-TERM", "-INT"), ("-INT", "-INT"), ("-HUP", "-TERM")] {
        let mut server = Server::start(1 << 30);
        // As soon as the socket is there, and at once again.
        server.kill(first);
        server.kill(second);
        server.child.wait().unwrap();
        let left: Vec<_> = std::fs::read_dir(server.folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{first} {second}: {left:?}");
    }
    // With a command the same.
    let mut server = Server::by(&["1GiB", "--", "sleep", "100"]);
    server.kill("-TERM");
    server.child.wait().unwrap();
    assert!(!server.socket().exists());
}

#[test]
fn a_dead_socket_of_ones_own_is_taken_over() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("gpu");
    drop(UnixListener::bind(&socket).unwrap());
    let serve = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
        command.args(["torch", "--budget", "1GiB", "--serve"]).arg(&socket);
        command.args(["--", "sh", "-c", "echo ready; read line"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut first = serve();
    let mut ready = [0; 6];
    first.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    UnixStream::connect(&socket).unwrap();
    // One that lives stays.
    let second = serve().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.code() == Some(2) && said.contains("listens on"), "{said}");
    UnixStream::connect(&socket).unwrap();
    drop(first.stdin.take());
    first.wait().unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_socket_that_cannot_be_joined_is_refused() {
    let folder = TempDir::new().unwrap();
    let deep = folder.path().join("d".repeat(90));
    std::fs::create_dir(&deep).unwrap();
    for name in ["s".repeat(30), "s".repeat(106), "s".repeat(200)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_neap"));
        command.args(["torch", "--budget", "1GiB", "--serve", &name, "--", "true"]);
        let output = command.current_dir(&deep).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("shorter path"), "{said}");
        assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 0);
    }
}

#[test]
fn without_room_for_files_the_server_waits_and_goes_on() {
    let line = "ulimit -n 40; exec \"$@\"";
    let folder = TempDir::new().unwrap();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", line, "sh", env!("CARGO_BIN_EXE_neap"), "torch", "--budget", "1GiB"]);
    command.args(["--serve", "gpu"]).current_dir(folder.path()).stderr(log);
    let server = Server { child: command.spawn().unwrap(), folder };
    server.until(|| server.socket().exists());
    let idle: Vec<_> = (0..60).map(|_| Client::new(&server)).collect();
    std::thread::sleep(Duration::from_secs(1));
    let ticks = || {
        let path = format!("/proc/{}/stat", server.child.id());
        let text = std::fs::read_to_string(path).unwrap();
        let fields: Vec<&str> = text.rsplit(')').next().unwrap().split(' ').collect();
        fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap()
    };
    let before = ticks();
    std::thread::sleep(Duration::from_secs(2));
    assert!(ticks() - before < 40, "{} of 200 ticks", ticks() - before);
    drop(idle);
    let mut honest = Client::joins(&server, &graph("honest", fixture("mlp.graph.json")));
    assert_eq!(honest.takes(), 1 << 30);
}
