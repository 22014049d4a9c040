//! SIGKILL at random moments (two hundred of them in the exhaustive test): over the whole life of a program with threads, children and other programs that it
//! starts; now for the program itself, now for one of its children. Everything that any process of it had done is in the traces, but for
//! the one call that each thread of the killed one was making, and that is counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::crash_support::*;
use memtrace_tests::ledger::{Calls, assert_beginning, assert_equal, assert_whole_when_killed, calls_of, pid};
use memtrace_tests::programs::{Workshop, linked_with, victim};
use memtrace_tests::victim::Victim;
use memtrace_trace::file::Reader;

/// How many run at once: more than the machine has cores, so that also the kernel decides who comes when.
const AT_ONCE: usize = 3;

/// A small generator (SplitMix64): a seed gives the same choices in every run.
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

/// Waits with more precision than a sleep has.
fn pass(time: Duration) {
    let began = Instant::now();
    std::thread::sleep(time.saturating_sub(Duration::from_micros(200)));
    while began.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Who was killed, if anybody was there to be killed.
fn one_kill(program: &Victim, seed: u64, life: Duration) -> Option<u32> {
    let mut random = Random(seed);
    let moment = Duration::from_nanos(random.below(life.as_nanos() as u64));
    let (whom, which) = (random.below(3), random.below(1 << 16) as usize);
    let mut scene = Scene::start(program.clone(), true, None);
    pass(moment);
    let target = if whom == 0 {
        // One of its children, where there is one.
        let image = std::fs::read_link(format!("/proc/{}/exe", scene.pid)).ok();
        let mut children = scene.processes();
        children.retain(|p| {
            *p != scene.pid && std::fs::read_link(format!("/proc/{p}/exe")).ok() == image && image.is_some()
        });
        if children.is_empty() { None } else { Some(children[which % children.len()]) }
    } else {
        Some(scene.pid)
    };
    if let Some(target) = target {
        kill(target, libc::SIGKILL);
    }
    let ending = scene.end();
    // Whether the signal came before its end the kernel knows.
    let died = ending.code == 128 + libc::SIGKILL;
    assert!(died && target == Some(scene.pid) || ending == Ending { code: 9, said: "done\n".to_owned() }, "{ending:?}");
    check(&scene, target.map(|t| t as u32));
    let complaints = scene.complaints();
    // A child goes on after its parent; who is killed may have been asking for its place.
    let expected =
        ["outlived the command", "turned away 1 times: no hello", "turned away 1 times: gone before the answer"];
    assert!(complaints.lines().all(|l| expected.iter().any(|e| l.contains(e))), "{complaints}");
    scene.assert_nothing_is_left();
    target.map(|t| t as u32).filter(|_| died || target != Some(scene.pid))
}

/// The traces against the ledger.
fn check(scene: &Scene, killed: Option<u32>) {
    let mut images: BTreeMap<u32, Vec<Reader>> = BTreeMap::new();
    let mut traces = scene.traces();
    traces.sort_by_key(|(name, _)| (name.len(), name.clone()));
    for (_, trace) in traces {
        images.entry(pid(&trace)).or_default().push(trace);
    }
    let ledgers = scene.ledgers();
    for (pid, images) in &images {
        let (mut ours, mut lost, mut is_whole) = (Calls::new(), 0, true);
        for trace in images {
            assert!(trace.damage().is_none(), "{:?}", trace.damage());
            let end = trace.end().expect("an end");
            let events = all_events(trace);
            // Every number is an event or is counted.
            let numbers = events.last().map_or(0, |e| e.seq);
            assert!(events.is_sorted_by(|a, b| a.seq < b.seq) && end.late == 0);
            assert!(events.len() as u64 <= numbers && numbers <= events.len() as u64 + end.lost);
            lost += end.lost;
            is_whole &= end.reason != "still running";
            for (tid, more) in calls_of(trace, &events) {
                ours.entry(tid).or_default().extend(more);
            }
        }
        // One that was killed in its first call may be in no ledger.
        let ledger = ledgers.get(pid).cloned().unwrap_or_default();
        match killed {
            Some(killed) if killed == *pid => {
                assert_whole_when_killed(&ours, &ledger);
                assert!(lost <= ledger.len().max(1) as u64, "{lost} lost by {} threads", ledger.len());
            }
            _ if is_whole => {
                assert_equal(&ours, &ledger);
                assert_eq!(lost, 0);
            }
            // It lived on for longer than the launcher waits.
            _ => assert_beginning(&ours, &ledger),
        }
    }
    for (pid, ledger) in &ledgers {
        // It may not even have come to ask for a place to record to; or nobody was there any more to answer.
        let calls: usize = ledger.values().map(Vec::len).sum();
        let orphan = killed == Some(scene.pid as u32) && *pid != scene.pid as u32;
        assert!(
            images.contains_key(pid) || orphan || killed == Some(*pid) && calls <= 1,
            "process {pid}: {calls} calls"
        );
    }
}

#[test]
fn killed_at_some_random_moments() {
    killed_at_random_moments(24);
}

mod exhaustive {
    #[test]
    fn killed_at_two_hundred_random_moments() {
        super::killed_at_random_moments(200);
    }
}

/// One run for each seed below `seeds`.
#[track_caller]
fn killed_at_random_moments(seeds: u64) {
    let workshop = Workshop::new();
    let program = workshop.program("crash/life.c", "life", &linked_with("libcudart.so.12"));
    let program = victim(&[program.as_os_str()]).option("--no-snapshot");
    // How long it lives where so many others do.
    let lives = || {
        let mut scene = Scene::start(program.clone(), true, None);
        let began = Instant::now();
        assert_eq!(scene.line(), "done");
        let life = began.elapsed();
        assert_eq!(scene.end().code, 9);
        check(&scene, None);
        life
    };
    let life = std::thread::scope(|scope| {
        let lives: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(lives)).collect();
        lives.into_iter().map(|l| l.join().unwrap()).min().unwrap()
    });
    let (next, came, too_late) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let killed = std::panic::catch_unwind(|| one_kill(&program, seed, life));
                    let Ok(killed) = killed else { panic!("seed {seed}, of a life of {life:?}") };
                    let count = if killed.is_some() { &came } else { &too_late };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let (came, too_late) = (came.into_inner(), too_late.into_inner());
    println!("a life of {life:?}: {came} came in it, {too_late} when all was over");
    assert!(came >= seeds / 3, "a life of {life:?}: {came} of {seeds} came in it");
}
