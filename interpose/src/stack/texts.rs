//! Short texts, each of which has a dense id. The text itself is not kept: a 128-bit digest stands for it (see [`super::digest`]).

use super::digest::text_digest;
use super::id_set::{IdSet, Inserted};
use super::lock::Lock;

/// See the module. Looking a known text up takes no lock and allocates nothing.
pub(crate) struct Texts {
    ids: IdSet<2>,
    lock: Lock,
}

/// What became of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TextId {
    /// It had this id.
    Known(u32),
    /// It has this id now: whoever hears this defines it.
    New(u32),
    /// There are too many.
    Full,
}

impl Texts {
    /// For at most `limit` texts, with ids from 1 on.
    pub(crate) const fn new(limit: u32) -> Texts {
        Texts { ids: IdSet::new(limit), lock: Lock::new() }
    }

    /// The id of a text of this kind.
    #[inline]
    pub(crate) fn id(&self, kind: u8, text: &str) -> TextId {
        let key = text_digest(kind, text);
        if let Some(id) = self.ids.find(&key) {
            return TextId::Known(id);
        }
        match self.ids.insert(&key, &self.lock.lock()) {
            Inserted::Known(id) => TextId::Known(id),
            Inserted::New(id) => TextId::New(id),
            Inserted::Full => TextId::Full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_one_id_of_each_kind_and_no_more_than_the_limit() {
        let texts = Texts::new(3);
        assert_eq!(texts.id(0, "forward"), TextId::New(1));
        assert_eq!(texts.id(1, "forward"), TextId::New(2));
        assert_eq!(texts.id(0, "forward"), TextId::Known(1));
        assert_eq!(texts.id(0, ""), TextId::New(3));
        assert_eq!(texts.id(0, "backward"), TextId::Full);
        assert_eq!(texts.id(1, "forward"), TextId::Known(2));
    }
}
