//! Upper bounds for the time that a stopped or dead launcher delays a program, and the events that this loses.
//!
//! The program measures the time of each of its calls. The bounds here allow for a busy machine; docs/dev/reliability.md
//! has the measured figures.

use std::time::Duration;

use crate::crash_support::*;
use memtrace_tests::ledger::{assert_equal, calls_of};
use memtrace_tests::programs::{Workshop, linked_with, victim};
use memtrace_trace::counters::Counter;

/// A process without an answer or without free slots waits two seconds, once. The remaining 1.5 s allow for a busy
/// machine. No process waits for a launcher that is dead.
const STOPPED: Duration = Duration::from_millis(3500);
const DEAD: Duration = Duration::from_secs(1);

fn start(calls: [&str; 3]) -> (Workshop, Scene) {
    let workshop = Workshop::new();
    let program = workshop.program("crash/delays.c", "delays", &linked_with("libcudart.so.12"));
    let mut command = vec![program.as_os_str()];
    command.extend(calls.iter().map(std::ffi::OsStr::new));
    let scene = Scene::start(victim(&command), true, None);
    (workshop, scene)
}

/// Makes the program run its next calls. Returns the duration of the slowest call and the sum of all slow calls.
fn calls(scene: &mut Scene) -> (Duration, Duration) {
    scene.tell();
    let line = scene.line();
    let mut times = line.split(' ').map(|t| Duration::from_micros(t.parse().unwrap()));
    (times.next().unwrap(), times.next().unwrap())
}

fn stop(scene: &Scene) {
    let launcher = scene.launcher.id() as i32;
    kill(launcher, libc::SIGSTOP);
    wait_for("the stop", || state(launcher) == Some('T'));
}

fn go_on(scene: &Scene) {
    kill(scene.launcher.id() as i32, libc::SIGCONT);
}

#[test]
fn the_first_events_do_not_wait_long_for_a_stopped_launcher() {
    let (_workshop, mut scene) = start(["1000", "4000", "10"]);
    stop(&scene);
    let (slowest, all_slow) = calls(&mut scene);
    println!("first event under a stopped launcher: {slowest:?}, all slow calls {all_slow:?}");
    assert!(slowest < STOPPED && all_slow < STOPPED, "{slowest:?} {all_slow:?}");
    go_on(&scene);
    // The process retries the connection from time to time.
    calls(&mut scene);
    calls(&mut scene);
    assert_eq!(scene.end(), Ending { code: 3, said: String::new() });
    let [(_, trace)] = &scene.traces()[..] else { panic!("one trace") };
    let events = all_events(trace);
    let ledger = scene.ledgers().remove(&(scene.pid as u32)).unwrap();
    let made: usize = ledger.values().map(Vec::len).sum();
    assert_eq!(
        events.len() as u64 + trace.counter(Counter::EventsDropped),
        made as u64,
        "recorded and counted as missing"
    );
    assert!(events.len() > 1000, "{}", events.len());
    assert_eq!(trace.end().unwrap().lost, 0);
    println!("{}", scene.complaints());
    scene.assert_nothing_is_left();
}

#[test]
fn a_full_ring_does_not_hold_a_program_up_for_long() {
    let (_workshop, mut scene) = start(["10", "12000", "1000"]);
    calls(&mut scene);
    stop(&scene);
    // 12,000 calls are 24,000 events; a ring has 8,192 slots.
    let (slowest, all_slow) = calls(&mut scene);
    println!("full ring under a stopped launcher: {slowest:?}, all slow calls {all_slow:?}");
    assert!(slowest < STOPPED && all_slow < STOPPED, "{slowest:?} {all_slow:?}");
    go_on(&scene);
    let (slowest, _) = calls(&mut scene);
    assert!(slowest < STOPPED, "{slowest:?}");
    assert_eq!(scene.end(), Ending { code: 3, said: String::new() });
    let [(_, trace)] = &scene.traces()[..] else { panic!("one trace") };
    let (events, end) = (all_events(trace).len() as u64, trace.end().unwrap());
    let made: usize = scene.ledgers()[&(scene.pid as u32)].values().map(Vec::len).sum();
    let dropped = trace.counter(Counter::EventsDropped);
    assert_eq!((events + dropped, end.lost, end.late), (made as u64, 0, 0));
    assert!(events > 8000 && dropped > 8000, "{events} {dropped}");
    scene.assert_nothing_is_left();
}

#[test]
fn a_dead_launcher_holds_nobody_up_for_long() {
    let (_workshop, mut scene) = start(["10", "12000", "1000"]);
    calls(&mut scene);
    wait_for("the first events to be written", || scene.written() == 20);
    kill(scene.launcher.id() as i32, libc::SIGKILL);
    let (slowest, all_slow) = calls(&mut scene);
    println!("full ring under a dead launcher: {slowest:?}, all slow calls {all_slow:?}");
    assert!(slowest < DEAD && all_slow < DEAD, "{slowest:?} {all_slow:?}");
    let (slowest, _) = calls(&mut scene);
    assert!(slowest < DEAD / 2, "once is enough: {slowest:?}");
    assert_eq!(scene.end_of_orphan(), Ending { code: 3, said: String::new() });
    let [(_, trace)] = &scene.traces()[..] else { panic!("one trace") };
    let ledger = scene.ledgers().remove(&(scene.pid as u32)).unwrap();
    let first = ledger.into_iter().map(|(tid, calls)| (tid, calls[..20].to_vec())).collect();
    assert_equal(&calls_of(trace, &all_events(trace)), &first);
    scene.assert_nothing_is_left();
}
