//! Native stacks of programs of all kinds equal gdb's, frame by frame. The debugger stops the recorded process inside
//! each allocation and unwinds it with its own code.
//!
//! Needs gdb, g++ and binutils (`apt-get install gdb g++ binutils`).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events, root};
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{Definitions, Reader};
use memtrace_trace::ids::StackId;
use serde_json::Value;

/// Frames as (file name of the object, address in the object's own numbering), innermost first.
type Frames = Vec<(String, u64)>;

/// The CUDA libraries. Frames inside them do not belong to the program.
const CUDA: [&str; 3] = ["libcuda.so.1", "libcudart.so.12", "libcudart.so.13"];

fn needs(command: &str, package: &str) {
    let found = Command::new(command).arg("--version").output().is_ok_and(|o| o.status.success());
    assert!(found, "{command} is needed: apt-get install {package}");
}

fn is_cuda(object: &str) -> bool {
    CUDA.iter()
        .any(|name| object.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-'])))
}

fn file_name(path: &str) -> String {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| PathBuf::from(path));
    real.file_name().unwrap_or(OsStr::new("")).to_string_lossy().into_owned()
}

fn native_frames(definitions: &Definitions, stack: StackId) -> Frames {
    let frame = |id| {
        let frame = definitions.native_frames.get(&id).expect("a native frame");
        (definitions.module(frame.module).map(file_name).unwrap_or_default(), frame.address)
    };
    definitions.walk_ids(stack).map(|(_, id)| frame(id)).collect()
}

/// One allocation as gdb saw it.
struct Call {
    function: String,
    size: u64,
    frames: Frames,
}

fn read(path: &Path) -> Vec<Call> {
    let text = std::fs::read_to_string(path).expect("gdb's stacks");
    let call = |line: &str| {
        let call: Value = serde_json::from_str(line).expect("a line of JSON");
        let frame = |f: &Value| (file_name(f[0].as_str().expect("an object")), f[1].as_u64().expect("an address"));
        Call {
            function: call["function"].as_str().expect("a function").to_owned(),
            size: call["size"].as_u64().expect("a size"),
            frames: call["frames"].as_array().expect("frames").iter().map(frame).collect(),
        }
    };
    text.lines().map(call).collect()
}

/// Our own library takes part in the call. It is removed from gdb's frames, as it is from ours.
fn without_ours(frames: &[(String, u64)]) -> Frames {
    frames.iter().filter(|(object, _)| !object.contains("memtrace")).cloned().collect()
}

/// The command line that runs this command under gdb.
fn by_gdb<S: AsRef<OsStr>>(command: &[S]) -> Vec<std::ffi::OsString> {
    needs("gdb", "gdb");
    needs("nm", "binutils");
    let script = root().join("tests/programs/native/gdb.py");
    let mut words: Vec<_> = ["gdb", "-batch", "-nx", "-x"].map(Into::into).into();
    words.extend([script.into(), "--args".into()]);
    words.extend(command.iter().map(|s| s.as_ref().to_owned()));
    words
}

/// Runs a program under gdb under memtrace, and compares the native stack of each runtime and driver allocation.
/// Returns gdb's calls and the run.
#[track_caller]
fn compare(traced: TracedProgram, options: &[&str]) -> (Vec<Call>, Run) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let traced = options.iter().fold(traced, |traced, option| traced.option(option));
    let run = traced.env("GDB_STACKS", file.path()).run();
    run.assert_ended_well();
    let theirs = read(file.path());
    let trace = run.trace();
    let definitions = trace.definitions();
    let mut ours: BTreeMap<(String, u64), Vec<StackId>> = BTreeMap::new();
    for e in allocations(&trace) {
        if let (Source::Driver | Source::Runtime, Some(symbol)) = (e.source, e.api.symbol()) {
            ours.entry((symbol.to_owned(), e.size)).or_default().push(e.stack);
        }
    }
    for list in ours.values_mut() {
        list.reverse();
    }
    for call in &theirs {
        let name = (call.function.clone(), call.size);
        let stack = ours.get_mut(&name).and_then(Vec::pop).unwrap_or_else(|| panic!("no event of {name:?}"));
        // gdb's innermost frame is the function itself; our innermost frame is its caller.
        let expected = without_ours(&call.frames[1..]);
        let found = native_frames(definitions, stack);
        for (index, (a, b)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(a, b, "frame {index} of {name:?} (left: ours, right: gdb's)\n{found:#x?}\n{expected:#x?}");
        }
        assert_eq!(found.len(), expected.len(), "frames of {name:?}");
    }
    let cut = trace.counter(memtrace_trace::counters::Counter::StacksTruncated);
    assert_eq!(cut, 0, "every stack could be walked");
    (theirs, run)
}

fn allocations(trace: &Reader) -> Vec<Event> {
    events(trace).into_iter().filter(|e| e.action == Action::Alloc).collect()
}

const NATIVE: &[&str] = &["--stacks", "native"];

#[test]
fn frames_of_c_without_frame_pointers_match_gdb() {
    let programs = ProgramFolder::new();
    let optimized = ["-O2", "-fomit-frame-pointer", "-mtune=generic"].map(str::to_owned);
    let options = [&optimized[..], &linked_with("libcudart.so.12"), &linked_with("libcuda.so.1")].concat();
    let program = programs.program("native/frames.c", "frames", &options);
    // The result is the same with every option, because there are no Python frames.
    for options in [NATIVE, &["--stacks", "both"], &[]] {
        let (calls, _) = compare(with_simcuda(&by_gdb(&[&program])), options);
        let deepest = calls.iter().map(|call| call.frames.len()).max().unwrap_or(0);
        assert!(calls.len() > 60 && deepest > 350, "{} calls, {deepest} frames", calls.len());
    }
}

#[test]
fn frames_of_cpp_with_exceptions_callbacks_and_signals_match_gdb() {
    needs("g++", "g++");
    let programs = ProgramFolder::new();
    let program = programs.path("places");
    let source = root().join("tests/programs/native/places.cpp");
    let mut command = Command::new("g++");
    command.args(["-O2", "-g", "-fomit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]);
    let output = command.arg(&program).arg(source).args(linked_with("libcudart.so.13")).output().expect("g++");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (calls, _) = compare(with_simcuda(&by_gdb(&[&program])), NATIVE);
    // Each allocation is one call in the runtime and one in the driver.
    assert!(calls.len() > 100, "{} calls", calls.len());
}

/// The names of an allocation's frames, innermost first, with their objects.
fn named(definitions: &Definitions, stack: StackId) -> Vec<(String, String)> {
    let frame = |(_, id)| {
        let native = definitions.native_frames.get(&id);
        let module = native.and_then(|f| definitions.module(f.module)).map(file_name).unwrap_or_default();
        (definitions.frame(id).map(|f| f.name.to_string()).unwrap_or_default(), module)
    };
    definitions.walk_ids(stack).map(frame).collect()
}

#[test]
fn a_library_at_a_reused_address_has_its_own_frames() {
    let programs = ProgramFolder::new();
    let library = |name: &str, options: &[&str]| {
        let options =
            [&options.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()[..], &linked_with("libcudart.so.12")];
        programs.library("native/unloaded.c", name, &options.concat())
    };
    let one = library("libone.so", &["-DOUTER=outer_one", "-DINNER=inner_one", "-DROOM=1000"]);
    let two = library("libtwo.so", &["-DOUTER=outer_two", "-DINNER=inner_two", "-DROOM=4000"]);
    let program = programs.program("native/unload.c", "unload", &linked_with("libcudart.so.12"));
    let traced = with_simcuda(&[&program, &one, &two]);
    let alone = traced.run_alone();
    let run = NATIVE.iter().fold(traced, |traced, option| traced.option(option)).run();
    run.assert_ended_well();
    assert_eq!(alone.status, run.output.status);
    let stdout = String::from_utf8_lossy(&run.output.stdout);
    assert!(stdout.contains("the same place"), "the second library is loaded where the first one was: {stdout}");

    let trace = run.trace();
    assert_eq!(trace.counter(memtrace_trace::counters::Counter::StacksTruncated), 0);
    let opened = memtrace_analysis::open_run(run.path()).expect("the run");
    let [process] = opened.processes() else { panic!("one process") };
    let definitions = process.definitions();
    let mut compared = 0;
    for event in allocations(&trace).into_iter().filter(|e| e.source == Source::Runtime && e.size < 2 << 20) {
        let name = if event.size % 2 == 1 { "one" } else { "two" };
        let library = format!("lib{name}.so");
        let [inner, outer, main] = [format!("inner_{name}"), format!("outer_{name}"), "main".to_owned()];
        let expected = [(inner, library.clone()), (outer, library), (main, "unload".to_owned())];
        assert_eq!(named(definitions, event.stack).get(..3), Some(&expected[..]), "{} bytes", event.size);
        compared += 1;
    }
    assert_eq!(compared, 12);
}

/// Tests that take long.
mod exhaustive {
    use super::*;

    #[test]
    fn frames_of_pytorch_match_gdb() {
        let program = root().join("tests/programs/native/big_tensors.py");
        let command = by_gdb(&["python".as_ref(), program.as_os_str()]);
        let traced = TracedProgram::command(&command).over_simcuda().env("GDB_SMALLEST", "20000000");
        let (calls, run) = compare(traced, NATIVE);
        let has = |call: &&Call, object: &str| call.frames.iter().any(|(name, _)| name.starts_with(object));
        // On the thread of the interpreter and on that of the backward pass, through PyTorch's operators.
        let (main, other): (Vec<_>, Vec<_>) =
            calls.iter().partition(|call| has(call, "python") || has(call, "libpython"));
        for (calls, least) in [(&main, 3), (&other, 2)] {
            let through = calls.iter().filter(|call| has(call, "libtorch_cpu") && has(call, "libc10_cuda")).count();
            assert!(through >= least, "{through} of {}", calls.len());
        }
        // The tensor's own event has the same callers, from a place a few calls away in the allocator.
        let outside = |frames: Frames| {
            let inside = |(object, _): &&(String, u64)| object.starts_with("libc10") || is_cuda(object);
            let count = frames.iter().take_while(inside).count();
            frames[count..].to_vec()
        };
        let trace = run.trace();
        let tensors: Vec<_> = allocations(&trace)
            .into_iter()
            .filter(|e| e.source == Source::Torch)
            // PyTorch requests a multiple of 2 MiB from CUDA. cuDNN's workspaces have other sizes.
            .map(|e| (e.size.next_multiple_of(2 << 20), outside(native_frames(trace.definitions(), e.stack))))
            .collect();
        for call in calls.iter().filter(|call| call.function == "cudaMalloc") {
            let expected = (call.size, outside(without_ours(&call.frames[1..])));
            assert!(tensors.contains(&expected), "{expected:#x?}\nof {tensors:#x?}");
        }
    }
}
