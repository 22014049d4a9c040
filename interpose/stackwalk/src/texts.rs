//! Assigns dense ids to short texts. The text itself is not stored; a 128-bit digest stands for it ([`super::digest`]).

use super::digest::text_digest;
use super::id_set::{IdSet, Inserted};
use super::lock::Lock;

/// A set of texts. Looking up a known text takes no lock and allocates nothing.
pub struct Texts {
    ids: IdSet<2>,
    lock: Lock,
}

/// The result of looking up a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextId {
    /// The text has had this id before.
    Known(u32),
    /// The text gets this new id, and the caller must define it.
    New(u32),
    /// The limit is reached.
    Full,
}

impl Texts {
    /// A set of at most `limit` texts, with ids from 1 on.
    pub const fn new(limit: u32) -> Texts {
        Texts { ids: IdSet::new(limit), lock: Lock::new() }
    }

    /// The id of a text of this kind, assigned if it is new.
    #[inline]
    pub fn id(&self, kind: u8, text: &str) -> TextId {
        let key = text_digest(kind, text);
        if let Some(id) = self.ids.find(&key) {
            return TextId::Known(id);
        }
        match self.lock.lock().map_or(Inserted::Full, |locked| self.ids.insert(&key, &locked)) {
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
    fn a_text_has_one_id_for_each_kind_up_to_the_limit() {
        let texts = Texts::new(3);
        assert_eq!(texts.id(0, "forward"), TextId::New(1));
        assert_eq!(texts.id(1, "forward"), TextId::New(2));
        assert_eq!(texts.id(0, "forward"), TextId::Known(1));
        assert_eq!(texts.id(0, ""), TextId::New(3));
        assert_eq!(texts.id(0, "backward"), TextId::Full);
        assert_eq!(texts.id(1, "forward"), TextId::Known(2));
    }
}
