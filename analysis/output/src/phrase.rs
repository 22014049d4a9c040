//! Caches the encoded bytes that are the same in every event of a snapshot.
//!
//! An event is four numbers and a reference between words that repeat millions of times. Looking up each word would
//! cost more than the rest of an export. So a phrase is encoded when it first occurs, and copied afterwards.

use std::io::Write;

use super::pickle::{EncodedBytes, PickleWriter, Word, Words};

/// The position of a phrase in a dictionary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Position {
    Begin,
    Middle,
    End,
}

/// A sequence of words that always occur together.
#[derive(Debug)]
pub(super) struct Phrase {
    position: Position,
    words: Vec<Word>,
    ready: Option<EncodedBytes>,
}

impl Phrase {
    /// A phrase that opens a dictionary.
    pub(super) fn begin(words: &[Word]) -> Phrase {
        Phrase { position: Position::Begin, ..Phrase::middle(words) }
    }

    /// A phrase inside a dictionary.
    pub(super) fn middle(words: &[Word]) -> Phrase {
        Phrase { position: Position::Middle, words: words.to_vec(), ready: None }
    }

    /// A phrase that closes a dictionary.
    pub(super) fn end(words: &[Word]) -> Phrase {
        Phrase { position: Position::End, ..Phrase::middle(words) }
    }

    /// Writes the phrase.
    #[inline(always)]
    pub(super) fn put<W: Write>(&mut self, out: &mut PickleWriter<W>, words: &mut Words) {
        match &self.ready {
            Some(encoded) => out.put_encoded(encoded),
            None => self.put_first(out, words),
        }
    }

    #[cold]
    fn put_first<W: Write>(&mut self, out: &mut PickleWriter<W>, words: &mut Words) {
        self.put_slowly(out, words);
        // Encoded a second time, because now every word is known, and the result stays the same from here on.
        self.ready = EncodedBytes::of(|scratch| self.put_slowly(scratch, words));
    }

    fn put_slowly<W: Write>(&self, out: &mut PickleWriter<W>, words: &mut Words) {
        if self.position == Position::Begin {
            out.begin_dict();
        }
        for word in &self.words {
            words.put(out, *word);
        }
        if self.position == Position::End {
            out.end_dict();
        }
    }
}
