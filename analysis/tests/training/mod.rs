//! A hand-made recording of a training program. It has a model moved to the device, steps of forward, backward and
//! Adam, and cleared gradients. On request, the first optimizer step has an out-of-memory error.
//!
//! Sizes: two parameters of 4 MiB and activations of 2 MiB. Every block is in a segment of its own.

#![allow(dead_code)]

use std::path::Path;

use memtrace_analysis::load::{Exit, Manifest, MemoryRecording, Process, Run};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Context, Definitions, Device, End, Frame, StackNode};
use memtrace_trace::ids::{ContextId, FrameId, StackId, ThreadId};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const PARAMETERS: u64 = 8 * MIB;

/// Builds recordings from the actions of a program.
pub(crate) struct Program {
    pub(crate) recording: MemoryRecording,
    next: u64,
    thread: u32,
    grad: bool,
}

impl Program {
    pub(crate) fn new() -> Program {
        let mut definitions = Definitions::default();
        definitions.frames.push(Frame::default());
        definitions.stacks.push(StackNode::default());
        definitions.contexts.push(Context::default());
        let device = Device { name: "Test GPU".into(), total: 64 * MIB, used_before: 3 * MIB, pci: "0".into() };
        definitions.devices.insert(0, device);
        let recording = MemoryRecording {
            definitions,
            info: r#"{"pid": 7, "argv": ["python", "train.py"]}"#.into(),
            ..MemoryRecording::default()
        };
        Program { recording, next: 1 << 32, thread: 1, grad: true }
    }

    /// Adds a stack, outermost frame first: (file, line, function).
    pub(crate) fn stack(&mut self, frames: &[(&str, u32, &str)]) -> StackId {
        let definitions = &mut self.recording.definitions;
        let mut parent = StackId::NONE;
        for (filename, line, name) in frames {
            let frame = Frame {
                name: (*name).into(),
                qualname: (*name).into(),
                filename: (*filename).into(),
                line: *line,
                first_line: 1,
                ..Frame::default()
            };
            let known = definitions.frames.iter().position(|f| *f == frame);
            let frame = FrameId(known.unwrap_or_else(|| {
                definitions.frames.push(frame);
                definitions.frames.len() - 1
            }) as u32);
            let node = StackNode { parent, frame };
            let known = definitions.stacks.iter().position(|n| *n == node);
            parent = StackId(known.unwrap_or_else(|| {
                definitions.stacks.push(node);
                definitions.stacks.len() - 1
            }) as u32);
        }
        parent
    }

    pub(crate) fn node(&mut self, node: &str, forward: StackId) -> ContextId {
        self.recording.definitions.contexts.push(Context { node: node.into(), forward, ..Context::default() });
        ContextId(self.recording.definitions.contexts.len() as u32 - 1)
    }

    pub(crate) fn on_thread(&mut self, thread: u32) -> &mut Program {
        self.thread = thread;
        self
    }

    pub(crate) fn with_grad(&mut self, grad: bool) -> &mut Program {
        self.grad = grad;
        self
    }

    pub(crate) fn event(&mut self, action: Action, addr: u64, size: u64, stack: StackId, context: ContextId) {
        let seq = self.recording.events.len() as u64 + 1;
        // Without create_graph, a backward pass runs with gradients off.
        let flags = match (context.is_none(), self.grad) {
            (false, _) => Flags::GRAD_KNOWN.with(Flags::IN_BACKWARD),
            (true, true) => Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED),
            (true, false) => Flags::GRAD_KNOWN,
        };
        self.recording.events.push(Event {
            seq,
            ticks: seq * 1000,
            action,
            addr,
            size,
            stack,
            context,
            source: Source::Torch,
            device: 0,
            flags,
            thread: ThreadId(self.thread),
            ..Event::EMPTY
        });
    }

    /// Adds an allocation in a segment of its own.
    pub(crate) fn alloc(&mut self, size: u64, stack: StackId) -> u64 {
        self.alloc_in(size, stack, ContextId::NONE)
    }

    pub(crate) fn alloc_in(&mut self, size: u64, stack: StackId, context: ContextId) -> u64 {
        let addr = self.next;
        self.next += 1 << 30;
        self.event(Action::SegmentAlloc, addr, size, stack, context);
        self.event(Action::Alloc, addr, size, stack, context);
        addr
    }

    pub(crate) fn free(&mut self, addr: u64, stack: StackId) {
        self.free_in(addr, stack, ContextId::NONE);
    }

    pub(crate) fn free_in(&mut self, addr: u64, stack: StackId, context: ContextId) {
        let of = |e: &&Event| e.action == Action::Alloc && e.addr == addr;
        let size = self.recording.events.iter().rev().find(of).map_or(0, |e| e.size);
        self.event(Action::FreeRequested, addr, size, stack, context);
        self.event(Action::FreeCompleted, addr, size, stack, context);
    }

    pub(crate) fn process(self) -> Process {
        Process::new(Path::new("7.mtr"), Box::new(self.recording), &Manifest::default())
    }
}

const MODULE: &str = "/site-packages/torch/nn/modules/module.py";
const LINEAR: &str = "/site-packages/torch/nn/modules/linear.py";
const ADAM: &str = "/site-packages/torch/optim/adam.py";
const OPTIMIZER: &str = "/site-packages/torch/optim/optimizer.py";

/// The stacks of the training program.
pub(crate) struct Stacks {
    pub(crate) load: StackId,
    pub(crate) batch: StackId,
    pub(crate) forward: StackId,
    pub(crate) state: StackId,
    pub(crate) step: StackId,
    pub(crate) zero: StackId,
    pub(crate) node: ContextId,
}

pub(crate) fn stacks(p: &mut Program) -> Stacks {
    let forward = p.stack(&[
        ("train.py", 20, "<module>"),
        (MODULE, 1790, "_call_impl"),
        ("model.py", 6, "forward"),
        (LINEAR, 134, "forward"),
    ]);
    Stacks {
        load: p.stack(&[
            ("train.py", 10, "<module>"),
            (MODULE, 1370, "to"),
            (MODULE, 930, "_apply"),
            (MODULE, 1360, "convert"),
        ]),
        batch: p.stack(&[("train.py", 19, "<module>")]),
        forward,
        state: p.stack(&[
            ("train.py", 22, "<module>"),
            (OPTIMIZER, 500, "wrapper"),
            (ADAM, 230, "step"),
            (ADAM, 178, "_init_group"),
        ]),
        step: p.stack(&[
            ("train.py", 22, "<module>"),
            (OPTIMIZER, 500, "wrapper"),
            (ADAM, 247, "step"),
            (ADAM, 791, "_multi_tensor_adam"),
        ]),
        zero: p.stack(&[("train.py", 23, "<module>"), (OPTIMIZER, 1000, "zero_grad")]),
        node: p.node("AddmmBackward0", forward),
    }
}

/// A program with `steps` steps. With `oom`, the first optimizer step fails half-way, and the program ends.
pub(crate) fn training(steps: u32, oom: bool) -> Program {
    let mut p = Program::new();
    let s = stacks(&mut p);
    p.alloc(4 * MIB, s.load);
    p.alloc(4 * MIB, s.load);
    for step in 0..steps {
        let batch = p.alloc(MIB, s.batch);
        let kept = [p.alloc(2 * MIB, s.forward), p.alloc(2 * MIB, s.forward)];
        let scratch = p.alloc(3 * MIB, s.forward);
        p.free(scratch, s.forward);
        p.on_thread(2);
        let mut gradients = Vec::new();
        for addr in kept {
            let temporary = p.alloc_in(2 * MIB, StackId::NONE, s.node);
            gradients.push(p.alloc_in(4 * MIB, StackId::NONE, s.node));
            p.free_in(temporary, StackId::NONE, s.node);
            p.free_in(addr, StackId::NONE, s.node);
        }
        p.on_thread(1).with_grad(false);
        if step == 0 {
            for i in 0..4 {
                if oom && i == 3 {
                    p.event(Action::Oom, 1_000_000, 4 * MIB, s.state, ContextId::NONE);
                    break;
                }
                p.alloc(4 * MIB, s.state);
            }
        }
        if oom {
            for addr in gradients {
                p.free(addr, StackId::NONE);
            }
            return p;
        }
        let temporary = p.alloc(8 * MIB, s.step);
        p.free(temporary, s.step);
        p.with_grad(true);
        for addr in gradients {
            p.free(addr, s.zero);
        }
        p.free(batch, s.batch);
    }
    p
}

pub(crate) fn run(steps: u32, oom: bool) -> Run {
    let mut program = training(steps, oom);
    let status = if oom { 0x0100 } else { 0 };
    program.recording.end = Some(End { wait_status: Some(status), reason: "exited".into(), ..End::default() });
    let manifest = Manifest {
        command: vec!["python".into(), "train.py".into()],
        pid: Some(7),
        exit: Exit::from_wait_status(status),
        ..Manifest::default()
    };
    Run::from_processes(Path::new("run"), manifest, vec![program.process()])
}
