//! Caches the encoded bytes that are the same in every event of a snapshot.
//!
//! An event is four numbers and a reference between words that repeat millions of times. Looking up each word would
//! cost more than the rest of an export. So a phrase is encoded when it first occurs, and copied afterwards.

use std::io::Write;

use super::pickle::{Pickle, Piece, Word, Words};

/// The position of a phrase in a dictionary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Begin,
    Middle,
    End,
}

/// A sequence of words that always occur together.
#[derive(Debug)]
pub(super) struct Phrase {
    place: Place,
    words: Vec<Word>,
    ready: Option<Piece>,
}

impl Phrase {
    /// A phrase that opens a dictionary.
    pub(super) fn begin(words: &[Word]) -> Phrase {
        Phrase { place: Place::Begin, ..Phrase::middle(words) }
    }

    /// A phrase inside a dictionary.
    pub(super) fn middle(words: &[Word]) -> Phrase {
        Phrase { place: Place::Middle, words: words.to_vec(), ready: None }
    }

    /// A phrase that closes a dictionary.
    pub(super) fn end(words: &[Word]) -> Phrase {
        Phrase { place: Place::End, ..Phrase::middle(words) }
    }

    /// Writes the phrase.
    #[inline(always)]
    pub(super) fn put<W: Write>(&mut self, out: &mut Pickle<W>, words: &mut Words) {
        match &self.ready {
            Some(piece) => out.piece(piece),
            None => self.put_first(out, words),
        }
    }

    #[cold]
    fn put_first<W: Write>(&mut self, out: &mut Pickle<W>, words: &mut Words) {
        self.put_slowly(out, words);
        // Encoded a second time, because now every word is known, and the result stays the same from here on.
        self.ready = Piece::of(|scratch| self.put_slowly(scratch, words));
    }

    fn put_slowly<W: Write>(&self, out: &mut Pickle<W>, words: &mut Words) {
        if self.place == Place::Begin {
            out.begin_dict();
        }
        for word in &self.words {
            words.put(out, *word);
        }
        if self.place == Place::End {
            out.end_dict();
        }
    }
}
