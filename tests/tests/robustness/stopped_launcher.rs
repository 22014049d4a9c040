//! A launcher that is stopped (SIGSTOP) for a long time: it sleeps in a debugger, or its shell's job control holds it.
//!
//! Events during the stop are recorded or counted. `crash_bounds` measures the delays of one process.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::crash_support::*;
use memtrace_tests::ledger::{assert_equal, calls_of, pid};
use memtrace_trace::counters::Counter;

/// A process whose whole life falls into the stop gets no answer. It ends unharmed, and the launcher counts and reports
/// its request afterwards. Processes before and after are recorded in full.
#[test]
fn processes_that_live_while_the_launcher_is_stopped_are_counted() {
    const CHILDREN: usize = 4;
    let (_programs, mut scenario) = Scenario::start_program("crash/brood.c", &["4", "10"]);
    let life = |scenario: &mut Scenario| {
        scenario.send_line();
        Duration::from_millis(scenario.line().parse().unwrap())
    };
    life(&mut scenario);
    let before: BTreeSet<u32> = scenario.ledgers().into_keys().collect();
    scenario.stop_launcher();
    let longest = life(&mut scenario);
    assert!(longest < STOPPED + Duration::from_secs(5), "{longest:?}");
    let during: BTreeSet<u32> = scenario.ledgers().into_keys().filter(|pid| !before.contains(pid)).collect();
    assert_eq!((before.len(), during.len()), (CHILDREN, CHILDREN));
    scenario.resume_launcher();
    life(&mut scenario);
    scenario.close_stdin();
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    let ledgers = scenario.ledgers();
    let mut recorded = BTreeSet::new();
    for (_, trace) in scenario.traces() {
        let end = trace.end().expect("an end");
        assert_eq!((end.lost, end.late, trace.counter(Counter::EventsDropped)), (0, 0, 0));
        assert_equal(&calls_of(&trace, &all_events(&trace)), &ledgers[&pid(&trace)]);
        recorded.insert(pid(&trace));
    }
    let expected: BTreeSet<u32> = ledgers.into_keys().filter(|pid| !during.contains(pid)).collect();
    assert_eq!(recorded, expected);
    let manifest = scenario.manifest();
    let refused: u64 = manifest["refused"].as_object().into_iter().flatten().filter_map(|(_, n)| n.as_u64()).sum();
    // Each asks at its first event, and again with exponential backoff only if the launcher is not seen to be stopped.
    assert!(refused >= CHILDREN as u64, "{:#}", manifest["refused"]);
    let messages = scenario.launcher_messages();
    assert!(messages.contains("process ended before the reply"), "{messages}");
    scenario.assert_nothing_is_left();
}

mod exhaustive {
    use super::*;

    /// Three minutes. The program works all the time, and is delayed once.
    #[test]
    fn a_launcher_stopped_for_minutes_delays_the_program_once_and_counts_every_event() {
        const BATCHES: usize = 18;
        let mut counts = vec!["1000"; BATCHES + 2];
        counts[1] = "12000";
        let (_programs, mut scenario) = Scenario::start_program("crash/delays.c", &counts);
        // The slowest call and the sum of all slow calls.
        let calls = |scenario: &mut Scenario| {
            scenario.send_line();
            let line = scenario.line();
            let (slowest, _) = line.split_once(' ').unwrap();
            Duration::from_micros(slowest.parse().unwrap())
        };
        calls(&mut scenario);
        scenario.stop_launcher();
        assert!(calls(&mut scenario) < STOPPED);
        for _ in 1..BATCHES {
            // The length of the stop is what this test is about.
            std::thread::sleep(Duration::from_secs(10));
            let slowest = calls(&mut scenario);
            assert!(slowest < Duration::from_secs(1), "the program waits once, not again: {slowest:?}");
        }
        scenario.resume_launcher();
        calls(&mut scenario);
        assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
        let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
        let (events, end) = (all_events(trace).len() as u64, trace.end().unwrap());
        let made: usize = scenario.ledgers()[&(scenario.pid as u32)].values().map(Vec::len).sum();
        assert_eq!((events + trace.counter(Counter::EventsDropped), end.lost, end.late), (made as u64, 0, 0));
        scenario.assert_nothing_is_left();
    }
}
