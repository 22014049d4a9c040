//! The proof that a thread is in a hook's own work: whatever records needs a [`Guard`], and only [`Guard::enter`] makes one.
//!
//! The rules it keeps: one guard a thread at a time (work that comes back to a hook calls the original and nothing else),
//! never alive while an original runs, `errno` as it was when it ends.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::{ContextId, StackId, ThreadId};
use memtrace_trace::options::Stacks;
use memtrace_trace::shm::layout::RING_COUNT;
use memtrace_trace::shm::ring::Producer;

use crate::emit::{self, RingSink};
use crate::hooks;
use crate::local::Inner;
use crate::process::{Process, thread_exists, thread_id};
use crate::real;
use crate::stack::{FrameText, Python, Reason};

/// What a thread has in thread-local storage: small, plain, without a destructor.
pub(crate) struct Thread {
    busy: Cell<bool>,
    /// Whose ring `ring` is in: another process's (before a fork) is none of ours.
    process: Cell<*const Process>,
    /// The claimed ring; 0, the common one, stands for none.
    ring: Cell<usize>,
    /// An allocation that was written and not published: it waits for its rounded size.
    held: Cell<Option<Event>>,
    /// The autograd node being run; see `hooks::torch::autograd`.
    pub(crate) context: Cell<ContextId>,
    /// Depth of `evaluate_function` calls.
    pub(crate) backward_depth: Cell<u32>,
    /// Depth of hooked runtime calls, and whether a driver call was recorded inside.
    pub(crate) runtime_depth: Cell<u32>,
    pub(crate) nested_seen: Cell<bool>,
    /// Whether the runtime call under way was made by PyTorch's caching allocator.
    pub(crate) runtime_in_allocator: Cell<bool>,
    /// The last address and size that a hooked CUDA call gave to PyTorch's allocator on this thread.
    pub(crate) last_segment: Cell<(u64, u64)>,
    /// The stack of the last free request, for the completion that follows it at once.
    pub(crate) last_free: Cell<(u64, StackId)>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            busy: Cell::new(false),
            process: Cell::new(std::ptr::null()),
            ring: Cell::new(0),
            held: Cell::new(None),
            context: Cell::new(ContextId::NONE),
            backward_depth: Cell::new(0),
            runtime_depth: Cell::new(0),
            nested_seen: Cell::new(false),
            runtime_in_allocator: Cell::new(false),
            last_segment: Cell::new((0, 0)),
            last_free: Cell::new((0, StackId::NONE)),
        }
    };
}

/// The calling thread's storage, without a guard: for the cells that hooks keep across an original's call.
#[inline]
pub(crate) fn thread<T>(visit: impl FnOnce(&Thread) -> T) -> T {
    THREAD.with(visit)
}

/// See the module.
pub(crate) struct Guard {
    pub(crate) process: &'static Process,
    inner: &'static mut Inner,
    errno: i32,
    common: bool,
    /// Not for another thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl Guard {
    /// Begins a hook's own work; `None` when this process records nothing, or this thread is in a hook's work already.
    #[inline]
    pub(crate) fn enter() -> Option<Guard> {
        THREAD.with(|thread| {
            if thread.busy.get() {
                if let Some(process) = Process::if_started() {
                    process.count(Counter::Reentered, 1);
                }
                return None;
            }
            // SAFETY: errno is the thread's own.
            let errno = unsafe { *libc::__errno_location() };
            thread.busy.set(true);
            let guard = Guard::ready(thread, errno);
            if guard.is_none() {
                Process::missed_event();
                thread.busy.set(false);
                // SAFETY: as above.
                unsafe { *libc::__errno_location() = errno };
            }
            guard
        })
    }

    #[inline]
    fn ready(thread: &Thread, errno: i32) -> Option<Guard> {
        let process = Process::current()?;
        if !std::ptr::eq(thread.process.get(), process) {
            thread.process.set(process);
            thread.ring.set(0);
            thread.held.set(None);
        }
        let mut index = thread.ring.get();
        let mut fresh = false;
        if index == 0 {
            index = claim_ring(process);
            thread.ring.set(index);
            fresh = true;
        }
        let common = index == 0;
        if common {
            lock_common(process);
            process.count(Counter::SharedRingEvents, 1);
        }
        // SAFETY: this thread owns the ring (its id is in the owner word) or holds the common ring's lock, and `busy`
        // keeps it from asking twice.
        let inner: &'static mut Inner = unsafe { process.local(index)?.get() };
        let mut guard = Guard { process, inner, errno, common, _here: std::marker::PhantomData };
        if guard.inner.producer.is_none() {
            guard.inner.producer = Some(Producer::new(process.segment.ring(index)?));
        }
        if fresh || common {
            guard.announce();
        }
        Some(guard)
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
    }

    /// Numbers, times, writes and publishes an event; gives its number.
    #[inline]
    pub(crate) fn emit(&mut self, mut event: Event) -> u64 {
        emit::stamp(self.process, &mut event);
        if let Some(producer) = &mut self.inner.producer {
            emit::write(self.process, producer, &event.to_slot());
            producer.publish();
            THREAD.with(|t| t.held.set(None));
        }
        event.seq
    }

    /// The same, but the event is published only with the next one or by [`Self::amend`].
    #[inline]
    pub(crate) fn hold(&mut self, mut event: Event) {
        emit::stamp(self.process, &mut event);
        let Some(producer) = &mut self.inner.producer else { return };
        let written = emit::write(self.process, producer, &event.to_slot());
        THREAD.with(|t| t.held.set(written.then_some(event)));
    }

    /// Completes the allocation that was held, if it is the one at `addr`: its rounded size is now known. Returns whether it was.
    #[inline]
    pub(crate) fn amend(&mut self, addr: u64, block_size: u64) -> bool {
        let Some(mut event) = THREAD.with(|t| t.held.take()) else { return false };
        let Some(producer) = &mut self.inner.producer else { return false };
        let same = event.addr == addr && block_size >= event.size;
        if same {
            event.slack = u32::try_from(block_size - event.size).unwrap_or(u32::MAX);
            event.flags = event.flags.with(Flags::SLACK_KNOWN);
            producer.amend(&event.to_slot());
        }
        producer.publish();
        same
    }

    /// Sends a definition.
    pub(crate) fn define(&mut self, definition: &Definition<'_>) {
        if let Some(producer) = &mut self.inner.producer {
            THREAD.with(|t| t.held.set(None));
            emit::define(self.process, producer, definition);
        }
    }

    /// Sends a notice: what a part of the recorder did or could not do.
    pub(crate) fn notice(&mut self, topic: &str, text: &str) {
        self.define(&Definition::Notice { topic, text });
    }

    /// The calling thread's Python stack.
    #[inline]
    pub(crate) fn stack(&mut self) -> StackId {
        if !matches!(self.process.options.stacks, Stacks::Python | Stacks::Both) {
            return StackId::NONE;
        }
        let Some(python) = self.process.python() else { return self.look_for_python() };
        self.walk(python)
    }

    #[inline]
    fn walk(&mut self, python: &Python) -> StackId {
        let Some(producer) = &mut self.inner.producer else { return StackId::NONE };
        let mut sink = RingSink { process: self.process, producer };
        let stack = python.capture(&mut self.inner.stacks, &self.process.interner, &mut sink);
        if !self.process.python_reported() {
            self.report_python(python);
        }
        stack
    }

    #[cold]
    fn look_for_python(&mut self) -> StackId {
        if !self.process.should_look_for_python() {
            return StackId::NONE;
        }
        match Python::detect(|name| real::lookup(libc::RTLD_DEFAULT, name)) {
            Ok(python) => {
                self.process.set_python(python);
                self.process.python().map_or(StackId::NONE, |p| self.walk(p))
            }
            Err(Reason::NoPython) => StackId::NONE,
            Err(reason) => {
                self.notice("python", &format!("no Python stacks: {reason}"));
                self.process.stop_looking_for_python();
                StackId::NONE
            }
        }
    }

    /// Says once whether the interpreter's layout was verified.
    #[cold]
    fn report_python(&mut self, python: &Python) {
        let (major, minor) = python.version();
        let text = match python.verified() {
            Ok(false) => return,
            Ok(true) => format!("CPython {major}.{minor}: layout verified, stacks are taken"),
            Err(reason) => format!("CPython {major}.{minor}: no Python stacks: {reason}"),
        };
        if self.process.set_python_reported() {
            self.notice("python", &text);
        }
    }

    /// Describes a device the first time it is seen: `obtained` bytes of what is in use now were obtained by this call.
    #[inline]
    pub(crate) fn device_seen(&mut self, device: i16, obtained: u64) {
        let bit = 1u64 << (device as u64 & 63);
        if self.process.devices.load(Ordering::Relaxed) & bit == 0
            && self.process.devices.fetch_or(bit, Ordering::Relaxed) & bit == 0
        {
            hooks::device_in_use();
            hooks::describe_device(self, device, obtained);
        }
    }

    /// A stack of one synthetic frame on top of `parent`. Slow: for names that are then remembered.
    #[allow(dead_code, reason = "native frames come with a later issue")]
    pub(crate) fn push_frame(&mut self, parent: StackId, text: &FrameText<'_>) -> StackId {
        let Some(producer) = &mut self.inner.producer else { return StackId::NONE };
        let mut sink = RingSink { process: self.process, producer };
        self.process.interner.push(parent, text, &mut sink)
    }
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        if self.common {
            THREAD.with(|t| t.held.set(None));
            if let Some(producer) = &mut self.inner.producer {
                producer.publish();
            }
            self.process.segment.header().common_lock.0.store(0, Ordering::Release);
        }
        THREAD.with(|t| t.busy.set(false));
        // SAFETY: errno is the thread's own.
        unsafe { *libc::__errno_location() = self.errno };
    }
}

/// Claims a ring for this thread: a free one, one that a dead thread of the same id left, or one whose owner is gone; 0 when
/// all are in use.
#[cold]
fn claim_ring(process: &Process) -> usize {
    let me = thread_id();
    let claim = |from: u32, index: usize| {
        let Some(header) = process.segment.ring_header(index) else { return false };
        let claimed = header.owner.0.compare_exchange(from, me, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if claimed {
            process.segment.header().rings_used.0.fetch_max(index as u32 + 1, Ordering::Relaxed);
        }
        claimed
    };
    let owner = |index: usize| process.segment.ring_header(index).map_or(0, |h| h.owner.0.load(Ordering::Relaxed));
    let used = process.segment.header().rings_used.0.load(Ordering::Relaxed).clamp(1, RING_COUNT as u32) as usize;
    // A ring that carries our own id was left by a thread that is gone.
    if let Some(index) = (1..used).find(|i| owner(*i) == me) {
        return index;
    }
    // Rings of dead threads before fresh ones: memory follows the number of threads alive at once.
    for index in 1..used {
        let from = owner(index);
        if (from == 0 || !thread_exists(from)) && claim(from, index) {
            return index;
        }
    }
    (used..RING_COUNT).find(|i| claim(0, *i)).unwrap_or(0)
}

#[cold]
fn lock_common(process: &Process) {
    let lock = &process.segment.header().common_lock.0;
    let me = thread_id();
    while lock.compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
        // SAFETY: no arguments.
        unsafe { libc::sched_yield() };
    }
}
