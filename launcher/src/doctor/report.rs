//! The report of `memtrace doctor` as data. `--json` prints it, and `text` formats it for people.
//!
//! `launcher/schema/doctor.schema.json` is generated from these types. A field may be added under the same [`VERSION`].
//! Removing or renaming a field, or changing its meaning, raises the version.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::message::without_error_numbers;

/// The version of the JSON format.
const VERSION: u32 = 2;

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CheckStatus {
    /// It works: doctor tried it, or found it in the recording.
    Ok,
    /// Something cannot be recorded. `fix` says what to do.
    Failed,
    /// A fact that is worth knowing. Nothing is missing because of it.
    Note,
    /// The program does not use it, so doctor could not check it.
    Unused,
}

/// A check of one thing.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct Check {
    /// The subject of the check, for example `CUDA driver`.
    pub(crate) name: String,
    /// The result.
    pub(crate) status: CheckStatus,
    /// The result of the check. If the check failed, the reason.
    pub(crate) detail: String,
    /// The fix. Always present if the check failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

impl Check {
    fn new(name: &str, status: CheckStatus, detail: String) -> Check {
        Check { name: name.to_owned(), status, detail: without_error_numbers(&detail), fix: None }
    }

    /// A check that passed.
    pub(crate) fn ok(name: &str, detail: impl Into<String>) -> Check {
        Check::new(name, CheckStatus::Ok, detail.into())
    }

    /// A check that failed, with the reason and the fix.
    pub(crate) fn failed(name: &str, reason: impl Into<String>, fix: impl Into<String>) -> Check {
        Check::new(name, CheckStatus::Failed, reason.into()).with_fix(fix)
    }

    /// A fact that is worth knowing but is not a problem.
    pub(crate) fn note(name: &str, detail: impl Into<String>) -> Check {
        Check::new(name, CheckStatus::Note, detail.into())
    }

    /// A thing that the program does not use, so that it could not be checked.
    pub(crate) fn unused(name: &str, detail: impl Into<String>) -> Check {
        Check::new(name, CheckStatus::Unused, detail.into())
    }

    /// The same check with a fix.
    pub(crate) fn with_fix(self, fix: impl Into<String>) -> Check {
        Check { fix: Some(fix.into()), ..self }
    }

    /// Whether the check failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.status == CheckStatus::Failed
    }
}

/// The report of doctor.
#[derive(Serialize, JsonSchema, Debug)]
#[schemars(title = "memtrace doctor --json")]
pub(crate) struct DoctorReport {
    /// The version of this format.
    pub(crate) version: u32,
    /// The version of memtrace.
    pub(crate) memtrace: &'static str,
    /// Whether no check failed. The exit status is 0 then, else 1.
    pub(crate) ok: bool,
    /// The number of checks that failed.
    pub(crate) failed: usize,
    /// The checks of this machine.
    pub(crate) machine: Machine,
    /// The recording of the command, if one was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) program: Option<Program>,
}

impl DoctorReport {
    /// Combines the results and counts the failed checks.
    pub(crate) fn new(machine: Machine, program: Option<Program>) -> DoctorReport {
        let mut report = DoctorReport {
            version: VERSION,
            memtrace: env!("CARGO_PKG_VERSION"),
            ok: true,
            failed: 0,
            machine,
            program,
        };
        report.failed = report.checks().filter(|(_, check)| check.has_failed()).count();
        report.ok = report.failed == 0;
        report
    }

    /// All checks, each with the Python or the process that it concerns.
    pub(crate) fn checks(&self) -> impl Iterator<Item = (String, &Check)> {
        let machine = &self.machine;
        let checks = machine.checks.iter().map(|c| (String::new(), c));
        let pythons = machine.pythons.iter().flat_map(|p| {
            let pytorch = p.pytorch.iter().map(|t| &t.tested);
            std::iter::once(&p.stacks).chain(pytorch).map(|c| (p.path.clone(), c))
        });
        let program = self.program.iter().flat_map(|program| {
            let processes = program.processes.iter().flat_map(|p| {
                let pytorch = p.pytorch.iter().map(|t| &t.tested);
                p.layers.iter().chain(&p.checks).chain(pytorch).map(|c| (format!("process {}", p.pid), c))
            });
            let others = program.not_recorded.iter().map(|p| (format!("process {}", p.pid), &p.check));
            program.checks.iter().map(|c| (String::new(), c)).chain(processes).chain(others)
        });
        checks.chain(pythons).chain(program)
    }
}

/// This machine.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Machine {
    /// Its host name.
    pub(crate) host: String,
    /// The checks of the system, of limits and of the recorder.
    pub(crate) checks: Vec<Check>,
    /// The GPUs that a program can use here.
    pub(crate) gpus: Vec<Gpu>,
    /// The Python interpreters on PATH.
    pub(crate) pythons: Vec<Python>,
}

/// A GPU.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct Gpu {
    /// Its product name.
    pub(crate) name: String,
    /// Its total memory.
    pub(crate) memory_bytes: u64,
}

/// A Python interpreter.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Python {
    /// The path of the executable.
    pub(crate) path: String,
    /// Whether `python3` or `python` on PATH is this interpreter. Only then can its checks fail.
    pub(crate) is_default: bool,
    /// Its full version. Empty if it did not start.
    pub(crate) version: String,
    /// Its implementation: `cpython`, `pypy`, ...
    pub(crate) implementation: String,
    /// `static`, or the path of its libpython.
    pub(crate) linkage: String,
    /// `release`, `debug`, `free-threaded` or `free-threaded debug`.
    pub(crate) build: String,
    /// Whether memtrace can record its stacks. Doctor recorded a test program and read its frames.
    pub(crate) stacks: Check,
    /// The PyTorch that is installed for it, found by its files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pytorch: Option<PyTorch>,
}

/// A PyTorch installation.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct PyTorch {
    /// The version in its `version.py`, for example `2.11.0+cu130`.
    pub(crate) version: String,
    /// The CUDA version that it was built for. Absent for a build without CUDA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cuda: Option<String>,
    /// Its folder.
    pub(crate) path: String,
    /// Whether the tests of memtrace cover this release.
    pub(crate) tested: Check,
}

/// The recording of the command.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Program {
    /// The command line.
    pub(crate) command: Vec<String>,
    /// How the command ended, as text. Empty if it was not started.
    pub(crate) ending: String,
    /// How long it ran, in seconds.
    pub(crate) seconds: f64,
    /// Whether doctor ended it because of `--seconds`.
    pub(crate) stopped: bool,
    /// The run folder, if `-o` keeps it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) folder: Option<String>,
    /// The checks of the whole run.
    pub(crate) checks: Vec<Check>,
    /// The process images that recorded events.
    pub(crate) processes: Vec<RecordedProcess>,
    /// The processes that could not be recorded.
    pub(crate) not_recorded: Vec<NotRecorded>,
}

/// A recorded process image.
#[derive(Serialize, JsonSchema, Debug)]
#[schemars(rename = "Process")]
pub(crate) struct RecordedProcess {
    /// The process id.
    pub(crate) pid: u32,
    /// Its command line.
    pub(crate) argv: Vec<String>,
    /// The number of recorded events.
    pub(crate) events: u64,
    /// The PyTorch that it used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pytorch: Option<PyTorch>,
    /// The checks of the recorded layers, in a fixed order.
    pub(crate) layers: Vec<Check>,
    /// The number of events by the kind of their stack.
    pub(crate) stacks: StackCounts,
    /// The checks of losses, stacks and the clock.
    pub(crate) checks: Vec<Check>,
    /// The counters of the recorder that are not 0, by name.
    pub(crate) counters: BTreeMap<&'static str, u64>,
}

/// The number of events by the kind of their stack. Each event counts once, under the first kind that applies.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema, Debug)]
pub(crate) struct StackCounts {
    /// Only Python frames.
    pub(crate) python: u64,
    /// Python and native frames.
    pub(crate) merged: u64,
    /// Only native frames.
    pub(crate) native: u64,
    /// No frames, but the autograd node that ran.
    pub(crate) autograd: u64,
    /// Neither frames nor an autograd node.
    pub(crate) none: u64,
    /// Among all these, truncated stacks.
    pub(crate) truncated: u64,
    /// Among all these, stacks with a frame whose definition is missing.
    pub(crate) undefined: u64,
}

/// A process of the command that could not be recorded.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct NotRecorded {
    /// The process id.
    pub(crate) pid: u32,
    /// The path of its executable.
    pub(crate) exe: String,
    /// The reason and the fix. The check failed if the process used CUDA.
    pub(crate) check: Check,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema_file() -> std::path::PathBuf {
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/doctor.schema.json")
    }

    #[test]
    fn the_committed_schema_describes_the_types() {
        let made = serde_json::to_string_pretty(&schemars::schema_for!(DoctorReport)).unwrap() + "\n";
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(schema_file(), &made).unwrap();
        }
        let committed = std::fs::read_to_string(schema_file()).unwrap();
        assert!(made == committed, "run with UPDATE_GOLDEN=1 and look at what changed");
    }

    #[test]
    fn failed_checks_are_counted() {
        let checks = vec![Check::ok("a", "b"), Check::note("c", "d"), Check::unused("e", "f")];
        let machine = |checks| Machine { host: String::new(), checks, gpus: Vec::new(), pythons: Vec::new() };
        let passed = DoctorReport::new(machine(checks.clone()), None);
        assert!(passed.ok && passed.failed == 0);
        let failed = DoctorReport::new(machine([checks, vec![Check::failed("g", "h", "i")]].concat()), None);
        assert!(!failed.ok && failed.failed == 1);
    }
}
