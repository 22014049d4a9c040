//! Checks that what the options of a command select is in the run. Every command answers alike.

use anyhow::{bail, ensure};
use memtrace_analysis::report::DiffRun;
use memtrace_analysis::{Process, Run};

use crate::message::WithHelp;

/// The selection by `--rank`, `--pid` and `--device`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Selected {
    pub(super) rank: Option<u32>,
    pub(super) pid: Option<u32>,
    pub(super) device: Option<i16>,
}

impl Selected {
    /// Whether it selects a process. Its devices do not matter.
    pub(super) fn has_process(&self, process: &Process) -> bool {
        self.rank.is_none_or(|rank| process.rank() == Some(rank)) && self.pid.is_none_or(|pid| process.pid() == pid)
    }

    /// Fails if the run lacks the process, or if no selected process has the device.
    pub(super) fn ensure_in(&self, run: &Run) -> anyhow::Result<()> {
        let path = run.path().display();
        let selected = || run.processes().iter().filter(|process| self.has_process(process));
        if selected().next().is_none() {
            let what = match (self.rank, self.pid) {
                (Some(rank), _) => format!("process of rank {rank}"),
                (None, Some(pid)) => format!("process {pid}"),
                (None, None) => "process".to_owned(),
            };
            bail!(WithHelp::new(format!("{path} has no {what}"), format!("its processes are {}", list(run))));
        }
        let Some(device) = self.device else { return Ok(()) };
        let has = |process: &Process| process.trace_index().sources.contains_key(&device);
        if selected().any(has) {
            return Ok(());
        }
        let mut devices: Vec<i16> =
            selected().flat_map(|process| process.trace_index().sources.keys().copied()).collect();
        devices.sort_unstable();
        devices.dedup();
        let devices: Vec<String> = devices.iter().map(i16::to_string).collect();
        bail!(WithHelp::new(
            format!("{path} has no events of device {device}"),
            format!("its devices are {}", devices.join(", "))
        ))
    }
}

/// Fails if a run of a comparison lacks the step that is to be compared.
pub(super) fn ensure_step(run: &DiffRun) -> anyhow::Result<()> {
    let Some(step) = run.step else { return Ok(()) };
    let help = match run.steps {
        0 => "leave out --steps".to_owned(),
        1 => "its only step is 0".to_owned(),
        steps => format!("its steps are 0 to {}", steps - 1),
    };
    ensure!(step < run.steps, WithHelp::new(format!("{} has no step {step}", run.path), help));
    Ok(())
}

/// The processes of a run: `rank0 (pid 17), rank1 (pid 18)`.
fn list(run: &Run) -> String {
    let processes = run.processes().iter().zip(run.process_names());
    // A snapshot of PyTorch does not know its process.
    let name = |(process, name): (&Process, String)| match process.pid() {
        0 => name,
        pid => format!("{name} (pid {pid})"),
    };
    processes.map(name).collect::<Vec<_>>().join(", ")
}
