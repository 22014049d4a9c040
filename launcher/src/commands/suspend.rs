//! `memtrace suspend` and `memtrace resume`: give back all GPU memory of running processes, and bring it back.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use memtrace_analysis::printable;
use memtrace_analysis::report::size_text;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::cli::{Resume, Suspend};
use crate::device_samples;
use crate::message::{self, WithHelp};
use crate::output::{Printed, Stream};
use crate::proc::ProcessDir;
use crate::signals::EndSignals;
use crate::suspend::{self, CheckpointError, CudaDriver, Failure, Member, NoDriver, ProcessState, Step};

/// Suspends the processes of a tree that use CUDA, all of them or none.
pub(crate) fn suspend(options: &Suspend) -> anyhow::Result<()> {
    let (driver, members) = prepare(options.pid)?;
    if members.iter().all(|member| member.state == ProcessState::Suspended) {
        bail!(WithHelp::new(
            format!("process {} is suspended already", options.pid),
            format!("resume it: memtrace resume {}", options.pid)
        ));
    }
    for member in &members {
        if member.state != ProcessState::Running {
            bail!(WithHelp::new(
                format!("cannot suspend process {}: {}", name(member.pid), state_text(member.state)),
                format!("bring the others back first: memtrace resume {}", options.pid)
            ));
        }
        if let Some(obstacle) = suspend::obstacle(&ProcessDir::of(member.pid)) {
            bail!(WithHelp::new(
                format!("cannot suspend process {}: {obstacle}", name(member.pid)),
                "suspend jobs of one GPU; let a job of several write a checkpoint of its own and end it"
            ));
        }
    }
    let pids = pids(&members);
    let (before, began) = (used_by(&pids), Instant::now());
    let signals = EndSignals::block().context("cannot block signals")?;
    let result = suspend::suspend(&driver, &pids, options.timeout, &mut |step, pid| progress(&signals, step, pid));
    result.map_err(|failure| error("suspend", &failure))?;
    let took = began.elapsed();
    let freed = before.and_then(|before| Some(before.saturating_sub(device_samples::used_by(&pids)?)));
    let what = freed.map_or_else(String::new, |bytes| format!(": {} of GPU memory is free", size_text(bytes)));
    report(options.json, options.pid, &pids, took, freed, &format!("suspended {}{what}", count(&pids)))?;
    message::help(&format!("bring it back: memtrace resume {}", options.pid));
    Ok(())
}

/// Resumes the processes of a tree that are suspended, all of them or none.
pub(crate) fn resume(options: &Resume) -> anyhow::Result<()> {
    let (driver, mut members) = prepare(options.pid)?;
    members.retain(|member| member.state != ProcessState::Running);
    if members.is_empty() {
        bail!(WithHelp::new(
            format!("process {} is not suspended", options.pid),
            "name the process that memtrace suspend named"
        ));
    }
    if let Some(failed) = members.iter().find(|member| member.state == ProcessState::Failed) {
        bail!(WithHelp::new(
            format!("cannot resume process {}: the driver cannot restore it", name(failed.pid)),
            "end it, and start the job again from its own checkpoint"
        ));
    }
    let (pids, began) = (pids(&members), Instant::now());
    let signals = EndSignals::block().context("cannot block signals")?;
    let result = suspend::resume(&driver, &pids, &mut |step, pid| progress(&signals, step, pid));
    result.map_err(|failure| error("resume", &failure))?;
    let took = began.elapsed();
    let used = used_by(&pids);
    let what = used.map_or_else(String::new, |bytes| format!(": {} of GPU memory is back", size_text(bytes)));
    report(options.json, options.pid, &pids, took, used, &format!("resumed {}{what}", count(&pids)))
}

/// The driver, and the processes of the tree that use CUDA.
fn prepare(pid: u32) -> anyhow::Result<(CudaDriver, Vec<Member>)> {
    let process = ProcessDir::of(pid);
    if !process.exists() {
        bail!(WithHelp::new(format!("there is no process {pid}"), "nvidia-smi lists the processes that use a GPU"));
    }
    if process.is_of_another_user() {
        bail!(WithHelp::new(
            format!("process {} belongs to another user", name(pid)),
            "run memtrace as that user or as root"
        ));
    }
    let driver = CudaDriver::load().map_err(|reason| match reason {
        NoDriver::Missing => anyhow!(WithHelp::new(
            "there is no NVIDIA driver: libcuda.so.1 cannot be loaded",
            "run memtrace where the process runs; in a container, with its GPUs"
        )),
        NoDriver::TooOld => anyhow!(WithHelp::new(
            "the NVIDIA driver cannot suspend processes",
            "this needs driver 570 or newer; nvidia-smi shows the version"
        )),
        NoDriver::Failed(error) => anyhow!("the NVIDIA driver cannot be initialized: {}", error.text()),
    })?;
    let members = suspend::members(&driver, pid);
    if members.is_empty() {
        bail!(WithHelp::new(
            format!("neither process {} nor a process that it started uses CUDA", name(pid)),
            "nvidia-smi lists the processes that use a GPU"
        ));
    }
    Ok((driver, members))
}

/// The bytes that the processes use. `None` if NVML does not list them, as in some containers.
fn used_by(pids: &[u32]) -> Option<u64> {
    device_samples::used_by(pids).filter(|bytes| *bytes > 0)
}

fn pids(members: &[Member]) -> Vec<u32> {
    members.iter().map(|member| member.pid).collect()
}

/// Shows a step on a terminal, and returns whether to go on: no signal has asked to end.
fn progress(signals: &EndSignals, step: Step, pid: u32) -> bool {
    if Stream::Stderr.is_terminal() {
        message::status(&format!("{} process {}", step.text(), name(pid)));
    }
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(signals, PollFlags::IN)], Some(&now)) != Ok(1)
}

/// A pid with the name of its program.
fn name(pid: u32) -> String {
    match ProcessDir::of(pid).thread_name(pid) {
        Some(name) if !name.is_empty() => format!("{pid} ({name})"),
        _ => pid.to_string(),
    }
}

fn count(pids: &[u32]) -> String {
    match pids {
        [pid] => format!("process {}", name(*pid)),
        _ => format!("{} processes ({})", pids.len(), list(pids.iter().map(u32::to_string))),
    }
}

fn list(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

fn state_text(state: ProcessState) -> &'static str {
    match state {
        ProcessState::Running => "it runs",
        ProcessState::Locked => "its calls of CUDA wait already",
        ProcessState::Suspended => "it is suspended already",
        ProcessState::Failed => "the driver cannot restore it",
    }
}

/// Prints what was done.
fn report(is_json: bool, pid: u32, pids: &[u32], took: Duration, bytes: Option<u64>, text: &str) -> anyhow::Result<()> {
    let seconds = took.as_secs_f64();
    if is_json {
        let report = json!({ "pid": pid, "processes": pids, "seconds": seconds, "gpu_memory_bytes": bytes });
        return super::write_output(Printed::Json(&format!("{report}\n")), None);
    }
    // The name of a program can have a line end.
    super::write_output(Printed::Text(&(printable::line(&format!("{text} ({seconds:.2} s)")) + "\n")), None)
}

/// The error of a transaction that failed: what failed, and in which state the processes are.
fn error(what: &str, failure: &Failure) -> anyhow::Error {
    let step = |(pid, step, error): &(u32, Step, CheckpointError)| {
        format!("{} process {}: {}", step.text(), name(*pid), error.text())
    };
    let cause = failure.cause.as_ref().map_or_else(|| "interrupted".to_owned(), step);
    let text = format!("cannot {what}: {cause}");
    match &failure.left[..] {
        [] if what == "suspend" => anyhow!(WithHelp::new(text, "all processes go on as before")),
        [] => anyhow!(WithHelp::new(text, "all processes stay suspended; free GPU memory and try again")),
        left => {
            let left = list(left.iter().map(step));
            anyhow!(WithHelp::new(format!("{text}; and {left}"), "try memtrace resume; a process that fails must end"))
        }
    }
}
