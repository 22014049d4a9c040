//! Programs built with a sanitizer, and programs under valgrind.
//!
//! Each prints the same and ends in the same way with memtrace as without, its allocations equal the simulated CUDA's
//! ledger, and its sanitizer still finds the error that it is for.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::hostile_support::*;
use memtrace_tests::ledger::{assert_equal, ours, pid, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, root};

/// A compiler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compiler {
    /// The tests need it: `scripts/test` installs it with its sanitizers.
    Gcc,
    /// Optional.
    Clang,
}

impl Compiler {
    fn command(self) -> &'static str {
        match self {
            Compiler::Gcc => "gcc",
            Compiler::Clang => "clang",
        }
    }
}

/// A way to build the program with a sanitizer.
struct Sanitizer {
    compiler: Compiler,
    options: &'static [&'static str],
    /// The argument with which the program makes an error.
    error: &'static str,
    /// The text that the sanitizer prints about that error.
    expected: &'static str,
}

const fn sanitizer(compiler: Compiler, options: &'static [&'static str], error: &'static str) -> Sanitizer {
    let expected = match error.as_bytes() {
        b"use" => "AddressSanitizer: heap-use-after-free",
        b"leak" => "LeakSanitizer: detected memory leaks",
        b"race" => "ThreadSanitizer: data race",
        b"overflow" => "signed integer overflow",
        _ => "MemorySanitizer: use-of-uninitialized-value",
    };
    Sanitizer { compiler, options, error, expected }
}

const SANITIZERS: [Sanitizer; 13] = [
    sanitizer(Compiler::Gcc, &["-fsanitize=address"], "use"),
    sanitizer(Compiler::Gcc, &["-fsanitize=address", "-static-libasan"], "use"),
    sanitizer(Compiler::Gcc, &["-fsanitize=address", "-DOWN_OPTIONS"], "use"),
    sanitizer(Compiler::Gcc, &["-fsanitize=leak"], "leak"),
    sanitizer(Compiler::Gcc, &["-fsanitize=thread"], "race"),
    sanitizer(Compiler::Gcc, &["-fsanitize=undefined"], "overflow"),
    sanitizer(Compiler::Clang, &["-fsanitize=address"], "use"),
    sanitizer(Compiler::Clang, &["-fsanitize=address", "-shared-libasan"], "use"),
    sanitizer(Compiler::Clang, &["-fsanitize=address,undefined"], "overflow"),
    sanitizer(Compiler::Clang, &["-fsanitize=leak"], "leak"),
    sanitizer(Compiler::Clang, &["-fsanitize=thread"], "race"),
    sanitizer(Compiler::Clang, &["-fsanitize=undefined"], "overflow"),
    sanitizer(Compiler::Clang, &["-fsanitize=memory"], "uninitialized"),
];

/// Compiles `sanitized.c`. `None`, and a line on stderr, if an optional compiler or its runtime is not installed.
#[track_caller]
fn build(programs: &ProgramFolder, name: &str, compiler: Compiler, options: &[&str]) -> Option<PathBuf> {
    let is_required = compiler == Compiler::Gcc;
    let compiler = compiler.command();
    let program = programs.path(name);
    let mut command = Command::new(compiler);
    command.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-rdynamic", "-o"]).arg(&program);
    command.arg(root().join("tests/programs/hostile/sanitized.c")).args(options);
    if options.contains(&"-shared-libasan") {
        // The program finds the runtime in the compiler's own folder.
        let runtime = Command::new(compiler).arg("-print-file-name=libclang_rt.asan-x86_64.so").output().ok();
        let runtime = runtime.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim_end()));
        command
            .args(runtime.iter().filter_map(|path| path.parent()).map(|dir| format!("-Wl,-rpath,{}", dir.display())));
    }
    let output = command.args(linked_with("libcudart.so.12")).arg("-ldl").output();
    let problem = match output {
        Ok(output) if output.status.success() => return Some(program),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(e) => e.to_string(),
    };
    assert!(!is_required, "{compiler} {options:?}: {problem}");
    eprintln!("skipped: {compiler} {options:?}: {}", problem.lines().next_back().unwrap_or_default());
    None
}

/// Runs the command with and without memtrace. Requires the same output and the calls of the ledger in the trace.
#[track_caller]
fn same_and_recorded(programs: &ProgramFolder, traced: TracedProgram) -> Run {
    let ledger: &Path = &programs.path("ledger");
    std::fs::remove_file(ledger).ok();
    // TSAN does not see the atomic operations of the simulated CUDA, and would report its accesses as data races.
    let traced = traced.env("TSAN_OPTIONS", "ignore_noninstrumented_modules=1");
    let run = same_output(traced.env("SIMCUDA_LEDGER", ledger));
    // The ledger also has the run without memtrace.
    let ledgers = read_all(ledger);
    let trace = run.trace();
    assert_equal(&ours(&trace), &ledgers[&pid(&trace)]);
    run
}

/// Requires that the sanitizer ends the program in the same way with memtrace as without, and prints `sign` in both
/// cases.
#[track_caller]
fn finds_its_error(traced: TracedProgram, sign: &str) {
    let alone = traced.run_alone();
    let run = traced.option("--quiet").run();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (before, after) = (text(&alone.stderr), text(&run.output.stderr));
    assert!(before.contains(sign), "without memtrace: {before}");
    assert!(after.contains(sign), "{after}");
    assert_eq!(alone.status, run.output.status, "{after}");
    assert_eq!(text(&alone.stdout), text(&run.output.stdout));
}

fn check(compiler: Compiler) {
    let programs = ProgramFolder::new();
    let mut calls = None;
    for (index, sanitizer) in SANITIZERS.iter().enumerate().filter(|(_, sanitizer)| sanitizer.compiler == compiler) {
        let Sanitizer { options, error, expected, .. } = sanitizer;
        let Some(program) = build(&programs, &format!("sanitized-{index}"), compiler, options) else { continue };
        eprintln!("{compiler:?} {options:?}");
        if error == &"uninitialized" {
            // MSAN takes what the simulated CUDA writes to its ledger for uninitialized. The program does the same as
            // the others.
            let run = same_output(with_simcuda(&[&program]));
            assert_eq!(ours(&run.trace()).len(), calls.unwrap());
        } else {
            let run = same_and_recorded(&programs, with_simcuda(&[&program]));
            calls = Some(ours(&run.trace()).len());
        }
        finds_its_error(with_simcuda(&[program.as_os_str(), error.as_ref()]), expected);
    }
}

#[test]
fn programs_with_sanitizers_of_gcc_are_recorded() {
    check(Compiler::Gcc);
}

#[test]
fn programs_with_sanitizers_of_clang_are_recorded() {
    check(Compiler::Clang);
}

#[test]
fn a_sanitized_program_may_be_started_by_a_script() {
    // The launcher does not see which program the shell starts.
    let programs = ProgramFolder::new();
    let program = build(&programs, "sanitized", Compiler::Gcc, &["-fsanitize=address"]).unwrap();
    let words = ["sh", "-c", r#""$1" && echo done"#, "sh"].map(OsStr::new).into_iter();
    let words: Vec<&OsStr> = words.chain([program.as_os_str()]).collect();
    same_and_recorded(&programs, with_simcuda(&words));
}

#[test]
fn a_preloaded_runtime_stays_first() {
    // A program without a sanitizer, into which the user preloads the runtime: python, for example, for a module that
    // is built with it.
    let programs = ProgramFolder::new();
    let program = programs.program("hostile/sanitized.c", "plain", &linked_with("libcudart.so.12"));
    let output = Command::new("gcc").arg("-print-file-name=libasan.so").output().unwrap();
    let runtime = String::from_utf8(output.stdout).unwrap();
    // The variable applies to memtrace too, whose own memory is not to be checked for leaks.
    let traced = with_simcuda(&[&program]).env("ASAN_OPTIONS", "detect_leaks=0").env("LD_PRELOAD", runtime.trim_end());
    let alone = traced.run_alone();
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    let recorded = traced.option("--quiet").run();
    assert_eq!(recorded.output.status, alone.status, "{}", String::from_utf8_lossy(&recorded.output.stderr));
    assert_eq!(recorded.output.stdout, alone.stdout);
    assert!(recorded.trace().event_count() > 0);
}

#[test]
fn a_program_under_valgrind_is_recorded() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("skipped: valgrind is not installed");
        return;
    }
    let programs = ProgramFolder::new();
    let program = programs.program("hostile/sanitized.c", "plain", &linked_with("libcudart.so.12"));
    let command = |bad: &'static [&'static str]| {
        let words = ["valgrind", "--quiet", "--error-exitcode=99"].map(OsStr::new).into_iter();
        let words: Vec<&OsStr> = words.chain([program.as_os_str()]).chain(bad.iter().map(OsStr::new)).collect();
        with_simcuda(&words)
    };
    let run = same_and_recorded(&programs, command(&[]));
    // Valgrind itself is a static program, in which the library is loaded for the program that it runs.
    assert_eq!(run.manifest()["unrecordable"].as_array().map(Vec::len), Some(0), "{:#}", run.manifest());
    finds_its_error(command(&["use"]), "Invalid read of size 1");
}
