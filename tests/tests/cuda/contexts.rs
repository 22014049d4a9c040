//! Contexts that programs create in every way: each is recorded where it was created, with what it takes.

use memtrace_tests::programs::{ProgramFolder, with_simcuda};
use memtrace_tests::snapshots::summary;
use memtrace_tests::traced_program::events;
use memtrace_trace::api::Api;
use memtrace_trace::event::{Action, UsageOccasion};
use memtrace_trace::ids::StackId;

const MIB: u64 = 1 << 20;
/// The memory that a context uses here, in MiB.
const CONTEXT: u64 = 527;

/// `lookup` is the way in which the program finds the functions.
#[track_caller]
fn contexts_are_recorded(lookup: &str) {
    let programs = ProgramFolder::new();
    let program = programs.program("cuda/contexts.c", "program", &["-rdynamic"]);
    let traced = with_simcuda(&[program.as_os_str(), lookup.as_ref()])
        .with_device_usage()
        .env("SIMCUDA_CONTEXT", (CONTEXT * MIB).to_string())
        .env("SIMCUDA_DEVICES", "2");
    let alone = traced.run_alone();
    let run = traced.run();
    run.assert_ended_well();
    let stdout = String::from_utf8_lossy(&run.output.stdout);
    assert_eq!(String::from_utf8_lossy(&alone.stdout), stdout);
    // The driver's own figure: four contexts and the allocation.
    let used = 4 * CONTEXT + 64;
    assert!(stdout.contains(&format!("cuDevicePrimaryCtxRetain again 0: {used} MiB in use (0)")), "{stdout}");
    let trace = run.trace();
    let readings: Vec<_> = events(&trace)
        .iter()
        .filter(|e| e.action == Action::DeviceUsage)
        .map(|e| {
            let symbol = e.api.symbol().unwrap_or("");
            (symbol, e.device, e.occasion(), e.used_bytes() / MIB, e.stack != StackId::NONE)
        })
        .collect();
    use UsageOccasion::{Allocated, ContextCreated, ContextRequested};
    let at = |context: u64| context * CONTEXT + 64;
    let [v3, primary, v1] = [Api::cuCtxCreate_v3, Api::cuDevicePrimaryCtxRetain, Api::cuCtxCreate]
        .map(|api| api.symbol().expect("a symbol"));
    let expected = [
        // Two contexts of before the first allocation.
        ("cuCtxCreate_v4", 0, ContextCreated, 2 * CONTEXT, false),
        ("cuMemAlloc_v2", 0, Allocated, at(2), false),
        (v3, 0, ContextRequested, at(2), false),
        (v3, 0, ContextCreated, at(3), true),
        (primary, 0, ContextRequested, at(3), false),
        (primary, 0, ContextCreated, at(4), true),
        (v1, 1, ContextCreated, CONTEXT, true),
    ];
    assert_eq!(readings, expected, "{lookup}");
    let summary = summary(&run);
    assert_eq!(summary["losses"], serde_json::json!({}), "{lookup}");
    let end = &summary["devices"][0]["device_memory"]["at_end"];
    assert_eq!(end["used_bytes"], used * MIB, "{end}");
    let parts = end["parts"].as_array().expect("parts").iter();
    let parts: Vec<_> = parts.map(|part| (part["name"].as_str(), part["bytes"].as_u64().map(|b| b / MIB))).collect();
    let expected = [("CUDA contexts and other processes", 4 * CONTEXT), ("program", 64), ("unattributed", 0)];
    assert_eq!(parts, expected.map(|(name, mib)| (Some(name), Some(mib))), "{lookup}");
}

#[test]
fn contexts_of_functions_found_by_dlsym_are_recorded() {
    contexts_are_recorded("dlsym");
}

#[test]
fn contexts_of_functions_found_by_cu_get_proc_address_are_recorded() {
    contexts_are_recorded("entry");
}
