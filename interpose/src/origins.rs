//! Maps lines of files that `torch.compile` generated to the program's own lines. PyTorch's memory recorder shows those
//! too.
//!
//! Only inductor has this mapping: `torch._inductor.codecache.PyCodeCache.linemaps`, from 2.1 on. Reading it needs the
//! GIL, for which a hook must not wait. So a new frame of such a file is queued. Any thread may call
//! `Py_AddPendingCall`, after which the interpreter calls [`resolve`] on its main thread, between two Python
//! instructions. At the latest it does so when it ends.
//!
//! Constraint: `resolve` uses only functions of the C API that run no Python code on the objects used here and that
//! refuse other types.
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

use crate::emit::cut;
use crate::guard::Guard;
use crate::process::Process;
use crate::real::global;
use crate::stack::FrameText;

/// At most this many frames are queued. Further ones are counted as dropped definitions.
const MOST_WAITING: usize = 1 << 14;
/// How often a frame is looked up while the table does not contain its file. A file's first run precedes its entry in
/// the table, and files of kernels never get one.
const MOST_LOOKS: u32 = 4;

/// A frame that waits for its lookup.
struct Waiting {
    frame: FrameId,
    filename: Box<str>,
    line: u32,
    looks: u32,
    next: *mut Waiting,
}

/// The queue of this process's frames that wait for their lookup.
pub(crate) struct Origins {
    /// The head of a linked list. It is only extended or taken as a whole, so no lock is needed.
    first: AtomicPtr<Waiting>,
    count: AtomicUsize,
    /// Set while a pending call is queued in the interpreter.
    asked: AtomicBool,
    interface: OnceLock<Option<Interface>>,
}

impl Origins {
    pub(crate) fn new() -> Origins {
        Origins {
            first: AtomicPtr::new(null_mut()),
            count: AtomicUsize::new(0),
            asked: AtomicBool::new(false),
            interface: OnceLock::new(),
        }
    }

    /// Queues a new Python frame if its file was generated. The caller holds a guard.
    pub(crate) fn frame(process: &Process, frame: FrameId, text: &FrameText<'_>) {
        if !is_inductor_file(text.filename) {
            return;
        }
        let origins = &process.origins;
        let Some(interface) = origins.interface.get_or_init(Interface::find) else { return };
        if !origins.add(frame, text.filename.into(), text.line, 0) {
            process.count(Counter::DefinitionsDropped, 1);
        }
        // SAFETY: `Py_IsInitialized` reads one word of the runtime at any time. An interpreter that has ended must not
        // get a pending call.
        if unsafe { (interface.is_initialized)() } != 0 && !origins.asked.swap(true, Ordering::AcqRel) {
            // SAFETY: `Py_AddPendingCall` needs no GIL. The interpreter calls `resolve` with the GIL, when no guard
            // exists on that thread.
            let refused = unsafe { (interface.add_pending_call)(resolve, null_mut()) } != 0;
            if refused {
                // The interpreter's queue is full. The next frame tries again.
                origins.asked.store(false, Ordering::Release);
            }
        }
    }

    fn add(&self, frame: FrameId, filename: Box<str>, line: u32, looks: u32) -> bool {
        if self.count.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
            self.count.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let mut first = self.first.load(Ordering::Relaxed);
        let waiting = Box::into_raw(Box::new(Waiting { frame, filename, line, looks, next: first }));
        while let Err(now) = self.first.compare_exchange_weak(first, waiting, Ordering::Release, Ordering::Relaxed) {
            first = now;
            // SAFETY: no other thread has this pointer before the exchange succeeds.
            unsafe { (*waiting).next = first };
        }
        true
    }

    /// Removes and returns all queued frames.
    fn take(&self) -> Vec<Waiting> {
        let mut next = self.first.swap(null_mut(), Ordering::Acquire);
        let mut all = Vec::new();
        while !next.is_null() {
            // SAFETY: `add` made this box. Since the swap, no other thread has the list.
            let waiting = unsafe { *Box::from_raw(next) };
            next = waiting.next;
            all.push(waiting);
        }
        self.count.fetch_sub(all.len(), Ordering::Relaxed);
        all
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn resolve(_: *mut c_void) -> c_int {
    // `None` in a forked child that has recorded nothing yet: the request belongs to its parent.
    let Some(process) = Process::if_started() else { return 0 };
    let Some(mut guard) = Guard::enter() else {
        process.origins.asked.store(false, Ordering::Release);
        return 0;
    };
    let origins = &guard.process().origins;
    // A frame that is added from here on queues another call.
    origins.asked.store(false, Ordering::Release);
    let Some(Some(interface)) = origins.interface.get() else { return 0 };
    // SAFETY: the interpreter makes pending calls with the GIL.
    let Some(table) = (unsafe { Table::find(interface) }) else { return 0 };
    for waiting in origins.take() {
        match table.lookup(&waiting.filename, waiting.line) {
            Found::Text(text) => define(&mut guard, waiting.frame, &text),
            Found::Nothing => {}
            Found::NoFile if waiting.looks + 1 < MOST_LOOKS => {
                origins.add(waiting.frame, waiting.filename, waiting.line, waiting.looks + 1);
            }
            Found::NoFile => {}
        }
    }
    0
}

fn define(guard: &mut Guard, frame: FrameId, text: &str) {
    let process = guard.process();
    for (position, origin) in (0..).zip(parse(text)) {
        let Line { name, filename, line } = origin;
        let (name, filename) = (cut(process, name), cut(process, filename));
        guard.define(&Definition::FrameOrigin { frame, position, name, filename, line });
    }
}

/// A line of a traceback.
#[derive(PartialEq, Eq, Debug)]
struct Line<'a> {
    name: &'a str,
    filename: &'a str,
    line: u32,
}

/// The lines of a traceback, innermost first. These are the matches of `re.findall(r'File "(.+)", line (\d+), in
/// (.+)\n')` in reverse order, as in `PyCodeCache.stack_frames_for_code`.
fn parse(text: &str) -> impl Iterator<Item = Line<'_>> {
    text.split_inclusive('\n').rev().filter_map(|line| {
        let (_, rest) = line.strip_suffix('\n')?.split_once("File \"")?;
        rest.rmatch_indices("\", line ").find_map(|(at, separator)| {
            let filename = rest.get(..at).filter(|name| !name.is_empty())?;
            let (number, name) = rest.get(at + separator.len()..)?.split_once(", in ")?;
            let digits = !name.is_empty() && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            Some(Line { name, filename, line: number.parse().ok().filter(|_| digits)? })
        })
    })
}

type Object = *mut c_void;

/// The functions of CPython's C API that are used. They check the types of their arguments.
struct Interface {
    add_pending_call: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int,
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    sys_object: unsafe extern "C" fn(*const c_char) -> Object,
    dict_item_string: unsafe extern "C" fn(Object, *const c_char) -> Object,
    dict_item: unsafe extern "C" fn(Object, Object) -> Object,
    attribute: unsafe extern "C" fn(Object, *const c_char) -> Object,
    list_item: unsafe extern "C" fn(Object, isize) -> Object,
    tuple_size: unsafe extern "C" fn(Object) -> isize,
    tuple_item: unsafe extern "C" fn(Object, isize) -> Object,
    as_long: unsafe extern "C" fn(Object) -> c_long,
    new_text: unsafe extern "C" fn(*const c_char, isize) -> Object,
    utf8: unsafe extern "C" fn(Object, *mut isize) -> *const c_char,
    release: unsafe extern "C" fn(Object),
    clear_error: unsafe extern "C" fn(),
}

impl Interface {
    fn find() -> Option<Interface> {
        // SAFETY: these symbols belong to the C API and have these types in every CPython from 3.8 on.
        unsafe {
            Some(Interface {
                add_pending_call: global(c"Py_AddPendingCall")?,
                is_initialized: global(c"Py_IsInitialized")?,
                // Public since 3.13. Earlier versions export it with an underscore.
                is_finalizing: global(c"Py_IsFinalizing").or_else(|| global(c"_Py_IsFinalizing"))?,
                sys_object: global(c"PySys_GetObject")?,
                dict_item_string: global(c"PyDict_GetItemString")?,
                dict_item: global(c"PyDict_GetItemWithError")?,
                attribute: global(c"PyObject_GetAttrString")?,
                list_item: global(c"PyList_GetItem")?,
                tuple_size: global(c"PyTuple_Size")?,
                tuple_item: global(c"PyTuple_GetItem")?,
                as_long: global(c"PyLong_AsLong")?,
                new_text: global(c"PyUnicode_FromStringAndSize")?,
                utf8: global(c"PyUnicode_AsUTF8AndSize")?,
                release: global(c"Py_DecRef")?,
                clear_error: global(c"PyErr_Clear")?,
            })
        }
    }
}

/// `PyCodeCache.linemaps`, with a reference that we own. It is created and used with the GIL.
struct Table<'a> {
    interface: &'a Interface,
    linemaps: Object,
}

/// The result of a lookup.
enum Found {
    /// The traceback of the program's lines.
    Text(Box<str>),
    /// The table has no traceback for this line.
    Nothing,
    /// The table does not contain the file.
    NoFile,
}

impl<'a> Table<'a> {
    /// Finds the table. `None` if inductor is not imported or the interpreter is finalizing.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL for as long as the table lives.
    unsafe fn find(interface: &'a Interface) -> Option<Table<'a>> {
        // SAFETY: the caller guarantees the GIL. No exception is set between two instructions, so clearing loses none.
        // References that are not borrowed are released.
        unsafe {
            if (interface.is_finalizing)() != 0 {
                return None;
            }
            let modules = (interface.sys_object)(c"modules".as_ptr());
            let module = (!modules.is_null())
                .then(|| (interface.dict_item_string)(modules, c"torch._inductor.codecache".as_ptr()))
                .filter(|module| !module.is_null())?;
            let cache = (interface.attribute)(module, c"PyCodeCache".as_ptr());
            let mut linemaps = null_mut();
            if !cache.is_null() {
                linemaps = (interface.attribute)(cache, c"linemaps".as_ptr());
                (interface.release)(cache);
            }
            (interface.clear_error)();
            (!linemaps.is_null()).then_some(Table { interface, linemaps })
        }
    }

    fn lookup(&self, filename: &str, line: u32) -> Found {
        let interface = self.interface;
        // SAFETY: the caller of `find` guarantees the GIL. All results except the new string are borrowed from the
        // table, which cannot change meanwhile. Each is checked for null, and no exception was set before.
        unsafe {
            let key = (interface.new_text)(filename.as_ptr().cast(), filename.len() as isize);
            let mut entry = null_mut();
            if !key.is_null() {
                entry = (interface.dict_item)(self.linemaps, key);
                (interface.release)(key);
            }
            let found =
                if entry.is_null() { Found::NoFile } else { self.text_of(entry, line).unwrap_or(Found::Nothing) };
            (interface.clear_error)();
            found
        }
    }

    /// Looks up a line in `[(lines, ...), (tracebacks, ...)]`: the traceback of the last line that is not greater.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL, and `entry` is a live object of the table.
    unsafe fn text_of(&self, entry: Object, line: u32) -> Option<Found> {
        let interface = self.interface;
        let some = |object: Object| (!object.is_null()).then_some(object);
        // SAFETY: the caller guarantees the GIL and the object. These functions check types and bounds.
        unsafe {
            let lines = some((interface.list_item)(entry, 0))?;
            let texts = some((interface.list_item)(entry, 1))?;
            // The same search as Python's `bisect_right`.
            let (mut low, mut high) = (0, (interface.tuple_size)(lines));
            while low < high {
                let middle = low + (high - low) / 2;
                let starts = (interface.as_long)(some((interface.tuple_item)(lines, middle))?);
                if i64::from(line) < starts { high = middle } else { low = middle + 1 }
            }
            let text = some((interface.tuple_item)(texts, low.checked_sub(1).filter(|at| *at >= 0)?))?;
            let mut length = 0;
            let bytes = (interface.utf8)(text, &mut length);
            if bytes.is_null() {
                return None;
            }
            let bytes = std::slice::from_raw_parts(bytes.cast::<u8>(), usize::try_from(length).ok()?);
            str::from_utf8(bytes).ok().filter(|text| !text.is_empty()).map(|text| Found::Text(text.into()))
        }
    }
}

impl Drop for Table<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is ours, and the caller of `find` guarantees the GIL while the table lives.
        unsafe { (self.interface.release)(self.linemaps) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracebacks_are_parsed_as_pytorch_does() {
        let line = |name, filename, line| Line { name, filename, line };
        let text = "  File \"/a/train.py\", line 40, in main\n    out = model(x)\n  File \"b \"odd\", line 1.py\", line 23, in forward\n    return relu(x)\n";
        let found: Vec<_> = parse(text).collect();
        assert_eq!(found, [line("forward", "b \"odd\", line 1.py", 23), line("main", "/a/train.py", 40)]);
        for nothing in
            ["", "relu", "File \"a.py\", line 1, in f", "File \"\", line 1, in f\n", "File \"a\", line x, in f\n"]
        {
            assert_eq!(parse(nothing).count(), 0, "{nothing:?}");
        }
        assert_eq!(
            parse("File \"a\", line 1, in \nFile \"a\", line 2, in g, in h\n").collect::<Vec<_>>(),
            [line("g, in h", "a", 2)]
        );
    }

    #[test]
    fn what_waits_is_taken_once_and_bounded() {
        let origins = Origins::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    (0..MOST_WAITING as u32 / 2).for_each(|id| {
                        origins.add(FrameId(id), "f.py".into(), 1, 0);
                    })
                });
            }
        });
        assert_eq!(origins.take().len(), MOST_WAITING);
        assert!(origins.take().is_empty());
        assert!(origins.add(FrameId(1), "f.py".into(), 1, 0));
        assert_eq!(origins.take().len(), 1);
    }
}
