//! The measured cases, and how one is measured.
//!
//! Each case is its own process: memtrace runs callgrind, which runs Python, which runs `probe.py`. The count is the
//! difference between a run of 2 N steps and one of N steps, so that startup and shutdown cancel out. All events of a
//! case fit into one ring, because the cost of a full ring depends on the launcher's speed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::baseline::Counts;
use crate::callgrind::Profile;
use crate::recording;

/// One measured case.
#[derive(Debug)]
pub(crate) struct Case {
    /// The kind, and the number of Python frames.
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// The number of steps in the shorter counted run.
    steps: u32,
    /// Command line options of memtrace.
    options: &'static [&'static str],
}

/// A pair makes two reports, and the allocator's totals are recorded once in 1024 reports. So the average includes that
/// record.
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

/// The files and folders of a measurement.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) memtrace: PathBuf,
    pub(crate) python: PathBuf,
    /// The path of `probe.py`.
    pub(crate) probe: PathBuf,
    /// The folder with the stand-ins' libraries.
    pub(crate) libraries: PathBuf,
    /// The folder for the files of each run.
    pub(crate) scratch: PathBuf,
}

/// The measured cost of a case.
#[derive(Debug)]
pub(crate) struct Measured {
    /// The counts of all steps together.
    pub(crate) profile: Profile,
    pub(crate) steps: u32,
    /// The number of events that were compared with the oracle.
    pub(crate) events: usize,
}

impl Measured {
    /// The counts of one step, rounded to a tenth.
    pub(crate) fn counts(&self) -> Counts {
        let c_library = self.profile.c_library();
        Counts {
            instructions: self.a_step(self.profile.own()),
            c_library_calls: self.a_step(c_library.count),
            c_library_instructions: self.a_step(c_library.cost),
        }
    }

    /// Divides a count of all steps by their number, rounded to a tenth.
    pub(crate) fn a_step(&self, all: i64) -> f64 {
        (all as f64 * 10.0 / f64::from(self.steps)).round() / 10.0
    }
}

impl Case {
    /// Runs the case, compares the trace with the oracle, and counts. Fails when the run fails or the trace differs.
    pub(crate) fn measure(&self, places: &Places) -> Result<Measured> {
        let folder = places.scratch.join(self.name);
        std::fs::create_dir(&folder)?;
        let (run, counts, oracle) = (folder.join("run"), folder.join("callgrind"), folder.join("oracle"));
        let mut command = Command::new(&places.memtrace);
        command.args(["--quiet", "--no-snapshot", "--no-device-usage", "-o"]).arg(&run).args(self.options).arg("--");
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

/// The profile that callgrind wrote for this trigger.
fn profile(counts: &Path, trigger: &str) -> Result<Profile> {
    let header = format!("desc: Trigger: Client Request: {trigger}");
    for part in 1.. {
        let path = PathBuf::from(format!("{}.{part}", counts.display()));
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("callgrind wrote nothing for {trigger:?}"))?;
        if text.lines().any(|l| l == header) {
            return Profile::parse(&text, |object| object.starts_with("libmemtrace"));
        }
    }
    unreachable!("the loop ends by returning")
}
