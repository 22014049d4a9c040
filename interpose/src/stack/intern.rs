//! The process-wide prefix tree of stacks, and the frames it is made of.
//!
//! A stack is `(parent stack, frame)`, root to leaf; its id is the node's. A frame is its text
//! ([`FrameText`]): two code objects that print the same line are one frame; or, of native code, its object and address.
//! Ids are dense and start at 1.
//!
//! Everything has a limit, so that memory stays bounded however long the program runs: at most [`MAX_STACKS`] stacks
//! and [`MAX_FRAMES`] frames. A stack that finds no room is cut: its deepest known caller stands for it, and the sink
//! is told. Host memory at the limits: 16 bytes a stack and 24 a frame, plus
//! 1 MiB of key cache: 23 MiB. The tables are mapped at first use.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use memtrace_trace::ids::{FrameId, ModuleId, StackId};

use super::definition::{DefinitionSink, FrameText, Loss};
use super::digest::{digest, native_digest};
use super::id_set::{IdSet, Inserted};
use super::key_cache::{FrameKey, KeyCache, Meaning};
use super::lock::Lock;

/// The most stacks one process may have.
pub(crate) const MAX_STACKS: u32 = 1 << 20;
/// The most frames (lines of functions) one process may have.
pub(crate) const MAX_FRAMES: u32 = 1 << 18;

/// See the module. One per process, in a `static`; all methods may be called from any thread.
pub(crate) struct Interner {
    lock: Lock,
    stacks: IdSet<1>,
    frames: IdSet<2>,
    keys: KeyCache,
    /// Tells this interner from others; 0 until somebody asks.
    epoch: AtomicU32,
}

/// How many epochs have been given out. Copied by fork, so that a child's interner differs from its parent's.
static EPOCHS: AtomicU32 = AtomicU32::new(0);

impl Interner {
    /// An empty interner. Maps nothing.
    #[allow(clippy::new_without_default, reason = "lives in a static; a Default would be a second way to make one")]
    pub(crate) const fn new() -> Interner {
        Interner {
            lock: Lock::new(),
            stacks: IdSet::new(MAX_STACKS),
            frames: IdSet::new(MAX_FRAMES),
            keys: KeyCache::new(),
            epoch: AtomicU32::new(0),
        }
    }

    /// Stacks and frames known, and how many keys were written over in the cache of known code: many when the program
    /// keeps making fresh code.
    #[allow(dead_code, reason = "for tests, the stack probe and whoever wants to know")]
    pub(crate) fn counts(&self) -> (u32, u32, u64) {
        (self.stacks.len(), self.frames.len(), self.keys.evictions())
    }

    /// The id of a frame, by its text. Delivers a definition when it is new. `NONE` when there is no room.
    pub(crate) fn frame(&self, text: &FrameText<'_>, sink: &mut dyn DefinitionSink) -> FrameId {
        self.frame_of(digest(text), |id| sink.frame(id, text))
    }

    /// The id of a native frame. Delivers a definition when it is new. `NONE` when there is no room.
    pub(super) fn native_frame(&self, module: ModuleId, address: u64, sink: &mut dyn DefinitionSink) -> FrameId {
        self.frame_of(native_digest(module, address), |id| sink.native_frame(id, module, address))
    }

    fn frame_of(&self, key: [u64; 2], define: impl FnOnce(FrameId)) -> FrameId {
        if let Some(id) = self.frames.find(&key) {
            return FrameId(id);
        }
        let inserted = self.frames.insert(&key, &self.lock.lock());
        match inserted {
            Inserted::Known(id) => FrameId(id),
            Inserted::New(id) => {
                define(FrameId(id));
                FrameId(id)
            }
            Inserted::Full => FrameId::NONE,
        }
    }

    /// The stack that is `frame` called from `parent`. Delivers a definition when it is new. `parent` itself when
    /// there is no room or `frame` is `NONE`.
    #[inline]
    pub(crate) fn child(&self, parent: StackId, frame: FrameId, sink: &mut dyn DefinitionSink) -> StackId {
        match self.stacks.find(&Self::node(parent, frame)) {
            Some(id) => StackId(id),
            None => self.new_child(parent, frame, sink),
        }
    }

    fn node(parent: StackId, frame: FrameId) -> [u64; 1] {
        [u64::from(parent.0) << 32 | u64::from(frame.0)]
    }

    #[cold]
    fn new_child(&self, parent: StackId, frame: FrameId, sink: &mut dyn DefinitionSink) -> StackId {
        if frame.is_none() {
            sink.lost(Loss::Frame);
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
                sink.lost(Loss::Frame);
                parent
            }
        }
    }

    /// Another number for each interner; 0 until [`Self::claim_epoch`].
    #[inline]
    pub(super) fn epoch(&self) -> u32 {
        self.epoch.load(Relaxed)
    }

    /// Another number for each interner, not 0.
    #[cold]
    pub(super) fn claim_epoch(&self) -> u32 {
        let fresh = EPOCHS.fetch_add(1, Relaxed).wrapping_add(1).max(1);
        match self.epoch.compare_exchange(0, fresh, Relaxed, Relaxed) {
            Ok(_) => fresh,
            Err(claimed) => claimed,
        }
    }

    /// What a key stands for, if it is remembered.
    #[inline]
    pub(super) fn meaning(&self, key: FrameKey) -> Meaning {
        self.keys.find(key)
    }

    /// Remembers what a key stands for.
    pub(super) fn remember(&self, key: FrameKey, meaning: Meaning) {
        self.keys.insert(key, meaning, &self.lock.lock());
    }
}
