//! Requests for memory that CUDA refuses to other callers than PyTorch's allocator.

use std::process::Command;

use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, memtrace};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn summary(run: &Run) -> Value {
    let text = std::fs::read_to_string(run.path().join("summary.json"));
    let text = text.unwrap_or_else(|e| panic!("{e}: {:?}", run.output));
    serde_json::from_str(&text).expect("JSON")
}

/// Runs `device_memory/refused.py` on a device of 8 GiB. Returns the run, the refused requests, and the report with its
/// spaces collapsed.
fn refused(what: &str) -> (Run, Vec<Value>, String) {
    let run = TracedProgram::python("device_memory/refused.py", &[what]).env("SIMCUDA_MEMORY", "8G").run();
    let requests = summary(&run)["processes"][0]["refused_requests"].as_array().expect("a list").clone();
    let report = String::from_utf8_lossy(&run.output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
    (run, requests, report)
}

/// Whether `memtrace check --no-oom` passes, and its output.
fn passes(run: &Run) -> (bool, String) {
    let command = Command::new(memtrace()).args(["check", "--no-oom", "--allow-incomplete"]).arg(run.path()).output();
    let output = command.expect("memtrace check");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn memory_that_pytorch_caches_would_have_served_another_library() {
    let (run, requests, report) = refused("cached");
    run.assert_ended_well();
    let [one] = &requests[..] else { panic!("{requests:?}") };
    let free: u64 = String::from_utf8_lossy(&run.output.stdout).trim().parse().expect("the free bytes");
    assert_eq!(one["device_free_bytes"], free);
    assert_eq!((&one["requested_bytes"], &one["pytorch_releasable_bytes"]), (&json!(5 * GIB), &json!(4 * GIB)));
    assert_eq!(
        (&one["caller"], &one["function"], &one["fatal"]),
        (&json!("ctypes"), &json!("cuMemAlloc"), &json!(false))
    );
    assert!(report.contains("! CUDA out of memory on GPU 0: ctypes was refused 5.00 GiB (cuMemAlloc), "), "{report}");
    let help = "PyTorch cached 4.00 GiB that it did not use: call torch.cuda.empty_cache() before the request.";
    assert!(report.contains(help) && !report.contains("No leaks or misuse found"), "{report}");
    let (passed, text) = passes(&run);
    assert!(!passed && text.contains("ctypes was refused 5.00 GiB"), "{text}");
}

#[test]
fn requests_that_the_program_repeats_with_success_are_no_errors() {
    // The first follows the help of the program above.
    for what in ["served", "smaller"] {
        let (run, requests, report) = refused(what);
        run.assert_ended_well();
        assert!(requests.is_empty(), "{what}: {requests:?}");
        assert!(report.contains("No leaks or misuse found"), "{report}");
        assert!(passes(&run).0);
    }
}

#[test]
fn a_refused_request_that_ends_the_program_is_its_verdict() {
    let (run, requests, report) = refused("fatal");
    assert_eq!(run.output.status.code(), Some(1));
    assert_eq!((requests.len(), &requests[0]["fatal"]), (1, &json!(true)), "{requests:?}");
    assert!(report.contains("x CUDA out of memory on GPU 0: ctypes was refused 5.00 GiB"), "{report}");
    assert!(report.contains("In use at that time: PyTorch 5.00 GiB"), "{report}");
    let section = Command::new(memtrace()).arg("report").arg(run.path()).args(["--section", "oom"]).output();
    let section = String::from_utf8(section.expect("memtrace report").stdout).expect("text");
    assert!(section.contains("ctypes was refused 5.00 GiB") && section.contains("2.00 GiB short"), "{section}");
}

#[test]
fn host_memory_has_no_device() {
    let (_, requests, report) = refused("pinned");
    assert_eq!((requests.len(), &requests[0]["device"]), (1, &json!(-1)), "{requests:?}");
    assert!(report.contains("CUDA out of memory: ctypes was refused 1024 PiB of page-locked host memory"), "{report}");
}

#[test]
fn a_c_program_names_its_function() {
    let programs = ProgramFolder::new();
    let program =
        programs.program("cuda/refused.c", "tables", &[vec!["-g".to_owned()], linked_with("libcudart.so.12")].concat());
    let run = with_simcuda(&[&program]).with_device_usage().env("SIMCUDA_MEMORY", "512M").run();
    assert_eq!(run.output.status.code(), Some(3), "{:?}", run.output);
    let requests = summary(&run)["processes"][0]["refused_requests"].as_array().expect("a list").clone();
    let [one] = &requests[..] else { panic!("{requests:?}") };
    assert_eq!((&one["caller"], &one["function"]), (&json!("tables"), &json!("cudaMalloc")));
    assert!(one["requested_at"]["location"].as_str().expect("a location").contains("make_table"), "{one}");
    assert_eq!(one["details"][1], "The device has 512 MiB in all.");
    assert!(!passes(&run).0);
}
