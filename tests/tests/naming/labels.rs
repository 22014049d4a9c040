//! Ranges that the program named (`record_function`, NVTX): all starts and ends, in order, against the program's own
//! list.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use memtrace_tests::traced_program::{Run, TracedProgram, events, packages};
use memtrace_tests::versions::Versions;
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Definitions, Reader};
use memtrace_trace::ids::ThreadId;
use serde_json::Value;

/// (source of the range, START or END, name).
type Mark = (String, String, String);

fn mark(origin: LabelOrigin, fixture: &str, name: &str) -> Mark {
    let origin = if origin == LabelOrigin::Nvtx { "nvtx" } else { "record_function" };
    (origin.into(), fixture.into(), name.into())
}

/// The recorded starts and ends of each thread, in order.
fn recorded(trace: &Reader) -> BTreeMap<ThreadId, Vec<Mark>> {
    let definitions = trace.definitions();
    let mut threads: BTreeMap<ThreadId, Vec<Mark>> = BTreeMap::new();
    let mut open: Vec<(Event, u64)> = Vec::new();
    for event in events(trace).into_iter().filter(|e| e.source == Source::Label) {
        let mut label = event.addr;
        if event.action == Action::RangeStart {
            open.push((event, label));
        } else {
            let is_it = |(start, label): &(Event, u64)| match (event.addr, event.size) {
                (0, 0) => {
                    start.size == 0 && (start.thread, start.stream) == (event.thread, event.stream) && {
                        definitions.labels[&(*label as u32)].origin == LabelOrigin::Nvtx
                    }
                }
                (0, number) => start.size == number,
                (known, _) => *label == known && start.thread == event.thread,
            };
            let index = open.iter().rposition(is_it).expect("every range that ends has begun");
            label = open.remove(index).1;
        }
        let label = &definitions.labels[&(label as u32)];
        let fixture = if event.action == Action::RangeStart { "START" } else { "END" };
        threads.entry(event.thread).or_default().push(mark(label.origin, fixture, &label.text));
    }
    assert!(open.is_empty(), "every range has ended: {open:?}");
    threads
}

/// The program's own list, by thread.
fn truth(file: &Path) -> BTreeMap<String, Vec<Mark>> {
    let text = std::fs::read_to_string(file).expect("the program's list");
    serde_json::from_str(&text).expect("the program's list is JSON")
}

/// Runs the program and compares its list with the recording.
#[track_caller]
fn compare(traced: TracedProgram) -> (Run, Reader) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let run = traced.env("MEMTRACE_TEST_TRUTH", file.path()).run();
    run.assert_ended_well();
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), "done\n");
    let trace = run.trace();
    let mut ours = recorded(&trace).into_values().collect::<Vec<_>>();
    let truth = truth(file.path());
    for (thread, theirs) in &truth {
        let same = ours.iter().position(|marks| marks == theirs);
        let differs = || {
            let nearest = ours.iter().max_by_key(|marks| marks.iter().zip(theirs).take_while(|(a, b)| a == b).count());
            format!("thread {thread}\nthe program: {theirs:#?}\nrecorded: {nearest:#?}")
        };
        ours.remove(same.unwrap_or_else(|| panic!("{}", differs())));
    }
    assert!(truth["main"].len() > 40 && truth["other"].len() == 6, "the program names ranges");
    assert_eq!(ours, Vec::<Vec<Mark>>::new(), "ranges of other threads");
    (run, trace)
}

fn notices(definitions: &Definitions, topic: &str) -> Vec<String> {
    let found = definitions.notices.iter().filter(|n| &*n.topic == topic);
    found.map(|n| format!("{}: {}", n.status.name(), n.text)).collect()
}

fn record_function(versions: Versions) {
    let (_, trace) = compare(TracedProgram::python("steps/labels.py", &[]).on(versions));
    let found = notices(trace.definitions(), "torch.record_function");
    assert_eq!(found, ["works: record_function verified: PyTorch reports user ranges and no operators"]);
}

#[test]
fn record_function_2_11_0() {
    record_function(Versions::DEFAULT);
}

#[track_caller]
fn ranges_of_torch_cuda_nvtx(versions: Versions) {
    let (_, trace) = compare(TracedProgram::python("steps/labels.py", &["nvtx"]).on(versions));
    assert_eq!(notices(trace.definitions(), "nvtx"), ["works: ranges of libtorch_python.so are recorded"]);
}

#[test]
fn torch_cuda_nvtx() {
    ranges_of_torch_cuda_nvtx(Versions::DEFAULT);
}

#[test]
fn nvtx_package() {
    let folder = packages(&["nvtx==0.2.17"]);
    compare(TracedProgram::python("steps/labels.py", &["package"]).env("PYTHONPATH", folder));
}

#[test]
fn another_nvtx_tool_still_gets_its_calls() {
    // The file is no library: NVTX loads nothing, and does not call us either.
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let truth = tempfile::NamedTempFile::new().expect("a temporary file");
    let traced = TracedProgram::python("steps/labels.py", &["nvtx"])
        .env("NVTX_INJECTION64_PATH", file.path())
        .env("MEMTRACE_TEST_TRUTH", truth.path());
    let run = traced.run();
    run.assert_ended_well();
    let trace = run.trace();
    let of_nvtx = |l: &&memtrace_trace::file::Label| l.origin == LabelOrigin::Nvtx;
    assert_eq!(trace.definitions().labels.values().filter(of_nvtx).count(), 0);
    assert!(trace.definitions().labels.len() > 5, "those of record_function are there");
}

/// Requires that our callback does not change the names and counts of a profile.
#[track_caller]
fn same_profile(versions: Versions) {
    let traced = TracedProgram::python("steps/profiled.py", &[]).on(versions);
    let (run, alone) = (traced.run(), traced.run_alone());
    run.assert_ended_well();
    let (with, without) = (String::from_utf8_lossy(&run.output.stdout), String::from_utf8_lossy(&alone.stdout));
    assert_eq!(with, without);
    let profile: Value = serde_json::from_str(&with).expect("a profile");
    assert!(profile["ProfilerStep*"].as_u64() >= Some(3), "the profiler was at work: {profile}");
    let steps = run.trace().definitions().labels.values().filter(|l| l.text.starts_with("ProfilerStep#")).count();
    assert_eq!(steps, 4);
}

#[test]
fn the_profile_is_unchanged() {
    same_profile(Versions::DEFAULT);
}

/// Requires that exactly the blocks that only the cyclic garbage collector frees are marked.
#[track_caller]
fn collected_is_marked(traced: TracedProgram) {
    let run = traced.run();
    run.assert_ended_well();
    let truth: BTreeMap<String, Vec<u64>> =
        serde_json::from_slice(&run.output.stdout).expect("the program's own account");
    let trace = run.trace();
    let frees: Vec<Event> =
        events(&trace).into_iter().filter(|e| e.source == Source::Torch && e.action == Action::FreeRequested).collect();
    for (who, sizes) in &truth {
        for size in sizes {
            let of_size: Vec<_> = frees.iter().filter(|e| e.size == *size).collect();
            let [free] = of_size[..] else { panic!("frees of {size} bytes: {of_size:?}") };
            assert_eq!(free.flags.contains(Flags::IN_GC), who == "collector", "{size} bytes, by {who}");
        }
    }
    assert_eq!((truth["hand"].len(), truth["collector"].len()), (6, 8));
    let found = notices(trace.definitions(), "python.gc");
    assert_eq!(found, ["works: garbage collector state verified: blocks that it frees are marked"]);
}

#[test]
fn frees_of_the_garbage_collector_are_marked() {
    collected_is_marked(TracedProgram::python("steps/cycles.py", &[]));
}

/// Compares the ranges in our snapshot with those of PyTorch's own recorder in the same process.
#[test]
fn external_annotations() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let traced = TracedProgram::python("steps/annotations.py", &[]).env("MEMTRACE_TEST_TRUTH", file.path());
    let run = traced.run();
    run.assert_ended_well();
    let read = |text: &str| -> Vec<Value> { serde_json::from_str(text).expect("annotations") };
    let theirs = read(&std::fs::read_to_string(file.path()).expect("PyTorch's own"));
    let pickle = std::fs::read_dir(run.path()).expect("the run").filter_map(|entry| Some(entry.ok()?.path()));
    let pickle = pickle.into_iter().find(|path| path.extension().is_some_and(|e| e == "pickle")).expect("a snapshot");
    let print =
        "import json, pickle, sys; print(json.dumps(pickle.load(open(sys.argv[1], 'rb'))['external_annotations']))";
    let mut python = Command::new(memtrace_tests::traced_program::root().join("scripts/sim"));
    let ours = python.args(["python", "-c", print]).arg(pickle).output().expect("python starts");
    let ours = read(&String::from_utf8_lossy(&ours.stdout));
    assert!(theirs.len() > 30, "{theirs:#?}");
    let mut apart = Vec::new();
    for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        let keys = |value: &Value| value.as_object().expect("a dictionary").keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(ours), keys(theirs));
        for key in ["name", "stage", "device"] {
            assert_eq!(ours[key], theirs[key], "annotation {index}: {ours} {theirs}");
        }
        let time = |value: &Value| value["time_us"].as_i64().expect("a time");
        apart.push((time(ours) - time(theirs)).abs());
    }
    assert_eq!(ours.len(), theirs.len());
    // The two clocks are read one after the other. A busy machine may stop the program between a few of these pairs,
    // not between most.
    apart.sort_unstable();
    assert!(apart[apart.len() / 2] < 20_000, "microseconds apart: {apart:?}");
    assert!(apart[apart.len() - 1] < 10_000_000, "microseconds apart: {apart:?}");
}

mod exhaustive {
    use super::*;

    memtrace_tests::for_each_version! { mod ranges: record_function }
    memtrace_tests::for_each_version! { mod nvtx: nvtx_on }
    memtrace_tests::for_each_version! { mod profiles: same_profile }
    memtrace_tests::for_each_version! { mod collected: collected_is_marked_on }

    fn nvtx_on(versions: Versions) {
        // 2.4 needs NVTX 2, which is a library of its own. The environment has a simulated one instead, without ranges.
        // `nvtx_library_of_version_2` tests the real one.
        if versions.torch != "2.4.1" {
            ranges_of_torch_cuda_nvtx(versions);
        }
    }

    fn collected_is_marked_on(versions: Versions) {
        collected_is_marked(TracedProgram::python("steps/cycles.py", &[]).on(versions));
    }

    #[test]
    fn nvtx_library_of_version_2() {
        let library = Path::new(&packages(&["nvidia-nvtx-cu12==12.1.105"])).join("nvidia/nvtx/lib/libnvToolsExt.so.1");
        let library = library.to_str().expect("a path in UTF-8");
        let (_, trace) = compare(TracedProgram::python("steps/labels.py", &["library", library]));
        assert_eq!(notices(trace.definitions(), "nvtx"), ["works: ranges of libnvToolsExt.so.1 are recorded"]);
    }
}
