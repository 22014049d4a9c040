//! Compares the calling thread's stack with libgcc's.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{
    AtomicPtr,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use memtrace_stackwalk::loader::permit_checked_reads;
use memtrace_stackwalk::{DefinitionSink, FrameText, Interner, NativeStacks};
use memtrace_trace::ids::{FrameId, StackId};

use crate::results::Results;

unsafe extern "C" {
    fn _Unwind_Backtrace(step: extern "C" fn(*mut c_void, *mut c_void) -> c_int, data: *mut c_void) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// A thread compares its first calls, which take some 10 us each. Later it compares one of [`SAMPLED`], so that a
/// thread that only takes locks ends in reasonable time.
const ALL: u64 = 1_000_000;
const SAMPLED: u64 = 64;

/// The calling thread's state. Plain data without a destructor, so it works until the end of the thread. The walker's
/// few pages are not freed.
struct Thread {
    is_comparing: Cell<bool>,
    calls: Cell<u64>,
    stacks: UnsafeCell<NativeStacks>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread { is_comparing: Cell::new(false), calls: Cell::new(0), stacks: UnsafeCell::new(NativeStacks::new()) }
    };
}

/// Compares the calling thread's stack, unless the call comes from a comparison.
#[inline(never)]
pub(crate) fn compare_stack() {
    THREAD.with(|thread| {
        if thread.is_comparing.replace(true) {
            return;
        }
        let calls = thread.calls.replace(thread.calls.get() + 1);
        if calls < ALL || calls.is_multiple_of(SAMPLED) {
            // SAFETY: takes no arguments. The result points to this thread's `errno`.
            let errno = unsafe { &mut *libc::__errno_location() };
            let before = *errno;
            if let Some(process) = Process::current() {
                if calls == 0 {
                    process.results.threads.fetch_add(1, Relaxed);
                }
                // SAFETY: `is_comparing` was false, so there is no other borrow.
                process.compare(unsafe { &mut *thread.stacks.get() });
            }
            *errno = before;
        }
        thread.is_comparing.set(false);
    });
}

/// The state that the threads of a process share. It is never freed.
struct Process {
    id: libc::pid_t,
    results: &'static Results,
    /// Our own code.
    own: Range<usize>,
    interner: Interner,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

impl Process {
    /// The present process. `None` without a file for the results.
    fn current() -> Option<&'static Process> {
        // SAFETY: `getpid` takes no arguments and has no preconditions.
        let id = unsafe { libc::getpid() };
        let known = PROCESS.load(Acquire);
        // SAFETY: the pointer is null or comes from `start`, and a process is never freed.
        match unsafe { known.as_ref() } {
            Some(process) if process.id == id => Some(process),
            parent => Process::start(id, known, parent.map(|parent| parent.results)),
        }
    }

    /// Starts in a new process. A forked child leaves its parent's interner alone, because a thread that does not exist
    /// in the child may have held its lock.
    #[cold]
    fn start(id: libc::pid_t, known: *mut Process, results: Option<&'static Results>) -> Option<&'static Process> {
        let results = results.or_else(Results::open)?;
        permit_checked_reads();
        let process = Process { id, results, own: own_code()?, interner: Interner::new() };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: creates a new anonymous mapping at an address that the kernel chooses.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), size_of::<Process>(), protection, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return None;
        }
        let memory = memory.cast::<Process>();
        // SAFETY: the memory is new, page-aligned and large enough.
        unsafe { memory.write(process) };
        // If another thread was first, its process is used. Ours has mapped nothing but this page.
        let current = match PROCESS.compare_exchange(known, memory, AcqRel, Acquire) {
            Ok(_) => memory,
            Err(current) => current,
        };
        // SAFETY: either pointer comes from this function, and a process is never freed.
        unsafe { current.as_ref() }
    }

    fn compare(&self, stacks: &mut NativeStacks) {
        let mut sink = NewStacks(false);
        stacks.capture(&self.interner, &mut sink);
        let mut ours = stacks.frames().skip_while(|(_, is_own)| *is_own).map(|(ip, _)| ip);
        let mut walk = LibgccWalk {
            ours: &mut ours,
            own: &self.own,
            is_outside: false,
            equal: 0,
            last: Address(0),
            difference: None,
        };
        // SAFETY: `step` has the type that libgcc requires, and `walk` outlives the call.
        unsafe { _Unwind_Backtrace(step, (&raw mut walk).cast()) };
        self.results.compared.fetch_add(1, Relaxed);
        if sink.0 {
            self.results.distinct.fetch_add(1, Relaxed);
        }
        // libgcc's stack may be shorter, because it stops at code without unwinding information. But it has at least
        // the caller of the hook.
        let LibgccWalk { equal, last, difference, .. } = walk;
        let difference = difference.or_else(|| (equal == 0).then(|| (ours.next().map(Address), None)));
        if let Some((ours, libgcc)) = difference
            && self.results.different.fetch_add(1, Relaxed) == 0
        {
            self.results.describe(format_args!(
                "frame {equal} differs: after {last}, memtrace found {} and libgcc {}",
                OrEnd(ours),
                OrEnd(libgcc)
            ));
        }
    }
}

/// A sink that only notes whether a stack is new.
struct NewStacks(bool);

impl DefinitionSink for NewStacks {
    fn frame(&mut self, _: FrameId, _: &FrameText<'_>) {}

    fn stack(&mut self, _: StackId, _: StackId, _: FrameId) {
        self.0 = true;
    }
}

/// A walk by libgcc, beside memtrace's frames outside of this library.
struct LibgccWalk<'a> {
    ours: &'a mut dyn Iterator<Item = usize>,
    own: &'a Range<usize>,
    /// Whether the walk has left this library.
    is_outside: bool,
    /// How many frames are equal, and the last one of them.
    equal: usize,
    last: Address,
    /// The first frames that differ, memtrace's and libgcc's.
    difference: Option<(Option<Address>, Option<Address>)>,
}

extern "C" fn step(context: *mut c_void, walk: *mut c_void) -> c_int {
    /// `_URC_NO_REASON` and `_URC_NORMAL_STOP` of unwind.h.
    const CONTINUE: c_int = 0;
    const STOP: c_int = 4;
    // SAFETY: libgcc passes its context, and `walk` is the one of `compare`, which nothing else uses meanwhile.
    let (ip, walk) = unsafe { (_Unwind_GetIP(context), &mut *walk.cast::<LibgccWalk<'_>>()) };
    // The outermost frame may end in a null address.
    if ip == 0 || (!walk.is_outside && walk.own.contains(&(ip - 1))) {
        return CONTINUE;
    }
    walk.is_outside = true;
    let ours = walk.ours.next();
    if ours == Some(ip) {
        (walk.equal, walk.last) = (walk.equal + 1, Address(ip));
        return CONTINUE;
    }
    walk.difference = Some((ours.map(Address), Some(Address(ip))));
    STOP
}

/// The code segment of this library.
fn own_code() -> Option<Range<usize>> {
    unsafe extern "C" fn find(info: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void) -> c_int {
        let here = own_code as *const () as usize;
        // SAFETY: `dl_iterate_phdr` passes its own info, with `dlpi_phnum` program headers, and the pointer to `found`.
        // All are valid during the call.
        unsafe {
            let info = &*info;
            for index in 0..info.dlpi_phnum {
                let header = &*info.dlpi_phdr.add(usize::from(index));
                let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
                let range = start..start.saturating_add(header.p_memsz as usize);
                if header.p_type == libc::PT_LOAD && range.contains(&here) {
                    *found.cast() = Some(range);
                    return 1;
                }
            }
        }
        0
    }
    let mut found: Option<Range<usize>> = None;
    // SAFETY: `find` has the type that `dl_iterate_phdr` requires and gets the type of `found`, which outlives the
    // call.
    unsafe { libc::dl_iterate_phdr(Some(find), (&raw mut found).cast()) };
    found
}

/// A code address, shown with its object.
#[derive(Clone, Copy)]
struct Address(usize);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)?;
        // SAFETY: `Dl_info` is plain data, for which zeros are valid.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: `dladdr` accepts any address and writes to `info`.
        let is_found = unsafe { libc::dladdr(self.0.wrapping_sub(1) as *const c_void, &mut info) } != 0;
        if is_found && !info.dli_fname.is_null() {
            // SAFETY: `dli_fname` is the loader's own path of an object whose code is on the stack.
            let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_str().unwrap_or_default();
            let name = path.rsplit('/').next().unwrap_or(path);
            write!(f, " ({name}+{:#x})", self.0.wrapping_sub(info.dli_fbase as usize))?;
        }
        Ok(())
    }
}

/// An address, or the end of a stack.
struct OrEnd(Option<Address>);

impl fmt::Display for OrEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("the end"),
        }
    }
}
