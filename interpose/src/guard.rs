//! The proof that a thread is in a hook's own work: whatever records needs a [`Guard`], and only [`Guard::enter`] makes one.
//!
//! The rules it keeps: one guard a thread at a time (work that comes back to a hook calls the original and nothing else),
//! never alive while an original runs, `errno` as it was when it ends.

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

/// Set while [`memtrace_pause`] holds.
static PAUSED: AtomicBool = AtomicBool::new(false);

#[inline(always)]
fn is_paused() -> bool {
    PAUSED.load(Ordering::Relaxed)
}

/// For programs that ask for it themselves (`ctypes.CDLL(None).memtrace_pause()`): nothing is recorded until [`memtrace_resume`].
/// The trace says so, and counts what passed as lost (every callback, so rather too many than too few): what was allocated or freed
/// in between cannot be known.
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

/// Ends [`memtrace_pause`].
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_resume() {
    PAUSED.store(false, Ordering::Relaxed);
    if let Some(mut guard) = Guard::enter() {
        guard.process().tell_passed_by();
        guard.notice("pause", Verdict::Remark, "the program resumed the recording");
    }
}

/// Ends the recording of this process, as [`memtrace_pause`] does, for good. True for the one who does.
pub(crate) fn end() -> bool {
    !PAUSED.swap(true, Ordering::Relaxed)
}

/// See the module. Not for another thread.
pub(crate) struct Guard {
    /// Its `process` and `local` are those of this work.
    thread: &'static Thread,
    /// Not for another thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl Guard {
    /// Begins a hook's own work; `None` when this process records nothing, or this thread is in a hook's work already.
    #[inline(always)]
    pub(crate) fn enter() -> Option<Guard> {
        let thread = Thread::here();
        let local = thread.local.get();
        // SAFETY: null, or a place in memory that is never unmapped.
        if thread.busy.get() || local.is_null() || unsafe { !(*local).is_made() } || is_paused() {
            return Guard::enter_slowly(thread);
        }
        // SAFETY: this thread's `errno`, whose place was found when the ring was claimed.
        thread.errno.set(unsafe { *thread.errno_at.get() });
        thread.busy.set(true);
        Some(Guard { thread, _here: std::marker::PhantomData })
    }

    /// The first time on this thread, in this process, or without a ring of our own; or not at all.
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
        // SAFETY: takes nothing; the place is the thread's own and stays.
        let errno_at = unsafe { libc::__errno_location() };
        thread.errno_at.set(errno_at);
        // SAFETY: as above.
        thread.errno.set(unsafe { *errno_at });
        thread.busy.set(true);
        let guard = Guard::ready(thread);
        if guard.is_none() {
            Process::missed_event();
            thread.busy.set(false);
            // SAFETY: as above.
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
        // SAFETY: this thread owns the ring (its id is in the owner word) or holds the common ring's lock, and `busy`
        // keeps it from asking twice.
        unsafe { local.make(process.segment.ring(index)?) };
        thread.common.set(common);
        thread.process.set(process);
        thread.local.set(local);
        let mut guard = Guard { thread, _here: std::marker::PhantomData };
        guard.announce();
        Some(guard)
    }

    /// The recording that this work is part of.
    #[inline(always)]
    pub(crate) fn process(&self) -> &'static Process {
        // SAFETY: set before the guard was made; a process is never freed.
        unsafe { &*self.thread.process.get() }
    }

    /// What belongs to the thread's ring.
    #[inline(always)]
    fn inner(&mut self) -> &mut Inner {
        // SAFETY: it was claimed for this thread, in this process, or it would have been wiped; `busy` lets no second guard be, and
        // this one is borrowed.
        unsafe { (*self.thread.local.get()).borrow() }
    }

    /// Tells the launcher, in the ring itself, who writes from here on.
    #[cold]
    fn announce(&mut self) {
        let tid = thread_id();
        let mut name = [0u8; 16];
        // SAFETY: PR_GET_NAME writes at most 16 bytes.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        let name = String::from_utf8_lossy(name);
        self.define(&Definition::Thread { id: ThreadId::NONE, tid, name: &name });
        if let Some(rank) = rank::definition() {
            self.define(&rank);
        }
    }

    /// Numbers, times, writes and publishes an event; gives its number, 0 when there was no room for it.
    pub(crate) fn emit(&mut self, event: Event) -> u64 {
        self.emit_here(event)
    }

    /// [`Self::emit`], compiled into its caller: for the one hook that runs for every block.
    #[inline(always)]
    pub(crate) fn emit_here(&mut self, mut event: Event) -> u64 {
        let written = self.write(&mut event);
        self.inner().producer.publish();
        self.thread.holds.set(false);
        if written { event.seq } else { 0 }
    }

    /// The same, but the event is published only with the next one, by [`Self::amend`], [`Self::complete`] or [`Self::release`].
    #[inline(always)]
    pub(crate) fn hold(&mut self, mut event: Event) {
        let written = self.write(&mut event);
        self.thread.holds.set(written);
    }

    /// Numbers, times and writes an event. False when there was no room for it.
    #[inline(always)]
    fn write(&mut self, event: &mut Event) -> bool {
        emit::room(self.process(), &mut self.inner().producer) && {
            emit::stamp(self.process(), event);
            self.process().names.note(event);
            self.inner().producer.write(&event.to_slot()).is_ok()
        }
    }

    /// Completes the allocation that was held, if it is the one at `addr`: its rounded size is now known. Returns whether it was.
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

    /// Adds to the free request that is held that it was completed, if it is of the same block. Returns whether it was.
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

    /// Publishes what is held.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        if self.thread.holds.replace(false) {
            self.inner().producer.publish();
        }
    }

    /// Sends a definition.
    pub(crate) fn define(&mut self, definition: &Definition<'_>) {
        self.thread.holds.set(false);
        emit::define(self.process(), &mut self.inner().producer, definition);
    }

    /// Sends a notice: what a part of the recorder did or could not do.
    pub(crate) fn notice(&mut self, topic: &str, verdict: Verdict, text: &str) {
        self.define(&Definition::Notice { topic, text, verdict });
    }

    /// The calling thread's Python stack.
    #[inline]
    pub(crate) fn stack(&mut self) -> StackId {
        if !matches!(self.process().options.stacks, Stacks::Python | Stacks::Both) {
            return StackId::NONE;
        }
        let Some(python) = self.process().python() else { return self.look_for_python() };
        self.walk(python)
    }

    /// The same, and the `nn.Module` being called.
    #[inline]
    pub(crate) fn stack_and_call(&mut self) -> (StackId, ContextId) {
        let stack = self.stack();
        (stack, self.call(stack))
    }

    /// The `nn.Module` being called, on the stack that [`Self::stack`] has just given.
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

    /// Says once whether the interpreter's layout was verified.
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

    /// The stack and the context of an event of the calling thread: the autograd node that runs, else the `nn.Module` being called.
    /// Where only Python frames are asked for, an event that has none and that no node explains has its native ones: nothing else
    /// says who caused it.
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

    /// Whether the calling thread is inside a function of an object that `is_it` knows by its file name.
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

    /// Lets definitions be sent.
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
        // SAFETY: errno is the thread's own.
        unsafe { *self.thread.errno_at.get() = self.thread.errno.get() };
    }
}

impl Guard {
    #[cold]
    fn leave_common(&mut self) {
        self.thread.holds.set(false);
        self.inner().producer.publish();
        // The next event comes by the slow way again, and now and then looks for a free ring.
        self.thread.local.set(std::ptr::null());
        self.process().segment.header().common_lock.0.release();
    }
}

/// Claims a ring for this thread; 0, the common one, when all are in use.
#[cold]
fn claim_ring(process: &Process) -> usize {
    let used = &process.segment.header().rings_used.0;
    owner::claim(process.segment.ring_headers(), used, thread_id(), thread_exists).unwrap_or(0)
}

#[cold]
fn lock_common(process: &Process) {
    let pause = || {
        // SAFETY: no arguments.
        unsafe { libc::sched_yield() };
    };
    process.segment.header().common_lock.0.lock(thread_id(), thread_exists, pause);
}
