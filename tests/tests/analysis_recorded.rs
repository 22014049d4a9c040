//! Real programs over the simulated CUDA: our snapshot against PyTorch's own of the same process, dictionary for
//! dictionary, and through PyTorch's own tools.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::load::{Manifest, MemoryRecording, Process};
use memtrace_tests::victim::{Victim, events, root};
use memtrace_trace::event::{Action, Source};
use memtrace_trace::file::Reader;

/// The recording up to the moment at which PyTorch's snapshot was taken.
fn until_the_oracle_looked(reader: &Reader) -> MemoryRecording {
    let mut events = events(reader);
    let looked = events.iter().position(|e| e.action == Action::Snapshot).expect("the oracle's snapshot");
    // Each device takes its own snapshot, one after the other.
    events.truncate(looked + 1);
    events.retain(|e| e.source != Source::Torch || e.action != Action::Snapshot);
    MemoryRecording {
        definitions: reader.definitions().clone(),
        events,
        clock: reader.clock_points().to_vec(),
        info: reader.info().to_owned(),
        ..MemoryRecording::default()
    }
}

/// Runs a program, compares the snapshots; gives what the comparison said.
#[track_caller]
fn compare(victim: Victim) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    let run = victim.env("MEMTRACE_TEST_ORACLE", file.path()).run();
    run.assert_ended_well();
    let process =
        Process::new(Path::new("1.mtr"), Box::new(until_the_oracle_looked(&run.trace())), &Manifest::default());
    let ours = run.dir.path().join("ours.pickle");
    snapshot(&process, std::fs::File::create(&ours).unwrap(), &SnapshotOptions::default(), &mut |_| {}).unwrap();
    let compare = root().join("tests/golden/snapshots/compare.py");
    let output = Command::new("python3").arg(compare).arg(&ours).arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn mlp() {
    compare(Victim::python("torch/mlp.py", &[]));
}

#[test]
fn resnet50() {
    compare(Victim::python("torch/resnet50.py", &[]));
}

#[test]
fn transformer_under_autocast() {
    compare(Victim::python("torch/transformer_amp.py", &[]));
}

#[test]
fn streams_with_deferred_frees() {
    compare(Victim::python("torch/streams.py", &[]).env("SIMCUDA_KERNEL_US", "100"));
}

#[test]
fn expandable_segments() {
    compare(Victim::python("torch/expandable.py", &[]).env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"));
}

#[test]
fn out_of_memory_with_retry() {
    compare(Victim::python("torch/oom_retry.py", &[]).env("SIMCUDA_MEMORY", "8G"));
}

#[test]
fn two_devices_and_threads() {
    compare(Victim::python("torch/two_devices.py", &[]).env("SIMCUDA_DEVICES", "2"));
}

#[test]
fn backward_shows_what_anomaly_mode_shows() {
    let said = compare(Victim::python("torch/backward.py", &[]));
    assert!(!said.contains(" 0 forward_frames"), "{said}");
}

/// What the launcher left in the run folder goes through `python -m torch.cuda._memory_viz`.
#[test]
fn pytorchs_own_tools_take_the_file() {
    let run = Victim::python("torch/mlp.py", &[]).run();
    run.assert_ended_well();
    let pickle = std::fs::read_dir(run.path())
        .unwrap()
        .filter_map(|e| Some(e.ok()?.path()))
        .find(|p| p.extension().is_some_and(|e| e == "pickle"))
        .expect("a snapshot in the run folder");
    // The tools download Perl's flame graph script unless it is there; what they feed it is what matters here.
    let home = run.dir.path().join("home/.cache");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::write(home.join("flamegraph.pl"), "#!/bin/sh\ncat\n").unwrap();
    std::fs::set_permissions(home.join("flamegraph.pl"), std::fs::Permissions::from_mode(0o755)).unwrap();
    for (command, expected) in
        [("stats", "total_reserved"), ("trace", "cudaMalloc"), ("trace_plot", "<html"), ("segment_plot", "<html")]
    {
        let mut tool = Command::new(root().join("scripts/sim"));
        let out = run.dir.path().join(command);
        let set_home = format!("HOME={}", run.dir.path().join("home").display());
        tool.args(["env", &set_home, "python", "-m", "torch.cuda._memory_viz", command]).arg(&pickle);
        if !matches!(command, "stats" | "trace") {
            tool.arg("-o").arg(&out);
        }
        let output = tool.output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        let text = match std::fs::read_to_string(&out) {
            Ok(text) => text,
            Err(_) => String::from_utf8_lossy(&output.stdout).into_owned(),
        };
        assert!(text.to_lowercase().contains(&expected.to_lowercase()), "{command}: {text:.300}");
    }
}
