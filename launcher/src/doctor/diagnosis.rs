//! The results of `memtrace doctor` as data. `--json` prints them, and `text` formats them for people.
//!
//! `launcher/schema/doctor.schema.json` is generated from these types. A field may be added under the same [`VERSION`].
//! Removing a field or changing its meaning raises the version.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

/// The version of the JSON format.
const VERSION: u32 = 1;

/// What is the matter with one thing.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// It works, and that was tried or seen.
    Ok,
    /// Something that could be recorded is not: `mend` says what to do. These make the answer "no".
    Off,
    /// Worth knowing; nothing is missing because of it.
    Note,
    /// Not used here, so there was nothing to see.
    Unused,
}

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct Finding {
    /// What was looked at, e.g. `CUDA driver`.
    pub(crate) what: String,
    pub(crate) state: State,
    /// What was found; where something is off, why.
    pub(crate) found: String,
    /// What to do about it. Always there where `state` is `off`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mend: Option<String>,
}

impl Finding {
    /// A finding that the thing works.
    pub(crate) fn ok(what: &str, found: impl Into<String>) -> Finding {
        Finding { what: what.to_owned(), state: State::Ok, found: found.into(), mend: None }
    }

    /// A finding that the thing does not work, with the reason and the fix.
    pub(crate) fn off(what: &str, why: impl Into<String>, mend: impl Into<String>) -> Finding {
        Finding { what: what.to_owned(), state: State::Off, found: why.into(), mend: Some(mend.into()) }
    }

    /// A finding that is worth knowing but is not a problem.
    pub(crate) fn note(what: &str, found: impl Into<String>) -> Finding {
        Finding { what: what.to_owned(), state: State::Note, found: found.into(), mend: None }
    }

    /// A finding that the thing is not used, so nothing could be checked.
    pub(crate) fn unused(what: &str, found: impl Into<String>) -> Finding {
        Finding { what: what.to_owned(), state: State::Unused, found: found.into(), mend: None }
    }

    /// The same finding with a suggestion.
    pub(crate) fn with_mend(self, mend: impl Into<String>) -> Finding {
        Finding { mend: Some(mend.into()), ..self }
    }

    /// Whether the finding is a problem, which makes the result "no".
    pub(crate) fn is_off(&self) -> bool {
        self.state == State::Off
    }
}

/// The whole answer.
#[derive(Serialize, JsonSchema, Debug)]
#[schemars(title = "memtrace doctor --json")]
pub(crate) struct Diagnosis {
    /// The version of this form.
    pub(crate) version: u32,
    /// The version of memtrace.
    pub(crate) memtrace: &'static str,
    /// Whether all that can be seen here is seen: the exit status is 0 where it is, else 1.
    pub(crate) ok: bool,
    /// How many things are off.
    pub(crate) off: usize,
    pub(crate) machine: Machine,
    /// Where a command was given: what came of recording it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) program: Option<Program>,
}

impl Diagnosis {
    /// Combines the results and counts the problems.
    pub(crate) fn new(machine: Machine, program: Option<Program>) -> Diagnosis {
        let mut diagnosis =
            Diagnosis { version: VERSION, memtrace: env!("CARGO_PKG_VERSION"), ok: true, off: 0, machine, program };
        diagnosis.off = diagnosis.findings().filter(|(_, f)| f.is_off()).count();
        diagnosis.ok = diagnosis.off == 0;
        diagnosis
    }

    /// All findings, each with the place that it concerns.
    pub(crate) fn findings(&self) -> impl Iterator<Item = (String, &Finding)> {
        let machine = &self.machine;
        let checks = machine.checks.iter().map(|f| (String::new(), f));
        let pythons = machine.pythons.iter().flat_map(|p| {
            let pytorch = p.pytorch.iter().map(|t| &t.tested);
            std::iter::once(&p.stacks).chain(pytorch).map(|f| (p.path.clone(), f))
        });
        let program = self.program.iter().flat_map(|program| {
            let processes = program.processes.iter().flat_map(|p| {
                let pytorch = p.pytorch.iter().map(|t| &t.tested);
                p.layers.iter().chain(&p.checks).chain(pytorch).map(|f| (format!("process {}", p.pid), f))
            });
            let others = program.not_recorded.iter().map(|p| (format!("process {}", p.pid), &p.why));
            program.checks.iter().map(|f| (String::new(), f)).chain(processes).chain(others)
        });
        checks.chain(pythons).chain(program)
    }
}

/// This machine.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Machine {
    /// Its name.
    pub(crate) host: String,
    pub(crate) checks: Vec<Finding>,
    /// The GPUs that a program here can use.
    pub(crate) gpus: Vec<Gpu>,
    /// The Pythons on PATH.
    pub(crate) pythons: Vec<Python>,
}

/// A GPU.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    /// All of its memory.
    pub(crate) memory_bytes: u64,
}

/// A Python.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Python {
    /// Where it was found.
    pub(crate) path: String,
    /// Whether `python3` or `python` means this one here. Only then does it count against the answer.
    pub(crate) is_default: bool,
    /// Its full version; empty where it could not be started.
    pub(crate) version: String,
    /// `cpython`, `pypy`, ...
    pub(crate) implementation: String,
    /// `static`, or the libpython it uses.
    pub(crate) linkage: String,
    /// `release`, `debug`, `free-threaded`, `free-threaded debug`.
    pub(crate) build: String,
    /// Whether its stacks can be taken: it was started under the recorder, which looked at its frames.
    pub(crate) stacks: Finding,
    /// The PyTorch installed for it, by its files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pytorch: Option<PyTorch>,
}

/// A PyTorch.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct PyTorch {
    /// As its `version.py` has it, e.g. `2.11.0+cu130`.
    pub(crate) version: String,
    /// The CUDA it was built for; absent in a build without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cuda: Option<String>,
    /// Its folder.
    pub(crate) path: String,
    /// Whether memtrace's tests have met this release.
    pub(crate) tested: Finding,
}

/// What came of recording a program.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Program {
    /// The command line.
    pub(crate) command: Vec<String>,
    /// How it ended, in words; empty where it was not started.
    pub(crate) ending: String,
    /// How long it ran.
    pub(crate) seconds: f64,
    /// Whether it was ended by doctor, as `--seconds` asked.
    pub(crate) stopped: bool,
    /// The run folder, where `-o` kept it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) folder: Option<String>,
    pub(crate) checks: Vec<Finding>,
    /// The process images that recorded something.
    pub(crate) processes: Vec<Process>,
    /// Processes that memtrace could not see into.
    pub(crate) not_recorded: Vec<Stranger>,
}

/// A recorded process image.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Its command line.
    pub(crate) argv: Vec<String>,
    /// Events recorded.
    pub(crate) events: u64,
    /// The PyTorch it used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pytorch: Option<PyTorch>,
    /// The layers that can be seen, in a fixed order.
    pub(crate) layers: Vec<Finding>,
    pub(crate) stacks: Stacks,
    /// Losses and the clock.
    pub(crate) checks: Vec<Finding>,
    /// Every count of the recorder that is not 0, by name.
    pub(crate) counters: BTreeMap<&'static str, u64>,
}

/// What explains the events of a process: each is counted once, under the first that applies.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema, Debug)]
pub(crate) struct Stacks {
    /// Python frames alone.
    pub(crate) python: u64,
    /// Python and native frames.
    pub(crate) merged: u64,
    /// Native frames alone.
    pub(crate) native: u64,
    /// No frames, but the autograd node that was running.
    pub(crate) autograd: u64,
    /// Nothing.
    pub(crate) none: u64,
    /// Among all these: stacks that were cut.
    pub(crate) cut: u64,
    /// Among all these: stacks with a frame whose definition is missing.
    pub(crate) unreadable: u64,
}

/// A process of the program's tree that recorded nothing because memtrace was not in it.
#[derive(Clone, PartialEq, Eq, Serialize, JsonSchema, Debug)]
pub(crate) struct Stranger {
    pub(crate) pid: u32,
    /// The program it ran.
    pub(crate) exe: String,
    pub(crate) why: Finding,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema_file() -> std::path::PathBuf {
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/doctor.schema.json")
    }

    #[test]
    fn the_schema_is_what_the_types_say() {
        let made = serde_json::to_string_pretty(&schemars::schema_for!(Diagnosis)).unwrap() + "\n";
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(schema_file(), &made).unwrap();
        }
        let committed = std::fs::read_to_string(schema_file()).unwrap();
        assert!(made == committed, "run with UPDATE_GOLDEN=1 and look at what changed");
    }

    #[test]
    fn what_is_off_is_counted_and_nothing_else() {
        let checks = vec![Finding::ok("a", "b"), Finding::note("c", "d"), Finding::unused("e", "f")];
        let machine = |checks| Machine { host: String::new(), checks, gpus: Vec::new(), pythons: Vec::new() };
        let all_well = Diagnosis::new(machine(checks.clone()), None);
        assert!(all_well.ok && all_well.off == 0);
        let off = Diagnosis::new(machine([checks, vec![Finding::off("g", "h", "i")]].concat()), None);
        assert!(!off.ok && off.off == 1);
    }
}
