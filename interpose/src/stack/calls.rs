//! Which `nn.Module`s are being called: the frames of `Module.__call__` on a thread's stack, and the objects they were called on.
//!
//! A thread remembers which of the entries of its last walk ([`super::thread`]) are such frames, which object each had as its first
//! local, and which context that made. Where the entries are the same, each frame is asked for its object alone: the same objects in
//! the same order are the same context. What is remembered of an entry beyond `known` is stale and goes before new entries are
//! looked at, see [`Calls::cut`].
//!
//! An object is recognised by its address and its class: another module that takes the place of one that died is another call,
//! unless it is of the same class. Then its calls have the same context; who reads the trace tells them apart by time.

use memtrace_trace::ids::ContextId;

use super::definition::DefinitionSink;
use super::key_cache::Meaning;
use super::thread::{Chain, ThreadStacks};

/// Calls inside one another that are told apart; deeper ones belong to the innermost of these.
const DEEPEST: usize = 64;

/// One frame that calls a module.
#[derive(Clone, Copy)]
struct Call {
    /// Where it is among the entries.
    index: usize,
    /// Address of the object, and of its class: 0 when that could not be read.
    object: usize,
    class: usize,
    /// What it and its callers are: the caller's where the object is no module.
    context: ContextId,
}

impl Call {
    /// No object is at this address.
    const NOBODY: usize = usize::MAX;
    const NONE: Call = Call { index: 0, object: Call::NOBODY, class: 0, context: ContextId::NONE };
}

/// What an object that was called turned out to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Called {
    /// Address of its class; 0: it cannot be read.
    pub(super) class: usize,
    /// The call; the caller where it is none.
    pub(super) context: ContextId,
}

/// A thread's memory of its last calls. See the module.
pub(super) struct Calls {
    list: [Call; DEEPEST],
    len: usize,
    /// Which call is likely to be the next: a model calls its modules in the same order each time.
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

    /// The entry at `index` calls a module; those of all entries before it are known.
    fn push(&mut self, index: usize) {
        if let Some(place) = self.list.get_mut(self.len) {
            *place = Call { index, ..Call::NONE };
            self.len += 1;
        }
    }
}

impl ThreadStacks {
    /// Takes note of the entry at `index`, whose meaning is that of a call.
    #[cold]
    pub(super) fn note_call(&mut self, index: usize, meaning: Meaning) {
        // `Module.__call__` is one function or two, of which the outer one calls the inner one at once.
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

    /// Whether there may be calls on the stack that the last capture gave.
    #[inline(always)]
    pub(crate) fn has_calls(&self) -> bool {
        self.calls.len != 0
    }

    /// The innermost module being called on the stack that the last capture gave, which was not `NONE`.
    ///
    /// # Safety
    /// The last capture was of this chain, which has not changed since.
    #[inline]
    pub(super) unsafe fn call<C: Chain>(&mut self, chain: &C, sink: &mut dyn DefinitionSink) -> ContextId {
        let mut innermost = ContextId::NONE;
        for (at, call) in self.calls.as_slice().iter().enumerate() {
            if call.index >= self.depth() {
                break;
            }
            // SAFETY: the entry is one of the last stack's, whose frames are there.
            let object = unsafe { chain.first_local(self.frame(call.index).0) };
            // SAFETY: a first local of that address has proved to be an object; it is alive as long as its frame.
            if object != call.object || call.class != 0 && unsafe { chain.class(object) } != call.class {
                // SAFETY: the caller's promise.
                return unsafe { self.call_from(at, innermost, chain, sink) };
            }
            innermost = call.context;
        }
        innermost
    }

    /// The same where the call `at` and those in it have to be looked up.
    ///
    /// # Safety
    /// As [`Self::call`].
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
            // SAFETY: as above.
            let object = unsafe { chain.first_local(self.frame(index).0) };
            // SAFETY: as above: what the chain has just given.
            let Called { class, context } = unsafe { chain.called(object, caller, &mut self.calls.next, sink) };
            if let Some(call) = self.calls.list.get_mut(at) {
                *call = Call { index, object, class, context };
            }
            caller = context;
        }
        caller
    }
}
