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
use super::key_cache::FrameMeaning;
use super::thread::{FrameChain, ThreadStacks};

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

/// The result of examining a called object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CalledModule {
    /// The address of its class, 0 if it cannot be read.
    pub(super) class: usize,
    /// The context of the call, or the caller's if it is no call of a module.
    pub(super) context: ContextId,
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

    /// Adds a call at the entry `index`. The calls of all entries before it have been added.
    fn push(&mut self, index: usize) {
        if let Some(slot) = self.list.get_mut(self.len) {
            *slot = CallFrame { index, ..CallFrame::NONE };
            self.len += 1;
        }
    }
}

impl ThreadStacks {
    /// Adds the entry at `index`, whose meaning is a call.
    #[cold]
    pub(super) fn add_call_frame(&mut self, index: usize, meaning: FrameMeaning) {
        // `Module.__call__` is implemented by one function, or by two of which the outer one directly calls the inner
        // one.
        let is_inner_part = meaning.is_inner_call()
            && (0..index)
                .rev()
                .map(|below| self.meaning(below))
                .find(|meaning| *meaning != FrameMeaning::HIDDEN)
                .is_some_and(FrameMeaning::is_call);
        if !is_inner_part {
            self.module_calls.push(index);
        }
    }

    /// Whether the stack of the last capture may contain calls.
    #[inline(always)]
    pub(crate) fn has_module_calls(&self) -> bool {
        self.module_calls.len != 0
    }

    /// The innermost module call on the stack of the last capture, which was not `NONE`.
    ///
    /// # Safety
    ///
    /// The last capture was of this chain, which has not changed since.
    #[inline]
    pub(super) unsafe fn module_call<C: FrameChain>(&mut self, chain: &C, sink: &mut dyn DefinitionSink) -> ContextId {
        let mut innermost = ContextId::NONE;
        for (at, call) in self.module_calls.as_slice().iter().enumerate() {
            if call.index >= self.depth() {
                break;
            }
            // SAFETY: the entry belongs to the last stack, whose frames the caller guarantees to be unchanged.
            let object = unsafe { chain.first_local(self.frame(call.index).0) };
            // SAFETY: the object was verified at this address, and its frame keeps it alive.
            if object != call.object || call.class != 0 && unsafe { chain.class(object) } != call.class {
                // SAFETY: the caller guarantees that the chain is unchanged since the last capture.
                return unsafe { self.module_call_from(at, innermost, chain, sink) };
            }
            innermost = call.context;
        }
        innermost
    }

    /// [`Self::module_call`] with a lookup of the call `at` and of all calls inside it.
    ///
    /// # Safety
    ///
    /// The last capture was of this chain, which has not changed since.
    #[inline(never)]
    unsafe fn module_call_from<C: FrameChain>(
        &mut self,
        at: usize,
        mut caller: ContextId,
        chain: &C,
        sink: &mut dyn DefinitionSink,
    ) -> ContextId {
        let (depth, len) = (self.depth(), self.module_calls.len);
        for at in at..len {
            let Some(index) = self.module_calls.list.get(at).map(|call| call.index).filter(|index| *index < depth)
            else {
                break;
            };
            // SAFETY: the entry belongs to the last stack, whose frames the caller guarantees to be unchanged.
            let object = unsafe { chain.first_local(self.frame(index).0) };
            // SAFETY: the chain has just returned this object for a frame of its present stack.
            let CalledModule { class, context } =
                unsafe { chain.called(object, caller, &mut self.module_calls.next, sink) };
            if let Some(call) = self.module_calls.list.get_mut(at) {
                *call = CallFrame { index, object, class, context };
            }
            caller = context;
        }
        caller
    }
}
