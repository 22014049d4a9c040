//! SIGKILL at random points in time over the whole life of a program with threads, children and `exec`.
//!
//! The kill hits the program itself or one of its children; the exhaustive test has two hundred runs. The traces hold
//! every call of every process. Only the one call that each thread of the killed process was making may be missing, and
//! it is counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::crash_support::*;
use memtrace_tests::ledger::{Calls, assert_beginning, assert_equal, assert_whole_when_killed, calls_of, pid};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::TracedProgram;
use memtrace_trace::file::Reader;

/// The number of programs at once. It exceeds the number of cores, so that the kernel's scheduling varies too.
const AT_ONCE: usize = 3;

/// The longest time between the point of the program and the kill.
const MAX_DELAY: Duration = Duration::from_micros(500);

/// A deterministic random generator (SplitMix64): a seed gives the same choices in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound.max(1)
    }
}

/// Waits for `time` more precisely than a sleep alone: it spins for the last 200 us.
fn wait_precisely(time: Duration) {
    let began = Instant::now();
    std::thread::sleep(time.saturating_sub(Duration::from_micros(200)));
    while began.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Runs the program once and kills one of its processes. Returns the killed process, or `None` when the signal came too
/// late.
///
/// The point is a size of the ledger below `ledger_bytes`, and a random time after it: so it is as far into the program
/// on a busy machine as on an idle one. One in four kills comes before the first call.
fn one_kill(program: &TracedProgram, seed: u64, ledger_bytes: u64) -> Option<u32> {
    let mut random = Random(seed);
    let bytes = if random.below(4) == 0 { 0 } else { random.below(ledger_bytes) };
    let delay = Duration::from_nanos(random.below(MAX_DELAY.as_nanos() as u64));
    let (whom, which) = (random.below(3), random.below(1 << 16) as usize);
    let mut scenario = Scenario::start(program.clone(), true, None);
    scenario.wait_for_ledger(bytes);
    wait_precisely(delay);
    let target = if whom == 0 {
        // Choose a child that still runs the same program, if there is one.
        let image = std::fs::read_link(format!("/proc/{}/exe", scenario.pid)).ok();
        let mut children = scenario.processes();
        children.retain(|p| {
            *p != scenario.pid && std::fs::read_link(format!("/proc/{p}/exe")).ok() == image && image.is_some()
        });
        if children.is_empty() { None } else { Some(children[which % children.len()]) }
    } else {
        Some(scenario.pid)
    };
    if let Some(target) = target {
        kill(target, libc::SIGKILL);
    }
    let ending = scenario.end();
    // The exit status shows whether the signal arrived before the program's end.
    let died = ending.code == 128 + libc::SIGKILL;
    assert!(
        died && target == Some(scenario.pid) || ending == Ending { code: 9, stdout: "done\n".to_owned() },
        "{ending:?}"
    );
    check(&scenario, target.map(|t| t as u32));
    let launcher_messages = scenario.launcher_messages();
    // A child may outlive its parent, and allocate for the first time after the launcher has ended the recording. The
    // killed process may die while it connects to the launcher.
    let expected = [
        "outlived the command",
        "it cannot reach the launcher, which has ended or is in another network namespace",
        "refused 1 recording request: incomplete request",
        "refused 1 recording request: process ended before the reply",
    ];
    let mut messages = launcher_messages.lines().filter(|l| !l.starts_with("memtrace: help: "));
    assert!(messages.all(|l| expected.iter().any(|e| l.contains(e))), "{launcher_messages}");
    scenario.assert_nothing_is_left();
    target.map(|t| t as u32).filter(|_| died || target != Some(scenario.pid))
}

/// Compares the traces with the ledger.
fn check(scenario: &Scenario, killed: Option<u32>) {
    let mut images: BTreeMap<u32, Vec<Reader>> = BTreeMap::new();
    let mut traces = scenario.traces();
    traces.sort_by_key(|(name, _)| (name.len(), name.clone()));
    for (_, trace) in traces {
        images.entry(pid(&trace)).or_default().push(trace);
    }
    let ledgers = scenario.ledgers();
    for (pid, images) in &images {
        let (mut ours, mut lost, mut is_whole) = (Calls::new(), 0, true);
        for trace in images {
            assert!(trace.damage().is_none(), "{:?}", trace.damage());
            let end = trace.end().expect("an end");
            let events = all_events(trace);
            // Every sequence number belongs to an event or is counted as lost.
            let numbers = events.last().map_or(0, |e| e.seq);
            assert!(events.is_sorted_by(|a, b| a.seq < b.seq) && end.late == 0);
            assert!(events.len() as u64 <= numbers && numbers <= events.len() as u64 + end.lost);
            lost += end.lost;
            is_whole &= end.reason != "still running";
            for (tid, more) in calls_of(trace, &events) {
                ours.entry(tid).or_default().extend(more);
            }
        }
        // A process that is killed in its first call may have no ledger entry.
        let ledger = ledgers.get(pid).cloned().unwrap_or_default();
        match killed {
            Some(killed) if killed == *pid => {
                assert_whole_when_killed(&ours, &ledger);
                assert!(lost <= ledger.len().max(1) as u64, "{lost} lost by {} threads", ledger.len());
                assert!(!ours.is_empty() || ledger.is_empty() || lost > 0, "the first call left no count");
            }
            _ if is_whole => {
                assert_equal(&ours, &ledger);
                assert_eq!(lost, 0);
            }
            // This process outlived the time that the launcher waits after the command's end.
            _ => assert_beginning(&ours, &ledger),
        }
    }
    for (pid, ledger) in &ledgers {
        // A process may ask for a segment after the launcher is gone.
        let calls: usize = ledger.values().map(Vec::len).sum();
        let orphan = killed == Some(scenario.pid as u32) && *pid != scenario.pid as u32;
        assert!(images.contains_key(pid) || orphan, "process {pid}: {calls} calls");
    }
}

#[test]
fn killed_at_random_times() {
    assert_killed_at_random_times(24);
}

mod exhaustive {
    #[test]
    fn killed_at_two_hundred_random_times() {
        super::assert_killed_at_random_times(200);
    }
}

/// Runs one kill for each seed below `seeds`.
#[track_caller]
fn assert_killed_at_random_times(seeds: u64) {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/life.c", "life", &linked_with("libcudart.so.12"));
    let program = with_simcuda(&[program.as_os_str()]).option("--no-snapshot");
    // The size of the ledger of a whole run. The last tenth is left out, because it depends on the numbers in the
    // lines.
    let ledger_bytes = {
        let mut scenario = Scenario::start(program.clone(), true, None);
        assert_eq!(scenario.line(), "done");
        assert_eq!(scenario.end().code, 9);
        check(&scenario, None);
        scenario.ledger_bytes() * 9 / 10
    };
    let (next, came, too_late) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let killed = std::panic::catch_unwind(|| one_kill(&program, seed, ledger_bytes));
                    let Ok(killed) = killed else { panic!("seed {seed}") };
                    let count = if killed.is_some() { &came } else { &too_late };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let (came, too_late) = (came.into_inner(), too_late.into_inner());
    println!("{came} kills came in time, {too_late} after the end");
    assert!(came >= seeds / 3, "{came} of {seeds} kills came in time");
}
