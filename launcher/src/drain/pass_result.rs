//! The result of one pass over the rings of a process.

/// The number of slots that one pass over the rings yielded.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Activity {
    /// The total over all rings.
    pub(super) slots: u64,
    /// The count of the fullest ring.
    pub(super) fullest: u64,
}

/// The result of one pass over the rings.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct PassResult {
    pub(super) activity: Activity,
    /// Whether the pass stopped early, at its slot limit or because the writer was behind.
    pub(super) stopped_early: bool,
    /// The smallest sequence number that stayed in its ring because the reorder window has no place for it yet.
    pub(super) out_of_place: Option<u64>,
}
