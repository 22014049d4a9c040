//! Maps lines of files that `torch.compile` generated to the program's own lines. PyTorch's memory recorder shows those
//! too.
//!
//! Only inductor has this mapping: `torch._inductor.codecache.PyCodeCache.linemaps`, from 2.1 on. Reading it needs the
//! GIL, for which a hook must not wait. So a new frame of such a file is queued. Any thread may call
//! `Py_AddPendingCall`, after which the interpreter calls [`resolve_queued`] on its main thread, between two Python
//! instructions. At the latest it does so when it ends.
//!
//! Constraint: `resolve_queued` uses only functions of the C API that run no Python code on the objects used here and
//! that refuse other types.
//!
//! A frame that is still queued when the process dies keeps its line in the generated file.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::Definition;
use memtrace_trace::generated::is_inductor_file;
use memtrace_trace::ids::FrameId;

use crate::emit::truncate;
use crate::guard::Guard;
use crate::original::global_symbol;
use crate::process::Process;
use crate::stack::FrameText;

/// At most this many frames are queued. Further ones are counted as dropped definitions.
const MAX_QUEUED: usize = 1 << 14;
/// How often a frame is looked up while the table does not contain its file. A file's first run precedes its entry in
/// the table, and files of kernels never get one.
const MAX_LOOKUPS: u32 = 4;

/// A frame that waits for its lookup.
struct QueuedFrame {
    frame: FrameId,
    filename: Box<str>,
    line: u32,
    lookups: u32,
    next: *mut QueuedFrame,
}

/// The queue of this process's frames that wait for their lookup.
pub(crate) struct InductorLines {
    /// The head of a linked list. It is only extended or taken as a whole, so no lock is needed.
    first: AtomicPtr<QueuedFrame>,
    count: AtomicUsize,
    /// Set while a pending call is queued in the interpreter.
    is_call_pending: AtomicBool,
    api: OnceLock<Option<CApi>>,
}

impl InductorLines {
    pub(crate) fn new() -> InductorLines {
        InductorLines {
            first: AtomicPtr::new(null_mut()),
            count: AtomicUsize::new(0),
            is_call_pending: AtomicBool::new(false),
            api: OnceLock::new(),
        }
    }

    /// Queues a new Python frame if its file was generated. The caller holds a guard.
    pub(crate) fn frame(process: &Process, frame: FrameId, text: &FrameText<'_>) {
        if !is_inductor_file(text.filename) {
            return;
        }
        let lines = &process.inductor_lines;
        let Some(api) = lines.api.get_or_init(CApi::find) else { return };
        if !lines.add(frame, text.filename.into(), text.line, 0) {
            process.count(Counter::DefinitionsDropped, 1);
        }
        // SAFETY: `Py_IsInitialized` reads one word of the runtime at any time. An interpreter that has ended must not
        // get a pending call.
        if unsafe { (api.is_initialized)() } != 0 && !lines.is_call_pending.swap(true, Ordering::AcqRel) {
            // SAFETY: `Py_AddPendingCall` needs no GIL. The interpreter calls `resolve_queued` with the GIL, when no
            // guard exists on that thread.
            let refused = unsafe { (api.add_pending_call)(resolve_queued, null_mut()) } != 0;
            if refused {
                // The interpreter's queue is full. The next frame tries again.
                lines.is_call_pending.store(false, Ordering::Release);
            }
        }
    }

    fn add(&self, frame: FrameId, filename: Box<str>, line: u32, lookups: u32) -> bool {
        if self.count.fetch_add(1, Ordering::Relaxed) >= MAX_QUEUED {
            self.count.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let mut first = self.first.load(Ordering::Relaxed);
        let queued = Box::into_raw(Box::new(QueuedFrame { frame, filename, line, lookups, next: first }));
        while let Err(now) = self.first.compare_exchange_weak(first, queued, Ordering::Release, Ordering::Relaxed) {
            first = now;
            // SAFETY: no other thread has this pointer before the exchange succeeds.
            unsafe { (*queued).next = first };
        }
        true
    }

    /// Removes and returns all queued frames.
    fn take(&self) -> Vec<QueuedFrame> {
        let mut next = self.first.swap(null_mut(), Ordering::Acquire);
        let mut all = Vec::new();
        while !next.is_null() {
            // SAFETY: `add` made this box. Since the swap, no other thread has the list.
            let queued = unsafe { *Box::from_raw(next) };
            next = queued.next;
            all.push(queued);
        }
        self.count.fetch_sub(all.len(), Ordering::Relaxed);
        all
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn resolve_queued(_: *mut c_void) -> c_int {
    // `None` in a forked child that has recorded nothing yet: the request belongs to its parent.
    let Some(process) = Process::if_started() else { return 0 };
    let Some(mut guard) = Guard::enter() else {
        process.inductor_lines.is_call_pending.store(false, Ordering::Release);
        return 0;
    };
    let lines = &guard.process().inductor_lines;
    // A frame that is added from here on queues another call.
    lines.is_call_pending.store(false, Ordering::Release);
    let Some(Some(api)) = lines.api.get() else { return 0 };
    // SAFETY: the interpreter makes pending calls with the GIL.
    let Some(line_maps) = (unsafe { LineMaps::find(api) }) else { return 0 };
    for queued in lines.take() {
        match line_maps.lookup(&queued.filename, queued.line) {
            LookupResult::Traceback(text) => define(&mut guard, queued.frame, &text),
            LookupResult::NoLine => {}
            LookupResult::NoFile if queued.lookups + 1 < MAX_LOOKUPS => {
                lines.add(queued.frame, queued.filename, queued.line, queued.lookups + 1);
            }
            LookupResult::NoFile => {}
        }
    }
    0
}

fn define(guard: &mut Guard, frame: FrameId, text: &str) {
    let process = guard.process();
    for (position, source) in (0..).zip(parse_traceback(text)) {
        let TracebackLine { name, filename, line } = source;
        let (name, filename) = (truncate(process, name), truncate(process, filename));
        guard.define(&Definition::FrameOrigin { frame, position, name, filename, line });
    }
}

/// A line of a traceback.
#[derive(PartialEq, Eq, Debug)]
struct TracebackLine<'a> {
    name: &'a str,
    filename: &'a str,
    line: u32,
}

/// The lines of a traceback, innermost first. These are the matches of `re.findall(r'File "(.+)", line (\d+), in
/// (.+)\n')` in reverse order, as in `PyCodeCache.stack_frames_for_code`.
fn parse_traceback(text: &str) -> impl Iterator<Item = TracebackLine<'_>> {
    text.split_inclusive('\n').rev().filter_map(|line| {
        let (_, rest) = line.strip_suffix('\n')?.split_once("File \"")?;
        rest.rmatch_indices("\", line ").find_map(|(at, separator)| {
            let filename = rest.get(..at).filter(|name| !name.is_empty())?;
            let (number, name) = rest.get(at + separator.len()..)?.split_once(", in ")?;
            let digits = !name.is_empty() && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            Some(TracebackLine { name, filename, line: number.parse().ok().filter(|_| digits)? })
        })
    })
}

type PyObjectPtr = *mut c_void;

/// The functions of CPython's C API that are used. They check the types of their arguments.
struct CApi {
    add_pending_call: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int,
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    sys_object: unsafe extern "C" fn(*const c_char) -> PyObjectPtr,
    dict_item_string: unsafe extern "C" fn(PyObjectPtr, *const c_char) -> PyObjectPtr,
    dict_item: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> PyObjectPtr,
    attribute: unsafe extern "C" fn(PyObjectPtr, *const c_char) -> PyObjectPtr,
    list_item: unsafe extern "C" fn(PyObjectPtr, isize) -> PyObjectPtr,
    tuple_size: unsafe extern "C" fn(PyObjectPtr) -> isize,
    tuple_item: unsafe extern "C" fn(PyObjectPtr, isize) -> PyObjectPtr,
    as_long: unsafe extern "C" fn(PyObjectPtr) -> c_long,
    new_str: unsafe extern "C" fn(*const c_char, isize) -> PyObjectPtr,
    utf8: unsafe extern "C" fn(PyObjectPtr, *mut isize) -> *const c_char,
    dec_ref: unsafe extern "C" fn(PyObjectPtr),
    clear_error: unsafe extern "C" fn(),
}

impl CApi {
    fn find() -> Option<CApi> {
        // SAFETY: these symbols belong to the C API and have these types in every CPython from 3.8 on.
        unsafe {
            Some(CApi {
                add_pending_call: global_symbol(c"Py_AddPendingCall")?,
                is_initialized: global_symbol(c"Py_IsInitialized")?,
                // Public since 3.13. Earlier versions export it with an underscore.
                is_finalizing: global_symbol(c"Py_IsFinalizing").or_else(|| global_symbol(c"_Py_IsFinalizing"))?,
                sys_object: global_symbol(c"PySys_GetObject")?,
                dict_item_string: global_symbol(c"PyDict_GetItemString")?,
                dict_item: global_symbol(c"PyDict_GetItemWithError")?,
                attribute: global_symbol(c"PyObject_GetAttrString")?,
                list_item: global_symbol(c"PyList_GetItem")?,
                tuple_size: global_symbol(c"PyTuple_Size")?,
                tuple_item: global_symbol(c"PyTuple_GetItem")?,
                as_long: global_symbol(c"PyLong_AsLong")?,
                new_str: global_symbol(c"PyUnicode_FromStringAndSize")?,
                utf8: global_symbol(c"PyUnicode_AsUTF8AndSize")?,
                dec_ref: global_symbol(c"Py_DecRef")?,
                clear_error: global_symbol(c"PyErr_Clear")?,
            })
        }
    }
}

/// `PyCodeCache.linemaps`, with a reference that we own. It is created and used with the GIL.
struct LineMaps<'a> {
    api: &'a CApi,
    linemaps: PyObjectPtr,
}

/// The result of a lookup.
enum LookupResult {
    /// The traceback of the program's lines.
    Traceback(Box<str>),
    /// The table has no traceback for this line.
    NoLine,
    /// The table does not contain the file.
    NoFile,
}

impl<'a> LineMaps<'a> {
    /// Finds the table. `None` if inductor is not imported or the interpreter is finalizing.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL for as long as the table lives.
    unsafe fn find(api: &'a CApi) -> Option<LineMaps<'a>> {
        // SAFETY: the caller guarantees the GIL. No exception is set between two instructions, so clearing loses none.
        // References that are not borrowed are released.
        unsafe {
            if (api.is_finalizing)() != 0 {
                return None;
            }
            let modules = (api.sys_object)(c"modules".as_ptr());
            let module = (!modules.is_null())
                .then(|| (api.dict_item_string)(modules, c"torch._inductor.codecache".as_ptr()))
                .filter(|module| !module.is_null())?;
            let cache = (api.attribute)(module, c"PyCodeCache".as_ptr());
            let mut linemaps = null_mut();
            if !cache.is_null() {
                linemaps = (api.attribute)(cache, c"linemaps".as_ptr());
                (api.dec_ref)(cache);
            }
            (api.clear_error)();
            (!linemaps.is_null()).then_some(LineMaps { api, linemaps })
        }
    }

    fn lookup(&self, filename: &str, line: u32) -> LookupResult {
        let api = self.api;
        // SAFETY: the caller of `find` guarantees the GIL. All results except the new string are borrowed from the
        // table, which cannot change meanwhile. Each is checked for null, and no exception was set before.
        unsafe {
            let key = (api.new_str)(filename.as_ptr().cast(), filename.len() as isize);
            let mut entry = null_mut();
            if !key.is_null() {
                entry = (api.dict_item)(self.linemaps, key);
                (api.dec_ref)(key);
            }
            let found = if entry.is_null() {
                LookupResult::NoFile
            } else {
                self.traceback_at(entry, line).unwrap_or(LookupResult::NoLine)
            };
            (api.clear_error)();
            found
        }
    }

    /// Looks up a line in `[(lines, ...), (tracebacks, ...)]`: the traceback of the last line that is not greater.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL, and `entry` is a live object of the table.
    unsafe fn traceback_at(&self, entry: PyObjectPtr, line: u32) -> Option<LookupResult> {
        let api = self.api;
        let some = |object: PyObjectPtr| (!object.is_null()).then_some(object);
        // SAFETY: the caller guarantees the GIL and the object. These functions check types and bounds.
        unsafe {
            let lines = some((api.list_item)(entry, 0))?;
            let texts = some((api.list_item)(entry, 1))?;
            // The same search as Python's `bisect_right`.
            let (mut low, mut high) = (0, (api.tuple_size)(lines));
            while low < high {
                let middle = low + (high - low) / 2;
                let starts = (api.as_long)(some((api.tuple_item)(lines, middle))?);
                if i64::from(line) < starts { high = middle } else { low = middle + 1 }
            }
            let text = some((api.tuple_item)(texts, low.checked_sub(1).filter(|at| *at >= 0)?))?;
            let mut length = 0;
            let bytes = (api.utf8)(text, &mut length);
            if bytes.is_null() {
                return None;
            }
            let bytes = std::slice::from_raw_parts(bytes.cast::<u8>(), usize::try_from(length).ok()?);
            str::from_utf8(bytes).ok().filter(|text| !text.is_empty()).map(|text| LookupResult::Traceback(text.into()))
        }
    }
}

impl Drop for LineMaps<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is ours, and the caller of `find` guarantees the GIL while the table lives.
        unsafe { (self.api.dec_ref)(self.linemaps) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracebacks_are_parsed_as_pytorch_does() {
        let line = |name, filename, line| TracebackLine { name, filename, line };
        let text = "  File \"/a/train.py\", line 40, in main\n    out = model(x)\n  File \"b \"odd\", line 1.py\", line 23, in forward\n    return relu(x)\n";
        let found: Vec<_> = parse_traceback(text).collect();
        assert_eq!(found, [line("forward", "b \"odd\", line 1.py", 23), line("main", "/a/train.py", 40)]);
        for text in
            ["", "relu", "File \"a.py\", line 1, in f", "File \"\", line 1, in f\n", "File \"a\", line x, in f\n"]
        {
            assert_eq!(parse_traceback(text).count(), 0, "{text:?}");
        }
        assert_eq!(
            parse_traceback("File \"a\", line 1, in \nFile \"a\", line 2, in g, in h\n").collect::<Vec<_>>(),
            [line("g, in h", "a", 2)]
        );
    }

    #[test]
    fn queued_frames_are_taken_once_and_bounded() {
        let lines = InductorLines::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    (0..MAX_QUEUED as u32 / 2).for_each(|id| {
                        lines.add(FrameId(id), "f.py".into(), 1, 0);
                    })
                });
            }
        });
        assert_eq!(lines.take().len(), MAX_QUEUED);
        assert!(lines.take().is_empty());
        assert!(lines.add(FrameId(1), "f.py".into(), 1, 0));
        assert_eq!(lines.take().len(), 1);
    }
}
