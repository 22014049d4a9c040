//! Programs that are hard to record because of their environment or their own behavior.
//!
//! Each gives the same output with memtrace as without. The recorded events equal the simulated CUDA's ledger, and
//! events that could not be recorded are counted.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::hostile_support::*;
use memtrace_tests::ledger::{assert_equal, ours, pid, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_trace::counters::Counter;

/// `hostile.c` over the simulated CUDA.
struct Fixture {
    programs: ProgramFolder,
    program: PathBuf,
}

impl Fixture {
    fn new() -> Fixture {
        let programs = ProgramFolder::new();
        let program = programs.program("hostile/hostile.c", "hostile", &linked_with("libcudart.so.12"));
        // The program may switch to another user, who must be able to read the folder.
        open_to_all(&programs.path(""));
        Fixture { programs, program }
    }

    /// Uses a driver that does almost nothing.
    fn bare() -> Fixture {
        let programs = ProgramFolder::new();
        let program = programs.program_over_bare_driver("hostile/hostile.c", "hostile");
        Fixture { programs, program }
    }

    fn bare_program<S: AsRef<OsStr>>(&self, arguments: &[S]) -> TracedProgram {
        let words = std::iter::once(self.program.as_os_str()).chain(arguments.iter().map(AsRef::as_ref));
        TracedProgram::command(&words.collect::<Vec<_>>()).env("LD_LIBRARY_PATH", self.programs.path(""))
    }

    fn traced<S: AsRef<OsStr>>(&self, arguments: &[S]) -> TracedProgram {
        let words = std::iter::once(self.program.as_os_str()).chain(arguments.iter().map(AsRef::as_ref));
        with_simcuda(&words.collect::<Vec<_>>())
    }

    /// Runs the program with and without memtrace and requires the same output, status and ledger. Returns the recorded
    /// run.
    #[track_caller]
    fn same(&self, traced: TracedProgram) -> Run {
        same_and_recorded(&self.programs, traced)
    }

    /// Runs the program with and without memtrace and requires the same output and status. Returns the run, which may
    /// have no events.
    #[track_caller]
    fn unharmed(&self, traced: TracedProgram) -> Run {
        same_output(traced)
    }
}

/// The number of events in the run's traces, and the number counted as dropped.
fn recorded_and_missed(run: &Run) -> (usize, u64) {
    let traces = run.traces();
    (
        traces.iter().map(|t| events(t).len()).sum(),
        traces.iter().map(|t| t.counter(Counter::EventsDropped)).sum::<u64>(),
    )
}

// ---- other memory allocators

#[test]
fn other_allocators_and_an_auditor_may_be_preloaded_in_any_order() {
    let fixture = Fixture::new();
    let strict = fixture.programs.library("hostile/strict_malloc.c", "strict.so", NONE);
    let audit = fixture.programs.library("hostile/audit.c", "audit.so", NONE);
    let debian = |name: &str| PathBuf::from("/usr/lib/x86_64-linux-gnu").join(name);
    let (jemalloc, tcmalloc) = (debian("libjemalloc.so.2"), debian("libtcmalloc_minimal.so.4"));
    for other in [jemalloc, tcmalloc, strict] {
        assert!(other.exists(), "{} is needed: scripts/test installs it", other.display());
        for order in [r#"LD_PRELOAD="$LD_PRELOAD:$0""#, r#"LD_PRELOAD="$0:$LD_PRELOAD""#] {
            let script = format!(r#"{order} exec "$@""#);
            let words = ["sh".as_ref(), "-c".as_ref(), script.as_ref(), other.as_os_str(), fixture.program.as_os_str()];
            let traced = with_simcuda(&words.into_iter().chain(["some".as_ref(), "50".as_ref()]).collect::<Vec<_>>());
            let run = fixture.same(traced.option("--stacks").option("both"));
            assert_eq!(recorded_and_missed(&run), (50 * PAIR, 0), "{}: {order}", other.display());
        }
    }
    let run = fixture.same(fixture.traced(&["some", "5"]).env("LD_AUDIT", audit));
    assert_eq!(recorded_and_missed(&run), (5 * PAIR, 0));
}

#[test]
fn a_handler_that_interrupts_malloc_may_allocate() {
    let fixture = Fixture::bare();
    let folder = format!("-L{}", fixture.programs.path("").display());
    let program = fixture.programs.program("hostile/busy_malloc.c", "busy", &[folder.as_str(), "-l:libcuda.so.1"]);
    for stacks in ["python", "both"] {
        let command = TracedProgram::command(&[&program]).env("LD_LIBRARY_PATH", fixture.programs.path(""));
        let run = same_output(command.option("--stacks").option(stacks));
        assert_eq!(recorded_and_missed(&run), (8 * PAIR, 0), "{stacks}");
    }
}

#[test]
fn a_handler_on_a_stack_of_its_own_may_allocate() {
    let fixture = Fixture::new();
    for stacks in ["python", "both"] {
        let run = fixture.same(fixture.traced(&["handler"]).option("--stacks").option(stacks));
        assert_eq!(recorded_and_missed(&run), (40 * PAIR, 0), "{stacks}");
    }
}

// ---- other symbol lookups

#[test]
fn programs_with_their_own_dlsym_are_recorded() {
    let programs = ProgramFolder::new();
    let program = programs.program("hostile/own_dlsym.c", "own", &linked_with("libcudart.so.12"));
    let run = same_and_recorded(&programs, with_simcuda(&[&program]));
    assert_eq!(recorded_and_missed(&run), (2 * PAIR, 0));
    let interposer = programs.library("hostile/own_dlsym.c", "interposer.so", &["-DPRELOADED", "-fvisibility=default"]);
    let fixture = Fixture::new();
    for order in [r#"LD_PRELOAD="$LD_PRELOAD:$0""#, r#"LD_PRELOAD="$0:$LD_PRELOAD""#] {
        let script = format!(r#"{order} exec "$@""#);
        let words =
            ["sh".as_ref(), "-c".as_ref(), script.as_ref(), interposer.as_os_str(), fixture.program.as_os_str()];
        let run =
            fixture.same(with_simcuda(&words.into_iter().chain(["some".as_ref(), "4".as_ref()]).collect::<Vec<_>>()));
        assert_eq!(recorded_and_missed(&run), (4 * PAIR, 0), "{order}");
    }
}

#[test]
fn versioned_lookups_are_recorded() {
    let fixture = Fixture::new();
    let run = fixture.same(fixture.traced(&["versioned"]));
    // One allocation that is never freed, and two pairs.
    assert_eq!(recorded_and_missed(&run), (PAIR / 2 + 2 * PAIR, 0));
}

#[test]
fn a_library_reloaded_at_the_same_address_is_recorded() {
    let programs = ProgramFolder::new();
    let library = programs.library("cuda/library.c", "libuser.so", &linked_with("libcudart.so.12"));
    let program = programs.program("hostile/deepbind.c", "deepbind", NONE);
    let run = same_and_recorded(&programs, with_simcuda(&[program.as_os_str(), library.as_os_str()]));
    let stdout = String::from_utf8_lossy(&run.output.stdout);
    assert_eq!(stdout.matches("unloaded: 1").count(), 4, "{stdout}");
    assert_eq!(recorded_and_missed(&run), (4 * 3 * PAIR, 0));
}

#[test]
fn a_separate_linker_namespace_is_unchanged() {
    let fixture = Fixture::bare();
    let folder = format!("-L{}", fixture.programs.path("").display());
    let library = fixture.programs.library("cuda/library.c", "libuser.so", &[folder.as_str(), "-l:libcuda.so.1"]);
    let run = same_output(fixture.bare_program(&["namespace".as_ref(), library.as_os_str()]));
    // A new link namespace loads its own copy of every library, and nothing can be preloaded into it. The program's own
    // calls are recorded.
    assert_eq!(recorded_and_missed(&run), (2 * PAIR, 0));
}

// ---- system call filters

#[test]
fn a_seccomp_filter_of_the_program_does_not_kill_it() {
    let fixture = Fixture::bare();
    for action in ["kill", "refuse"] {
        for call in ["socket", "connect", "recvmsg"] {
            let run = same_output(fixture.bare_program(&["seccomp", "0", action, call]));
            assert_eq!(recorded_and_missed(&run).0, 0, "{action} {call}");
        }
        for call in ["process_vm_readv", "memfd_create", "ptrace"] {
            let run =
                same_output(fixture.bare_program(&["seccomp", "0", action, call]).option("--stacks").option("both"));
            assert_eq!(recorded_and_missed(&run), (5 * PAIR, 0), "{action} {call}");
        }
        // A connection that exists before the filter stays open.
        let run = same_output(fixture.bare_program(&["seccomp", "3", action, "socket", "connect", "recvmsg"]));
        assert_eq!(recorded_and_missed(&run), (8 * PAIR, 0), "{action}");
    }
}

// ---- low memory and small stacks

#[test]
fn a_program_may_use_its_stack_to_the_last_pages() {
    let fixture = Fixture::bare();
    for stacks in ["python", "both"] {
        let traced = fixture.bare_program(&["stack-end", "10240", "1"]).option("--stacks").option(stacks);
        assert_eq!(recorded_and_missed(&same_output(traced)), (2 * PAIR, 0), "{stacks}");
    }
}

#[test]
fn a_program_may_close_use_and_be_refused_every_descriptor() {
    let run = same_output(Fixture::bare().bare_program(&["closed"]));
    assert_eq!(recorded_and_missed(&run), (8 * PAIR, 0));
}

#[test]
fn a_limit_on_the_address_space_is_available_to_the_program() {
    let fixture = Fixture::new();
    // The limit applies before the first event: memtrace takes no address space.
    let run = fixture.unharmed(fixture.traced(&["address-limit", "0", "900"]));
    assert!(run.traces().is_empty());
    // memtrace was active before the limit. The program keeps the remaining address space, and events that cannot be
    // recorded are counted.
    let run = fixture.unharmed(fixture.traced(&["address-limit", "1", "4096"]));
    let (recorded, missed) = recorded_and_missed(&run);
    assert_eq!(recorded as u64 + missed, 7 * PAIR as u64, "{recorded} recorded, {missed} missed");
}

// ---- changed privileges

#[test]
fn a_process_that_drops_its_privileges_is_still_recorded() {
    let fixture = Fixture::new();
    let run = fixture.unharmed(fixture.traced(&["nobody", "2"]));
    // The program's child would have to connect to the launcher as another user, so it is not recorded.
    assert_eq!(recorded_and_missed(&run).0, 5 * PAIR);
    let run = fixture.same(fixture.traced(&["undumpable"]));
    assert_eq!(recorded_and_missed(&run), (4 * PAIR, 0));
    let empty = tempfile::tempdir().unwrap();
    let run = fixture.same(fixture.traced(&["chroot".as_ref(), empty.path().as_os_str(), "2".as_ref()]));
    assert_eq!(recorded_and_missed(&run), (5 * PAIR, 0));
    let fixture = Fixture::bare();
    let run = same_output(fixture.bare_program(&["chroot".as_ref(), empty.path().as_os_str(), "0".as_ref()]));
    assert_eq!(recorded_and_missed(&run), (3 * PAIR, 0));
}

#[test]
fn programs_started_by_nohup_env_unshare_and_others_are_recorded() {
    let fixture = Fixture::new();
    for wrapper in [
        &["nohup"][..],
        &["setsid", "--wait"],
        &["timeout", "600"],
        &["nice"],
        &["env", "LD_DEBUG="],
        &["stdbuf", "-o0"],
        &["taskset", "1"],
        &["unshare", "--mount", "--pid", "--fork"],
        &["unshare", "--user", "--map-root-user"],
    ] {
        let words: Vec<&OsStr> = wrapper.iter().map(AsRef::as_ref).chain([fixture.program.as_os_str()]).collect();
        let run = fixture.unharmed(with_simcuda(&[words.as_slice(), &["some".as_ref(), "3".as_ref()]].concat()));
        assert_eq!(recorded_and_missed(&run), (3 * PAIR, 0), "{wrapper:?}");
    }
}

/// Requires that the run's traces and the ledgers of its processes contain the same calls.
#[track_caller]
fn same_and_recorded(programs: &ProgramFolder, traced: TracedProgram) -> Run {
    let ledger: &Path = &programs.path("ledger");
    std::fs::remove_file(ledger).ok();
    let run = same_output(traced.env("SIMCUDA_LEDGER", ledger));
    // The ledger also holds the processes of the first run, which ran without memtrace.
    let ledgers = read_all(ledger);
    let traces = run.traces();
    assert!(!traces.is_empty(), "{}", String::from_utf8_lossy(&run.output.stderr));
    for trace in &traces {
        assert_equal(&ours(trace), &ledgers[&pid(trace)]);
    }
    run
}
