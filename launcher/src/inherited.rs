//! Captures the process state with which the launcher was started, and restores it for the command.
//!
//! Rust's runtime changes two things before `main`. It ignores SIGPIPE, and it opens `/dev/null` on closed standard
//! descriptors. [`capture_early`] runs before the runtime and records the original state. It also sets the umask, so
//! that only this user can read and change what any command of memtrace creates. The launcher itself changes
//! the signal mask, SIGCHLD, SIGXFSZ and the limit of open files. [`InheritedState::restore`] restores all of them in
//! the child, before exec. rustix makes the system calls itself, so its functions may be called there.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};

/// The permission bits that files and folders of memtrace never have, unless a program that it runs creates them.
const UMASK: u32 = 0o077;

static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Bit `n` is set when descriptor `n` (0, 1, 2) was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);
/// The umask with which this process was started.
static INHERITED_UMASK: AtomicU32 = AtomicU32::new(UMASK);

#[used]
#[unsafe(link_section = ".init_array")]
static CAPTURE_EARLY: extern "C" fn() = capture_early;

extern "C" fn capture_early() {
    SIGPIPE_IGNORED.store(is_ignored(libc::SIGPIPE), Ordering::Relaxed);
    let closed = (0..3).filter(|fd| {
        // SAFETY: `fcntl(F_GETFD)` takes integers and changes nothing, whether the descriptor is open or not.
        unsafe { libc::fcntl(*fd, libc::F_GETFD) == -1 }
    });
    CLOSED.store(closed.fold(0, |bits, fd| bits | 1 << fd), Ordering::Relaxed);
    INHERITED_UMASK.store(umask(Mode::from_raw_mode(UMASK)).as_raw_mode(), Ordering::Relaxed);
}

/// Starts a program with the umask with which this process was started.
pub(crate) fn restore_umask(command: &mut Command) {
    // SAFETY: `umask` is one system call, which may be made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            set_inherited_umask();
            Ok(())
        })
    };
}

fn set_inherited_umask() {
    umask(Mode::from_raw_mode(INHERITED_UMASK.load(Ordering::Relaxed)));
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null new action only queries. `action` is valid for writes and zero-initialized, and `sigaction` fills
    // it on success.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn set_disposition(signal: libc::c_int, ignored: bool) {
    // SAFETY: `SIG_IGN` and `SIG_DFL` install no handler, so no code of ours can run in a signal context.
    unsafe { libc::signal(signal, if ignored { libc::SIG_IGN } else { libc::SIG_DFL }) };
}

/// The process state to restore.
#[derive(Clone, Copy)]
pub(crate) struct InheritedState {
    mask: libc::sigset_t,
    sigpipe_ignored: bool,
    sigchld_ignored: bool,
    sigxfsz_ignored: bool,
    closed: u8,
    open_files: Rlimit,
}

impl InheritedState {
    /// Captures the state and changes what the launcher needs.
    ///
    /// SIGCHLD must not be ignored, or the command's status is lost. SIGXFSZ must be ignored, so that a file at its
    /// size limit gives an error instead of a signal. The limit of open files is raised, because each traced process
    /// needs two descriptors. Call this once, from `main`'s thread.
    pub(crate) fn capture_and_adjust() -> InheritedState {
        let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `mask` is valid for writes. It is zero-initialized, so `assume_init` is sound even if the call fails.
        let mask = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
            mask.assume_init()
        };
        let open_files = getrlimit(Resource::Nofile);
        let state = InheritedState {
            mask,
            sigpipe_ignored: SIGPIPE_IGNORED.load(Ordering::Relaxed),
            sigchld_ignored: is_ignored(libc::SIGCHLD),
            sigxfsz_ignored: is_ignored(libc::SIGXFSZ),
            closed: CLOSED.load(Ordering::Relaxed),
            open_files,
        };
        set_disposition(libc::SIGCHLD, false);
        set_disposition(libc::SIGXFSZ, true);
        // If the call is refused, the old limit stays, which is acceptable.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: open_files.maximum, maximum: open_files.maximum });
        state
    }

    /// Restores the captured state. It runs in the child between fork and exec, so it makes only async-signal-safe
    /// calls.
    pub(crate) fn restore(&self) -> io::Result<()> {
        set_disposition(libc::SIGPIPE, self.sigpipe_ignored);
        set_disposition(libc::SIGCHLD, self.sigchld_ignored);
        set_disposition(libc::SIGXFSZ, self.sigxfsz_ignored);
        for fd in (0..3).filter(|fd| self.closed & 1 << fd != 0) {
            // SAFETY: `fd` is the runtime's `/dev/null` on a standard descriptor that was closed. The program after
            // exec must see it closed, and no code here uses it.
            unsafe { libc::close(fd) };
        }
        let _ = setrlimit(Resource::Nofile, self.open_files);
        set_inherited_umask();
        // SAFETY: `self.mask` is the initialized mask that this process had at its start. The null pointer asks for no
        // old mask.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// The signal mask with which this process was started.
    pub(crate) fn mask(&self) -> &libc::sigset_t {
        &self.mask
    }
}
