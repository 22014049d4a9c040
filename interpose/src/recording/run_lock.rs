//! One lock for all processes of the run: a file in the run folder. The kernel releases it when its holder ends.

use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use memtrace_trace::options::LIMIT_LOCK_FILE;

use super::bounded_wait::BoundedWait;
use super::cancellation::NoCancellation;
use super::process::session_options;
use super::seccomp;

/// How long a thread waits for the others. A process that is stopped while it holds the lock does not stop the run.
const WAIT_LIMIT: Duration = Duration::from_secs(5);

/// The lock, held until it is dropped.
pub(crate) struct RunLock {
    file: c_int,
    /// `open` and `close` would end a thread whose cancellation was requested.
    _no_cancellation: NoCancellation,
}

impl RunLock {
    /// Takes the lock. `None` if the others hold it too long, or where the run folder cannot be reached: then the caller
    /// goes on without it.
    pub(crate) fn take() -> Option<RunLock> {
        let options = session_options()?;
        if !is_permitted(options.filters) {
            return None;
        }
        let path = CString::new(options.folder?.join(LIMIT_LOCK_FILE).as_os_str().as_bytes()).ok()?;
        let no_cancellation = NoCancellation::new();
        // SAFETY: `path` is a C string.
        let file = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC, 0o600) };
        if file < 0 {
            return None;
        }
        let lock = RunLock { file, _no_cancellation: no_cancellation };
        let mut wait = BoundedWait::new(WAIT_LIMIT);
        loop {
            // SAFETY: `flock` takes no pointers. Each opening of the file is a holder of its own, so threads exclude
            // each other too.
            if unsafe { libc::syscall(libc::SYS_flock, file, libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                return Some(lock);
            }
            if !wait.pause() {
                return None;
            }
        }
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this value's own.
        unsafe { libc::close(self.file) };
    }
}

/// Whether the program has no seccomp filter of its own. It is examined once.
fn is_permitted(launcher_filters: u32) -> bool {
    const NO: u8 = 1;
    const YES: u8 = 2;
    static IS_PERMITTED: AtomicU8 = AtomicU8::new(0);
    if IS_PERMITTED.load(Ordering::Relaxed) == 0 {
        let is_permitted = !seccomp::has_later_filter(launcher_filters);
        IS_PERMITTED.store(if is_permitted { YES } else { NO }, Ordering::Relaxed);
    }
    IS_PERMITTED.load(Ordering::Relaxed) == YES
}
