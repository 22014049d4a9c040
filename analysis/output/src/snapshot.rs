//! The memory_viz snapshot: a pickle for pytorch.org/memory_viz, `python -m torch.cuda._memory_viz` and similar tools.
//!
//! Events are streamed from the recording into the file, one device after the other. The segments come from the replay.
//! Readers require that:
//!
//! - every event, block and segment is a dictionary of its own;
//! - times increase strictly on each device;
//! - an allocated block is always inside an existing segment;
//! - the final segments contain exactly the blocks that are allocated;
//! - if any event has a category, one has the category `unknown`. Otherwise the viewer throws.
//!
//! Memory that PyTorch's allocator does not manage (CUDA calls, CPU tensors) gets one segment per allocation. CPU
//! tensors are written only if a process used no device, and then as device 0.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::sync::Arc;

use memtrace_trace::clock::Calibration;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::{ContextId, StackId};

use super::background::BackgroundWriter;
use super::frames::FrameWriter;
use super::metadata::BlockMetadata;
use super::phrase::Phrase;
use super::pickle::{List, Memo, PickleWriter, Word, Words};
use super::sources::{SourceAccess, SourceFiles};
use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_input::{CompileContextId, CompileContexts};
use memtrace_insight::passes::{FirstPass, Phase, PhaseTracker, RangeNames};
use memtrace_insight::rules::CustomRules;
use memtrace_replay::{Allocator, Block, BlockState, Change, Replay, Segment};

/// The content of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SnapshotOptions {
    /// Which of the program's files the forward frames of backward blocks quote.
    pub sources: SourceAccess,
    /// The part of the recording: its events, and the segments at its end. From both, readers derive what existed at
    /// its beginning.
    pub window: Window,
    /// The rules that give blocks their custom categories, which are written into their `user_metadata`.
    pub custom_rules: Option<Arc<CustomRules>>,
}

/// Counts of the written events.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SnapshotReport {
    /// The number of events, over all devices.
    pub events: u64,
    /// The number of segments.
    pub segments: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// Writes the snapshot of one process as a pickle. `progress` receives the number of events read so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn snapshot(
    process: &Process,
    out: &mut (dyn Write + Send),
    options: &SnapshotOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<SnapshotReport> {
    let first_pass = FirstPass::of_process(process);
    std::thread::scope(|scope| {
        let writer = SnapshotWriter::new(process, &first_pass, BackgroundWriter::new(scope, out), options);
        writer.write(process, progress).map_err(Error::io("cannot write the snapshot"))
    })
}

struct SnapshotWriter<'a, W: Write> {
    pickle: PickleWriter<W>,
    words: Words,
    phrases: Phrases,
    frames: FrameWriter<'a>,
    metadata: BlockMetadata<'a>,
    first_pass: &'a FirstPass,
    compile_contexts: CompileContextWriter<'a>,
    calibration: Calibration,
    /// By our pool ids: PyTorch's pool ids. The default pool is included if the allocator reports the pools of events.
    pools: &'a BTreeMap<u16, (u64, u64)>,
    window: Window,
    has_unknown_category: bool,
    report: SnapshotReport,
}

/// The texts of compile contexts, each written once.
struct CompileContextWriter<'a> {
    all: &'a CompileContexts,
    written: HashMap<CompileContextId, Memo>,
}

/// The events of one device while they are written.
struct DeviceTrace {
    list: List,
    time_us: u64,
    tracker: PhaseTracker,
    last_free: Event,
}

/// One event as it is written.
struct Row<'e> {
    action: Word,
    e: &'e Event,
    stack: StackId,
    context: ContextId,
    category: Option<Phase>,
}

/// The parts that are the same in many events.
struct Phrases {
    /// By action.
    heads: Vec<Phrase>,
    size: Phrase,
    stream: Phrase,
    time: Phrase,
    no_compile_context: Phrase,
    no_metadata: Phrase,
    /// By phase.
    tails: Vec<Phrase>,
}

impl Phrases {
    fn new() -> Phrases {
        let head = |action: Word| {
            Phrase::begin(&[Word::Action, action, if action == Word::Oom { Word::DeviceFree } else { Word::Addr }])
        };
        let tail = |phase: Phase| Phrase::end(&[Word::Category, Word::of(phase.name()).unwrap_or(Word::Unknown)]);
        Phrases {
            heads: Word::all().map(head).collect(),
            size: Phrase::middle(&[Word::Size]),
            stream: Phrase::middle(&[Word::Stream]),
            time: Phrase::middle(&[Word::TimeUs]),
            no_compile_context: Phrase::middle(&[Word::CompileContext, Word::NotAvailable]),
            no_metadata: Phrase::middle(&[Word::UserMetadata, Word::Empty]),
            tails: Phase::ALL.into_iter().map(tail).collect(),
        }
    }
}

impl<'a, W: Write> SnapshotWriter<'a, W> {
    fn new(
        process: &'a Process,
        first_pass: &'a FirstPass,
        out: W,
        options: &'a SnapshotOptions,
    ) -> SnapshotWriter<'a, W> {
        let calibration = process.recording().calibration();
        let sources = SourceFiles::of(process, &options.sources);
        SnapshotWriter {
            pickle: PickleWriter::new(out),
            words: Words::new(),
            phrases: Phrases::new(),
            frames: FrameWriter::new(process.definitions(), sources),
            first_pass,
            metadata: BlockMetadata::new(process.definitions(), &first_pass.names, options.custom_rules.as_deref()),
            compile_contexts: CompileContextWriter {
                all: process.recording().compile_contexts(),
                written: HashMap::new(),
            },
            calibration,
            pools: &process.definitions().pools,
            window: options.window.clone(),
            has_unknown_category: false,
            report: SnapshotReport::default(),
        }
    }

    fn write(mut self, process: &Process, progress: &mut dyn FnMut(u64)) -> std::io::Result<SnapshotReport> {
        let sources = self.window.sources(process);
        let last = sources.keys().next_back().copied().unwrap_or(-1).max(0);
        let mut segments = Vec::new();
        self.pickle.begin_dict();
        self.pickle.str("device_traces");
        let mut traces = self.pickle.begin_list();
        for index in 0..=last {
            self.pickle.begin_item(&mut traces);
            let device = if index == 0 && sources.contains_key(&-1) { -1 } else { index };
            if sources.contains_key(&device) {
                segments.push((index, self.write_trace(process, device, progress)?));
            } else {
                let empty = self.pickle.begin_list();
                self.pickle.end_list(empty);
            }
        }
        self.pickle.end_list(traces);
        self.pickle.str("segments");
        let mut list = self.pickle.begin_list();
        for (device, segments) in &segments {
            for segment in segments {
                self.pickle.begin_item(&mut list);
                self.put_segment(*device, segment);
                self.pickle.drain()?;
            }
        }
        self.pickle.end_list(list);
        self.put_settings(process, segments.iter().any(|(_, s)| s.iter().any(|s| s.expandable)));
        self.put_annotations(process)?;
        self.pickle.end_dict();
        self.report.segments = segments.iter().map(|(_, s)| s.len() as u64).sum();
        self.report.bytes = self.pickle.finish()?;
        Ok(self.report)
    }

    /// Writes one device's events and returns its segments at the end.
    fn write_trace(
        &mut self,
        process: &Process,
        device: i16,
        progress: &mut dyn FnMut(u64),
    ) -> std::io::Result<Vec<Segment>> {
        let mut replay = Replay::new(process.trace_index(), Some(device));
        let mut trace = DeviceTrace {
            list: self.pickle.begin_list(),
            time_us: 0,
            tracker: self.first_pass.tracker(process.recording()),
            last_free: Event::EMPTY,
        };
        let mut failed = None;
        let mut done = 0;
        process.recording().stream(&mut |events| {
            if failed.is_some() {
                return;
            }
            for e in events {
                if self.window.is_past(e.seq) {
                    break;
                }
                if e.source == Source::Label {
                    trace.tracker.observe_label(e);
                    continue;
                }
                replay.apply(e, |replay, slot, e, change| {
                    self.put_change(&mut trace, &replay.devices()[slot].allocator, e, change);
                });
                // A block of events can become several megabytes of pickle.
                if let Err(e) = self.pickle.drain() {
                    failed = Some(e);
                    return;
                }
            }
            done += events.len() as u64;
            progress(done);
        });
        if let Some(e) = failed {
            return Err(e);
        }
        self.pickle.end_list(trace.list);
        Ok(replay.devices().first().map(|d| self.window.segments(&d.allocator)).unwrap_or_default())
    }

    #[inline]
    fn put_change(&mut self, trace: &mut DeviceTrace, allocator: &Allocator, e: &Event, change: Change) {
        if e.flags.contains(Flags::PREEXISTING) {
            // Nothing happened: readers find such a block in the segments or by its free.
            return;
        }
        // Events outside the window still move the program's position.
        let phase = match change {
            Change::Alloc(_) | Change::FreeRequested(_) | Change::Oom => Some(trace.tracker.observe(e).phase),
            _ => None,
        };
        if let Change::FreeRequested(_) = change {
            trace.last_free = *e;
        }
        if !self.window.contains(e.seq) || !self.window.shows_change(allocator, e, &change) {
            return;
        }
        let row = |action| Row { action, e, stack: e.stack, context: e.context, category: None };
        match change {
            Change::Alloc(id) => {
                let block = allocator.block(id);
                if block.segment.implied {
                    let segment = Event { size: block.size, ..*e };
                    self.put_row(trace, Row { e: &segment, ..row(Word::SegmentAlloc) });
                }
                self.put_row(trace, Row { category: phase, ..row(Word::Alloc) });
            }
            Change::FreeRequested(id) => {
                let request = Event { size: allocator.block(id).requested, ..*e };
                self.put_row(trace, Row { e: &request, ..row(Word::FreeRequested) });
            }
            Change::FreeCompleted(_, block) => {
                let mut completion = Event { size: block.requested, ..*e };
                // A completion that follows its request at once is recorded without a second stack.
                let is_immediate = trace.last_free.addr == e.addr && e.stack.is_none() && e.context.is_none();
                if is_immediate {
                    (completion.stack, completion.context) = (trace.last_free.stack, trace.last_free.context);
                }
                let (stack, context) = (completion.stack, completion.context);
                self.put_row(trace, Row { e: &completion, stack, context, ..row(Word::FreeCompleted) });
                if block.segment.implied {
                    completion.size = block.size;
                    self.put_row(trace, Row { e: &completion, stack, context, ..row(Word::SegmentFree) });
                }
            }
            Change::SegmentGained | Change::SegmentLost => {
                let action = match e.action {
                    Action::SegmentAlloc => Word::SegmentAlloc,
                    Action::SegmentFree => Word::SegmentFree,
                    Action::SegmentMap => Word::SegmentMap,
                    _ => Word::SegmentUnmap,
                };
                self.put_row(trace, row(action));
            }
            Change::Oom => self.put_row(trace, row(Word::Oom)),
            Change::Snapshot => self.put_row(trace, row(Word::Snapshot)),
            Change::None => {}
        }
    }

    #[inline]
    fn put_row(&mut self, trace: &mut DeviceTrace, row: Row<'_>) {
        let Row { action, e, stack, context, category } = row;
        let (out, words, phrases) = (&mut self.pickle, &mut self.words, &mut self.phrases);
        // Two events in one microsecond get different times, because readers use the time as a key.
        trace.time_us = (self.calibration.epoch_ns(e.ticks) / 1000).max(trace.time_us + 1);
        out.begin_item(&mut trace.list);
        phrases.heads[action as usize].put(out, words);
        out.uint(e.addr);
        phrases.size.put(out, words);
        out.uint(e.size);
        phrases.stream.put(out, words);
        out.uint(e.stream);
        phrases.time.put(out, words);
        out.uint(trace.time_us);
        match self.compile_contexts.all.of(e.seq) {
            CompileContextId::NONE => phrases.no_compile_context.put(out, words),
            id => {
                words.put(out, Word::CompileContext);
                match self.compile_contexts.written.get(&id) {
                    Some(memo) => out.get(*memo),
                    None => {
                        let memo = out.shared_str(self.compile_contexts.all.text(id).unwrap_or_default());
                        self.compile_contexts.written.insert(id, memo);
                    }
                }
            }
        }
        let has_metadata = action == Word::Alloc && self.metadata.put(out, e, |out| words.put(out, Word::UserMetadata));
        if !has_metadata {
            phrases.no_metadata.put(out, words);
        }
        if e.source == Source::Torch && self.pools.contains_key(&0) {
            words.put(out, Word::PoolId);
            let (first, second) = self.pools.get(&e.pool).copied().unwrap_or((0, 0));
            out.pair(first, second);
        }
        self.frames.put_keys(out, words, stack, context);
        if !self.has_unknown_category {
            // The viewer throws on a file with categories that lacks this one.
            self.has_unknown_category = true;
            words.put(out, Word::Category);
            words.put(out, Word::Unknown);
            out.end_dict();
        } else if let Some(phase) = category {
            phrases.tails[phase as usize].put(out, words);
        } else {
            out.end_dict();
        }
        self.report.events += 1;
    }

    fn put_segment(&mut self, device: i16, segment: &Segment) {
        let pool = self.pools.get(&segment.pool).copied().unwrap_or((0, 0));
        let sum = |of: fn(&Block) -> u64| segment.blocks.iter().map(of).sum::<u64>();
        let (out, words) = (&mut self.pickle, &mut self.words);
        out.begin_dict();
        words.put(out, Word::Device);
        out.int(device.into());
        words.put(out, Word::Address);
        out.uint(segment.addr);
        words.put(out, Word::TotalSize);
        out.uint(segment.size);
        words.put(out, Word::AllocatedSize);
        out.uint(sum(|b| if b.state == BlockState::Allocated { b.size } else { 0 }));
        words.put(out, Word::ActiveSize);
        out.uint(sum(|b| if b.is_active() { b.size } else { 0 }));
        words.put(out, Word::RequestedSize);
        out.uint(sum(|b| if b.is_active() { b.requested } else { 0 }));
        words.put(out, Word::Stream);
        out.uint(segment.stream);
        words.put(out, Word::SegmentType);
        words.put(out, if segment.small { Word::Small } else { Word::Large });
        words.put(out, Word::SegmentPoolId);
        out.pair(pool.0, pool.1);
        words.put(out, Word::IsExpandable);
        out.bool(segment.expandable);
        self.frames.put_keys(out, words, segment.stack, segment.context);
        words.put(out, Word::Blocks);
        let mut blocks = out.begin_list();
        for block in &segment.blocks {
            out.begin_item(&mut blocks);
            out.begin_dict();
            words.put(out, Word::Address);
            out.uint(block.addr);
            words.put(out, Word::Size);
            out.uint(block.size);
            words.put(out, Word::RequestedSize);
            out.uint(block.requested);
            words.put(out, Word::State);
            words.put(
                out,
                match block.state {
                    BlockState::Allocated => Word::ActiveAllocated,
                    BlockState::PendingFree => Word::ActivePendingFree,
                    BlockState::Inactive | BlockState::Unmapped => Word::Inactive,
                },
            );
            self.frames.put_keys(out, words, block.stack, block.context);
            out.end_dict();
        }
        out.end_list(blocks);
        out.end_dict();
    }

    /// Writes the starts and ends of ranges that the program or PyTorch has named. PyTorch's recorder writes them under
    /// `global_record_annotations`: for the device of the latest allocation.
    fn put_annotations(&mut self, process: &Process) -> std::io::Result<()> {
        self.pickle.str("external_annotations");
        let mut list = self.pickle.begin_list();
        let mut names = RangeNames::new(process.definitions());
        let mut device = process.trace_index().sources.keys().copied().find(|d| *d >= 0).unwrap_or(0);
        let mut failed = Ok(());
        let mut put = |events: &[Event]| {
            for e in events {
                if e.source != Source::Label {
                    if e.source.is_torch() && e.device >= 0 {
                        device = e.device;
                    }
                    continue;
                }
                let Some(label) = names.label(e).filter(|_| self.window.contains(e.seq)) else { continue };
                let out = &mut self.pickle;
                out.begin_item(&mut list);
                out.begin_dict();
                out.str("stage");
                out.str(if e.action == Action::RangeStart { "START" } else { "END" });
                out.str("name");
                out.str(&label.text);
                out.str("device");
                out.int(device.into());
                self.words.put(out, Word::TimeUs);
                out.uint(self.calibration.epoch_ns(e.ticks) / 1000);
                out.end_dict();
            }
            if failed.is_ok() {
                failed = self.pickle.drain();
            }
        };
        if !process.definitions().labels.is_empty() {
            process.recording().stream(&mut put);
        }
        failed?;
        self.pickle.end_list(list);
        Ok(())
    }

    fn put_settings(&mut self, process: &Process, expandable: bool) {
        let conf = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
            .iter()
            .find_map(|name| process.info().env.get(*name))
            .map_or("", String::as_str);
        let out = &mut self.pickle;
        out.str("allocator_settings");
        out.begin_dict();
        out.str("PYTORCH_CUDA_ALLOC_CONF");
        out.str(conf);
        out.str("expandable_segments");
        out.bool(expandable);
        out.end_dict();
    }
}
