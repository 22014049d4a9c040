//! Writes a trace of a synthetic training run, for benchmarks of everything that reads traces:
//!
//! ```text
//! cargo run --release -p memtrace-analysis --example synthetic_run -- FOLDER EVENTS [SEED...]
//! ```
//!
//! It has one process, one device and a loop of forward (activations kept), backward (activations freed, gradients
//! kept) and optimizer (state in the first step). A few thousand blocks are in use at a time, and calls come from a few
//! thousand stacks. Each step is a named range, with ranges for its parts inside. All steps are alike, so the trace and
//! what is made of it compress unusually well. With a SEED, sizes and numbers of temporary blocks are random, and no
//! step is like another. With several, each is that of a rank, and the ranks run at the same time.

#![expect(clippy::disallowed_macros, reason = "a tool for developers prints its results")]

use std::collections::BTreeMap;
use std::io::Write;

use memtrace_trace::clock::ClockPoint;
use memtrace_trace::definition::{Definition, LabelOrigin};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{End, Writer};
use memtrace_trace::ids::{ContextId, FrameId, StackId, ThreadId};

const LAYERS: u32 = 1000;
/// The labels of the parts of a step.
const PARTS: [u32; 3] = [1, 2, 3];
const BLOCK: u64 = 2 << 20;
const SEGMENT: u64 = 20 << 20;

/// Random numbers of a seed: SplitMix64. Without a seed, all are zero.
struct Random(Option<u64>);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        let Some(state) = &mut self.0 else { return 0 };
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = *state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

struct Run<W: Write> {
    writer: Writer<W>,
    seq: u64,
    free: BTreeMap<u64, u64>,
    next_segment: u64,
}

impl<W: Write> Run<W> {
    fn event(&mut self, action: Action, addr: u64, size: u64, stack: u32, context: u32) {
        self.seq += 1;
        let mut flags = Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED);
        if context > 0 {
            flags = flags.with(Flags::IN_BACKWARD);
        }
        let slack = if action == Action::Alloc { (BLOCK - size) as u32 } else { 0 };
        if action == Action::Alloc {
            flags = flags.with(Flags::SLACK_KNOWN);
        }
        let event = Event {
            seq: self.seq,
            ticks: self.seq * 2000,
            action,
            addr,
            size,
            stack: StackId(stack),
            context: ContextId(context),
            source: Source::Torch,
            device: 0,
            flags,
            slack,
            thread: ThreadId(1 + u32::from(context > 0)),
            ..Event::EMPTY
        };
        self.writer.event(&event).expect("write");
    }

    /// Names a range.
    fn label(&mut self, id: u32, text: &str) {
        let mut bytes = Vec::new();
        Definition::Label { id, origin: LabelOrigin::RecordFunction, text }.encode(&mut bytes);
        self.writer.definition(&bytes).expect("definition");
    }

    /// The start or the end of a named range.
    fn range(&mut self, action: Action, label: u32) {
        self.seq += 1;
        let (source, thread) = (Source::Label, ThreadId(1));
        let event =
            Event { seq: self.seq, ticks: self.seq * 2000, action, addr: label.into(), source, thread, ..Event::EMPTY };
        self.writer.event(&event).expect("write");
    }

    /// First fit: a block takes the front of a free range.
    fn alloc(&mut self, size: u64, stack: u32, context: u32) -> u64 {
        if self.free.is_empty() {
            let base = self.next_segment;
            // The gap keeps ranges of different segments separate.
            self.next_segment += SEGMENT + BLOCK;
            self.event(Action::SegmentAlloc, base, SEGMENT, stack, context);
            self.free.insert(base, SEGMENT);
        }
        let (addr, room) = self.free.pop_first().expect("filled above");
        if room > BLOCK {
            self.free.insert(addr + BLOCK, room - BLOCK);
        }
        self.event(Action::Alloc, addr, size, stack, context);
        addr
    }

    fn free(&mut self, mut addr: u64, size: u64, stack: u32, context: u32) {
        self.event(Action::FreeRequested, addr, size, stack, context);
        self.event(Action::FreeCompleted, addr, size, 0, 0);
        let mut room = BLOCK;
        if let Some(next) = self.free.remove(&(addr + BLOCK)) {
            room += next;
        }
        if let Some((&before, &len)) = self.free.range(..addr).next_back()
            && before + len == addr
        {
            addr = before;
            room += len;
        }
        self.free.insert(addr, room);
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = args.next().expect("FOLDER EVENTS");
    let events: u64 = args.next().and_then(|n| n.parse().ok()).expect("FOLDER EVENTS");
    let seeds: Vec<u64> = args.map(|seed| seed.parse().expect("a number as SEED")).collect();
    std::fs::create_dir_all(&folder).expect("folder");
    if seeds.len() < 2 {
        return write(&folder, events, None, Random(seeds.first().copied()));
    }
    for (rank, seed) in (0..).zip(&seeds) {
        write(&folder, events, Some((rank, seeds.len())), Random(Some(*seed)));
    }
}

/// Writes a process: of several ranks, this one of so many.
fn write(folder: &str, events: u64, rank: Option<(u32, usize)>, mut random: Random) {
    let pid = 4242 + rank.map_or(0, |(rank, _)| rank);
    let file = std::io::BufWriter::new(std::fs::File::create(format!("{folder}/{pid}.mtr")).expect("file"));
    let env = rank.map(|(rank, size)| format!(r#","env":{{"RANK":"{rank}","WORLD_SIZE":"{size}"}}"#));
    let info = format!(r#"{{"pid":{pid},"argv":["python","train.py"]{}}}"#, env.unwrap_or_default());
    let mut writer = Writer::new(file, &info).expect("header");
    let mut define = |definition: Definition<'_>| {
        let mut bytes = Vec::new();
        definition.encode(&mut bytes);
        writer.definition(&bytes).expect("definition");
    };
    let frame = |id, name, filename, line| Definition::Frame {
        id: FrameId(id),
        name,
        qualname: name,
        filename,
        line,
        first_line: 1,
    };
    define(frame(1, "<module>", "/home/me/train.py", 50));
    define(frame(2, "_call_impl", "/site-packages/torch/nn/modules/module.py", 1790));
    define(frame(3, "_init_group", "/site-packages/torch/optim/adam.py", 178));
    define(frame(4, "_apply", "/site-packages/torch/nn/modules/module.py", 934));
    define(Definition::Stack { id: StackId(1), parent: StackId(0), frame: FrameId(1) });
    define(Definition::Stack { id: StackId(2), parent: StackId(1), frame: FrameId(2) });
    define(Definition::Stack { id: StackId(3), parent: StackId(1), frame: FrameId(3) });
    define(Definition::Stack { id: StackId(4), parent: StackId(1), frame: FrameId(4) });
    for layer in 0..LAYERS {
        define(frame(10 + layer, "forward", "/home/me/model.py", layer + 1));
        let id = StackId(10 + layer);
        define(Definition::Stack { id, parent: StackId(2), frame: FrameId(10 + layer) });
        define(Definition::Context {
            id: ContextId(1 + layer),
            node: "AddmmBackward0",
            forward: id,
            module: ContextId::NONE,
        });
    }
    writer.clock(ClockPoint { ticks: 0, monotonic_ns: 0, realtime_ns: 1_790_000_000_000_000_000 }).expect("clock");
    let mut run = Run { writer, seq: 0, free: BTreeMap::new(), next_segment: 0x7f00_0000_0000 };
    let size = |layer: u32| BLOCK - u64::from(layer % 7) * 512;
    for layer in 0..LAYERS {
        run.alloc(size(layer), 4, 0);
    }
    for (id, text) in PARTS.into_iter().zip(["forward pass", "backward pass", "optimizer step"]) {
        run.label(id, text);
    }
    let [forward, backward, optimizer] = PARTS;
    let mut step = 0;
    while run.seq < events {
        let own = PARTS.len() as u32 + 1 + step;
        run.label(own, &format!("step {step}"));
        run.range(Action::RangeStart, own);
        run.range(Action::RangeStart, forward);
        let mut activations = Vec::new();
        for layer in 0..LAYERS {
            let kept = size(layer) - 512 * random.below(3000);
            activations.push((run.alloc(kept, 10 + layer, 0), kept));
            for _ in 0..=random.below(3) {
                let bytes = (1 << 20) - 512 * random.below(2000);
                let temporary = run.alloc(bytes, 10 + layer, 0);
                run.free(temporary, bytes, 10 + layer, 0);
            }
        }
        run.range(Action::RangeEnd, forward);
        run.range(Action::RangeStart, backward);
        let mut gradients = Vec::new();
        for layer in (0..LAYERS).rev() {
            gradients.push((layer, run.alloc(size(layer), 0, 1 + layer)));
            if let Some((addr, bytes)) = activations.pop() {
                run.free(addr, bytes, 0, 1 + layer);
            }
        }
        run.range(Action::RangeEnd, backward);
        run.range(Action::RangeStart, optimizer);
        for layer in 0..LAYERS {
            if step == 0 {
                run.alloc(size(layer), 3, 0);
                run.alloc(size(layer), 3, 0);
            }
            let bytes = size(layer) - 512 * random.below(3000);
            let temporary = run.alloc(bytes, 3, 0);
            run.free(temporary, bytes, 3, 0);
        }
        for (layer, addr) in gradients {
            run.free(addr, size(layer), 3, 0);
        }
        run.range(Action::RangeEnd, optimizer);
        run.range(Action::RangeEnd, own);
        step += 1;
    }
    let last = run.seq * 2000;
    run.writer
        .clock(ClockPoint { ticks: last, monotonic_ns: last, realtime_ns: 1_790_000_000_000_000_000 + last })
        .expect("clock");
    let end = End { wait_status: Some(0), reason: "exited".into(), ..End::default() };
    run.writer
        .finish(&end)
        .and_then(|mut file| file.flush().map_err(memtrace_trace::error::Error::io("flush")))
        .expect("end");
    println!("{} events, {step} steps", run.seq);
}
