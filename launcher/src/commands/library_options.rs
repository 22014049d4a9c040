//! The options that the preloaded library gets, from the command line.

use std::path::Path;

use anyhow::Context;
use memtrace_trace::options::{self, Limit, Options};

use crate::cli::{Cpu, RecordingOptions};

/// The options of the library for a session. All that changes the program is off.
///
/// `folder` is the run folder. With `has_gpu`, CPU tensors are recorded only on request.
pub(super) fn library_options(
    recording: &RecordingOptions,
    token: String,
    folder: &Path,
    has_gpu: bool,
) -> anyhow::Result<Options> {
    let folder = std::path::absolute(folder).context("cannot determine the absolute path of the run folder")?;
    let is_auto = recording.cpu == Cpu::Auto;
    let status = std::fs::read_to_string("/proc/self/status");
    Ok(Options {
        token,
        cpu: if is_auto && has_gpu { options::Cpu::Never } else { recording.cpu.into() },
        stacks: recording.stacks.into(),
        names: !recording.no_names,
        folder: Some(folder),
        cycles: false,
        holders: false,
        pools: options::Pools::Keep,
        device_usage: !recording.no_device_usage,
        limit: Limit::default(),
        filters: status.map_or(0, |status| options::filters_in(&status)),
    })
}
