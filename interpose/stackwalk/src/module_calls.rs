//! Finds the `nn.Module`s that are being called: the frames of `Module.__call__` on a thread's stack, and the objects
//! they were called on.
//!
//! A thread remembers which entries of its last walk ([`super::thread`]) are such frames. For each, it remembers the
//! object that was the first local variable and the resulting context. If the entries are unchanged, only each frame's
//! object is read again. The same objects in the same order give the same context. Calls of entries beyond `known` are
//! stale and are removed before new entries are examined ([`ModuleCalls::truncate`]).
//!
//! An object is identified by its address and class. A module that replaces a freed one at its address is another call,
//! unless it has the same class. Then both have the same context, and a reader of the trace distinguishes them by time.

use memtrace_trace::ids::ContextId;

use super::definition::DefinitionSink;
use super::frame_chain::{CalledModule, FrameChain};
use super::key_cache::FrameMeaning;

/// At most this many nested calls are distinguished. Deeper ones belong to the innermost of these.
const MAX_NESTED_CALLS: usize = 64;

/// A frame that calls a module.
#[derive(Clone, Copy)]
struct CallFrame {
    /// The index of its entry.
    index: usize,
    /// The address of the object.
    object: usize,
    /// The address of its class, 0 if it could not be read.
    class: usize,
    /// The context of this call and its callers. The caller's context if the object is no module.
    context: ContextId,
}

impl CallFrame {
    /// Not the address of any object.
    const NO_OBJECT: usize = usize::MAX;
    const NONE: CallFrame = CallFrame { index: 0, object: CallFrame::NO_OBJECT, class: 0, context: ContextId::NONE };
}

/// The calls on a thread's last stack.
pub(super) struct ModuleCalls {
    list: [CallFrame; MAX_NESTED_CALLS],
    len: usize,
    /// The index of the call that is expected next. A model calls its modules in the same order each time.
    next: u32,
}

impl ModuleCalls {
    pub(super) const fn new() -> ModuleCalls {
        ModuleCalls { list: [CallFrame::NONE; MAX_NESTED_CALLS], len: 0, next: 0 }
    }

    fn as_slice(&self) -> &[CallFrame] {
        self.list.get(..self.len).unwrap_or_default()
    }

    /// Forgets the calls of entries from `index` on.
    #[inline]
    pub(super) fn truncate(&mut self, index: usize) {
        while let Some(last) = self.as_slice().last()
            && last.index >= index
        {
            self.len -= 1;
        }
    }

    /// Adds a call at the entry `index`, whose meaning is a call. The calls of all entries before it have been added.
    /// `below` is the meaning of the nearest entry below it that is not hidden.
    pub(super) fn add(&mut self, index: usize, meaning: FrameMeaning, below: Option<FrameMeaning>) {
        // `Module.__call__` is implemented by one function, or by two of which the outer one directly calls the inner
        // one.
        let is_inner_part = meaning.is_inner_call() && below.is_some_and(FrameMeaning::is_call);
        if !is_inner_part && let Some(slot) = self.list.get_mut(self.len) {
            *slot = CallFrame { index, ..CallFrame::NONE };
            self.len += 1;
        }
    }

    /// Whether there may be calls on the last stack.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The innermost call on the last stack, which has `depth` frames. `frame_at` returns the address of a frame.
    ///
    /// # Safety
    ///
    /// The last stack was captured from this chain, which has not changed since. `frame_at` returns frames of that
    /// stack.
    #[inline]
    pub(super) unsafe fn innermost<C: FrameChain>(
        &mut self,
        depth: usize,
        frame_at: impl Fn(usize) -> usize,
        chain: &C,
        sink: &mut dyn DefinitionSink,
    ) -> ContextId {
        let mut innermost = ContextId::NONE;
        for (at, call) in self.as_slice().iter().enumerate() {
            if call.index >= depth {
                break;
            }
            // SAFETY: the caller guarantees a frame of the chain, which is unchanged.
            let object = unsafe { chain.first_local(frame_at(call.index)) };
            // SAFETY: the object was verified at this address, and its frame keeps it alive.
            if object != call.object || call.class != 0 && unsafe { chain.class(object) } != call.class {
                // SAFETY: the caller guarantees the chain and `frame_at`.
                return unsafe { self.find_from(at, innermost, depth, frame_at, chain, sink) };
            }
            innermost = call.context;
        }
        innermost
    }

    /// [`Self::innermost`] with a lookup of the call `at` and of all calls inside it.
    ///
    /// # Safety
    ///
    /// The last stack was captured from this chain, which has not changed since. `frame_at` returns frames of that
    /// stack.
    #[inline(never)]
    unsafe fn find_from<C: FrameChain>(
        &mut self,
        at: usize,
        mut caller: ContextId,
        depth: usize,
        frame_at: impl Fn(usize) -> usize,
        chain: &C,
        sink: &mut dyn DefinitionSink,
    ) -> ContextId {
        for at in at..self.len {
            let Some(call) = self.list.get_mut(at) else { break };
            if call.index >= depth {
                // A deeper stack finds this call again: its context is that of the caller before.
                call.object = CallFrame::NO_OBJECT;
                break;
            }
            let index = call.index;
            // SAFETY: the caller guarantees a frame of the chain, which is unchanged.
            let object = unsafe { chain.first_local(frame_at(index)) };
            // SAFETY: the chain has just returned this object for a frame of its present stack.
            let CalledModule { class, context } = unsafe { chain.called(object, caller, &mut self.next, sink) };
            if let Some(call) = self.list.get_mut(at) {
                *call = CallFrame { index, object, class, context };
            }
            caller = context;
        }
        caller
    }
}
