//! Upper bounds for the time that a stopped or dead launcher delays a program, and the events that this loses.
//!
//! The program measures the time of each of its calls. The bounds here allow for a busy machine;
//! docs/dev/reliability.md has the measured figures.

use std::time::Duration;

use crate::crash_support::*;
use memtrace_tests::ledger::{assert_equal, calls_of};
use memtrace_trace::counters::Counter;

/// No process waits for a launcher that is dead. The second allows for a busy machine.
const DEAD: Duration = Duration::from_secs(1);

/// Makes the program run its next calls. Returns the duration of the slowest call and the sum of all slow calls.
fn calls(scenario: &mut Scenario) -> (Duration, Duration) {
    scenario.send_line();
    let line = scenario.line();
    let mut times = line.split(' ').map(|t| Duration::from_micros(t.parse().unwrap()));
    (times.next().unwrap(), times.next().unwrap())
}

#[test]
fn the_first_events_wait_a_bounded_time_for_a_stopped_launcher() {
    let (_programs, mut scenario) = Scenario::start_program("crash/delays.c", &["1000", "4000", "10"]);
    scenario.stop_launcher();
    let (slowest, all_slow) = calls(&mut scenario);
    println!("first event under a stopped launcher: {slowest:?}, all slow calls {all_slow:?}");
    assert!(slowest < STOPPED && all_slow < STOPPED, "{slowest:?} {all_slow:?}");
    scenario.resume_launcher();
    // The process retries the connection from time to time.
    calls(&mut scenario);
    calls(&mut scenario);
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
    let events = all_events(trace);
    let ledger = scenario.ledgers().remove(&(scenario.pid as u32)).unwrap();
    let made: usize = ledger.values().map(Vec::len).sum();
    assert_eq!(
        events.len() as u64 + trace.counter(Counter::EventsDropped),
        made as u64,
        "recorded and counted as missing"
    );
    assert!(events.len() > 1000, "{}", events.len());
    assert_eq!(trace.end().unwrap().lost, 0);
    println!("{}", scenario.launcher_messages());
    scenario.assert_nothing_is_left();
}

#[test]
fn a_full_ring_delays_a_program_for_a_bounded_time() {
    let (_programs, mut scenario) = Scenario::start_program("crash/delays.c", &["10", "12000", "1000"]);
    calls(&mut scenario);
    scenario.stop_launcher();
    // 12,000 calls are 24,000 events; a ring has 8,192 slots.
    let (slowest, all_slow) = calls(&mut scenario);
    println!("full ring under a stopped launcher: {slowest:?}, all slow calls {all_slow:?}");
    assert!(slowest < STOPPED && all_slow < STOPPED, "{slowest:?} {all_slow:?}");
    scenario.resume_launcher();
    let (slowest, _) = calls(&mut scenario);
    assert!(slowest < STOPPED, "{slowest:?}");
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
    let (events, end) = (all_events(trace).len() as u64, trace.end().unwrap());
    let made: usize = scenario.ledgers()[&(scenario.pid as u32)].values().map(Vec::len).sum();
    let dropped = trace.counter(Counter::EventsDropped);
    assert_eq!((events + dropped, end.lost, end.late), (made as u64, 0, 0));
    assert!(events > 8000 && dropped > 8000, "{events} {dropped}");
    scenario.assert_nothing_is_left();
}

#[test]
fn a_dead_launcher_delays_a_program_for_a_bounded_time() {
    let (_programs, mut scenario) = Scenario::start_program("crash/delays.c", &["10", "12000", "1000"]);
    calls(&mut scenario);
    wait_for("the first events to be written", || scenario.written() == 20);
    kill(scenario.launcher.id() as i32, libc::SIGKILL);
    let (slowest, all_slow) = calls(&mut scenario);
    println!("full ring under a dead launcher: {slowest:?}, all slow calls {all_slow:?}");
    assert!(slowest < DEAD && all_slow < DEAD, "{slowest:?} {all_slow:?}");
    let (slowest, _) = calls(&mut scenario);
    assert!(slowest < DEAD / 2, "once is enough: {slowest:?}");
    assert_eq!(scenario.end_of_orphan(), Ending { code: 3, stdout: String::new() });
    let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
    let ledger = scenario.ledgers().remove(&(scenario.pid as u32)).unwrap();
    let first = ledger.into_iter().map(|(tid, calls)| (tid, calls[..20].to_vec())).collect();
    assert_equal(&calls_of(trace, &all_events(trace)), &first);
    scenario.assert_nothing_is_left();
}
