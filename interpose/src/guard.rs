//! The right to record: every function that writes to a ring needs a [`Guard`], and only [`Guard::enter`] creates one.
//!
//! Invariants:
//! - A thread has at most one guard. A hook that is entered again meanwhile calls the original function and does
//!   nothing else.
//! - No guard exists while an original function runs.
//! - Dropping a guard restores `errno`.

use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, Verdict};
use memtrace_trace::event::Event;
use memtrace_trace::ids::{ContextId, StackId, ThreadId};
use memtrace_trace::options::Stacks;
use memtrace_trace::shm::owner;

use crate::emit::{self, RingSink};
use crate::local::Inner;
use crate::objects;
use crate::process::{Process, thread_exists, thread_id};
use crate::rank;
use crate::real;
use crate::stack::{Python, Reason};
use crate::thread::Thread;
use crate::unwind_check;

/// Whether recording is paused ([`memtrace_pause`]) or has ended.
static PAUSED: AtomicBool = AtomicBool::new(false);

#[inline(always)]
fn is_paused() -> bool {
    PAUSED.load(Ordering::Relaxed)
}

/// Pauses the recording until [`memtrace_resume`]. For programs that call it themselves:
/// `ctypes.CDLL(None).memtrace_pause()`.
///
/// The trace contains a notice. Allocations and frees during the pause are unknown, so every callback meanwhile counts
/// as a lost event. That count is too high rather than too low.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_pause() {
    if let Some(mut guard) = Guard::enter() {
        guard.notice(
            "pause",
            Verdict::Remark,
            "the program paused the recording: what happens until it resumes is not in this trace",
        );
    }
    PAUSED.store(true, Ordering::Relaxed);
}

/// Resumes a recording that [`memtrace_pause`] has paused.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_resume() {
    PAUSED.store(false, Ordering::Relaxed);
    if let Some(mut guard) = Guard::enter() {
        guard.process().tell_passed_by();
        guard.notice("pause", Verdict::Remark, "the program resumed the recording");
    }
}

/// Ends the recording of this process for good, with the flag of [`memtrace_pause`]. Returns `true` for the one caller
/// that does so.
pub(crate) fn end() -> bool {
    !PAUSED.swap(true, Ordering::Relaxed)
}

/// Proof that the calling thread is recording. Not `Send`.
pub(crate) struct Guard {
    /// While the guard lives, the thread's `process` and `local` are those that it writes to.
    thread: &'static Thread,
    /// Makes the type neither `Send` nor `Sync`.
    _here: std::marker::PhantomData<*const ()>,
}

impl Guard {
    /// Starts recording on this thread. `None` if this process records nothing, is paused, or if this thread has a
    /// guard already.
    #[inline(always)]
    pub(crate) fn enter() -> Option<Guard> {
        let thread = Thread::here();
        let local = thread.local.get();
        // SAFETY: `local` is null or points into memory that is never unmapped.
        if thread.busy.get() || local.is_null() || unsafe { !(*local).is_made() } || is_paused() {
            return Guard::enter_slowly(thread);
        }
        // SAFETY: `errno_at` points to this thread's `errno`. `enter_slowly` set it before it set `local`.
        thread.errno.set(unsafe { *thread.errno_at.get() });
        thread.busy.set(true);
        Some(Guard { thread, _here: std::marker::PhantomData })
    }

    /// [`Self::enter`] for the first event of a thread or process, for a thread without a ring of its own, and for all
    /// refusals.
    #[cold]
    fn enter_slowly(thread: &'static Thread) -> Option<Guard> {
        if thread.busy.get() {
            if let Some(process) = Process::if_started() {
                process.count(Counter::Reentered, 1);
            }
            return None;
        }
        if is_paused() {
            Process::pass_by();
            return None;
        }
        // SAFETY: takes no arguments. The address belongs to the calling thread and stays valid until it ends.
        let errno_at = unsafe { libc::__errno_location() };
        thread.errno_at.set(errno_at);
        // SAFETY: `errno_at` is the address of this thread's `errno`, valid until the thread ends.
        thread.errno.set(unsafe { *errno_at });
        thread.busy.set(true);
        let guard = Guard::ready(thread);
        if guard.is_none() {
            Process::missed_event();
            thread.busy.set(false);
            // SAFETY: `errno_at` is the address of this thread's `errno`, valid until the thread ends.
            unsafe { *errno_at = thread.errno.get() };
        }
        guard
    }

    fn ready(thread: &'static Thread) -> Option<Guard> {
        let process = Process::current()?;
        thread.holds.set(false);
        let index = process.look_for_ring(|| claim_ring(process));
        let common = index == 0;
        if common {
            lock_common(process);
            process.count(Counter::SharedRingEvents, 1);
        }
        let local = process.local(index)?;
        // SAFETY: this thread owns the ring (its id is in the owner word) or holds the lock of the common ring. `busy`
        // is set, so no other guard of this thread uses it.
        unsafe { local.make(process.segment.ring(index)?) };
        thread.common.set(common);
        thread.process.set(process);
        thread.local.set(local);
        let mut guard = Guard { thread, _here: std::marker::PhantomData };
        guard.announce();
        Some(guard)
    }

    /// The recording that this guard writes to.
    #[inline(always)]
    pub(crate) fn process(&self) -> &'static Process {
        // SAFETY: `ready` set `process` before it made the guard, and a process is never freed.
        unsafe { &*self.thread.process.get() }
    }

    /// The state that belongs to the thread's ring.
    #[inline(always)]
    fn inner(&mut self) -> &mut Inner {
        // SAFETY: this thread claimed the ring in this process; after a fork the memory would read as zeros. `busy`
        // excludes a second guard, and `&mut self` excludes a second borrow of this one.
        unsafe { (*self.thread.local.get()).borrow() }
    }

    /// Writes to the ring which thread owns it from here on.
    #[cold]
    fn announce(&mut self) {
        let tid = thread_id();
        let mut name = [0u8; 16];
        // SAFETY: `PR_GET_NAME` writes at most 16 bytes, the size of `name`.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        let name = String::from_utf8_lossy(name);
        self.define(&Definition::Thread { id: ThreadId::NONE, tid, name: &name });
        if let Some(rank) = rank::definition() {
            self.define(&rank);
        }
    }

    /// Numbers, timestamps, writes and publishes an event. Returns its number, or 0 if the ring had no space and the
    /// event was dropped.
    pub(crate) fn emit(&mut self, event: Event) -> u64 {
        self.emit_here(event)
    }

    /// [`Self::emit`], inlined into its caller. For the one hook that runs for every block.
    #[inline(always)]
    pub(crate) fn emit_here(&mut self, mut event: Event) -> u64 {
        let written = self.write(&mut event);
        self.inner().producer.publish();
        self.thread.holds.set(false);
        if written { event.seq } else { 0 }
    }

    /// Writes an event without publishing it. The next event, [`Self::amend`], [`Self::complete`] or [`Self::release`]
    /// publishes it.
    #[inline(always)]
    pub(crate) fn hold(&mut self, mut event: Event) {
        let written = self.write(&mut event);
        self.thread.holds.set(written);
    }

    /// Numbers, timestamps and writes an event. Returns `false` if the ring had no space.
    #[inline(always)]
    fn write(&mut self, event: &mut Event) -> bool {
        emit::room(self.process(), &mut self.inner().producer) && {
            emit::stamp(self.process(), event);
            self.process().names.note(event);
            self.inner().producer.write(&event.to_slot()).is_ok()
        }
    }

    /// Adds the rounded size to the unpublished allocation and publishes it, if it is the one at `addr`. `block_size`
    /// is in bytes. Returns whether it was.
    #[inline]
    pub(crate) fn amend(&mut self, addr: u64, block_size: u64) -> bool {
        self.thread.holds.replace(false) && {
            let amended = self.inner().producer.amend(|slot| {
                let [_, _, held, size, ..] = *slot;
                let slack = block_size.checked_sub(size).filter(|_| held == addr)?;
                Some(Event::amend_slack(slot, u32::try_from(slack).unwrap_or(u32::MAX)))
            });
            self.inner().producer.publish();
            amended
        }
    }

    /// Marks the unpublished free request as completed and publishes it, if `completion` is of the same block. Returns
    /// whether it was.
    #[inline(always)]
    pub(crate) fn complete(&mut self, completion: &Event) -> bool {
        let next_seq = &self.process().segment.header().next_seq.0;
        self.thread.holds.get()
            && self.inner().producer.amend(|slot| {
                completion
                    .completes(slot)
                    .then(|| Event::at_once(slot, next_seq.fetch_add(1, Ordering::Relaxed), completion.ticks))
            })
            && {
                self.release();
                true
            }
    }

    /// Publishes the event that [`Self::hold`] has written.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        if self.thread.holds.replace(false) {
            self.inner().producer.publish();
        }
    }

    /// Writes a definition to the ring and publishes it.
    pub(crate) fn define(&mut self, definition: &Definition<'_>) {
        self.thread.holds.set(false);
        emit::define(self.process(), &mut self.inner().producer, definition);
    }

    /// Writes a notice: what a part of memtrace did or could not do.
    pub(crate) fn notice(&mut self, topic: &str, verdict: Verdict, text: &str) {
        self.define(&Definition::Notice { topic, text, verdict });
    }

    /// The calling thread's Python stack. [`StackId::NONE`] if there is none or Python stacks are not recorded.
    #[inline]
    pub(crate) fn stack(&mut self) -> StackId {
        if !matches!(self.process().options.stacks, Stacks::Python | Stacks::Both) {
            return StackId::NONE;
        }
        let Some(python) = self.process().python() else { return self.look_for_python() };
        self.walk(python)
    }

    /// The calling thread's Python stack, and the `nn.Module` that is being called.
    #[inline]
    pub(crate) fn stack_and_call(&mut self) -> (StackId, ContextId) {
        let stack = self.stack();
        (stack, self.call(stack))
    }

    /// The `nn.Module` that is being called. `stack` is the latest result of [`Self::stack`].
    #[inline(always)]
    fn call(&mut self, stack: StackId) -> ContextId {
        if stack.is_none() || !self.inner().stacks.has_calls() || !self.process().options.names {
            ContextId::NONE
        } else {
            self.look_at_calls()
        }
    }

    fn look_at_calls(&mut self) -> ContextId {
        let process = self.process();
        let Some(python) = process.python() else { return ContextId::NONE };
        let inner = self.inner();
        let mut sink = RingSink { process, producer: &mut inner.producer };
        python.call(&mut inner.stacks, &mut sink)
    }

    #[inline]
    fn walk(&mut self, python: &Python) -> StackId {
        let process = self.process();
        let inner = self.inner();
        let mut sink = RingSink { process, producer: &mut inner.producer };
        let stack = python.capture(&mut inner.stacks, &process.interner, &mut sink);
        if !process.python_reported() {
            self.report_python(python);
        }
        stack
    }

    #[cold]
    fn look_for_python(&mut self) -> StackId {
        if !self.process().should_look_for_python() {
            return StackId::NONE;
        }
        match Python::detect(|name| real::lookup(libc::RTLD_DEFAULT, name)) {
            Ok(python) => {
                self.process().set_python(python);
                self.process().python().map_or(StackId::NONE, |p| self.walk(p))
            }
            Err(Reason::NoPython) => StackId::NONE,
            Err(reason) => {
                self.notice("python", Verdict::Off, &format!("no Python stacks: {reason}"));
                self.process().stop_looking_for_python();
                StackId::NONE
            }
        }
    }

    /// Reports once whether the interpreter's layout was verified.
    #[cold]
    fn report_python(&mut self, python: &Python) {
        let (major, minor) = python.version();
        let (verdict, text) = match python.verified() {
            Ok(false) => return,
            Ok(true) => (Verdict::Works, format!("CPython {major}.{minor}: layout verified, stacks are taken")),
            Err(reason) => (Verdict::Off, format!("CPython {major}.{minor}: no Python stacks: {reason}")),
        };
        if self.process().set_python_reported() {
            self.notice("python", verdict, &text);
        }
    }

    /// The stack and the context of an event on the calling thread. The context is the running autograd node, otherwise
    /// the `nn.Module` that is being called.
    ///
    /// With `Stacks::Python`, an event without Python frames and without a node gets its native frames, because nothing
    /// else shows its cause.
    #[inline(always)]
    pub(crate) fn event_place(&mut self) -> (StackId, ContextId) {
        let node = self.thread.context.get();
        match self.process().options.stacks {
            Stacks::Python => {
                let stack = self.stack();
                if !node.is_none() {
                    (stack, node)
                } else if stack.is_none() {
                    (self.native_stack(), node)
                } else {
                    (stack, self.call(stack))
                }
            }
            Stacks::Both => {
                let stack = self.stack();
                let context = if node.is_none() { self.call(stack) } else { node };
                (self.merged_stack(stack), context)
            }
            Stacks::Native => (self.native_stack(), node),
            Stacks::None => (StackId::NONE, node),
        }
    }

    #[inline(never)]
    fn native_stack(&mut self) -> StackId {
        let process = self.process();
        let inner = self.inner();
        let mut sink = RingSink { process, producer: &mut inner.producer };
        let stack = inner.native.capture(&process.interner, &mut sink);
        self.check_native();
        stack
    }

    /// Whether a function on the calling thread's native stack belongs to an object whose file name satisfies `is_it`.
    pub(crate) fn came_through(&mut self, is_it: impl Fn(&[u8]) -> bool) -> bool {
        self.native_stack();
        self.inner()
            .native
            .frames()
            .any(|(ip, _)| objects::containing(ip.wrapping_sub(1)).is_some_and(|object| is_it(object.file_name())))
    }

    #[inline]
    fn check_native(&mut self) {
        let process = self.process();
        if process.options.check_stacks
            && let Some(difference) = unwind_check::check(process, &self.inner().native)
        {
            self.notice("native", Verdict::Remark, &difference);
        }
    }

    #[inline(never)]
    fn merged_stack(&mut self, stack: StackId) -> StackId {
        let process = self.process();
        let Some(python) = process.python().filter(|_| !stack.is_none()) else { return self.native_stack() };
        let inner = self.inner();
        let mut sink = RingSink { process, producer: &mut inner.producer };
        let stack = inner.native.capture_merged(python, &inner.stacks, stack, &process.interner, &mut sink);
        self.check_native();
        stack
    }

    /// Calls `send` with a sink that writes definitions to this thread's ring. Publishes a held event first.
    pub(crate) fn with_sink<T>(&mut self, send: impl FnOnce(&mut RingSink<'_>) -> T) -> T {
        self.release();
        let process = self.process();
        send(&mut RingSink { process, producer: &mut self.inner().producer })
    }
}

impl Drop for Guard {
    #[inline(always)]
    fn drop(&mut self) {
        if self.thread.common.get() {
            self.leave_common();
        }
        self.thread.busy.set(false);
        // SAFETY: `errno_at` is the address of this thread's `errno`, and a guard never leaves its thread.
        unsafe { *self.thread.errno_at.get() = self.thread.errno.get() };
    }
}

impl Guard {
    #[cold]
    fn leave_common(&mut self) {
        self.thread.holds.set(false);
        self.inner().producer.publish();
        // The next event enters by the slow path again. That path looks for a free ring from time to time.
        self.thread.local.set(std::ptr::null());
        self.process().segment.header().common_lock.0.release();
    }
}

/// Claims a ring for this thread. Returns 0, the common ring, if all others are in use.
#[cold]
fn claim_ring(process: &Process) -> usize {
    let used = &process.segment.header().rings_used.0;
    owner::claim(process.segment.ring_headers(), used, thread_id(), thread_exists).unwrap_or(0)
}

#[cold]
fn lock_common(process: &Process) {
    let pause = || {
        // SAFETY: `sched_yield` takes no arguments and has no preconditions.
        unsafe { libc::sched_yield() };
    };
    process.segment.header().common_lock.0.lock(thread_id(), thread_exists, pause);
}
