//! Many threads and many processes at full speed.
//!
//! No event is lost and no resource grows without bound. Where events must be lost (no descriptors, a launcher stopped
//! for too long), each one is counted. The oracles are the programs' own counts and the simulated CUDA's ledger.
//! `scripts/bench load` measures the same programs at full size.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use memtrace_tests::ledger::{self, pid};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::Reader;
use memtrace_trace::shm::layout::{RING_COUNT, RING_SLOTS};

/// The number of events of one allocation and its free through the driver.
const PAIR: u64 = 2;

/// The work of one thread: allocations that it also freed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Pairs {
    pairs: u64,
    addresses: u64,
    sizes: u64,
}

/// The work by process id and thread id. The kernel reuses thread ids, so one entry may cover several threads.
type Work = BTreeMap<(u32, u32), Pairs>;

/// The work that the program printed, and the longest duration of one pair in any thread, in microseconds. The duration
/// is 0 where the program does not print it.
#[track_caller]
fn printed_work(stdout: &str) -> (Work, u64) {
    let (mut work, mut longest) = (Work::new(), 0);
    for line in stdout.lines() {
        let words: Vec<u64> = line.split(' ').map(|word| word.parse().expect(line)).collect();
        let pairs = work.entry((words[0] as u32, words[1] as u32)).or_default();
        pairs.pairs += words[2];
        pairs.addresses = pairs.addresses.wrapping_add(words[3]);
        pairs.sizes += words[4];
        longest = longest.max(words.get(5).copied().unwrap_or(0));
    }
    (work, longest)
}

/// Adds the work that a trace contains. An allocation counts when its free follows in the same thread.
#[track_caller]
fn recorded(trace: &Reader, events: &[Event], work: &mut Work) {
    let pid = pid(trace);
    let mut open = BTreeMap::new();
    for event in events {
        let tid = trace.definitions().thread(event.thread).expect("a known thread").tid;
        match event.action {
            Action::Alloc => assert_eq!(open.insert(tid, event), None, "a pair in a pair"),
            Action::FreeCompleted => {
                let alloc = open.remove(&tid).expect("an allocation before its free");
                assert_eq!(alloc.addr, event.addr);
                let pairs = work.entry((pid, tid)).or_default();
                pairs.pairs += 1;
                pairs.addresses = pairs.addresses.wrapping_add(alloc.addr);
                pairs.sizes += alloc.size;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(open.is_empty(), "an allocation without its free");
}

/// A program of `tests/programs/load` over a driver that does nothing, so that calls are as fast as possible.
struct Fixture {
    programs: ProgramFolder,
    program: PathBuf,
}

impl Fixture {
    fn new() -> Fixture {
        let programs = ProgramFolder::new();
        programs.library("../../benches/nulldriver.c", "libcuda.so.1", &["-fvisibility=default"]);
        let folder = format!("-L{}", programs.path("").display());
        let program = programs.program("load/load.c", "load", &["-DDRIVER", folder.as_str(), "-l:libcuda.so.1"]);
        Fixture { programs, program }
    }

    fn traced(&self, arguments: &[&str]) -> TracedProgram {
        let mut command = vec![self.program.as_os_str()];
        command.extend(arguments.iter().map(std::ffi::OsStr::new));
        TracedProgram::command(&command).env("LD_LIBRARY_PATH", self.programs.path("")).option("--no-snapshot")
    }
}

/// The launcher's highest resource use while it ran.
#[derive(Default, Debug)]
struct Peak {
    descriptors: usize,
    /// Resident memory in KiB: `own` is the launcher's private memory, `all` includes the rings, which the traced
    /// processes own.
    own: u64,
    all: u64,
}

fn sample_process(pid: u32, peak: &mut Peak) {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return };
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    peak.own = peak.own.max(number("RssAnon:"));
    peak.all = peak.all.max(number("VmHWM:"));
    let count = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    peak.descriptors = peak.descriptors.max(count);
}

/// A run that the test can watch and stop while it proceeds.
struct Running {
    child: Child,
    dir: tempfile::TempDir,
}

impl Running {
    /// Starts the run. `descriptors` is the soft and hard limit of open files; `None` keeps this process's limits.
    fn start(traced: &TracedProgram, descriptors: Option<(u64, u64)>) -> Running {
        let dir = tempfile::Builder::new().prefix("memtrace-test-").tempdir().expect("a temporary folder");
        let mut command: Command = traced.prepare(Some(&dir.path().join("run")));
        if let Some((soft, hard)) = descriptors {
            // SAFETY: between fork and exec the closure only calls `setrlimit` and reads `errno`. Both are
            // async-signal-safe, and neither allocates memory.
            unsafe {
                command.pre_exec(move || {
                    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
                    if libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0 {
                        Ok(())
                    } else {
                        Err(std::io::Error::last_os_error())
                    }
                });
            }
        }
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the launcher starts");
        Running { child, dir }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: `kill` takes two integers. The child is not collected yet, so its id cannot belong to another
        // process.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Reads `count` lines of the program's stdout. The launcher may be stopped and has the same pipe open, so the pipe
    /// has no end to wait for.
    fn lines(&mut self, count: usize) -> String {
        let stdout = self.child.stdout.as_mut().expect("a pipe");
        let mut text = Vec::new();
        while text.iter().filter(|byte| **byte == b'\n').count() < count {
            let mut byte = [0];
            stdout.read_exact(&mut byte).expect("more lines");
            text.extend(byte);
        }
        String::from_utf8(text).expect("text")
    }

    /// Waits for the end and samples the launcher's resource use meanwhile.
    fn watch(mut self) -> (Run, Peak) {
        let mut peak = Peak::default();
        let stdout = self.child.stdout.take();
        let stderr = self.child.stderr.take();
        let read = |pipe: Option<Box<dyn Read + Send>>| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
                bytes
            })
        };
        let stdout = read(stdout.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
        let stderr = read(stderr.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
        let status = loop {
            sample_process(self.child.id(), &mut peak);
            if let Some(status) = self.child.try_wait().expect("our child") {
                break status;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let output = std::process::Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() };
        (Run { dir: self.dir, output }, peak)
    }
}

/// Requires that every process that worked has a trace with exactly its work: no event lost, none late.
#[track_caller]
fn assert_all_recorded(run: &Run) -> (Work, Vec<Reader>) {
    run.assert_ended_well();
    let (printed_work, _) = printed_work(&String::from_utf8_lossy(&run.output.stdout));
    let traces = run.traces();
    let mut ours = Work::new();
    for trace in &traces {
        recorded(trace, &events(trace), &mut ours);
    }
    assert!(!printed_work.is_empty());
    assert!(
        ours == printed_work,
        "{} threads recorded, {} worked; first difference: {:?}",
        ours.len(),
        printed_work.len(),
        {
            printed_work
                .iter()
                .find(|(who, pairs)| ours.get(who) != Some(pairs))
                .map(|(who, pairs)| (who, pairs, ours.get(who)))
        }
    );
    let manifest = run.manifest();
    for loss in ["lost", "late", "unwritten", "dropped"] {
        assert_eq!(manifest["losses"][loss], 0, "{loss}: {:#}", manifest["losses"]);
    }
    assert!(manifest.get("refused").is_none_or(|r| r.as_object().is_none_or(serde_json::Map::is_empty)));
    (printed_work, traces)
}

/// Requires that every event of every process is in a trace or counted, and that every process without a trace was
/// counted as refused. On an overloaded machine a process may give up before the launcher answers. Returns the number
/// of traces.
#[track_caller]
fn assert_all_accounted_for(run: &Run, processes: usize) -> usize {
    run.assert_ended_well();
    let (printed_work, _) = printed_work(&String::from_utf8_lossy(&run.output.stdout));
    assert_eq!(printed_work.len(), processes);
    let manifest = run.manifest();
    let traces = run.traces();
    for trace in &traces {
        let process = manifest["processes"].as_array().unwrap().iter().find(|p| p["pid"] == pid(trace)).unwrap();
        let unwritten = process["unwritten"].as_u64().unwrap();
        // A process that connected late counts the events that it dropped before.
        let there = trace.event_count() + trace.counter(Counter::EventsDropped) + unwritten;
        assert_eq!(there, PAIR * printed_work[&(pid(trace), pid(trace))].pairs, "{process:#}");
        assert_eq!((&process["lost"], &process["late"]), (&0.into(), &0.into()));
    }
    let refused: u64 = manifest["refused"].as_object().into_iter().flatten().filter_map(|(_, n)| n.as_u64()).sum();
    assert!(traces.len() as u64 + refused >= processes as u64, "{} traces, {refused} refused", traces.len());
    traces.len()
}

#[test]
fn sixty_four_threads_at_full_speed_lose_no_event() {
    const PAIRS: &str = "20000";
    let (run, peak) = Running::start(&Fixture::new().traced(&["threads", "64", PAIRS]), None).watch();
    let (work, _) = assert_all_recorded(&run);
    assert_eq!(work.len(), 64);
    // The window, the queue and a block have a fixed size, whatever the number of events. The rings add 512 KiB a
    // thread.
    let rings = 64 * RING_SLOTS as u64 * 64 / 1024;
    assert!(peak.own < 64 * 1024 && peak.all < 80 * 1024 + rings, "{peak:?} KiB");
    let bytes = run.manifest()["processes"][0]["bytes"].as_u64().unwrap();
    let events = 64 * 20_000 * PAIR;
    assert!(bytes < 8 * events, "{} bytes an event", bytes as f64 / events as f64);
}

#[test]
fn more_threads_than_rings_lose_no_event() {
    const THREADS: usize = RING_COUNT + 200;
    let run = Fixture::new().traced(&["alive", &THREADS.to_string(), "20"]).run();
    let (work, traces) = assert_all_recorded(&run);
    assert!(work.values().all(|pairs| pairs.pairs == 21) && work.len() == THREADS);
    // All threads were alive before the first one continued, so the threads beyond the number of rings shared one ring.
    let beyond = (THREADS - (RING_COUNT - 1)) as u64;
    assert!(traces[0].counter(Counter::SharedRingEvents) >= beyond * PAIR);
}

/// The same as with a thousand processes (`exhaustive`), in a few seconds.
#[test]
fn a_hundred_concurrent_processes_are_recorded() {
    let (run, peak) = Running::start(&Fixture::new().traced(&["children", "100", "20"]), None).watch();
    let traces = assert_all_accounted_for(&run, 100);
    assert!(traces > 80, "{traces}");
    assert!((100..300).contains(&peak.descriptors) && peak.own < 64 * 1024, "{peak:?} KiB");
}

fn hard_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live, writable `rlimit` for the duration of the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    limit.rlim_max
}

#[track_caller]
fn assert_refused_processes_are_reported(run: &Run) {
    // Refused processes retry from time to time, and some are accepted once others have ended.
    assert_all_accounted_for(run, 300);
    let refused = &run.manifest()["refused"];
    assert!(
        refused["no file descriptors left"].as_u64() > Some(0) && refused["cannot create shared memory"].is_null(),
        "{refused}"
    );
    let stderr = String::from_utf8_lossy(&run.output.stderr);
    assert!(stderr.contains("no file descriptors left"), "{stderr}");
}

/// Starts two threads that run for at least two seconds. Stops the launcher once an event of the run has reached a
/// file.
fn stopped_in_the_middle(fixture: &Fixture) -> Running {
    let mut running = Running::start(&fixture.traced(&["paced", "2", "100000", "20"]), None);
    let run = running.dir.path().join("run");
    let has_events = |path: PathBuf| Reader::open(&path).is_ok_and(|trace| trace.event_count() > 0);
    let files = || std::fs::read_dir(&run).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    while !files().any(|path| path.extension().is_some_and(|e| e == "mtr") && has_events(path)) {
        assert!(running.child.try_wait().expect("our child").is_none(), "ended before it was stopped");
        std::thread::sleep(Duration::from_millis(5));
    }
    running.signal(libc::SIGSTOP);
    running
}

#[test]
fn a_launcher_stopped_for_a_second_loses_no_event() {
    let fixture = Fixture::new();
    let running = stopped_in_the_middle(&fixture);
    std::thread::sleep(Duration::from_secs(1));
    running.signal(libc::SIGCONT);
    let (run, _) = running.watch();
    let (work, traces) = assert_all_recorded(&run);
    assert!(work.values().all(|pairs| pairs.pairs == 100_000));
    assert!(traces[0].counter(Counter::RingWaits) > 0, "the rings were full for a while");
    assert!(traces[0].counter(Counter::RingWaitMicroseconds) > 100_000);
}

#[test]
fn a_stopped_launcher_delays_two_seconds_and_lost_events_are_counted() {
    let fixture = Fixture::new();
    let mut running = stopped_in_the_middle(&fixture);
    let (printed_work, longest_us) = printed_work(&running.lines(2));
    running.signal(libc::SIGCONT);
    let (run, _) = running.watch();
    run.assert_ended_well();
    // The pauses sum to two seconds. On a busy machine they take longer.
    assert!((1_900_000..20_000_000).contains(&longest_us), "{longest_us} us");
    let trace = run.trace();
    let end = trace.end().unwrap();
    assert_eq!((end.lost, end.late), (0, 0), "what has no number leaves no gap");
    let dropped = trace.counter(Counter::EventsDropped);
    let pairs: u64 = printed_work.values().map(|pairs| pairs.pairs).sum();
    assert!(dropped > 0);
    assert_eq!(trace.event_count() + dropped, PAIR * pairs);
    assert_eq!(run.manifest()["losses"]["dropped"], dropped);
}

mod exhaustive {
    use super::*;

    #[test]
    fn ten_thousand_short_lived_threads_lose_no_event() {
        let programs = ProgramFolder::new();
        let program = programs.program("load/load.c", "load", &linked_with("libcudart.so.12"));
        let path = programs.path("ledger");
        let command = [program.as_os_str(), "churn".as_ref(), "10000".as_ref(), "32".as_ref()];
        let run = with_simcuda(&command).env("SIMCUDA_LEDGER", &path).option("--no-snapshot").run();
        run.assert_ended_well();
        let (printed_work, _) = printed_work(&String::from_utf8_lossy(&run.output.stdout));
        let calls = ledger::ours(&run.trace());
        ledger::assert_equal(&calls, &ledger::read(&path));
        // The allocation and the free are each one call of the runtime and one of the driver: four calls a pair.
        let pairs: u64 = printed_work.values().map(|pairs| pairs.pairs).sum();
        assert_eq!(calls.values().map(|calls| calls.len() as u64).sum::<u64>(), 4 * pairs);
        assert_eq!(pairs, (0..10_000).map(|i| 1 + i % 7).sum::<u64>());
    }

    /// Each process starts as a copy of its parent, so this needs little memory besides the rings: 0.5 MiB a process.
    #[test]
    fn a_thousand_concurrent_processes_are_recorded() {
        // Systems allow 1024 descriptors by default, some fewer. The launcher raises its soft limit to the hard limit.
        let hard = hard_limit().min(8192);
        assert!(hard >= 2200, "this test needs descriptors: ulimit -Hn");
        let (run, peak) =
            Running::start(&Fixture::new().traced(&["children", "1000", "20"]), Some((256, hard))).watch();
        let traces = assert_all_accounted_for(&run, 1000);
        assert!(traces > 800, "{traces}");
        // Two descriptors a process stay open: one that reports its end and one for its trace file.
        assert!((1000..2200).contains(&peak.descriptors), "{peak:?}");
        assert!(peak.own < 256 * 1024, "{peak:?} KiB");
    }

    /// A third of the processes finds no descriptor left in the launcher at first, as with the usual hard limit of
    /// 1024.
    #[test]
    fn more_processes_than_the_usual_limit_of_descriptors_are_accounted_for() {
        let (run, peak) =
            Running::start(&Fixture::new().traced(&["children", "1500", "20"]), Some((1024, 1024))).watch();
        let traces = assert_all_accounted_for(&run, 1500);
        // A refused process asks again from time to time, and finds place once others have ended.
        assert!(traces >= 400, "{traces}");
        assert!(peak.descriptors <= 1024, "{peak:?}");
        let refused = &run.manifest()["refused"]["no file descriptors left"];
        assert!(refused.as_u64() > Some(0), "{:#}", run.manifest()["refused"]);
    }

    #[test]
    fn a_chain_of_five_hundred_processes_is_recorded() {
        let run = Fixture::new().traced(&["storm", "500"]).run();
        assert!(assert_all_accounted_for(&run, 500) > 400);
    }

    #[test]
    fn without_descriptors_processes_continue_and_unrecorded_ones_are_reported() {
        let fixture = Fixture::new();
        let traced = fixture.traced(&["children", "300", "40"]);
        // The limits make different steps fail: the connection, the lookup of the process's name, the segment.
        for limit in 64..67 {
            assert_refused_processes_are_reported(&Running::start(&traced, Some((limit, limit))).watch().0);
        }
    }
}
