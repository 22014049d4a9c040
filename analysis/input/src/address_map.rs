//! A hash map with device addresses as keys.
//!
//! Addresses are multiples of 512, and one multiplication spreads them. The standard hasher protects against chosen
//! keys. That protection is not needed, because the addresses come from an allocator, and it costs more than the rest
//! of the replay.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A fast hasher for device addresses and small integers. Not safe against chosen keys.
#[derive(Clone, Copy, Default, Debug)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    // Enum variants are hashed as `isize`.
    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }

    fn write_u64(&mut self, value: u64) {
        // The golden ratio in 64 bits. The shift moves the well-mixed high half to the low bits, which the table uses.
        let mixed = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// Makes [`AddressHasher`]s.
pub type AddressBuildHasher = BuildHasherDefault<AddressHasher>;

/// A map from an address to `T`.
pub type AddressMap<T, K = u64> = HashMap<K, T, AddressBuildHasher>;
