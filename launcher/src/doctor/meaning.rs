//! Findings about the features that explain memory in a trace: tensor names, module calls, named ranges, garbage
//! collection.

use memtrace_trace::definition::{LabelOrigin, Verdict};
use memtrace_trace::file::Reader;

use super::diagnosis::Finding;
use super::layers::{Tally, verdict};
use super::tested;
use super::units::{count, count_text};

fn tested_pytorch() -> String {
    format!("use a tested release of PyTorch: {}", tested::pytorches())
}

/// A reason without the prefix that repeats the finding's name.
fn reason(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, reason)| reason)
}

/// The finding about tensor names.
pub(super) fn names(trace: &Reader) -> Finding {
    let what = "tensor names";
    let told = trace.definitions().tensor_names.len() as u64;
    match verdict(trace, "torch.names") {
        Some((Verdict::Off, text)) => Finding::off(what, format!("none: {}", reason(text)), tested_pytorch()),
        Some((_, text)) => Finding::ok(what, format!("{}; {text}", count(told, "name"))),
        None if told > 0 => Finding::ok(what, count(told, "name")),
        None => Finding::unused(what, "none told: no model was found with its tensors there, or --no-names"),
    }
}

/// The finding about calls of modules.
pub(super) fn modules(trace: &Reader) -> Finding {
    let what = "module calls";
    let calls = trace.definitions().nn_calls.len() as u64;
    match verdict(trace, "torch.modules") {
        Some((Verdict::Off, text)) => Finding::off(what, format!("none: {text}"), tested_pytorch()),
        Some((_, text)) => Finding::ok(what, format!("{}; {text}", count(calls, "different call"))),
        None if calls > 0 => Finding::ok(what, count(calls, "different call")),
        None => Finding::unused(what, "no allocation within a module, or --no-names"),
    }
}

fn labels(trace: &Reader, origin: LabelOrigin) -> u64 {
    trace.definitions().labels.values().filter(|label| label.origin == origin).count() as u64
}

/// The finding about ranges that the program named through PyTorch.
pub(super) fn ranges(trace: &Reader) -> Finding {
    let what = "record_function";
    let told = labels(trace, LabelOrigin::RecordFunction);
    match verdict(trace, "torch.record_function") {
        Some((Verdict::Off, text)) => Finding::off(what, format!("no ranges: {text}"), tested_pytorch()),
        Some((_, text)) => Finding::ok(what, format!("{}; {text}", count(told, "named range"))),
        None if told > 0 => Finding::ok(what, count(told, "named range")),
        None => Finding::unused(what, "PyTorch was not there to be asked"),
    }
}

/// The finding about ranges that the program named through NVTX.
pub(super) fn nvtx(trace: &Reader) -> Finding {
    let what = "NVTX";
    let told = labels(trace, LabelOrigin::Nvtx);
    match verdict(trace, "nvtx") {
        Some((Verdict::Off, text)) => {
            Finding::off(what, format!("no ranges: {text}"), "use NVTX 3, as CUDA 10 and later bring it")
        }
        Some((_, text)) => Finding::ok(what, format!("{}; {text}", count(told, "named range"))),
        None if told > 0 => Finding::ok(what, count(told, "named range")),
        None => Finding::unused(what, "the program named no range, or another tool listens to NVTX"),
    }
}

/// The finding about frees by the garbage collector.
pub(super) fn collector(trace: &Reader, tally: &Tally) -> Finding {
    let what = "garbage collector";
    let found = format!("{} of {} were its", count_text(tally.collected), count(tally.frees, "free"));
    match verdict(trace, "python.gc") {
        Some((Verdict::Off, text)) => {
            Finding::off(what, text, format!("use a release build of CPython {} with the GIL", tested::pythons()))
        }
        Some((_, text)) => Finding::ok(what, format!("{found}; {text}")),
        None if tally.collected > 0 => Finding::ok(what, found),
        None => Finding::unused(what, "Python freed no tensor"),
    }
}
