//! The lock that all processes of the run share, from the side of a traced process (`memtrace_trace::shm::run_lock`).
//!
//! The program can keep it from being released: a signal handler leaves the call by `siglongjmp`, a thread ends inside
//! the call, a process is stopped or dies there. So no thread waits for it longer than [`WAIT_LIMIT`]. Then it takes
//! over a lock that one thread has held all the time, and the next ones do not wait. The launcher releases the lock of
//! a dead process.

use std::time::Duration;

use memtrace_trace::counters::Counter;
use memtrace_trace::shm::run_lock::{Holder, RunLock};
use memtrace_trace::sync::Ordering;

use super::bounded_wait::BoundedWait;
use super::cancellation::NoCancellation;
use super::connect::run_lock;
use super::left_frame::{stack_pointer, was_left};
use super::paused::is_detached;
use super::process::{Process, thread_exists, thread_id};
use super::thread_local::with_thread_local;

/// How long a thread waits for the others.
const WAIT_LIMIT: Duration = Duration::from_secs(5);

/// The lock of the run, held until it is dropped.
pub(crate) struct HeldRunLock {
    lock: &'static RunLock,
    me: Holder,
    /// The process that has taken the lock. A signal handler may fork while it is held.
    process: &'static Process,
    /// Makes the type neither `Send` nor `Sync`.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl HeldRunLock {
    /// Locks the run. `None` if others hold it too long, if this thread holds it already and a signal handler has
    /// interrupted it, or if the launcher did not provide it. Then the caller goes on without it, which is counted.
    pub(crate) fn take() -> Option<HeldRunLock> {
        // Waiting is a cancellation point, and so is the connection to the launcher. The call under the lock is the
        // program's own.
        let _no_cancellation = NoCancellation::new();
        let process = if is_detached() { Process::if_started() } else { Process::current() }?;
        let pid = process.segment.header().trace_pid.load(Ordering::Relaxed);
        let me = Holder::new(pid, thread_id());
        let frame = stack_pointer();
        let Some(lock) = run_lock().filter(|lock| acquire(process, lock, me, frame)) else {
            process.count(Counter::LimitLockMissed, 1);
            return None;
        };
        with_thread_local(|thread| thread.run_lock_frame.set(frame));
        Some(HeldRunLock { lock, me, process, _not_send: std::marker::PhantomData })
    }
}

impl Drop for HeldRunLock {
    fn drop(&mut self) {
        with_thread_local(|thread| thread.run_lock_frame.set(0));
        // A child that was forked inside the call has the parent's value. The parent releases the lock.
        if Process::if_started().is_some_and(|process| std::ptr::eq(process, self.process)) {
            self.lock.release(self.me);
        }
    }
}

/// Makes `me` the holder. `frame` is its stack pointer. Counts a takeover after the wait has ended. Returns `false` if
/// the caller goes on without the lock.
fn acquire(process: &Process, lock: &RunLock, me: Holder, frame: usize) -> bool {
    let mut wait = BoundedWait::new(WAIT_LIMIT);
    let (first, turns) = (lock.holder(), lock.turns());
    loop {
        let before = lock.holder();
        match before {
            Some(holder) if holder == me && is_interrupted(frame) => return false,
            Some(holder) if holder != me && !has_ended(holder, me) => {
                if wait.pause() {
                    continue;
                }
                let is_abandoned = before == first && lock.turns() == turns;
                let is_taken_over = is_abandoned && lock.take(before, me);
                process.count(Counter::LimitLockMissed, u64::from(is_taken_over));
                return is_taken_over;
            }
            _ => {}
        }
        // A value that a call has left is no longer valid once the lock is taken again.
        with_thread_local(|thread| thread.run_lock_frame.set(0));
        if lock.take(before, me) {
            return true;
        }
    }
}

/// Whether the call of this thread that holds the lock has been interrupted by this one. If not, a signal handler has
/// left it by `siglongjmp`, or it was a call of an earlier thread with the same id.
fn is_interrupted(frame: usize) -> bool {
    let earlier = with_thread_local(|thread| thread.run_lock_frame.get());
    earlier != 0 && !was_left(earlier, frame)
}

/// Whether the holder is a thread of this process that has ended.
fn has_ended(holder: Holder, me: Holder) -> bool {
    holder.pid() == me.pid() && !thread_exists(holder.tid())
}
