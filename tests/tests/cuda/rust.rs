//! Rust programs that use CUDA by the crate cudarc, in each of its ways to find the driver. Every call is in the
//! ledger, and the stacks have the lines that the crate `backtrace` sees in the program.

use std::path::Path;
use std::process::Command;

use memtrace_analysis::open_run;
use memtrace_tests::ledger::{assert_equal, ours, read};
use memtrace_tests::programs::{rust_program, simcuda, with_simcuda};
use memtrace_tests::traced_program::{Run, events, packages, root};
use memtrace_trace::api::Api;

/// The lines of the program that called the function which makes each allocation, innermost first.
fn recorded_callers(run: &Run) -> Vec<String> {
    let recorded = open_run(run.path()).expect("the run");
    let definitions = recorded.processes()[0].definitions();
    let mut callers = Vec::new();
    for event in events(&run.trace()) {
        if !matches!(event.api, Api::cuMemAllocAsync | Api::cuMemHostAlloc) {
            continue;
        }
        let frames = definitions.walk_ids(event.stack).filter_map(|(_, id)| definitions.frame(id));
        let own = frames.filter(|frame| frame.filename.ends_with("rust/src/driver.rs"));
        let own = own.skip_while(|frame| !frame.name.contains("witnessed")).skip(1);
        let lines: Vec<_> = own.map(|frame| frame.line.to_string()).collect();
        // cudarc allocates for itself too.
        if !lines.is_empty() {
            callers.push(lines.join(" "));
        }
    }
    callers.sort_unstable();
    callers
}

/// A folder with the libraries that the ways of linking need.
fn toolkit(feature: &str) -> std::path::PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
    let toolkit = target.join("rust-programs").join(feature).join("toolkit");
    std::fs::create_dir_all(toolkit.join("lib")).expect("a folder");
    let cpp = Command::new("gcc").arg("-print-file-name=libstdc++.a").output().expect("gcc");
    let runtime = packages(&["nvidia-cuda-runtime==13.0.96"]);
    for library in [
        Path::new(String::from_utf8_lossy(&cpp.stdout).trim()),
        &Path::new(&runtime).join("nvidia/cu13/lib/libcudart_static.a"),
        &simcuda().join("libcuda.so"),
    ] {
        let link = toolkit.join("lib").join(library.file_name().expect("a name"));
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(library, link).expect("a link");
    }
    toolkit
}

#[track_caller]
fn check(feature: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = folder.path().join("ledger");
    let program = rust_program("driver", feature, &toolkit(feature));
    let run = with_simcuda(&[&program]).env("SIMCUDA_LEDGER", &ledger).run();
    run.assert_ended_well();
    let calls = read(&ledger);
    assert_equal(&ours(&run.trace()), &calls);
    assert!(calls.values().map(Vec::len).sum::<usize>() > 40, "{calls:?}");

    let printed = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let mut witnessed: Vec<String> = printed.lines().map(str::to_owned).collect();
    witnessed.sort_unstable();
    assert!(witnessed.len() == 23 && witnessed.iter().all(|lines| !lines.is_empty()), "{printed}");
    assert_eq!(recorded_callers(&run), witnessed);
}

#[test]
fn cudarc_that_loads_the_driver_at_run_time() {
    check("loading");
}

mod exhaustive {
    use super::*;

    #[test]
    fn cudarc_in_its_other_ways() {
        check("linking");
        check("static");
    }
}
