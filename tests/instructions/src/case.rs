//! The cases, and how one is measured.
//!
//! Each is a process of its own: memtrace runs callgrind, which runs Python, which runs `probe.py`. What is counted is the
//! difference of a run of 2 N steps and one of N, so that beginnings and ends fall out. All of a case's events fit into a
//! ring: whether the ring looks full for a moment depends on the launcher's speed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::baseline::Counts;
use crate::callgrind::Profile;
use crate::recording;

/// One case.
#[derive(Debug)]
pub(crate) struct Case {
    /// The kind, and the number of Python frames.
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// N.
    steps: u32,
    /// Options of memtrace.
    options: &'static [&'static str],
}

/// Two reports a pair, and one note of the allocator's totals in 1024 reports: the note is in the average.
const PAIRS: u32 = 512;

/// Every case.
pub(crate) const CASES: &[Case] = &[
    Case { name: "cuda-1", what: "a CUDA tensor made and dropped, the stack unchanged", steps: PAIRS, options: &[] },
    Case { name: "cuda-20", what: "the same, 20 frames deep", steps: PAIRS, options: &[] },
    Case { name: "cuda-60", what: "the same, 60 frames deep", steps: PAIRS, options: &[] },
    Case { name: "lines-20", what: "made on one line, dropped on another", steps: PAIRS, options: &[] },
    Case { name: "callees-20", what: "made in one function, dropped in another", steps: PAIRS, options: &[] },
    Case { name: "new-20", what: "made and dropped in a function never seen before", steps: 128, options: &[] },
    Case {
        name: "modules-20",
        what: "made and dropped in four nn.Modules, one in another",
        steps: PAIRS,
        options: &[],
    },
    Case { name: "blocks-20", what: "the same, each time in others of the same classes", steps: PAIRS, options: &[] },
    Case { name: "forward-20", what: "an autograd node made", steps: PAIRS, options: &[] },
    Case { name: "backward-20", what: "an autograd node run", steps: PAIRS, options: &[] },
    Case { name: "cpu-20", what: "a CPU tensor made and dropped", steps: PAIRS, options: &["--cpu", "always"] },
    Case { name: "driver-20", what: "cuMemAlloc and cuMemFree", steps: PAIRS, options: &[] },
    Case { name: "runtime-20", what: "cudaMalloc and cudaFree, the driver's calls inside", steps: PAIRS, options: &[] },
];

/// Where things are.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) memtrace: PathBuf,
    pub(crate) python: PathBuf,
    /// `probe.py`.
    pub(crate) probe: PathBuf,
    /// The stand-ins' libraries.
    pub(crate) libraries: PathBuf,
    /// A folder for what a run leaves.
    pub(crate) scratch: PathBuf,
}

/// What a case costs.
#[derive(Debug)]
pub(crate) struct Measured {
    /// For all steps.
    pub(crate) profile: Profile,
    pub(crate) steps: u32,
    /// Events that the check has seen.
    pub(crate) events: usize,
}

impl Measured {
    /// For one step, to a tenth.
    pub(crate) fn counts(&self) -> Counts {
        let c_library = self.profile.c_library();
        Counts {
            instructions: self.a_step(self.profile.own()),
            c_library_calls: self.a_step(c_library.count),
            c_library_instructions: self.a_step(c_library.cost),
        }
    }

    /// A number of all steps, for one, to a tenth.
    pub(crate) fn a_step(&self, all: i64) -> f64 {
        (all as f64 * 10.0 / f64::from(self.steps)).round() / 10.0
    }
}

impl Case {
    /// Runs it, checks what was recorded, and counts.
    pub(crate) fn measure(&self, places: &Places) -> Result<Measured> {
        let folder = places.scratch.join(self.name);
        std::fs::create_dir(&folder)?;
        let (run, counts, oracle) = (folder.join("run"), folder.join("callgrind"), folder.join("oracle"));
        let mut command = Command::new(&places.memtrace);
        command.args(["--quiet", "--no-snapshot", "-o"]).arg(&run).args(self.options).arg("--");
        command.args(["valgrind", "--tool=callgrind", "--instr-atstart=no"]);
        command.args(["--dump-instr=yes", "--compress-strings=no", "--compress-pos=no"]);
        command.arg(format!("--callgrind-out-file={}", counts.display()));
        command.arg(&places.python).arg("-sSB").arg(&places.probe);
        command.arg(&places.libraries).arg(self.name).arg(self.steps.to_string()).arg(&oracle);
        command.env("PYTHONHASHSEED", "0").env_remove("PYTHONPATH").env_remove("PYTHONSTARTUP");
        let output = command.output().with_context(|| format!("cannot run {}", places.memtrace.display()))?;
        ensure!(
            output.status.success(),
            "{}: {}\n{}{}",
            self.name,
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        let events = recording::check(&run, &oracle).with_context(|| format!("{}: what was recorded", self.name))?;
        let (n, twice) = (profile(&counts, "n")?, profile(&counts, "2n")?);
        ensure!(n.own() > 0, "{}: callgrind saw no instruction of memtrace's library", self.name);
        Ok(Measured { profile: twice.minus(&n), steps: self.steps, events })
    }
}

/// The part that callgrind wrote for this trigger.
fn profile(counts: &Path, trigger: &str) -> Result<Profile> {
    let wanted = format!("desc: Trigger: Client Request: {trigger}");
    for part in 1.. {
        let path = PathBuf::from(format!("{}.{part}", counts.display()));
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("callgrind wrote nothing for {trigger:?}"))?;
        if text.lines().any(|l| l == wanted) {
            return Profile::parse(&text, |object| object.starts_with("libmemtrace"));
        }
    }
    unreachable!("the loop ends by returning")
}
