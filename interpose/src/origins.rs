//! What lines of files that `torch.compile` generated stand for: the program's own lines, which PyTorch's recorder lists behind them.
//!
//! Only inductor knows, in `torch._inductor.codecache.PyCodeCache.linemaps` (from 2.1 on), and only who holds the GIL may ask, which a hook may
//! not wait for. So a new frame of such a file is remembered, and `Py_AddPendingCall`, which any thread may call, has the interpreter
//! call [`resolve`] on its main thread, between two instructions of Python, or at the latest when it ends. There the table is read by functions of the C API that run no Python code
//! on objects of the types they are asked about, and refuse others.
//!
//! What the process has not come to when it dies stays what it is in the stacks: a line of a generated file.

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

/// Frames that wait at most; more are counted as definitions that were dropped.
const MOST_WAITING: usize = 1 << 14;
/// How often a frame is looked up whose file the table does not have yet: a file's own first run comes before its lines are in the
/// table, and kernels' files never are.
const MOST_LOOKS: u32 = 4;

/// A frame to be looked up.
struct Waiting {
    frame: FrameId,
    filename: Box<str>,
    line: u32,
    looks: u32,
    next: *mut Waiting,
}

/// The frames of this process that wait to be looked up. See the module.
pub(crate) struct Origins {
    /// Taken as a whole only, so that adding to it needs no lock.
    first: AtomicPtr<Waiting>,
    count: AtomicUsize,
    /// The interpreter has been asked to call.
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

    /// A new frame of Python code. Whoever calls holds a guard.
    pub(crate) fn frame(process: &Process, frame: FrameId, text: &FrameText<'_>) {
        if !is_inductor_file(text.filename) {
            return;
        }
        let origins = &process.origins;
        let Some(interface) = origins.interface.get_or_init(Interface::find) else { return };
        if !origins.add(frame, text.filename.into(), text.line, 0) {
            process.count(Counter::DefinitionsDropped, 1);
        }
        // SAFETY: reads a word of the runtime's, at any time. An interpreter that is gone must not be asked.
        if unsafe { (interface.is_initialized)() } != 0 && !origins.asked.swap(true, Ordering::AcqRel) {
            // SAFETY: needs no GIL; called back at a time when a hook's guard cannot be alive on that thread, with it.
            let refused = unsafe { (interface.add_pending_call)(resolve, null_mut()) } != 0;
            if refused {
                // Too many others wait: asked again at the next frame.
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
            // SAFETY: nobody else knows of it yet.
            unsafe { (*waiting).next = first };
        }
        true
    }

    /// All that wait.
    fn take(&self) -> Vec<Waiting> {
        let mut next = self.first.swap(null_mut(), Ordering::Acquire);
        let mut all = Vec::new();
        while !next.is_null() {
            // SAFETY: made by `add`; the whole list is ours alone since the swap.
            let waiting = unsafe { *Box::from_raw(next) };
            next = waiting.next;
            all.push(waiting);
        }
        self.count.fetch_sub(all.len(), Ordering::Relaxed);
        all
    }
}

/// Called by the interpreter on its main thread, with the GIL. Must return 0, or it raises.
unsafe extern "C" fn resolve(_: *mut c_void) -> c_int {
    // In a forked child that has recorded nothing yet: its parent's affair.
    let Some(process) = Process::if_started() else { return 0 };
    let Some(mut guard) = Guard::enter() else {
        process.origins.asked.store(false, Ordering::Release);
        return 0;
    };
    let origins = &guard.process().origins;
    // What is added from here on asks again.
    origins.asked.store(false, Ordering::Release);
    let Some(Some(interface)) = origins.interface.get() else { return 0 };
    // SAFETY: this thread holds the GIL.
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

/// The lines of a traceback, innermost first: what `re.findall(r'File "(.+)", line (\d+), in (.+)\n')` finds, from the last to the first,
/// as `PyCodeCache.stack_frames_for_code` does.
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

/// What is used of CPython's C API. Its types check what they are given.
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
        // SAFETY: all are of the C API, with these types in every CPython from 3.8 on.
        unsafe {
            Some(Interface {
                add_pending_call: global(c"Py_AddPendingCall")?,
                is_initialized: global(c"Py_IsInitialized")?,
                // Public since 3.13; before that with an underscore.
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

/// `PyCodeCache.linemaps`, held while this lives. Made and used with the GIL.
struct Table<'a> {
    interface: &'a Interface,
    linemaps: Object,
}

/// What the table says of a line.
enum Found {
    /// The traceback it stands for.
    Text(Box<str>),
    /// Nothing.
    Nothing,
    /// The file is not in it.
    NoFile,
}

impl<'a> Table<'a> {
    /// `None` where inductor is not there, not yet or not any more.
    ///
    /// # Safety
    /// This thread holds the GIL, and does so as long as the table lives.
    unsafe fn find(interface: &'a Interface) -> Option<Table<'a>> {
        // SAFETY: the caller has the GIL. No error is set between two instructions, so that clearing loses none; references that are not
        // borrowed are released.
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
        // SAFETY: `find`'s caller has the GIL; all results but the new string are borrowed from the table, which nobody else can change
        // meanwhile; each is checked for null before it is used; no error was set before.
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

    /// `[(lines, ...), (tracebacks, ...)]`: the traceback of the last line that is not beyond this one.
    ///
    /// # Safety
    /// As in `lookup`; `entry` is an object.
    unsafe fn text_of(&self, entry: Object, line: u32) -> Option<Found> {
        let interface = self.interface;
        let some = |object: Object| (!object.is_null()).then_some(object);
        // SAFETY: as promised by the caller; these functions check types and bounds.
        unsafe {
            let lines = some((interface.list_item)(entry, 0))?;
            let texts = some((interface.list_item)(entry, 1))?;
            // Python's `bisect_right`.
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
        // SAFETY: our own reference, and the GIL is still held.
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
