//! What this process was started with and what the command must be started with in turn.
//!
//! Rust's runtime changes three things before `main`: it ignores SIGPIPE, and it opens `/dev/null` on standard descriptors
//! that were closed. [`capture`] runs before it and remembers. We change a few more ourselves (signal mask, SIGCHLD, SIGXFSZ,
//! the limit of open files); [`State::restore`] puts all of them back, in the child, before exec.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Bit `n` is set when descriptor `n` (0, 1, 2) was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

#[used]
#[unsafe(link_section = ".init_array")]
static CAPTURE: extern "C" fn() = capture;

extern "C" fn capture() {
    SIGPIPE_IGNORED.store(is_ignored(libc::SIGPIPE), Ordering::Relaxed);
    let closed = (0..3).filter(|fd| {
        // SAFETY: asking for the flags of a descriptor, open or not, changes nothing.
        unsafe { libc::fcntl(*fd, libc::F_GETFD) == -1 }
    });
    CLOSED.store(closed.fold(0, |bits, fd| bits | 1 << fd), Ordering::Relaxed);
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null new action only asks; the old one is filled in.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn set_disposition(signal: libc::c_int, ignored: bool) {
    // SAFETY: SIG_IGN and SIG_DFL run no code of ours.
    unsafe { libc::signal(signal, if ignored { libc::SIG_IGN } else { libc::SIG_DFL }) };
}

/// The state to be restored.
#[derive(Clone, Copy)]
pub(crate) struct State {
    mask: libc::sigset_t,
    sigpipe_ignored: bool,
    sigchld_ignored: bool,
    sigxfsz_ignored: bool,
    closed: u8,
    open_files: libc::rlimit,
}

impl State {
    /// Takes stock, and changes for our own needs what has to be changed: SIGCHLD must not be ignored, or the command's
    /// status is lost; SIGXFSZ must be, so that a full file is an error and no death; two descriptors a traced process are
    /// needed. Call once, from `main`'s thread.
    pub(crate) fn take() -> State {
        let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut open_files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: both calls fill what they are given.
        let mask = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut open_files);
            mask.assume_init()
        };
        let state = State {
            mask,
            sigpipe_ignored: SIGPIPE_IGNORED.load(Ordering::Relaxed),
            sigchld_ignored: is_ignored(libc::SIGCHLD),
            sigxfsz_ignored: is_ignored(libc::SIGXFSZ),
            closed: CLOSED.load(Ordering::Relaxed),
            open_files,
        };
        set_disposition(libc::SIGCHLD, false);
        set_disposition(libc::SIGXFSZ, true);
        let raised = libc::rlimit { rlim_cur: open_files.rlim_max, ..open_files };
        // SAFETY: a valid limit; a refusal leaves the old one, which will do.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) };
        state
    }

    /// Puts everything back. For the child between fork and exec: nothing but async-signal-safe calls.
    pub(crate) fn restore(&self) -> io::Result<()> {
        set_disposition(libc::SIGPIPE, self.sigpipe_ignored);
        set_disposition(libc::SIGCHLD, self.sigchld_ignored);
        set_disposition(libc::SIGXFSZ, self.sigxfsz_ignored);
        for fd in (0..3).filter(|fd| self.closed & 1 << fd != 0) {
            // SAFETY: this descriptor is the runtime's /dev/null, which nothing in this process uses after exec.
            unsafe { libc::close(fd) };
        }
        // SAFETY: a limit and a mask this process had before.
        unsafe {
            libc::setrlimit(libc::RLIMIT_NOFILE, &self.open_files);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut()) {
                0 => Ok(()),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// The signal mask this process was started with.
    pub(crate) fn mask(&self) -> &libc::sigset_t {
        &self.mask
    }
}
