//! Clients that attack the HTTP servers of `--metrics` and `open --serve`, as any user of the machine can: the
//! recording and the program go on, the servers answer others, and they end when they should.
//!
//! The clients run as another user if the tests run as root.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::http::exchange;
use crate::launcher_support::*;
use crate::metrics::Served;
use crate::serve::Server;

const CLIENT: &str = env!("CARGO_BIN_EXE_http_client");
/// The user id of `nobody`, who attacks.
const ATTACKER: u32 = 65_534;
/// How much more memory the server may take under an attack, in KiB. An endless request alone would take more.
const MEMORY: u64 = 24 << 10;
/// How many more descriptors than its 16 connections the server may have: it also reads files now and then.
const SPARE_DESCRIPTORS: usize = 8;

/// A hostile client. It is killed at the end of the test.
struct Attack {
    client: Running,
    _folder: tempfile::TempDir,
}

impl Attack {
    /// Executes these words, and then waits.
    fn start(address: &str, words: &[&str]) -> Attack {
        let folder = tempfile::tempdir().unwrap();
        // The target folder may be closed to the attacker.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = folder.path().join("client");
        std::fs::copy(CLIENT, &program).unwrap();
        let mut command = Command::new(&program);
        command.arg(address).args(words).args(["say=done", "wait"]).stdin(Stdio::piped()).current_dir("/");
        // SAFETY: `geteuid` has no arguments and always succeeds.
        if unsafe { libc::geteuid() } == 0 {
            command.uid(ATTACKER).gid(ATTACKER);
        }
        Attack { client: Running::start(&mut command), _folder: folder }
    }

    /// The lines that the client prints until it has executed all words.
    fn done(&mut self) -> Vec<String> {
        let lines = std::iter::from_fn(|| Some(self.client.line()).filter(|line| line != "done" && !line.is_empty()));
        lines.collect()
    }

    fn is_running(&mut self) -> bool {
        self.client.child.try_wait().unwrap().is_none()
    }
}

/// A number of a process's status: KiB, or a count.
fn status(pid: i32, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn descriptors(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// A recording with metrics, whose program waits for a line.
fn recorded() -> Served {
    let mut served = Served::producer(&[&"--metrics", &"127.0.0.1:0"], &["events=10", "write", "say=ready", "wait"]);
    assert_eq!(served.launcher.line(), "ready");
    // From here on, the recording opens no more files.
    let run = served.run();
    wait_for(|| !traces(&run).is_empty());
    served
}

/// A server under attack.
trait Attacked {
    fn server(&self) -> String;

    fn pid(&self) -> i32;

    /// A request that is answered with 200, without the empty line at the end of its head.
    fn request(&self) -> String;

    /// Asks until there is an answer: while connections take each other's places, one can be lost.
    fn answers(&self) {
        wait_for(|| exchange(&self.server(), &(self.request() + "\r\n")).is_some_and(|answer| answer.status == 200));
    }

    /// Ends the server, and checks that it ends well.
    fn ends_well(self);
}

impl Attacked for Served {
    fn server(&self) -> String {
        self.address().to_owned()
    }

    fn pid(&self) -> i32 {
        self.launcher.pid()
    }

    fn request(&self) -> String {
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\n".to_owned()
    }

    fn ends_well(mut self) {
        self.say("");
        let run = self.run();
        let (folder, stderr) = self.end_and_keep();
        assert_eq!(manifest(&run)["state"], "ended");
        assert!(!stderr.iter().any(|line| line.contains("panicked") || line.contains("warning")), "{stderr:?}");
        drop(folder);
    }
}

impl Attacked for Server {
    fn server(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn pid(&self) -> i32 {
        self.running.pid()
    }

    fn request(&self) -> String {
        format!("GET /{}/ HTTP/1.1\r\nHost: localhost\r\n", self.token)
    }

    fn ends_well(mut self) {
        self.running.signal(libc::SIGINT);
        let mut text = String::new();
        std::io::Read::read_to_string(&mut self.running.child.stderr.take().unwrap(), &mut text).unwrap();
        assert_eq!((self.exit_code(), &*text), (Some(0), ""));
    }
}

/// Requests with bodies, with wrong lengths, and those that never end.
fn refuses_what_is_no_short_request(attacked: impl Attacked) {
    let status = |request: &str| exchange(&attacked.server(), request).map(|answer| answer.status);
    let with = |headers: &str| status(&format!("{}{headers}\r\n", attacked.request()));
    for length in ["1", "4611686018427387904", "9223372036854775807", "18446744073709551615", "18446744073709551616"] {
        assert_eq!(with(&format!("Content-Length: {length}\r\n")), Some(413), "{length}");
        assert_eq!(with(&format!("Content-Length: {length}\r\nExpect: 100-continue\r\n")), Some(413), "{length}");
    }
    assert_eq!(with("Transfer-Encoding: chunked\r\n"), Some(413));
    for length in ["-1", "x", "1\r\nContent-Length: 2", "0\r\nContent-Length: -0"] {
        assert_eq!(with(&format!("Content-Length: {length}\r\n")), Some(400), "{length}");
    }
    assert_eq!(with("Content-Length: 0\r\n"), Some(200));
    assert_eq!(with(&format!("X: {}\r\n", "x".repeat(8 << 10))), Some(431));
    assert_eq!(with(&"X: y\r\n".repeat(100)), Some(431));
    for garbage in ["\x16\x03\x01\x02\0\x01\0", "GET / HTTP/9.9\r\n\r\n", "get\r\n\r\n", "\0\0\0\0\0", " \r\n\r\n"] {
        assert_eq!(status(garbage), Some(400), "{garbage:?}");
    }
    attacked.answers();
    attacked.ends_well();
}

#[test]
fn metrics_refuse_what_is_no_short_request() {
    refuses_what_is_no_short_request(recorded());
}

#[test]
fn the_served_page_refuses_what_is_no_short_request() {
    refuses_what_is_no_short_request(Server::start());
}

/// The attack takes no memory, threads or descriptors that matter.
fn attack_takes_little(attacked: impl Attacked) {
    attacked.answers();
    let pid = attacked.pid();
    let numbers = || (status(pid, "VmHWM"), status(pid, "Threads"), descriptors(pid));
    let (memory, threads, open) = numbers();
    let words = ["line=40", "header=40", "headers=40", "bytes=40", "requests=200000", "flood=3000", "idle=500"];
    let mut attack = Attack::start(&attacked.server(), &words);
    let mut printed = attack.done();
    assert_eq!(printed.len(), 1, "{printed:?}");
    let answers: usize = printed.remove(0).parse().unwrap();
    assert!(answers <= 1, "one request a connection: {answers}");
    let (more_memory, more_threads, more_open) = numbers();
    assert!(more_memory < memory + MEMORY, "{memory} KiB, then {more_memory} KiB");
    assert!(more_threads <= threads + 1, "{threads} threads, then {more_threads}");
    assert!(more_open <= open + 16 + SPARE_DESCRIPTORS, "{open} descriptors, then {more_open}");
    attacked.answers();
    assert!(attack.is_running());
    attacked.ends_well();
}

#[test]
fn floods_take_little_of_the_metrics() {
    attack_takes_little(recorded());
}

#[test]
fn floods_take_little_of_the_served_page() {
    attack_takes_little(Server::start());
}

/// Clients that are slow or silent keep nobody else from an answer, and the server from its end.
fn slow_clients_keep_nobody_waiting(attacked: impl Attacked) {
    let mut attack = Attack::start(&attacked.server(), &["idle=40", "slow=20", "body=20", "deaf=10"]);
    attack.done();
    (0..20).for_each(|_| attacked.answers());
    // These clients never leave, and they come back whenever they are closed. A server that waits for one hangs here.
    attacked.ends_well();
    assert!(attack.is_running());
}

#[test]
fn slow_clients_delay_neither_scrapes_nor_the_end_of_the_launcher() {
    slow_clients_keep_nobody_waiting(recorded());
}

#[test]
fn slow_clients_delay_neither_the_page_nor_the_end_of_its_server() {
    slow_clients_keep_nobody_waiting(Server::start());
}

/// A head that never ends is given up after some seconds, however often a byte arrives.
#[test]
fn a_slow_head_has_a_deadline() {
    use std::io::{Read, Write};
    const TOO_LONG: usize = 8 << 10;
    let served = recorded();
    let mut stream = std::net::TcpStream::connect(served.address()).unwrap();
    stream.write_all(b"GET /").unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    // A byte every 5 ms at most: the head would be too long after 40 s.
    wait_for(|| {
        sent += 1;
        let is_open = stream.read(&mut [0; 64]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
        !is_open || stream.write_all(b"G").is_err()
    });
    assert!(sent < TOO_LONG / 2, "closed after {sent} bytes");
    served.ends_well();
}

/// 500 connections of another user, and a launcher that may open 300 files: every process is recorded.
#[test]
fn a_flood_of_connections_takes_no_descriptors_from_recording() {
    const PROCESSES: usize = 24;
    let limit = "ulimit -n 300 && exec \"$@\"";
    // All processes are recorded at the same time: each waits until the last one has begun.
    let script = format!(
        "read line; mkfifo $1; for i in $(seq {PROCESSES}); do \"$0\" events=10 write say=ready wait <$1 & done; \
         exec 3>$1; read line; exec 3>&-; wait; echo done; read line"
    );
    let mut command = Command::new("sh");
    command.args(["-c", limit, "sh"]).arg(memtrace()).args(["--metrics", "127.0.0.1:0", "--no-snapshot", "-o"]);
    let folder = tempfile::tempdir().unwrap();
    command.arg(folder.path().join("run")).args(["--", "sh", "-c", &script, PRODUCER]).arg(folder.path().join("fifo"));
    let mut served = Served::of(command, String::new(), folder);
    let mut attack = Attack::start(&served.server(), &["idle=500", "deaf=100", "slow=20"]);
    attack.done();
    served.say("");
    (0..PROCESSES).for_each(|_| assert_eq!(served.launcher.line(), "ready"));
    served.say("");
    assert_eq!(served.launcher.line(), "done");
    let run = served.run();
    assert!(attack.is_running());
    served.say("");
    let (_folder, stderr) = served.end_and_keep();
    assert_eq!(traces(&run).len(), PROCESSES, "{stderr:?}");
    let manifest = manifest(&run);
    assert_eq!(
        (manifest["processes"].as_array().unwrap().len(), &manifest["refused"]),
        (PROCESSES, &serde_json::json!({}))
    );
}

/// More blocks of the driver than are kept: the metrics say so instead of showing a part.
#[test]
fn blocks_beyond_the_bound_end_the_figures_of_their_process() {
    const INTRUDER: &str = env!("CARGO_BIN_EXE_intruder");
    const BLOCKS: u64 = 2_300_000;
    let many = format!("driver={BLOCKS}");
    let words = ["driver=1000", "say=few", "wait", &many, "say=many", "wait"].map(OsStr::new);
    let program: Vec<&OsStr> = [OsStr::new(INTRUDER)].into_iter().chain(words).collect();
    let mut served = Served::command(&[&"--metrics", &"127.0.0.1:0"], &program);
    assert_eq!(served.launcher.line(), "few");
    let owners = |served: &Served| {
        let answer = exchange(served.address(), "GET /metrics HTTP/1.0\r\n\r\n").unwrap().body;
        answer.lines().filter(|line| line.starts_with("memtrace_device_memory_bytes{")).map(str::to_owned).collect()
    };
    let expected = |lines: &Vec<String>| lines.len() == 1 && lines[0].ends_with(" 512000");
    wait_for(|| expected(&owners(&served)));
    let number = |served: &Served, name| served.number(name).unwrap();
    assert_eq!(number(&served, "memtrace_processes_without_figures"), 0);
    assert_eq!(number(&served, "memtrace_events_without_figures_total"), 0);
    served.say("");
    assert_eq!(served.launcher.line(), "many");
    // The launcher keeps up to a bound, and counts the rest.
    wait_for(|| number(&served, "memtrace_events_without_figures_total") >= BLOCKS - (1 << 21));
    assert_eq!(number(&served, "memtrace_processes_without_figures"), 1);
    assert_eq!(owners(&served), Vec::<String>::new(), "no figures rather than a part of them");
    assert!(status(served.pid(), "VmHWM") < 500 << 10, "{} KiB", status(served.pid(), "VmHWM"));
}
