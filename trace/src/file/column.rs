//! Reads one column of a block.
//!
//! It decodes the same varints as [`crate::wire::Cursor`], without a branch for each byte and without an error value
//! for each number. Most numbers in a block take one byte, most others two or three.

use crate::error::{Error, Result};
use crate::wire::Cursor;

/// The reason why a block is invalid. It is small enough for registers.
pub(super) type Invalid = &'static str;

const ENDS_EARLY: Invalid = "record: it ends early";
const TOO_LONG: Invalid = "varint: more than 64 bits";

/// The public error for this reason.
#[cold]
pub(super) fn malformed(what: Invalid) -> Error {
    Error::Malformed { what }
}

/// A column and the current position in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Column<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Column<'a> {
        Column { bytes, at: 0 }
    }

    /// Reads the next number.
    #[inline(always)]
    pub(super) fn varint(&mut self) -> Result<u64, Invalid> {
        match self.bytes.get(self.at) {
            Some(&byte) if byte < 0x80 => {
                self.at += 1;
                Ok(byte.into())
            }
            _ => self.long_varint(),
        }
    }

    /// Reads a number of two to eight bytes from one word. Longer numbers, and those at the end of a column, are read
    /// byte by byte.
    #[inline]
    fn long_varint(&mut self) -> Result<u64, Invalid> {
        if let Some(word) = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk()) {
            let word = u64::from_le_bytes(*word);
            let ends = !word & 0x8080_8080_8080_8080;
            if ends != 0 {
                self.at += ends.trailing_zeros() as usize / 8 + 1;
                // Keeps the bits up to the last byte and clears the top bit of each byte. Then adjacent groups are
                // joined: 7, 14, 28 bits.
                let w = word & (ends ^ (ends - 1)) & 0x7f7f_7f7f_7f7f_7f7f;
                let w = (w & 0x007f_007f_007f_007f) | (w & 0x7f00_7f00_7f00_7f00) >> 1;
                let w = (w & 0x0000_3fff_0000_3fff) | (w & 0x3fff_0000_3fff_0000) >> 2;
                return Ok((w & 0x0fff_ffff) | (w & 0x0fff_ffff_0000_0000) >> 4);
            }
        }
        self.slow_varint()
    }

    #[cold]
    fn slow_varint(&mut self) -> Result<u64, Invalid> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let mut cursor = Cursor::new(rest);
        let value = cursor.varint().map_err(|_| if rest.len() < 10 { ENDS_EARLY } else { TOO_LONG })?;
        self.at += rest.len() - cursor.rest().len();
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::put_varint;
    use proptest::prelude::*;

    /// Reads all bytes with both readers. They must agree on every number and on the first error.
    fn both_read(bytes: &[u8]) {
        let (mut column, mut cursor) = (Column::new(bytes), Cursor::new(bytes));
        loop {
            let (ours, theirs) = (column.varint().ok(), cursor.varint().ok());
            assert_eq!(ours, theirs, "{bytes:02x?} at {}", column.at);
            if ours.is_none() {
                return;
            }
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_read_as_the_cursor_reads_them(bytes: Vec<u8>) {
            both_read(&bytes);
        }

        #[test]
        fn numbers_of_every_length_are_read(values in prop::collection::vec((any::<u64>(), 0u32..64), 1..40)) {
            let mut bytes = Vec::new();
            for (value, shift) in &values {
                put_varint(&mut bytes, value >> shift);
            }
            let mut column = Column::new(&bytes);
            for (value, shift) in &values {
                prop_assert_eq!(column.varint(), Ok(value >> shift));
            }
            prop_assert!(column.varint().is_err());
        }
    }

    #[test]
    fn long_varints_and_overlong_ones_are_read() {
        both_read(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 5]);
        both_read(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02, 5]);
        both_read(&[0x80, 0x80, 0x80, 0x00, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00, 7, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
