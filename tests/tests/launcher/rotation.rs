//! `memtrace run --keep`: traces of programs that run for weeks stay small, lose nothing of their newest part, and are
//! readable at every point in time.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::launcher_support::*;
use memtrace_trace::file::Reader;

/// The size of a frame's header in bytes (`trace/FORMAT.md`).
const FRAME_HEADER: u64 = 24;

/// `memtrace --keep` with this limit.
fn keeping(limit: &str, run: &Path) -> Command {
    let mut command = Command::new(memtrace());
    command.args(["--quiet", "--keep", limit, "-o"]).arg(run).arg("--").arg(PRODUCER);
    command
}

fn first_kept(run: &Path) -> Option<u64> {
    let trace = traces(run).into_iter().next()?;
    Some(Reader::open(trace).ok()?.definitions().rotation.as_ref()?.first_seq)
}

/// Requires that the trace has every event from the first kept one on. Returns the number of the first one.
#[track_caller]
fn assert_newest_part(run: &Path, events_made: u64) -> u64 {
    let reader = only_trace(run);
    assert!(reader.damage().is_none(), "{:?}", reader.damage());
    let rotation = reader.definitions().rotation.expect("a rotated trace");
    let seqs: Vec<u64> = events(&reader).iter().map(|e| e.seq).filter(|seq| *seq >= rotation.first_seq).collect();
    assert_eq!(seqs, (rotation.first_seq..=events_made).collect::<Vec<_>>());
    assert_eq!(rotation.dropped, rotation.first_seq - 1);
    let end = reader.end().unwrap();
    assert_eq!((end.lost, end.late), (0, 0));
    let process = only_process(run);
    assert_eq!((&process["events"], &process["unwritten"]), (&events_made.into(), &0.into()), "{process:#}");
    let names: Vec<_> = std::fs::read_dir(run).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let have = |end: &str| names.iter().any(|name| name.to_string_lossy().ends_with(end));
    assert!(have(".kept.jsonl") && !have(".part"), "{names:?}");
    rotation.first_seq
}

#[test]
fn a_trace_keeps_its_newest_part_and_loses_nothing_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = keeping("1MiB", &run);
    command.args(["define", "threads=2", "events=1500000", "write", "say=first", "wait"]);
    command.args(["events=1500000", "write", "say=second", "wait", "exit=3"]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let mut stdin = running.child.stdin.take().unwrap();
    assert_eq!(running.line(), "first");
    // Nothing is written any more, and yet the rotation becomes complete.
    wait_for(|| first_kept(&run).is_some_and(|first| first > 1));
    let first = first_kept(&run).unwrap();
    std::io::Write::write_all(&mut stdin, b"\n").unwrap();
    assert_eq!(running.line(), "second");
    wait_for(|| first_kept(&run).is_some_and(|next| next > first));
    drop(stdin);
    assert_eq!(running.child.wait().unwrap().code(), Some(3));
    assert!(assert_newest_part(&run, 6_000_000) > first);
    let report = output(Command::new(memtrace()).arg("report").arg(&run).arg("--json"));
    assert!(report.status.success(), "{}", stderr(&report));
    let summary: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    let process = &summary["processes"][0];
    let [kept, dropped] = [&process["events"], &process["dropped"]["events"]].map(|n| n.as_u64().unwrap());
    assert_eq!(kept + dropped, 6_000_000);
    assert_eq!(summary["problems"], serde_json::json!([]));
    assert!(!process["dropped"]["text"].as_str().unwrap().contains("unknown"), "{process:#}");
}

#[test]
fn a_trace_keeps_the_events_of_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = keeping("1s", &run);
    command.args([
        "rate=20000",
        "events=20000",
        "write",
        "say=first",
        "wait",
        "events=50000",
        "write",
        "say=more",
        "wait",
    ]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let mut stdin = running.child.stdin.take().unwrap();
    assert_eq!(running.line(), "first");
    // The second part takes 2.5 s, so the first one is older than 1.25 s then.
    std::io::Write::write_all(&mut stdin, b"\n").unwrap();
    assert_eq!(running.line(), "more");
    wait_for(|| first_kept(&run).is_some_and(|first| first > 1));
    drop(stdin);
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
    assert_newest_part(&run, 70_000);
    let reader = only_trace(&run);
    let (first, last) = reader.definitions().rotation.as_ref().map(|r| (r.dropped_ticks.1, r.dropped_ticks.0)).unwrap();
    assert!(first > last);
}

#[test]
fn a_launcher_that_is_killed_while_it_rotates_leaves_a_readable_trace() {
    for round in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let mut command = keeping("1MiB", &run);
        let mut running = Running::start(command.args(["threads=2", "events=100000000", "say=begin", "write"]));
        assert_eq!(running.line(), "begin");
        let family = children(running.pid());
        let part = || {
            let names = std::fs::read_dir(&run).into_iter().flatten().flatten().map(|entry| entry.file_name());
            names.into_iter().any(|name| name.to_string_lossy().ends_with(".part"))
        };
        // Later rounds kill it after the first rotations.
        wait_for(|| round < 2 || first_kept(&run).is_some());
        wait_for(part);
        running.signal(libc::SIGKILL);
        running.child.wait().unwrap();
        family.iter().for_each(|pid| drop(Command::new("kill").args(["-9", &pid.to_string()]).output()));
        let reader = only_trace(&run);
        // An end that is cut inside the header of a frame counts as a range, one inside its content does not.
        let damage = reader.damage();
        let is_header_cut = damage.is_tail_truncated && damage.bytes_skipped < FRAME_HEADER;
        assert_eq!(damage.damaged_ranges, u64::from(is_header_cut), "round {round}: {damage:?}");
        let first = reader.definitions().rotation.as_ref().map_or(1, |rotation| rotation.first_seq);
        let seqs: Vec<u64> = events(&reader).iter().map(|e| e.seq).filter(|seq| *seq >= first).collect();
        assert!(!seqs.is_empty());
        assert_eq!(seqs, (first..first + seqs.len() as u64).collect::<Vec<_>>(), "round {round}");
        let report = output(Command::new(memtrace()).arg("report").arg(&run));
        assert!(report.status.success(), "{}", stderr(&report));
        // Whenever it was killed, the trace has its state.
        assert!(!stderr(&report).contains("kept.jsonl"), "round {round}: {}", stderr(&report));
    }
}

#[test]
fn a_rotation_that_fails_leaves_the_trace_as_it_is_and_is_reported_once() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = keeping("1MiB", &run);
    command.args(["say=begin", "wait", "threads=2", "events=1500000", "write", "say=done"]);
    let mut running = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(running.line(), "begin");
    wait_for(|| !traces(&run).is_empty());
    // The new trace cannot be created where a folder is.
    let name = traces(&run)[0].file_name().unwrap().to_string_lossy().into_owned();
    std::fs::create_dir(run.join(format!(".{name}.part"))).unwrap();
    drop(running.child.stdin.take());
    assert_eq!(running.line(), "done");
    let mut messages = String::new();
    std::io::Read::read_to_string(&mut running.child.stderr.take().unwrap(), &mut messages).unwrap();
    assert_eq!(running.child.wait().unwrap().code(), Some(0), "{messages}");
    let about = |line: &&str| line.contains("cannot drop old events, so the trace grows: cannot create the new trace");
    assert_eq!(messages.lines().filter(about).count(), 1, "{messages}");
    let reader = only_trace(&run);
    assert!(reader.definitions().rotation.is_none() && reader.end().is_some());
    assert_eq!(events(&reader).len(), 3_000_000);
}

/// Less space is free than any fixed reserve: the trace is rotated as long as its new part fits.
#[test]
fn a_trace_is_rotated_on_a_small_disk() {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: only root can mount a disk: run this test as root, in a container for example");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", r#"mount -t tmpfs -o size=32m none "$1" && shift && exec "$@""#, "sh"]).arg(&disk);
    command.arg(memtrace()).args(["--quiet", "--keep", "1MiB", "-o"]).arg(disk.join("run")).arg("--").arg(PRODUCER);
    command.args(["define", "threads=2", "events=1500000", "write", "say=first", "wait"]);
    let mut running = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    // The disk is mounted for this process alone.
    let run = Path::new(&format!("/proc/{}/root", running.pid())).join(disk.strip_prefix("/").unwrap()).join("run");
    assert_eq!(running.line(), "first");
    wait_for(|| first_kept(&run).is_some_and(|first| first > 1));
    drop(running.child.stdin.take());
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
    let messages = std::io::read_to_string(running.child.stderr.take().unwrap()).unwrap();
    assert!(!messages.contains("cannot drop old events"), "{messages}");
}

mod exhaustive {
    use super::*;

    /// The largest size of the trace and of the launcher's memory while 100 million events are recorded.
    #[test]
    fn a_hundred_million_events_stay_within_32_mib() {
        const LIMIT: u64 = 32 << 20;
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let mut command = keeping("32MiB", &run);
        command.args(["threads=2", "rate=1000000", "events=50000000", "write", "say=done", "wait"]);
        let began = std::time::Instant::now();
        let mut running = Running::start(command.stdin(Stdio::piped()));
        let launcher = running.pid();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (largest, memory) = std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let (mut largest, mut memory) = (0, 0);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let bytes = |path: &std::path::PathBuf| std::fs::metadata(path).map_or(0, |m| m.len());
                    // The folder is made when the launcher has begun.
                    let files = if run.is_dir() { traces(&run) } else { Vec::new() };
                    largest = files.iter().map(bytes).max().unwrap_or(0).max(largest);
                    let status = std::fs::read_to_string(format!("/proc/{launcher}/status")).unwrap_or_default();
                    let kib = status
                        .lines()
                        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
                    memory = kib.unwrap_or(0u64).max(memory);
                    std::thread::sleep(std::time::Duration::from_millis(50));
                }
                (largest, memory << 10)
            });
            assert_eq!(running.line(), "done");
            wait_for(|| first_kept(&run).is_some());
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            watch.join().unwrap()
        });
        let took = began.elapsed();
        drop(running.child.stdin.take());
        assert_eq!(running.child.wait().unwrap().code(), Some(0));
        assert_newest_part(&run, 100_000_000);
        println!("{took:?}, the trace took up to {} MiB, the launcher {} MiB", largest >> 20, memory >> 20);
        // It grows while the new trace is written, which takes longer on a busy machine.
        assert!(largest < 2 * LIMIT, "{largest}");
        assert!(memory < 512 << 20, "{memory}");
    }
}
