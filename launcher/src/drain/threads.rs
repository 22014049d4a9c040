//! The threads of a traced process: gives them dense ids and reads their names from the kernel.
//!
//! A thread is identified by its kernel thread id. When the kernel reuses an id in the same process, both threads count
//! as one. Threads get their names after they start (`pt_autograd_0`). The name of an active thread is therefore read
//! again after 1, 2, 4, ... seconds. Each change of the name writes a new definition. The last definition of an id is
//! the valid one.

use std::collections::HashMap;
use std::time::Duration;

use memtrace_trace::definition::Definition;
use memtrace_trace::ids::ThreadId;

use crate::proc::ProcessDir;

/// The maximum number of threads with an id of their own. It bounds the memory that a process with made-up thread ids
/// can take.
const MAX_THREADS: usize = 1 << 20;
/// The maximum length of a name, in characters. Longer names are truncated. The kernel's names have at most 15 bytes.
const MAX_NAME: usize = 64;

/// One thread that recorded events.
#[derive(Debug)]
struct Thread {
    tid: u32,
    name: String,
    active: bool,
    read_again: Duration,
    pause: Duration,
}

/// All threads of one process that recorded events. Index `i` has id `i + 1`.
#[derive(Debug, Default)]
pub(super) struct Threads {
    threads: Vec<Thread>,
    by_tid: HashMap<u32, ThreadId>,
}

impl Threads {
    /// The id of a thread. A new thread gets an id and a definition.
    ///
    /// `name` is the name that the thread announced. Thread 0 stands for several threads that share a ring. Returns
    /// [`ThreadId::NONE`] beyond [`MAX_THREADS`].
    pub(super) fn id(
        &mut self,
        tid: u32,
        name: Option<&str>,
        process: &ProcessDir,
        now: Duration,
        define: &mut impl FnMut(&Definition<'_>),
    ) -> ThreadId {
        if let Some(known) = self.by_tid.get(&tid) {
            return *known;
        }
        if self.threads.len() >= MAX_THREADS {
            return ThreadId::NONE;
        }
        let name = match name {
            Some(name) => name.chars().take(MAX_NAME).collect(),
            None if tid == 0 => "(shared)".to_owned(),
            None => process.thread_name(tid).unwrap_or_default(),
        };
        let pause = Duration::from_secs(1);
        let id = ThreadId(self.threads.len() as u32 + 1);
        define(&Definition::Thread { id, tid, name: &name });
        self.by_tid.insert(tid, id);
        self.threads.push(Thread { tid, name, active: false, read_again: now + pause, pause });
        id
    }

    /// Whether this thread has an id.
    pub(super) fn knows(&self, tid: u32) -> bool {
        self.by_tid.contains_key(&tid)
    }

    /// The number of threads that have an id.
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Marks that the thread has recorded events.
    pub(super) fn active(&mut self, id: ThreadId) {
        if let Some(thread) = id.index().checked_sub(1).and_then(|i| self.threads.get_mut(i)) {
            thread.active = true;
        }
    }

    /// Reads the names that are due, or every name with `all`. `define` receives each changed name.
    pub(super) fn refresh(
        &mut self,
        process: &ProcessDir,
        now: Duration,
        all: bool,
        define: &mut impl FnMut(&Definition<'_>),
    ) {
        for (index, thread) in self.threads.iter_mut().enumerate() {
            if thread.tid == 0 || !(all || thread.active && thread.read_again <= now) {
                continue;
            }
            thread.active = false;
            thread.pause = thread.pause.saturating_mul(2);
            thread.read_again = now + thread.pause;
            let Some(name) = process.thread_name(thread.tid) else { continue };
            if name != thread.name {
                thread.name = name;
                define(&Definition::Thread { id: ThreadId(index as u32 + 1), tid: thread.tid, name: &thread.name });
            }
        }
    }
}
