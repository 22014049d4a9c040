//! Pseudonyms: one for each word, from a key that nobody keeps.

use std::collections::{HashMap, HashSet};

use sha2::{Digest, Sha256};

/// The number of letters in a pseudonym's alphabet. It has no digits: those at the end of a name are kept.
const LETTERS: u8 = 26;
/// The length of a pseudonym without its first letter.
const LENGTH: usize = 8;

/// Gives words pseudonyms. A word has the same one everywhere in a redacted run.
#[derive(Debug)]
pub(super) struct Pseudonyms {
    key: [u8; 32],
    known: HashMap<Box<str>, Box<str>>,
    used: HashSet<Box<str>>,
}

impl Pseudonyms {
    pub(super) fn new(key: [u8; 32]) -> Pseudonyms {
        Pseudonyms { key, known: HashMap::new(), used: HashSet::new() }
    }

    /// The pseudonym of a word: `xkqmrpwab`. A word with a capital letter first begins with `X`.
    pub(super) fn of(&mut self, word: &str) -> Box<str> {
        if let Some(known) = self.known.get(word) {
            return known.clone();
        }
        let first = if word.trim_start_matches('_').starts_with(char::is_uppercase) { 'X' } else { 'x' };
        // Two words with one hash are as good as impossible. They must not become one all the same.
        let pseudonym = (0u8..=u8::MAX)
            .map(|round| {
                let hash = Sha256::new().chain_update(self.key).chain_update([round]).chain_update(word).finalize();
                let letters = hash.iter().take(LENGTH).map(|byte| char::from(b'a' + byte % LETTERS));
                std::iter::once(first).chain(letters).collect::<String>().into_boxed_str()
            })
            .find(|pseudonym| !self.used.contains(pseudonym))
            .unwrap_or_default();
        self.used.insert(pseudonym.clone());
        self.known.insert(word.into(), pseudonym.clone());
        pseudonym
    }

    /// Whether the word has been replaced before.
    pub(super) fn has(&self, word: &str) -> bool {
        self.known.contains_key(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_has_one_pseudonym_per_key() {
        let (mut a, mut b) = (Pseudonyms::new([1; 32]), Pseudonyms::new([2; 32]));
        let (secret, other) = (a.of("secret"), a.of("Other"));
        assert_eq!(a.of("secret"), secret);
        assert_ne!(b.of("secret"), secret);
        assert_eq!(Pseudonyms::new([1; 32]).of("secret"), secret);
        assert!(secret.starts_with('x') && other.starts_with('X') && secret.len() == 9);
        assert!(a.has("Other") && !a.has("other"));
    }
}
