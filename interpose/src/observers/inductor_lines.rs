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

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use memtrace_stackwalk::FrameText;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::Definition;
use memtrace_trace::generated::is_inductor_file;
use memtrace_trace::ids::FrameId;

use crate::cpython::api::{self, PyObjectPtr};
use crate::cpython::gil::{GilToken, PyOwned};
use crate::recording::emit::truncate;
use crate::recording::guard::Guard;
use crate::recording::observer::Observer;
use crate::recording::process::Process;
use crate::recording::slot::Slot;

/// The part of inductor's lines in a recording.
pub(crate) const OBSERVER: Observer =
    Observer { start: Some(|_, _| LINES.set(InductorLines::new())), new_frame: Some(queue_frame), ..Observer::NONE };

static LINES: Slot<InductorLines> = Slot::new();

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
struct InductorLines {
    /// The head of a linked list. It is only extended or taken as a whole, so no lock is needed.
    first: AtomicPtr<QueuedFrame>,
    count: AtomicUsize,
    /// Set while a pending call is queued in the interpreter.
    is_call_pending: AtomicBool,
    /// Set if there is no interpreter whose objects can be read.
    is_off: AtomicBool,
}

impl InductorLines {
    fn new() -> InductorLines {
        InductorLines {
            first: AtomicPtr::new(null_mut()),
            count: AtomicUsize::new(0),
            is_call_pending: AtomicBool::new(false),
            is_off: AtomicBool::new(false),
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

/// Queues a new Python frame if its file was generated. The caller holds a guard.
fn queue_frame(frame: FrameId, text: &FrameText<'_>) {
    if !is_inductor_file(text.filename) {
        return;
    }
    let Some(lines) = LINES.get().filter(|lines| !lines.is_off.load(Ordering::Relaxed)) else { return };
    let Some(api) = api::find() else { return lines.is_off.store(true, Ordering::Relaxed) };
    if !lines.add(frame, text.filename.into(), text.line, 0)
        && let Some(process) = Process::if_started()
    {
        process.count(Counter::DefinitionsDropped, 1);
    }
    // An interpreter that has ended must not get a pending call.
    if api.is_running() && !lines.is_call_pending.swap(true, Ordering::AcqRel) && !api.queue_call(resolve_queued) {
        // The interpreter's queue is full. The next frame tries again.
        lines.is_call_pending.store(false, Ordering::Release);
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn resolve_queued(_: *mut c_void) -> c_int {
    // `None` in a forked child that has recorded nothing yet: the request belongs to its parent.
    let Some(lines) = Process::if_started().and_then(|_| LINES.get()) else { return 0 };
    let guard = Guard::enter();
    // A frame that is added from here on queues another call.
    lines.is_call_pending.store(false, Ordering::Release);
    let (Some(mut guard), Some(api)) = (guard, api::found()) else { return 0 };
    // SAFETY: the interpreter makes pending calls with the GIL, and this function does not release it.
    let Some(line_maps) = unsafe { GilToken::new(api) }.and_then(LineMaps::find) else { return 0 };
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

/// `PyCodeCache.linemaps`. It is created and used with the GIL.
struct LineMaps<'a> {
    gil: GilToken<'a>,
    linemaps: PyOwned<'a>,
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
    /// Finds the table. `None` if inductor is not imported.
    fn find(gil: GilToken<'a>) -> Option<LineMaps<'a>> {
        let cache = gil.module_attribute(c"torch._inductor.codecache", c"PyCodeCache")?;
        let linemaps = gil.attribute(cache.object, c"linemaps")?;
        Some(LineMaps { gil, linemaps })
    }

    fn lookup(&self, filename: &str, line: u32) -> LookupResult {
        let Some(key) = self.gil.new_str(filename) else { return LookupResult::NoFile };
        match self.gil.item(self.linemaps.object, &key) {
            Some(entry) => self.traceback_at(entry, line).map_or(LookupResult::NoLine, LookupResult::Traceback),
            None => LookupResult::NoFile,
        }
    }

    /// Looks up a line in `[(lines, ...), (tracebacks, ...)]`: the traceback of the last line that is not greater.
    fn traceback_at(&self, entry: PyObjectPtr, line: u32) -> Option<Box<str>> {
        let gil = self.gil;
        let (lines, texts) = (gil.list_item(entry, 0)?, gil.list_item(entry, 1)?);
        // The same search as Python's `bisect_right`.
        let (mut low, mut high) = (0, gil.tuple_len(lines));
        while low < high {
            let middle = low + (high - low) / 2;
            if i64::from(line) < gil.as_int(gil.tuple_item(lines, middle)?) { high = middle } else { low = middle + 1 }
        }
        let text = gil.str(gil.tuple_item(texts, low.checked_sub(1)?)?)?;
        (!text.is_empty()).then(|| text.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracebacks_are_parsed_as_pytorch_does() {
        let line = |name, filename, line| TracebackLine { name, filename, line };
        let text = "  File \"/a/train.py\", line 40, in main\n    out = model(x)\n  File \"b \"odd\", line 1.py\", \
                    line 23, in forward\n    return relu(x)\n";
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
