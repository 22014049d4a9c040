//! Who wrote into which ring: threads of the traced process get dense ids and the names the kernel has for them.
//!
//! A thread is its kernel id: where the kernel gives an id to a second thread of the same process, the two are one to us.
//! Threads are named after they start (`pt_autograd_0`), so a name is read again while its thread keeps recording: after 1, 2,
//! 4, ... seconds. Each change is defined anew; the last definition of an id counts.

use std::collections::HashMap;
use std::time::Duration;

use memtrace_trace::definition::Definition;
use memtrace_trace::ids::ThreadId;

use crate::proc::ProcessDir;

/// More threads than this are not told apart: a process that makes up threads must not fill our memory.
const MAX_THREADS: usize = 1 << 20;
/// A longer name is cut: the kernel's have 15 bytes.
const MAX_NAME: usize = 64;

/// One thread that recorded something.
#[derive(Debug)]
struct Thread {
    tid: u32,
    name: String,
    active: bool,
    read_again: Duration,
    pause: Duration,
}

/// All threads of one process that recorded something. Index `i` has id `i + 1`.
#[derive(Debug, Default)]
pub(super) struct Threads {
    threads: Vec<Thread>,
    by_tid: HashMap<u32, ThreadId>,
}

impl Threads {
    /// The id of a thread; `name` is what it said of itself. Thread 0 stands for several that share a ring.
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

    /// Threads that have an id.
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// The thread has recorded something.
    pub(super) fn active(&mut self, id: ThreadId) {
        if let Some(thread) = id.index().checked_sub(1).and_then(|i| self.threads.get_mut(i)) {
            thread.active = true;
        }
    }

    /// Reads the names that are due, or (`all`) every one.
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
