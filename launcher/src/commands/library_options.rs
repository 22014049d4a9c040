//! The options that the preloaded library gets, from the command line.

use std::path::Path;

use anyhow::Context;
use memtrace_trace::options::{self, Limit, Options};

use crate::cli::{Attach, Cpu, RecordingOptions, Run};
use crate::{device_samples, gpu};

/// The options of a run that writes into `folder`.
pub(super) fn of_run(run: &Run, token: String, folder: &Path, is_simulated: bool) -> anyhow::Result<Options> {
    let has_gpu = is_simulated || gpu::is_usable();
    Ok(Options {
        cycles: run.cycles,
        holders: run.holders,
        pools: run.pools.into(),
        limit: run.limit.map(|bytes| limit(bytes, is_simulated)).unwrap_or_default(),
        ..of_recording(&run.recording, token, folder, has_gpu)?
    })
}

/// The options of a recording of a running process, which writes into `folder`.
pub(super) fn of_attach(attach: &Attach, token: String, folder: &Path) -> anyhow::Result<Options> {
    of_recording(&attach.recording, token, folder, gpu::is_usable())
}

/// The options that runs and recordings of running processes have. With `has_gpu`, CPU tensors are recorded only on
/// request.
fn of_recording(recording: &RecordingOptions, token: String, folder: &Path, has_gpu: bool) -> anyhow::Result<Options> {
    let folder = std::path::absolute(folder).context("cannot determine the absolute path of the run folder")?;
    let is_auto = recording.cpu == Cpu::Auto;
    let status = std::fs::read_to_string("/proc/self/status");
    Ok(Options {
        cpu: if is_auto && has_gpu { options::Cpu::Never } else { recording.cpu.into() },
        stacks: recording.stacks.into(),
        names: !recording.no_names,
        folder: Some(folder),
        device_usage: !recording.no_device_usage,
        filters: status.map_or(0, |status| options::filters_in(&status)),
        ..Options::new(token)
    })
}

/// The limit for the command. The present use of GPUs of this machine by other programs does not count.
fn limit(bytes: u64, is_simulated: bool) -> Limit {
    Limit { bytes, others: if is_simulated { Vec::new() } else { device_samples::used_now() } }
}
