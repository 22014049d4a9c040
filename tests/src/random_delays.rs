//! Delays at random places of a run: its processes and the launcher are repeatedly stopped (SIGSTOP) and continued
//! (SIGCONT).
//!
//! This imitates a machine that is busy with other work. The recording must not depend on it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::traced_program::{Run, TracedProgram, without_pytorchs_abort};

/// The longest stop of a process, in milliseconds. It is far below the 2 s that a process waits for its launcher.
const LONGEST_STOP_MS: u64 = 60;
/// The longest time between two stops, in milliseconds.
const LONGEST_PAUSE_MS: u64 = 80;

/// A deterministic random generator (xorshift64*): one seed gives the same delays in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound.max(1)
    }
}

/// The parent process of each process on the machine.
fn parents() -> BTreeMap<i32, i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let parent = |pid: i32| {
        let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
        // The name is in parentheses and may contain any character.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    pids.filter_map(|pid| Some((pid, parent(pid)?))).collect()
}

/// `root` and all its descendants.
fn family(root: i32) -> Vec<i32> {
    let parents = parents();
    let descends = |mut pid: i32| {
        // No chain of parents is longer than the number of processes.
        (0..parents.len()).any(|_| {
            let is_root = pid == root;
            pid = parents.get(&pid).copied().unwrap_or(0);
            is_root
        })
    };
    parents.keys().copied().filter(|pid| descends(*pid)).collect()
}

fn delay_processes(root: i32, seed: u64, is_over: &AtomicBool) -> u64 {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut stops = 0;
    while !is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(random.below(LONGEST_PAUSE_MS)));
        let family = family(root);
        let Some(pid) = family.get(random.below(family.len() as u64) as usize).copied() else { continue };
        // SAFETY: `kill` takes two integers and touches no memory. If the process has ended, the call fails and nothing
        // is stopped.
        if unsafe { libc::kill(pid, libc::SIGSTOP) } == 0 {
            std::thread::sleep(Duration::from_millis(random.below(LONGEST_STOP_MS)));
            // SAFETY: `kill` takes two integers and touches no memory. `pid` is the process that the SIGSTOP before it
            // stopped.
            unsafe { libc::kill(pid, libc::SIGCONT) };
            stops += 1;
        }
    }
    stops
}

/// Runs the program under memtrace, with delays that `seed` determines. Returns the run and the number of stops.
pub fn run_with_random_delays(traced: &TracedProgram, seed: u64) -> (Run, u64) {
    without_pytorchs_abort(|| run_once(traced, seed), |(run, _)| &run.output)
}

fn run_once(traced: &TracedProgram, seed: u64) -> (Run, u64) {
    let dir = tempfile::Builder::new().prefix("memtrace-test-").tempdir().expect("a temporary folder");
    let mut command = traced.prepare(Some(&dir.path().join("run")));
    command.stdin(std::process::Stdio::null());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().expect("the launcher starts");
    let root = child.id() as i32;
    let is_over = AtomicBool::new(false);
    let (output, stops) = std::thread::scope(|scope| {
        let delayer = scope.spawn(|| delay_processes(root, seed, &is_over));
        let output = child.wait_with_output().expect("the launcher's output");
        is_over.store(true, Ordering::Relaxed);
        (output, delayer.join().expect("the thread that delays"))
    });
    (Run { dir, output }, stops)
}
