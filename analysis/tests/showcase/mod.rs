//! A short program with everything that an export can show: two devices, a named range, a module, a backward node, two
//! threads, a failed request. All of its names can be chosen.

#![allow(dead_code)]

use std::path::Path;

use memtrace_analysis::load::{Exit, Manifest, Run};
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::{Action, Flags, Source};
use memtrace_trace::file::{Context, Device, End, Label, NnCall, NnName, Thread};
use memtrace_trace::ids::{ContextId, StackId};

use crate::training::{self, MIB, Program};

/// The names in the program.
pub(crate) struct Words {
    pub(crate) file: &'static str,
    pub(crate) function: &'static str,
    pub(crate) label: &'static str,
    pub(crate) module: &'static str,
    pub(crate) class: &'static str,
    pub(crate) node: &'static str,
    pub(crate) thread: &'static str,
    pub(crate) argument: &'static str,
    pub(crate) device: &'static str,
}

pub(crate) const PLAIN: Words = Words {
    file: "model.py",
    function: "attend",
    label: "epoch",
    module: "blocks.0",
    class: "Block",
    node: "BmmBackward0",
    thread: "python",
    argument: "train.py",
    device: "Test GPU",
};

/// Changes the last `events` events.
fn amend(p: &mut Program, events: usize, change: impl Fn(&mut memtrace_trace::event::Event)) {
    p.recording.events.iter_mut().rev().take(events).for_each(change);
}

fn range(p: &mut Program, action: Action) {
    p.event(action, 1, 0, StackId::NONE, ContextId::NONE);
    amend(p, 1, |e| (e.source, e.device, e.flags) = (Source::Label, -1, Flags::default()));
}

fn alloc_on_1(p: &mut Program, size: u64, stack: StackId) -> u64 {
    let addr = p.alloc(size, stack);
    amend(p, 2, |e| e.device = 1);
    addr
}

/// The program as this rank of two.
pub(crate) fn program(words: &Words, rank: u32) -> Program {
    let mut p = Program::new();
    let argument = serde_json::to_string(words.argument).unwrap();
    p.recording.info = format!(
        r#"{{"pid": {}, "argv": ["python", {argument}], "env": {{"RANK": "{rank}", "WORLD_SIZE": "2"}}}}"#,
        7 + rank
    );
    let s = training::stacks(&mut p);
    let own = p.stack(&[("train.py", 20, "<module>"), (words.file, 6, words.function)]);
    let node = p.node(words.node, own);
    let definitions = &mut p.recording.definitions;
    definitions.labels.insert(1, Label { origin: LabelOrigin::RecordFunction, text: words.label.into() });
    definitions.threads = ["", words.thread, "pt_autograd_0"]
        .into_iter()
        .zip([0, 71, 72])
        .map(|(name, tid)| Thread { tid, name: name.into() })
        .collect();
    let device = Device { name: words.device.into(), total: 64 * MIB, used_before: 0, pci: "1".into() };
    definitions.devices.insert(1, device);
    definitions.contexts.push(Context::default());
    let call = ContextId(definitions.contexts.len() as u32 - 1);
    definitions.nn_calls.insert(call, NnCall { caller: ContextId::NONE, object: 0x1000, class: words.class.into() });
    let (class, name) = (words.class.into(), words.module.into());
    definitions.nn_names.push(NnName { object: 0x1000, seq: 1, class, name });

    p.alloc(4 * MIB, s.load);
    range(&mut p, Action::RangeStart);
    let batch = p.alloc(MIB, s.batch);
    let kept = p.alloc_in(2 * MIB, own, call);
    amend(&mut p, 2, |e| e.flags = Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED));
    let scratch = p.alloc(3 * MIB, s.forward);
    p.free(scratch, s.forward);
    p.on_thread(2);
    let gradient = p.alloc_in(4 * MIB, StackId::NONE, node);
    p.free_in(kept, StackId::NONE, node);
    p.on_thread(1).with_grad(false);
    p.alloc(4 * MIB, s.state);
    range(&mut p, Action::RangeEnd);
    // The other device holds 6 MiB at its peak, and a request of 32 MiB fails there.
    let other = alloc_on_1(&mut p, 6 * MIB, own);
    p.free(other, own);
    amend(&mut p, 2, |e| e.device = 1);
    alloc_on_1(&mut p, (2 + u64::from(rank)) * MIB, s.load);
    p.event(Action::Oom, 1_000_000, 32 * MIB, own, ContextId::NONE);
    amend(&mut p, 1, |e| e.device = 1);
    p.free(gradient, s.zero);
    p.free(batch, s.batch);
    p.recording.end = Some(End { wait_status: Some(0), reason: "exited".into(), ..End::default() });
    p
}

/// A run with some of its ranks.
pub(crate) fn run(words: &Words, ranks: std::ops::Range<u32>) -> Run {
    let manifest = Manifest {
        command: vec!["python".into(), words.argument.into()],
        exit: Exit::from_wait_status(0),
        ..Manifest::default()
    };
    let processes = ranks.map(|rank| {
        let recording = program(words, rank).recording;
        memtrace_analysis::Process::new(Path::new(&format!("{}.mtr", 7 + rank)), Box::new(recording), &manifest)
    });
    let processes = processes.collect();
    Run::from_processes(Path::new("run"), manifest, processes)
}
