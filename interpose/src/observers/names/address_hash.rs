//! Maps whose keys are addresses or hashes.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A hash function for addresses and for values that are hashes already.
#[derive(Default)]
pub(super) struct AddressHasher(pub(super) u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            self.write_u64(u64::from_le_bytes(word) ^ (chunk.len() as u64) << 56);
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0.rotate_left(23) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 29;
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

pub(super) type BuildAddressHasher = BuildHasherDefault<AddressHasher>;

/// Maps a parameter's Python object to its first name.
pub(super) type Parameters = HashMap<usize, Box<str>, BuildAddressHasher>;

/// Maps a hash of a parameter's name to the parameter's object.
pub(super) type ParameterNames = HashMap<u64, usize, BuildAddressHasher>;
