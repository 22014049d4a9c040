//! Finds the `nn.Module`s that are being called: the frames of `Module.__call__` on a thread's stack, and the objects
//! they were called on.
//!
//! A thread remembers which entries of its last walk ([`super::thread`]) are such frames. For each, it remembers the
//! object that was the first local variable and the resulting context. If the entries are unchanged, only each frame's
//! object is read again. The same objects in the same order give the same context. Calls of entries beyond `known` are
//! stale and are removed before new entries are examined ([`Calls::cut`]).
//!
//! An object is identified by its address and class. A module that replaces a freed one at its address is another call,
//! unless it has the same class. Then both have the same context, and a reader of the trace distinguishes them by time.

use memtrace_trace::ids::ContextId;

use super::definition::DefinitionSink;
use super::key_cache::Meaning;
use super::thread::{Chain, ThreadStacks};

/// At most this many nested calls are distinguished. Deeper ones belong to the innermost of these.
const DEEPEST: usize = 64;

/// A frame that calls a module.
#[derive(Clone, Copy)]
struct Call {
    /// The index of its entry.
    index: usize,
    /// The address of the object.
    object: usize,
    /// The address of its class, 0 if it could not be read.
    class: usize,
    /// The context of this call and its callers. The caller's context if the object is no module.
    context: ContextId,
}

impl Call {
    /// Not the address of any object.
    const NOBODY: usize = usize::MAX;
    const NONE: Call = Call { index: 0, object: Call::NOBODY, class: 0, context: ContextId::NONE };
}

/// The result of examining a called object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Called {
    /// The address of its class, 0 if it cannot be read.
    pub(super) class: usize,
    /// The context of the call, or the caller's if it is no call of a module.
    pub(super) context: ContextId,
}

/// The calls on a thread's last stack.
pub(super) struct Calls {
    list: [Call; DEEPEST],
    len: usize,
    /// The index of the call that is expected next. A model calls its modules in the same order each time.
    next: u32,
}

impl Calls {
    pub(super) const fn new() -> Calls {
        Calls { list: [Call::NONE; DEEPEST], len: 0, next: 0 }
    }

    fn as_slice(&self) -> &[Call] {
        self.list.get(..self.len).unwrap_or_default()
    }

    /// Forgets the calls of entries from `index` on.
    #[inline]
    pub(super) fn cut(&mut self, index: usize) {
        while let Some(last) = self.as_slice().last()
            && last.index >= index
        {
            self.len -= 1;
        }
    }

    /// Adds a call at the entry `index`. The calls of all entries before it have been added.
    fn push(&mut self, index: usize) {
        if let Some(place) = self.list.get_mut(self.len) {
            *place = Call { index, ..Call::NONE };
            self.len += 1;
        }
    }
}

impl ThreadStacks {
    /// Adds the entry at `index`, whose meaning is a call.
    #[cold]
    pub(super) fn note_call(&mut self, index: usize, meaning: Meaning) {
        // `Module.__call__` is implemented by one function, or by two of which the outer one directly calls the inner
        // one.
        let is_part = meaning.is_inner_call()
            && (0..index)
                .rev()
                .map(|below| self.meaning(below))
                .find(|meaning| *meaning != Meaning::HIDDEN)
                .is_some_and(Meaning::is_call);
        if !is_part {
            self.calls.push(index);
        }
    }

    /// Whether the stack of the last capture may contain calls.
    #[inline(always)]
    pub(crate) fn has_calls(&self) -> bool {
        self.calls.len != 0
    }

    /// The innermost module call on the stack of the last capture, which was not `NONE`.
    ///
    /// # Safety
    ///
    /// The last capture was of this chain, which has not changed since.
    #[inline]
    pub(super) unsafe fn call<C: Chain>(&mut self, chain: &C, sink: &mut dyn DefinitionSink) -> ContextId {
        let mut innermost = ContextId::NONE;
        for (at, call) in self.calls.as_slice().iter().enumerate() {
            if call.index >= self.depth() {
                break;
            }
            // SAFETY: the entry belongs to the last stack, whose frames the caller guarantees to be unchanged.
            let object = unsafe { chain.first_local(self.frame(call.index).0) };
            // SAFETY: the object was verified at this address, and its frame keeps it alive.
            if object != call.object || call.class != 0 && unsafe { chain.class(object) } != call.class {
                // SAFETY: the caller guarantees that the chain is unchanged since the last capture.
                return unsafe { self.call_from(at, innermost, chain, sink) };
            }
            innermost = call.context;
        }
        innermost
    }

    /// [`Self::call`] with a lookup of the call `at` and of all calls inside it.
    ///
    /// # Safety
    ///
    /// The last capture was of this chain, which has not changed since.
    #[inline(never)]
    unsafe fn call_from<C: Chain>(
        &mut self,
        at: usize,
        mut caller: ContextId,
        chain: &C,
        sink: &mut dyn DefinitionSink,
    ) -> ContextId {
        let (depth, len) = (self.depth(), self.calls.len);
        for at in at..len {
            let Some(index) = self.calls.list.get(at).map(|call| call.index).filter(|index| *index < depth) else {
                break;
            };
            // SAFETY: the entry belongs to the last stack, whose frames the caller guarantees to be unchanged.
            let object = unsafe { chain.first_local(self.frame(index).0) };
            // SAFETY: the chain has just returned this object for a frame of its present stack.
            let Called { class, context } = unsafe { chain.called(object, caller, &mut self.calls.next, sink) };
            if let Some(call) = self.calls.list.get_mut(at) {
                *call = Call { index, object, class, context };
            }
            caller = context;
        }
        caller
    }
}
