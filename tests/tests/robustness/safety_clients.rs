//! Hostile programs that send anything to the launcher or write anything into their shared memory.
//!
//! The launcher stays within its memory bounds, ends, passes on the command's status, and records the honest processes
//! of the same run in full. `programs/safety/intruder.rs` is the hostile program, `programs/launcher/producer.rs` the
//! honest one.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::launcher_support::*;
use memtrace_trace::file::Reader;
use serde_json::Value;

const INTRUDER: &str = env!("CARGO_BIN_EXE_intruder");
/// The launcher's memory limit under any input. docs/reference/safety.md has the calculation.
const MOST_MEMORY_KIB: u64 = 700 * 1024;
/// The memory of a launcher without hostile clients, including the windows and queues of one or two processes.
const LITTLE_MEMORY_KIB: u64 = 120 * 1024;
/// The time that the launcher and the analysis may take after the command's end. It allows for a busy machine.
const END: Duration = Duration::from_secs(120);

/// A field of `/proc/PID/status` in KiB, or `None` when the process or the field does not exist.
fn kib(pid: i32, field: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix(field)?.split_whitespace().next()?.parse().ok())
}

/// The result of a run with a hostile and an honest program.
struct Outcome {
    folder: tempfile::TempDir,
    peak_kib: u64,
    after_command: Duration,
}

impl Outcome {
    fn run(&self) -> std::path::PathBuf {
        self.folder.path().join("run")
    }

    fn process(&self, runs_program: impl Fn(&str) -> bool) -> Vec<Value> {
        let manifest = manifest(&self.run());
        let all = manifest["processes"].as_array().unwrap().clone();
        all.into_iter().filter(|p| runs_program(p["argv"][0].as_str().unwrap_or_default())).collect()
    }
}

/// The number of events of each honest process.
const HONEST: usize = 100_000;

/// Runs the intruder with these arguments beside honest producers, and checks what must hold in every case.
#[track_caller]
fn beside_an_honest_one(words: &str) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    // One honest process connects before the intruder, and one at the same time.
    let half = HONEST / 2;
    let script = format!(
        "mkfifo {fifo}; {PRODUCER} events=100 write say=ready threads=2 events={half} rate=100000 write > {fifo} & \
         read line < {fifo}; {INTRUDER} {words} & {PRODUCER} threads=2 events={half} rate=200000 write; wait; echo \
         over; exit 7",
        fifo = folder.path().join("fifo").display()
    );
    let mut command = Command::new(memtrace());
    command.args(["--quiet", "--no-snapshot", "-o"]).arg(&run).args(["--", "sh", "-c", &script]).stderr(Stdio::piped());
    let mut running = Running::start(&mut command);
    let (pid, over) = (running.pid(), AtomicBool::new(false));
    let (peak_kib, after_command) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = 0;
            while !over.load(Ordering::Relaxed) {
                peak = peak.max(kib(pid, "VmHWM:").unwrap_or(0));
                std::thread::sleep(Duration::from_millis(5));
            }
            peak
        });
        while !["over", ""].contains(&running.line().as_str()) {}
        let ended = Instant::now();
        let status = running.child.wait().unwrap();
        let after = ended.elapsed();
        over.store(true, Ordering::Relaxed);
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut running.child.stderr.take().unwrap(), &mut stderr).unwrap();
        assert_eq!(status.code(), Some(7), "{words}: {stderr}");
        (watch.join().unwrap(), after)
    });
    println!("{words}: launcher's peak {peak_kib} KiB, ended {after_command:?} after the command");
    let outcome = Outcome { folder, peak_kib, after_command };
    let honest = outcome.process(|argv0| argv0 == PRODUCER);
    assert_eq!(honest.len(), 2, "{words}: {:#}", manifest(&run));
    for process in honest {
        // When all windows together are full, a process that holds a large share may get its events out of order, but
        // loses none.
        let may_be_late = words.starts_with("windows");
        let late = if may_be_late { 0 } else { process["late"].as_u64().unwrap() };
        let facts = ["lost", "unwritten", "corrupt", "definitions_refused"].map(|f| process[f].as_u64().unwrap());
        assert_eq!((facts, late), ([0; 4], 0), "{words}: {process:#}");
        assert!(process["counters"].get("events_dropped").is_none(), "{words}: {process:#}");
        let reader = Reader::open(run.join(process["trace"].as_str().unwrap())).unwrap();
        let mut seqs: Vec<u64> = events(&reader).iter().map(|e| e.seq).collect();
        if may_be_late {
            seqs.sort_unstable();
        }
        assert!(
            seqs.len() >= HONEST && seqs.iter().zip(1..).all(|(seq, n)| *seq == n),
            "{words}: {} events",
            seqs.len()
        );
    }
    assert!(outcome.after_command < END, "{words}: the launcher took {after_command:?} to end");
    assert!(outcome.peak_kib > 1000 && outcome.peak_kib < MOST_MEMORY_KIB, "{words}: {peak_kib} KiB");
    outcome
}

#[test]
fn bad_connections_are_refused() {
    for words in ["silent=2000 half=2000 sleep=300", "garbage=300 gifts=300 images=300"] {
        let outcome = beside_an_honest_one(words);
        assert!(outcome.peak_kib < LITTLE_MEMORY_KIB, "{words}: {} KiB", outcome.peak_kib);
        let refused = &manifest(&outcome.run())["refused"];
        let reason = if words.contains("silent") { "incomplete request" } else { "library of another memtrace build" };
        assert!(refused[reason].as_u64().unwrap() >= 300, "{words}: {refused:#}");
    }
    let outcome = beside_an_honest_one("flood=1000");
    assert!(manifest(&outcome.run())["refused"]["incomplete request"].as_u64().unwrap() > 100);
}

#[test]
fn unexpected_descriptors_are_closed() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = recording(&run);
    command.args([INTRUDER, "images=1", "say=before", "wait", "gifts=200", "images=1", "say=after", "wait"]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let descriptors = |pid: i32| std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    assert_eq!(running.line(), "before");
    let before = descriptors(running.pid());
    let mut stdin = running.child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"\n").unwrap();
    assert_eq!(running.line(), "after");
    // Each program image has its own descriptors for a moment, and samples of main memory have a file, which is opened
    // while the program starts.
    wait_for(|| descriptors(running.pid()) <= before + 3);
    drop(stdin);
    assert!(running.child.wait().unwrap().success());
}

/// A process sends messages over the connection of a dead process, whose id may belong to another process by now.
#[test]
fn the_connection_of_a_dead_process_gets_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let output = output(recording(&run).args([INTRUDER, "ghost", "ask"]));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ghost refused\nserved\n");
    assert_eq!(manifest(&run)["refused"]["process ended before the reply"], 1);
}

#[test]
fn corrupt_shared_memory_is_harmless() {
    for words in ["jumps", "ids", "texts", "rings", "counters", "threads=20000"] {
        let outcome = beside_an_honest_one(words);
        assert!(outcome.peak_kib < LITTLE_MEMORY_KIB, "{words}: {} KiB", outcome.peak_kib);
        // The resulting run can be read.
        let report = output(Command::new(memtrace()).arg("report").arg(outcome.run()));
        assert!(report.status.success(), "{words}: {}", stderr(&report));
        assert!(outcome.run().join("summary.json").exists(), "{words}");
        // The launcher cannot read the arguments of a process that has ended by then.
        let hostile = outcome.process(|argv0| argv0 != PRODUCER);
        let strange = |f: &str| hostile.iter().map(|p| p[f].as_u64().unwrap()).sum::<u64>();
        match words {
            "ids" => assert!(strange("definitions_refused") > 100, "{hostile:#?}"),
            "texts" | "rings" => assert!(strange("corrupt") > 0, "{hostile:#?}"),
            _ => {}
        }
    }
}

#[test]
fn definitions_over_their_budget_are_dropped() {
    const SENT: u64 = 30_000;
    let outcome = beside_an_honest_one(&format!("definitions={SENT}"));
    let [hostile] = &outcome.process(|argv0| argv0 == INTRUDER)[..] else { panic!() };
    let reader = Reader::open(outcome.run().join(hostile["trace"].as_str().unwrap())).unwrap();
    // The texts compress to a fraction, so a reader leaves out and counts those that the small file may not take.
    let kept = reader.definitions().frames.len() as u64 - 1 + reader.damage().over_budget;
    let refused = hostile["definitions_refused"].as_u64().unwrap();
    // The launcher keeps 256 MiB of definitions and counts each further one.
    assert_eq!(kept + refused, SENT);
    assert!((250 << 20..=256 << 20).contains(&(kept * 12_010)), "{kept} kept");
}

/// Each of these windows would take 20 MiB.
#[test]
fn the_memory_of_the_launcher_is_bounded_over_many_processes() {
    let outcome = beside_an_honest_one("windows=60");
    let hostile = outcome.process(|argv0| argv0 == INTRUDER);
    assert_eq!(hostile.len(), 60);
    assert!(outcome.peak_kib < 340 * 1024, "{} KiB", outcome.peak_kib);
}

#[test]
fn no_client_keeps_the_launcher_from_ending() {
    // A daemon continues writing after every other process has ended, and ignores messages.
    let outcome = beside_an_honest_one("daemon forever");
    let [daemon] = &outcome.process(|argv0| argv0 == INTRUDER)[..] else { panic!() };
    assert_eq!(daemon["end_reason"], "still running");
    let pid = daemon["pid"].as_i64().unwrap() as i32;
    assert!(runs_program(INTRUDER, pid), "it is still there, unharmed");
    kill(pid, libc::SIGKILL);
}

fn runs_program(program: &str, pid: i32) -> bool {
    std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new(program))
}
