//! The recording of this process. The first event creates it, and a forked child creates its own.
//!
//! Detecting a fork needs no hook. [`Process::alive`] points into a page that the kernel clears in every child
//! (`MADV_WIPEONFORK`), no matter how the child was created.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use memtrace_stackwalk::loader::{permit_barriers, permit_checked_reads};
use memtrace_stackwalk::{Interner, Python, avoid_process_vm_readv, page_size};
use memtrace_trace::counters::Counter;
use memtrace_trace::ids::ContextId;
use memtrace_trace::options::{self, Options};
use memtrace_trace::shm::layout::{FIRST_LIVE_SEQ, SEGMENT_SIZE};
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::unrecorded::Reason;

use super::attached;
use super::bounded_wait::BoundedWait;
use super::cancellation::NoCancellation;
use super::connect::{NoSegment, request_segment};
use super::errno::RestoreErrno;
use super::interpreter::InterpreterSearch;
use super::label_ids::Labels;
use super::left_frame::{stack_pointer, was_left};
use super::module_calls::ModuleCallIds;
use super::modules::DefinedModules;
use super::thread_state::{ThreadState, ThreadStates, map_wiped_on_fork};
use super::watch::Watch;
use super::{observer, reuse, seccomp, unrecorded};

/// The state of a process that is being recorded. Never freed, because hooks on other threads may use it at any time.
pub(crate) struct Process {
    pub(crate) options: Options,
    pub(crate) segment: Segment,
    pub(super) interner: Interner,
    pub(super) modules: DefinedModules,
    pub(super) labels: Labels,
    /// Calls of `nn.Module`s.
    pub(crate) module_calls: ModuleCallIds,
    /// How many ids autograd nodes and module calls have been given.
    contexts: AtomicU32,
    pub(crate) watch: Watch,
    pub(super) interpreter: InterpreterSearch,
    pub(super) rings: ThreadRings,
    /// 0 in a forked child until it starts its own recording.
    alive: &'static AtomicU32,
    /// Set while the rings are full and waiting has failed: the launcher is stopped or has ended.
    pub(super) stalled: AtomicU32,
}

/// The rings of the segment as this process assigns them to its threads.
pub(super) struct ThreadRings {
    /// The state of each ring, used only by the ring's owner.
    states: ThreadStates,
    /// How many more events skip the search for a free ring, because the last search found none.
    searches_to_skip: AtomicU32,
}

impl ThreadRings {
    /// The state of ring `index`. Only the ring's owner may call this.
    #[inline]
    pub(super) fn state(&self, index: usize) -> Option<&ThreadState> {
        self.states.get(index)
    }

    /// Finds a ring for a thread without one: the result of `search`, 0 for the common ring.
    ///
    /// A failed search asks the kernel about the owner of every ring. So after one, only every
    /// [`RING_SEARCH_INTERVAL`]th event searches again. That number is approximate if several threads count at once.
    pub(super) fn find(&self, search: impl FnOnce() -> usize) -> usize {
        let skip = self.searches_to_skip.load(Ordering::Relaxed);
        if let Some(left) = skip.checked_sub(1) {
            self.searches_to_skip.store(left, Ordering::Relaxed);
            return 0;
        }
        let index = search();
        self.searches_to_skip.store(if index == 0 { RING_SEARCH_INTERVAL } else { 0 }, Ordering::Relaxed);
        index
    }
}

/// The recording of this process. Null before the first event. [`not_traced`] if it never records,
/// [`launcher_unreachable`] if it cannot record now.
static CURRENT: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// The id of the thread that is starting the recording, 0 if none is.
static STARTING_THREAD: AtomicU32 = AtomicU32::new(0);
/// The stack pointer at which that thread started it.
static STARTING_FRAME: AtomicUsize = AtomicUsize::new(0);
/// The id of a thread that was starting the recording and has not ended that in time. 0 if there is none.
static ABANDONED_BY: AtomicU32 = AtomicU32::new(0);
/// How long a thread waits while another one starts the recording. Longer than the other can take: it waits for the
/// launcher three times, each time for at most 2 s.
const START_LIMIT: Duration = Duration::from_secs(8);
/// How many recordings this process and its ancestors have tried to start.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// The page that the kernel clears in forked children. Null until it is mapped.
static ALIVE_PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

/// Events that were lost while the launcher could not be reached. Counted in the recording once it starts
/// ([`Process::count_missed_event`]).
static MISSED_EVENTS: AtomicU64 = AtomicU64::new(0);
/// How many events skip the search after one that found no free ring ([`ThreadRings::find`]).
const RING_SEARCH_INTERVAL: u32 = 1024;

/// A marker that is neither null nor a process: memtrace did not start this process.
fn not_traced() -> *mut Process {
    std::ptr::without_provenance_mut(align_of::<Process>())
}

/// A second marker: the launcher cannot be reached. No file descriptor was free, or the launcher is stopped or has
/// ended.
fn launcher_unreachable() -> *mut Process {
    std::ptr::without_provenance_mut(2 * align_of::<Process>())
}

/// The process that `pointer` refers to. `None` for null and for the two markers.
#[inline]
fn as_process(pointer: *mut Process) -> Option<&'static Process> {
    if pointer.addr() <= 2 * align_of::<Process>() {
        return None;
    }
    // SAFETY: the pointer is neither null nor a marker, so `start_or_wait` made it from a box that is never freed.
    Some(unsafe { &*pointer })
}

/// The process that `pointer` refers to. `None` also in a forked child, and after [`Process::forget`].
#[inline]
fn as_own_process(pointer: *mut Process) -> Option<&'static Process> {
    as_process(pointer).filter(|process| process.alive.load(Ordering::Relaxed) != 0)
}

/// The kernel's id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: `gettid` takes no arguments and cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

impl Process {
    /// This process's recording. `None` if it has none. The first call connects to the launcher.
    #[inline]
    pub(crate) fn current() -> Option<&'static Process> {
        if let Some(process) = Process::if_started() {
            return Some(process);
        }
        let pointer = CURRENT.load(Ordering::Relaxed);
        // Retries the connection with exponential backoff: after 1, 2, 4, 8 ... lost events.
        let wait =
            std::ptr::eq(pointer, launcher_unreachable()) && !MISSED_EVENTS.load(Ordering::Relaxed).is_power_of_two();
        if std::ptr::eq(pointer, not_traced()) || wait { None } else { Process::start_or_wait() }
    }

    /// This process's recording, without connecting to the launcher. `None` also before the first event of a process,
    /// forked children included.
    #[inline]
    pub(crate) fn if_started() -> Option<&'static Process> {
        as_own_process(CURRENT.load(Ordering::Acquire))
    }

    /// Whether memtrace did not start this process. False before the first event has shown that.
    pub(crate) fn is_never_recorded() -> bool {
        std::ptr::eq(CURRENT.load(Ordering::Relaxed), not_traced())
    }

    /// Counts an event that is not recorded because the launcher cannot be reached, or because another thread has not
    /// started the recording in time. The recording includes this count once it starts.
    #[cold]
    pub(crate) fn count_missed_event() {
        if std::ptr::eq(CURRENT.load(Ordering::Relaxed), not_traced()) {
            return;
        }
        // Another thread may have started the recording since this one looked, and have counted the events before this
        // one. Of this addition and that store of `CURRENT`, one thread sees the other's: both are sequentially
        // consistent.
        MISSED_EVENTS.fetch_add(1, Ordering::SeqCst);
        if let Some(process) = as_own_process(CURRENT.load(Ordering::SeqCst)) {
            process.include_missed_events();
        }
    }

    /// Counts the events that were missed before the recording started, or while it did.
    fn include_missed_events(&self) {
        self.count(Counter::EventsDropped, MISSED_EVENTS.swap(0, Ordering::SeqCst));
    }

    /// Counts an event that is not recorded because this thread is already recording another one: a signal handler or a
    /// callback has interrupted a hook. While the recording is starting, that event counts as a missed one.
    #[cold]
    pub(super) fn count_reentered_event() {
        match Process::if_started() {
            Some(process) => process.count(Counter::Reentered, 1),
            None => Process::count_missed_event(),
        }
    }

    /// Counts an event that is not recorded because of a pause. In a process that has no recording yet, such as a child
    /// that was forked during the pause, this starts it: a pause without an end is visible.
    pub(super) fn count_paused_event() {
        if let Some(process) = Process::if_started() {
            return process.count(Counter::EventsDropped, 1);
        }
        let _errno = RestoreErrno::new();
        let _no_cancellation = NoCancellation::new();
        match Process::current() {
            Some(process) => process.count(Counter::EventsDropped, 1),
            None => Process::count_missed_event(),
        }
    }

    /// Starts the recording before the first allocation of this process, and notes that in the segment. Then the
    /// launcher counts its event as lost if the process ends inside the call. Returns whether there is a recording.
    #[cold]
    pub(crate) fn begin_first_allocation() -> bool {
        let _errno = RestoreErrno::new();
        let _no_cancellation = NoCancellation::new();
        let Some(process) = Process::current() else { return false };
        process.segment.header().makes_first_allocation.store(1, Ordering::Relaxed);
        true
    }

    /// Notes that the allocation has no event.
    #[cold]
    pub(crate) fn end_first_allocation() {
        if let Some(process) = Process::if_started() {
            process.segment.header().makes_first_allocation.store(0, Ordering::Relaxed);
        }
    }

    /// Counts an event that is lost because a signal handler has left its hook by `siglongjmp`.
    #[cold]
    pub(super) fn count_left_event() {
        match Process::if_started() {
            Some(process) => process.count(Counter::EventsDropped, 1),
            None => Process::count_missed_event(),
        }
    }

    /// Starts the recording, or waits while another thread does. `None` if this process has no recording, or if the
    /// other thread has not started it in time.
    #[cold]
    fn start_or_wait() -> Option<&'static Process> {
        let me = thread_id();
        let frame = stack_pointer();
        let mut wait = BoundedWait::new(START_LIMIT);
        let mut waits_for = 0;
        loop {
            match STARTING_THREAD.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                // This thread is already starting the recording, and a signal handler has interrupted it. Or the
                // handler has left that by `siglongjmp`. Then the recording starts anew.
                Err(other) if other == me => {
                    if !was_left(STARTING_FRAME.load(Ordering::Relaxed), frame) {
                        return None;
                    }
                    break;
                }
                // In a forked child whose parent was starting the recording on another thread: that thread does not
                // exist here.
                Err(other) if !thread_exists(other) => {
                    let _ = STARTING_THREAD.compare_exchange(other, 0, Ordering::Relaxed, Ordering::Relaxed);
                }
                // The other thread only connects to the launcher, with a time limit. If it takes much longer, a signal
                // handler has left that by `siglongjmp`. This thread's event is lost, and the next event starts the
                // recording in its place.
                Err(other) if ABANDONED_BY.load(Ordering::Relaxed) == other => {
                    let _ = STARTING_THREAD.compare_exchange(other, 0, Ordering::Relaxed, Ordering::Relaxed);
                }
                // A thread that has just taken another one's place has its own time.
                Err(other) if other != waits_for => {
                    waits_for = other;
                    wait = BoundedWait::new(START_LIMIT);
                }
                Err(other) => {
                    if !wait.pause() {
                        ABANDONED_BY.store(other, Ordering::Relaxed);
                        return None;
                    }
                }
            }
        }
        STARTING_FRAME.store(frame, Ordering::Relaxed);
        ABANDONED_BY.store(0, Ordering::Relaxed);
        let pointer = CURRENT.load(Ordering::Acquire);
        let settled = std::ptr::eq(pointer, not_traced()) || as_own_process(pointer).is_some();
        let pointer = if settled {
            pointer
        } else {
            let pointer = match start() {
                Ok(process) => Box::into_raw(Box::new(process)),
                Err(NotStarted::NotTraced) => not_traced(),
                Err(NotStarted::Unreachable) => launcher_unreachable(),
            };
            if STARTING_THREAD.load(Ordering::Acquire) != me {
                // It took so long that another thread has started a recording in its place.
                return Process::if_started();
            }
            CURRENT.store(pointer, Ordering::SeqCst);
            // Count the missed events after the store, so that none comes between (see `count_missed_event`).
            if let Some(process) = as_process(pointer) {
                process.include_missed_events();
            }
            pointer
        };
        STARTING_THREAD.store(0, Ordering::Release);
        as_process(pointer)
    }

    /// Forgets the recording of this process, so that the next event begins one.
    pub(crate) fn forget() {
        if let Some(process) = Process::if_started() {
            process.alive.store(0, Ordering::Relaxed);
        }
        CURRENT.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// Gives back the segment's memory and makes every thread look for a ring again. Recording must be paused. A hook
    /// that is running may still write to the segment, where nobody reads it. The next recording uses the addresses
    /// again.
    pub(crate) fn leave(&self) {
        reuse::leave(&self.segment, self.rings.states, thread_exists);
    }

    /// The interpreter. `None` if there is none.
    #[inline]
    pub(crate) fn python(&self) -> Option<&Python> {
        self.interpreter.python()
    }

    /// A new id, distinct among autograd nodes and module calls.
    pub(crate) fn next_context(&self) -> ContextId {
        ContextId(self.contexts.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Adds to a counter in the segment's header.
    pub(crate) fn count(&self, counter: Counter, by: u64) {
        if let Some(slot) = self.segment.header().counters.0.get(counter as usize) {
            slot.fetch_add(by, Ordering::Relaxed);
        }
    }
}

/// Whether this process has a thread with this id.
pub(crate) fn thread_exists(tid: u32) -> bool {
    // SAFETY: signal 0 is never delivered. The call only checks whether the thread exists.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid as libc::pid_t, 0) == 0 };
    sent || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Why a recording cannot start.
enum NotStarted {
    /// memtrace did not start this process.
    NotTraced,
    /// The launcher did not answer, a seccomp filter forbids the connection, or memory is not available.
    Unreachable,
}

/// Starts a recording. If that fails, reports the reason in the run folder.
fn start() -> Result<Process, NotStarted> {
    let options = session_options().ok_or(NotStarted::NotTraced)?;
    #[cfg(not(test))]
    crate::linker::c_library::bind_memory_functions();
    let missed = MISSED_EVENTS.load(Ordering::Relaxed);
    match connect(&options, missed != 0) {
        Ok(parts) => {
            unrecorded::withdraw(&options);
            Ok(process(options, parts))
        }
        Err(NoSegment::Refused) => Err(NotStarted::Unreachable),
        Err(NoSegment::Unrecorded(reason)) => {
            unrecorded::report(&options, reason, missed);
            Err(NotStarted::Unreachable)
        }
    }
}

/// The parts that a recording needs from the kernel and the launcher.
struct Parts {
    alive: &'static AtomicU32,
    segment: Segment,
    thread_states: ThreadStates,
}

/// Connects to the launcher. `is_retry` says that an earlier attempt has failed.
fn connect(options: &Options, is_retry: bool) -> Result<Parts, NoSegment> {
    const NO_RESOURCES: NoSegment = NoSegment::Unrecorded(Reason::NoResources);
    let permitted = seccomp::permitted_calls(options.filters);
    if !permitted.recording {
        return Err(NoSegment::Unrecorded(Reason::Seccomp));
    }
    if !reuse::has_memory() && !has_address_space() {
        return Err(NoSegment::Unrecorded(Reason::AddressSpace));
    }
    if permitted.membarrier {
        permit_barriers();
    }
    if permitted.process_vm_readv {
        permit_checked_reads();
    } else {
        avoid_process_vm_readv();
    }
    let alive = alive_page().ok_or(NO_RESOURCES)?;
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let fd = request_segment(&options.token, generation, is_retry)?;
    let (segment, thread_states) = reuse::map(fd.as_fd()).ok_or(NO_RESOURCES)?;
    drop(fd);
    alive.store(1, Ordering::Relaxed);
    Ok(Parts { alive, segment, thread_states })
}

fn process(options: Options, parts: Parts) -> Process {
    let Parts { alive, segment, thread_states } = parts;
    if attached::is_here() {
        // The numbers before are for the state that was there before.
        segment.header().next_seq.0.store(FIRST_LIVE_SEQ, Ordering::Relaxed);
        segment.header().is_attached.store(1, Ordering::Release);
    }
    let watch = observer::start(&options);
    Process {
        options,
        segment,
        interner: Interner::new(),
        modules: DefinedModules::new(),
        labels: Labels::new(),
        module_calls: ModuleCallIds::new(),
        contexts: AtomicU32::new(0),
        watch,
        interpreter: InterpreterSearch::new(),
        rings: ThreadRings { states: thread_states, searches_to_skip: AtomicU32::new(0) },
        alive,
        stalled: AtomicU32::new(0),
    }
}

/// The options that the launcher put into the environment, or gave when it attached. `None` if memtrace did not start
/// this process.
///
/// The environment is read at the first event, when the program may have changed it. Programs do not touch the
/// launcher's variable.
pub(crate) fn session_options() -> Option<Options> {
    if let Some(options) = attached::options() {
        return Some(options.clone());
    }
    // The loader does not preload this library into programs that gain privileges. If the system's configuration forces
    // it to, the environment still belongs to the unprivileged caller.
    // SAFETY: `getauxval` takes any number.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // `std::env::var` takes the standard library's lock, which the program's C code does not know. C code calls
    // `getenv` itself.
    let name = std::ffi::CString::new(options::ENV).ok()?;
    // SAFETY: `name` is a C string.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: `value` is not null, and every string in the environment is a C string.
    let value = unsafe { std::ffi::CStr::from_ptr(value) };
    Options::parse(value.to_str().ok()?)
}

/// A word that reads 0 in every forked child until the child sets it. `None` if the kernel cannot provide it.
fn alive_page() -> Option<&'static AtomicU32> {
    let known = ALIVE_PAGE.load(Ordering::Relaxed);
    if !known.is_null() {
        // SAFETY: this function has mapped the page, and nothing unmaps it.
        return Some(unsafe { &*known });
    }
    // Without this page a child could write to its parent's rings, so there is no recording.
    let page = map_wiped_on_fork(size_of::<AtomicU32>())?.as_ptr();
    ALIVE_PAGE.store(page.cast(), Ordering::Relaxed);
    // SAFETY: the page is zeroed, aligned and never unmapped.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

/// Whether our mappings take at most an eighth of the address space that the program's limit (`ulimit -v`) leaves.
fn has_address_space() -> bool {
    const OUR_MAPPINGS: u64 = (SEGMENT_SIZE + ThreadStates::SIZE) as u64;
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: `limit` is writable.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    if limit.rlim_cur == libc::RLIM_INFINITY {
        return true;
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').next().and_then(|pages| pages.parse().ok());
    pages.is_some_and(|pages| {
        limit.rlim_cur.saturating_sub(pages.saturating_mul(page_size() as u64)) / 8 >= OUR_MAPPINGS
    })
}
