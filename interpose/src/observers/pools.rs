//! Reads the figures of JAX's and CuPy's memory pools when the interpreter ends, and switches CuPy's pool off
//! (`--pools read`, `--pools off`).
//!
//! Both libraries take memory from CUDA in large pieces and divide it themselves. Only they know how much of it is in
//! use. A few lines of Python, in `pools.py`, ask them and write `pools-PID.json` into the run folder. They register a
//! function with `atexit` at the first Python stack with a device allocation, so after JAX has registered its own.
//!
//! Constraints: nothing happens without the option. The code runs between two Python instructions of the main thread,
//! and while the interpreter ends. It prints nothing and raises nothing.

use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::options::Pools;

use crate::cpython::api;
use crate::cpython::gil::GilToken;
use crate::recording::errno::RestoreErrno;
use crate::recording::guard::Guard;
use crate::recording::observer::Observer;
use crate::recording::process::Process;
use crate::recording::slot::Slot;

const TOPIC: &str = "python.pools";
const SOURCE: &str = include_str!("pools.py");

/// The part of pools in a recording.
pub(crate) const OBSERVER: Observer = Observer {
    start: Some(|options, _| POOLS.set(PoolReader { is_on: options.pools != Pools::Keep })),
    new_frame: Some(|_, _| {
        if POOLS.get().is_some_and(|pools| pools.is_on) {
            request_install();
        }
    }),
    ..Observer::NONE
};

/// The state of one recording.
struct PoolReader {
    is_on: bool,
}

static POOLS: Slot<PoolReader> = Slot::new();
/// Set once the code has run, and while it is queued. A forked child inherits both the setting and the function.
static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Queues the code.
fn request_install() {
    if IS_REQUESTED.swap(true, Ordering::AcqRel) {
        return;
    }
    let api = api::find().filter(|api| api.is_running());
    if !api.is_some_and(|api| api.queue_call(install)) {
        IS_REQUESTED.store(false, Ordering::Release);
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn install(_: *mut c_void) -> c_int {
    let _errno = RestoreErrno::new();
    let (Some(process), Some(api)) = (Process::if_started(), api::found()) else { return 0 };
    // SAFETY: the interpreter makes pending calls with the GIL.
    let Some(gil) = (unsafe { GilToken::new(api) }) else {
        IS_REQUESTED.store(false, Ordering::Release);
        return 0;
    };
    let is_installed = process.options.folder.as_ref().is_some_and(|folder| {
        let folder = folder.as_os_str().as_bytes().iter().fold(String::new(), |mut hex, byte| {
            // Writing to a `String` does not fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        let is_off = if process.options.pools == Pools::Off { "True" } else { "False" };
        run(gil, &format!("{SOURCE}install(bytes.fromhex('{folder}'), {is_off})\n")).is_some()
    });
    if !is_installed && let Some(mut guard) = Guard::enter() {
        guard.notice(TOPIC, NoticeStatus::Off, "the figures of memory pools are not read: the code cannot run");
    }
    0
}

/// Runs Python code with global variables of its own. `None` if it raises an exception.
fn run(gil: GilToken<'_>, source: &str) -> Option<()> {
    let execute = gil.builtin(c"builtins", c"exec")?;
    let dict = gil.module_attribute(c"builtins", c"dict")?;
    let variables = gil.call(dict.object, &[])?;
    let source = gil.new_str(source)?;
    gil.call(execute, &[source.object, variables.object]).map(drop)
}
