//! A 128-bit digest that identifies a frame by its text, or a native frame by its location.
//!
//! Two frames are the same if their digests are equal. The text itself is not stored, which bounds the interner's
//! memory. With a million different frames the probability of any collision is below 2^-88. This protects against
//! accidents, not against an adversary: the traced program could only confuse its own stacks.

use memtrace_trace::ids::ModuleId;

use super::definition::FrameText;

const SEEDS: [u64; 2] = [0x243F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344];
const MULTIPLIERS: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xD6E8_FEB8_6659_FD93];

/// Multiplies to 128 bits and combines both halves by XOR.
#[inline]
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

struct Digest([u64; 2]);

impl Digest {
    fn word(&mut self, word: u64) {
        let [a, b] = &mut self.0;
        *a = fold(*a ^ word, MULTIPLIERS[0]).wrapping_add(word.rotate_left(32));
        *b = fold(b.wrapping_add(word), MULTIPLIERS[1]) ^ b.rotate_left(23);
    }

    fn text(&mut self, text: &str) {
        let (words, rest) = text.as_bytes().as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        for (to, from) in last.iter_mut().zip(rest) {
            *to = *from;
        }
        self.word(u64::from_le_bytes(last));
        self.word(text.len() as u64);
    }
}

/// The digest of all fields of a frame. Never `[0, 0]`, which means "no key" in a table.
pub(super) fn digest(text: &FrameText<'_>) -> [u64; 2] {
    let mut digest = Digest(SEEDS);
    digest.text(text.filename);
    digest.text(text.name);
    digest.text(text.qualname);
    digest.word(u64::from(text.line) << 32 | u64::from(text.first_line));
    digest.word(0);
    let [a, b] = digest.0;
    [a, b | 1]
}

/// The digest of a text and its kind. Never `[0, 0]`.
pub(super) fn text_digest(kind: u8, text: &str) -> [u64; 2] {
    let mut digest = Digest(SEEDS);
    digest.text(text);
    digest.word(kind.into());
    digest.word(0);
    let [a, b] = digest.0;
    [a, b | 1]
}

/// The digest of a native frame. Never `[0, 0]`.
pub(super) fn native_digest(module: ModuleId, address: u64) -> [u64; 2] {
    /// No file name has this length. A frame's digest has a text's length in the second word or a later one.
    const NATIVE: u64 = u64::MAX;
    let mut digest = Digest(SEEDS);
    digest.word(NATIVE);
    digest.word(u64::from(module.0));
    digest.word(address);
    digest.word(0);
    let [a, b] = digest.0;
    [a, b | 1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn text<'a>(name: &'a str, qualname: &'a str, filename: &'a str, line: u32, first_line: u32) -> FrameText<'a> {
        FrameText { name, qualname, filename, line, first_line }
    }

    #[test]
    fn every_field_and_every_border_between_fields_changes_the_digest() {
        let all = [
            text("f", "f", "a.py", 1, 1),
            text("f", "f", "a.py", 2, 1),
            text("f", "f", "a.py", 1, 2),
            text("f", "g", "a.py", 1, 1),
            text("g", "f", "a.py", 1, 1),
            text("f", "f", "b.py", 1, 1),
            text("ff", "", "a.py", 1, 1),
            text("", "ff", "a.py", 1, 1),
            text("f\0", "f", "a.py", 1, 1),
            text("fa.py", "f", "", 1, 1),
            text("12345678", "", "", 1, 1),
            text("", "12345678", "", 1, 1),
        ];
        let mut digests: HashSet<_> = all.iter().map(digest).collect();
        assert_eq!(digests.len(), all.len());
        let native = [(0, 1), (1, 0), (1, 1), (2, 1)].map(|(module, address)| native_digest(ModuleId(module), address));
        digests.extend(native);
        assert_eq!(digests.len(), all.len() + native.len());
    }

    #[test]
    fn both_halves_are_spread_over_their_low_bits() {
        let mut low = [HashSet::new(), HashSet::new()];
        for line in 0..4096 {
            let [a, b] = digest(&text("forward", "Block.forward", "/srv/model.py", line, 1));
            low[0].insert(a & 0xffff);
            low[1].insert(b >> 1 & 0xffff);
        }
        // 4096 balls into 65536 bins hit about 3968 bins.
        assert!(low.iter().all(|seen| seen.len() > 3850), "{} {}", low[0].len(), low[1].len());
    }
}
