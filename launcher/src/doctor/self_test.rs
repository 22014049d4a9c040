//! An end-to-end test of the recorder.
//!
//! This program, started under the recorder, calls one of its hooks with made-up blocks. The trace must contain exactly
//! these calls.

use std::ffi::{CStr, OsString, c_void};
use std::path::Path;
use std::time::Duration;

use memtrace_trace::event::{Action, Event, Source};

use super::diagnosis::Finding;
use super::probe;
use super::units::count;

/// The mangled name of `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`. Only this hook
/// works without its original function.
pub(super) const REPORT: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
/// `c10::Device` with type CPU and no index.
pub(super) const CPU: u16 = 0xff00;
/// The number of blocks that are allocated and freed.
const BLOCKS: u64 = 2000;
const PATIENCE: Duration = Duration::from_secs(10);
/// The exit code of a traced process in which the library is not loaded.
const NOT_THERE: u8 = 3;

/// The address and the size in bytes of block `i`.
fn block(i: u64) -> (u64, u64) {
    (0x7000_0000_0000 + i * 4096, 1 + i * 37 % 4096)
}

/// The part of the traced process: `memtrace doctor --victim`. Returns its exit code.
pub(crate) fn victim() -> u8 {
    type Report = unsafe extern "C" fn(*mut c_void, i64, usize, usize, u16);
    // SAFETY: `REPORT` is a NUL-terminated string, and the result is checked for null. The recorder's library exports
    // this name with the type `Report`.
    let report = unsafe {
        let report = libc::dlsym(libc::RTLD_DEFAULT, REPORT.as_ptr());
        if report.is_null() {
            return NOT_THERE;
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
pub(super) fn self_test(folder: &Path) -> Finding {
    let what = "self-test";
    match run(folder) {
        Ok(found) => Finding::ok(what, found),
        Err((why, mend)) => Finding::off(what, why, mend),
    }
}

fn run(folder: &Path) -> Result<String, (String, String)> {
    let fail = |why: String, mend: &str| Err((why, mend.to_owned()));
    let exe = std::env::current_exe().map(OsString::from);
    let command = exe.map(|exe| [exe, "doctor".into(), "--victim".into()]);
    let probed = match command.and_then(|command| probe::record(folder, &command, PATIENCE)) {
        Ok(probed) => probed,
        Err(e) => return fail(format!("cannot start: {e}"), "see the other lines"),
    };
    match probed.status.and_then(|s| s.code()) {
        Some(0) => {}
        Some(code) if code == i32::from(NOT_THERE) => {
            return fail(
                "the loader loads no library into a child: LD_PRELOAD has no effect here".to_owned(),
                "start memtrace without privileges (setuid, capabilities) and outside sandboxes that clear LD_PRELOAD",
            );
        }
        _ => return fail(probed.complaint(), "mend what it says; memtrace -- true shows it too"),
    }
    let traces = probe::traces(&folder.join("run"));
    let [trace] = traces.as_slice() else {
        return fail(
            "the library was loaded, and nothing arrived: it did not reach the launcher".to_owned(),
            "allow Unix sockets between processes in the sandbox; see the lines about shared memory and sockets",
        );
    };
    let mut events: Vec<Event> = Vec::new();
    for block in trace.events() {
        match block {
            Ok(block) => events.extend(block),
            Err(e) => return fail(format!("the trace cannot be read back: {e:?}"), "look for errors of the disk"),
        }
    }
    let lost = trace.end().map_or(0, |e| e.lost);
    let expected = [Action::Alloc, Action::FreeCompleted]
        .into_iter()
        .flat_map(|action| (0..BLOCKS).map(block).map(move |(addr, size)| (Source::TorchCpu, action, addr, size)));
    if lost > 0 || !events.iter().map(|e| (e.source, e.action, e.addr, e.size)).eq(expected) {
        return fail(
            format!("{} of {} events arrived as they were made, {lost} were lost", events.len(), 2 * BLOCKS),
            "give the machine a free core and try again; if it stays, report it with this page",
        );
    }
    let with_stack = events.iter().filter(|e| !e.stack.is_none()).count() as u64;
    if with_stack < 2 * BLOCKS {
        return fail(
            format!("native stacks are missing at {} of {} events", 2 * BLOCKS - with_stack, 2 * BLOCKS),
            "report it with this page",
        );
    }
    Ok(format!("{} recorded, stored and read back, each with its native stack", count(2 * BLOCKS, "event")))
}
