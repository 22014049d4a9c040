//! Opens the snapshot in the run folder with `python -m torch.cuda._memory_viz`. `scripts/viewer-check` tests it with
//! PyTorch's viewer.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use memtrace_tests::snapshots::{json, pickle, record};
use memtrace_tests::traced_program::{TracedProgram, root};

/// Runs the file of PyTorch's tool as a program, which spares the import of PyTorch.
const RUN_FILE: &str = "
import glob, runpy, sys
[file] = [file for folder in sys.path for file in glob.glob(folder + '/torch/cuda/_memory_viz.py')]
sys.argv[0] = file
runpy.run_path(file, run_name='__main__')
";

/// The output of PyTorch's tool, run with the home folder `home`.
#[track_caller]
fn memory_viz(home: &Path, arguments: &[&OsStr]) -> String {
    let mut command = Command::new(root().join("scripts/sim"));
    command.args(["env", &format!("HOME={}", home.display()), "python", "-c", RUN_FILE]).args(arguments);
    let output = command.output().expect("scripts/sim");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn pytorchs_tools_read_our_snapshots() {
    let recorded = record(TracedProgram::python("torch/mlp.py", &[]));
    let run = &recorded.run;
    let pickle = pickle(run);
    // PyTorch's own figures. It gives no segment back.
    let segments = json(recorded.oracle.path())["segments"].as_array().expect("segments").clone();
    let reserved: u64 = segments.iter().filter_map(|segment| segment["total_size"].as_u64()).sum();
    // The tool draws with Perl's flamegraph.pl, which it would download. A stub prints its input instead.
    let home = run.dir.path().join("home");
    let script = home.join(".cache/flamegraph.pl");
    std::fs::create_dir_all(script.parent().expect("a folder")).expect("a folder");
    std::fs::write(&script, "#!/bin/sh\nexec cat\n").expect("a script");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("its mode");

    let printed = |command: &str| memory_viz(&home, &[command.as_ref(), pickle.as_ref()]);
    let written = |command: &str| {
        let out = run.dir.path().join(command);
        memory_viz(&home, &[command.as_ref(), pickle.as_ref(), "-o".as_ref(), out.as_ref()]);
        std::fs::read_to_string(out).expect("the tool's output")
    };

    // The process has ended: its blocks are free and its segments still exist.
    let stats = printed("stats");
    let total_reserved = format!("total_reserved: {:.1}MiB", reserved as f64 / f64::from(1 << 20));
    for line in [format!("segments: {}", segments.len()), total_reserved] {
        assert!(stats.contains(&line), "{line} in {stats}");
    }
    let trace = printed("trace");
    let calls = |text: &str| trace.matches(text).count();
    assert!(calls(" = cudaMalloc(") == segments.len() && calls("del ") > 100, "{trace}");

    // Folded stacks: frames separated by semicolons, and a size at the end of every line.
    let total = |folded: &str| -> u64 {
        let size = |line: &str| line.rsplit_once(' ').and_then(|(_, size)| size.parse::<u64>().ok());
        folded.lines().map(|line| size(line).unwrap_or_else(|| panic!("no size in {line}"))).sum()
    };
    let (segments, memory) = (written("segments"), written("memory"));
    assert_eq!(total(&segments), reserved, "the segments' blocks fill what was reserved");
    assert!(total(&memory) > 0 && memory.contains("mlp.py:"), "{memory}");
    for command in ["trace_plot", "segment_plot"] {
        let page = written(command);
        assert!(page.contains("<html>") && page.contains("MemoryViz.js"), "{command}");
        // The page contains the whole snapshot.
        let data = page.split('"').max_by_key(|part| part.len()).unwrap_or_default();
        assert!(data.len() > std::fs::metadata(&pickle).expect("the snapshot").len() as usize, "{command}");
    }
}
