//! Checks of the features that explain memory in a trace: tensor names, module calls, named ranges, garbage collection.

use memtrace_trace::definition::{FREE_THREADED_TOPIC, LabelOrigin, NoticeStatus};
use memtrace_trace::file::Reader;

use super::evidence::{EventCounts, notice_status};
use super::report::Check;
use super::tested;
use super::units::{count, count_text};

fn tested_pytorch() -> String {
    format!("use a tested release of PyTorch: {}", tested::pytorches())
}

/// A reason without the prefix that repeats the name of the check.
fn reason(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, reason)| reason)
}

/// Checks the tensor names.
pub(super) fn names(trace: &Reader) -> Check {
    let name = "Tensor names";
    let names = trace.definitions().tensor_names.len() as u64;
    if let Some((_, text)) = notice_status(trace, FREE_THREADED_TOPIC) {
        let reason = text.split_once(": ").map_or(text, |(_, reason)| reason);
        return Check::failed(name, format!("none: {reason}"), "use a build of CPython with the GIL");
    }
    match notice_status(trace, "torch.names") {
        Some((NoticeStatus::Off, text)) => Check::failed(name, format!("none: {}", reason(text)), tested_pytorch()),
        Some((_, text)) => Check::ok(name, format!("{}; {text}", count(names, "name"))),
        None if names > 0 => Check::ok(name, count(names, "name")),
        None => Check::unused(name, "none recorded: memtrace found no model, or --no-names"),
    }
}

/// Checks the calls of modules.
pub(super) fn modules(trace: &Reader) -> Check {
    let name = "Module calls";
    let calls = trace.definitions().nn_calls.len() as u64;
    match notice_status(trace, "torch.modules") {
        Some((NoticeStatus::Off, text)) => Check::failed(name, format!("none: {text}"), tested_pytorch()),
        Some((_, text)) => Check::ok(name, format!("{}; {text}", count(calls, "different call"))),
        None if calls > 0 => Check::ok(name, count(calls, "different call")),
        None => Check::unused(name, "no module allocated memory, or --no-names"),
    }
}

fn labels(trace: &Reader, origin: LabelOrigin) -> u64 {
    trace.definitions().labels.values().filter(|label| label.origin == origin).count() as u64
}

/// Checks the ranges that the program named through PyTorch.
pub(super) fn ranges(trace: &Reader) -> Check {
    let name = "record_function";
    let ranges = labels(trace, LabelOrigin::RecordFunction);
    match notice_status(trace, "torch.record_function") {
        Some((NoticeStatus::Off, text)) => Check::failed(name, format!("no ranges: {text}"), tested_pytorch()),
        Some((_, text)) => Check::ok(name, format!("{}; {text}", count(ranges, "named range"))),
        None if ranges > 0 => Check::ok(name, count(ranges, "named range")),
        None => Check::unused(name, "PyTorch was not loaded"),
    }
}

/// Checks the ranges that the program named through NVTX.
pub(super) fn nvtx(trace: &Reader) -> Check {
    let name = "NVTX";
    let ranges = labels(trace, LabelOrigin::Nvtx);
    match notice_status(trace, "nvtx") {
        Some((NoticeStatus::Off, text)) => {
            Check::failed(name, format!("no ranges: {text}"), "use NVTX 3, which CUDA 10 and later contain")
        }
        Some((_, text)) => Check::ok(name, format!("{}; {text}", count(ranges, "named range"))),
        None if ranges > 0 => Check::ok(name, count(ranges, "named range")),
        None => Check::unused(name, "the program named no range, or another tool receives NVTX ranges"),
    }
}

/// Checks the detection of frees by the garbage collector.
pub(super) fn collector(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Garbage collector";
    let detail =
        format!("{} of {} during collections", count_text(counts.torch.collected), count(counts.torch.frees, "free"));
    match notice_status(trace, "python.gc") {
        Some((NoticeStatus::Off, text)) => {
            Check::failed(name, text, format!("use a release build of CPython {} with the GIL", tested::pythons()))
        }
        Some((_, text)) => Check::ok(name, format!("{detail}; {text}")),
        None if counts.torch.collected > 0 => Check::ok(name, detail),
        None => Check::unused(name, "Python freed no tensor"),
    }
}
