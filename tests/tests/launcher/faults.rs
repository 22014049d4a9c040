//! Whichever process dies, the events recorded before are in the trace.

use std::io::Read;
use std::process::Stdio;
use std::time::Duration;

use crate::launcher_support::*;
use memtrace_trace::file::Reader;

#[test]
fn a_killed_process_loses_no_published_event() {
    for end in ["kill", "abort"] {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let output = output(recording(&run).arg(PRODUCER).args(["threads=4", "events=3000", "write", end]));
        assert_eq!(output.status.code(), Some(if end == "kill" { 137 } else { 134 }));
        let reader = only_trace(&run);
        let seqs: Vec<u64> = events(&reader).iter().map(|e| e.seq).collect();
        assert_eq!(seqs, (1..=12_000).collect::<Vec<_>>());
        let end = reader.end().unwrap();
        assert_eq!((end.lost, end.late), (0, 0));
        let signal = if output.status.code() == Some(137) { libc::SIGKILL } else { libc::SIGABRT };
        assert_eq!(end.wait_status.unwrap() & 0x7f, signal);
    }
}

/// Kills at random points in time: at most one event a thread is missing, and it is counted.
#[test]
fn kills_at_random_times_lose_at_most_one_event_a_thread() {
    const THREADS: u64 = 3;
    let mut random = 0x5eed_u64;
    for round in 0..25 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let mut command = recording(&run);
        command.arg(PRODUCER).args([&format!("threads={THREADS}"), "events=100000000", "say=begin", "write"]);
        let mut running = Running::start(&mut command);
        assert_eq!(running.line(), "begin");
        let producer = children(running.pid());
        let producer = producer
            .iter()
            .find(|p| std::fs::read_link(format!("/proc/{p}/exe")).is_ok_and(|e| e.ends_with("producer")));
        std::thread::sleep(Duration::from_micros(random % 60_000));
        kill(*producer.unwrap(), libc::SIGKILL);
        assert_eq!(running.child.wait().unwrap().code(), Some(137), "round {round}");
        let reader = only_trace(&run);
        assert!(reader.damage().is_none(), "round {round}");
        let events = events(&reader);
        let end = reader.end().unwrap();
        assert!(events.is_sorted_by(|a, b| a.seq < b.seq) && end.late == 0, "round {round}");
        assert!(end.lost <= THREADS, "round {round}: {} lost", end.lost);
        let last = events.last().map_or(0, |e| e.seq);
        assert!(last <= events.len() as u64 + end.lost, "round {round}");
        assert_eq!(only_process(&run)["events"], events.len());
    }
}

#[test]
fn a_killed_launcher_leaves_a_readable_trace_and_the_command_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = recording(&run);
    command.arg(PRODUCER).args(["define", "events=5000", "write", "say=written", "wait", "say=alive", "exit=0"]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    assert_eq!(running.line(), "written");
    let stdin = running.child.stdin.take().unwrap();
    wait_for(|| traces(&run).first().is_some_and(|t| Reader::open(t).is_ok_and(|r| r.event_count() == 5000)));
    let family = children(running.pid());
    running.signal(libc::SIGKILL);
    running.child.wait().unwrap();
    drop(stdin);
    assert_eq!(running.line(), "alive");
    // The signal probe ends with the launcher: every process that held the pipe's write end is gone.
    assert!(running.rest().is_empty());
    wait_for(|| family.iter().all(|pid| !is_running(*pid)));
    let reader = only_trace(&run);
    assert_eq!(events(&reader).len(), 5000);
    assert!(reader.end().is_none());
    assert_eq!(manifest(&run)["state"], "running");
    let report = output(std::process::Command::new(memtrace()).arg("report").arg(&run));
    assert!(report.status.success(), "{}", stderr(&report));
}

fn is_running(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.rsplit_once(") ").unwrap().1.starts_with('Z'))
}

/// A file size limit stands for a full disk: both make write(2) fail. The limit is set after the shared memory exists,
/// because that is a file as well.
#[test]
fn a_full_disk_is_reported_once_and_the_command_continues() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = recording(&run);
    command.arg(PRODUCER).args([
        "events=10",
        "write",
        "say=first",
        "wait",
        "threads=2",
        "events=2000000",
        "write",
        "say=done",
        "exit=5",
    ]);
    let mut running = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(running.line(), "first");
    let limit = libc::rlimit { rlim_cur: 100_000, rlim_max: 100_000 };
    // SAFETY: `limit` is a live `rlimit` during the call, and the old limit's pointer may be null.
    assert_eq!(unsafe { libc::prlimit(running.pid(), libc::RLIMIT_FSIZE, &limit, std::ptr::null_mut()) }, 0);
    drop(running.child.stdin.take());
    assert_eq!(running.line(), "done");
    let mut message = String::new();
    running.child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!(running.child.wait().unwrap().code(), Some(5), "{message}");
    assert_eq!(message.lines().filter(|l| l.contains("error: cannot write 1 of 1 traces")).count(), 1, "{message}");
    assert!(message.contains("File too large") && message.contains("help: free disk space"), "{message}");
    let reader = only_trace(&run);
    let written = reader.event_count();
    assert!(written > 0);
    let process = only_process(&run);
    let [taken, unwritten] = ["events", "unwritten"].map(|k| process[k].as_u64().unwrap());
    assert_eq!(taken - unwritten, written, "{process:#}");
    assert_eq!(process["bytes"], std::fs::metadata(&traces(&run)[0]).unwrap().len());
}

#[test]
fn a_deleted_run_folder_does_not_stop_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let script = format!("rm -r {}; exec {PRODUCER} events=10 write exit=6", run.display());
    let output = output(recording(&run).args(["sh", "-c", &script]));
    assert_eq!(output.status.code(), Some(6), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot create the trace file"), "{}", stderr(&output));
}

#[test]
fn a_stopped_launcher_loses_no_events() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = recording(&run);
    command.arg(PRODUCER).args(["events=10", "write", "say=first", "wait", "events=100000", "write", "say=second"]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    assert_eq!(running.line(), "first");
    running.signal(libc::SIGSTOP);
    assert!(libc::WIFSTOPPED(wait(running.pid(), libc::WUNTRACED)));
    drop(running.child.stdin.take());
    // The producer fills its ring and waits. Half a second later the launcher continues to drain it.
    std::thread::sleep(Duration::from_millis(500));
    running.signal(libc::SIGCONT);
    assert_eq!(running.line(), "second");
    assert!(running.child.wait().unwrap().success());
    let process = only_process(&run);
    assert_eq!((&process["events"], &process["lost"], &process["late"]), (&100_010.into(), &0.into(), &0.into()));
}
