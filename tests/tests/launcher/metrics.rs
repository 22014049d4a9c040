//! `--metrics`: scrapes of a running program, parsed by Prometheus' own client library, against what PyTorch counts.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memtrace_tests::traced_program::{TracedProgram, packages, root, with_default_signals};
use serde_json::Value;

use crate::http::exchange;
use crate::launcher_support::{PRODUCER, Running, memtrace};

/// A hang is reported after this time.
const HANG: Duration = Duration::from_secs(120);

/// The samples in both formats: name, labels, value and type.
fn scrape(url: &str, packages: &str) -> [Vec<Value>; 2] {
    let output = Command::new(root().join("scripts/sim"))
        .arg("python")
        .arg(root().join("tests/programs/launcher/scrape.py"))
        .arg(url)
        .env("PYTHONPATH", packages)
        .env("SIM_TORCH", "none")
        .output()
        .expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let both: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    [0, 1].map(|at| both[at].as_array().unwrap().clone())
}

/// The value of the sample with this name, and with this owner.
pub(super) fn value(samples: &[Value], name: &str, owner: Option<&str>) -> Option<u64> {
    let is_it = |sample: &&Value| sample[0] == name && owner.is_none_or(|owner| sample[1]["owner"] == owner);
    samples.iter().find(is_it).map(|sample| sample[2].as_f64().unwrap() as u64)
}

/// A program that is recorded with `--metrics`, and waits for lines on stdin.
pub(super) struct Served {
    pub(super) launcher: Running,
    /// Where the metrics are: a URL, or `unix:` and a path.
    pub(super) url: String,
    packages: String,
    stderr: Option<JoinHandle<Vec<String>>>,
    folder: tempfile::TempDir,
}

impl Served {
    pub(super) fn start(program: TracedProgram) -> Served {
        let packages = packages(&["prometheus_client==0.21.1"]);
        let folder = tempfile::tempdir().unwrap();
        let program = program.option("--metrics").option("127.0.0.1:0").option("--no-snapshot");
        Served::of(program.prepare(Some(&folder.path().join("run"))), packages, folder)
    }

    /// The producer with these words, and these options of memtrace.
    pub(super) fn producer(options: &[&dyn AsRef<OsStr>], words: &[&str]) -> Served {
        let program = [OsStr::new(PRODUCER)].into_iter().chain(words.iter().map(OsStr::new));
        Served::command(options, program.collect::<Vec<_>>().as_slice())
    }

    /// A command, with these options of memtrace.
    pub(super) fn command(options: &[&dyn AsRef<OsStr>], command: &[&OsStr]) -> Served {
        let folder = tempfile::tempdir().unwrap();
        let mut memtrace = Command::new(memtrace());
        memtrace.args(options.iter().map(|option| option.as_ref())).args(["--no-snapshot", "-o"]);
        memtrace.arg(folder.path().join("run")).arg("--").args(command);
        with_default_signals(&mut memtrace);
        Served::of(memtrace, String::new(), folder)
    }

    /// A command of memtrace, which writes its run into this folder.
    pub(super) fn of(mut command: Command, packages: String, folder: tempfile::TempDir) -> Served {
        let mut launcher = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
        let mut stderr = BufReader::new(launcher.child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let url = stderr.find_map(|line| Some(line.split_once("metrics at ")?.1.to_owned())).unwrap();
        // The launcher's messages do not fill the pipe.
        let stderr = Some(std::thread::spawn(move || stderr.collect()));
        Served { launcher, url, packages, stderr, folder }
    }

    /// The address and port of the server.
    pub(super) fn address(&self) -> &str {
        self.url.strip_prefix("http://").and_then(|url| url.strip_suffix("/metrics")).unwrap()
    }

    /// The value of a metric without labels, as text of the server has it now.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        let answer = exchange(self.address(), "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        answer.body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }

    /// The run folder.
    pub(super) fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// Writes a line to the program.
    pub(super) fn say(&mut self, line: &str) {
        self.launcher.child.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Scrapes until both formats have this. Events reach the figures shortly after they happened.
    #[track_caller]
    pub(super) fn until(&self, is_there: impl Fn(&[Value]) -> bool) -> [Vec<Value>; 2] {
        let started = Instant::now();
        loop {
            let [plain, open] = scrape(&self.url, &self.packages);
            if is_there(&plain) && is_there(&open) {
                return [plain, open];
            }
            assert!(started.elapsed() < HANG, "{plain:?}");
        }
    }

    /// Ends the program, which succeeds. Returns what the launcher has written to stderr.
    #[track_caller]
    pub(super) fn end(self) -> Vec<String> {
        self.end_and_keep().1
    }

    /// Ends the program, which succeeds. Returns the folder of the run too.
    #[track_caller]
    pub(super) fn end_and_keep(mut self) -> (tempfile::TempDir, Vec<String>) {
        drop(self.launcher.child.stdin.take());
        let stderr = self.stderr.take().unwrap().join().unwrap();
        assert!(self.launcher.child.wait().unwrap().success(), "{stderr:?}");
        (self.folder, stderr)
    }
}

#[test]
fn prometheus_reads_the_figures_of_a_running_program() {
    let hostile = "trainer-7f\"\\\x1b[2J";
    let program = TracedProgram::python("launcher/served.py", &[]).env("POD_NAME", hostile);
    let mut served = Served::start(program.env("POD_NAMESPACE", "team").env("SLURM_JOB_ID", "4711"));
    let numbers = served.launcher.line();
    let [allocated, reserved] = numbers.split(' ').map(|n| n.parse().unwrap()).collect::<Vec<u64>>()[..] else {
        panic!("{numbers}")
    };
    let both = served.until(|samples| value(samples, "memtrace_allocated_bytes", None) == Some(allocated));
    for samples in &both {
        assert_eq!(value(samples, "memtrace_reserved_bytes", None), Some(reserved));
        assert_eq!(value(samples, "memtrace_device_memory_bytes", Some("PyTorch")), Some(reserved));
        assert_eq!(value(samples, "memtrace_out_of_memory_errors_total", None), Some(0));
        assert!(value(samples, "memtrace_allocations_total", None).unwrap() >= 7, "{samples:?}");
        assert!(value(samples, "memtrace_allocation_bytes_total", None).unwrap() >= 20_000_000, "{samples:?}");
        assert_eq!(value(samples, "memtrace_processes_without_figures", None), Some(0));
        let kinds: Vec<&Value> =
            samples.iter().filter(|s| s[0] == "memtrace_allocations_total").map(|s| &s[3]).collect();
        assert_eq!(kinds, ["counter"]);
        let labels = &samples.iter().find(|sample| sample[0] == "memtrace_allocated_bytes").unwrap()[1];
        assert!(labels["device"] == "0" && labels["pid"].as_str().unwrap().parse::<u32>().is_ok(), "{labels}");
        let workload = ["pod", "namespace", "slurm_job", "user"].map(|name| labels[name].as_str().unwrap().to_owned());
        assert_eq!(workload, ["trainer-7f\"\\\u{fffd}[2J", "team", "4711", &user_name()]);
    }
    served.say("");
    assert_eq!(served.launcher.line(), "out of memory");
    served.until(|samples| value(samples, "memtrace_out_of_memory_errors_total", None) == Some(1));
    served.say("");
    let (folder, _) = served.end_and_keep();
    let manifest = std::fs::read(folder.path().join("run/run.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let workload = &manifest["processes"][0]["workload"];
    assert_eq!((&workload["namespace"], &workload["user"]), (&"team".into(), &user_name().into()), "{workload}");
    assert_eq!(workload["pod"], "trainer-7f\"\\\u{fffd}[2J");
}

/// The name of the user who runs this test, as `id` prints it.
fn user_name() -> String {
    let output = Command::new("id").arg("-un").output().expect("id starts");
    String::from_utf8(output.stdout).expect("a name").trim().to_owned()
}

#[test]
fn an_address_in_use_is_an_error_before_the_command_starts() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let output = TracedProgram::command(&["echo", "started"])
        .option("--metrics")
        .option(&address)
        .prepare(Some(&run))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), &*output.stdout), (Some(125), &b""[..]), "{stderr}");
    assert!(stderr.contains(&format!("error: cannot serve metrics on {address}: ")) && !run.exists(), "{stderr}");
}
