//! The compile contexts of a recording: which compiled region of `torch.compile` was running at an event. PyTorch's
//! snapshots have them (`_record_memory_history(compile_context=True)`, PyTorch 2.8 and later).

/// A compile context, by its number in [`CompileContexts`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CompileContextId(u32);

impl CompileContextId {
    /// The first context. No other one is smaller.
    pub const FIRST: CompileContextId = CompileContextId(0);
    /// No compiled region was running, or contexts were not recorded. No other context is larger.
    pub const NONE: CompileContextId = CompileContextId(u32::MAX);
}

impl Default for CompileContextId {
    fn default() -> CompileContextId {
        CompileContextId::NONE
    }
}

/// The compile contexts of all events. Consecutive events with one context take one entry.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CompileContexts {
    texts: Vec<Box<str>>,
    /// The `seq` from which a context holds, in order.
    changes: Vec<(u64, CompileContextId)>,
}

/// The memory of one change, in bytes. A growing vector has up to twice its length.
pub(crate) const CHANGE_BYTES: usize = 2 * size_of::<(u64, CompileContextId)>();

impl CompileContexts {
    /// Without any context.
    pub const EMPTY: &'static CompileContexts = &CompileContexts { texts: Vec::new(), changes: Vec::new() };

    /// Whether no event has a context.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// The context of the event with this `seq`.
    #[inline]
    pub fn of(&self, seq: u64) -> CompileContextId {
        if self.changes.is_empty() {
            return CompileContextId::NONE;
        }
        let next = self.changes.partition_point(|(from, _)| *from <= seq);
        next.checked_sub(1).and_then(|at| self.changes.get(at)).map_or(CompileContextId::NONE, |(_, id)| *id)
    }

    /// The text of a context, as PyTorch wrote it; `None` for [`CompileContextId::NONE`].
    pub fn text(&self, id: CompileContextId) -> Option<&str> {
        self.texts.get(id.0 as usize).map(|text| &**text)
    }

    /// Adds a text and returns its number.
    pub(crate) fn add_text(&mut self, text: &str) -> CompileContextId {
        self.texts.push(text.into());
        CompileContextId(self.texts.len() as u32 - 1)
    }

    /// Gives the event with this `seq`, and all later ones, a context. Events come in order. Returns whether that took
    /// a new entry.
    pub(crate) fn set_from(&mut self, seq: u64, id: CompileContextId) -> bool {
        let last = self.changes.last().map_or(CompileContextId::NONE, |(_, id)| *id);
        if last == id {
            return false;
        }
        self.changes.push((seq, id));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_holds_until_the_next() {
        let mut contexts = CompileContexts::default();
        assert_eq!((contexts.of(3), contexts.is_empty()), (CompileContextId::NONE, true));
        let (a, b) = (contexts.add_text("Torch-Compiled Region: 0/0"), contexts.add_text("Torch-Compiled Region: 1/0"));
        assert!(!contexts.set_from(1, CompileContextId::NONE));
        assert!(contexts.set_from(3, a) && !contexts.set_from(4, a) && contexts.set_from(6, b));
        assert!(contexts.set_from(7, CompileContextId::NONE));
        let of: Vec<Option<&str>> = (2..9).map(|seq| contexts.text(contexts.of(seq))).collect();
        let [a, b] = ["Torch-Compiled Region: 0/0", "Torch-Compiled Region: 1/0"].map(Some);
        assert_eq!(of, [None, a, a, a, b, None, None]);
    }
}
