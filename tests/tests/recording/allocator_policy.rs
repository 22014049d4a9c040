//! The replay of the allocator's policy. It must reproduce real recordings event for event. Its prediction for other
//! settings must equal what the same program does with them.

use memtrace_analysis::load::{Process, open_run};
use memtrace_analysis::model::{AllocatorSettings, Recording};
use memtrace_analysis::passes::{PolicyReplay, WhatIf, WhatIfQuery};
use memtrace_tests::traced_program::{Run, TracedProgram, root};
use memtrace_tests::versions::Versions;
use memtrace_trace::event::{Action, Event, Source};

const CONF: &str = "PYTORCH_CUDA_ALLOC_CONF";

fn replay(recording: &dyn Recording, question: WhatIfQuery) -> WhatIf {
    let mut replay = PolicyReplay::new(question);
    recording.stream(&mut |events| events.iter().for_each(|e| replay.observe(e)));
    replay.finish(None)
}

fn question(settings: &str) -> WhatIfQuery {
    WhatIfQuery { device: 0, settings: AllocatorSettings::parse(settings), allowed: None, limit: u64::MAX, oom: None }
}

fn torch_events(recording: &dyn Recording) -> Vec<Event> {
    let mut all = Vec::new();
    recording.stream(&mut |events| {
        all.extend(events.iter().filter(|e| e.source == Source::Torch && e.device == 0).copied());
    });
    all
}

fn is_segment(e: &&Event) -> bool {
    use Action::{SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap};
    matches!(e.action, SegmentAlloc | SegmentFree | SegmentMap | SegmentUnmap)
}

/// The peak of the sum of all segment sizes, in bytes.
fn peak_reserved(events: &[Event]) -> u64 {
    let (mut now, mut peak) = (0, 0);
    for e in events.iter().filter(is_segment) {
        match e.action {
            Action::SegmentAlloc | Action::SegmentMap => now += e.size,
            _ => now -= e.size,
        }
        peak = peak.max(now);
    }
    peak
}

/// Requires that the replay reproduces every segment event, and every block at its address.
#[track_caller]
fn repeats(recording: &dyn Recording, question: WhatIfQuery, what: &str) -> WhatIf {
    let events = torch_events(recording);
    let found = replay(recording, question);
    let agreement = &found.agreement;
    println!("{what}: {} blocks, {} segment events, {:?}", agreement.blocks, agreement.segments, agreement.difference);
    assert_eq!(agreement.difference, None, "{what}");
    assert_eq!(agreement.segments, events.iter().filter(is_segment).count() as u64, "{what}: segment events");
    let allocs = events.iter().filter(|e| e.action == Action::Alloc).count() as u64;
    assert_eq!(agreement.blocks, allocs, "{what}: blocks at their addresses");
    assert_eq!(agreement.peak_reserved, peak_reserved(&events), "{what}: reserved at most");
    found
}

/// Snapshots that PyTorch's recorder took on an H200.
#[test]
fn recordings_of_an_h200_are_replayed() {
    for (name, settings) in [("resnet_leak", ""), ("expandable", "expandable_segments:True"), ("oom", "")] {
        let found = repeats(&memtrace_tests::golden::load(&format!("{name}.json")), question(settings), name);
        assert!(found.agreement.blocks > 10, "{name}");
    }
}

/// Calls `read` with the only process of a run.
fn process<R>(run: &Run, read: impl FnOnce(&Process) -> R) -> R {
    let run = open_run(run.path()).expect("a run");
    let [process] = run.processes() else { panic!("{} processes", run.processes().len()) };
    read(process)
}

/// Runs a program with these settings and requires that the replay reproduces it.
#[track_caller]
fn repeated(traced: TracedProgram, settings: &str, allowed: Option<u64>) -> WhatIf {
    assert_repeated(&traced.env(CONF, settings).run(), settings, allowed)
}

/// Requires that the replay reproduces a run with these settings.
#[track_caller]
pub(crate) fn assert_repeated(run: &Run, settings: &str, allowed: Option<u64>) -> WhatIf {
    let what = format!("{settings:?}, {}", String::from_utf8_lossy(&run.output.stdout).lines().last().unwrap_or(""));
    process(run, |process| repeats(process.recording(), WhatIfQuery { allowed, ..question(settings) }, &what))
}

const PLAIN: [&str; 6] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:40,roundup_power2_divisions:4",
    "roundup_power2_divisions:[32:2,64:8,>:4]",
    "expandable_segments:True,roundup_power2_divisions:8",
];

fn policies(arguments: &[&str]) -> TracedProgram {
    TracedProgram::python("allocators/policies.py", arguments).env("PYTHONPATH", root().join("tests/programs/torch"))
}

/// 8 GiB are not enough: memory is returned and asked for again, until that does not help either.
#[test]
fn errors_and_retries_are_replayed() {
    for settings in ["", "max_split_size_mb:100"] {
        repeated(TracedProgram::python("torch/oom_retry.py", &[]), settings, None);
    }
}

/// A tenth of the 8 GiB, as the program asks for, in bytes.
const ALLOWED: Option<u64> = Some((8 << 30) / 10);

#[test]
fn limits_and_garbage_collection_are_replayed() {
    for settings in ["", "roundup_power2_divisions:4,max_split_size_mb:40,garbage_collection_threshold:0.6"] {
        repeated(policies(&["0.1"]), settings, ALLOWED);
    }
}

/// [`crate::programs`] tests the other training programs.
#[test]
fn training_is_replayed() {
    repeated(TracedProgram::python("torch/streams.py", &[]), "", None);
}

mod exhaustive {
    use super::*;

    #[test]
    fn errors_limits_and_training_are_replayed_with_more_settings() {
        repeated(TracedProgram::python("torch/oom_retry.py", &[]), "expandable_segments:True", None);
        for settings in ["garbage_collection_threshold:0.3", "expandable_segments:True"] {
            repeated(policies(&["0.1"]), settings, ALLOWED);
        }
        repeated(TracedProgram::python("torch/expandable.py", &[]), "", None);
    }

    #[test]
    fn every_setting_is_replayed() {
        for settings in PLAIN {
            let found = repeated(policies(&[]), settings, None);
            assert!(found.agreement.blocks > 300 && found.agreement.segments > 10, "{settings}: {:?}", found.agreement);
        }
    }

    /// PyTorch's policy of other years.
    fn replayed(versions: Versions) {
        for settings in ["", "expandable_segments:True", "max_split_size_mb:40,roundup_power2_divisions:4"] {
            repeated(policies(&[]).on(versions), settings, None);
        }
    }

    memtrace_tests::for_each_version! { mod versions: replayed }

    /// Compares the replay's prediction for other settings with runs that use them.
    #[test]
    fn the_reserved_memory_of_other_settings_is_predicted() {
        for program in [policies(&[]), TracedProgram::python("torch/fragmentation.py", &[])] {
            let found = repeated(program.clone(), "", None);
            assert_eq!(found.outcomes.len(), 4);
            for outcome in &found.outcomes {
                let name = outcome.setting.name;
                let run = program.clone().env(CONF, name).run();
                let real = process(&run, |process| peak_reserved(&torch_events(process.recording())));
                assert_eq!(
                    outcome.peak_reserved, real,
                    "{name}: reserved at most (left: replayed, right: the real run)"
                );
            }
        }
    }

    /// After an out-of-memory error, the replay predicts which settings would have fitted. A run with them confirms it.
    #[test]
    fn a_setting_that_is_predicted_to_fit_fits() {
        let program = TracedProgram::python("torch/fragmentation.py", &[]).env("SIMCUDA_MEMORY", "1200M");
        let run = program.run();
        assert_eq!(run.output.status.code(), Some(1));
        let found = process(&run, |process| {
            let events = torch_events(process.recording());
            let oom = events.iter().find(|e| e.action == Action::Oom).expect("an error");
            let until: Vec<Event> = events.iter().take_while(|e| e.seq < oom.seq).copied().collect();
            let reserved: u64 = until.iter().filter(is_segment).fold(0, |sum, e| match e.action {
                Action::SegmentAlloc => sum + e.size,
                _ => sum - e.size,
            });
            let question = WhatIfQuery { limit: reserved + oom.addr, oom: Some(oom.seq), ..question("") };
            replay(process.recording(), question)
        });
        assert_eq!(found.agreement.difference, None);
        let (mut fitted, mut did_not) = (0, 0);
        for outcome in &found.outcomes {
            let real = program.clone().env(CONF, outcome.setting.name).run();
            let step = |run: &Run| String::from_utf8_lossy(&run.output.stderr).contains("OutOfMemoryError");
            println!("{outcome:?}: {:?}", real.output.status);
            match outcome.fits {
                Some(true) => fitted += 1,
                Some(false) => did_not += 1,
                None => {}
            }
            if outcome.fits == Some(false) {
                assert!(step(&real), "{} ran out of memory, too", outcome.setting.name);
            }
            if outcome.setting.name.starts_with("expandable") {
                assert_eq!(outcome.fits, Some(true));
                assert!(real.output.status.success(), "{}", String::from_utf8_lossy(&real.output.stderr));
            }
        }
        assert!(fitted > 0 && did_not > 0, "{:?}", found.outcomes);
    }
}
