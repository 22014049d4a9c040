//! Native frames in all results of a run: phases, reports, JSON, snapshots; on the recording machine and on others.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::native_objects::{compile, id_of, look_up, symbols};
use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::passes::Phase;
use memtrace_analysis::report::FrameSummary;
use memtrace_analysis::symbols::{FunctionName, SYMBOLS_FILE, Search};
use memtrace_analysis::{FinishOptions, Run, RunFolder, Summary, TextOptions, ToText, finish_run, open_run, summarize};
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{End, Writer};
use memtrace_trace::ids::{FrameId, ModuleId, StackId, ThreadId};
use serde_json::Value;

/// A library that allocates through functions with PyTorch's names.
const LIBRARY: &str = r#"
#include <cstdlib>
namespace c10 { namespace cuda { namespace CUDACachingAllocator {
__attribute__((noinline)) void* raw_alloc(unsigned long n) {
    void* p = std::malloc(n);
    return p ? p : std::calloc(n, 1);
}
}}}
namespace app {
template <typename T> inline T* buffer(unsigned long n) {
    return static_cast<T*>(c10::cuda::CUDACachingAllocator::raw_alloc(n * sizeof(T)));
}
__attribute__((noinline)) float* train(unsigned long n) {
    float* made = buffer<float>(n);
    made[0] = 1;
    return made;
}
}
"#;

struct Recorded {
    folder: tempfile::TempDir,
    library: PathBuf,
}

impl Recorded {
    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn open(&self) -> Run {
        open_run(self.run()).unwrap()
    }

    fn summary(&self) -> Summary {
        summarize(&self.open(), &mut |_| {}).unwrap()
    }

    fn snapshot(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        snapshot(&self.open().processes()[0], &mut bytes, &SnapshotOptions::default(), &mut |_| {}).unwrap();
        bytes
    }
}

/// An address in `function` (after a call) where `inlined` is inlined, or nothing if it is `None`.
fn address_in(library: &Path, function: &str, inlined: Option<&str>) -> u64 {
    let (range, _) =
        symbols(library).into_iter().find(|(_, raw)| FunctionName::of(raw).full.contains(function)).unwrap();
    let all: Vec<u64> = range.collect();
    let (frames, _) = look_up(library, &id_of(library), &all, &Search::default());
    let fits = |address: &&u64| match inlined {
        Some(name) => frames[*address].first().is_some_and(|f| f.0.contains(name)) && frames[*address].len() == 2,
        None => frames[*address].len() == 1,
    };
    all.iter().rev().find(fits).unwrap_or_else(|| panic!("no such place in {function}: {frames:?}")) + 1
}

/// A recording in which Python calls a module's forward, which allocates through native code. A thread without Python
/// also allocates through it.
fn recorded() -> Recorded {
    let folder = tempfile::tempdir().unwrap();
    let library = compile(folder.path(), "app.cpp", LIBRARY, &[]);
    let recorded = Recorded { library, folder };
    std::fs::create_dir(recorded.run()).unwrap();
    let mut writer = Writer::new(Vec::new(), r#"{"pid":7,"argv":["python","train.py"]}"#).unwrap();
    let mut define = |definition: Definition<'_>| {
        let mut bytes = Vec::new();
        definition.encode(&mut bytes);
        writer.definition(&bytes).unwrap();
    };
    let python = |id, name, filename, line| Definition::Frame {
        id: FrameId(id),
        name,
        qualname: name,
        filename,
        line,
        first_line: 1,
    };
    let build_id = id_of(&recorded.library);
    let native = |id, address| Definition::NativeFrame { id: FrameId(id), module: ModuleId(1), address };
    let stack =
        |id, parent, frame| Definition::Stack { id: StackId(id), parent: StackId(parent), frame: FrameId(frame) };
    define(Definition::Module { id: ModuleId(1), path: recorded.library.to_str().unwrap(), build_id: &build_id });
    define(python(1, "<module>", "/home/me/train.py", 5));
    define(python(2, "forward", "/x/site-packages/torch/nn/modules/linear.py", 134));
    define(native(3, address_in(&recorded.library, "app::train", Some("app::buffer"))));
    define(native(4, address_in(&recorded.library, "raw_alloc", None)));
    define(native(5, 0x10));
    define(Definition::NativeFrame { id: FrameId(6), module: ModuleId::NONE, address: 0x7f00_1234 });
    define(stack(1, 0, 1));
    define(stack(2, 1, 2));
    define(stack(3, 2, 3));
    define(stack(4, 3, 4));
    define(stack(5, 0, 6));
    define(stack(6, 5, 5));
    define(stack(7, 6, 3));
    define(stack(8, 7, 4));
    define(stack(9, 2, 4));
    writer.clock(ClockPoint { ticks: 0, monotonic_ns: 0, realtime_ns: 1_790_000_000_000_000_000 }).unwrap();
    let base = Event {
        source: Source::Torch,
        device: 0,
        flags: Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED),
        thread: ThreadId(1),
        ..Event::EMPTY
    };
    let mut event = |seq, action, addr, size, stack| {
        let event = Event { seq, ticks: seq * 1000, action, addr, size, stack: StackId(stack), ..base };
        writer.event(&event).unwrap();
    };
    event(1, Action::SegmentAlloc, 1 << 30, 64 << 20, 4);
    event(2, Action::Alloc, 1 << 30, 8 << 20, 4);
    event(3, Action::Alloc, (1 << 30) + (8 << 20), 4 << 20, 8);
    event(4, Action::Alloc, (1 << 30) + (16 << 20), 1 << 20, 9);
    // Freed by a thread without Python. Nothing ties it to the forward pass.
    event(5, Action::FreeRequested, 1 << 30, 8 << 20, 8);
    event(6, Action::FreeCompleted, 1 << 30, 8 << 20, 0);
    event(7, Action::FreeRequested, (1 << 30) + (16 << 20), 1 << 20, 8);
    event(8, Action::FreeCompleted, (1 << 30) + (16 << 20), 1 << 20, 0);
    event(9, Action::Alloc, 1 << 30, 2 << 20, 4);
    let bytes = writer.finish(&End { wait_status: Some(0), reason: "exited".into(), ..End::default() }).unwrap();
    std::fs::write(recorded.run().join("7.mtr"), bytes).unwrap();
    recorded
}

/// The line number of a text in the library's source.
fn line_of(text: &str) -> u32 {
    LIBRARY.lines().position(|line| line.contains(text)).unwrap() as u32 + 1
}

#[test]
fn reports_show_native_frames_and_their_libraries() {
    let recorded = recorded();
    let summary = recorded.summary();
    let device = &summary.processes[0].devices[0];
    let peak = device.peak.as_ref().unwrap();
    let place = |bytes: u64| &peak.largest_allocations.iter().find(|entry| entry.bytes == bytes).unwrap().stack;

    // If there is a Python frame, its line is responsible.
    let mixed = place(8 << 20);
    assert_eq!(mixed.location, "me/train.py:5, modules/linear.py:134 forward");
    let source = recorded.folder.path().join("app.cpp").to_str().unwrap().to_owned();
    let frame = |name: &str, line| FrameSummary { name: name.into(), filename: source.clone(), line, native: true };
    let native = [
        ("c10::cuda::CUDACachingAllocator::raw_alloc(unsigned long)", 0),
        ("float* app::buffer<float>(unsigned long)", line_of("static_cast<T*>")),
        ("app::train(unsigned long)", line_of("buffer<float>(n);")),
    ];
    let shown: Vec<&FrameSummary> = mixed.frames.iter().filter(|f| f.native).collect();
    assert_eq!(shown.len(), 3, "{shown:?}");
    assert_eq!((&*shown[0].name, &shown[0].filename), (native[0].0, &source));
    assert_eq!(shown[1..], [&frame(native[1].0, native[1].1), &frame(native[2].0, native[2].1)]);
    let python: Vec<&str> = mixed.frames.iter().filter(|f| !f.native).map(|f| &*f.name).collect();
    assert_eq!(python, ["forward", "<module>"]);
    assert!(mixed.frames[..3].iter().all(|f| f.native), "innermost first: {:?}", mixed.frames);

    // Otherwise the innermost native frame that does more than allocate is responsible.
    let alone = place(4 << 20);
    let file = source.rsplit('/').take(2).collect::<Vec<_>>();
    let expected = format!("{}/{}:{} app::buffer [native]", file[1], file[0], native[1].1);
    assert_eq!(alone.location, expected);
    let outer: Vec<(&str, &str)> =
        alone.frames.iter().rev().take(2).map(|f| (&*f.name, f.filename.rsplit('/').next().unwrap())).collect();
    let library = recorded.library.file_name().unwrap().to_str().unwrap();
    assert_eq!(outer, [("0x7f001234", "<generated code>"), (&*format!("{library}+0x10"), library)]);

    // In the end-of-run summary, sources that differ only in native frames are one source.
    let page = summary.to_text(&TextOptions::default());
    let has_row = |parts: &[&str]| page.lines().any(|line| parts.iter().all(|part| line.contains(part)));
    let merged = "activations in 2 blocks  me/train.py:5, modules/linear.py:134 forward";
    assert!(has_row(&["9.00 MiB", merged]), "{page}");
    assert!(has_row(&["4.00 MiB", "  activations  ", "app::buffer [native]"]), "{page}");
    assert_eq!(summary.native_objects.len(), 1);
    let object = &summary.native_objects[0];
    assert_eq!((object.addresses, object.addresses_with_function, object.addresses_with_line), (3, 2, 2));
    let json: Value = serde_json::from_str(&summary.to_json()).unwrap();
    let frames =
        json.pointer("/processes/0/devices/0/peak/largest_allocations/0/stack/frames").unwrap().as_array().unwrap();
    assert_eq!(frames[0]["native"], true);
    assert_eq!(frames.last().unwrap().get("native"), None);

    // Phases come from Python frames; native frames are ignored.
    let forward = device.first_step.iter().find(|p| p.phase == Phase::Forward).unwrap();
    assert_eq!((forward.allocations, forward.freed_bytes), (2, 0), "{forward:?}");
    assert_eq!(device.steps, 2, "the model is called anew");
}

#[test]
fn snapshots_have_native_frames_as_pytorch_writes_them() {
    let recorded = recorded();
    let path = recorded.folder.path().join("x.pickle");
    std::fs::write(&path, recorded.snapshot()).unwrap();
    let code = "import json, pickle, sys; json.dump(pickle.load(open(sys.argv[1], 'rb')), sys.stdout)";
    let output = Command::new("python3").args(["-c", code]).arg(&path).output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let snapshot: Value = serde_json::from_slice(&output.stdout).unwrap();
    let trace = snapshot["device_traces"][0].as_array().unwrap();
    let alloc = trace.iter().find(|e| e["action"] == "alloc").unwrap();
    let frames = alloc["frames"].as_array().unwrap();
    let names: Vec<&str> = frames.iter().map(|f| f["name"].as_str().unwrap()).collect();
    let expected = [
        "c10::cuda::CUDACachingAllocator::raw_alloc(unsigned long)",
        "float* app::buffer<float>(unsigned long)",
        "app::train(unsigned long)",
        "forward",
        "<module>",
    ];
    assert_eq!(names, expected);
    for frame in frames {
        let mut keys: Vec<&String> = frame.as_object().unwrap().keys().collect();
        keys.sort();
        assert_eq!(keys, ["filename", "line", "name"], "Mosaic refuses any other key");
    }
    assert_eq!(frames[1]["line"], line_of("static_cast<T*>"));
}

#[test]
fn a_run_is_read_the_same_without_its_libraries() {
    let recorded = recorded();
    let options = FinishOptions::default();
    finish_run(&RunFolder::open(&recorded.run()).unwrap(), &options, &mut |_| {}).unwrap();
    assert!(recorded.run().join(SYMBOLS_FILE).is_file());
    assert!(recorded.open().new_symbols().is_none(), "the run folder holds everything");
    let here = (recorded.summary(), recorded.snapshot());
    std::fs::remove_file(&recorded.library).unwrap();
    let elsewhere = (recorded.summary(), recorded.snapshot());
    assert!(here == elsewhere);
    assert!(elsewhere.0.to_text(&TextOptions::default()).contains("app::buffer [native]"));
    // A single trace uses the symbols beside it.
    let trace = summarize(&open_run(recorded.run().join("7.mtr")).unwrap(), &mut |_| {}).unwrap();
    assert_eq!(trace.processes, here.0.processes);

    // Symbols of another build of the library are not used.
    let symbols = recorded.run().join(SYMBOLS_FILE);
    let text = std::fs::read_to_string(&symbols).unwrap();
    let build_id = &here.0.native_objects[0].build_id;
    std::fs::write(&symbols, text.replace(build_id, &"0".repeat(40))).unwrap();
    let other = recorded.summary();
    assert_eq!((other.native_objects[0].addresses_with_function, other.native_objects[0].addresses), (0, 3));
    let text = other.to_text(&TextOptions::default());
    let page = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(page.contains("Missing symbols") && page.contains("does not exist") && !page.contains("app::"), "{page}");
}

#[test]
fn unreadable_symbol_files_are_replaced_by_a_new_lookup() {
    let recorded = recorded();
    finish_run(&RunFolder::open(&recorded.run()).unwrap(), &FinishOptions::default(), &mut |_| {}).unwrap();
    let expected = recorded.summary();
    let symbols = recorded.run().join(SYMBOLS_FILE);
    let text = std::fs::read_to_string(&symbols).unwrap();
    for bad in ["", "{}", "{\"version\":99,\"objects\":[]}", &text[..text.len() / 2]] {
        std::fs::write(&symbols, bad).unwrap();
        let mut summary = recorded.summary();
        assert!(summary.problems.len() == 1 && summary.problems[0].contains(SYMBOLS_FILE), "{:?}", summary.problems);
        summary.problems.clear();
        summary.conclude();
        assert_eq!(summary, expected);
    }
    // Other damage in the file: invalid indices of texts, and invalid addresses.
    let mangled = text.replace("[[", "[[4000000000,4000000001,3],[").replace("\"10\":", "\"zz\":");
    assert_ne!(mangled, text);
    std::fs::write(&symbols, mangled).unwrap();
    assert!(recorded.summary().problems.is_empty());
}
