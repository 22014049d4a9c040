//! The crash matrix: every fault at every place of the recording path.
//!
//! A test stops a program with ptrace at exactly that place, injects the fault, and lets everything continue. [`CELLS`]
//! is the table. Each cell requires:
//!
//! - The program ends with the status and output that it has without memtrace under the same fault at the same place.
//! - The recorded events plus the events counted as lost equal the simulated CUDA's ledger. The ledger is independent
//!   of memtrace.
//! - The launcher reports what is missing, and nothing else. No process is left, and no file except those of the run.
//!
//! The last test of this file kills the program at many single instructions of one recorded call.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::Path;
use std::time::Duration;

use crate::crash_support::*;
use crate::memory_cgroup::Cgroup;
use memtrace_tests::ledger::{
    Calls, assert_beginning, assert_equal, assert_whole_when_killed, calls_of, pid as pid_of,
};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::tracee::{Change, Follow, Tracee};
use memtrace_trace::file::Reader;
use memtrace_trace::shm::layout::{RING_COUNT, RINGS, RingHeader, SegmentHeader};

/// The fault that is injected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// SIGKILL for the process that is stopped at the place.
    Kill,
    /// The process continues at an address that is not mapped.
    Segv,
    /// The kernel's OOM killer, in a cgroup whose memory is used up.
    OutOfMemory,
    /// SIGKILL for the launcher.
    KillLauncher,
    /// The run's file system is full.
    DiskFull,
    /// SIGSTOP for the process, for longer than the launcher waits for a missing event.
    Stop,
    /// SIGSTOP for the launcher, for the same time.
    StopLauncher,
    /// The wall clock is set back by an hour.
    ClockStep,
}

/// The place where the process is stopped.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Place {
    /// In the preloaded library's own code, before it calls the original function.
    Hook,
    /// An event has its sequence number and is not published yet.
    RingWrite,
    /// The launcher's drain thread is in the middle of emptying a ring.
    Drain,
    /// A thread that recorded is ending: all of its own code has run.
    ThreadExit,
    /// A child has recorded events and has not called `exec` yet.
    ForkExec,
}

/// The events that the traces must contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Recorded {
    /// Every call of every process.
    Everything,
    /// Every call of the processes that survive. The killed process may lack the last call, and `lost` sequence numbers
    /// are counted as lost.
    Committed { lost: u64 },
    /// Exactly the events that were published when the launcher died.
    UpToHere,
    /// The events that were drained when the launcher died: the first of the program's two batches.
    FirstBatch,
    /// A prefix of the events; the missing ones are counted.
    Beginning,
}

use Fault::*;
use Place::*;
use Recorded::*;

const CELLS: [(Fault, Place, Recorded); 40] = [
    (Kill, Hook, Committed { lost: 0 }),
    (Kill, RingWrite, Committed { lost: 1 }),
    (Kill, Drain, Committed { lost: 0 }),
    (Kill, ThreadExit, Committed { lost: 0 }),
    (Kill, ForkExec, Committed { lost: 0 }),
    (Segv, Hook, Committed { lost: 0 }),
    (Segv, RingWrite, Committed { lost: 1 }),
    (Segv, Drain, Committed { lost: 0 }),
    (Segv, ThreadExit, Committed { lost: 0 }),
    (Segv, ForkExec, Committed { lost: 0 }),
    (OutOfMemory, Hook, Committed { lost: 0 }),
    (OutOfMemory, RingWrite, Committed { lost: 1 }),
    (OutOfMemory, Drain, Committed { lost: 0 }),
    (OutOfMemory, ThreadExit, Committed { lost: 0 }),
    (OutOfMemory, ForkExec, Committed { lost: 0 }),
    (KillLauncher, Hook, UpToHere),
    (KillLauncher, RingWrite, UpToHere),
    (KillLauncher, Drain, FirstBatch),
    (KillLauncher, ThreadExit, UpToHere),
    (KillLauncher, ForkExec, UpToHere),
    (DiskFull, Hook, Beginning),
    (DiskFull, RingWrite, Beginning),
    (DiskFull, Drain, Beginning),
    (DiskFull, ThreadExit, Beginning),
    (DiskFull, ForkExec, Beginning),
    (Stop, Hook, Everything),
    (Stop, RingWrite, Everything),
    (Stop, Drain, Everything),
    (Stop, ThreadExit, Everything),
    (Stop, ForkExec, Everything),
    (StopLauncher, Hook, Everything),
    (StopLauncher, RingWrite, Everything),
    (StopLauncher, Drain, Everything),
    (StopLauncher, ThreadExit, Everything),
    (StopLauncher, ForkExec, Everything),
    (ClockStep, Hook, Everything),
    (ClockStep, RingWrite, Everything),
    (ClockStep, Drain, Everything),
    (ClockStep, ThreadExit, Everything),
    (ClockStep, ForkExec, Everything),
];

/// Longer than the one second that the launcher waits for a missing event.
const STOPPED_FOR: Duration = Duration::from_millis(1300);
/// The change of the wall clock, in seconds.
const CLOCK_STEP: i64 = -3600;
/// The number of calls that the program makes after the last place. A full disk needs more of them.
const REST: &str = "20";
const REST_FOR_DISK: &str = "4000";

/// The code addresses that the program printed on its first line.
struct Addresses {
    call: u64,
    drain: u64,
    exec: u64,
    stub: u64,
}

impl Addresses {
    fn of(scenario: &Scenario) -> Addresses {
        let [call, drain, exec, stub] = scenario.addresses[..] else { panic!("four addresses") };
        Addresses { call, drain, exec, stub }
    }
}

/// The processes and threads that ptrace holds while the fault is injected.
struct StoppedProcesses {
    /// The thread that the fault hits. It is released before `others`.
    faulted: Tracee,
    /// The other stopped threads and processes.
    others: Vec<Tracee>,
    /// The launcher's drain thread, where the test holds it.
    drain: Option<Tracee>,
    /// The number of events that all processes of the scenario have published.
    published: u64,
}

impl StoppedProcesses {
    fn release(self) {
        drop(self.drain);
        self.faulted.release();
        self.others.into_iter().for_each(Tracee::release);
    }
}

/// Reads the shared memory of a stopped process.
struct Shared<'a> {
    tracee: &'a Tracee,
    base: u64,
}

impl<'a> Shared<'a> {
    fn of(tracee: &'a Tracee) -> Shared<'a> {
        Shared { tracee, base: tracee.mapping("/memfd:memtrace").expect("it records") }
    }

    /// The sequence number that the next event gets.
    fn next_seq(&self) -> u64 {
        self.tracee.word(self.base + offset_of!(SegmentHeader, next_seq) as u64)
    }

    fn ring(&self) -> u64 {
        let rings = (1..RING_COUNT).map(|i| self.base + (RINGS + i * size_of::<RingHeader>()) as u64);
        let owner = |ring: &u64| self.tracee.word(ring + offset_of!(RingHeader, owner) as u64) as u32;
        rings.take(64).find(|r| owner(r) == self.tracee.tid() as u32).expect("a ring of this thread")
    }

    /// The ring's tail and head: the number of slots published and the number of slots drained.
    fn ends(&self, ring: u64) -> (u64, u64) {
        let word = |at: usize| self.tracee.word(ring + at as u64);
        (word(offset_of!(RingHeader, tail)), word(offset_of!(RingHeader, head)))
    }
}

/// Starts the program's calls and stops it at `place`. `drain_steps` is the number of instructions for [`hold_drain`].
#[track_caller]
fn stop_at_place(scenario: &mut Scenario, place: Place, drain_steps: u64) -> StoppedProcesses {
    let addresses = Addresses::of(scenario);
    let follow = match place {
        ThreadExit => Follow::Threads,
        ForkExec => Follow::Children,
        Hook | RingWrite | Drain => Follow::Nothing,
    };
    let main = Tracee::seize(scenario.pid, follow);
    scenario.send_line();
    let mut eater = None;
    if place == ThreadExit {
        // The program's first thread is not the one under test.
        let Change::Cloned(tid) = main.resume_and_wait() else { panic!("a thread") };
        let thread = Tracee::new_child(tid);
        thread.resume();
        eater = Some(thread);
    }
    main.run_to(addresses.call);
    if let Some(eater) = eater {
        eater.interrupt();
        eater.release();
    }
    let mut stopped = match place {
        Hook | RingWrite if scenario.is_under_memtrace() => {
            main.run_to(addresses.stub);
            let library = main.object_at(addresses.stub);
            assert!(library.contains("memtrace"), "the call goes to {library}");
            let shared = Shared::of(&main);
            let (ring, before) = (shared.ring(), shared.next_seq());
            if place == Hook {
                (0..100).for_each(|_| assert!(main.step()));
                // Skip functions of the C library that the preloaded library calls.
                while main.object_at(main.registers().rip) != library {
                    assert!(main.step());
                }
                assert_eq!(shared.next_seq(), before);
            } else {
                while shared.next_seq() == before {
                    assert!(main.step());
                }
                let tail = shared.ends(ring).0;
                (0..5).for_each(|_| assert!(main.step()));
                assert_eq!(main.object_at(main.registers().rip), library);
                // The event has its sequence number and is not published.
                assert_eq!((shared.next_seq(), shared.ends(ring).0), (before + 1, tail));
            }
            StoppedProcesses { faulted: main, others: vec![], drain: None, published: 0 }
        }
        Hook | RingWrite => StoppedProcesses { faulted: main, others: vec![], drain: None, published: 0 },
        Drain => {
            let drain = scenario.is_under_memtrace().then(|| hold_drain(scenario, &main, addresses.drain, drain_steps));
            if drain.is_none() {
                main.run_to(addresses.drain);
            }
            StoppedProcesses { faulted: main, others: vec![], drain, published: 0 }
        }
        ThreadExit => {
            let Change::Cloned(tid) = main.resume_and_wait() else { panic!("a thread") };
            let thread = Tracee::new_child(tid);
            main.resume();
            assert_eq!(thread.resume_and_wait(), Change::Ending);
            main.interrupt();
            StoppedProcesses { faulted: thread, others: vec![main], drain: None, published: 0 }
        }
        ForkExec => {
            let Change::Forked(pid) = main.resume_and_wait() else { panic!("a child") };
            let child = Tracee::new_child(pid);
            main.resume();
            child.run_to(addresses.exec);
            // Inside `fork` the parent holds malloc's locks, so no thread of it could allocate memory.
            wait_for("the parent to wait for its child", || system_call(main.tid()) == Some(libc::SYS_wait4));
            main.interrupt();
            StoppedProcesses { faulted: child, others: vec![main], drain: None, published: 0 }
        }
    };
    if scenario.is_under_memtrace() {
        let processes = std::iter::once(&stopped.faulted).chain(stopped.others.iter().filter(|_| place == ForkExec));
        let issued: u64 = processes.map(|tracee| Shared::of(tracee).next_seq() - 1).sum();
        stopped.published = issued - u64::from(place == RingWrite);
    }
    stopped
}

/// Stops the drain thread after `steps` instructions of its work on the program's second batch. With 0 it stops where
/// its wait for work returns. The program is stopped at `mark` at that time.
#[track_caller]
fn hold_drain(scenario: &Scenario, main: &Tracee, mark: u64, steps: u64) -> Tracee {
    // The drain thread writes the first batch before the program makes the second one.
    let shared = Shared::of(main);
    let (ring, first) = (shared.ring(), shared.next_seq() - 1);
    wait_for("the first batch to be written", || scenario.written() == first);
    let drain = Tracee::seize(thread_called(scenario.launcher.id() as i32, "memtrace-drain"), Follow::Nothing);
    // The drain thread is about to sleep while the program makes the second batch. Then it wakes up and reads the ring.
    let sleeps = |tracee: &Tracee| {
        let call = tracee.registers();
        let waits = [libc::SYS_epoll_wait, libc::SYS_epoll_pwait].contains(&(call.orig_rax as i64));
        waits && call.rax as i64 == -i64::from(libc::ENOSYS)
    };
    while drain.to_system_call() != Change::SystemCall || !sleeps(&drain) {}
    main.run_to(mark);
    let (tail, head) = shared.ends(ring);
    assert!(tail > head, "something is to be drained");
    assert_eq!(drain.to_system_call(), Change::SystemCall);
    for _ in 0..steps {
        assert!(drain.step());
    }
    assert_eq!(shared.ends(ring), (tail, head), "it is still at it");
    drain
}

/// The number of instructions that the drain thread runs until it has emptied the second batch.
fn drain_steps(program: &Path) -> u64 {
    let mut scenario = start(program, true, Kill);
    let mut stopped = stop_at_place(&mut scenario, Drain, 0);
    let drain = stopped.drain.take().unwrap();
    let shared = Shared::of(&stopped.faulted);
    let ring = shared.ring();
    let head = shared.ends(ring).1;
    let mut steps = 0;
    while shared.ends(ring).1 == head {
        assert!(drain.step());
        steps += 1;
    }
    drain.release();
    stopped.release();
    scenario.close_stdin();
    scenario.end();
    steps
}

fn start(program: &Path, under_memtrace: bool, fault: Fault) -> Scenario {
    let rest = if fault == DiskFull { REST_FOR_DISK } else { REST };
    let mut traced = with_simcuda(&[program.as_os_str(), rest.as_ref()]);
    if fault == ClockStep {
        traced = traced.env("LD_PRELOAD", program.parent().unwrap().join("wall_clock.so"));
    }
    Scenario::start(traced, under_memtrace, (fault == DiskFull && under_memtrace).then_some("1m"))
}

/// Injects the fault while everything is stopped, then releases it.
#[track_caller]
fn inject(scenario: &mut Scenario, stopped: StoppedProcesses, fault: Fault, place: Place) {
    let launcher = scenario.launcher.id() as i32;
    let main = scenario.pid;
    // At `ThreadExit` the fault hits the process of the ending thread; at `ForkExec` it hits the child.
    let process = if place == ForkExec { stopped.faulted.tid() } else { main };
    match fault {
        Kill => {
            kill(process, libc::SIGKILL);
            stopped.release();
        }
        Segv => {
            let thread = if place == ThreadExit { &stopped.others[0] } else { &stopped.faulted };
            thread.jump(0);
            stopped.release();
        }
        OutOfMemory => {
            let cgroup = Cgroup::or_sigkill("64M");
            cgroup.add(main);
            scenario.send_line();
            wait_for("the kernel to kill it", || cgroup.has_killed(main));
            let child = stopped.faulted.tid();
            if place == ForkExec {
                // The child ends without a parent, before the launcher sees that its command is gone.
                stopped.faulted.release();
                wait_for("the child's end", || state(child).is_none_or(|s| s == 'Z'));
                stopped.others.into_iter().for_each(Tracee::release);
            } else {
                stopped.release();
            }
        }
        KillLauncher => {
            if place != Drain {
                wait_for("what is published to be written", || scenario.written() == stopped.published);
            }
            kill(launcher, libc::SIGKILL);
            stopped.release();
        }
        DiskFull => {
            if place != Drain {
                wait_for("what is published to be written", || scenario.written() == stopped.published);
            }
            scenario.fill_disk();
            stopped.release();
        }
        Stop | StopLauncher => {
            let pid = if fault == Stop { process } else { launcher };
            // Threads that ptrace holds must be released before the wait: only then can they join their process's stop.
            kill(pid, libc::SIGSTOP);
            stopped.release();
            wait_for("the stop", || state(pid) == Some('T'));
            if scenario.is_under_memtrace() {
                std::thread::sleep(STOPPED_FOR);
            }
            assert_eq!(state(pid), Some('T'));
            kill(pid, libc::SIGCONT);
        }
        ClockStep => {
            std::fs::write(scenario.path("wall-clock-step"), CLOCK_STEP.to_string()).unwrap();
            stopped.release();
        }
    }
}

/// The traces by process id. Those of one process are in the order of its program images (one per `exec`).
#[track_caller]
fn traces_by_process(scenario: &Scenario) -> BTreeMap<u32, Vec<Reader>> {
    let mut traces = scenario.traces();
    traces.sort_by_key(|(name, _)| (name.len(), name.clone()));
    let mut processes: BTreeMap<u32, Vec<Reader>> = BTreeMap::new();
    for (_, trace) in traces {
        processes.entry(pid_of(&trace)).or_default().push(trace);
    }
    processes
}

/// All calls that the traces of one process contain, by thread.
#[track_caller]
fn calls(images: &[Reader]) -> Calls {
    let mut calls = Calls::new();
    for trace in images {
        for (tid, more) in calls_of(trace, &all_events(trace)) {
            calls.entry(tid).or_default().extend(more);
        }
    }
    calls
}

/// Compares the traces with the ledger and with the losses that the traces count. `died` is the process that the fault
/// killed, and `published` the number of events published before the fault.
#[track_caller]
fn check(scenario: &Scenario, cell: (Fault, Place, Recorded), died: Option<u32>, published: u64) {
    let (fault, place, recorded) = cell;
    let (traces, ledgers) = (traces_by_process(scenario), scenario.ledgers());
    // A process that starts after the launcher died has no trace.
    if !matches!(recorded, UpToHere | FirstBatch) {
        assert_eq!(traces.keys().collect::<Vec<_>>(), ledgers.keys().collect::<Vec<_>>(), "processes");
    }
    let all = || traces.values().flatten();
    let total: u64 = all().map(Reader::event_count).sum();
    for (pid, images) in &traces {
        let (ours, ledger) = (calls(images), &ledgers[pid]);
        match recorded {
            Committed { .. } if died == Some(*pid) => assert_whole_when_killed(&ours, ledger),
            Everything | Committed { .. } => assert_equal(&ours, ledger),
            UpToHere | FirstBatch | Beginning => assert_beginning(&ours, ledger),
        }
    }
    match recorded {
        Everything | Committed { .. } => {
            let expected = if let Committed { lost } = recorded { lost } else { 0 };
            let mut lost = 0;
            for trace in all() {
                assert!(trace.damage().is_none(), "{:?}", trace.damage());
                let end = trace.end().expect("an end");
                assert_eq!(end.late, 0, "late");
                let events = all_events(trace);
                assert!(events.is_sorted_by(|a, b| a.seq < b.seq));
                assert_eq!(
                    events.len() as u64 + end.lost,
                    events.last().unwrap().seq.max(events.len() as u64 + end.lost)
                );
                lost += end.lost;
            }
            assert_eq!(lost, expected, "lost");
            assert_eq!(scenario.manifest()["losses"]["lost"], expected);
        }
        UpToHere | FirstBatch => {
            assert!(all().all(|t| t.end().is_none() && t.damage().is_none()));
            // The first batch has 20 allocations and 20 frees. The runtime and the driver each record every one: 80
            // events.
            assert_eq!(total, if recorded == UpToHere { published } else { 80 });
        }
        Beginning => {
            let reasons: Vec<_> = all().map(|t| t.end().expect("an end").reason.clone()).collect();
            assert!(reasons.iter().any(|r| r.contains("events are missing in this file")), "{reasons:?}");
            assert!(all().all(|t| t.damage().is_none()));
            assert!(total >= if place == Drain { 80 } else { published }, "{total}");
            // Written events plus events counted as missing equal the events that the processes made.
            let manifest = scenario.manifest();
            let [taken, unwritten] = ["events", "unwritten"].map(|k| manifest["losses"][k].as_u64().unwrap());
            assert_eq!((total + unwritten, manifest["losses"]["lost"].as_u64()), (taken, Some(0)));
            assert_eq!(taken, ledgers.values().flat_map(Calls::values).map(|calls| calls.len() as u64).sum::<u64>());
        }
    }
    if fault == ClockStep {
        check_times(scenario, &traces);
    }
}

/// Checks that event order and durations do not change when the wall clock is set back by an hour during the run.
#[track_caller]
fn check_times(scenario: &Scenario, traces: &BTreeMap<u32, Vec<Reader>>) {
    let measured = scenario.began.elapsed().as_nanos() as u64;
    let manifest = scenario.manifest();
    let [began, ended] = ["started_ns", "ended_ns"].map(|k| manifest[k].as_u64().unwrap());
    assert!(began < ended && ended - began <= measured, "{began} {ended}, measured {measured}");
    let span = |trace: &Reader| {
        let (calibration, events) = (trace.calibration(), all_events(trace));
        let at = |e: &memtrace_trace::event::Event| calibration.epoch_ns(e.ticks);
        assert!(events.is_sorted_by_key(at), "in the order of their numbers");
        (at(events.first().unwrap()), at(events.last().unwrap()))
    };
    for (pid, images) in traces {
        for trace in images {
            let (first, last) = span(trace);
            assert!(began <= first && first <= last && last <= ended, "{began} {first} {last} {ended}");
            // All events of a child lie between the first and the last event of its parent.
            if *pid != scenario.pid as u32 {
                let (parent_first, parent_last) = span(&traces[&(scenario.pid as u32)][0]);
                assert!(parent_first < first && last < parent_last, "{parent_first} {first} {last} {parent_last}");
            }
        }
    }
}

/// How the program ends without memtrace under the same fault at the same place.
#[track_caller]
fn ending_without_memtrace(program: &Path, fault: Fault, place: Place) -> Ending {
    let mut scenario = start(program, false, fault);
    let concerns_the_program = matches!(fault, Kill | Segv | OutOfMemory | Stop);
    if concerns_the_program {
        let stopped = stop_at_place(&mut scenario, place, 0);
        inject(&mut scenario, stopped, fault, place);
    } else {
        scenario.send_line();
    }
    let ending = scenario.end();
    assert_eq!(scenario.launcher_messages(), "");
    ending
}

/// Runs one cell of the table.
#[track_caller]
fn check_cell(program: &Path, cell: (Fault, Place, Recorded), steps: u64) {
    let (fault, place, _) = cell;
    let expected = ending_without_memtrace(program, fault, place);
    let mut scenario = start(program, true, fault);
    let stopped = stop_at_place(&mut scenario, place, steps);
    let (faulted, published) = (stopped.faulted.tid(), stopped.published);
    inject(&mut scenario, stopped, fault, place);
    let ending = if fault == KillLauncher { scenario.end_of_orphan() } else { scenario.end() };
    assert_eq!(ending, expected, "with memtrace, and without");
    let launcher_messages = scenario.launcher_messages();
    if fault == DiskFull {
        check_disk(&scenario, &launcher_messages);
    } else {
        assert_eq!(launcher_messages, "");
    }
    let died = match fault {
        Kill | Segv if place == ForkExec => Some(faulted as u32),
        Kill | Segv | OutOfMemory => Some(scenario.pid as u32),
        _ => None,
    };
    check(&scenario, cell, died, published);
    let report = scenario.report();
    if fault == KillLauncher {
        assert!(report.contains("recording was cut off"), "{report}");
    }
    scenario.assert_nothing_is_left();
}

/// Checks a full disk: the launcher reports it once, with a fix, and the files written afterwards report it too.
#[track_caller]
fn check_disk(scenario: &Scenario, launcher_messages: &str) {
    let full: Vec<_> = launcher_messages.lines().filter(|l| l.contains(" traces: ")).collect();
    assert!(
        full.len() == 1
            && full[0].contains("No space left on device")
            && launcher_messages.contains("help: free disk space"),
        "{launcher_messages}"
    );
    let report = scenario.report();
    assert!(report.contains("unwritten"), "{report}");
}

/// Runs all cells of a fault.
#[track_caller]
fn cells(fault: Fault) {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/matrix.c", "matrix", &linked_with("libcudart.so.12"));
    programs.library::<&str>("crash/wall_clock.c", "wall_clock.so", &["-fvisibility=default"]);
    let steps = drain_steps(&program);
    assert!(steps > 100, "{steps}");
    for cell in CELLS.into_iter().filter(|c| c.0 == fault) {
        println!("{cell:?}");
        check_cell(&program, cell, steps / 2);
    }
}

#[test]
fn killed() {
    cells(Kill);
}

#[test]
fn killed_by_a_segmentation_fault() {
    cells(Segv);
}

#[test]
fn killed_by_the_oom_killer() {
    cells(OutOfMemory);
}

#[test]
fn with_a_killed_launcher() {
    cells(KillLauncher);
}

#[test]
fn with_a_full_disk() {
    cells(DiskFull);
}

#[test]
fn stopped_for_longer_than_the_launcher_waits() {
    cells(Stop);
}

#[test]
fn with_a_stopped_launcher() {
    cells(StopLauncher);
}

#[test]
fn while_the_wall_clock_is_set_back() {
    cells(ClockStep);
}

#[test]
fn every_fault_is_injected_at_every_place() {
    let mut cells: Vec<_> = CELLS.iter().map(|c| (format!("{:?}", c.0), c.1)).collect();
    cells.sort();
    cells.dedup();
    assert_eq!(cells.len(), 8 * 5);
}

/// A program at the entry of a recorded call, ready for single-stepping.
struct Stepping {
    scenario: Scenario,
    main: Tracee,
    /// The return address of the call.
    back: u64,
    base: u64,
    ring: u64,
    /// The next sequence number, and the number of published slots, when they were last read.
    seen: (u64, u64),
    /// Whether an event has its sequence number and is not published.
    is_open: bool,
}

impl Stepping {
    #[track_caller]
    fn start(program: &Path) -> Stepping {
        let mut scenario = start(program, true, Kill);
        let addresses = Addresses::of(&scenario);
        let main = Tracee::seize(scenario.pid, Follow::Nothing);
        scenario.send_line();
        main.run_to(addresses.call);
        main.run_to(addresses.stub);
        let back = main.word(main.registers().rsp);
        let shared = Shared::of(&main);
        let ring = shared.ring();
        let (base, seen) = (shared.base, (shared.next_seq(), shared.ends(ring).0));
        Stepping { scenario, main, back, base, ring, seen, is_open: false }
    }

    /// Runs one instruction without reading the shared memory afterwards.
    #[track_caller]
    fn step_blindly(&mut self) {
        assert!(self.main.step());
    }

    #[track_caller]
    fn step(&mut self) {
        self.step_blindly();
        self.observe();
    }

    fn observe(&mut self) {
        let shared = Shared { tracee: &self.main, base: self.base };
        let now = (shared.next_seq(), shared.ends(self.ring).0);
        // Definitions that an event refers to are published before the event gets its sequence number.
        self.is_open = now.0 != self.seen.0 || self.is_open && now.1 == self.seen.1;
        self.seen = now;
    }
}

/// The disk has space for the traces, but not for the snapshots that the launcher makes at the end.
#[test]
fn a_disk_that_is_full_at_the_end_loses_only_the_snapshots() {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/matrix.c", "matrix", &linked_with("libcudart.so.12"));
    let mut scenario =
        Scenario::start(with_simcuda(&[program.as_os_str(), REST_FOR_DISK.as_ref()]), true, Some("640k"));
    scenario.send_line();
    let expected = ending_without_memtrace(&program, DiskFull, Hook);
    assert_eq!(scenario.end(), expected);
    let launcher_messages = scenario.launcher_messages();
    assert!(launcher_messages.contains("cannot write the snapshot: No space left on device"), "{launcher_messages}");
    check(&scenario, (DiskFull, Hook, Everything), None, 0);
    assert_eq!(scenario.manifest()["state"], "ended");
    assert!(std::fs::read_to_string(scenario.run().join("summary.txt")).unwrap().contains(" events, 0 lost"));
    assert!(scenario.report().contains(" events, 0 lost"));
    scenario.assert_nothing_is_left();
}

mod exhaustive {
    use super::*;

    /// Kills the program inside one call that records two events, the driver's and the runtime's. The kill strikes at
    /// every eighth instruction at which an event is between number and publication, and at twelve other instructions.
    #[test]
    fn killed_at_any_instruction_of_a_call() {
        let programs = ProgramFolder::new();
        let program = programs.program("crash/matrix.c", "matrix", &linked_with("libcudart.so.12"));
        let mut census = Vec::new();
        let mut stepping = Stepping::start(&program);
        while stepping.main.registers().rip != stepping.back {
            stepping.step();
            census.push(stepping.is_open);
        }
        assert_eq!(stepping.seen.0, 83, "eighty events before, and these two");
        drop(stepping);
        let (open, others): (Vec<usize>, Vec<usize>) = (0..census.len()).partition(|i| census[*i]);
        println!("{} instructions, at {} of them an event is on its way", census.len(), open.len());
        assert!(open.len() > 20 && others.len() > 500);
        let some = others.iter().step_by(others.len() / 12);
        // An event is between its number and its publication for fewer than 400 instructions. Earlier instructions
        // need no check.
        let observe_from = |steps: usize| steps.saturating_sub(400);
        let mut kinds = [0, 0];
        for steps in open.iter().step_by(8).chain(some) {
            let mut stepping = Stepping::start(&program);
            (0..observe_from(*steps)).for_each(|_| stepping.step_blindly());
            stepping.observe();
            stepping.is_open = false;
            (observe_from(*steps)..=*steps).for_each(|_| stepping.step());
            let Stepping { mut scenario, main, seen, is_open, .. } = stepping;
            kill(scenario.pid, libc::SIGKILL);
            main.release();
            assert_eq!(scenario.end(), Ending { code: 128 + libc::SIGKILL, stdout: String::new() });
            let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
            let (events, end) = (all_events(trace), trace.end().unwrap());
            let numbers = seen.0 - 1;
            assert_eq!((end.lost, end.late), (is_open.into(), 0), "after {steps} instructions");
            assert_eq!(events.len() as u64 + end.lost, numbers, "after {steps} instructions");
            assert!(events.iter().zip(1..).all(|(event, number)| event.seq == number));
            assert_whole_when_killed(&calls_of(trace, &events), &scenario.ledgers()[&(scenario.pid as u32)]);
            kinds[usize::from(is_open)] += 1;
        }
        println!("killed {} times with an event on its way, {} times without", kinds[1], kinds[0]);
        assert!(kinds[1] > 10 && kinds[0] > 10, "{kinds:?}");
    }
}
