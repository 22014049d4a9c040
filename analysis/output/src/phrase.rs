//! What is the same in every event of a snapshot, kept as the bytes it comes out as.
//!
//! An event is four numbers and a reference between words that repeat a million times. Looking each word up would cost more than
//! anything else in an export, so a phrase is put together when it occurs the first time and copied from then on.

use std::io::Write;

use super::pickle::{Pickle, Piece, Word, Words};

/// Where in a dictionary a phrase stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Begin,
    Middle,
    End,
}

/// A run of words that always come together.
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

    /// Writes it.
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
        // Once more, now that every word is known: what comes out is what will always come out.
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
