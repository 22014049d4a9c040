//! Rotation drops the beginning of a trace. From the first kept event on, a replay has the state of the full trace.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use memtrace_analysis::model::{Block, BlockState, Change, EventSource, MemoryRecording, Replay, TraceIndex};
use memtrace_analysis::report::{DeviceSummary, LiveProcess, ProcessSummary};
use memtrace_analysis::rewrite::{Keep, Rotated, rotate};
use memtrace_analysis::{FinishOptions, RunFolder, open_run, redact_run, summarize};
use memtrace_trace::api::Api;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::definition::{Definition, LabelOrigin};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Frame, Reader, Writer, copy_frames};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};
use proptest::prelude::*;

use crate::training::{MIB, Program as Training, stacks};

const STACKS: u32 = 9;
const SMALL: u64 = 1 << 20;
const PAGE: u64 = 20 << 20;
const PAGES: u64 = 8;
const RESERVED: u64 = PAGES * PAGE;

/// A program that allocates at random, with all that the driver and PyTorch's allocator report.
struct Program {
    events: Vec<Event>,
    replay: Replay,
    next_address: u64,
    /// Reserved address ranges, and the handle of each page.
    reservations: Vec<(u64, [Option<u64>; PAGES as usize])>,
    /// Memory outside PyTorch: address, and the call that frees it.
    others: Vec<(u64, Api)>,
    segments: Vec<u64>,
    ranges: Vec<u64>,
}

fn index() -> TraceIndex {
    let mut index = TraceIndex::default();
    index.sources.insert(0, EventSource::Torch);
    index
}

impl Program {
    fn new() -> Program {
        Program {
            events: Vec::new(),
            replay: Replay::new(&index(), None),
            next_address: 0x7f00_0000_0000,
            reservations: Vec::new(),
            others: Vec::new(),
            segments: Vec::new(),
            ranges: Vec::new(),
        }
    }

    fn event(&mut self, e: Event) {
        let seq = self.events.len() as u64 + 1;
        let e = Event { seq, ticks: seq * 1000, device: 0, thread: ThreadId(1 + (seq % 2) as u32), ..e };
        self.replay.apply(&e, |_, _, _, _| {});
        self.events.push(e);
    }

    fn address(&mut self, size: u64) -> u64 {
        let address = self.next_address;
        self.next_address += size.next_multiple_of(2 << 20) + (2 << 20);
        address
    }

    fn driver(&mut self, action: Action, api: Api, addr: u64, size: u64, flags: Flags) {
        let module = ModuleId(1 + (addr >> 21) as u32 % 3);
        self.event(Event { source: api.source().unwrap(), action, api, addr, size, flags, module, ..Event::EMPTY });
    }

    /// `cudaMalloc` with the driver call inside.
    fn malloc(&mut self, addr: u64, size: u64, flags: Flags) {
        self.driver(Action::Alloc, Api::cuMemAlloc_v2, addr, size, flags.with(Flags::NESTED));
        self.driver(Action::Alloc, Api::cudaMalloc, addr, size, flags.with(Flags::HAS_NESTED));
    }

    fn free(&mut self, addr: u64) {
        self.driver(Action::FreeCompleted, Api::cudaFree, addr, 0, Flags::HAS_NESTED);
        self.driver(Action::FreeCompleted, Api::cuMemFree_v2, addr, 0, Flags::NESTED);
    }

    fn torch(&mut self, action: Action, addr: u64, size: u64, stack: u32) {
        let (stack, context) = (StackId(stack % STACKS), ContextId(stack % 2));
        self.event(Event { source: Source::Torch, action, addr, size, stack, context, ..Event::EMPTY });
    }

    /// The blocks in a state, sorted.
    fn blocks(&self, state: BlockState) -> Vec<Block> {
        let allocator = &self.replay.devices()[0].allocator;
        let mut blocks: Vec<_> = allocator.blocks().map(|(_, b)| *b).filter(|b| b.state == state).collect();
        blocks.sort_by_key(|b| b.addr);
        blocks
    }

    fn step(&mut self, op: u8, a: u32, b: u32) {
        use BlockState::{Allocated, Inactive, PendingFree};
        let pick = |len: usize| a as usize % len.max(1);
        match op {
            0 => {
                let size = if a.is_multiple_of(2) { 2 << 20 } else { PAGE };
                let addr = self.address(size);
                self.malloc(addr, size, Flags::IN_ALLOCATOR);
                self.torch(Action::SegmentAlloc, addr, size, b);
                self.segments.push(addr);
            }
            1..=9 => {
                let free = self.blocks(Inactive);
                let Some(block) = free.get(pick(free.len())).copied() else { return };
                // As in PyTorch, small and large requests have segments of their own.
                let (least, most) =
                    if block.segment.small { (1, block.size.min(SMALL)) } else { (SMALL + 1, block.size) };
                if most < least {
                    return;
                }
                let size = least + u64::from(b) % (most - least + 1);
                let room = size.div_ceil(512) * 512;
                let (stack, context) = (StackId(b % STACKS), ContextId(b % 2));
                let alloc = Event { source: Source::Torch, addr: block.addr, size, stack, context, ..Event::EMPTY };
                let known = Event { flags: Flags::SLACK_KNOWN, slack: (room - size) as u32, ..alloc };
                self.event(if op.is_multiple_of(3) { alloc } else { known });
            }
            10..=15 => {
                let used = self.blocks(Allocated);
                let Some(block) = used.get(pick(used.len())).copied() else { return };
                self.torch(Action::FreeRequested, block.addr, block.requested, b);
                if op != 10 {
                    self.torch(Action::FreeCompleted, block.addr, block.requested, b);
                }
            }
            16 => {
                let pending = self.blocks(PendingFree);
                let Some(block) = pending.get(pick(pending.len())).copied() else { return };
                self.torch(Action::FreeCompleted, block.addr, block.requested, b);
            }
            17 => {
                let segments = self.replay.devices()[0].allocator.segments();
                let is_free = |addr: &u64| {
                    segments.iter().any(|s| s.addr == *addr && s.blocks.len() == 1 && s.blocks[0].state == Inactive)
                };
                let Some(at) = self.segments.iter().position(is_free) else { return };
                let addr = self.segments.remove(at);
                let size = segments.iter().find(|s| s.addr == addr).unwrap().size;
                self.torch(Action::SegmentFree, addr, size, b);
                self.free(addr);
            }
            18 if self.reservations.len() < 3 => {
                let addr = self.address(RESERVED);
                self.driver(Action::Reserve, Api::cuMemAddressReserve, addr, RESERVED, Flags::IN_ALLOCATOR);
                self.reservations.push((addr, [None; PAGES as usize]));
                let at = self.reservations.len() - 1;
                self.map(at, 0, b);
            }
            19 | 20 if !self.reservations.is_empty() => {
                let at = pick(self.reservations.len());
                let page = b as usize % PAGES as usize;
                if self.reservations[at].1[page].is_none() { self.map(at, page, b) } else { self.unmap(at, page, b) }
            }
            21 => {
                let (addr, size) = (self.address(u64::from(b)), u64::from(b) + 1);
                match a % 4 {
                    0 => {
                        self.malloc(addr, size, Flags(0));
                        self.others.push((addr, Api::cudaFree));
                    }
                    1 => {
                        self.driver(Action::Alloc, Api::cuMemAlloc_v2, addr, size, Flags(0));
                        self.others.push((addr, Api::cuMemFree_v2));
                    }
                    2 => {
                        self.driver(Action::Alloc, Api::cuMemAllocHost_v2, addr, size, Flags(0));
                        self.others.push((addr, Api::cuMemFreeHost));
                    }
                    _ => {
                        self.event(Event {
                            source: Source::Driver,
                            action: Action::Totals,
                            api: Api::cuMemAllocAsync,
                            size: u64::from(a) << 10,
                            stream: 0x77,
                            ..Event::EMPTY
                        });
                        self.driver(Action::Alloc, Api::cuMemAllocAsync, addr, size, Flags(0));
                        self.others.push((addr, Api::cuMemFreeAsync));
                    }
                }
            }
            22 if !self.others.is_empty() => {
                let (addr, api) = self.others.remove(pick(self.others.len()));
                if api == Api::cudaFree {
                    self.free(addr)
                } else {
                    self.driver(Action::FreeCompleted, api, addr, 0, Flags(0))
                }
            }
            23 if !self.others.is_empty() => {
                // A free that fails.
                let (addr, api) = self.others[pick(self.others.len())];
                self.driver(Action::FreeCompleted, api, addr, 0, Flags(0));
                let freed = self.events.len() as u64;
                self.driver(Action::Retract, api, freed, 0, Flags(0));
            }
            24 => {
                let label = 1 + u64::from(a % 3);
                self.ranges.push(label);
                self.event(Event { source: Source::Label, action: Action::RangeStart, addr: label, ..Event::EMPTY });
            }
            25 => {
                let Some(label) = self.ranges.pop() else { return };
                self.event(Event { source: Source::Label, action: Action::RangeEnd, addr: label, ..Event::EMPTY });
            }
            _ => {
                let used = u64::from(a) << 20;
                let (source, action) = (Source::Driver, Action::DeviceUsage);
                self.event(Event {
                    source,
                    action,
                    addr: (80 << 30) - used,
                    size: 80 << 30,
                    stream: 5,
                    ..Event::EMPTY
                });
            }
        }
    }

    fn map(&mut self, at: usize, page: usize, stack: u32) {
        let handle = 0x1000 + self.events.len() as u64;
        let addr = self.reservations[at].0 + page as u64 * PAGE;
        // PyTorch maps the beginning of unmapped address space.
        let allocator = &self.replay.devices()[0].allocator;
        if page > 0 && !allocator.find(addr).is_some_and(|id| allocator.block(id).state == BlockState::Unmapped) {
            return;
        }
        self.driver(Action::Alloc, Api::cuMemCreate, handle, PAGE, Flags::IN_ALLOCATOR);
        let (source, action, flags) = (Source::Driver, Action::Map, Flags::IN_ALLOCATOR);
        self.event(Event {
            source,
            action,
            api: Api::cuMemMap,
            addr,
            size: PAGE,
            stream: handle,
            flags,
            ..Event::EMPTY
        });
        self.torch(Action::SegmentMap, addr, PAGE, stack);
        self.reservations[at].1[page] = Some(handle);
    }

    fn unmap(&mut self, at: usize, page: usize, stack: u32) {
        // Of a segment without any memory, only the reservation is kept.
        if self.reservations[at].1.iter().flatten().count() == 1 {
            return;
        }
        let addr = self.reservations[at].0 + page as u64 * PAGE;
        let is_free = |b: &Block| b.addr <= addr && addr + PAGE <= b.addr + b.size;
        if !self.blocks(BlockState::Inactive).iter().any(is_free) {
            return;
        }
        let handle = self.reservations[at].1[page].take().unwrap();
        self.torch(Action::SegmentUnmap, addr, PAGE, stack);
        self.driver(Action::Unmap, Api::cuMemUnmap, addr, PAGE, Flags::IN_ALLOCATOR);
        self.driver(Action::FreeCompleted, Api::cuMemRelease, handle, 0, Flags::IN_ALLOCATOR);
    }
}

fn definitions(writer: &mut Writer<File>) {
    let mut define = |definition: &Definition<'_>| {
        let mut encoded = Vec::new();
        definition.encode(&mut encoded);
        writer.definition(&encoded).unwrap();
    };
    for id in 1..STACKS {
        let (frame, parent) = (FrameId(id), StackId(id - 1));
        define(&Definition::Frame { id: frame, name: "f", qualname: "f", filename: "a.py", line: id, first_line: 1 });
        define(&Definition::Stack { id: StackId(id), parent, frame });
    }
    for id in 1..4 {
        define(&Definition::Label { id, origin: LabelOrigin::RecordFunction, text: "part" });
    }
}

/// A trace of `events` that is still being written, in blocks of this many events.
fn trace(events: &[Event], block: usize) -> Recorded {
    let mut writer = Writer::new(tempfile::tempfile().unwrap(), "{\"pid\":7}").unwrap();
    definitions(&mut writer);
    for (at, events) in events.chunks(block.max(1)).enumerate() {
        let ns = at as u64 * block as u64 * 1000;
        writer.clock(ClockPoint { ticks: ns, monotonic_ns: ns, realtime_ns: ns }).unwrap();
        events.iter().for_each(|e| writer.event(e).unwrap());
        writer.flush().unwrap();
    }
    Recorded { file: writer.into_out().unwrap(), kept_state: None }
}

/// A trace and the content of the file beside it. A trace that was not rotated has none.
struct Recorded {
    file: File,
    kept_state: Option<Vec<u8>>,
}

fn temporary(content: &[u8]) -> std::io::Result<File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(content)?;
    file.rewind()?;
    Ok(file)
}

fn rotated(old: &Recorded, keep: Keep) -> Option<(Recorded, Rotated<()>)> {
    let out = tempfile::tempfile().unwrap();
    let open = || temporary(old.kept_state.as_deref().ok_or(ErrorKind::NotFound)?);
    let Rotated { mut out, copied_to, first_seq, dropped, missing, kept_state } =
        rotate(Path::new("7.mtr"), old.file.try_clone().unwrap(), open, keep, out).unwrap()?;
    let len = old.file.metadata().unwrap().len();
    assert_eq!(copy_frames(&old.file, copied_to, len, &mut out).unwrap(), len);
    out.flush().unwrap();
    let new = Recorded { file: out, kept_state: Some(kept_state.clone()) };
    Some((new, Rotated { out: (), copied_to, first_seq, dropped, missing, kept_state }))
}

fn events(recorded: &Recorded) -> Vec<Event> {
    let reader = Reader::of(Path::new("7.mtr"), recorded.file.try_clone().unwrap()).unwrap();
    assert!(reader.damage().is_none(), "{:?}", reader.damage());
    reader.events().flatten().flatten().collect()
}

/// The state of a replay, without the dropped part's own records.
fn state(replay: &Replay) -> impl PartialEq + std::fmt::Debug + use<> {
    let allocator = &replay.devices()[0].allocator;
    let segments: Vec<_> = allocator
        .segments()
        .iter()
        .map(|s| {
            let block = |b: &Block| {
                let times = (b.addr, b.size, b.requested, b.seq * u64::from(b.is_active()), b.stack, b.context);
                (
                    times,
                    b.segment_stack,
                    b.segment_context,
                    b.state,
                    b.segment.small,
                    b.segment.pool,
                    b.stream,
                    b.segment.expandable,
                    b.segment.implied,
                )
            };
            let of = (s.addr, s.size, s.stream, s.stack, s.context, s.pool, s.small, s.expandable);
            (of, s.blocks.iter().map(block).collect::<Vec<_>>())
        })
        .collect();
    (segments, totals(replay))
}

fn totals(replay: &Replay) -> impl PartialEq + std::fmt::Debug + use<> {
    let physical = replay.physical();
    let owners: Vec<_> = physical
        .usage_by_owner()
        .iter()
        .filter(|(_, usage)| usage.current > 0)
        .map(|(of, usage)| (*of, usage.current))
        .collect();
    let allocator = &replay.devices()[0].allocator;
    (*allocator.usage(), allocator.live_blocks(), owners, physical.device_allocations(0))
}

/// Whether the replay of a rotated trace is that of all events, from the first kept event on.
fn check(all: &[Event], recorded: &Recorded, first_seq: u64) -> Result<(), TestCaseError> {
    let kept = events(recorded);
    prop_assert!(kept.is_sorted_by_key(|e| e.seq));
    let from = kept.partition_point(|e| e.seq < first_seq);
    let full_from = all.partition_point(|e| e.seq < first_seq);
    prop_assert_eq!(&kept[from..], &all[full_from..]);
    prop_assert!(kept[..from].iter().all(|e| e.flags.contains(Flags::PREEXISTING)));
    let (mut full, mut rotated) = (Replay::new(&index(), None), Replay::new(&index(), None));
    all[..full_from].iter().for_each(|e| full.apply(e, |_, _, _, _| {}));
    kept[..from].iter().for_each(|e| rotated.apply(e, |_, _, _, _| {}));
    let anomalies = rotated.devices()[0].allocator.anomalies();
    prop_assert_eq!(anomalies.total(), 0, "{:?}", anomalies);
    prop_assert_eq!(anomalies.totals_checked, 1);
    for (at, e) in all[full_from..].iter().enumerate() {
        // A free that was recorded before the cut turns out to have failed. The rotated trace has no such free.
        if e.action == Action::Retract && e.addr < first_seq {
            full.apply(e, |_, _, _, _| {});
            rotated.apply(e, |_, _, _, _| {});
            continue;
        }
        if at % 5 == 0 {
            prop_assert_eq!(state(&rotated), state(&full), "before event {}", e.seq);
        }
        let (mut changes, mut expected) = (Vec::new(), Vec::new());
        let name = |change: &Change| std::mem::discriminant(change);
        rotated.apply(e, |_, _, _, change| changes.push(name(&change)));
        full.apply(e, |_, _, _, change| expected.push(name(&change)));
        prop_assert_eq!(changes, expected, "at event {}", e.seq);
        prop_assert_eq!(totals(&rotated), totals(&full), "after event {}", e.seq);
    }
    prop_assert_eq!(state(&rotated), state(&full));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_replay_goes_on_as_that_of_the_full_trace(
        steps in prop::collection::vec((0u8..27, any::<u32>(), any::<u32>()), 50..600),
        block in 5usize..60,
        cut in 1u64..100,
    ) {
        let mut program = Program::new();
        program.step(0, 0, 0);
        steps.iter().for_each(|(op, a, b)| program.step(*op, *a, *b));
        let all = program.events;
        let ticks = all.len() as u64 * 10 * cut;
        let file = trace(&all, block);
        let Some((new, first)) = rotated(&file, Keep::Since(ticks)) else { return Ok(()) };
        prop_assert_eq!(first.dropped, first.first_seq - 1);
        check(&all, &new, first.first_seq)?;
        // A rotated trace is rotated again.
        let later = ticks + (all.len() as u64 * 1000 - ticks) / 2;
        if let Some((newer, second)) = rotated(&new, Keep::Since(later)) {
            prop_assert_eq!(second.dropped, second.first_seq - 1);
            check(&all, &newer, second.first_seq)?;
        }
    }
}

/// A training program that keeps 2 MiB in each step, as a trace that is still being written.
fn leaking_training(steps: u32) -> (Vec<Event>, Recorded) {
    let mut p = Training::new();
    let s = stacks(&mut p);
    let leak = p.stack(&[("train.py", 30, "<module>"), ("log.py", 3, "keep")]);
    for _ in 0..2 {
        p.alloc(4 * MIB, s.load);
    }
    for step in 0..steps {
        let batch = p.alloc(MIB, s.batch);
        let kept = [p.alloc(2 * MIB, s.forward), p.alloc(2 * MIB, s.forward)];
        p.on_thread(2);
        let mut gradients = Vec::new();
        for addr in kept {
            gradients.push(p.alloc_in(4 * MIB, StackId::NONE, s.node));
            p.free_in(addr, StackId::NONE, s.node);
        }
        p.on_thread(1).with_grad(false);
        if step == 0 {
            for _ in 0..4 {
                p.alloc(4 * MIB, s.state);
            }
        }
        let temporary = p.alloc(8 * MIB, s.step);
        p.free(temporary, s.step);
        p.alloc(2 * MIB, leak);
        p.with_grad(true);
        gradients.into_iter().for_each(|addr| p.free(addr, s.zero));
        p.free(batch, s.batch);
    }
    let MemoryRecording { events, definitions, info, .. } = p.recording;
    let mut writer = Writer::new(tempfile::tempfile().unwrap(), &info).unwrap();
    let mut define = |definition: &Definition<'_>| {
        let mut encoded = Vec::new();
        definition.encode(&mut encoded);
        writer.definition(&encoded).unwrap();
    };
    for (id, frame) in definitions.frames.iter().enumerate().skip(1) {
        let Frame { name, qualname, filename, line, first_line, .. } = frame;
        let (id, line, first_line) = (FrameId(id as u32), *line, *first_line);
        define(&Definition::Frame { id, name, qualname, filename, line, first_line });
    }
    for (id, node) in definitions.stacks.iter().enumerate().skip(1) {
        define(&Definition::Stack { id: StackId(id as u32), parent: node.parent, frame: node.frame });
    }
    for (id, context) in definitions.contexts.iter().enumerate().skip(1) {
        let (id, module) = (ContextId(id as u32), context.module);
        define(&Definition::Context { id, node: &context.node, forward: context.forward, module });
    }
    for events in events.chunks(37) {
        events.iter().for_each(|e| writer.event(e).unwrap());
        writer.flush().unwrap();
    }
    (events, Recorded { file: writer.into_out().unwrap(), kept_state: None })
}

/// Writes a trace and the file beside it into a folder.
fn written(recorded: &Recorded, folder: &Path) -> std::path::PathBuf {
    let (mut bytes, path) = (Vec::new(), folder.join("7.mtr"));
    (&recorded.file).rewind().unwrap();
    (&recorded.file).read_to_end(&mut bytes).unwrap();
    std::fs::write(&path, bytes).unwrap();
    if let Some(content) = &recorded.kept_state {
        std::fs::write(folder.join("7.kept.jsonl"), content).unwrap();
    }
    path
}

/// The summary of the process in a folder, and the problems with its files.
fn summary(folder: &Path) -> (Vec<String>, ProcessSummary) {
    let run = open_run(folder).unwrap();
    let problems = run.problems().iter().map(|problem| format!("{}: {}", problem.path.display(), problem.text));
    (problems.collect(), summarize(&run, &mut |_| {}).unwrap().processes.remove(0))
}

fn device(recorded: &Recorded) -> (DeviceSummary, ProcessSummary) {
    let folder = tempfile::tempdir().unwrap();
    written(recorded, folder.path());
    let (problems, mut process) = summary(folder.path());
    assert!(problems.is_empty(), "{problems:?}");
    (process.devices.remove(0), process)
}

/// Requires that a report on the kept events has the figures of the full trace.
#[track_caller]
fn assert_same_report(kept: &Recorded, full: &Recorded, case: &str) -> ProcessSummary {
    let ((kept, process), (full, all)) = (device(kept), device(full));
    let figures = |device: &DeviceSummary| (device.steps, device.highest, device.end.clone(), device.peak.clone());
    assert_eq!(figures(&kept), figures(&full), "{case}");
    let of = |process: &ProcessSummary| process.issues.iter().map(|issue| issue.rule).collect::<Vec<_>>();
    assert_eq!(of(&process), of(&all), "{case}");
    assert!(process.losses.is_empty(), "{case}: {:?}", process.losses);
    assert!(!process.dropped.as_ref().unwrap().text.contains("unknown"), "{case}");
    process
}

#[test]
fn a_report_on_the_kept_events_has_the_steps_categories_and_issues_of_the_full_trace() {
    const STEPS: u32 = 60;
    let (events, file) = leaking_training(STEPS);
    let (full, all) = device(&file);
    assert!(!all.issues.is_empty() && full.steps == STEPS);
    let last = events.last().unwrap().ticks;
    let mut cuts = Vec::new();
    for part in 2..9 {
        let (new, rotation) = rotated(&file, Keep::Since(last * part / 10)).unwrap();
        cuts.push(rotation.first_seq);
        let process = assert_same_report(&new, &file, &format!("cut at {part}/10"));
        if let Some((again, _)) = rotated(&new, Keep::Since(last * (part + 2) / 12)) {
            assert_same_report(&again, &file, &format!("cut at {part}/10 and at {}/12", part + 2));
        }
        let dropped = process.dropped.unwrap();
        assert_eq!(dropped.events, rotation.first_seq - 1);
        assert_eq!(process.events, events.len() as u64 - dropped.events);
        assert!(process.losses.is_empty(), "{:?}", process.losses);
        assert_eq!(dropped.recorded_ns, last - events[0].ticks);
        assert!(dropped.text.starts_with("the recording has the last "), "{}", dropped.text);
    }
    assert!(cuts.is_sorted_by(|a, b| a < b), "{cuts:?}");
}

#[test]
fn a_follower_goes_on_in_the_rotated_trace() {
    let folder = tempfile::tempdir().unwrap();
    let (events, file) = leaking_training(40);
    let path = written(&file, folder.path());
    let mut process = LiveProcess::open(&path).unwrap();
    let before = process.report();
    assert_eq!((before.events, before.dropped_events), (events.len() as u64, None));
    let (new, rotation) = rotated(&file, Keep::Since(events.last().unwrap().ticks / 2)).unwrap();
    let other = folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    written(&new, &other);
    for name in ["7.kept.jsonl", "7.mtr"] {
        std::fs::rename(other.join(name), folder.path().join(name)).unwrap();
    }
    process.advance().unwrap();
    let after = process.report();
    assert_eq!(after.dropped_events, Some(rotation.dropped));
    assert_eq!(after.events + rotation.dropped, before.events);
    assert_eq!((after.step, after.phase), (before.step, before.phase));
    for (after, before) in after.devices.iter().zip(&before.devices) {
        assert_eq!((after.totals, &after.by_category), (before.totals, &before.by_category));
    }
    // Appended blocks are read.
    let mut appended = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    let mut writer = Writer::new(Vec::new(), "{}").unwrap();
    let seq = events.len() as u64 + 1;
    writer
        .event(&Event {
            seq,
            ticks: seq * 1000,
            action: Action::Alloc,
            addr: 1 << 20,
            size: 512,
            device: 0,
            ..Event::EMPTY
        })
        .unwrap();
    appended.write_all(&writer.into_out().unwrap()[16..]).unwrap();
    process.advance().unwrap();
    assert_eq!(process.report().events, after.events + 1);
}

/// The launcher replaces the file beside the trace, then the trace. If it is killed in between, the old trace has its
/// state.
#[test]
fn the_new_file_fits_the_trace_before_the_rotation() {
    let (events, full) = leaking_training(60);
    let last = events.last().unwrap().ticks;
    let (first, _) = rotated(&full, Keep::Since(last / 3)).unwrap();
    let (second, _) = rotated(&first, Keep::Since(last * 2 / 3)).unwrap();
    let between = Recorded { kept_state: second.kept_state.clone(), ..first };
    assert_same_report(&between, &full, "killed after the second file");
    assert_same_report(&rotated(&between, Keep::Since(last / 2)).unwrap().0, &full, "rotated again");
    let unrotated = Recorded { file: full.file.try_clone().unwrap(), kept_state: second.kept_state };
    assert_eq!(device(&unrotated), device(&full), "a trace that was not rotated has no such file");
}

#[test]
fn a_rotated_trace_of_version_1_5_has_its_state_in_its_definitions() {
    let (_, full) = leaking_training(60);
    let golden = Recorded { file: temporary(include_bytes!("../golden/rotated-1.5.mtr")).unwrap(), kept_state: None };
    let process = assert_same_report(&golden, &full, "version 1.5");
    assert!(process.dropped.unwrap().events > 500);
    let last = events(&golden).last().unwrap().ticks;
    let (again, _) = rotated(&golden, Keep::Since(last * 3 / 4)).unwrap();
    assert_same_report(&again, &full, "rotated by this version");
    let (folder, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    written(&golden, folder.path());
    let out = RunFolder::open(copy.path()).unwrap();
    redact_run(&open_run(folder.path()).unwrap(), &out, [9; 32], &FinishOptions::default(), &mut |_| {}).unwrap();
    let (problems, process) = summary(copy.path());
    assert!(problems.is_empty(), "{problems:?}");
    let (of_copy, of_full) = (&process.devices[0], device(&full).0);
    assert_eq!((of_copy.steps, of_copy.highest), (of_full.steps, of_full.highest));
}

/// The content of the file, with a valid checksum.
fn with_checksum(version: u32, states: &str) -> Vec<u8> {
    format!("{{\"version\":{version},\"crc32\":{}}}\n{states}", crc32fast::hash(states.as_bytes())).into_bytes()
}

#[test]
fn without_a_file_that_fits_the_report_names_what_is_missing() {
    let (events, full) = leaking_training(60);
    let last = events.last().unwrap().ticks;
    let (new, rotation) = rotated(&full, Keep::Since(last / 2)).unwrap();
    let (expected, _) = device(&new);
    let good = new.kept_state.clone().unwrap();
    let states = String::from_utf8(good.clone()).unwrap().split_once('\n').unwrap().1.to_owned();
    let changed = |from: &str, to: &str| with_checksum(1, &states.replacen(from, to, 1));
    let other = rotated(&full, Keep::Since(last / 4)).unwrap().1.kept_state;
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (written(&new, folder.path()), folder.path().join("7.kept.jsonl"));
    let report = |case: &str, reason: &str| {
        let (problems, process) = summary(folder.path());
        let [problem] = &problems[..] else { panic!("{case}: {problems:?}") };
        assert!(problem.contains("7.kept.jsonl: ") && problem.contains(reason), "{case}: {problem}");
        let dropped = process.dropped.unwrap();
        assert_eq!(dropped.events, rotation.dropped, "{case}");
        assert!(dropped.text.contains("; steps and categories before are unknown"), "{case}: {}", dropped.text);
        let device = &process.devices[0];
        assert_eq!(device.highest, expected.highest, "{case}");
        assert!((1..expected.steps).contains(&device.steps), "{case}: {} steps", device.steps);
        assert!(LiveProcess::open(&path).unwrap().missing_state().is_some(), "{case}");
    };
    let contents = [
        ("empty", Vec::new(), "EOF"),
        ("truncated", good[..good.len() / 2].to_vec(), "it is damaged"),
        ("a changed byte", good.iter().enumerate().map(|(i, b)| b ^ u8::from(i == 90)).collect(), "it is damaged"),
        ("a newer version", with_checksum(2, &states), "format version 2 is not supported"),
        ("another trace", other, "it belongs to another trace"),
        ("no state", with_checksum(1, ""), "it belongs to another trace"),
        ("nested", with_checksum(1, &"[".repeat(1 << 20)), "invalid type"),
        ("nested objects", with_checksum(1, &"{\"more\":".repeat(1 << 16)), "EOF"),
        ("a huge number of events", changed("\"dropped\":", "\"dropped\":99999999999999999999"), "invalid type"),
        ("a huge number", changed("\"phase_changes\":", "\"phase_changes\":9999999"), "invalid value"),
        ("no JSON", with_checksum(1, "\0\u{1b}[2J\n"), "expected value"),
    ];
    for (case, content, reason) in &contents {
        std::fs::write(&file, content).unwrap();
        report(case, reason);
    }
    std::fs::remove_file(&file).unwrap();
    report("missing", "No such file");
    for target in ["/dev/zero", "/proc/self/environ", "7.mtr"] {
        symlink(target, &file).unwrap();
        report(target, "it is a symbolic link");
        std::fs::remove_file(&file).unwrap();
    }
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    report("a pipe", "it is not a regular file");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    report("a folder", "it is not a regular file");
    std::fs::remove_dir(&file).unwrap();
    std::fs::write(&file, &good).unwrap();
    // Only root can give a file away.
    if std::os::unix::fs::chown(&file, Some(65534), None).is_ok() {
        report("another user's file", "it belongs to another user");
    }
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, &good).unwrap();
    assert_eq!(summary(folder.path()).1.devices[0], expected, "with its file again");

    // The next rotation has only what came after this one.
    let (again, _) = rotated(&Recorded { kept_state: None, ..new }, Keep::Since(last * 3 / 4)).unwrap();
    let text = device(&again).1.dropped.unwrap().text;
    assert!(text.contains("steps and categories before are unknown"), "{text}");
}
