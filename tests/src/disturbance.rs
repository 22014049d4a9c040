//! Delays at random places of a traced program: its processes and the launcher are stopped (SIGSTOP) and go on (SIGCONT) again and again,
//! as on a machine that is busy with other work. What a recording says must not depend on it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::victim::{Run, Victim};

/// The longest time that a process is stopped, in milliseconds. Well below what the product waits for its launcher (2 s).
const LONGEST_STOP_MS: u64 = 60;
/// The longest time between two stops.
const LONGEST_PAUSE_MS: u64 = 80;

/// A small generator of random numbers (xorshift64*): the delays of one seed are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound.max(1)
    }
}

/// The parent of each process.
fn parents() -> BTreeMap<i32, i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let parent = |pid: i32| {
        let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
        // The name stands in parentheses and may hold any character.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    pids.filter_map(|pid| Some((pid, parent(pid)?))).collect()
}

/// `root` and all that descend from it.
fn family(root: i32) -> Vec<i32> {
    let parents = parents();
    let descends = |mut pid: i32| {
        // No chain of parents is longer than there are processes.
        (0..parents.len()).any(|_| {
            let is_root = pid == root;
            pid = parents.get(&pid).copied().unwrap_or(0);
            is_root
        })
    };
    parents.keys().copied().filter(|pid| descends(*pid)).collect()
}

fn disturb(root: i32, seed: u64, is_over: &AtomicBool) -> u64 {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut stops = 0;
    while !is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(random.below(LONGEST_PAUSE_MS)));
        let family = family(root);
        let Some(pid) = family.get(random.below(family.len() as u64) as usize).copied() else { continue };
        // SAFETY: signals to a process of this test; one that has ended meanwhile is an error, which is no matter.
        if unsafe { libc::kill(pid, libc::SIGSTOP) } == 0 {
            std::thread::sleep(Duration::from_millis(random.below(LONGEST_STOP_MS)));
            // SAFETY: the process that was stopped above.
            unsafe { libc::kill(pid, libc::SIGCONT) };
            stops += 1;
        }
    }
    stops
}

/// Runs it under memtrace and delays it at places that `seed` chooses; gives how often, too.
pub fn run_disturbed(victim: &Victim, seed: u64) -> (Run, u64) {
    let dir = tempfile::Builder::new().prefix("memtrace-test-").tempdir().expect("a temporary folder");
    let mut command = victim.prepare(Some(&dir.path().join("run")));
    command.stdin(std::process::Stdio::null());
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().expect("the launcher starts");
    let root = child.id() as i32;
    let is_over = AtomicBool::new(false);
    let (output, stops) = std::thread::scope(|scope| {
        let disturber = scope.spawn(|| disturb(root, seed, &is_over));
        let output = child.wait_with_output().expect("the launcher's output");
        is_over.store(true, Ordering::Relaxed);
        (output, disturber.join().expect("the disturber"))
    });
    (Run { dir, output }, stops)
}
