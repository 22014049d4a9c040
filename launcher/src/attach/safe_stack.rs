//! Whether a stopped thread may call `dlopen`.
//!
//! Its whole stack must be known, and no function on it may have a lock that loading a library or starting a thread
//! takes: those of the C library, of the dynamic loader and of an allocator. So none of their functions may be on it,
//! except for those in which a thread waits, without such a lock, and those that start a thread.

use super::arch::Registers;
use super::loaded_file::Mapping;
use super::tracee::Memory;
use super::unwind::{Frame, Objects};

/// Functions of the C library in which a thread waits or makes one system call. They take no lock that matters here,
/// and call nothing else.
const WAITING: [&str; 44] = [
    "accept",
    "accept4",
    "clock_nanosleep",
    "connect",
    "epoll_pwait",
    "epoll_pwait2",
    "epoll_wait",
    "fsync",
    "ioctl",
    "nanosleep",
    "pause",
    "poll",
    "ppoll",
    "pread",
    "pread64",
    "preadv",
    "pselect",
    "pthread_cond_clockwait",
    "pthread_cond_timedwait",
    "pthread_cond_wait",
    "pthread_mutex_lock",
    "pthread_mutex_unlock",
    "pwrite",
    "pwrite64",
    "read",
    "readv",
    "recv",
    "recvfrom",
    "recvmsg",
    "sched_yield",
    "select",
    "sem_clockwait",
    "sem_timedwait",
    "sem_wait",
    "send",
    "sendmsg",
    "sendto",
    "sigtimedwait",
    "sigwaitinfo",
    "wait4",
    "waitid",
    "waitpid",
    "write",
    "writev",
];
/// Exported functions of the C library that start a thread or the program.
const STARTING: [&str; 3] = ["__libc_start_main", "clone", "__clone"];

/// The kind of a function on the stack, by the locks that it may hold.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    CLibrary,
    /// The loader, an allocator, an unwinder or this library: their locks matter here.
    HasLocks,
    Other,
}

/// The loaded objects of a process, with what is known about their locks.
pub(super) struct Stacks {
    objects: Objects,
    kinds: Vec<Kind>,
    waiting: Vec<u64>,
    starting: Vec<u64>,
}

impl Stacks {
    /// Reads the objects of a process. `library` is the path of ours.
    pub(super) fn read(pid: u32, mappings: &[Mapping], memory: &Memory, library: &[u8]) -> Stacks {
        let objects = Objects::read(pid, mappings, memory);
        let starts = |name: &[u8], all: &[&[u8]]| all.iter().any(|one| name.starts_with(one));
        let kind = |object: &super::unwind::Object| match object.file_name() {
            name if starts(name, &[b"libc.so.6", b"libc-2.", b"libpthread.so.0", b"libpthread-2."]) => Kind::CLibrary,
            name if starts(name, &[b"ld-linux", b"ld-2.", b"libdl.so.2", b"libdl-2.", b"libgcc_s."]) => Kind::HasLocks,
            _ if object.path == library || object.defines(b"malloc") => Kind::HasLocks,
            _ => Kind::Other,
        };
        let kinds: Vec<Kind> = objects.0.iter().map(kind).collect();
        let of_c_library = |names: &[&str]| {
            let libraries = objects.0.iter().zip(&kinds).filter(|(_, kind)| **kind == Kind::CLibrary);
            libraries.flat_map(|(object, _)| object.functions(names)).collect()
        };
        let (waiting, starting) = (of_c_library(&WAITING), of_c_library(&STARTING));
        Stacks { objects, kinds, waiting, starting }
    }

    /// Whether a thread with these registers has no lock that matters.
    pub(super) fn is_safe(&self, memory: &Memory, registers: &Registers) -> bool {
        self.objects.frames(memory, registers).is_some_and(|frames| self.are_safe(&frames))
    }

    fn are_safe(&self, frames: &[Frame]) -> bool {
        let kind = |frame: &Frame| self.kinds.get(frame.object).copied().unwrap_or(Kind::HasLocks);
        if frames.iter().any(|frame| frame.is_signal_return || kind(frame) == Kind::HasLocks) {
            return false;
        }
        let is_c = |frame: &Frame| kind(frame) == Kind::CLibrary;
        // The main thread starts in the program (`_start`), which calls the C library.
        let frames = match frames {
            [rest @ .., caller, start] if !is_c(start) && self.starting.contains(&caller.function) => {
                &frames[..=rest.len()]
            }
            _ => frames,
        };
        // The innermost functions of the C library, up to the one that other code has called.
        let inner = frames.iter().take_while(|frame| is_c(frame)).count();
        // Those that have started the thread.
        let outer = frames.iter().rev().take_while(|frame| is_c(frame)).count();
        if inner == frames.len() {
            return false;
        }
        let (waits, rest) = frames.split_at(inner);
        let (between, starts) = rest.split_at(rest.len() - outer);
        let is_waiting = |frame: &Frame| self.waiting.contains(&frame.function);
        let is_start = |frame: &Frame| {
            let object = self.objects.0.get(frame.object);
            self.starting.contains(&frame.function) || object.is_some_and(|object| !object.exports(frame.function))
        };
        waits.last().is_none_or(is_waiting) && !between.iter().any(is_c) && starts.iter().all(is_start)
    }
}
