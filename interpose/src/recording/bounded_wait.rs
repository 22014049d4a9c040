//! A wait for another thread that may never end what it is doing.
//!
//! A signal handler may leave a hook by `siglongjmp`. The thread lives on, and what it held in the hook stays held. So
//! no hook waits for another thread without a limit. An event whose wait has ended without success is not recorded and
//! is counted.

use std::time::Duration;

/// How many times the processor is yielded before the first sleep.
const YIELDS: u32 = 200;
const FIRST_SLEEP: Duration = Duration::from_micros(50);
const MAX_SLEEP: Duration = Duration::from_millis(10);

/// A wait with a limit. A sleep counts as long as it was requested, so the time in which the process is stopped does
/// not count.
pub(crate) struct BoundedWait {
    yields: u32,
    sleep: Duration,
    left: Duration,
}

impl BoundedWait {
    /// A wait of at most this long.
    pub(crate) fn new(limit: Duration) -> BoundedWait {
        BoundedWait { yields: YIELDS, sleep: FIRST_SLEEP, left: limit }
    }

    /// Waits for a moment. Returns `false` if the time is over.
    pub(crate) fn pause(&mut self) -> bool {
        if let Some(left) = self.yields.checked_sub(1) {
            self.yields = left;
            // SAFETY: `sched_yield` takes no arguments and has no preconditions.
            unsafe { libc::sched_yield() };
            return true;
        }
        let Some(left) = self.left.checked_sub(self.sleep) else { return false };
        let time = libc::timespec { tv_sec: 0, tv_nsec: self.sleep.subsec_nanos().into() };
        // SAFETY: `time` is a valid timespec, and a null pointer discards the remaining time. A signal may end the
        // sleep early without harm.
        unsafe { libc::nanosleep(&time, std::ptr::null_mut()) };
        (self.left, self.sleep) = (left, (self.sleep * 2).min(MAX_SLEEP));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends() {
        let limit = Duration::from_millis(30);
        let (mut wait, begin, mut pauses) = (BoundedWait::new(limit), std::time::Instant::now(), 0);
        while wait.pause() {
            pauses += 1;
        }
        assert!(pauses > YIELDS && begin.elapsed() >= limit / 2, "{pauses} pauses");
        assert!(!wait.pause());
    }
}
