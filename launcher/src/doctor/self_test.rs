//! An end-to-end test of the recorder.
//!
//! This program, started under the recorder, calls one of its hooks with made-up blocks. The trace must contain exactly
//! these calls.

use std::ffi::{CStr, OsString, c_void};
use std::path::Path;
use std::time::Duration;

use memtrace_trace::event::{Action, Event, Source};

use super::probe;
use super::report::Check;
use super::units::count;

/// The mangled name of `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`. Only this hook
/// works without its original function.
pub(super) const REPORT: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
/// `c10::Device` with type CPU and no index.
pub(super) const CPU: u16 = 0xff00;
/// The number of blocks that are allocated and freed.
const BLOCKS: u64 = 2000;
const TIMEOUT: Duration = Duration::from_secs(10);
/// The exit code of a traced process in which the library is not loaded.
const NOT_LOADED: u8 = 3;

/// The address and the size in bytes of block `i`.
fn block(i: u64) -> (u64, u64) {
    (0x7000_0000_0000 + i * 4096, 1 + i * 37 % 4096)
}

/// The program that the self-test records: `memtrace doctor --self-test-program`. Returns its exit code.
pub(crate) fn self_test_program() -> u8 {
    type Report = unsafe extern "C" fn(*mut c_void, i64, usize, usize, u16);
    // SAFETY: `REPORT` is a NUL-terminated string, and the result is checked for null. The recorder's library exports
    // this name with the type `Report`.
    let report = unsafe {
        let report = libc::dlsym(libc::RTLD_DEFAULT, REPORT.as_ptr());
        if report.is_null() {
            return NOT_LOADED;
        }
        std::mem::transmute::<*mut c_void, Report>(report)
    };
    for sign in [1, -1] {
        for (addr, size) in (0..BLOCKS).map(block) {
            // SAFETY: `report` is the recorder's hook. It records the address and never dereferences it.
            unsafe { report(std::ptr::without_provenance_mut(addr as usize), sign * size as i64, 0, 0, CPU) };
        }
    }
    0
}

/// Runs the traced process and compares the trace. `folder` is empty and may be written to.
pub(super) fn self_test(folder: &Path) -> Check {
    let name = "Self-test";
    match run(folder) {
        Ok(detail) => Check::ok(name, detail),
        Err((reason, fix)) => Check::failed(name, reason, fix),
    }
}

fn run(folder: &Path) -> Result<String, (String, String)> {
    let fail = |reason: String, fix: &str| Err((reason, fix.to_owned()));
    let exe = std::env::current_exe().map(OsString::from);
    let command = exe.map(|exe| [exe, "doctor".into(), "--self-test-program".into()]);
    let result = match command.and_then(|command| probe::record(folder, &command, TIMEOUT)) {
        Ok(result) => result,
        Err(e) => return fail(format!("cannot start: {e}"), "see the other checks"),
    };
    match result.status.and_then(|s| s.code()) {
        Some(0) => {}
        Some(code) if code == i32::from(NOT_LOADED) => {
            return fail(
                "the loader did not load the library: LD_PRELOAD has no effect here".to_owned(),
                "start memtrace without privileges (setuid, capabilities), outside of sandboxes that remove LD_PRELOAD",
            );
        }
        _ => {
            let fix = result.help().unwrap_or("run `memtrace -- true` to see the error");
            return fail(result.failure_reason(), fix);
        }
    }
    let traces = probe::traces(&folder.join("run"));
    let [trace] = traces.as_slice() else {
        return fail(
            "the library was loaded but did not reach the launcher".to_owned(),
            "allow Unix sockets between processes in the sandbox; see the checks of shared memory and sockets",
        );
    };
    let mut events: Vec<Event> = Vec::new();
    for block in trace.events() {
        match block {
            Ok(block) => events.extend(block),
            Err(e) => return fail(format!("cannot read the trace: {e:?}"), "check the disk for errors"),
        }
    }
    let lost = trace.end().map_or(0, |e| e.lost);
    let expected = [Action::Alloc, Action::FreeCompleted]
        .into_iter()
        .flat_map(|action| (0..BLOCKS).map(block).map(move |(addr, size)| (Source::TorchCpu, action, addr, size)));
    if lost > 0 || !events.iter().map(|e| (e.source, e.action, e.addr, e.size)).eq(expected) {
        return fail(
            format!("{} of {} events arrived unchanged, {lost} were lost", events.len(), 2 * BLOCKS),
            "free a CPU core and try again; if this stays, report it with this output",
        );
    }
    let with_stack = events.iter().filter(|e| !e.stack.is_none()).count() as u64;
    if with_stack < 2 * BLOCKS {
        return fail(
            format!("{} of {} events have no native stack", 2 * BLOCKS - with_stack, 2 * BLOCKS),
            "report it with this output",
        );
    }
    Ok(format!("{} recorded, written and read back, each with a native stack", count(2 * BLOCKS, "event")))
}
