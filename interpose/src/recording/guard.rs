//! The right to record: every function that writes to a ring needs a [`Guard`], and only [`Guard::enter`] creates one.
//!
//! Invariants:
//! - A thread has at most one guard. A hook that is entered again meanwhile calls the original function and does
//!   nothing else. A guard that a signal handler has left by `siglongjmp` is detected ([`super::left_frame`]) and
//!   forgotten; its event is counted as lost.
//! - No guard exists while an original function runs.
//! - Dropping a guard restores `errno`.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memtrace_stackwalk::{Python, Reason, native};
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, FREE_THREADED_TOPIC, NoticeStatus};
use memtrace_trace::event::Event;
use memtrace_trace::ids::{ContextId, ModuleId, StackId, ThreadId};
use memtrace_trace::options::Stacks;
use memtrace_trace::shm::owner;

use super::bounded_wait::BoundedWait;
use super::cancellation::NoCancellation;
use super::left_frame::{stack_pointer, was_left};
use super::paused::{is_detached, is_paused};
use super::process::{Process, thread_exists, thread_id};
use super::sink::RingSink;
use super::thread_local::ThreadLocal;
use super::thread_state::ThreadRecorder;
use super::{emit, observer, rank};
use crate::linker::mapped_object::{MappedObject, containing};
use crate::linker::original;

/// Proof that the calling thread is recording. Not `Send`.
pub(crate) struct Guard {
    /// While the guard lives, the thread's `process` and `state` are those that it writes to.
    thread: &'static ThreadLocal,
    /// Makes the type neither `Send` nor `Sync`.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Guard {
    /// Starts recording on this thread. `None` if this process records nothing, is paused, or if this thread has a
    /// guard already.
    #[inline(always)]
    pub(crate) fn enter() -> Option<Guard> {
        let thread = ThreadLocal::current();
        let state = thread.state.get();
        // SAFETY: `state` is null or points into memory that is never unmapped.
        if thread.guard_frame.get() != 0 || state.is_null() || unsafe { !(*state).is_initialized() } || is_paused() {
            return Guard::enter_slow(thread, stack_pointer());
        }
        // SAFETY: `errno_address` points to this thread's `errno`. `enter_slow` set it before it set `state`.
        thread.errno.set(unsafe { *thread.errno_address.get() });
        thread.guard_frame.set(stack_pointer());
        Some(Guard { thread, _not_send: std::marker::PhantomData })
    }

    /// [`Self::enter`] for the first event of a thread or process, for a thread without a ring of its own, and for all
    /// refusals. `frame` is the hook's stack pointer.
    #[cold]
    fn enter_slow(thread: &'static ThreadLocal, frame: usize) -> Option<Guard> {
        if thread.guard_frame.get() != 0 {
            if !was_left(thread.guard_frame.get(), frame) {
                Process::count_reentered_event();
                return None;
            }
            Guard::forget_left(thread);
        }
        if is_paused() {
            Guard::publish_last(thread);
            if !is_detached() {
                Process::count_paused_event();
            }
            return None;
        }
        // The first event connects to the launcher.
        let _no_cancellation = NoCancellation::new();
        // SAFETY: takes no arguments. The address belongs to the calling thread and stays valid until it ends.
        let errno_address = unsafe { libc::__errno_location() };
        thread.errno_address.set(errno_address);
        // SAFETY: `errno_address` is the address of this thread's `errno`, valid until the thread ends.
        thread.errno.set(unsafe { *errno_address });
        thread.guard_frame.set(frame);
        let guard = Guard::enter_with_ring(thread);
        if guard.is_none() {
            thread.guard_frame.set(0);
            // SAFETY: `errno_address` is the address of this thread's `errno`, valid until the thread ends.
            unsafe { *errno_address = thread.errno.get() };
        }
        guard
    }

    /// Publishes the event that this thread has written before the recording was paused. The rest of that event is not
    /// recorded any more.
    #[cold]
    fn publish_last(thread: &'static ThreadLocal) {
        if thread.has_unpublished.replace(false)
            // SAFETY: `state` is null or points into memory that is never unmapped.
            && let Some(state) = unsafe { thread.state.get().as_ref() }.filter(|state| state.is_initialized())
        {
            // SAFETY: this thread owns the ring, and has no guard that borrows the state.
            unsafe { state.borrow() }.producer.publish();
        }
    }

    /// Forgets a guard that a signal handler has left by `siglongjmp`. Its event is lost. The next one starts anew in
    /// its ring, because the caches and the unpublished part may be half written.
    #[cold]
    fn forget_left(thread: &'static ThreadLocal) {
        Process::count_left_event();
        let state = thread.state.replace(std::ptr::null());
        // SAFETY: `state` is null or points into memory that is never unmapped.
        if let Some(state) = unsafe { state.as_ref() } {
            // SAFETY: this thread owns the ring or, of the common one, still holds the lock. The guard that used the
            // state was left, so nobody borrows it.
            unsafe { state.reset() };
        }
        thread.has_unpublished.set(false);
        // The thread still owns the lock of the common ring, if it had it. `Owner::take` succeeds for its own id.
        thread.uses_common_ring.set(false);
        thread.guard_frame.set(0);
    }

    fn enter_with_ring(thread: &'static ThreadLocal) -> Option<Guard> {
        let Some(process) = Process::current() else {
            Process::count_missed_event();
            return None;
        };
        thread.has_unpublished.set(false);
        let index = process.rings.find(|| claim_ring(process));
        let is_common = index == 0;
        if is_common {
            if !lock_common_ring(process) {
                process.count(Counter::EventsDropped, 1);
                return None;
            }
            process.count(Counter::SharedRingEvents, 1);
        }
        let state = process.rings.state(index)?;
        // SAFETY: this thread owns the ring (its id is in the owner word) or holds the lock of the common ring. `busy`
        // is set, so no other guard of this thread uses it.
        unsafe { state.initialize(process.segment.ring(index)?) };
        // A recording that has ended meanwhile gets no events, and the next one uses the same state.
        if is_detached() || !Process::if_started().is_some_and(|current| std::ptr::eq(current, process)) {
            // SAFETY: this thread still owns the ring or the lock, and has not borrowed the state.
            unsafe { state.reset() };
            if is_common {
                process.segment.header().common_lock.0.release();
            }
            return None;
        }
        thread.uses_common_ring.set(is_common);
        thread.process.set(process);
        thread.state.set(state);
        let mut guard = Guard { thread, _not_send: std::marker::PhantomData };
        guard.define_thread();
        Some(guard)
    }

    /// The recording that this guard writes to.
    #[inline(always)]
    pub(crate) fn process(&self) -> &'static Process {
        // SAFETY: `enter_with_ring` set `process` before it made the guard, and a process is never freed.
        unsafe { &*self.thread.process.get() }
    }

    /// The state that belongs to the thread's ring.
    #[inline(always)]
    fn recorder(&mut self) -> &mut ThreadRecorder {
        // SAFETY: this thread claimed the ring in this process; after a fork the memory would read as zeros. `busy`
        // excludes a second guard, and `&mut self` excludes a second borrow of this one.
        unsafe { (*self.thread.state.get()).borrow() }
    }

    /// Writes to the ring which thread owns it from here on.
    #[cold]
    fn define_thread(&mut self) {
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
        self.emit_inlined(event)
    }

    /// [`Self::emit`], inlined into its caller. For the one hook that runs for every block.
    #[inline(always)]
    pub(crate) fn emit_inlined(&mut self, mut event: Event) -> u64 {
        let written = self.write(&mut event);
        self.recorder().producer.publish();
        self.thread.has_unpublished.set(false);
        if written { event.seq } else { 0 }
    }

    /// Writes and publishes an event of the state that was there before the recording, with its number. Returns `false`
    /// if the ring had no space.
    pub(crate) fn emit_prior(&mut self, event: Event) -> bool {
        let written = emit::ensure_room(self.process(), &mut self.recorder().producer)
            && self.recorder().producer.write(&event.to_slot()).is_ok();
        self.recorder().producer.publish();
        written
    }

    /// Writes an event without publishing it. The next event, [`Self::amend`], [`Self::complete`] or [`Self::publish`]
    /// publishes it.
    #[inline(always)]
    pub(crate) fn write_unpublished(&mut self, mut event: Event) {
        let written = self.write(&mut event);
        self.thread.has_unpublished.set(written);
    }

    /// Numbers, timestamps and writes an event. Returns `false` if the ring had no space.
    #[inline(always)]
    fn write(&mut self, event: &mut Event) -> bool {
        emit::ensure_room(self.process(), &mut self.recorder().producer) && {
            emit::stamp(self.process(), event);
            let watch = &self.process().watch;
            watch.note(event, |at_threshold| observer::watched(watch, event, at_threshold));
            self.recorder().producer.write(&event.to_slot()).is_ok()
        }
    }

    /// Adds the rounded size to the unpublished allocation and publishes it, if it is the one at `addr`. `block_size`
    /// is in bytes. Returns whether it was.
    #[inline]
    pub(crate) fn amend(&mut self, addr: u64, block_size: u64) -> bool {
        if !self.thread.has_unpublished.replace(false) {
            return false;
        }
        let producer = &mut self.recorder().producer;
        let slack = producer.last_slot().and_then(|slot| {
            let [_, _, address, size, ..] = slot;
            let slack = block_size.checked_sub(size).filter(|_| address == addr)?;
            Some(Event::amend_slack(&slot, u32::try_from(slack).unwrap_or(u32::MAX)))
        });
        if let Some(end) = slack {
            producer.set_end(end);
        }
        producer.publish();
        slack.is_some()
    }

    /// Marks the unpublished free request as completed and publishes it, if `completion` is of the same block. Returns
    /// whether it was.
    #[inline(always)]
    pub(crate) fn complete(&mut self, completion: &Event) -> bool {
        if !self.thread.has_unpublished.get() {
            return false;
        }
        let next_seq = &self.process().segment.header().next_seq.0;
        let producer = &mut self.recorder().producer;
        let Some(slot) = producer.last_slot().filter(|slot| completion.completes(slot)) else { return false };
        producer.set_end(Event::complete_free(&slot, next_seq.fetch_add(1, Ordering::Relaxed), completion.ticks));
        self.publish();
        true
    }

    /// Publishes the event that [`Self::write_unpublished`] has written.
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        if self.thread.has_unpublished.replace(false) {
            self.recorder().producer.publish();
        }
    }

    /// Writes a definition to the ring and publishes it.
    pub(crate) fn define(&mut self, definition: &Definition<'_>) {
        self.thread.has_unpublished.set(false);
        emit::define(self.process(), &mut self.recorder().producer, definition);
    }

    /// Writes a notice: what a part of memtrace did or could not do.
    pub(crate) fn notice(&mut self, topic: &str, status: NoticeStatus, text: &str) {
        self.define(&Definition::Notice { topic, text, status });
    }

    /// The calling thread's Python stack. [`StackId::NONE`] if there is none or Python stacks are not recorded.
    #[inline(always)]
    pub(crate) fn stack(&mut self) -> StackId {
        if !matches!(self.process().options.stacks, Stacks::Python | Stacks::Both) {
            return StackId::NONE;
        }
        let Some(python) = self.process().python() else { return self.detect_python() };
        self.capture_python(python)
    }

    /// The calling thread's Python stack, and the `nn.Module` that is being called.
    #[inline]
    pub(crate) fn stack_and_module_call(&mut self) -> (StackId, ContextId) {
        let stack = self.stack();
        (stack, self.module_call(stack))
    }

    /// The `nn.Module` that is being called. `stack` is the latest result of [`Self::stack`].
    #[inline(always)]
    fn module_call(&mut self, stack: StackId) -> ContextId {
        if stack.is_none() || !self.recorder().python_stacks.has_module_calls() || !self.process().options.names {
            ContextId::NONE
        } else {
            self.find_module_call()
        }
    }

    fn find_module_call(&mut self) -> ContextId {
        let process = self.process();
        let Some(python) = process.python() else { return ContextId::NONE };
        let recorder = self.recorder();
        let mut sink = RingSink { process, producer: &mut recorder.producer };
        python.module_call(&mut recorder.python_stacks, &mut sink)
    }

    #[inline]
    fn capture_python(&mut self, python: &Python) -> StackId {
        if !self.process().interpreter.is_reported() {
            return self.capture_unreported_python(python);
        }
        self.capture_reported_python(python)
    }

    #[inline(always)]
    fn capture_reported_python(&mut self, python: &Python) -> StackId {
        let process = self.process();
        let recorder = self.recorder();
        let mut sink = RingSink { process, producer: &mut recorder.producer };
        python.capture(&mut recorder.python_stacks, &process.interner, &mut sink)
    }

    /// The first captures verify the interpreter's layout.
    #[cold]
    fn capture_unreported_python(&mut self, python: &Python) -> StackId {
        let _no_cancellation = NoCancellation::new();
        let stack = self.capture_reported_python(python);
        self.report_python_layout(python);
        stack
    }

    #[cold]
    fn detect_python(&mut self) -> StackId {
        if !self.process().interpreter.is_due() {
            return StackId::NONE;
        }
        let _no_cancellation = NoCancellation::new();
        match Python::detect(original::global_address) {
            Ok(python) => {
                self.process().interpreter.set(python);
                self.process().python().map_or(StackId::NONE, |p| self.capture_python(p))
            }
            Err(Reason::NoPython) => StackId::NONE,
            Err(reason) => {
                self.notice("python", NoticeStatus::Off, &format!("no Python stacks: {reason}"));
                self.process().interpreter.stop();
                StackId::NONE
            }
        }
    }

    /// Reports once whether the interpreter's layout was verified.
    #[cold]
    fn report_python_layout(&mut self, python: &Python) {
        let (major, minor) = python.version();
        let (status, text) = match python.verified() {
            Ok(false) => return,
            Ok(true) => (NoticeStatus::Works, format!("CPython {major}.{minor}: layout verified, stacks are captured")),
            Err(reason) => (NoticeStatus::Off, format!("CPython {major}.{minor}: no Python stacks: {reason}")),
        };
        if self.process().interpreter.set_reported() {
            self.notice("python", status, &text);
            if python.is_free_threaded() {
                let text = "names of tensors and modules, what holds tensors, reference cycles, memory pools: CPython \
                            is free-threaded, so other threads may change its objects while they are read";
                self.notice(FREE_THREADED_TOPIC, NoticeStatus::Off, text);
            }
        }
    }

    /// The stack and the context of an event on the calling thread. The context is the running autograd node, otherwise
    /// the `nn.Module` that is being called.
    ///
    /// With `Stacks::Python`, an event without Python frames and without a node gets its native frames, because nothing
    /// else shows its cause.
    #[inline(always)]
    pub(crate) fn stack_and_context(&mut self) -> (StackId, ContextId) {
        let node = self.thread.context.get();
        match self.process().options.stacks {
            Stacks::Python => {
                let stack = self.stack();
                if !node.is_none() {
                    (stack, node)
                } else if stack.is_none() {
                    (self.native_stack(), node)
                } else {
                    (stack, self.module_call(stack))
                }
            }
            Stacks::Both => {
                let stack = self.stack();
                let context = if node.is_none() { self.module_call(stack) } else { node };
                (self.merged_stack(stack), context)
            }
            Stacks::Native => (self.native_stack(), node),
            Stacks::None => (StackId::NONE, node),
        }
    }

    #[inline(never)]
    fn native_stack(&mut self) -> StackId {
        let process = self.process();
        let recorder = self.recorder();
        let mut sink = RingSink { process, producer: &mut recorder.producer };
        recorder.native_stacks.capture(&process.interner, &mut sink)
    }

    /// Whether a function in `code` has called the current one, at most a few calls ago.
    pub(crate) fn is_called_from(&mut self, code: &Range<usize>) -> bool {
        let process = self.process();
        let recorder = self.recorder();
        let mut sink = RingSink { process, producer: &mut recorder.producer };
        recorder.native_stacks.is_called_from(code, &process.interner, &mut sink)
    }

    /// Whether a function on the calling thread's native stack belongs to an object whose file name satisfies
    /// `matches`.
    pub(crate) fn is_called_through(&mut self, matches: impl Fn(&[u8]) -> bool) -> bool {
        self.native_stack();
        self.recorder()
            .native_stacks
            .frames()
            .any(|(ip, _)| containing(ip.wrapping_sub(1)).is_some_and(|object| matches(object.file_name())))
    }

    #[inline(never)]
    fn merged_stack(&mut self, stack: StackId) -> StackId {
        let process = self.process();
        let Some(python) = process.python().filter(|_| !stack.is_none()) else { return self.native_stack() };
        let recorder = self.recorder();
        let mut sink = RingSink { process, producer: &mut recorder.producer };
        recorder.native_stacks.capture_merged(python, &recorder.python_stacks, stack, &process.interner, &mut sink)
    }

    /// The id of a calling object with this index ([`crate::linker::mapped_object::module_index`]). Defines the module
    /// in the trace if it is new. Publishes a held event first.
    pub(crate) fn module_id(&mut self, caller: &MappedObject, index: usize) -> ModuleId {
        self.publish();
        let process = self.process();
        let mut sink = RingSink { process, producer: &mut self.recorder().producer };
        sink.define_module(caller, index, || native::build_id(caller.start))
    }
}

impl Drop for Guard {
    #[inline(always)]
    fn drop(&mut self) {
        if self.thread.uses_common_ring.get() {
            self.leave_common_ring();
        }
        self.thread.guard_frame.set(0);
        // SAFETY: `errno_address` is the address of this thread's `errno`, and a guard never leaves its thread.
        unsafe { *self.thread.errno_address.get() = self.thread.errno.get() };
    }
}

impl Guard {
    #[cold]
    fn leave_common_ring(&mut self) {
        self.thread.has_unpublished.set(false);
        self.recorder().producer.publish();
        // The next event enters by the slow path again. That path looks for a free ring from time to time.
        self.thread.state.set(std::ptr::null());
        self.process().segment.header().common_lock.0.release();
    }
}

/// Claims an unused ring for this thread before others record. Its first event is then the first one of the ring.
pub(crate) fn reserve_ring(process: &Process) {
    // Without one, the thread gets the common ring later.
    let _ = claim_ring(process);
}

/// Claims a ring for this thread. Returns 0, the common ring, if all others are in use.
#[cold]
fn claim_ring(process: &Process) -> usize {
    let used = &process.segment.header().rings_used.0;
    owner::claim(process.segment.ring_headers(), used, thread_id(), thread_exists).unwrap_or(0)
}

/// Waits for the lock of the common ring. Returns `false` if its owner has not released it in time. After that nobody
/// waits until it is released.
#[cold]
fn lock_common_ring(process: &Process) -> bool {
    const LIMIT: Duration = Duration::from_secs(2);
    static IS_ABANDONED: AtomicBool = AtomicBool::new(false);
    let lock = &process.segment.header().common_lock.0;
    let (me, mut wait) = (thread_id(), BoundedWait::new(LIMIT));
    while !lock.take(me, thread_exists) {
        if lock.tid() == owner::NOBODY {
            return false;
        }
        if IS_ABANDONED.load(Ordering::Relaxed) || !wait.pause() {
            IS_ABANDONED.store(true, Ordering::Relaxed);
            return false;
        }
    }
    IS_ABANDONED.store(false, Ordering::Relaxed);
    true
}
