//! `--holders` names the Python objects that hold tensors. The program does not notice it.

use std::collections::BTreeMap;

use memtrace_analysis::passes::Analysis;
use memtrace_analysis::report::{IssueSummary, ProcessSummary};
use memtrace_analysis::rules::RuleId;
use memtrace_analysis::{open_run, summarize};
use memtrace_tests::traced_program::{Run, TracedProgram};
use memtrace_tests::versions::Versions;
use memtrace_trace::definition::ScanOccasion;

const MIB: u64 = 1 << 20;

fn traced(program: &str) -> TracedProgram {
    TracedProgram::python(&format!("holders/{program}"), &[]).option("--holders")
}

/// The result of the last scan: the size in MiB of the memory that each path holds.
fn held_at_the_end(run: &Run) -> BTreeMap<String, u64> {
    let opened = open_run(run.trace().path()).expect("a readable trace");
    let trace = run.trace();
    let last = trace.definitions().holder_scans.last().expect("a scan");
    assert_eq!(last.occasion, ScanOccasion::End);
    assert!(!last.is_partial && last.objects > 10_000, "{last:?}");
    let mut held = BTreeMap::new();
    let process = &opened.processes()[0];
    let analysis = Analysis::of(process.recording(), process.trace_index(), &mut |_| {});
    for change in analysis.objects.holder_changes {
        match change.block.filter(|_| !change.path.is_empty()) {
            Some(block) => held.insert(change.address, (String::from(change.path), block.size / MIB)),
            None => held.remove(&change.address),
        };
    }
    held.into_values().collect()
}

#[track_caller]
fn process(run: &Run) -> ProcessSummary {
    let summary = summarize(&open_run(run.path()).expect("a run"), &mut |_| {}).expect("a summary");
    summary.processes.into_iter().next().expect("a process")
}

#[track_caller]
fn issue(process: &ProcessSummary, rule: RuleId) -> &IssueSummary {
    process.issues.iter().find(|issue| issue.rule == rule).unwrap_or_else(|| panic!("{:#?}", process.issues))
}

/// Every tensor of the script has one path, whichever kind of object holds it.
#[track_caller]
fn check_script(traced: TracedProgram) {
    let run = traced.run();
    run.assert_ended_well();
    // The allocator rounds a large block of an odd size to 2 MiB.
    let mut expected: BTreeMap<String, u64> = [
        ("__main__.trainer.best", 3),
        ("__main__.Cache.entries['prompt']", 4),
        ("__main__.recent[0]", 5),
        ("__main__.recent[1]", 6),
        ("__main__.sample.image", 7),
        ("__main__.count (closure): window[0]", 8),
        ("__main__.loader (frame batches): batch", 9),
        ("__main__.seen{*}", 10),
        ("__main__.nested[0][1][0]", 12),
        ("__main__.halve.keywords['by']", 12),
        ("__main__.namespace.weights[3]", 14),
        ("settings.mask", 14),
        ("__main__.weight", 16),
        ("__main__.weight.grad", 16),
        ("__main__.use.__globals__.kept", 20),
        ("__main__.fallback.__defaults__[0]", 22),
        ("__main__.error.__traceback__ (frame fail): state", 24),
    ]
    .map(|(path, mib)| (path.to_owned(), mib))
    .into();
    // The tensor is at the end of a list with 30,000 links.
    let links = format!("__main__.chain{}", ".next".repeat(100));
    expected.insert(format!("{}...", &links[..400]), 18);
    expected.extend((0..5).map(|at| (format!("__main__.history[{at}]"), 1)));
    expected.extend((0..3).map(|at| (format!("__main__.trainer.state.log['loss'][{at}]"), 2)));
    assert_eq!(held_at_the_end(&run), expected);
}

#[test]
fn every_kind_of_object() {
    check_script(traced("script.py"));
}

/// The locals of the frames that the error has left are those at the failed request.
#[test]
fn local_variables_at_an_out_of_memory_error() {
    let run = traced("memory_error.py").env("SIMCUDA_MEMORY", "512M").run();
    let process = process(&run);
    let holders = process.devices[0].holders.clone().expect("holders");
    let paths: Vec<_> = holders.largest.iter().map(|holder| (&*holder.path, holder.tensors)).collect();
    let (largest, tensors) = paths[0];
    assert_eq!(largest, "frame validate: preds[*]", "{paths:?}");
    assert!(tensors > 10 && holders.largest[0].bytes == tensors * 16 * MIB, "{holders:#?}");
    assert_eq!(holders.largest[0].shape.as_deref(), Some("float32[4096, 1024]"));
    assert!(paths.contains(&("frame main: baseline", 1)), "{paths:?}");
    assert!(paths.contains(&("__main__.model.*", 2)), "{paths:?}");
    let text = std::fs::read_to_string(run.path().join("summary.txt")).expect("summary.txt");
    assert!(
        text.contains("Held by Python objects after the out-of-memory error")
            && text.contains("frame validate: preds[*]"),
        "{text}"
    );
}

/// Tensors that autograd graphs hold are found without making Python objects of their nodes.
#[track_caller]
fn check_kept_graphs(versions: Versions) -> TracedProgram {
    let meter = TracedProgram::python("issues/meter.py", &[]).on(versions);
    let run = meter.clone().option("--holders").run();
    run.assert_ended_well();
    let process = self::process(&run);
    let kept = issue(&process, RuleId::GraphKept);
    let paths: Vec<_> = kept.held_by.iter().map(|holder| &*holder.path).collect();
    assert_eq!(paths.first(), Some(&"frame main: meter.values[*] (its autograd graph)"), "{kept:#?}");
    // The last scan sees 8 graphs. Each saves the input (0.5 MiB), the results of both ReLUs (4 MiB each), and what
    // `abs` needs: the input without one of 1024 columns.
    assert_eq!((kept.held_by[0].tensors, kept.held_by[0].bytes), (8 * 4, 8 * (9 * MIB - 512)), "{kept:#?}");
    assert!(paths.iter().all(|path| path.ends_with(" (its autograd graph)")), "{paths:?}");
    meter
}

/// A training in a function whose lists end with it: the scans during the training have its paths.
#[test]
fn leaks_and_kept_graphs_of_a_function() {
    let run = traced("training.py").run();
    run.assert_ended_well();
    let process = process(&run);
    let is_held = |issue: &&IssueSummary| issue.held_by.iter().any(|holder| holder.path == "frame main: outputs[*]");
    let leak = process.issues.iter().find(is_held).unwrap_or_else(|| panic!("{:#?}", process.issues));
    let held: Vec<_> = leak.held_by.iter().map(|holder| (&*holder.path, holder.bytes)).collect();
    // The last scan of the training is at the beginning of its 19th optimizer step.
    assert_eq!(held[..2], [("frame main: outputs[*]", 18 * 4 * MIB), ("frame main: out", 4 * MIB)], "{leak:#?}");
    assert_eq!(leak.help, None);
    let text = std::fs::read_to_string(run.path().join("summary.txt")).expect("summary.txt");
    assert!(text.contains("Held by   frame main: outputs[*] (18 tensors, 72.0 MiB)"), "{text}");

    let meter = check_kept_graphs(Versions::DEFAULT);
    // Without the option, the issue names it.
    let plain = self::process(&meter.run());
    let kept = issue(&plain, RuleId::GraphKept);
    assert!(kept.held_by.is_empty() && kept.help.as_ref().is_some_and(|help| help.contains("--holders")), "{kept:#?}");
}

/// The number of the collector's objects, reference counts and the output are the same as without memtrace.
#[test]
fn the_program_does_not_notice() {
    let traced = traced("unnoticed.py");
    let alone = traced.run_alone();
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    let run = traced.run();
    run.assert_ended_well();
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), String::from_utf8_lossy(&alone.stdout));
    let trace = run.trace();
    let scans = &trace.definitions().holder_scans;
    assert!(scans.len() > 5, "{scans:#?}");
    let paths: Vec<_> = trace.definitions().holders.iter().map(|holder| holder.path.to_string()).collect();
    for path in [
        "__main__.held",
        "__main__.items[0].value",
        "__main__.table['a']",
        "__main__.keys.keys().tensor",
        "__main__.closure (closure): captured",
        "__main__.default.__defaults__[0]",
        "__main__.error.__traceback__ (frame fail): state",
        "__main__.parameter",
    ] {
        assert!(paths.iter().any(|known| known == path), "{path}: {paths:#?}");
    }
}

mod exhaustive {
    use super::*;

    #[test]
    fn two_runs_are_the_same() {
        let paths = |run: &Run| -> Vec<(u64, String)> {
            let trace = run.trace();
            let scans = trace.definitions().holder_scans.iter();
            let mut facts: Vec<_> =
                scans.map(|scan| (scan.seq, format!("{:?} {}", scan.occasion, scan.is_partial))).collect();
            facts.extend(trace.definitions().holders.iter().map(|holder| (holder.seq, holder.path.to_string())));
            facts
        };
        for program in ["script.py", "training.py"] {
            let traced = traced(program).env("PYTHONHASHSEED", "0").env("OMP_NUM_THREADS", "1");
            assert_eq!(paths(&traced.run()), paths(&traced.run()), "{program}");
        }
    }

    memtrace_tests::for_each_version! { mod versions: on }

    fn on(versions: Versions) {
        check_script(traced("script.py").on(versions));
        check_kept_graphs(versions);
    }
}
