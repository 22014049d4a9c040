//! The labels of named ranges: an id for each name.
//!
//! A program may create names without end (`batch 17`). So a process has at most [`MAX_LABELS`] labels. After that,
//! names that differ only in a trailing number share a label (`batch #*`), of which there are at most
//! [`MAX_SHARED_LABELS`].

use std::borrow::Cow;

use memtrace_stackwalk::{TextId, Texts};
use memtrace_trace::definition::LabelOrigin;

/// At most this many names have a label of their own.
const MAX_LABELS: u32 = 1 << 16;
/// At most this many labels stand for several names.
const MAX_SHARED_LABELS: u32 = 1 << 12;

/// The labels of a process.
pub(super) struct Labels {
    individual: Texts,
    shared: Texts,
}

/// The label of a name.
pub(super) struct Label<'a> {
    pub(super) id: u32,
    /// The text if the label is new and must be defined.
    pub(super) new: Option<Cow<'a, str>>,
}

impl Labels {
    pub(super) const fn new() -> Labels {
        Labels { individual: Texts::new(MAX_LABELS), shared: Texts::new(MAX_SHARED_LABELS) }
    }

    /// The label of a name. `None` if there is no space.
    pub(super) fn label<'a>(&self, origin: LabelOrigin, text: &'a str) -> Option<Label<'a>> {
        match self.individual.id(origin as u8, text) {
            TextId::Known(id) => return Some(Label { id, new: None }),
            TextId::New(id) => return Some(Label { id, new: Some(Cow::Borrowed(text)) }),
            TextId::Full => {}
        }
        let name = shared_name(text);
        match self.shared.id(origin as u8, &name) {
            TextId::Known(id) => Some(Label { id: MAX_LABELS + id, new: None }),
            TextId::New(id) => Some(Label { id: MAX_LABELS + id, new: Some(Cow::Owned(name)) }),
            TextId::Full => None,
        }
    }
}

/// The name without its trailing number, followed by `*`.
fn shared_name(text: &str) -> String {
    format!("{}*", text.trim_end_matches(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_their_last_number_share_a_name() {
        assert_eq!(shared_name("ProfilerStep#17"), "ProfilerStep#*");
        assert_eq!(shared_name("batch 3"), "batch *");
        assert_eq!(shared_name("forward"), "forward*");
    }
}
