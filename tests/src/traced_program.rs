//! Starts a program with or without memtrace, over the simulated CUDA.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_trace::event::Event;
use memtrace_trace::file::Reader;

use crate::random_delays::run_with_random_delays;

/// Whether programs run on a real GPU with the machine's own Python (`scripts/gpu-check`) instead of over the simulated
/// CUDA.
pub(crate) fn on_gpu() -> bool {
    std::env::var_os("MEMTRACE_TEST_GPU").is_some()
}

/// The Python of the test environment, or the machine's on a real GPU.
pub fn python() -> &'static str {
    if on_gpu() { "python3" } else { "python" }
}

/// A folder for `PYTHONPATH` that has these packages (`NAME==VERSION`) for the test environment's Python. Installs them
/// on first use.
#[track_caller]
pub fn packages(names: &[&str]) -> String {
    let scripts = root().join("scripts");
    let output = Command::new(scripts.join("sim")).arg(scripts.join("packages")).args(names).output();
    let output = output.expect("scripts/sim");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("a path").trim_end().to_owned()
}

/// The repository's root: `MEMTRACE_ROOT`, or the checkout that compiled this crate.
pub fn root() -> PathBuf {
    if let Some(root) = std::env::var_os("MEMTRACE_ROOT") {
        return root.into();
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

/// The `memtrace` binary: `MEMTRACE_BIN`, or the release build that `scripts/test` makes.
pub fn memtrace() -> PathBuf {
    std::env::var_os("MEMTRACE_BIN").map_or_else(|| release_build("memtrace"), PathBuf::from)
}

/// A file of the release build that `scripts/test` makes.
pub(crate) fn release_build(name: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let path = target.join("release").join(name);
    assert!(path.exists(), "{} is missing: run `cargo build --release` or scripts/test", path.display());
    path
}

/// Resets SIGINT and SIGQUIT to their default disposition in the command. A shell that starts tests in the background
/// makes them, and everything they start, ignore both signals.
pub fn with_default_signals(command: &mut Command) {
    let reset = || {
        for signal in [libc::SIGINT, libc::SIGQUIT] {
            // SAFETY: `signal` is async-signal-safe, so it may run between fork and exec. `SIG_DFL` installs no
            // handler.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only calls `signal`, which is async-signal-safe. It allocates nothing.
    unsafe { command.pre_exec(reset) };
}

/// The option that leaves out readings of the memory in use on devices.
const NO_DEVICE_USAGE: &str = "--no-device-usage";

/// A program to run under memtrace.
#[derive(Clone, Debug)]
pub struct TracedProgram {
    command: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    options: Vec<OsString>,
    sim: bool,
    device_usage: bool,
}

/// A finished run.
#[derive(Debug)]
pub struct Run {
    /// The temporary folder that holds the run folder. Dropping it removes both.
    pub dir: tempfile::TempDir,
    /// The launcher's exit status, stdout and stderr.
    pub output: Output,
}

/// Runs a program again whose end PyTorch aborted. With PyTorch 2.15 and CPython up to 3.13, a thread of autograd that
/// takes the GIL while the interpreter ends is ended by `pthread_exit` (`PyEval_AcquireThread`), through frames of C++
/// that let no exception pass. On busy cores that happens without memtrace, too: 7 of 36 runs of `torch/deep.py`.
pub(crate) fn without_pytorchs_abort<T>(run: impl Fn() -> T, output: impl Fn(&T) -> &Output) -> T {
    const ABORTED: &str = "terminate called without an active exception";
    // The process can be a child of the program.
    let is_aborted =
        |output: &Output| !output.status.success() && String::from_utf8_lossy(&output.stderr).contains(ABORTED);
    let mut ended = run();
    for _ in 0..4 {
        if !is_aborted(output(&ended)) {
            break;
        }
        ended = run();
    }
    ended
}

impl TracedProgram {
    /// A program of `tests/programs`, run by the test environment's Python over the simulated CUDA.
    pub fn python(program: &str, args: &[&str]) -> TracedProgram {
        let mut command: Vec<OsString> = vec![python().into(), root().join("tests/programs").join(program).into()];
        command.extend(args.iter().map(Into::into));
        TracedProgram { command, env: Vec::new(), options: Vec::new(), sim: true, device_usage: true }
    }

    /// Any command.
    pub fn command<S: AsRef<OsStr>>(command: &[S]) -> TracedProgram {
        let command = command.iter().map(|s| s.as_ref().to_owned()).collect();
        TracedProgram { command, env: Vec::new(), options: Vec::new(), sim: false, device_usage: false }
    }

    /// Records readings of the memory in use on devices too. Programs that are not Python are recorded without them, so
    /// that their events are the calls that they make.
    pub fn with_device_usage(mut self) -> TracedProgram {
        self.device_usage = true;
        self
    }

    /// Runs the command through `scripts/sim`.
    pub fn over_simcuda(mut self) -> TracedProgram {
        self.sim = true;
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> TracedProgram {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Preloads a library into the program, before memtrace's. A shell does this, so that it is not preloaded into the
    /// launcher.
    pub fn preload(mut self, library: &Path) -> TracedProgram {
        const SCRIPT: &str = r#"LD_PRELOAD="$0${LD_PRELOAD:+:$LD_PRELOAD}" exec "$@""#;
        let shell = ["sh".into(), "-c".into(), SCRIPT.into(), library.as_os_str().to_owned()];
        self.command.splice(..0, shell);
        self
    }

    /// Starts the command through another one, whose last argument it becomes.
    pub fn through<S: AsRef<OsStr>>(mut self, words: &[S]) -> TracedProgram {
        self.command.splice(..0, words.iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Adds a command line option of memtrace.
    pub fn option(mut self, option: impl AsRef<OsStr>) -> TracedProgram {
        self.options.push(option.as_ref().to_owned());
        self
    }

    /// The command line: recorded into the run folder `dir`, or without memtrace where `dir` is `None`.
    pub fn prepare(&self, dir: Option<&Path>) -> Command {
        let mut words: Vec<OsString> = Vec::new();
        if self.sim && !on_gpu() {
            words.push(root().join("scripts/sim").into());
        }
        if let Some(dir) = dir {
            words.push(memtrace().into());
            words.push("-o".into());
            words.push(dir.into());
            words.extend(self.options.iter().cloned());
            if !self.device_usage && !self.sim && !self.options.iter().any(|option| option == NO_DEVICE_USAGE) {
                words.push(NO_DEVICE_USAGE.into());
            }
            words.push("--".into());
        }
        words.extend(self.command.iter().cloned());
        let mut words = words.into_iter();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
        with_default_signals(&mut command);
        command
    }

    /// Runs the program under memtrace. `MEMTRACE_TEST_DELAYS=SEED` in the environment adds delays
    /// ([`run_with_random_delays`]).
    pub fn run(&self) -> Run {
        if let Some(seed) = std::env::var("MEMTRACE_TEST_DELAYS").ok().and_then(|seed| seed.parse().ok()) {
            return run_with_random_delays(self, seed).0;
        }
        without_pytorchs_abort(
            || {
                let dir = tempfile::Builder::new().prefix("memtrace-test-").tempdir().expect("a temporary folder");
                let output = self.prepare(Some(&dir.path().join("run"))).output().expect("the launcher starts");
                Run { dir, output }
            },
            |run| &run.output,
        )
    }

    /// Runs the program without memtrace.
    pub fn run_alone(&self) -> Output {
        without_pytorchs_abort(|| self.prepare(None).output().expect("the program starts"), |output| output)
    }
}

impl Run {
    /// The run folder.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Fails the test, with the program's output, unless the program ended with status 0.
    #[track_caller]
    pub fn assert_ended_well(&self) {
        assert!(
            self.output.status.success(),
            "{:?}\nstdout: {}\nstderr: {}",
            self.output.status,
            String::from_utf8_lossy(&self.output.stdout),
            String::from_utf8_lossy(&self.output.stderr)
        );
    }

    /// The traces, sorted by file name.
    pub fn traces(&self) -> Vec<Reader> {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(self.path())
            .map(|entries| entries.filter_map(|e| Some(e.ok()?.path())).collect())
            .unwrap_or_default();
        paths.retain(|p| p.extension().is_some_and(|e| e == "mtr"));
        paths.sort();
        paths.into_iter().map(|p| Reader::open(p).expect("a readable trace")).collect()
    }

    /// The trace. Panics unless there is exactly one.
    #[track_caller]
    pub fn trace(&self) -> Reader {
        let mut traces = self.traces();
        assert_eq!(
            traces.len(),
            1,
            "traces in the run folder; stderr: {}",
            String::from_utf8_lossy(&self.output.stderr)
        );
        traces.remove(0)
    }

    /// The parsed `run.json`. Panics if the JSON Schema does not describe it.
    pub fn manifest(&self) -> serde_json::Value {
        let text = std::fs::read_to_string(self.path().join("run.json")).expect("run.json");
        let manifest = serde_json::from_str(&text).expect("run.json is JSON");
        let schema = include_str!("../../analysis/schema/run.schema.json");
        crate::json_schema::assert_valid(&serde_json::from_str(schema).expect("a schema"), &manifest);
        manifest
    }
}

/// All events of a trace. Panics when the trace is damaged or incomplete.
#[track_caller]
pub fn events(reader: &Reader) -> Vec<Event> {
    assert!(reader.damage().is_none(), "{:?}", reader.damage());
    let end = reader.end().expect("the trace has an end");
    assert_eq!((end.lost, end.late), (0, 0), "lost and late events");
    let events: Vec<Event> = reader.events().flat_map(|b| b.expect("a sound block")).collect();
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event.seq, index as u64 + 1, "events are numbered without gaps");
    }
    events
}
