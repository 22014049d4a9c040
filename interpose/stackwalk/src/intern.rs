//! The process-wide prefix tree of stacks and its frames.
//!
//! A stack is `(parent stack, frame)`, from root to leaf, and its id is that of its node. A Python frame is its text
//! ([`FrameText`]): two code objects that print the same line are one frame. A native frame is its object and address.
//! Ids are dense and start at 1.
//!
//! Everything is bounded, so memory stays bounded however long the program runs: at most [`MAX_STACKS`] stacks and
//! [`MAX_FRAMES`] frames. If there is no space for a stack, its deepest known caller stands for it, and the sink is
//! notified. At these limits host memory is 16 bytes a stack, 24 a frame and 1 MiB of key cache, in total 23 MiB. The
//! tables are mapped at first use.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use memtrace_trace::ids::{FrameId, ModuleId, StackId};

use super::definition::{DefinitionSink, FrameText, Loss};
use super::digest::{digest, native_digest};
use super::id_set::{IdSet, Inserted};
use super::key_cache::{FrameKey, FrameMeaning, KeyCache, MAX_FRAMES};
use super::lock::Lock;

/// The largest number of stacks in one process.
pub const MAX_STACKS: u32 = 1 << 20;

/// The prefix tree of one process. All methods may be called from any thread.
pub struct Interner {
    lock: Lock,
    stacks: IdSet<1>,
    frames: IdSet<2>,
    keys: KeyCache,
    /// A number that identifies this interner. 0 before [`Self::claim_epoch`].
    epoch: AtomicU32,
}

/// How many epochs have been assigned. A fork copies it, so a child's interner differs from its parent's.
static EPOCHS: AtomicU32 = AtomicU32::new(0);

impl Interner {
    /// An empty interner, which maps no memory.
    #[allow(clippy::new_without_default, reason = "lives in a static; a Default would be a second way to make one")]
    pub const fn new() -> Interner {
        Interner {
            lock: Lock::new(),
            stacks: IdSet::new(MAX_STACKS),
            frames: IdSet::new(MAX_FRAMES),
            keys: KeyCache::new(),
            epoch: AtomicU32::new(0),
        }
    }

    /// The number of stacks, of frames, and of keys evicted from the cache of known code. Many evictions mean that the
    /// program keeps creating code.
    pub fn counts(&self) -> (u32, u32, u64) {
        (self.stacks.len(), self.frames.len(), self.keys.evictions())
    }

    /// The id of a Python frame, by its text. Delivers a definition if it is new. `NONE` if there is no space.
    pub(crate) fn frame(&self, text: &FrameText<'_>, sink: &mut dyn DefinitionSink) -> FrameId {
        self.frame_of(digest(text), |id| sink.frame(id, text))
    }

    /// The id of a native frame. Delivers a definition if it is new. `NONE` if there is no space.
    pub(super) fn native_frame(&self, module: ModuleId, address: u64, sink: &mut dyn DefinitionSink) -> FrameId {
        self.frame_of(native_digest(module, address), |id| sink.native_frame(id, module, address))
    }

    fn frame_of(&self, key: [u64; 2], define: impl FnOnce(FrameId)) -> FrameId {
        if let Some(id) = self.frames.find(&key) {
            return FrameId(id);
        }
        let inserted = self.lock.lock().map_or(Inserted::Full, |locked| self.frames.insert(&key, &locked));
        match inserted {
            Inserted::Known(id) => FrameId(id),
            Inserted::New(id) => {
                define(FrameId(id));
                FrameId(id)
            }
            Inserted::Full => FrameId::NONE,
        }
    }

    /// The stack of `frame` called from `parent`. Delivers a definition if it is new. Returns `parent` if there is no
    /// space or `frame` is `NONE`.
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
        let node = Self::node(parent, frame);
        let inserted = self.lock.lock().map_or(Inserted::Full, |locked| self.stacks.insert(&node, &locked));
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

    /// A number that differs for each interner. 0 before [`Self::claim_epoch`].
    #[inline]
    pub(super) fn epoch(&self) -> u32 {
        self.epoch.load(Relaxed)
    }

    /// A number that differs for each interner and is not 0. Assigns it if necessary.
    #[cold]
    pub(super) fn claim_epoch(&self) -> u32 {
        let fresh = EPOCHS.fetch_add(1, Relaxed).wrapping_add(1).max(1);
        match self.epoch.compare_exchange(0, fresh, Relaxed, Relaxed) {
            Ok(_) => fresh,
            Err(claimed) => claimed,
        }
    }

    /// The meaning of a key. `UNKNOWN` if it is not cached.
    #[inline]
    pub(super) fn meaning(&self, key: FrameKey) -> FrameMeaning {
        self.keys.find(key)
    }

    /// Caches the meaning of a key.
    pub(super) fn remember(&self, key: FrameKey, meaning: FrameMeaning) {
        if let Some(locked) = self.lock.lock() {
            self.keys.insert(key, meaning, &locked);
        }
    }
}
