//! Every event that a process records arrives in its trace in order, or is counted as lost.

use crate::launcher_support::*;
use memtrace_trace::event::Event;

fn record(words: &[&str]) -> (tempfile::TempDir, std::process::Output) {
    let folder = tempfile::tempdir().unwrap();
    let output = output(recording(&folder.path().join("run")).arg(PRODUCER).args(words));
    (folder, output)
}

fn assert_complete(events: &[Event], count: u64) {
    assert_eq!(events.len() as u64, count);
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event.seq, i as u64 + 1, "in order, without gaps");
    }
}

#[test]
fn everything_is_recorded() {
    let (folder, output) = record(&["define", "events=5000", "write", "exit=3"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let run = folder.path().join("run");
    let reader = only_trace(&run);
    assert_complete(&events(&reader), 5000);
    assert!(reader.damage().is_none());
    let end = reader.end().unwrap();
    assert_eq!((end.wait_status, end.lost, end.late, end.reason.as_str()), (Some(3 << 8), 0, 0, "exited"));
    assert!(reader.clock_points().len() >= 2);
    let process = only_process(&run);
    assert_eq!(process["events"], 5000);
    assert_eq!(process["exit"]["code"], 3);
    assert_eq!(process["argv"][1], "define");
    assert_eq!(process["notices"][0]["topic"], "torch.tracker");
    // A forged thread, an id out of bounds and a truncated definition.
    assert_eq!(process["definitions_refused"], 3);
    let info: serde_json::Value = serde_json::from_str(reader.info()).unwrap();
    assert_eq!(info["pid"], process["pid"]);
}

#[test]
fn threads_are_merged_into_one_order() {
    let (folder, output) = record(&["threads=8", "events=20000", "write"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let reader = only_trace(&folder.path().join("run"));
    let events = events(&reader);
    assert_complete(&events, 160_000);
    let mut by_thread = [0u64; 9];
    for event in &events {
        by_thread[event.thread.index()] += 1;
    }
    assert_eq!(by_thread, [0, 20_000, 20_000, 20_000, 20_000, 20_000, 20_000, 20_000, 20_000]);
    let mut names: Vec<_> = (1..=8)
        .map(|i| reader.definitions().thread(memtrace_trace::ids::ThreadId(i)).unwrap().name.to_string())
        .collect();
    names.sort();
    assert_eq!(names, (0..8).map(|i| format!("producer-{i}")).collect::<Vec<_>>());
}

#[test]
fn a_million_events_a_second_are_recorded() {
    let (folder, output) = record(&["threads=2", "events=1000000", "rate=1000000", "write"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let run = folder.path().join("run");
    let process = only_process(&run);
    assert_eq!((&process["events"], &process["lost"]), (&2_000_000.into(), &0.into()));
    assert!(process["bytes"].as_u64().unwrap() <= 8 * 2_000_000, "at most 8 bytes an event: {process}");
}

#[test]
fn missing_sequence_numbers_are_counted_as_lost() {
    let (folder, output) = record(&["events=10", "write", "gap=7", "write"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let run = folder.path().join("run");
    let process = only_process(&run);
    assert_eq!((&process["events"], &process["lost"], &process["late"]), (&20.into(), &7.into(), &0.into()));
    let reader = only_trace(&run);
    assert_eq!(reader.end().unwrap().lost, 7);
    let seqs: Vec<u64> = events(&reader).iter().map(|e| e.seq).collect();
    assert_eq!(seqs, (1..=10).chain(18..=27).collect::<Vec<_>>());
}

#[test]
fn a_gap_does_not_delay_later_events() {
    // While the program waits, the second part must reach the file, although the gap before it stays open.
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = recording(&run);
    command.arg(PRODUCER).args(["events=10", "write", "gap=1", "write", "say=written", "wait"]);
    let mut running = Running::start(command.stdin(std::process::Stdio::piped()));
    assert_eq!(running.line(), "written");
    wait_for(|| {
        traces(&run).first().is_some_and(|t| memtrace_trace::file::Reader::open(t).is_ok_and(|r| r.event_count() == 20))
    });
    drop(running.child.stdin.take());
    assert!(running.child.wait().unwrap().success());
    assert_eq!(only_process(&run)["lost"], 1);
}

#[test]
fn rings_of_ended_threads_are_reused() {
    let (folder, output) = record(&["churn=3000"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let run = folder.path().join("run");
    assert_complete(&events(&only_trace(&run)), 3000);
}

#[test]
fn a_program_after_exec_gets_its_own_trace() {
    let (folder, output) = record(&["events=10", "write", "reattach", "events=20", "write"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let run = folder.path().join("run");
    let manifest = manifest(&run);
    let processes = manifest["processes"].as_array().unwrap();
    let pid = processes[0]["pid"].as_u64().unwrap();
    let facts: Vec<_> =
        processes.iter().map(|p| (p["trace"].as_str().unwrap().to_owned(), p["events"].as_u64().unwrap())).collect();
    assert_eq!(facts, [(format!("{pid}.mtr"), 10), (format!("{pid}.1.mtr"), 20)]);
    assert_eq!(processes[0]["end_reason"], "replaced by exec");
    assert_eq!(processes[1]["end_reason"], "exited");
}

#[test]
fn exec_and_children_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    // A shell that records nothing, two children of it, and a third program that replaces the shell.
    let script =
        format!("{PRODUCER} events=1 write & {PRODUCER} events=2 write; wait; exec {PRODUCER} events=3 write exit=4");
    let output = output(recording(&run).args(["sh", "-c", &script]));
    assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    let manifest = manifest(&run);
    let processes = manifest["processes"].as_array().unwrap();
    let mut counts: Vec<_> = processes.iter().map(|p| p["events"].as_u64().unwrap()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 2, 3]);
    let last = processes.iter().find(|p| p["events"] == 3).unwrap();
    assert_eq!(last["pid"], manifest["pid"], "exec keeps the pid");
    assert_eq!(traces(&run).len(), 3);
}

/// A process ends as soon as it can. With two of them on each CPU it often has, when the launcher runs again.
#[test]
fn a_process_that_ends_at_once_has_its_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let cpus = std::thread::available_parallelism().unwrap().get();
    let loops = format!("for i in $(seq {}); do (for j in $(seq 20); do {PRODUCER} events=1; done) & done", 2 * cpus);
    let output = output(recording(&run).args(["sh", "-c", &format!("{loops}; wait")]));
    assert!(output.status.success(), "{}", stderr(&output));
    let manifest = manifest(&run);
    let processes = manifest["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 40 * cpus);
    for process in processes {
        assert_eq!(process["argv"][1], "events=1", "{process}");
    }
}

#[test]
fn the_trace_of_a_process_that_outlives_the_command_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let fifo = folder.path().join("fifo");
    // `sh` waits until its child has recorded, and ends before the child does.
    let script = format!(
        "mkfifo {fifo}; {PRODUCER} events=10 write say=written linger > {fifo} & read line < {fifo}; echo $line $!",
        fifo = fifo.display()
    );
    let mut running = Running::start(recording(&run).args(["sh", "-c", &script]));
    let line = running.line();
    let pid = line.strip_prefix("written ").expect(&line).parse().unwrap();
    assert!(running.child.wait().unwrap().success());
    let process = only_process(&run);
    assert_eq!((&process["end_reason"], &process["events"]), (&"still running".into(), &10.into()));
    assert_eq!(only_trace(&run).end().unwrap().reason, "still running");
    kill(pid, libc::SIGKILL);
}

#[test]
fn a_program_that_records_nothing_leaves_no_trace() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    assert!(output(recording(&run).arg("true")).status.success());
    assert!(traces(&run).is_empty());
    assert_eq!(manifest(&run)["processes"].as_array().unwrap().len(), 0);
}

#[test]
fn corrupt_shared_memory_is_counted_and_harmless() {
    for kind in ["tail", "kind", "length", "seq", "header", "random"] {
        let (folder, output) = record(&["events=100", "write", &format!("corrupt={kind}")]);
        assert!(output.status.success(), "{kind}: {}", stderr(&output));
        let run = folder.path().join("run");
        let process = only_process(&run);
        let strange = process["corrupt"].as_u64().unwrap() + process["late"].as_u64().unwrap();
        assert!(strange > 0, "{kind}: {process:#}");
        let reader = only_trace(&run);
        assert!(reader.damage().is_none() && reader.end().is_some(), "{kind}");
        let names: Vec<_> = std::fs::read_dir(&run).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(names.iter().all(|n| !n.to_string_lossy().contains("partial")), "{kind}: {names:?}");
    }
}
