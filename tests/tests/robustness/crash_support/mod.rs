//! A program with or without memtrace that is still running, and the files and processes that it leaves. Shared by the
//! crash tests.
#![allow(dead_code, reason = "every test binary uses its part")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memtrace_tests::ledger::{Calls, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{TracedProgram, with_default_signals};
use memtrace_trace::event::Event;
use memtrace_trace::file::Reader;

/// The longest delay of a call whose process has no answer or no free slots: two seconds, once. The remaining 1.5 s
/// allow for a busy machine.
pub(crate) const STOPPED: Duration = Duration::from_millis(3500);
/// An environment variable of every process of a scenario. The tests find leftover processes by it.
const SCENARIO: &str = "MEMTRACE_TEST_SCENARIO";

/// A program, with or without memtrace, from its start until nothing of it is left.
pub(crate) struct Scenario {
    folder: tempfile::TempDir,
    name: String,
    /// The launcher, or the program itself when it runs without memtrace.
    pub(crate) launcher: Child,
    is_under_memtrace: bool,
    /// A path by which this process reaches the run folder, also when it lies in another mount namespace.
    run: PathBuf,
    disk: Option<std::fs::File>,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// The process id of the program.
    pub(crate) pid: i32,
    /// The numbers that the program printed after its process id.
    pub(crate) addresses: Vec<u64>,
    pub(crate) began: Instant,
}

/// How a scenario ended.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Ending {
    /// The program's exit status in a shell's encoding: 128 + n for signal n.
    pub(crate) code: i32,
    /// The part of the program's stdout that the test has not read before.
    pub(crate) stdout: String,
}

impl Scenario {
    /// Starts a program whose first line is its process id, optionally followed by hexadecimal addresses. `disk` is the
    /// size of the run folder's own tmpfs, in `mount`'s notation; `None` uses the common file system.
    pub(crate) fn start(traced: TracedProgram, under_memtrace: bool, disk: Option<&str>) -> Scenario {
        become_subreaper();
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::Builder::new().prefix("memtrace-test-").tempdir().unwrap();
        let [tmp, mounted] = ["tmp", "disk"].map(|n| folder.path().join(n));
        std::fs::create_dir(&tmp).unwrap();
        std::fs::create_dir(&mounted).unwrap();
        let run = if disk.is_some() { mounted.join("run") } else { folder.path().join("run") };
        let traced =
            traced.option("--quiet").option("--no-device-usage").env("SIMCUDA_LEDGER", folder.path().join("ledger"));
        let traced = traced.env(SCENARIO, &name).env("TMPDIR", &tmp);
        let traced = traced.env("WALL_CLOCK_STEP", folder.path().join("wall-clock-step"));
        let mut command = traced.prepare(under_memtrace.then_some(run.as_path()));
        if let Some(size) = disk {
            command = on_its_own_disk(&command, &mounted, size);
        }
        let began = Instant::now();
        let mut launcher = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(launcher.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let (pid, addresses) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        let pid = pid.parse().unwrap_or_else(|_| panic!("no process id: {line:?}, {}", all_of(launcher.stderr.take())));
        let addresses = addresses.split_whitespace().map(|w| u64::from_str_radix(w, 16).unwrap()).collect();
        // An open folder keeps its file system alive after the mount namespace is gone.
        let disk = disk.map(|_| {
            let root = format!("/proc/{}/root", launcher.id());
            std::fs::File::open(Path::new(&root).join(mounted.strip_prefix("/").unwrap())).unwrap()
        });
        let run = match &disk {
            Some(disk) => format!("/proc/{}/fd/{}/run", std::process::id(), disk.as_raw_fd()).into(),
            None => run,
        };
        let stdin = launcher.stdin.take();
        Scenario {
            folder,
            name,
            launcher,
            is_under_memtrace: under_memtrace,
            run,
            disk,
            stdin,
            stdout,
            pid,
            addresses,
            began,
        }
    }

    /// Starts a program of `tests/programs` over the simulated CUDA, under memtrace.
    pub(crate) fn start_program(source: &str, arguments: &[&str]) -> (ProgramFolder, Scenario) {
        let programs = ProgramFolder::new();
        let program = programs.program(source, "program", &linked_with("libcudart.so.12"));
        let mut command = vec![program.as_os_str()];
        command.extend(arguments.iter().map(OsStr::new));
        let scenario = Scenario::start(with_simcuda(&command), true, None);
        (programs, scenario)
    }

    /// Stops the launcher with SIGSTOP. Returns when it is stopped.
    pub(crate) fn stop_launcher(&self) {
        let launcher = self.launcher.id() as i32;
        kill(launcher, libc::SIGSTOP);
        wait_for("the stop", || state(launcher) == Some('T'));
    }

    /// Lets a stopped launcher continue.
    pub(crate) fn resume_launcher(&self) {
        kill(self.launcher.id() as i32, libc::SIGCONT);
    }

    /// Writes one line to the program's stdin, which makes it continue.
    pub(crate) fn send_line(&mut self) {
        self.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Closes the program's stdin.
    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// The next line of the program's stdout, without the line end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Whether the program runs under memtrace.
    pub(crate) fn is_under_memtrace(&self) -> bool {
        self.is_under_memtrace
    }

    /// The run folder.
    pub(crate) fn run(&self) -> &Path {
        &self.run
    }

    /// A path in the scenario's temporary folder, beside the run folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Uses up all free space of the run folder's own file system.
    pub(crate) fn fill_disk(&self) {
        let path = self.run.parent().unwrap().join("filler");
        let mut filler = std::fs::File::options().create(true).append(true).open(path).unwrap();
        let full = loop {
            while filler.write(&[0; 4096]).is_ok_and(|n| n > 0) {}
            // The launcher may have given back a part of a write that failed.
            if let Err(error) = filler.write(&[0]) {
                break error;
            }
        };
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    }

    /// Frees what [`Self::fill_disk`] has used up, if anything.
    pub(crate) fn free_disk(&self) {
        let _ = std::fs::remove_file(self.run.parent().unwrap().join("filler"));
    }

    /// Waits until the ledger holds at least `bytes` bytes.
    pub(crate) fn wait_for_ledger(&self, bytes: u64) {
        wait_for("the ledger to grow", || self.ledger_bytes() >= bytes);
    }

    /// The size of the ledger in bytes.
    pub(crate) fn ledger_bytes(&self) -> u64 {
        std::fs::metadata(self.folder.path().join("ledger")).map_or(0, |m| m.len())
    }

    /// The calls of every process, as the simulated CUDA counted them. Empty without a ledger.
    pub(crate) fn ledgers(&self) -> std::collections::BTreeMap<u32, Calls> {
        let path = self.folder.path().join("ledger");
        if path.exists() { read_all(&path) } else { Default::default() }
    }

    /// The traces by file name. Panics when a `.mtr` file cannot be read.
    #[track_caller]
    pub(crate) fn traces(&self) -> Vec<(String, Reader)> {
        let mut names: Vec<String> =
            std::fs::read_dir(&self.run).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|n| n.ends_with(".mtr"));
        names.sort();
        names.into_iter().map(|n| (n.clone(), Reader::open(self.run.join(&n)).expect("a readable trace"))).collect()
    }

    /// The number of events in the trace files so far.
    pub(crate) fn written(&self) -> u64 {
        let files = std::fs::read_dir(&self.run).unwrap().filter_map(|e| Some(e.ok()?.path()));
        let traces = files.filter(|p| p.extension().is_some_and(|e| e == "mtr"));
        traces.filter_map(|p| Reader::open(&p).ok()).map(|r| r.event_count()).sum()
    }

    /// The parsed `run.json`.
    #[track_caller]
    pub(crate) fn manifest(&self) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(self.run.join("run.json")).unwrap()).unwrap()
    }

    /// The output of `memtrace report` on the run.
    #[track_caller]
    pub(crate) fn report(&self) -> String {
        let output =
            Command::new(memtrace_tests::traced_program::memtrace()).arg("report").arg(&self.run).output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stdout}");
        String::from_utf8(output.stdout).unwrap() + &stdout
    }

    /// Waits for the end of the launcher, or of the program when it runs without memtrace.
    #[track_caller]
    pub(crate) fn end(&mut self) -> Ending {
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout).unwrap();
        let status = self.launcher.wait().unwrap();
        let code = status.code().or(status.signal().map(|s| 128 + s)).unwrap();
        Ending { code, stdout }
    }

    /// Waits for the end of a program whose launcher was killed.
    #[track_caller]
    pub(crate) fn end_of_orphan(&mut self) -> Ending {
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout).unwrap();
        assert_eq!(self.launcher.wait().unwrap().signal(), Some(libc::SIGKILL));
        Ending { code: wait_for_child(self.pid), stdout }
    }

    /// The launcher's stderr.
    pub(crate) fn launcher_messages(&mut self) -> String {
        all_of(self.launcher.stderr.take())
    }

    /// The ids of the scenario's processes that still exist.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let mark = format!("{SCENARIO}={}", self.name).into_bytes();
        let ours = |pid: &i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|b| *b == 0).any(|variable| variable == mark)
        };
        let names = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        names.filter(ours).collect()
    }

    /// Panics when a process or a file other than the run folder is left.
    #[track_caller]
    pub(crate) fn assert_nothing_is_left(&self) {
        wait_for("every process to be gone", || self.processes().is_empty());
        let files = |path: &Path| -> Vec<String> {
            let entries = std::fs::read_dir(path).map(|all| all.filter_map(|e| e.ok()?.file_name().into_string().ok()));
            entries.map(Iterator::collect).unwrap_or_default()
        };
        assert_eq!(files(&self.folder.path().join("tmp")), [""; 0]);
        let shared: Vec<_> = files(Path::new("/dev/shm")).into_iter().filter(|n| n.contains("memtrace")).collect();
        assert_eq!(shared, [""; 0]);
        let known = |n: &String| {
            n == "run.json"
                || n == "host.jsonl"
                || n == "report.html"
                || n == "sources.json"
                || n == "symbols.json"
                || n.starts_with("summary.")
                || [".mtr", ".pickle", ".unrecorded"].iter().any(|e| n.ends_with(e))
        };
        let strange: Vec<_> = files(&self.run).into_iter().filter(|n| !known(n)).collect();
        assert_eq!(strange, [""; 0], "in the run's folder");
    }
}

impl Drop for Scenario {
    fn drop(&mut self) {
        // A failed test leaves no process running.
        for pid in self.processes() {
            kill(pid, libc::SIGKILL);
        }
        let _ = self.launcher.wait();
    }
}

/// Wraps `command` so that it runs in a mount namespace with a tmpfs of this size at `mounted`.
fn on_its_own_disk(command: &Command, mounted: &Path, size: &str) -> Command {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    let flags = if unsafe { libc::geteuid() } == 0 { "-m" } else { "-Urm" };
    let script = format!(r#"mount -t tmpfs -o size={size} memtrace-test "$0" && exec "$@""#);
    let mut inside = Command::new("unshare");
    inside.args([flags, "sh", "-c", &script]).arg(mounted).arg(command.get_program()).args(command.get_args());
    with_default_signals(&mut inside);
    inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    inside
}

/// Makes this process the parent of its orphaned descendants, so that their exit status can be collected.
fn become_subreaper() {
    static ONCE: Once = Once::new();
    // SAFETY: `PR_SET_CHILD_SUBREAPER` takes an integer and only sets an attribute of this process.
    ONCE.call_once(|| assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) }, 0));
}

/// The exit status of a child or an adopted orphan, in a shell's encoding: 128 + n for signal n.
#[track_caller]
pub(crate) fn wait_for_child(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is a live, writable `c_int` for the duration of the call.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid, "{}", std::io::Error::last_os_error());
    if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}

fn all_of(stream: Option<impl Read>) -> String {
    let mut text = String::new();
    stream.map(|mut s| s.read_to_string(&mut text));
    text
}

/// Sends a signal. A process that is already gone is ignored.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: `kill` takes two integers and touches no memory of this process. `pid` is a process that this test
    // started.
    unsafe { libc::kill(pid, signal) };
}

/// The state letter of a process from `/proc/PID/stat`, or `None` when the process is gone.
pub(crate) fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// The number of the system call that a thread is blocked in, or `None` when it runs or is gone.
pub(crate) fn system_call(tid: i32) -> Option<i64> {
    let call = std::fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
    call.split(' ').next()?.parse().ok()
}

/// Waits until `condition` is true. Panics after five minutes, which is enough also on a very busy machine.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(300), "waiting for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The id of the only thread with this name in a process.
#[track_caller]
pub(crate) fn thread_called(pid: i32, name: impl AsRef<OsStr>) -> i32 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|e| e.unwrap());
    let name = name.as_ref().to_str().unwrap();
    let mut threads =
        threads.filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(|c| c.trim() == name));
    threads.next().expect("the thread").file_name().to_str().unwrap().parse().unwrap()
}

/// All events of the trace in file order, including those whose pair is missing.
#[track_caller]
pub(crate) fn all_events(trace: &Reader) -> Vec<Event> {
    trace.events().flat_map(|block| block.expect("a sound block")).collect()
}
