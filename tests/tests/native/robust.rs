//! Native stacks that are hard to unwind: small stacks, stacks that the program made itself, generated code,
//! overwritten stacks.
//!
//! The program runs as without memtrace, and every allocation is recorded. Unwinding goes as far as it can, and
//! truncated stacks are counted.

use memtrace_analysis::open_run;
use memtrace_tests::ledger::{assert_equal, ours, pid, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, events};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Source};

/// Runs the program in one mode, with and without memtrace. Requires the same output and status, and the ledger's
/// events. Returns the run, the number of truncated stacks, and each runtime call's frame names, innermost first.
#[track_caller]
fn compare(mode: &str) -> (Run, u64, Vec<Vec<String>>) {
    let programs = ProgramFolder::new();
    let program = programs.program("native/robust.c", "robust", &linked_with("libcudart.so.12"));
    let ledger = programs.path("ledger");
    // With an unlimited stack size the C library knows less about the main thread's stack.
    let limit = if mode == "heap-stack" { "unlimited" } else { "$(ulimit -s)" };
    let script = format!("ulimit -s {limit} && exec \"$0\" \"$1\"");
    let command = ["sh".as_ref(), "-c".as_ref(), script.as_ref(), program.as_os_str(), mode.as_ref()];
    let traced = with_simcuda(&command).option("--stacks").option("native");
    let alone = traced.run_alone();
    assert!(alone.status.success(), "{alone:?}");
    let run = traced.env("SIMCUDA_LEDGER", &ledger).run();
    run.assert_ended_well();
    assert_eq!(String::from_utf8_lossy(&alone.stdout), String::from_utf8_lossy(&run.output.stdout));
    let ledgers = read_all(&ledger);
    let opened = open_run(run.path()).expect("the run");
    let (mut cut, mut names) = (0, Vec::new());
    for trace in run.traces() {
        assert_equal(&ours(&trace), &ledgers[&pid(&trace)]);
        assert_eq!(trace.counter(Counter::Panics), 0);
        cut += trace.counter(Counter::StacksTruncated);
        let process = opened.processes().iter().find(|p| p.pid() == pid(&trace)).expect("the process");
        let definitions = process.definitions();
        let calls = events(&trace).into_iter().filter(|e| e.source == Source::Runtime && e.action == Action::Alloc);
        names.extend(calls.map(|e| {
            let frame = |(_, id)| {
                // Generated code is in no object, so its only name is its address.
                let place = definitions.native_frames.get(&id);
                let generated = place.is_some_and(|place| definitions.module(place.module).is_none());
                let name = definitions.frame(id).map(|f| f.name.to_string());
                name.filter(|_| !generated).unwrap_or_default()
            };
            definitions.walk_ids(e.stack).map(frame).collect::<Vec<_>>()
        }));
    }
    assert_eq!(opened.processes().len(), ledgers.len());
    (run, cut, names)
}

/// Requires that the frames begin with these names.
#[track_caller]
fn assert_begins(frames: &[String], expected: &[&str]) {
    let found: Vec<&str> = frames.iter().take(expected.len()).map(String::as_str).collect();
    assert_eq!(found, expected, "{frames:?}");
}

#[test]
fn threads_with_small_stacks_are_walked() {
    let (_, cut, names) = compare("threads");
    assert_eq!((cut, names.len()), (0, 280));
    for frames in names {
        let down = frames.iter().skip(1).take_while(|name| *name == "down").count();
        assert_eq!((frames[0].as_str(), down % 9, frames[1 + down].as_str()), ("allocate", 1, "small"), "{frames:?}");
    }
}

#[test]
fn coroutines_are_walked_to_their_start() {
    let (_, _, names) = compare("coroutines");
    assert_eq!(names.len(), 3 * (4 * 5 + 6));
    let (mut inside, mut outside) = (0, 0);
    for frames in names {
        let work = frames.iter().skip(1).take_while(|name| *name == "coroutine_work").count();
        if work == 0 {
            assert_begins(&frames, &["allocate", "coroutine", "main"]);
            outside += 1;
        } else {
            assert_eq!((frames[0].as_str(), work % 4, frames[1 + work].as_str()), ("allocate", 0, "coroutine_start"));
            inside += 1;
        }
    }
    assert_eq!((inside, outside), (60, 18));
}

#[test]
fn jit_code_with_frame_pointers_is_unwound() {
    let (_, cut, names) = compare("jit-rbp");
    assert_eq!((cut, names.len()), (0, 5));
    for frames in names {
        assert_begins(&frames, &["allocate", "", "generated", "with_frame_pointers", "main"]);
    }
}

#[test]
fn unwinding_stops_at_jit_code_without_frame_pointers_and_is_counted() {
    for mode in ["jit", "jit-nonsense"] {
        let (_, cut, names) = compare(mode);
        // Five runtime calls, each with one driver call.
        assert_eq!((cut, names.len()), (10, 5), "{mode}");
        for frames in names {
            assert_begins(&frames, &["allocate"]);
            // No frame is invented.
            assert!(frames.len() <= 2, "{mode}: {frames:?}");
        }
    }
}

#[test]
fn a_stack_on_the_heap_is_not_unwound_into_the_main_stack() {
    let (_, cut, names) = compare("heap-stack");
    // Five runtime calls, each with one driver call.
    assert_eq!((cut, names.len()), (10, 6));
    assert_begins(&names[0], &["allocate", "heap_stack", "main"]);
    for frames in &names[1..] {
        assert_begins(frames, &["allocate"]);
        assert!(frames.len() <= 2, "{frames:?}");
    }
}

#[test]
fn corrupt_stacks_are_harmless_and_counted() {
    let (run, cut, names) = compare("overwritten");
    let stdout = String::from_utf8_lossy(&run.output.stdout);
    assert_eq!(stdout.matches("allocated").count(), 40, "{stdout}");
    // Zeros look like the end of a stack, and overwritten memory may look like valid frames.
    assert!(cut >= 40, "{cut}");
    assert_eq!(names.len(), 40 * 3);
    for call in names.chunks(3) {
        // The call before the overwriting has a complete stack.
        assert_begins(&call[0][..2], &["allocate", "deeper"]);
        assert!(call[0].iter().filter(|name| *name == "deeper").count() == 9 && call[0].contains(&"doomed".to_owned()));
        for after in &call[1..] {
            assert_begins(after, &["allocate"]);
        }
    }
}
