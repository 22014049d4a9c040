//! Every allocation is recorded, in whatever way the program finds CUDA.
//!
//! Programs in C and Python call every hooked function through every lookup mechanism. The recorded events equal the
//! simulated CUDA's ledger call by call, including results and failures. The programs print the same with and without
//! memtrace.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use memtrace_tests::ledger::{assert_equal, ours, pid, read, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events, root};
use memtrace_trace::api::Api;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Reader;

const NONE: &[&str] = &[];

/// Runs a command with and without memtrace. Compares the output, and the events with the ledger.
#[track_caller]
fn compare(command: &[&OsStr], prepare: impl Fn(TracedProgram) -> TracedProgram) -> (Run, Reader) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger");
    let traced = prepare(with_simcuda(command).with_device_usage());
    let alone = traced.run_alone();
    let run = traced.env("SIMCUDA_LEDGER", &path).run();
    run.assert_ended_well();
    assert_eq!(String::from_utf8_lossy(&alone.stdout), String::from_utf8_lossy(&run.output.stdout));
    assert_eq!(alone.status, run.output.status);
    let trace = run.trace();
    assert_equal(&ours(&trace), &read(&path));
    (run, trace)
}

/// The symbols of the recorded functions of a layer.
fn seen(trace: &Reader, source: Source) -> BTreeSet<&'static str> {
    events(trace).iter().filter(|e| e.source == source).filter_map(|e| e.api.symbol()).collect()
}

/// Parts of the names of driver functions that `driver.c` does not call: those of the per-thread default stream, those
/// of other tests (`ipc.rs`, `contexts.rs`, CUDA graphs), and those that the simulated CUDA lacks.
const ELSEWHERE: [&str; 8] = ["IpcOpen", "IpcGet", "_ptsz", "FatBinary", "FromFile", "Capture", "Graph", "cuCtxCreate"];

/// The symbols of all functions of a layer, except those whose name contains an element of `left_out`.
fn all(source: Source, left_out: &[&str]) -> BTreeSet<&'static str> {
    let symbols = Api::ALL.iter().filter(|a| a.source() == Some(source)).filter_map(|a| a.symbol());
    symbols.filter(|s| !left_out.iter().any(|l| s.contains(l))).collect()
}

/// The file names of the calling objects, by layer, for calls that are not nested.
fn callers(trace: &Reader) -> BTreeMap<Source, BTreeSet<String>> {
    let mut callers: BTreeMap<Source, BTreeSet<String>> = BTreeMap::new();
    for event in events(trace) {
        // A reading of the memory in use is no call of the program.
        if !event.flags.contains(Flags::NESTED) && event.action != Action::DeviceUsage {
            callers.entry(event.source).or_default().insert(caller(trace, &event));
        }
    }
    callers
}

fn caller(trace: &Reader, event: &Event) -> String {
    let module = trace.definitions().module(event.module).expect("the calling object is known");
    Path::new(module).file_name().unwrap().to_string_lossy().into_owned()
}

/// One caller's name for one layer.
fn only(source: Source, name: &str) -> BTreeMap<Source, BTreeSet<String>> {
    BTreeMap::from([(source, BTreeSet::from([name.to_owned()]))])
}

fn same(traced: TracedProgram) -> TracedProgram {
    traced
}

#[track_caller]
fn every_runtime_function(library: &str) {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/runtime.c", "program", &linked_with(library));
    let (_, trace) = compare(&[program.as_os_str()], same);
    // `ipc.rs` tests opening another process's memory.
    assert_eq!(seen(&trace, Source::Runtime), all(Source::Runtime, &["IpcOpen", "IpcGet"]));
    assert_eq!(callers(&trace), only(Source::Runtime, "program"));
}

#[test]
fn every_function_of_the_cuda_12_runtime_is_recorded() {
    every_runtime_function("libcudart.so.12");
}

#[test]
fn every_function_of_the_cuda_13_runtime_is_recorded() {
    every_runtime_function("libcudart.so.13");
}

#[test]
fn a_runtime_found_by_dlopen_and_dlsym_is_recorded() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/runtime.c", "program", &["-DBY_POINTER"]);
    for library in ["libcudart.so.12", "libcudart.so.13"] {
        let (_, trace) = compare(&[program.as_os_str(), library.as_ref()], same);
        assert_eq!(seen(&trace, Source::Runtime), all(Source::Runtime, &["IpcOpen", "IpcGet"]), "{library}");
        assert_eq!(callers(&trace), only(Source::Runtime, "program"));
    }
}

#[test]
fn every_function_of_the_driver_is_recorded() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/driver.c", "program", &linked_with("libcuda.so.1"));
    let (_, trace) = compare(&[program.as_os_str()], same);
    assert_eq!(seen(&trace, Source::Driver), all(Source::Driver, &ELSEWHERE));
    assert_eq!(callers(&trace), only(Source::Driver, "program"));
}

#[test]
fn every_way_to_a_driver_function_is_recorded() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/driver.c", "program", &["-DBY_POINTER"]);
    for how in ["dlsym", "entry", "entry-v1", "runtime", "runtime-version"] {
        let (_, trace) = compare(&[program.as_os_str(), how.as_ref()], same);
        assert_eq!(seen(&trace, Source::Driver), all(Source::Driver, &ELSEWHERE), "{how}");
        assert_eq!(callers(&trace), only(Source::Driver, "program"), "{how}");
    }
}

#[test]
fn functions_of_the_per_thread_default_stream_are_recorded() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/driver.c", "program", &["-DBY_POINTER"]);
    for how in ["dlsym", "entry", "entry-v1", "runtime", "runtime-version"] {
        let (_, trace) = compare(&[program.as_os_str(), how.as_ref(), "per-thread".as_ref()], same);
        let ordinary = ["cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"];
        let mut expected = all(Source::Driver, &[&ELSEWHERE[..], &ordinary].concat());
        expected.extend(["cuMemAllocAsync_ptsz", "cuMemAllocFromPoolAsync_ptsz", "cuMemFreeAsync_ptsz"]);
        assert_eq!(seen(&trace, Source::Driver), expected, "{how}");
    }
}

#[test]
fn injected_allocation_failures_are_recorded_as_failed() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/runtime.c", "program", &linked_with("libcudart.so.12"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger");
    for api in ["cudaMalloc:2", "cuMemAlloc_v2:1", "cudaMallocHost:1", "cuMemAllocAsync:1", "cudaMallocArray:1"] {
        let traced = with_simcuda(&[&program]).env("SIMCUDA_FAIL", api);
        let alone = traced.run_alone();
        let run = traced.env("SIMCUDA_LEDGER", &path).run();
        assert_eq!(alone.status.code(), Some(9), "{api}: the program gives up");
        assert_eq!(run.output.status.code(), Some(9), "{api}");
        assert_eq!(alone.stdout, run.output.stdout, "{api}");
        let trace = run.trace();
        assert_equal(&ours(&trace), &read(&path));
        let last = events(&trace).into_iter().rfind(|e| e.result != 0).expect("a failed call");
        assert_eq!((last.result, last.addr), (2, 0), "{api}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_failed_free_is_retracted() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/runtime.c", "program", &linked_with("libcudart.so.13"));
    let run = with_simcuda(&[&program]).run();
    run.assert_ended_well();
    let events = events(&run.trace());
    let mut retracted = 0;
    for event in events.iter().filter(|e| e.action == Action::Retract) {
        let release = &events[event.addr as usize - 1];
        assert!(release.api.frees() && release.action == Action::FreeCompleted, "{release:?}");
        assert_eq!(release.api, event.api);
        assert_ne!(event.result, 0);
        retracted += 1;
    }
    // Eight bad pointers and one double free; the driver's layer sees some of them too.
    assert!(retracted >= 9, "{retracted}");
}

#[test]
fn memory_is_on_the_device_that_the_call_names() {
    let programs = ProgramFolder::new();
    let options = [linked_with("libcudart.so.12"), linked_with("libcuda.so.1")].concat();
    let program = programs.program("cuda/devices.c", "devices", &options);
    let (_, trace) = compare(&[program.as_os_str()], |traced| traced.env("SIMCUDA_DEVICES", "2"));
    let devices: Vec<_> = trace.definitions().devices.keys().copied().collect();
    assert_eq!(devices, [0, 1]);
}

#[test]
fn memory_of_another_process_is_recorded_where_it_is_opened() {
    let programs = ProgramFolder::new();
    let options = [linked_with("libcudart.so.12"), linked_with("libcuda.so.1")].concat();
    let program = programs.program("cuda/ipc.c", "program", &options);
    let path = programs.path("ledger");
    let run = with_simcuda(&[&program]).env("SIMCUDA_LEDGER", &path).run();
    run.assert_ended_well();
    let ledgers = read_all(&path);
    let traces = run.traces();
    assert_eq!(traces.len(), 2);
    for trace in &traces {
        assert_equal(&ours(trace), &ledgers[&pid(trace)]);
    }
    let opened = traces
        .iter()
        .flat_map(|t| events(t))
        .filter(|e| e.api == Api::cuIpcOpenMemHandle_v2 && e.action == Action::Alloc);
    assert_eq!(opened.map(|e| e.size).collect::<Vec<_>>(), [5 << 20, 5 << 20]);
}

/// Compiles one library for each entry of `runtimes`, linked with that runtime.
fn libraries(programs: &ProgramFolder, runtimes: &[&str]) -> Vec<PathBuf> {
    let library = |(i, runtime): (usize, &&str)| {
        let name = format!("libuser{i}.so");
        match *runtime {
            "static" => programs.library("cuda/library.c", &name, &["-DEMBEDDED"]),
            runtime => programs.library("cuda/library.c", &name, &linked_with(runtime)),
        }
    };
    runtimes.iter().enumerate().map(library).collect()
}

/// Loads the libraries into one process. Returns the callers of calls that are not nested.
#[track_caller]
fn load(flags: &str, runtimes: &[&str]) -> BTreeMap<Source, BTreeSet<String>> {
    let programs = ProgramFolder::new();
    let libraries = libraries(&programs, runtimes);
    let loader = programs.program("cuda/loader.c", "loader", NONE);
    let mut command = vec![loader.as_os_str(), flags.as_ref()];
    command.extend(libraries.iter().map(|l| l.as_os_str()));
    let (_, trace) = compare(&command, same);
    let count = events(&trace).iter().filter(|e| e.source == Source::Driver && e.action == Action::Alloc).count();
    assert_eq!(count, 12 * runtimes.len(), "twelve allocations a library, each seen in the driver");
    for event in events(&trace).iter().filter(|e| e.source == Source::Runtime) {
        // Each library allocates its own size, so the size identifies the caller.
        let index = (event.size >> 20).saturating_sub(1);
        if event.action == Action::Alloc {
            assert_eq!(caller(&trace, event), format!("libuser{index}.so"));
        }
    }
    callers(&trace)
}

/// The file names of the libraries with these numbers.
fn users(numbers: &[u32]) -> BTreeSet<String> {
    numbers.iter().map(|i| format!("libuser{i}.so")).collect()
}

#[test]
fn a_library_loaded_locally_calls_its_own_runtime() {
    assert_eq!(load("local", &["libcudart.so.12"]), BTreeMap::from([(Source::Runtime, users(&[0]))]));
}

#[test]
fn two_runtimes_in_one_process_are_recorded_separately() {
    let both = load("local", &["libcudart.so.12", "libcudart.so.13"]);
    assert_eq!(both, BTreeMap::from([(Source::Runtime, users(&[0, 1]))]));
}

#[test]
fn libraries_loaded_with_deepbind_are_recorded() {
    let both = load("deepbind", &["libcudart.so.13", "libcudart.so.12"]);
    assert_eq!(both, BTreeMap::from([(Source::Runtime, users(&[0, 1]))]));
}

#[test]
fn reloaded_libraries_are_hooked_again() {
    let programs = ProgramFolder::new();
    let libraries = libraries(&programs, &["libcudart.so.12", "libcudart.so.13", "libcudart.so.12"]);
    let program = programs.program("cuda/reload.c", "reload", NONE);
    let mut command = vec![program.as_os_str()];
    command.extend(libraries.iter().map(|l| l.as_os_str()));
    let (run, trace) = compare(&command, same);
    let stdout = String::from_utf8_lossy(&run.output.stdout);
    assert!(
        stdout.contains("1: 0, 3 times") && stdout.contains("unloaded: 1") && !stdout.contains("unloaded: 0"),
        "{stdout}"
    );
    // The size identifies the caller, also where one library is loaded at the address of an earlier one.
    for event in events(&trace).iter().filter(|e| e.source == Source::Runtime && e.action == Action::Alloc) {
        assert_eq!(caller(&trace, event), format!("libuser{}.so", (event.size >> 16) - 1));
    }
}

#[test]
fn a_statically_linked_runtime_is_recorded_at_the_driver() {
    let callers = load("local", &["static", "libcudart.so.12", "static"]);
    assert_eq!(callers, BTreeMap::from([(Source::Runtime, users(&[1])), (Source::Driver, users(&[0, 2]))]));
}

#[test]
fn events_of_concurrent_threads_have_a_valid_order() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/threads.c", "threads", &linked_with("libcudart.so.12"));
    let (_, trace) = compare(&[program.as_os_str(), "16".as_ref(), "300".as_ref()], same);
    // In the order of sequence numbers, no address is allocated while in use nor freed while not in use. This holds in
    // each layer.
    for source in [Source::Runtime, Source::Driver] {
        let mut live = BTreeSet::new();
        let is_reading = |e: &Event| e.action == Action::DeviceUsage;
        for event in events(&trace).iter().filter(|e| e.source == source && !is_reading(e)) {
            let sound = if event.action == Action::Alloc { live.insert(event.addr) } else { live.remove(&event.addr) };
            assert!(sound, "{event:?}");
        }
        assert!(live.is_empty());
    }
    let threads: BTreeSet<_> = events(&trace).iter().map(|e| e.thread).collect();
    assert_eq!(threads.len(), 16);
}

#[test]
fn python_programs_that_call_cuda_themselves_are_recorded_with_their_stacks() {
    let program = root().join("tests/programs/cuda/calls.py");
    let mut versions = 0;
    for python in pythons() {
        for runtime in ["libcudart.so.12", "libcudart.so.13"] {
            let (_, trace) = compare(&[python.as_os_str(), program.as_os_str(), runtime.as_ref()], same);
            let events = events(&trace);
            let names = |event: &Event| -> Vec<String> {
                let frames = trace.definitions().walk(event.stack);
                frames.map(|(_, f)| f.expect("every frame is defined").name.to_string()).collect()
            };
            let first = events.iter().find(|e| e.api == Api::cudaMalloc).unwrap();
            let stack = names(first);
            assert_eq!(stack[0], "allocate", "{}: {stack:?}", python.display());
            assert_eq!(stack.last().unwrap(), "<module>", "{}: {stack:?}", python.display());
            assert!(stack.contains(&"work".to_owned()));
        }
        versions += 1;
    }
    assert!(versions > 0, "a Python to run");
}

/// The Pythons of this machine: the one on PATH, and one of each minor version that pyenv has.
fn pythons() -> Vec<PathBuf> {
    let home = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".pyenv")));
    let versions = home.and_then(|h| std::fs::read_dir(h.join("versions")).ok());
    let mut found: BTreeMap<u32, PathBuf> = BTreeMap::new();
    for entry in versions.into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let minor = name.strip_prefix("3.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        let python = entry.path().join("bin/python3");
        if let Some(minor) = minor.filter(|m| (9..=14).contains(m) && python.exists()) {
            found.insert(minor, python);
        }
    }
    if found.is_empty() { vec!["python3".into()] } else { found.into_values().collect() }
}

#[test]
fn a_program_gets_the_runtime_functions_that_it_looks_up() {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/both.c", "both", &linked_with("libcudart.so.12"));
    let traced = with_simcuda(&[program.as_os_str(), "libcudart.so.13".as_ref()]);
    let (alone, run) = (traced.run_alone(), traced.run());
    run.assert_ended_well();
    let stdout = String::from_utf8_lossy(&run.output.stdout);
    assert_eq!(String::from_utf8_lossy(&alone.stdout), stdout);
    assert!(stdout.contains("own 2, other 0") && stdout.contains("own 0, other 2"), "{stdout}");
    // At least the driver's layer records the other runtime's calls.
    let sizes = events(&run.trace()).into_iter().filter(|e| e.source == Source::Driver && e.action == Action::Alloc);
    assert_eq!(sizes.map(|e| e.size).collect::<Vec<_>>(), [1 << 50, 1 << 50, 100, 200]);
}
