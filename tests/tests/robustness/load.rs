//! Many threads, many processes, as fast as they can: nothing is lost, nothing grows without bound, and where something must be
//! lost (no descriptors, a launcher that is stopped for too long) each event is counted. The oracle is what the programs count themselves,
//! and the simulated CUDA's ledger. `scripts/bench load` measures the same programs at full size.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use memtrace_tests::ledger::{self, pid};
use memtrace_tests::programs::{Workshop, linked_with, victim};
use memtrace_tests::victim::{Run, Victim, events};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::Reader;
use memtrace_trace::shm::layout::{RING_COUNT, RING_SLOTS};

/// Events of one allocation and its free, by way of the driver.
const PAIR: u64 = 2;

/// What one thread allocated and freed again.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Told {
    pairs: u64,
    addresses: u64,
    sizes: u64,
}

/// By process and thread. The kernel gives an id again: then several threads are one.
type Work = BTreeMap<(u32, u32), Told>;

/// What the program said it did, and the longest time one pair took in any thread, in microseconds, where it says so.
#[track_caller]
fn said(stdout: &str) -> (Work, u64) {
    let (mut work, mut longest) = (Work::new(), 0);
    for line in stdout.lines() {
        let words: Vec<u64> = line.split(' ').map(|word| word.parse().expect(line)).collect();
        let told = work.entry((words[0] as u32, words[1] as u32)).or_default();
        told.pairs += words[2];
        told.addresses = told.addresses.wrapping_add(words[3]);
        told.sizes += words[4];
        longest = longest.max(words.get(5).copied().unwrap_or(0));
    }
    (work, longest)
}

/// What a trace says about the same: an allocation counts when its free follows in the same thread.
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
                let told = work.entry((pid, tid)).or_default();
                told.pairs += 1;
                told.addresses = told.addresses.wrapping_add(alloc.addr);
                told.sizes += alloc.size;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(open.is_empty(), "an allocation without its free");
}

/// A program of `tests/programs/load` over a driver that does nothing, and is as fast as that.
struct Stage {
    workshop: Workshop,
    program: PathBuf,
}

impl Stage {
    fn new() -> Stage {
        let workshop = Workshop::new();
        workshop.library("../../benches/nulldriver.c", "libcuda.so.1", &["-fvisibility=default"]);
        let folder = format!("-L{}", workshop.path("").display());
        let program = workshop.program("load/load.c", "load", &["-DDRIVER", folder.as_str(), "-l:libcuda.so.1"]);
        Stage { workshop, program }
    }

    fn victim(&self, arguments: &[&str]) -> Victim {
        let mut command = vec![self.program.as_os_str()];
        command.extend(arguments.iter().map(std::ffi::OsStr::new));
        Victim::command(&command).env("LD_LIBRARY_PATH", self.workshop.path("")).option("--no-snapshot")
    }
}

/// What was seen of the launcher while it ran.
#[derive(Default, Debug)]
struct Peak {
    descriptors: usize,
    /// Resident memory in KiB: its own; with the rings, which are the traced processes', too.
    own: u64,
    all: u64,
}

fn look_at(pid: u32, peak: &mut Peak) {
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

/// A run that can be watched and stopped while it goes on.
struct Running {
    child: Child,
    dir: tempfile::TempDir,
}

impl Running {
    /// Soft and hard limit of descriptors, where they are to be others than ours.
    fn start(victim: &Victim, descriptors: Option<(u64, u64)>) -> Running {
        let dir = tempfile::Builder::new().prefix("memtrace-test-").tempdir().expect("a temporary folder");
        let mut command: Command = victim.prepare(Some(&dir.path().join("run")));
        if let Some((soft, hard)) = descriptors {
            // SAFETY: one system call on a limit of its own.
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
        // SAFETY: our own child, not collected yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// What the program says in so many lines. The launcher, which may be stopped, has the same output open: there is no end of it.
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

    /// To the end, looking at the launcher all the time.
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
            look_at(self.child.id(), &mut peak);
            if let Some(status) = self.child.try_wait().expect("our child") {
                break status;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let output = std::process::Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() };
        (Run { dir: self.dir, output }, peak)
    }
}

/// Every process that worked has a trace with exactly its work: nothing lost, nothing late.
#[track_caller]
fn assert_all_recorded(run: &Run) -> (Work, Vec<Reader>) {
    run.assert_ended_well();
    let (said, _) = said(&String::from_utf8_lossy(&run.output.stdout));
    let traces = run.traces();
    let mut ours = Work::new();
    for trace in &traces {
        recorded(trace, &events(trace), &mut ours);
    }
    assert!(!said.is_empty());
    assert!(ours == said, "{} threads recorded, {} worked; first difference: {:?}", ours.len(), said.len(), {
        said.iter().find(|(who, told)| ours.get(who) != Some(told)).map(|(who, told)| (who, told, ours.get(who)))
    });
    let manifest = run.manifest();
    for loss in ["lost", "late", "unwritten", "dropped"] {
        assert_eq!(manifest["losses"][loss], 0, "{loss}: {:#}", manifest["losses"]);
    }
    assert!(manifest.get("refused").is_none_or(|r| r.as_object().is_none_or(serde_json::Map::is_empty)));
    (said, traces)
}

/// Every event of every process is in a trace or counted, and whoever has no trace was turned away, which was counted too: a machine with
/// far too much to do may keep a process waiting for longer than it waits. Gives the number of traces.
#[track_caller]
fn assert_all_accounted_for(run: &Run, processes: usize) -> usize {
    run.assert_ended_well();
    let (said, _) = said(&String::from_utf8_lossy(&run.output.stdout));
    assert_eq!(said.len(), processes);
    let manifest = run.manifest();
    let traces = run.traces();
    for trace in &traces {
        let process = manifest["processes"].as_array().unwrap().iter().find(|p| p["pid"] == pid(trace)).unwrap();
        let unwritten = process["unwritten"].as_u64().unwrap();
        // Whoever was let in late tells how much passed before.
        let there = trace.event_count() + trace.counter(Counter::EventsDropped) + unwritten;
        assert_eq!(there, PAIR * said[&(pid(trace), pid(trace))].pairs, "{process:#}");
        assert_eq!((&process["lost"], &process["late"]), (&0.into(), &0.into()));
    }
    let refused: u64 = manifest["refused"].as_object().into_iter().flatten().filter_map(|(_, n)| n.as_u64()).sum();
    assert!(traces.len() as u64 + refused >= processes as u64, "{} traces, {refused} refused", traces.len());
    traces.len()
}

#[test]
fn sixty_four_threads_at_full_speed() {
    const PAIRS: &str = "20000";
    let (run, peak) = Running::start(&Stage::new().victim(&["threads", "64", PAIRS]), None).watch();
    let (work, _) = assert_all_recorded(&run);
    assert_eq!(work.len(), 64);
    // Window, queue, a block: whatever the number of events. The rings are 512 KiB a thread on top.
    let rings = 64 * RING_SLOTS as u64 * 64 / 1024;
    assert!(peak.own < 64 * 1024 && peak.all < 80 * 1024 + rings, "{peak:?} KiB");
    let bytes = run.manifest()["processes"][0]["bytes"].as_u64().unwrap();
    let events = 64 * 20_000 * PAIR;
    assert!(bytes < 8 * events, "{} bytes an event", bytes as f64 / events as f64);
}

#[test]
fn more_threads_at_once_than_rings() {
    const THREADS: usize = RING_COUNT + 200;
    let run = Stage::new().victim(&["alive", &THREADS.to_string(), "20"]).run();
    let (work, traces) = assert_all_recorded(&run);
    assert!(work.values().all(|told| told.pairs == 21) && work.len() == THREADS);
    // All were alive before the first went on: those beyond the rings shared one.
    let beyond = (THREADS - (RING_COUNT - 1)) as u64;
    assert!(traces[0].counter(Counter::SharedRingEvents) >= beyond * PAIR);
}

fn hard_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the answer.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    limit.rlim_max
}

#[track_caller]
fn turned_away(run: &Run) {
    // Who was turned away asks again now and then: some are let in when others have gone.
    assert_all_accounted_for(run, 300);
    let refused = &run.manifest()["refused"];
    assert!(refused["no descriptors left"].as_u64() > Some(0) && refused["no shared memory"].is_null(), "{refused}");
    let stderr = String::from_utf8_lossy(&run.output.stderr);
    assert!(stderr.contains("no descriptors left"), "{stderr}");
}

/// Two threads that go on for two seconds at least, and whose launcher is stopped once something of the run has reached a file.
fn stopped_in_the_middle(stage: &Stage) -> Running {
    let mut running = Running::start(&stage.victim(&["paced", "2", "100000", "20"]), None);
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
fn a_launcher_that_is_late_by_a_second_costs_no_event() {
    let stage = Stage::new();
    let running = stopped_in_the_middle(&stage);
    std::thread::sleep(Duration::from_secs(1));
    running.signal(libc::SIGCONT);
    let (run, _) = running.watch();
    let (work, traces) = assert_all_recorded(&run);
    assert!(work.values().all(|told| told.pairs == 100_000));
    assert!(traces[0].counter(Counter::RingWaits) > 0, "the rings were full for a while");
    assert!(traces[0].counter(Counter::RingWaitMicroseconds) > 100_000);
}

#[test]
fn a_launcher_that_stays_away_costs_two_seconds_and_every_event_is_counted() {
    let stage = Stage::new();
    let mut running = stopped_in_the_middle(&stage);
    let (said, longest_us) = said(&running.lines(2));
    running.signal(libc::SIGCONT);
    let (run, _) = running.watch();
    run.assert_ended_well();
    // Two seconds of naps: on a machine with much else to do they take longer.
    assert!((1_900_000..20_000_000).contains(&longest_us), "{longest_us} us");
    let trace = run.trace();
    let end = trace.end().unwrap();
    assert_eq!((end.lost, end.late), (0, 0), "what has no number leaves no gap");
    let dropped = trace.counter(Counter::EventsDropped);
    let pairs: u64 = said.values().map(|told| told.pairs).sum();
    assert!(dropped > 0);
    assert_eq!(trace.event_count() + dropped, PAIR * pairs);
    assert_eq!(run.manifest()["losses"]["dropped"], dropped);
}

mod exhaustive {
    use super::*;

    #[test]
    fn ten_thousand_short_lived_threads() {
        let workshop = Workshop::new();
        let program = workshop.program("load/load.c", "load", &linked_with("libcudart.so.12"));
        let path = workshop.path("ledger");
        let command = [program.as_os_str(), "churn".as_ref(), "10000".as_ref(), "32".as_ref()];
        let run = victim(&command).env("SIMCUDA_LEDGER", &path).option("--no-snapshot").run();
        run.assert_ended_well();
        let (said, _) = said(&String::from_utf8_lossy(&run.output.stdout));
        let calls = ledger::ours(&run.trace());
        ledger::assert_equal(&calls, &ledger::read(&path));
        // A call of the runtime and one of the driver, for the allocation and for the free.
        let pairs: u64 = said.values().map(|told| told.pairs).sum();
        assert_eq!(calls.values().map(|calls| calls.len() as u64).sum::<u64>(), 4 * pairs);
        assert_eq!(pairs, (0..10_000).map(|i| 1 + i % 7).sum::<u64>());
    }

    #[test]
    fn five_hundred_processes_at_once() {
        // By default systems allow 1024 descriptors, some fewer: the launcher takes what it may have.
        let hard = hard_limit().min(4096);
        assert!(hard >= 1200, "this test needs descriptors: ulimit -Hn");
        let (run, peak) = Running::start(&Stage::new().victim(&["children", "500", "20"]), Some((256, hard))).watch();
        let traces = assert_all_accounted_for(&run, 500);
        assert!(traces > 400, "{traces}");
        // A process's death and its file; nothing else stays open.
        assert!((500..1100).contains(&peak.descriptors), "{peak:?}");
        assert!(peak.own < 128 * 1024, "{peak:?} KiB");
    }

    #[test]
    fn five_hundred_processes_one_out_of_the_other() {
        let run = Stage::new().victim(&["storm", "500"]).run();
        assert!(assert_all_accounted_for(&run, 500) > 400);
    }

    #[test]
    fn without_descriptors_processes_go_on_and_the_launcher_says_who_is_missing() {
        let stage = Stage::new();
        let victim = stage.victim(&["children", "300", "40"]);
        // Whatever it is that finds none left: a connection, the name of its process, a segment.
        for limit in 64..67 {
            turned_away(&Running::start(&victim, Some((limit, limit))).watch().0);
        }
    }
}
