//! Clocks that jump, and recordings that last long.
//!
//! Events carry counts of the processor's counter, which the launcher relates to its own monotonic clock. So neither a
//! step of the wall clock nor a time namespace changes an order or a duration. `crash_matrix` sets the wall clock back
//! at every place of the recording path.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::crash_support::*;
use memtrace_tests::ledger::{assert_equal, calls_of};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::memtrace;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::{COUNTER_SLOTS, Counter};
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{End, Reader, Writer};
use memtrace_trace::ids::{FrameId, StackId, ThreadId};
use serde_json::Value;

const DAY: i64 = 24 * 3600;

/// The first and the last event of a trace, in nanoseconds since the epoch. All events must be in order.
#[track_caller]
fn span(trace: &Reader) -> (u64, u64) {
    let (calibration, events) = (trace.calibration(), all_events(trace));
    let at = |event: &Event| calibration.epoch_ns(event.ticks);
    assert!(events.is_sorted_by_key(at), "in the order of their numbers");
    (at(events.first().unwrap()), at(events.last().unwrap()))
}

/// Requires a complete recording whose events lie within the run, and a run that is no longer than the test measured.
#[track_caller]
fn assert_recorded_in_time(scenario: &Scenario) {
    let measured = scenario.began.elapsed().as_nanos() as u64;
    let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
    let end = trace.end().expect("an end");
    assert_eq!((end.lost, end.late, trace.counter(Counter::EventsDropped)), (0, 0, 0));
    assert_equal(&calls_of(trace, &all_events(trace)), &scenario.ledgers()[&(scenario.pid as u32)]);
    let manifest = scenario.manifest();
    let [began, ended] = ["started_ns", "ended_ns"].map(|key| manifest[key].as_u64().unwrap());
    let (first, last) = span(trace);
    assert!(began <= first && first <= last && last <= ended, "{began} {first} {last} {ended}");
    assert!(ended - began <= measured, "{} ns, measured {measured} ns", ended - began);
}

/// The options with which `unshare` makes a time namespace whose monotonic clocks are ten days ahead. `None`, with a
/// message, where this machine allows none.
fn time_namespace() -> Option<Vec<&'static str>> {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    let mut options = if unsafe { libc::geteuid() } == 0 { vec![] } else { vec!["-Ur"] };
    options.extend(["--time", "--fork", "--monotonic", "864000", "--boottime", "864000"]);
    let works = Command::new("unshare").args(&options).arg("true").output().is_ok_and(|o| o.status.success());
    if !works {
        println!("SKIPPED: this machine allows no time namespace (Linux 5.6, unshare of util-linux 2.36)");
    }
    works.then_some(options)
}

/// The traced process has other monotonic clocks than the launcher.
#[test]
fn a_process_in_another_time_namespace_has_right_times() {
    let Some(options) = time_namespace() else { return };
    let programs = ProgramFolder::new();
    let program = programs.program("crash/batches.c", "batches", &linked_with("libcudart.so.12"));
    let mut command = vec!["unshare".as_ref()];
    command.extend(options.iter().map(std::ffi::OsStr::new));
    command.extend([program.as_os_str(), "own".as_ref(), "300".as_ref(), "own".as_ref(), "300".as_ref()]);
    let mut scenario = Scenario::start(with_simcuda(&command), true, None);
    for _ in 0..2 {
        scenario.send_line();
        assert_eq!(scenario.line(), "done");
    }
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    assert_recorded_in_time(&scenario);
    scenario.assert_nothing_is_left();
}

/// The whole run is in a time namespace, as in a container that was restored from a checkpoint.
#[test]
fn a_run_in_a_time_namespace_has_right_times() {
    let Some(options) = time_namespace() else { return };
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let programs = ProgramFolder::new();
    let program = programs.program("crash/batches.c", "batches", &linked_with("libcudart.so.12"));
    let run = programs.path("run");
    let before = now();
    let mut command = Command::new("unshare");
    command.args(&options).arg(memtrace()).args(["--quiet", "-o"]).arg(&run).arg("--").arg(&program);
    command.args(["own", "300"]).env("LD_LIBRARY_PATH", memtrace_tests::programs::simcuda());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(3));
    let after = now();
    let manifest: Value = serde_json::from_slice(&std::fs::read(run.join("run.json")).unwrap()).unwrap();
    let [began, ended] = ["started_ns", "ended_ns"].map(|key| manifest[key].as_u64().unwrap());
    let pid = manifest["processes"][0]["pid"].as_u64().unwrap();
    let (first, last) = span(&Reader::open(run.join(format!("{pid}.mtr"))).unwrap());
    let times = [before, began, first, last, ended, after];
    assert!(times.is_sorted(), "{times:?}");
}

/// The wall clock jumps a day forward and two days back while the program works.
#[test]
fn jumps_of_the_wall_clock_change_no_duration() {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/batches.c", "batches", &linked_with("libcudart.so.12"));
    let clock = programs.library("crash/wall_clock.c", "wall_clock.so", &["-fvisibility=default"]);
    let mut command = vec![program.as_os_str()];
    command.extend(["own", "300"].repeat(3).into_iter().map(std::ffi::OsStr::new));
    let mut scenario = Scenario::start(with_simcuda(&command).env("LD_PRELOAD", clock), true, None);
    for step in [0, DAY, -2 * DAY] {
        std::fs::write(scenario.path("wall-clock-step"), step.to_string()).unwrap();
        scenario.send_line();
        assert_eq!(scenario.line(), "done");
    }
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    assert_recorded_in_time(&scenario);
    scenario.assert_nothing_is_left();
}

/// Ten hours, in the pieces in which the launcher writes them: after each, a flush, a clock point and counters.
struct TenHours {
    /// The time between two pieces.
    every: Duration,
    events_in_a_piece: u64,
}

/// The duration of the recording.
const TEN_HOURS: Duration = Duration::from_secs(36_000);
/// When the peak is reached: 7.5 hours after the start.
const PEAK_AT: Duration = Duration::from_secs(27_000);
/// The counter's rate: 3 GHz.
const TICKS_PER_NS: u64 = 3;
/// The start, in nanoseconds since the epoch.
const STARTED_NS: u64 = 1_700_000_000_000_000_000;
const BLOCK: u64 = 1 << 20;

impl TenHours {
    /// Writes the trace. Most blocks live for a moment. At 7.5 hours one large block makes the peak.
    fn write(&self, path: &std::path::Path) {
        // The machine had been up for 400 days, which is where a counter's nanoseconds exceed 2^53.
        let up = Duration::from_secs(400 * 86_400).as_nanos() as u64;
        let point = |at: Duration| {
            let ns = at.as_nanos() as u64;
            ClockPoint { ticks: (up + ns) * TICKS_PER_NS, monotonic_ns: up + ns, realtime_ns: STARTED_NS + ns }
        };
        let file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
        let mut writer =
            Writer::new(file, r#"{"pid":1,"argv":["python","train.py"],"cwd":"/","env":{},"host":"h"}"#).unwrap();
        let mut definitions = Vec::new();
        let frame = Definition::Frame {
            id: FrameId(1),
            name: "step",
            qualname: "step",
            filename: "/train.py",
            line: 7,
            first_line: 1,
        };
        for definition in [
            frame,
            Definition::Stack { id: StackId(1), parent: StackId::NONE, frame: FrameId(1) },
            Definition::Thread { id: ThreadId(1), tid: 1, name: "python" },
            Definition::Device { ordinal: 0, name: "H200", total: 1 << 37, used_before: 0, pci: "0000:01:00.0" },
        ] {
            definition.encode(&mut definitions);
        }
        writer.definition(&definitions).unwrap();
        let (mut seq, mut had_peak) = (0, false);
        let pieces = (TEN_HOURS.as_nanos() / self.every.as_nanos()) as u32;
        for piece in 0..=pieces {
            let at = self.every * piece;
            let mut event = |action, addr, size| {
                seq += 1;
                let event = Event {
                    seq,
                    ticks: point(at).ticks,
                    addr,
                    size,
                    stack: StackId(1),
                    thread: ThreadId(1),
                    source: Source::Torch,
                    action,
                    device: 0,
                    ..Event::EMPTY
                };
                writer.event(&event).unwrap();
            };
            for number in 0..self.events_in_a_piece / 2 {
                let addr = (1 << 40) + (u64::from(piece) + number) % 64 * BLOCK;
                event(Action::Alloc, addr, BLOCK);
                event(Action::FreeCompleted, addr, BLOCK);
            }
            if at >= PEAK_AT && !std::mem::replace(&mut had_peak, true) {
                event(Action::Alloc, 1 << 41, 1000 * BLOCK);
                event(Action::FreeCompleted, 1 << 41, 1000 * BLOCK);
            }
            writer.clock(point(at)).unwrap();
            writer.counters(&[0; COUNTER_SLOTS]).unwrap();
            writer.flush().unwrap();
        }
        let end = End { wait_status: Some(0), lost: 0, late: 0, reason: "exited".to_owned() };
        writer.finish(&end).unwrap().flush().unwrap();
    }

    /// Writes the trace, reads it, and compares times. The report takes at most `seconds` and 300 MiB.
    #[track_caller]
    fn check(&self, seconds: u64) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("1.mtr");
        self.write(&path);
        let pieces = 1 + (TEN_HOURS.as_nanos() / self.every.as_nanos()) as u64;
        let bytes = std::fs::metadata(&path).unwrap().len();
        println!("{pieces} pieces, {bytes} bytes, {} a piece", bytes / pieces);
        assert!(bytes / pieces < 400 + 8 * self.events_in_a_piece);
        {
            let trace = Reader::open(&path).unwrap();
            assert_eq!(trace.event_count(), pieces * self.events_in_a_piece + 2);
            let (first, last) = span(&trace);
            assert!(first.abs_diff(STARTED_NS) < 1_000_000, "{first}");
            assert!((last - first).abs_diff(TEN_HOURS.as_nanos() as u64) < 1_000_000, "{} ns", last - first);
        }
        let began = Instant::now();
        let mut command = Command::new("sh");
        // The shell limits the address space of memtrace's data (`ulimit -d`, in KiB).
        command.args(["-c", r#"ulimit -d 307200; exec "$0" report --json "$1""#]).arg(memtrace()).arg(&path);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(began.elapsed() < Duration::from_secs(seconds), "{:?}", began.elapsed());
        println!("reported in {:?}", began.elapsed());
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        let device = &summary["processes"][0]["devices"][0];
        let peak = &device["peak"];
        let time = peak["time_ns"].as_u64().unwrap_or_else(|| panic!("{device:#}"));
        let expected = STARTED_NS + PEAK_AT.as_nanos() as u64;
        assert!(time.abs_diff(expected) < 1_000_000, "{time}, expected {expected}");
    }
}

#[test]
fn ten_hours_with_long_pauses_are_read_with_right_times() {
    TenHours { every: Duration::from_secs(10), events_in_a_piece: 20 }.check(60);
}

mod exhaustive {
    use super::*;

    /// The launcher flushes four times a second: 144,001 pieces.
    #[test]
    fn ten_hours_without_a_pause_are_read_with_right_times() {
        TenHours { every: Duration::from_millis(250), events_in_a_piece: 10 }.check(300);
    }
}
