//! Findings about each layer in the trace of one process: recorded, off with a reason, or not used.

use std::collections::BTreeMap;

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::Verdict;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Definitions, Reader};

use super::diagnosis::{Finding, Stacks};
use super::units::{count, count_text};
use super::{meaning, tested};

/// Flags for the kinds of frames in a stack, one bit each.
const PYTHON: u8 = 1;
const NATIVE: u8 = 2;
const UNDEFINED: u8 = 4;

/// Counts over the events of one process.
#[derive(Default, Debug)]
pub(super) struct Tally {
    pub(super) events: u64,
    sources: BTreeMap<Source, u64>,
    /// The number of blocks that PyTorch's allocator returned, and of those whose rounded size is known.
    blocks: u64,
    rounded: u64,
    /// The number of events from PyTorch's allocators, and of those whose grad mode is known.
    torch: u64,
    grad_known: u64,
    in_backward: u64,
    with_node: u64,
    with_forward: u64,
    /// The number of frees by PyTorch, and of those that CPython's cyclic garbage collector caused.
    pub(super) frees: u64,
    pub(super) collected: u64,
    pub(super) stacks: Stacks,
    /// The number of event blocks in the file that could not be decoded.
    damaged: u64,
}

impl Tally {
    /// Counts the events of a trace in one pass.
    pub(super) fn of(trace: &Reader) -> Tally {
        let definitions = trace.definitions();
        let kinds = stack_kinds(definitions);
        let mut tally = Tally::default();
        for block in trace.events() {
            match block {
                Ok(events) => events.iter().for_each(|e| tally.add(e, definitions, &kinds)),
                Err(_) => tally.damaged += 1,
            }
        }
        tally
    }

    fn add(&mut self, e: &Event, definitions: &Definitions, kinds: &[u8]) {
        self.events += 1;
        *self.sources.entry(e.source).or_default() += 1;
        if e.source == Source::Torch && e.action == Action::Alloc {
            self.blocks += 1;
            self.rounded += u64::from(e.flags.contains(Flags::SLACK_KNOWN));
        }
        // Totals come from the allocator itself and belong to no point in time of the program, so they have no grad
        // mode.
        if e.source.is_torch() && e.action != Action::Totals {
            self.torch += 1;
            self.grad_known += u64::from(e.flags.contains(Flags::GRAD_KNOWN));
        }
        if e.source.is_torch() && matches!(e.action, Action::FreeRequested | Action::FreeCompleted) {
            // A request and its completion concern the same block. Sources without the allocator tracker have
            // completions only.
            let counts = e.action == Action::FreeRequested || e.source != Source::Torch;
            self.frees += u64::from(counts);
            self.collected += u64::from(counts && e.flags.contains(Flags::IN_GC));
        }
        if e.source.is_torch() && e.flags.contains(Flags::IN_BACKWARD) && e.action != Action::Totals {
            self.in_backward += 1;
            let node = definitions.context(e.context);
            self.with_node += u64::from(node.is_some());
            self.with_forward += u64::from(node.is_some_and(|n| !n.forward.is_none()));
        }
        // Ranges that the program named are not allocations and have no stack.
        if e.action == Action::Totals || e.source == Source::Label {
            return;
        }
        let kind = if e.stack.is_none() { 0 } else { kinds.get(e.stack.index()).copied().unwrap_or(UNDEFINED) };
        let place = match kind & (PYTHON | NATIVE) {
            PYTHON => &mut self.stacks.python,
            NATIVE => &mut self.stacks.native,
            0 if !e.context.is_none() && !definitions.nn_calls.contains_key(&e.context) => &mut self.stacks.autograd,
            0 => &mut self.stacks.none,
            _ => &mut self.stacks.merged,
        };
        *place += 1;
        self.stacks.cut += u64::from(e.flags.contains(Flags::STACK_CUT));
        self.stacks.unreadable += u64::from(kind & UNDEFINED != 0);
    }

    fn from(&self, source: Source) -> u64 {
        self.sources.get(&source).copied().unwrap_or(0)
    }
}

/// The kinds of frames in each stack, by stack id. A parent has a smaller id than its children.
fn stack_kinds(definitions: &Definitions) -> Vec<u8> {
    let mut kinds = vec![0u8; definitions.stacks.len()];
    for (id, node) in definitions.stacks.iter().enumerate().skip(1) {
        let own = if definitions.native_frames.contains_key(&node.frame) {
            NATIVE
        } else if definitions.frame(node.frame).is_some() {
            PYTHON
        } else {
            UNDEFINED
        };
        let parents =
            if node.parent.is_none() { 0 } else { kinds.get(node.parent.index()).copied().unwrap_or(UNDEFINED) };
        if let Some(kind) = kinds.get_mut(id) {
            *kind = own | parents;
        }
    }
    kinds
}

/// The last notice of the recorder about this topic, apart from remarks. `None` when there is none.
pub(super) fn verdict<'a>(trace: &'a Reader, topic: &str) -> Option<(Verdict, &'a str)> {
    let notices = trace.definitions().notices.iter().rev();
    notices.filter(|n| n.verdict != Verdict::Remark).find(|n| &*n.topic == topic).map(|n| (n.verdict, &*n.text))
}

/// The findings about all layers, in a fixed order.
pub(super) fn layers(trace: &Reader, tally: &Tally) -> Vec<Finding> {
    vec![
        driver(trace, tally),
        runtime(tally),
        tracker(trace, tally),
        reporter(trace, tally),
        cpu_tensors(tally),
        python_stacks(trace, tally),
        native_stacks(tally),
        nodes(trace, tally),
        forward_stacks(trace, tally),
        grad_mode(trace, tally),
        meaning::names(trace),
        meaning::modules(trace),
        meaning::ranges(trace),
        meaning::nvtx(trace),
        meaning::collector(trace, tally),
    ]
}

fn driver(trace: &Reader, tally: &Tally) -> Finding {
    let what = "CUDA driver";
    let unwrapped = trace.counter(Counter::UnwrappedEntryPoints);
    let missing = trace.counter(Counter::OriginalsMissing);
    let (driver, runtime) = (tally.from(Source::Driver), tally.from(Source::Runtime));
    if unwrapped > 0 {
        Finding::off(
            what,
            format!(
                "{} asked for in a version that is not wrapped: what they allocate is not seen",
                count(unwrapped, "function")
            ),
            "use a memtrace as new as the CUDA release, or a CUDA release as old as memtrace",
        )
    } else if missing > 0 {
        Finding::off(
            what,
            format!(
                "{} had no original: the program was answered with an error, as without memtrace",
                count(missing, "call")
            ),
            "make driver and CUDA libraries of one release",
        )
    } else if driver > 0 {
        Finding::ok(what, count(driver, "event"))
    } else if runtime > 0 {
        Finding::off(
            what,
            "the runtime reaches the driver by a way that is not seen",
            "use the CUDA runtime that CUDA 11.3 or later brings",
        )
    } else {
        Finding::unused(what, "no memory call")
    }
}

fn runtime(tally: &Tally) -> Finding {
    match tally.from(Source::Runtime) {
        0 if tally.from(Source::Driver) > 0 => {
            Finding::unused("CUDA runtime", "not used, or linked statically: the driver's events tell the same")
        }
        0 => Finding::unused("CUDA runtime", "no memory call"),
        n => Finding::ok("CUDA runtime", count(n, "event")),
    }
}

fn tracker(trace: &Reader, tally: &Tally) -> Finding {
    let what = "PyTorch tracker";
    let events = tally.from(Source::Torch);
    match verdict(trace, "torch.tracker") {
        Some((Verdict::Off, text)) => {
            let reason = text.split_once(';').map_or(text, |(reason, _)| reason);
            if reason.contains("not PyTorch's native") {
                // `cudaMallocAsync` and other allocators keep no blocks of their own.
                return Finding::unused(what, reason);
            }
            let tested = tested::pytorches();
            let mend = format!("use a release of PyTorch whose allocator can be listened to: {tested} are tested");
            Finding::off(what, format!("{reason}: sizes are rounded, no segments, no streams"), mend)
        }
        Some((_, text)) => Finding::ok(what, format!("{}; {text}", count(events, "event"))),
        None if events > 0 => Finding::ok(what, format!("{}; verified in the parent process", count(events, "event"))),
        None => Finding::unused(what, "PyTorch's CUDA allocator was not used"),
    }
}

fn reporter(trace: &Reader, tally: &Tally) -> Finding {
    let what = "PyTorch reporter";
    let mismatches = trace.counter(Counter::ReporterMismatches);
    let fallback = tally.from(Source::TorchReporter);
    if mismatches > 0 {
        Finding::off(
            what,
            format!("{} disagree with the tracker: their rounded sizes are not known", count(mismatches, "report")),
            "report it with this page",
        )
    } else if fallback > 0 {
        Finding::ok(what, format!("{}, in the tracker's place", count(fallback, "event")))
    } else if tally.blocks > 0 && tally.rounded == 0 {
        Finding::off(
            what,
            "PyTorch does not call it: the rounded sizes of blocks are not known",
            format!("use a tested release of PyTorch: {}", tested::pytorches()),
        )
    } else if tally.rounded > 0 {
        Finding::ok(
            what,
            format!("{} of {} with their rounded size", count_text(tally.rounded), count(tally.blocks, "block")),
        )
    } else {
        Finding::unused(what, "PyTorch's CUDA allocator was not used")
    }
}

fn cpu_tensors(tally: &Tally) -> Finding {
    let what = "CPU tensors";
    let cuda =
        [Source::Torch, Source::TorchReporter, Source::Driver, Source::Runtime].iter().any(|s| tally.from(*s) > 0);
    match tally.from(Source::TorchCpu) {
        0 if cuda => Finding::unused(what, "left out, since a CUDA device is used; memtrace --cpu always records them"),
        0 => Finding::unused(what, "none allocated"),
        n => Finding::ok(what, count(n, "event")),
    }
}

fn python_stacks(trace: &Reader, tally: &Tally) -> Finding {
    let what = "Python stacks";
    let events = tally.stacks.python + tally.stacks.merged;
    match verdict(trace, "python") {
        Some((Verdict::Off, text)) => {
            Finding::off(what, text, format!("use a release build of CPython {} with the GIL", tested::pythons()))
        }
        Some((_, text)) => Finding::ok(what, format!("{}; {text}", count(events, "event"))),
        None if events > 0 => Finding::ok(what, count(events, "event")),
        None => Finding::unused(what, "no event came from Python code"),
    }
}

fn native_stacks(tally: &Tally) -> Finding {
    let what = "native stacks";
    match tally.stacks.native + tally.stacks.merged {
        0 => Finding::unused(
            what,
            "every event has a Python stack or an autograd node; memtrace --stacks both adds them",
        ),
        n => Finding::ok(what, count(n, "event")),
    }
}

fn nodes(trace: &Reader, tally: &Tally) -> Finding {
    let what = "autograd nodes";
    let found = format!("{} of {} in backward", count_text(tally.with_node), count(tally.in_backward, "event"));
    let mend = || format!("use a tested release of PyTorch: {}", tested::pytorches());
    match verdict(trace, "torch.autograd") {
        Some((Verdict::Off, text)) => Finding::off(what, text, mend()),
        _ if tally.in_backward == 0 => Finding::unused(what, "no allocation in backward"),
        _ if tally.with_node == 0 => Finding::off(what, found, mend()),
        Some((_, text)) => match verdict(trace, "torch.python_node") {
            Some((Verdict::Off, node)) => Finding::off(what, format!("{found}; {node}"), mend()),
            _ => Finding::ok(what, format!("{found}; {text}")),
        },
        None => Finding::ok(what, found),
    }
}

fn forward_stacks(trace: &Reader, tally: &Tally) -> Finding {
    let what = "forward stacks";
    let found = format!("{} of {} in backward", count_text(tally.with_forward), count(tally.in_backward, "event"));
    let lost = trace.counter(Counter::ForwardStacksLost);
    if tally.in_backward == 0 {
        Finding::unused(what, "no allocation in backward")
    } else if tally.with_forward == 0 {
        Finding::off(
            what,
            format!("{found}: no node could be followed to the call that made it"),
            format!("use a tested release of PyTorch: {}", tested::pytorches()),
        )
    } else if lost > 0 {
        let text = format!(
            "{found}; {} were made before the recording began, or a million nodes earlier",
            count(lost, "node")
        );
        Finding::note(what, text)
    } else {
        Finding::ok(what, found)
    }
}

fn grad_mode(trace: &Reader, tally: &Tally) -> Finding {
    let what = "grad mode";
    let found = format!("{} of {}", count_text(tally.grad_known), count(tally.torch, "event"));
    if tally.torch == 0 {
        Finding::unused(what, "PyTorch allocated nothing")
    } else if tally.grad_known == 0 {
        Finding::off(
            what,
            format!(
                "{found}: PyTorch could not be asked, so inference and training are told apart by their nodes alone"
            ),
            format!("use a tested release of PyTorch: {}", tested::pytorches()),
        )
    } else {
        match verdict(trace, "torch.grad_mode") {
            Some((_, text)) => Finding::ok(what, format!("{found}; {text}")),
            None => Finding::ok(what, found),
        }
    }
}

/// The findings about losses in the trace, its stacks and its clock.
pub(super) fn checks(trace: &Reader, tally: &Tally) -> Vec<Finding> {
    vec![losses(trace, tally), stacks(tally), clock(trace)]
}

fn losses(trace: &Reader, tally: &Tally) -> Finding {
    let what = "losses";
    let (lost, late) = trace.end().map_or((0, 0), |e| (e.lost, e.late));
    let damage = trace.damage();
    let counter = |c| trace.counter(c);
    let parts = [
        (lost, "event lost", "events lost"),
        (counter(Counter::EventsDropped), "event not recorded", "events not recorded"),
        (late, "event out of order", "events out of order"),
        (counter(Counter::DefinitionsDropped), "name or stack lost", "names and stacks lost"),
        (counter(Counter::Panics), "surprise inside a hook", "surprises inside hooks"),
        (counter(Counter::UnknownActions), "event of an unknown kind", "events of unknown kinds"),
        (tally.damaged + u64::from(!damage.is_none()), "damaged part of the file", "damaged parts of the file"),
        (u64::from(trace.end().is_none()), "missing end of the file", "missing ends"),
    ];
    let said: Vec<String> = parts
        .iter()
        .filter(|(n, ..)| *n > 0)
        .map(|(n, one, many)| format!("{} {}", count_text(*n), if *n == 1 { one } else { many }))
        .collect();
    if said.is_empty() {
        return Finding::ok(what, format!("none of {}", count(tally.events, "event")));
    }
    let text = said.join(", ");
    if counter(Counter::EventsDropped) > 0 && trace.definitions().notices.iter().any(|n| &*n.topic == "pause") {
        return Finding::note(what, format!("{text}; the program paused the recording itself"));
    }
    Finding::off(what, text, "give the launcher a core of its own (taskset, a larger CPU request) and room on its disk")
}

fn stacks(tally: &Tally) -> Finding {
    let what = "stacks";
    let s = tally.stacks;
    let parts = [
        (s.python, "Python"),
        (s.merged, "Python and native"),
        (s.native, "native"),
        (s.autograd, "node only"),
        (s.none, "none"),
    ];
    let mut said: Vec<String> =
        parts.iter().filter(|(n, _)| *n > 0).map(|(n, name)| format!("{name} {}", count_text(*n))).collect();
    if s.cut > 0 {
        said.push(format!("cut {}", count_text(s.cut)));
    }
    let text = said.join(", ");
    if s.unreadable > 0 {
        let why = format!("{text}; {} with a frame whose name was lost", count_text(s.unreadable));
        return Finding::off(what, why, "see losses");
    }
    if s.none > 0 {
        return Finding::off(
            what,
            format!("{text}: nothing says who caused those"),
            "record without --stacks none; where it is a thread without frames, report it with this page",
        );
    }
    Finding::ok(what, text)
}

fn clock(trace: &Reader) -> Finding {
    let tick = trace.calibration().ns_per_tick();
    let points = trace.clock_points().len() as u64;
    if points < 2 {
        let text = "the trace has too few points in time to tell a rate: times are rough";
        return Finding::note("clock", text);
    }
    Finding::ok("clock", format!("{:.3} ns a tick by {}", tick, count(points, "point")))
}
