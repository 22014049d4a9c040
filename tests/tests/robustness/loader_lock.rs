//! No hook waits for the dynamic loader's lock.
//!
//! In each program a thread calls CUDA while another one holds that lock: in a constructor or a destructor that waits
//! for the thread. Programs end themselves after a minute, so a hang fails the test.

use std::path::PathBuf;
use std::process::Command;

use crate::hostile_support::*;
use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_trace::counters::Counter;

/// The number of events of one library: two allocations that are freed.
const LIBRARY: usize = 2 * PAIR;

/// `loading.c` and `waiting.c` over a driver that takes no locks and needs no initialization.
struct Fixture {
    programs: ProgramFolder,
    program: PathBuf,
}

impl Fixture {
    fn new() -> Fixture {
        let programs = ProgramFolder::new();
        let program = programs.program_over_bare_driver("loader/loading.c", "loading");
        Fixture { programs, program }
    }

    fn library(&self, name: &str, definitions: &[&str]) -> PathBuf {
        let folder = format!("-L{}", self.programs.path("").display());
        let is_linked = !definitions.contains(&"-DLOOKUP");
        let driver = is_linked.then_some([folder.as_str(), "-l:libcuda.so.1"]);
        let options: Vec<&str> = definitions.iter().copied().chain(driver.into_iter().flatten()).collect();
        self.programs.library("loader/waiting.c", name, &options)
    }

    /// Runs the program with and without memtrace, for each kind of stack, and requires the same output and this number
    /// of events.
    #[track_caller]
    fn same(&self, words: &[&str], expected: usize) {
        for stacks in ["python", "both"] {
            let mut command = vec![self.program.to_str().unwrap()];
            command.extend(words);
            let traced = TracedProgram::command(&command).env("LD_LIBRARY_PATH", self.programs.path(""));
            let run = same_output(traced.option("--stacks").option(stacks));
            assert_eq!(recorded_and_lost(&run), (expected, 0), "{words:?} with {stacks} stacks");
        }
    }
}

/// The number of events in the run's traces, and the number of lost ones.
fn recorded_and_lost(run: &Run) -> (usize, u64) {
    let traces = run.traces();
    let lost = [Counter::EventsDropped, Counter::Reentered];
    (
        traces.iter().map(|trace| events(trace).len()).sum(),
        traces.iter().flat_map(|trace| lost.map(|counter| trace.counter(counter))).sum(),
    )
}

#[test]
fn a_constructor_waits_for_a_thread_that_allocates() {
    let fixture = Fixture::new();
    let library = fixture.library("libconstructor.so", NO_DEFINITIONS);
    fixture.same(&["open", library.to_str().unwrap()], LIBRARY);
}

#[test]
fn a_constructor_looks_up_what_its_thread_calls() {
    let fixture = Fixture::new();
    let library = fixture.library("liblookup.so", &["-DLOOKUP"]);
    fixture.same(&["open", library.to_str().unwrap()], LIBRARY);
}

#[test]
fn a_destructor_waits_for_a_thread_that_allocates() {
    let fixture = Fixture::new();
    let first = fixture.library("libdestructor.so", &["-DDESTRUCTOR"]);
    let second = fixture.library("libdestructor2.so", &["-DDESTRUCTOR", "-DLOOKUP"]);
    fixture.same(&["open", first.to_str().unwrap(), second.to_str().unwrap()], 2 * LIBRARY);
}

#[test]
fn linked_libraries_wait_before_and_after_main() {
    let programs = ProgramFolder::new();
    // The driver exists before the libraries that are linked with it.
    programs.library("process/bare.c", "libcuda.so.1", NONE);
    let folder = format!("-L{}", programs.path("").display());
    let with_driver = |more: &[&'static str]| [more, &["-l:libcuda.so.1"]].concat();
    for (name, definitions) in [("libbefore.so", &[][..]), ("libafter.so", &["-DDESTRUCTOR"][..])] {
        let options: Vec<&str> = [&[folder.as_str()], &with_driver(definitions)[..]].concat();
        programs.library("loader/waiting.c", name, &options);
    }
    let libraries = ["-Wl,--no-as-needed", "-l:libbefore.so", "-l:libafter.so", "-l:libcuda.so.1"];
    let options: Vec<&str> = [&[folder.as_str()], &libraries[..]].concat();
    let program = programs.program("loader/loading.c", "loading", &options);
    let traced = TracedProgram::command(&[&program]).env("LD_LIBRARY_PATH", programs.path(""));
    assert_eq!(recorded_and_lost(&same_output(traced)), (2 * LIBRARY, 0));
}

#[test]
fn threads_load_and_unload_while_another_allocates() {
    let fixture = Fixture::new();
    fixture.same(&["during", "libz.so.1"], 1000 * PAIR);
}

#[test]
fn threads_free_in_destructors_of_thread_specific_data() {
    Fixture::new().same(&["exit"], 20 * PAIR);
}

/// The preloaded library takes from other libraries only what this list has. Everything else it finds in the C library
/// itself (`interpose/src/linker/c_library.rs`), because a sanitizer's runtime or another preloaded library may define
/// a function of the same name.
#[test]
fn the_library_imports_little() {
    const ALLOWED: &[&str] = &[
        // The linker's own.
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
        "__cxa_finalize",
        "__gmon_start__",
        // That of the allocator which the program uses. Bound before any code runs, like all imports.
        "malloc_usable_size",
        // Weak, for a program without DT_DEBUG.
        "_r_debug",
        // A variable, which the loader binds before any code runs.
        "environ",
        // No sanitizer intercepts them.
        "__errno_location",
        "abort",
        "getauxval",
        "geteuid",
        "getpid",
        "getrandom",
        "gettid",
        // Part of the program in glibc before 2.33. They are called after the recording has started.
        "fstat",
        "fstat64",
        "stat64",
        "statx",
        // The standard library calls it for a failed thread name or a message, which we do not have.
        "free",
    ];
    let words = ["sh", "-c", r#"IFS=:; for library in $LD_PRELOAD; do echo "$library"; nm -D -u "$library"; done"#];
    let output = TracedProgram::command(&words).option("--quiet").run().output;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = text.lines().skip_while(|line| !line.contains("memtrace"));
    assert!(lines.next().is_some(), "{text}");
    let imports: Vec<&str> = lines.filter_map(|line| line.split_whitespace().last()?.split('@').next()).collect();
    assert!(imports.contains(&"__errno_location"), "{text}");
    let others: Vec<_> = imports.iter().filter(|name| !ALLOWED.contains(name)).collect();
    assert!(others.is_empty(), "add a stub for {others:?}");
    assert!(Command::new("nm").arg("--version").output().is_ok());
}

const NO_DEFINITIONS: &[&str] = &[];
