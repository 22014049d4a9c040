//! Encodes numbers and strings as bytes: LEB128 varints, zigzag for signed differences, length-prefixed UTF-8.

use crate::error::{Error, Result};

/// Appends `value` as an LEB128 varint (1 to 10 bytes).
#[inline]
pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Maps a signed difference to an unsigned number. Small absolute values give small numbers.
#[inline]
pub const fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// The inverse of [`zigzag`].
#[inline]
pub const fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

/// Appends a string: its length in bytes as a varint, then the bytes.
pub fn put_str(out: &mut Vec<u8>, text: &str) {
    put_varint(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

/// A cursor over untrusted bytes. Every read is checked and returns [`Error::Malformed`] for invalid bytes.
#[derive(Clone, Debug)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    /// Reads from the start of `bytes`.
    pub const fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { rest: bytes }
    }

    /// The bytes that have not been read.
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Whether all bytes have been read.
    pub const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Reads one byte.
    #[inline]
    pub fn byte(&mut self) -> Result<u8> {
        let (first, rest) = self.rest.split_first().ok_or(Error::Malformed { what: "record: it ends early" })?;
        self.rest = rest;
        Ok(*first)
    }

    /// Reads an LEB128 varint of at most 64 bits.
    #[inline]
    pub fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        let mut shift = 0;
        loop {
            let byte = self.byte()?;
            if shift == 63 && byte > 1 || shift > 63 {
                return Err(Error::Malformed { what: "varint: more than 64 bits" });
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
            shift += 7;
        }
    }

    /// Reads a varint that must fit into 32 bits.
    #[inline]
    pub fn varint32(&mut self) -> Result<u32> {
        u32::try_from(self.varint()?).map_err(|_| Error::Malformed { what: "number: more than 32 bits" })
    }

    /// Reads the next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (bytes, rest) =
            self.rest.split_at_checked(len).ok_or(Error::Malformed { what: "record: it ends early" })?;
        self.rest = rest;
        Ok(bytes)
    }

    /// Reads a length-prefixed string.
    pub fn str(&mut self) -> Result<&'a str> {
        let len = usize::try_from(self.varint()?).map_err(|_| Error::Malformed { what: "string length" })?;
        std::str::from_utf8(self.bytes(len)?).map_err(|_| Error::Malformed { what: "string: not UTF-8" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn varints_round_trip(value: u64) {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut cursor = Cursor::new(&bytes);
            prop_assert_eq!(cursor.varint().unwrap(), value);
            prop_assert!(cursor.is_empty());
        }

        #[test]
        fn zigzag_round_trips(value: i64) {
            prop_assert_eq!(unzigzag(zigzag(value)), value);
        }

        #[test]
        fn arbitrary_bytes_are_decoded_or_rejected(bytes: Vec<u8>) {
            let mut cursor = Cursor::new(&bytes);
            while cursor.varint().is_ok() {}
            let _ = cursor.str();
        }
    }
}
