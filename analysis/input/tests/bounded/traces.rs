//! Traces: definitions, events, JSON and holes.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memtrace_input::Run;
use memtrace_input::load::TraceRecording;
use memtrace_input::{LostEvents, Recording};
use memtrace_trace::definition::{Definition, LabelOrigin, NoticeStatus, ScanOccasion, TensorKind};
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{End, MAGIC, Writer};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};

use crate::measured::open_measured;

const INFO: u8 = 0;
const DEFINITIONS: u8 = 1;
/// The largest payload of a frame, in bytes.
const MAX_PAYLOAD: usize = 16 << 20;

pub(crate) fn file_header() -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    header
}

/// A frame of `trace/FORMAT.md` with a compressed payload.
pub(crate) fn frame(kind: u8, raw: &[u8]) -> Vec<u8> {
    let stored = zstd::bulk::compress(raw, 1).unwrap();
    let mut frame = b"MTRF".to_vec();
    frame.extend([kind, 1, 0, 0]);
    frame.extend((stored.len() as u32).to_le_bytes());
    frame.extend((raw.len() as u32).to_le_bytes());
    frame.extend(crc32fast::hash(&stored).to_le_bytes());
    frame.extend(crc32fast::hash(&frame[..20]).to_le_bytes());
    frame.extend(stored);
    frame
}

/// A payload of 4 MiB, full of one definition.
fn full_of(definition: &Definition<'_>) -> Vec<u8> {
    let mut one = Vec::new();
    definition.encode(&mut one);
    one.repeat((4 << 20) / one.len())
}

/// Writes a trace and reads it. Returns the run and the size of the file.
fn read(folder: &Path, trace: &[u8]) -> (Run, usize) {
    let path: PathBuf = folder.join("7.mtr");
    std::fs::write(&path, trace).unwrap();
    (open_measured(&path, trace.len()).0.unwrap(), trace.len())
}

/// The problem of a trace that needs more than its budget.
fn problem(run: &Run) -> &str {
    let [problem] = run.problems() else { panic!("{:?}", run.problems()) };
    assert!(problem.text.contains("of its definitions and frames are left out"), "{}", problem.text);
    &problem.text
}

#[test]
fn definitions_of_every_kind_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(4000);
    let name = &*long;
    let (frame_id, context) = (FrameId(1), ContextId(1));
    let cases = [
        Definition::NnName { object: 1, seq: 1, class: "", name: "" },
        Definition::TensorName { address: 1, seq: 1, kind: TensorKind::Other, name: "", shape: "" },
        Definition::TensorName { address: 1, seq: 1, kind: TensorKind::Other, name, shape: name },
        Definition::Cycle { address: 1, seq: 1, file: "", text: "" },
        Definition::Holder { address: 1, seq: 1, path: "", shape: "" },
        Definition::Holder { address: 1, seq: 1, path: name, shape: name },
        Definition::HolderScan { seq: 1, occasion: ScanOccasion::End, objects: 1, is_partial: false },
        Definition::Label { id: 1, origin: LabelOrigin::Nvtx, text: name },
        Definition::Frame { id: frame_id, name, qualname: name, filename: name, line: 1, first_line: 1 },
        Definition::NnCall { id: context, caller: ContextId(0), object: 1, class: name },
        Definition::FrameOrigin { frame: frame_id, position: 1, name, filename: name, line: 1 },
        Definition::NativeFrame { id: frame_id, module: ModuleId(1), address: 1 },
        Definition::Module { id: ModuleId(1), path: name, build_id: "" },
        Definition::Thread { id: ThreadId(1), tid: 1, name },
    ];
    for definition in &cases {
        let block = frame(DEFINITIONS, &full_of(definition));
        let trace = [file_header(), block.repeat(48)].concat();
        assert!(trace.len() < 300_000, "{} bytes", trace.len());
        let (run, _) = read(folder.path(), &trace);
        let problem = problem(&run);
        let text = "it needs more memory than ";
        assert!(problem.contains(text), "{problem}");
        assert!(run.processes()[0].recording().damage().over_budget > 0);
    }
}

#[test]
fn many_different_definitions_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = (0..9u32).map(|block| {
        let mut raw = Vec::new();
        for id in (block * 200_000..).take(200_000) {
            let text = id.to_string();
            let definition = match block % 3 {
                0 => Definition::Label { id, origin: LabelOrigin::Nvtx, text: &text },
                1 => Definition::Notice { topic: "a", text: &text, status: NoticeStatus::Remark },
                _ => Definition::Device { ordinal: id, name: &text, total: 1, used_before: 0, pci: "" },
            };
            definition.encode(&mut raw);
        }
        frame(DEFINITIONS, &raw)
    });
    let trace = [file_header(), blocks.collect::<Vec<_>>().concat()].concat();
    read(folder.path(), &trace);
}

#[test]
fn gaps_between_ids_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    // Five definitions of each kind ask for tables of a gigabyte.
    let mut raw = Vec::new();
    for id in [1 << 19, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 24] {
        Definition::Frame { id: FrameId(id), name: "f", qualname: "f", filename: "f", line: 1, first_line: 1 }
            .encode(&mut raw);
        Definition::Stack { id: StackId(id), parent: StackId(0), frame: FrameId(id) }.encode(&mut raw);
        Definition::Context { id: ContextId(id), node: "n", forward: StackId(id), module: ContextId(0) }
            .encode(&mut raw);
        Definition::Module { id: ModuleId(id), path: "p", build_id: "" }.encode(&mut raw);
        Definition::Thread { id: ThreadId(id), tid: 1, name: "t" }.encode(&mut raw);
    }
    let (run, _) = read(folder.path(), &[file_header(), frame(DEFINITIONS, &raw)].concat());
    problem(&run);
}

#[test]
fn the_json_of_a_trace_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let info = [b"{\"argv\":[".to_vec(), b"\"\",".repeat(5 << 20), b"\"\"]}".to_vec()].concat();
    assert!(info.len() <= MAX_PAYLOAD);
    let trace = [file_header(), frame(INFO, &info).repeat(20)].concat();
    assert!(trace.len() < 100_000);
    let (run, _) = read(folder.path(), &trace);
    problem(&run);
    let deep = [b"{\"argv\":".to_vec(), b"[".repeat(8 << 20)].concat();
    read(folder.path(), &[file_header(), frame(INFO, &deep)].concat());
}

/// A small trace of the writer.
fn sound_trace() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), "{}").unwrap();
    for seq in 1..=1000 {
        writer
            .event(&Event { seq, size: 512, addr: 512 * seq, device: 0, action: Action::Alloc, ..Event::EMPTY })
            .unwrap();
    }
    writer.finish(&End { reason: "exited".into(), ..End::default() }).unwrap()
}

#[test]
fn the_holes_of_a_sparse_trace_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("7.mtr");
    let sound = sound_trace();
    std::fs::write(&path, &sound).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    // Frames behind holes of a tebibyte in total.
    for part in 1..=16u64 {
        file.write_all_at(&sound[16..], part << 36).unwrap();
    }
    file.set_len(2 << 40).unwrap();
    let (run, _) = open_measured(&path, 1 << 20);
    let run = run.unwrap();
    let recording = run.processes()[0].recording();
    assert_eq!(recording.event_count(), 17_000);
    let damage = recording.damage();
    assert!(damage.bytes_skipped > 1 << 40 && damage.is_tail_truncated, "{damage:?}");
}

#[test]
fn frames_over_holes_and_small_blocks_of_many_events_cost_work() {
    let folder = tempfile::tempdir().unwrap();
    // Each frame has 16 MiB of zeros decompressed, which is not valid.
    let unknown = frame(DEFINITIONS, &vec![0; MAX_PAYLOAD]);
    let trace = [file_header(), unknown.repeat(200)].concat();
    assert!(trace.len() < 1 << 20);
    let (run, _) = read(folder.path(), &trace);
    assert!(problem(&run).contains("it needs more work than the limit for "), "{}", problem(&run));
    let damage = run.processes()[0].recording().damage();
    // 512 bytes of steps for each stored byte, at 16 MiB a frame.
    let frames_read = 200 - damage.over_budget;
    let allowed = 2 * ((128 << 20) + 256 * trace.len() as u64) / MAX_PAYLOAD as u64;
    assert!(frames_read <= allowed, "{frames_read} frames of {allowed}: {damage:?}");
}

#[test]
fn a_block_has_no_more_shapes_than_events() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("7.mtr");
    // A block of one event whose table of shapes has two million entries of zeros.
    let mut columns = Vec::new();
    let mut put = |mut value: usize| {
        while value >= 128 {
            columns.push(value as u8 | 128);
            value >>= 7;
        }
        columns.push(value as u8);
    };
    put(MAX_PAYLOAD - 64);
    columns.extend(vec![0; MAX_PAYLOAD - 64]);
    columns.extend([1, 0].repeat(7));
    columns.push(0);
    let mut prefix = vec![0; 32];
    prefix[0] = 1;
    let stored = [prefix, zstd::bulk::compress(&columns, 3).unwrap()].concat();
    let mut block = b"MTRF".to_vec();
    block.extend([2, 1, 0, 0]);
    block.extend((stored.len() as u32).to_le_bytes());
    block.extend((columns.len() as u32).to_le_bytes());
    block.extend(crc32fast::hash(&stored).to_le_bytes());
    block.extend(crc32fast::hash(&block[..20]).to_le_bytes());
    block.extend(stored);
    std::fs::write(&path, [file_header(), block].concat()).unwrap();
    let recording = TraceRecording::open(&path).unwrap().with_threads(1);
    let (lost, cost) = crate::measured::measure(|| recording.stream(&mut |_| {}));
    assert_eq!(lost, LostEvents { blocks: 1, events: 1, first_error: lost.first_error.clone() });
    assert!(cost.peak < 64 << 20, "{cost:?}");
}

#[test]
fn many_small_traces_share_one_budget() {
    let folder = tempfile::tempdir().unwrap();
    let definition = Definition::NnName { object: 1, seq: 1, class: "", name: "" };
    let trace = [file_header(), frame(DEFINITIONS, &full_of(&definition))].concat();
    for pid in 1..=40 {
        std::fs::write(folder.path().join(format!("{pid}.mtr")), &trace).unwrap();
    }
    let (run, _) = open_measured(folder.path(), 40 * trace.len());
    let run = run.unwrap();
    assert_eq!(run.processes().len(), 40);
    assert!(run.problems().len() > 30, "{:?}", run.problems());
}

/// Whatever reads notices works on a bounded text: 30 KB of a hostile trace held 16 MB of it.
#[test]
fn notices_are_bounded_and_those_left_out_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let trace = |count: u32, text: &str| {
        let mut raw = Vec::new();
        for number in 0..count {
            let text = format!("{number}{text}");
            Definition::Notice { topic: "python", text: &text, status: NoticeStatus::Off }.encode(&mut raw);
        }
        read(folder.path(), &[file_header(), frame(INFO, b"{}"), frame(DEFINITIONS, &raw)].concat()).0
    };
    let notices = |run: &Run| {
        let process = &run.processes()[0];
        (process.definitions().notices.len(), process.recording().damage().malformed_definitions)
    };
    assert_eq!(notices(&trace(4096, "")), (4096, 0));
    assert_eq!(notices(&trace(4100, "")), (4096, 4));
    let (kept, left_out) = notices(&trace(1000, &"a/b.py:1 ".repeat(1000)));
    assert!((100..130).contains(&kept) && left_out == 1000 - kept as u64, "{kept} and {left_out}");
}
