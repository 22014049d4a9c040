//! Native stacks from the program to the report: PyTorch over the simulated CUDA, with PyTorch's own recorder
//! (`stacks="all"`) in the same process.

use std::path::Path;
use std::process::Command;

use memtrace_analysis::symbols::SYMBOLS_FILE;
use memtrace_analysis::{open_run, summarize};
use memtrace_tests::traced_program::TracedProgram;
use serde_json::Value;

/// A function's name without the parts that demanglers spell differently: arguments, return type, split-off clones.
fn plain(name: &str) -> String {
    let name = name.split(" [clone").next().unwrap_or(name);
    let mut depth = 0_usize;
    let mut kept = String::new();
    for c in name.chars() {
        match c {
            '<' | '(' => depth += 1,
            '>' | ')' => depth = depth.saturating_sub(1),
            c if depth == 0 => kept.push(c),
            _ => {}
        }
    }
    let kept = kept.trim_end_matches(" const");
    kept.rsplit(' ').next().unwrap_or(kept).to_owned()
}

/// PyTorch's operators in a stack, innermost first. The frames inside the allocator, which differ by recorder, and
/// those of Python are left out.
fn operators(frames: &Value) -> Vec<String> {
    let frames = frames.as_array().expect("frames").iter();
    let native = frames.filter(|f| !f["filename"].as_str().unwrap().ends_with(".py"));
    let names = native.map(|f| plain(f["name"].as_str().unwrap()));
    names.filter(|name| name.starts_with("at::") || name.starts_with("torch::autograd::")).collect()
}

fn python_frames(frames: &Value) -> Vec<(String, u64)> {
    let frames = frames.as_array().expect("frames").iter();
    let python = frames.filter(|f| f["filename"].as_str().unwrap().ends_with(".py"));
    python.map(|f| (f["name"].as_str().unwrap().to_owned(), f["line"].as_u64().unwrap())).collect()
}

fn unpickle(path: &Path) -> Value {
    let code = "import json, pickle, sys; json.dump(pickle.load(open(sys.argv[1], 'rb')), sys.stdout)";
    let output = Command::new("python3").args(["-c", code]).arg(path).output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn allocs(trace: &Value) -> Vec<&Value> {
    trace.as_array().expect("a trace").iter().filter(|e| e["action"] == "alloc").collect()
}

#[test]
fn native_frames_match_those_of_pytorch() {
    let oracle = tempfile::NamedTempFile::new().unwrap();
    let run = TracedProgram::python("torch/native_stacks.py", &[oracle.path().to_str().unwrap()])
        .option("--stacks")
        .option("both")
        // PyTorch 2.15 exports fewer functions, and by default PyTorch names only what is exported.
        .env("TORCH_SYMBOLIZE_MODE", "fast")
        .run();
    run.assert_ended_well();
    let theirs: Value = serde_json::from_slice(&std::fs::read(oracle.path()).unwrap()).unwrap();
    let ours = std::fs::read_dir(run.path()).unwrap().map(|e| e.unwrap().path());
    let ours = ours.into_iter().find(|p| p.extension().is_some_and(|e| e == "pickle")).expect("a snapshot");
    let ours = unpickle(&ours);
    let (theirs, ours) = (allocs(&theirs), allocs(&ours["device_traces"][0]));
    assert_eq!(ours.len(), theirs.len());
    let mut compared = 0;
    for (our, their) in ours.iter().zip(&theirs) {
        assert_eq!((&our["size"], &our["addr"]), (&their["size"], &their["addr"]));
        // Inside an autograd node our frames are those of the forward call.
        if our["frames"][0]["filename"].as_str().unwrap().starts_with("[autograd]") {
            continue;
        }
        let (expected, found) = (operators(&their["frames"]), operators(&our["frames"]));
        assert!(!expected.is_empty() && found == expected, "ours {found:#?}\ntheirs {expected:#?}");
        assert_eq!(python_frames(&our["frames"]), python_frames(&their["frames"]));
        compared += 1;
    }
    assert!(compared > 20, "{compared} of {}", ours.len());

    // The run folder has the resolved symbols, so another machine does not need PyTorch's libraries.
    assert!(run.path().join(SYMBOLS_FILE).is_file());
    let opened = open_run(run.path()).unwrap();
    assert!(opened.new_symbols().is_none());
    let summary = summarize(&opened, &mut |_| {}).unwrap();
    for object in summary.native_objects.iter().filter(|o| o.path.contains("/torch/lib/")) {
        assert!(object.addresses_with_function == object.addresses && object.notes.is_empty(), "{object:?}");
    }
    assert!(summary.native_objects.iter().any(|o| o.path.ends_with("/libtorch_cpu.so")));
}
