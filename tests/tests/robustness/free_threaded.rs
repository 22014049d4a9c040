//! Free-threaded CPython. In 3.14, each thread's stacks are those that Python sees, and other objects are not read,
//! with a reason. In other versions it is refused in words: the process is unharmed, every event has its native stack,
//! and the report and `run.json` give the reason.

use std::process::Command;

use crate::hostile_support::*;
use memtrace_tests::ledger::{assert_equal, ours, pid, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{events, memtrace};

/// The program has the symbols of such an interpreter.
#[test]
fn a_version_that_is_not_known_is_refused_with_a_reason() {
    let version = r#"-DVERSION="3.13.0 experimental free-threading build (main, Oct  7 2024, 00:00:00) [GCC 13.2.0]""#;
    let programs = ProgramFolder::new();
    let mut all = linked_with("libcudart.so.12");
    all.extend([version.to_owned(), "-DFLAG".to_owned()]);
    let program = programs.program("hostile/free_threaded.c", "free_threaded", &all);
    let ledger = programs.path("ledger");
    let run = same_output(with_simcuda(&[&program]).env("SIMCUDA_LEDGER", &ledger));
    let trace = run.trace();
    let events = events(&trace);
    assert!(events.len() >= 400 && events.iter().all(|event| !event.stack.is_none()), "native stacks");
    // The file has the calls of both runs.
    assert_equal(&ours(&trace), &read_all(&ledger)[&pid(&trace)]);
    let notices: Vec<_> = trace.definitions().notices.iter().filter(|n| &*n.topic == "python").collect();
    let [notice] = notices[..] else { panic!("{notices:?}") };
    assert_eq!(notice.status.name(), "off");
    assert!(notice.text.starts_with("no Python stacks: free-threaded CPython is supported in"), "{}", notice.text);
    let report = Command::new(memtrace()).arg("report").arg(run.path()).output().unwrap();
    let report = String::from_utf8(report.stdout).unwrap();
    let words: Vec<&str> = report.split_whitespace().collect();
    assert!(words.join(" ").contains("free-threaded CPython is supported in version 3.14 only"), "{report}");
}

/// These need an interpreter of their own (`scripts/python 3.14t`).
mod exhaustive {
    use std::collections::BTreeMap;

    use memtrace_tests::traced_program::TracedProgram;
    use memtrace_tests::versions::Versions;
    use memtrace_trace::definition::FREE_THREADED_TOPIC;
    use memtrace_trace::event::Action;

    use super::*;

    #[test]
    fn eight_threads_that_allocate_at_once_have_their_own_stacks() {
        let run = TracedProgram::python("free_threaded/threads.py", &[]).on(Versions::FREE_THREADED).run();
        run.assert_ended_well();
        let stdout = String::from_utf8_lossy(&run.output.stdout);
        let mut expected: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
        for line in stdout.lines() {
            let (size, stack) = line.split_once(' ').unwrap();
            expected.insert(size.parse().unwrap(), stack.split(' ').collect());
        }
        assert_eq!(expected.len(), 16);
        let trace = run.trace();
        let definitions = trace.definitions();
        let (mut compared, mut threads) = (0, std::collections::BTreeSet::new());
        for event in events(&trace).iter().filter(|event| event.action == Action::Alloc) {
            let frames = definitions.walk(event.stack).filter_map(|(_, frame)| frame);
            let found: Vec<_> = frames.map(|frame| format!("{}:{}", frame.name, frame.line)).collect();
            // PyTorch's own calls of CUDA in the same place have other sizes.
            if let Some(stack) = expected.get(&event.size)
                && found.first().is_some_and(|frame| frame.starts_with("allocate:"))
            {
                assert_eq!(found, *stack, "{}", event.size);
                threads.insert(event.thread);
                compared += 1;
            }
        }
        assert_eq!((compared, threads.len()), (8 * 300, 8));
        assert!(definitions.nn_calls.values().any(|call| &*call.class == "Linear"), "{:?}", definitions.nn_calls);
        let notice = definitions.notices.iter().find(|notice| &*notice.topic == FREE_THREADED_TOPIC).expect("a notice");
        assert!(definitions.tensor_names.is_empty(), "{:?}", definitions.tensor_names);
        let collector = definitions.notices.iter().find(|notice| &*notice.topic == "python.gc").expect("a notice");
        assert!(collector.text.starts_with("free-threaded CPython does not publish"), "{}", collector.text);
        let report = Command::new(memtrace()).arg("report").arg(run.path()).output().unwrap();
        let report = String::from_utf8(report.stdout).unwrap();
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&report).contains(&words(&notice.text)), "{report}");
    }
}
