//! The process-wide prefix tree of stacks, and the frames it is made of.
//!
//! A stack is `(parent stack, frame)`, root to leaf; its id is the node's. A frame is its text
//! ([`FrameText`]): two code objects that print the same line are one frame. Ids are dense and start at 1.
//!
//! Everything has a limit, so that memory stays bounded however long the program runs: at most [`MAX_STACKS`] stacks
//! and [`MAX_FRAMES`] frames. A stack that finds no room is cut: its deepest known caller stands for it, and
//! [`InternerCounts`] says how often that happened. Host memory at the limits: 16 bytes a stack and 24 a frame, plus
//! 1 MiB of key cache: 23 MiB. The tables are mapped at first use.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use memtrace_trace::ids::{FrameId, StackId};

use super::definition::{DefinitionSink, FrameText};
use super::digest::digest;
use super::id_set::{IdSet, Inserted};
use super::key_cache::{FrameKey, KeyCache, Meaning};
use super::lock::{Lock, Locked};

/// The most stacks one process may have.
pub const MAX_STACKS: u32 = 1 << 20;
/// The most frames (lines of functions) one process may have.
pub const MAX_FRAMES: u32 = 1 << 18;

/// See the module. One per process, in a `static`; all methods may be called from any thread.
pub struct Interner {
    lock: Lock,
    stacks: IdSet<1>,
    frames: IdSet<2>,
    keys: KeyCache,
    epoch: AtomicU32,
    stacks_cut: AtomicU64,
    frames_refused: AtomicU64,
    depth_cut: AtomicU64,
    no_memory: AtomicU64,
}

/// How full the interner is and what it could not do.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct InternerCounts {
    /// Stacks known.
    pub stacks: u32,
    /// Frames known.
    pub frames: u32,
    /// Frames left off the end of a stack because [`MAX_STACKS`] or [`MAX_FRAMES`] was reached.
    pub stacks_cut: u64,
    /// Frames that got no id because [`MAX_FRAMES`] was reached (counted each time they are looked up by text).
    pub frames_refused: u64,
    /// Walks that were deeper than [`MAX_DEPTH`](super::thread::MAX_DEPTH) and lost their outermost frames.
    pub depth_cut: u64,
    /// Walks that gave no stack because the kernel gave no memory.
    pub no_memory: u64,
    /// Entries of the key cache that were written over: high when the program keeps making fresh code.
    pub keys_evicted: u64,
}

impl Interner {
    /// An empty interner. Maps nothing.
    #[allow(clippy::new_without_default, reason = "lives in a static; a Default would be a second way to make one")]
    pub const fn new() -> Interner {
        Interner {
            lock: Lock::new(),
            stacks: IdSet::new(MAX_STACKS),
            frames: IdSet::new(MAX_FRAMES),
            keys: KeyCache::new(),
            epoch: AtomicU32::new(1),
            stacks_cut: AtomicU64::new(0),
            frames_refused: AtomicU64::new(0),
            depth_cut: AtomicU64::new(0),
            no_memory: AtomicU64::new(0),
        }
    }

    /// How full it is and what it could not do.
    pub fn counts(&self) -> InternerCounts {
        InternerCounts {
            stacks: self.stacks.len(),
            frames: self.frames.len(),
            stacks_cut: self.stacks_cut.load(Relaxed),
            frames_refused: self.frames_refused.load(Relaxed),
            depth_cut: self.depth_cut.load(Relaxed),
            no_memory: self.no_memory.load(Relaxed),
            keys_evicted: self.keys.evictions(),
        }
    }

    /// The id of a frame, by its text. Delivers a definition when it is new. `NONE` when there is no room.
    pub fn frame(&self, text: &FrameText<'_>, sink: &mut dyn DefinitionSink) -> FrameId {
        let key = digest(text);
        if let Some(id) = self.frames.find(&key) {
            return FrameId(id);
        }
        let inserted = self.frames.insert(&key, &self.lock.lock());
        match inserted {
            Inserted::Known(id) => FrameId(id),
            Inserted::New(id) => {
                sink.frame(FrameId(id), text);
                FrameId(id)
            }
            Inserted::Full => {
                self.frames_refused.fetch_add(1, Relaxed);
                FrameId::NONE
            }
        }
    }

    /// The stack that is `frame` called from `parent`. Delivers a definition when it is new. `parent` itself when
    /// there is no room or `frame` is `NONE`.
    #[inline]
    pub fn child(&self, parent: StackId, frame: FrameId, sink: &mut dyn DefinitionSink) -> StackId {
        match self.stacks.find(&Self::node(parent, frame)) {
            Some(id) => StackId(id),
            None => self.new_child(parent, frame, sink),
        }
    }

    /// The stack that is the frame `text` called from `parent`: for frames that have no code object, such as an
    /// autograd node or a native symbol. Not for the event path.
    pub fn push(&self, parent: StackId, text: &FrameText<'_>, sink: &mut dyn DefinitionSink) -> StackId {
        let frame = self.frame(text, sink);
        self.child(parent, frame, sink)
    }

    /// Forgets everything, thread caches included; ids start at 1 again.
    ///
    /// For a forked child, whose own trace needs all definitions again. It must be called before the child takes its
    /// first stack, on its only thread: a lock that another thread held during the fork is opened by force.
    pub fn reset(&self) {
        let locked = self.lock.force();
        self.stacks.reset(&locked);
        self.frames.reset(&locked);
        self.keys.reset(&locked);
        for count in [&self.stacks_cut, &self.frames_refused, &self.depth_cut, &self.no_memory] {
            count.store(0, Relaxed);
        }
        self.epoch.fetch_add(1, Relaxed);
    }

    fn node(parent: StackId, frame: FrameId) -> [u64; 1] {
        [u64::from(parent.0) << 32 | u64::from(frame.0)]
    }

    #[cold]
    fn new_child(&self, parent: StackId, frame: FrameId, sink: &mut dyn DefinitionSink) -> StackId {
        if frame.is_none() {
            self.count_cut_stack();
            return parent;
        }
        let inserted = self.stacks.insert(&Self::node(parent, frame), &self.lock.lock());
        match inserted {
            Inserted::Known(id) => StackId(id),
            Inserted::New(id) => {
                sink.stack(StackId(id), parent, frame);
                StackId(id)
            }
            Inserted::Full => {
                self.count_cut_stack();
                parent
            }
        }
    }

    /// Changes whenever thread caches must be forgotten; never 0.
    #[inline]
    pub(super) fn epoch(&self) -> u32 {
        self.epoch.load(Relaxed)
    }

    /// What a key stands for, if it is remembered.
    #[inline]
    pub(super) fn meaning(&self, key: FrameKey) -> Meaning {
        self.keys.find(key)
    }

    /// Remembers what a key stands for.
    pub(super) fn remember(&self, key: FrameKey, meaning: Meaning) {
        let locked: Locked<'_> = self.lock.lock();
        self.keys.insert(key, meaning, &locked);
    }

    #[cold]
    pub(super) fn count_cut_stack(&self) {
        self.stacks_cut.fetch_add(1, Relaxed);
    }

    #[cold]
    pub(super) fn count_cut_depth(&self) {
        self.depth_cut.fetch_add(1, Relaxed);
    }

    #[cold]
    pub(super) fn count_no_memory(&self) {
        self.no_memory.fetch_add(1, Relaxed);
    }
}
