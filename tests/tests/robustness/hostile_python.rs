//! Python in unusual environments: embedded and restarted, in subinterpreters, in greenlets, at its recursion limit,
//! with names that are not text, and linked in every way. Each program prints the frames of its allocations as Python
//! itself reports them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::hostile_support::*;
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events, root};
use memtrace_trace::event::{Action, Source};
use serde_json::Value;

/// Frames as (function, file, line), innermost first.
type Frames = Vec<(String, String, u64)>;

/// The recorded Python frames of every runtime allocation, by size in bytes. Native frames are a different kind.
fn recorded(run: &Run) -> BTreeMap<u64, Frames> {
    let trace = run.trace();
    let definitions = trace.definitions();
    let allocations = events(&trace).into_iter().filter(|e| e.source == Source::Runtime && e.action == Action::Alloc);
    let frames = |stack| {
        let frames = definitions.walk(stack).filter_map(|(_, frame)| frame);
        frames.map(|f| (f.name.to_string(), f.filename.to_string(), f.line.into())).collect()
    };
    allocations.map(|e| (e.size, frames(e.stack))).collect()
}

fn program(name: &str) -> PathBuf {
    root().join("tests/programs/hostile").join(name)
}

/// The frames that `frames.py` printed, by size in bytes.
fn printed_frames(run: &Run) -> BTreeMap<u64, Frames> {
    let text = String::from_utf8(run.output.stdout.clone()).expect("text");
    let lines = text.lines().map(|line| serde_json::from_str::<BTreeMap<String, Value>>(line).expect("JSON"));
    let text = |value: &Value| value.as_str().expect("a name").to_owned();
    let frame = |f: &Value| (text(&f[0]), text(&f[1]), f[2].as_u64().expect("a line"));
    let frames = |value: Value| value.as_array().expect("frames").iter().map(frame).collect();
    lines.flatten().map(|(size, value)| (size.parse().expect("a size"), frames(value))).collect()
}

/// Runs a mode of `frames.py` with this Python and compares all frames.
#[track_caller]
fn compare(python: &Path, script: &Path, mode: &str) -> Run {
    compare_as(with_simcuda(&[python.as_os_str(), script.as_os_str(), mode.as_ref()]), python, mode)
}

#[track_caller]
fn compare_as(traced: TracedProgram, python: &Path, mode: &str) -> Run {
    let run = same_output(traced);
    assert_same_frames(&run, &format!("{} {mode}", python.display()));
    run
}

/// Requires that every allocation has the frames that the program printed, and that there is no other.
#[track_caller]
pub(crate) fn assert_same_frames(run: &Run, what: &str) {
    let (ours, theirs) = (recorded(run), printed_frames(run));
    assert!(!theirs.is_empty());
    for (size, frames) in &theirs {
        assert_eq!(ours.get(size), Some(frames), "{what}: allocation of {size:#x}");
    }
    assert_eq!(ours.len(), theirs.len());
}

/// Pythons of both kinds of build: with a shared libpython (`--enable-shared`) and with Python linked into the
/// executable.
fn pythons() -> Vec<PathBuf> {
    let home = std::env::var_os("PYENV_ROOT")
        .map_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".pyenv"), PathBuf::from);
    let found = std::fs::read_dir(home.join("versions")).into_iter().flatten().flatten();
    let pyenv = found.filter(|e| e.file_name().as_bytes().starts_with(b"3.")).map(|e| e.path().join("bin/python"));
    let mut all: Vec<PathBuf> = pyenv.chain(["/usr/bin/python3".into()]).filter(|p| p.exists()).collect();
    all.retain(|python| minor(python) >= 8);
    all.sort();
    assert!(!all.is_empty(), "no Python");
    all
}

/// The oldest and the newest pyenv Python, and the system's.
fn some_pythons() -> Vec<PathBuf> {
    let (system, mut others): (Vec<_>, Vec<_>) = pythons().into_iter().partition(|python| python.starts_with("/usr"));
    others.sort_by_key(|python| minor(python));
    let ends = [others.first().cloned(), others.last().cloned()];
    system.into_iter().chain(ends.into_iter().flatten()).collect()
}

fn asked(python: &Path, question: &str) -> String {
    let output = Command::new(python).arg("-c").arg(question).output().expect("a Python");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

fn minor(python: &Path) -> u32 {
    asked(python, "import sys; print(sys.version_info.minor)").parse().unwrap_or(0)
}

#[test]
fn recursion_to_the_limit_and_smallest_thread_stacks_are_recorded() {
    for python in some_pythons() {
        compare(&python, &program("frames.py"), "recursion");
    }
}

#[test]
fn sub_interpreters_are_recorded() {
    for python in pythons().into_iter().filter(|python| minor(python) >= 12) {
        compare(&python, &program("frames.py"), "interpreters");
    }
}

#[test]
fn names_that_are_not_utf8_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join(OsStr::from_bytes(b"\xff\x80 caf\xe9.py"));
    std::fs::copy(program("frames.py"), &script).unwrap();
    for python in some_pythons() {
        compare(&python, &script, "names");
    }
    // The run folder, the current folder and an argument are not valid UTF-8. The launcher still writes every file at
    // the end.
    let [run, here] = [&b"r\xffn"[..], b"h\xffre"].map(|name| folder.path().join(OsStr::from_bytes(name)));
    std::fs::create_dir(&here).unwrap();
    let mut command = Command::new(memtrace_tests::traced_program::memtrace());
    command.arg("-o").arg(&run).arg("--").arg("python3").arg(&script).arg("names").arg(OsStr::from_bytes(b"\xfe"));
    command.env("LD_LIBRARY_PATH", memtrace_tests::programs::simcuda()).current_dir(&here);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files: Vec<_> =
        std::fs::read_dir(&run).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    for kind in [".mtr", ".pickle", "summary.txt", "summary.json", "run.json"] {
        assert!(files.iter().any(|name| name.ends_with(kind)), "{kind}: {files:?}");
    }
    let manifest: Value = serde_json::from_slice(&std::fs::read(run.join("run.json")).unwrap()).unwrap();
    assert!(manifest["directory"].as_str().unwrap().ends_with("h\u{fffd}re"));
}

/// A folder with the package greenlet for this Python.
fn greenlet(python: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let install = ["-m", "pip", "install", "--quiet", "--only-binary=:all:", "greenlet", "--target"];
    let mut command = Command::new("python3");
    command.args(install).arg(folder.path()).arg(format!("--python-version=3.{}", minor(python)));
    assert!(command.output().is_ok_and(|o| o.status.success()), "{command:?}");
    folder
}

#[test]
fn greenlets_have_their_own_stacks() {
    let (python, script) = (Path::new("/usr/bin/python3"), program("frames.py"));
    let packages = greenlet(python);
    let traced = with_simcuda(&[python.as_os_str(), script.as_os_str(), "greenlets".as_ref()]);
    compare_as(traced.env("PYTHONPATH", packages.path()), python, "greenlets");
}

#[test]
fn a_restarted_embedded_interpreter_is_recorded() {
    let programs = ProgramFolder::new();
    let output = Command::new("/usr/bin/python3-config").args(["--includes", "--ldflags", "--embed"]).output();
    let flags = String::from_utf8(output.expect("python3-config").stdout).unwrap();
    let flags: Vec<String> =
        flags.split_whitespace().map(str::to_owned).chain(linked_with("libcudart.so.12")).collect();
    let embed = programs.program("hostile/embed.c", "embed", &flags);
    let script = program("embedded.py");
    let run = same_output(with_simcuda(&[embed.as_os_str(), script.as_os_str()]));
    let trace = run.trace();
    let text = String::from_utf8(run.output.stdout.clone()).unwrap();
    // Each line is "SIZE FUNCTION:LINE ...", in the order of the calls.
    let mut theirs = text.lines().filter_map(|line| line.split_once(' '));
    let (mut inside, mut outside) = (0, 0);
    for event in events(&trace).iter().filter(|e| e.source == Source::Runtime && e.action == Action::Alloc) {
        // Without Python the stack has native frames, which are a different kind.
        let frames = trace.definitions().walk(event.stack).filter_map(|(_, frame)| frame);
        let frames: Vec<_> = frames.map(|f| format!("{}:{}", f.name, f.line)).collect();
        if event.size < 0x100000 {
            assert!(frames.is_empty(), "there is no Python then: {frames:?}");
            outside += 1;
        } else {
            let (size, expected) = theirs.next().expect("a line for every allocation");
            assert_eq!((event.size.to_string().as_str(), frames.join(" ").as_str()), (size, expected));
            inside += 1;
        }
    }
    assert_eq!((inside, outside), (3 * 4, 1 + 2 * 3));
}

mod exhaustive {
    use super::*;

    /// With greenlets, sub-interpreters and the trampolines of `-X perf`, which put machine code of their own between
    /// the frames.
    #[track_caller]
    fn check(version: &str) {
        let output = Command::new(root().join("scripts/python")).arg(version).output().expect("scripts/python");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let python = PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim());
        compare(&python, &program("frames.py"), "recursion");
        let (script, packages) = (program("frames.py"), greenlet(&python));
        for mode in ["greenlets", "interpreters"] {
            for (options, jit) in [(&[][..], "0"), (&[], "1"), (&["-X", "perf"], "0")] {
                let mut words = vec![python.as_os_str()];
                words.extend(options.iter().map(OsStr::new));
                words.extend([script.as_os_str(), mode.as_ref()]);
                let traced = with_simcuda(&words).env("PYTHONPATH", packages.path()).env("PYTHON_JIT", jit);
                compare_as(traced, &python, &format!("{mode} {options:?} PYTHON_JIT={jit}"));
            }
        }
    }

    #[test]
    fn python_3_13() {
        check("3.13");
    }

    #[test]
    fn python_3_14() {
        check("3.14");
    }

    #[test]
    fn python_3_15() {
        check("3.15");
    }
}
