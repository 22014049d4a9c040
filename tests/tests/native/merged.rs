//! Merged stacks (`--stacks both`): Python called by C called by Python, in every installed Python.
//!
//! The Python frames equal those of Python's own `traceback`. Where C called Python, the C functions are between them.
//! No frame of the interpreter's evaluation function is left.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_analysis::open_run;
use memtrace_tests::programs::with_simcuda;
use memtrace_tests::traced_program::{events, root};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::Definitions;
use serde_json::Value;

/// `python3` and pyenv's Pythons from 3.8 on, as (command, minor version).
fn pythons() -> Vec<(PathBuf, u32)> {
    let home = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv"))).unwrap_or_default();
    let versions = std::fs::read_dir(home.join("versions")).into_iter().flatten();
    let mut paths: Vec<PathBuf> = versions.filter_map(|entry| Some(entry.ok()?.path().join("bin/python"))).collect();
    paths.sort();
    paths.insert(0, "/usr/bin/python3".into());
    let version = |path: &PathBuf| {
        let code = "import sys; print(sys.version_info[0] * 100 + sys.version_info[1])";
        let output = Command::new(path).args(["-c", code]).output().ok().filter(|o| o.status.success())?;
        let version: u32 = String::from_utf8(output.stdout).ok()?.trim().parse().ok()?;
        (308..=313).contains(&version).then_some(version % 100)
    };
    paths.into_iter().filter_map(|path| version(&path).map(|v| (path, v))).collect()
}

/// A frame of a merged stack.
#[derive(Debug)]
enum Frame {
    Python { file: String, line: u64, name: String },
    Native { name: String, object: String },
}

/// The frames of an event, outermost first.
fn frames(definitions: &Definitions, event: &Event) -> Vec<Frame> {
    let frame = |(_, id)| {
        let frame = definitions.frame(id).expect("a frame");
        let (name, file) = (frame.name.to_string(), frame.filename.to_string());
        if frame.native {
            let place = definitions.native_frames.get(&id);
            let object = place.and_then(|place| definitions.module(place.module)).unwrap_or_default();
            Frame::Native { name, object: object.to_owned() }
        } else {
            Frame::Python { file, line: frame.line.into(), name }
        }
    };
    let mut frames: Vec<Frame> = definitions.walk_ids(event.stack).map(frame).collect();
    frames.reverse();
    frames
}

/// A function's name without suffixes that the compiler adds.
fn plain(name: &str) -> &str {
    name.split(['.', ' ']).next().unwrap_or(name)
}

/// The function names in an object's symbol table.
fn functions(object: &str) -> BTreeSet<String> {
    let output = Command::new("nm").arg(object).output().expect("nm: apt-get install binutils");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| Some(plain(line.split(' ').nth(2)?).to_owned())).collect()
}

/// Compares one allocation's frames with the ones that Python printed. Returns the number of C functions found by name.
#[track_caller]
fn compare(line: &Value, frames: &[Frame]) -> usize {
    let mut python = Vec::new();
    let mut at = Vec::new();
    for (index, frame) in frames.iter().enumerate() {
        match frame {
            Frame::Python { file, line, name } => {
                python.push((file.as_str(), *line, name.as_str()));
                at.push(index);
            }
            Frame::Native { name, .. } => assert!(!name.starts_with("_PyEval_EvalFrameDefault"), "{frames:#?}"),
        }
    }
    let theirs = line["frames"].as_array().expect("frames").iter();
    let frame = |f: &'_ Value| (f[0].as_str().map(str::to_owned), f[1].as_u64(), f[2].as_str().map(str::to_owned));
    let theirs: Vec<_> = theirs.map(frame).collect();
    let python: Vec<_> =
        python.iter().map(|(f, l, n)| (Some((*f).to_owned()), Some(*l), Some((*n).to_owned()))).collect();
    assert_eq!(python, theirs, "(left: ours, right: Python's) of {frames:#?}");
    // Python calls `cudaMalloc` through C, so the innermost frame is native.
    assert!(matches!(frames.last(), Some(Frame::Native { .. })), "{frames:#?}");
    let mut found = 0;
    for between in line["between"].as_array().expect("an array") {
        let caller = between[0].as_u64().expect("an index") as usize;
        let names: Vec<&str> = between[1].as_array().expect("names").iter().filter_map(Value::as_str).collect();
        let through = &frames[at[caller] + 1..at[caller + 1]];
        if names.is_empty() {
            assert!(through.is_empty(), "between frame {caller} and the next one: {frames:#?}");
            continue;
        }
        assert!(!through.is_empty(), "between frame {caller} and the next one: {frames:#?}");
        let has = through.iter().any(|f| matches!(f, Frame::Native { name, .. } if names.contains(&plain(name))));
        // A Python without a symbol table has no names for its C functions.
        let objects: BTreeSet<&str> =
            through.iter().map(|f| if let Frame::Native { object, .. } = f { object.as_str() } else { "" }).collect();
        let known = objects
            .iter()
            .filter(|o| Path::new(o).is_absolute())
            .any(|o| names.iter().any(|name| functions(o).contains(*name)));
        assert!(has || !known, "none of {names:?} between frame {caller} and the next one: {frames:#?}");
        found += usize::from(has);
    }
    found
}

#[test]
fn python_and_c_frames_are_merged_into_one_stack() {
    let pythons = pythons();
    assert!(!pythons.is_empty(), "no Python from 3.8 to 3.13");
    for (python, minor) in pythons {
        println!("{}", python.display());
        let file = tempfile::NamedTempFile::new().unwrap();
        let program = root().join("tests/programs/native/merged.py");
        let command = [python.as_os_str(), program.as_os_str(), "libcudart.so.12".as_ref(), file.path().as_os_str()];
        let run = with_simcuda(&command).option("--stacks").option("both").run();
        run.assert_ended_well();
        let trace = run.trace();
        assert_eq!(trace.counter(Counter::StacksTruncated), 0, "stacks that could not be walked or merged");
        let opened = open_run(run.path()).expect("the run");
        let definitions = opened.processes()[0].definitions();
        let calls: Vec<Event> =
            events(&trace).into_iter().filter(|e| e.source == Source::Runtime && e.action == Action::Alloc).collect();
        let text = std::fs::read_to_string(file.path()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(calls.len(), lines.len());
        let mut found = 0;
        for (line, call) in lines.iter().zip(&calls) {
            assert_eq!(line["size"].as_u64(), Some(call.size));
            found += compare(line, &frames(definitions, call));
        }
        println!("3.{minor}: {} stacks, {found} C functions by name", lines.len());
    }
}
