//! This process's recording: found out once, at the first event; found out anew in a forked child.
//!
//! A fork is noticed without a hook: [`Process::alive`] points into a page that the kernel wipes in the child
//! (`MADV_WIPEONFORK`), whichever way the child was made.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::options::{self, Options};
use memtrace_trace::shm::layout::SEGMENT_SIZE;
use memtrace_trace::shm::segment::Segment;

use crate::connect::connect;
use crate::cycles::Cycles;
use crate::hooks::TorchState;
use crate::labels::Labels;
use crate::local::{Local, Locals, wiped_on_fork};
use crate::names::Names;
use crate::objects::DefinedModules;
use crate::origins::Origins;
use crate::seccomp;
use crate::stack::{self, Interner, Python};

/// Everything a recording process has. Never freed: hooks on other threads may be using it.
pub(crate) struct Process {
    pub(crate) options: Options,
    pub(crate) segment: Segment,
    pub(crate) interner: Interner,
    pub(crate) modules: DefinedModules,
    pub(crate) torch: TorchState,
    pub(crate) origins: Origins,
    pub(crate) labels: Labels,
    pub(crate) names: Names,
    pub(crate) cycles: Cycles,
    python: AtomicPtr<Python>,
    /// When to look for an interpreter again: the number of looks that found none.
    python_misses: AtomicU64,
    python_reported: AtomicU32,
    /// One a ring; used by the ring's owner alone.
    locals: Locals,
    alive: &'static AtomicU32,
    /// Which devices have been described, one bit each.
    pub(crate) devices: AtomicU64,
    /// How many events are still to go without a look for a free ring: the last look found none.
    skip_looks: AtomicU32,
    /// Set while events do not fit and waiting has failed: the launcher is stopped or gone.
    pub(crate) stalled: AtomicU32,
}

/// Null: not yet known. [`off`], [`unreachable`]: this process records nothing, for ever or for now.
static CURRENT: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// The thread id that is finding out, 0 when nobody is.
static STARTING: AtomicU32 = AtomicU32::new(0);
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// The page that forks wipe.
static ALIVE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

/// Events that passed while the launcher could not be reached. Told when it can be; see [`Process::missed_event`].
static MISSED: AtomicU64 = AtomicU64::new(0);
/// Events that passed while the recording was paused; see [`Process::pass_by`].
static PASSED_BY: AtomicU64 = AtomicU64::new(0);

/// See [`Process::look_for_ring`].
const LOOK_EVERY: u32 = 1024;

/// How many of so many events that passed by have been told.
fn told(passed_by: u64) -> u64 {
    passed_by.min(1).max(passed_by & !1023)
}

/// A pointer that is neither null nor a process: this process was not started by memtrace.
fn off() -> *mut Process {
    std::ptr::without_provenance_mut(align_of::<Process>())
}

/// The other such pointer: the launcher could not be reached (no descriptor was free, it was stopped, it is gone).
fn unreachable() -> *mut Process {
    std::ptr::without_provenance_mut(2 * align_of::<Process>())
}

/// The process that `CURRENT` points to; `None` for null and the two markers.
#[inline]
fn known(pointer: *mut Process) -> Option<&'static Process> {
    if pointer.addr() <= 2 * align_of::<Process>() {
        return None;
    }
    // SAFETY: neither null nor a marker, so it was made by `start` and is never freed.
    Some(unsafe { &*pointer })
}

pub(crate) fn thread_id() -> u32 {
    // SAFETY: no arguments; cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

impl Process {
    /// This process's recording; `None` when it has none. The first call connects to the launcher.
    #[inline]
    pub(crate) fn current() -> Option<&'static Process> {
        if let Some(process) = Process::if_started() {
            return Some(process);
        }
        let pointer = CURRENT.load(Ordering::Relaxed);
        // Whom nobody answered asks again after 1, 2, 4, 8 ... events.
        let wait = std::ptr::eq(pointer, unreachable()) && !MISSED.load(Ordering::Relaxed).is_power_of_two();
        if std::ptr::eq(pointer, off()) || wait { None } else { Process::find_out() }
    }

    /// The same, but without connecting: `None` also before the first event, and in a forked child before its own first.
    #[inline]
    pub(crate) fn if_started() -> Option<&'static Process> {
        known(CURRENT.load(Ordering::Acquire)).filter(|p| p.alive.load(Ordering::Relaxed) != 0)
    }

    /// An event passes by unrecorded. Where the launcher is meant to know, it will be told.
    #[cold]
    pub(crate) fn missed_event() {
        if std::ptr::eq(CURRENT.load(Ordering::Relaxed), unreachable()) {
            MISSED.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An event passes by while the recording is paused. Not counted exactly where threads do so at once: it is to cost nothing. The
    /// first is told at once, so that a pause without an end is seen, others by the thousand, the rest when it ends.
    pub(crate) fn pass_by() {
        let before = PASSED_BY.load(Ordering::Relaxed);
        PASSED_BY.store(before.wrapping_add(1), Ordering::Relaxed);
        let news = told(before.wrapping_add(1)) - told(before);
        if news != 0
            && let Some(process) = Process::if_started()
        {
            process.count(Counter::EventsDropped, news);
        }
    }

    /// The pause is over.
    pub(crate) fn tell_passed_by(&self) {
        let all = PASSED_BY.swap(0, Ordering::Relaxed);
        self.count(Counter::EventsDropped, all - told(all));
    }

    #[cold]
    fn find_out() -> Option<&'static Process> {
        let me = thread_id();
        loop {
            match STARTING.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                // A forked child whose parent was starting on another thread: that thread is not here.
                Err(other) if !thread_exists(other) => {
                    let _ = STARTING.compare_exchange(other, 0, Ordering::Relaxed, Ordering::Relaxed);
                }
                Err(_) => {
                    // SAFETY: no arguments. The other thread only talks to the launcher, with a time limit.
                    unsafe { libc::sched_yield() };
                }
            }
        }
        let pointer = CURRENT.load(Ordering::Acquire);
        let before = known(pointer);
        let settled = std::ptr::eq(pointer, off()) || before.is_some_and(|p| p.alive.load(Ordering::Relaxed) != 0);
        let pointer = if settled {
            pointer
        } else {
            let pointer = match start(before) {
                Ok(process) => {
                    process.count(Counter::EventsDropped, MISSED.swap(0, Ordering::Relaxed));
                    Box::into_raw(Box::new(process))
                }
                Err(NotStarted::NoSession) => off(),
                Err(NotStarted::Unreachable) => unreachable(),
            };
            CURRENT.store(pointer, Ordering::Release);
            pointer
        };
        STARTING.store(0, Ordering::Release);
        known(pointer)
    }

    /// What belongs to ring `index`. Only the ring's owner may call.
    #[inline]
    pub(crate) fn local(&self, index: usize) -> Option<&Local> {
        self.locals.get(index)
    }

    /// The interpreter, when there is one and its layout was verified.
    #[inline]
    pub(crate) fn python(&self) -> Option<&Python> {
        let python = self.python.load(Ordering::Acquire);
        // SAFETY: null or a box leaked by `set_python`.
        unsafe { python.as_ref() }
    }

    /// Whether it is time to look for an interpreter: at the 1st, 2nd, 4th, 8th ... event without one.
    #[inline]
    pub(crate) fn should_look_for_python(&self) -> bool {
        self.python_misses.fetch_add(1, Ordering::Relaxed).wrapping_add(1).is_power_of_two()
    }

    /// No interpreter will be looked for any more.
    pub(crate) fn stop_looking_for_python(&self) {
        self.python_misses.store(1 << 63 | 1, Ordering::Relaxed);
    }

    /// Whether the interpreter's state has been reported.
    #[inline]
    pub(crate) fn python_reported(&self) -> bool {
        self.python_reported.load(Ordering::Relaxed) != 0
    }

    /// Marks it as reported; true for the one who does.
    pub(crate) fn set_python_reported(&self) -> bool {
        self.python_reported.swap(1, Ordering::Relaxed) == 0
    }

    pub(crate) fn set_python(&self, python: Python) {
        self.python.store(Box::into_raw(Box::new(python)), Ordering::Release);
    }

    /// The ring for a thread that has none: what `look` finds, 0 for the common one. A look that finds nothing asks the kernel about every
    /// owner, so after one only every [`LOOK_EVERY`]th event looks, more or less where threads count at once.
    pub(crate) fn look_for_ring(&self, look: impl FnOnce() -> usize) -> usize {
        let skip = self.skip_looks.load(Ordering::Relaxed);
        if let Some(left) = skip.checked_sub(1) {
            self.skip_looks.store(left, Ordering::Relaxed);
            return 0;
        }
        let index = look();
        self.skip_looks.store(if index == 0 { LOOK_EVERY } else { 0 }, Ordering::Relaxed);
        index
    }

    /// Adds to a counter of the shared header.
    pub(crate) fn count(&self, counter: Counter, by: u64) {
        if let Some(place) = self.segment.header().counters.0.get(counter as usize) {
            place.fetch_add(by, Ordering::Relaxed);
        }
    }
}

/// Whether this thread of this process exists.
pub(crate) fn thread_exists(tid: u32) -> bool {
    // SAFETY: signal 0 sends nothing.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid as libc::pid_t, 0) == 0 };
    sent || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Why a process records nothing.
enum NotStarted {
    /// It was not started by memtrace.
    NoSession,
    /// The launcher did not answer or may not be asked, or memory could not be had.
    Unreachable,
}

/// Connects. `parent` is what the process that forked this one had.
fn start(parent: Option<&Process>) -> Result<Process, NotStarted> {
    let options = session_options().ok_or(NotStarted::NoSession)?;
    let permits = seccomp::permits(options.filters);
    if !permits.recording || !is_room() {
        return Err(NotStarted::Unreachable);
    }
    if !permits.reading {
        stack::avoid_process_vm_readv();
    }
    let alive = alive_page().ok_or(NotStarted::Unreachable)?;
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let segment =
        connect(&options.token, generation, MISSED.load(Ordering::Relaxed) != 0).ok_or(NotStarted::Unreachable)?;
    alive.store(1, Ordering::Relaxed);
    let names = Names::new(options.names);
    let cycles = Cycles::new(options.cycles.is_some());
    Ok(Process {
        options,
        segment,
        interner: Interner::new(),
        modules: DefinedModules::new(),
        torch: TorchState::new(parent.map(|p| &p.torch)),
        origins: Origins::new(),
        labels: Labels::new(),
        names,
        cycles,
        python: AtomicPtr::new(std::ptr::null_mut()),
        python_misses: AtomicU64::new(0),
        python_reported: AtomicU32::new(0),
        locals: Locals::new().ok_or(NotStarted::Unreachable)?,
        alive,
        devices: AtomicU64::new(0),
        skip_looks: AtomicU32::new(0),
        stalled: AtomicU32::new(0),
    })
}

/// The options in the environment. The environment is read when first asked for, which is before the program's own code
/// can have changed it only for early events; the launcher's variable is not one that programs touch.
pub(crate) fn session_options() -> Option<Options> {
    // The loader leaves us out of programs that gain privileges. Where it was told otherwise, the environment is still their caller's.
    // SAFETY: a plain call.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // `std::env::var` takes std's own lock, which the target's C code does not know: getenv is what it would use itself.
    let name = std::ffi::CString::new(options::ENV).ok()?;
    // SAFETY: a C string.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: the environment's strings are C strings.
    let value = unsafe { std::ffi::CStr::from_ptr(value) };
    Options::parse(value.to_str().ok()?)
}

/// A word that reads 0 in every forked child until it is set again.
fn alive_page() -> Option<&'static AtomicU32> {
    let known = ALIVE.load(Ordering::Relaxed);
    if !known.is_null() {
        // SAFETY: mapped below and never unmapped.
        return Some(unsafe { &*known });
    }
    // Without it a child could write into its parent's rings, so no recording.
    let page = wiped_on_fork(size_of::<AtomicU32>())?.as_ptr();
    ALIVE.store(page.cast(), Ordering::Relaxed);
    // SAFETY: a page of zeroes, aligned, never unmapped.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

/// Whether what we map leaves a program with a limit on its address space (`ulimit -v`) the room that it had.
fn is_room() -> bool {
    const OURS: u64 = (SEGMENT_SIZE + Locals::SIZE) as u64;
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    if limit.rlim_cur == libc::RLIM_INFINITY {
        return true;
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').next().and_then(|pages| pages.parse().ok());
    pages.is_some_and(|pages| limit.rlim_cur.saturating_sub(pages.saturating_mul(4096)) / 8 >= OURS)
}
