//! Checks of each layer in the trace of one process: recorded, off with a reason, or not used.

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::event::Source;
use memtrace_trace::file::Reader;

use super::evidence::{EventCounts, notice_status};
use super::report::Check;
use super::units::{count, count_text};
use super::{features, tested};

/// The checks of all layers, in a fixed order.
pub(super) fn layers(trace: &Reader, counts: &EventCounts) -> Vec<Check> {
    vec![
        driver(trace, counts),
        runtime(counts),
        tracker(trace, counts),
        reporter(trace, counts),
        cpu_tensors(counts),
        python_stacks(trace, counts),
        native_stacks(counts),
        nodes(trace, counts),
        forward_stacks(trace, counts),
        grad_mode(trace, counts),
        features::names(trace),
        features::modules(trace),
        features::ranges(trace),
        features::nvtx(trace),
        features::collector(trace, counts),
    ]
}

fn driver(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "CUDA driver";
    let unwrapped = trace.counter(Counter::UnwrappedEntryPoints);
    let missing = trace.counter(Counter::OriginalsMissing);
    let (driver, runtime) = (counts.from(Source::Driver), counts.from(Source::Runtime));
    if unwrapped > 0 {
        Check::failed(
            name,
            format!(
                "{} requested under a version that memtrace does not hook; their allocations are not recorded",
                count(unwrapped, "function")
            ),
            "use a newer memtrace, or an older CUDA release",
        )
    } else if missing > 0 {
        Check::failed(
            name,
            format!("{} had no original function and returned an error, as without memtrace", count(missing, "call")),
            "install the driver and the CUDA libraries of the same release",
        )
    } else if driver > 0 {
        Check::ok(name, count(driver, "event"))
    } else if runtime > 0 {
        Check::failed(
            name,
            "the CUDA runtime calls the driver in a way that memtrace does not record",
            "use the CUDA runtime of CUDA 11.3 or later",
        )
    } else {
        Check::unused(name, "no memory call")
    }
}

fn runtime(counts: &EventCounts) -> Check {
    match counts.from(Source::Runtime) {
        0 if counts.from(Source::Driver) > 0 => {
            Check::unused("CUDA runtime", "not used, or linked statically; the events of the driver contain the same")
        }
        0 => Check::unused("CUDA runtime", "no memory call"),
        n => Check::ok("CUDA runtime", count(n, "event")),
    }
}

fn tracker(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Allocator tracker";
    let events = counts.from(Source::Torch);
    match notice_status(trace, "torch.tracker") {
        Some((NoticeStatus::Off, text)) => {
            let reason = text.split_once(';').map_or(text, |(reason, _)| reason);
            if reason.contains("not PyTorch's native") {
                // `cudaMallocAsync` and other allocators keep no blocks of their own.
                return Check::unused(name, reason);
            }
            let tested = tested::pytorches();
            let fix =
                format!("use a release of PyTorch whose allocator has a tracker interface; tested releases: {tested}");
            Check::failed(name, format!("{reason}; sizes are rounded, segments and streams are missing"), fix)
        }
        Some((_, text)) => Check::ok(name, format!("{}; {text}", count(events, "event"))),
        None if events > 0 => Check::ok(name, format!("{}; verified in the parent process", count(events, "event"))),
        None => Check::unused(name, "PyTorch's CUDA allocator was not used"),
    }
}

fn reporter(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Profiler reporter";
    let mismatches = trace.counter(Counter::ReporterMismatches);
    let fallback = counts.from(Source::TorchReporter);
    if mismatches > 0 {
        Check::failed(
            name,
            format!(
                "{} differ from the allocator tracker, so their rounded sizes are unknown",
                count(mismatches, "report")
            ),
            "report it with this output",
        )
    } else if fallback > 0 {
        Check::ok(name, format!("{}, instead of the allocator tracker", count(fallback, "event")))
    } else if counts.blocks > 0 && counts.rounded == 0 {
        Check::failed(
            name,
            "PyTorch does not call it, so the rounded sizes of blocks are unknown",
            format!("use a tested release of PyTorch: {}", tested::pytorches()),
        )
    } else if counts.rounded > 0 {
        Check::ok(
            name,
            format!("{} of {} with their rounded size", count_text(counts.rounded), count(counts.blocks, "block")),
        )
    } else {
        Check::unused(name, "PyTorch's CUDA allocator was not used")
    }
}

fn cpu_tensors(counts: &EventCounts) -> Check {
    let name = "CPU tensors";
    let cuda =
        [Source::Torch, Source::TorchReporter, Source::Driver, Source::Runtime].iter().any(|s| counts.from(*s) > 0);
    match counts.from(Source::TorchCpu) {
        0 if cuda => {
            Check::unused(name, "not recorded because a CUDA device is used; memtrace --cpu always records them")
        }
        0 => Check::unused(name, "none allocated"),
        n => Check::ok(name, count(n, "event")),
    }
}

fn python_stacks(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Python stacks";
    let events = counts.stacks.python + counts.stacks.merged;
    match notice_status(trace, "python") {
        Some((NoticeStatus::Off, text)) => {
            Check::failed(name, text, format!("use a release build of CPython {} with the GIL", tested::pythons()))
        }
        Some((_, text)) => Check::ok(name, format!("{}; {text}", count(events, "event"))),
        None if events > 0 => Check::ok(name, count(events, "event")),
        None => Check::unused(name, "no event came from Python code"),
    }
}

fn native_stacks(counts: &EventCounts) -> Check {
    let name = "Native stacks";
    match counts.stacks.native + counts.stacks.merged {
        0 => {
            Check::unused(name, "every event has a Python stack or an autograd node; memtrace --stacks both adds them")
        }
        n => Check::ok(name, count(n, "event")),
    }
}

fn nodes(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Autograd nodes";
    let detail =
        format!("{} of {} in backward", count_text(counts.torch.with_node), count(counts.torch.in_backward, "event"));
    let fix = || format!("use a tested release of PyTorch: {}", tested::pytorches());
    match notice_status(trace, "torch.autograd") {
        Some((NoticeStatus::Off, text)) => Check::failed(name, text, fix()),
        _ if counts.torch.in_backward == 0 => Check::unused(name, "no allocation in backward"),
        _ if counts.torch.with_node == 0 => Check::failed(name, detail, fix()),
        Some((_, text)) => match notice_status(trace, "torch.python_node") {
            Some((NoticeStatus::Off, node)) => Check::failed(name, format!("{detail}; {node}"), fix()),
            _ => Check::ok(name, format!("{detail}; {text}")),
        },
        None => Check::ok(name, detail),
    }
}

fn forward_stacks(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Forward stacks";
    let detail = format!(
        "{} of {} in backward",
        count_text(counts.torch.with_forward),
        count(counts.torch.in_backward, "event")
    );
    let lost = trace.counter(Counter::ForwardStacksLost);
    if counts.torch.in_backward == 0 {
        Check::unused(name, "no allocation in backward")
    } else if counts.torch.with_forward == 0 {
        Check::failed(
            name,
            format!("{detail}; no autograd node has a known forward call"),
            format!("use a tested release of PyTorch: {}", tested::pytorches()),
        )
    } else if lost > 0 {
        let text =
            format!("{detail}; {} older than the recording, or than the last million nodes", count(lost, "node"));
        Check::note(name, text)
    } else {
        Check::ok(name, detail)
    }
}

fn grad_mode(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Grad mode";
    let detail = format!("{} of {}", count_text(counts.torch.grad_known), count(counts.torch.events, "event"));
    if counts.torch.events == 0 {
        Check::unused(name, "PyTorch allocated nothing")
    } else if counts.torch.grad_known == 0 {
        Check::failed(
            name,
            format!("{detail}; PyTorch does not report it, so only autograd nodes distinguish inference from training"),
            format!("use a tested release of PyTorch: {}", tested::pytorches()),
        )
    } else {
        match notice_status(trace, "torch.grad_mode") {
            Some((_, text)) => Check::ok(name, format!("{detail}; {text}")),
            None => Check::ok(name, detail),
        }
    }
}

/// The checks of losses in the trace, its stacks and its clock.
pub(super) fn checks(trace: &Reader, counts: &EventCounts) -> Vec<Check> {
    vec![losses(trace, counts), stacks(counts), clock(trace)]
}

fn losses(trace: &Reader, counts: &EventCounts) -> Check {
    let name = "Losses";
    let (lost, late) = trace.end().map_or((0, 0), |e| (e.lost, e.late));
    let damage = trace.damage();
    let counter = |c| trace.counter(c);
    let parts = [
        (lost, "event lost", "events lost"),
        (counter(Counter::EventsDropped), "event not recorded", "events not recorded"),
        (late, "event out of order", "events out of order"),
        (counter(Counter::DefinitionsDropped), "name or stack lost", "names and stacks lost"),
        (counter(Counter::Panics), "panic inside a hook", "panics inside hooks"),
        (counter(Counter::UnknownActions), "event of an unknown kind", "events of unknown kinds"),
        (counts.damaged + u64::from(!damage.is_none()), "damaged part of the file", "damaged parts of the file"),
        (u64::from(trace.end().is_none()), "missing end of the file", "missing ends of the file"),
    ];
    let losses: Vec<String> = parts
        .iter()
        .filter(|(n, ..)| *n > 0)
        .map(|(n, one, many)| format!("{} {}", count_text(*n), if *n == 1 { one } else { many }))
        .collect();
    if losses.is_empty() {
        return Check::ok(name, format!("none of {}", count(counts.events, "event")));
    }
    let text = losses.join(", ");
    if counter(Counter::EventsDropped) > 0 && trace.definitions().notices.iter().any(|n| &*n.topic == "pause") {
        return Check::note(name, format!("{text}; the program paused the recording"));
    }
    Check::failed(
        name,
        text,
        "give the launcher a CPU core of its own (taskset, a larger CPU request) and free disk space",
    )
}

fn stacks(counts: &EventCounts) -> Check {
    let name = "Stacks";
    let s = counts.stacks;
    let parts = [
        (s.python, "Python"),
        (s.merged, "Python and native"),
        (s.native, "native"),
        (s.autograd, "autograd node only"),
        (s.none, "none"),
    ];
    let mut kinds: Vec<String> =
        parts.iter().filter(|(n, _)| *n > 0).map(|(n, name)| format!("{name} {}", count_text(*n))).collect();
    if s.truncated > 0 {
        kinds.push(format!("truncated {}", count_text(s.truncated)));
    }
    let text = kinds.join(", ");
    if s.undefined > 0 {
        let reason = format!("{text}; {} have a frame whose name was lost", count_text(s.undefined));
        return Check::failed(name, reason, "see the check of losses");
    }
    if s.none > 0 {
        return Check::failed(
            name,
            format!("{text}; some events have neither a stack nor an autograd node"),
            "record without --stacks none; if only threads without frames remain, report it with this output",
        );
    }
    Check::ok(name, text)
}

fn clock(trace: &Reader) -> Check {
    let ns_per_tick = trace.calibration().ns_per_tick();
    let points = trace.clock_points().len() as u64;
    if points < 2 {
        let text = "the trace has too few clock points to calibrate the clock, so times are approximate";
        return Check::note("Clock", text);
    }
    Check::ok("Clock", format!("{ns_per_tick:.3} ns per tick, from {}", count(points, "clock point")))
}
