//! The binary format of the page's data: records of columns, compressed.
//!
//! A record is a tag (one byte), the length of the rest, and the rest. All numbers are LEB128. Signed numbers are
//! zigzag-encoded. `web/src/data/decode.ts` reads this format. Page and reader are written together, so there is no
//! version.

use std::io::{self, Write};

use flate2::Compression;
use flate2::write::ZlibEncoder;
use memtrace_trace::clock::Calibration;

/// Fast, and a tenth larger than the default level.
const LEVEL: u32 = 4;

/// The number of rows of a record.
pub(super) const ROWS: u64 = 1 << 14;

/// The content of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Tag {
    /// Every allocation and free of a device.
    Events = b'E',
    /// Blocks that were freed, in the order of their frees.
    Freed = b'B',
    /// Blocks that were allocated at the end.
    Live = b'L',
    /// The points at which the totals are known, if not after every event.
    Points = b'P',
    /// Segments that a device's allocator gained and lost.
    Segments = b'S',
    /// Reserved bytes of a device after each change.
    Reserved = b'R',
    /// Bytes of a device that the process allocated from CUDA, after each change.
    Physical = b'U',
    /// Where phases and steps begin.
    Phases = b'H',
    /// The ranges that the program names.
    Ranges = b'A',
    /// Of several processes: whose allocation or free comes next.
    Order = b'O',
    /// The allocated bytes of several processes at the same points.
    Sums = b'T',
    /// Everything else, as JSON. The last record.
    Json = b'J',
}

/// Numbers of one kind.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Column(Vec<u8>);

impl Column {
    #[inline]
    pub(super) fn put(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    #[inline]
    pub(super) fn put_signed(&mut self, value: i64) {
        self.put(zigzag(value));
    }
}

pub(super) const fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// Writes compressed records. After an error it writes nothing more; [`Self::finish`] returns the error.
#[derive(Debug)]
pub(super) struct Records<W: Write> {
    out: ZlibEncoder<W>,
    error: Option<io::Error>,
}

impl<W: Write> Records<W> {
    pub(super) fn new(out: W) -> Records<W> {
        Records { out: ZlibEncoder::new(out, Compression::new(LEVEL)), error: None }
    }

    /// Writes a record: `header`, then `columns`, which become empty.
    pub(super) fn columns(&mut self, tag: Tag, header: &[u64], columns: &mut [&mut Column]) {
        let mut rest = Column::default();
        header.iter().for_each(|number| rest.put(*number));
        for column in columns {
            rest.0.append(&mut column.0);
        }
        self.bytes(tag, &rest.0);
    }

    /// Writes a record of bytes.
    pub(super) fn bytes(&mut self, tag: Tag, bytes: &[u8]) {
        let mut head = Column(vec![tag as u8]);
        head.put(bytes.len() as u64);
        if self.error.is_none() {
            self.error = self.out.write_all(&head.0).and_then(|()| self.out.write_all(bytes)).err();
        }
    }

    /// Ends the compressed data.
    pub(super) fn finish(self) -> io::Result<W> {
        match self.error {
            Some(error) => Err(error),
            None => self.out.finish(),
        }
    }
}

/// Times of a page, in microseconds since its first event.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    pub(super) calibration: Calibration,
    pub(super) begin_ns: u64,
}

impl Clock {
    pub(super) fn us(&self, ticks: u64) -> u64 {
        self.calibration.epoch_ns(ticks).saturating_sub(self.begin_ns) / 1000
    }
}

/// A sequence that never decreases, as differences.
#[derive(Debug, Default)]
pub(super) struct Rising {
    pub(super) last: u64,
    pub(super) column: Column,
}

impl Rising {
    #[inline]
    pub(super) fn next(&mut self, value: u64) -> u64 {
        let delta = value.saturating_sub(self.last);
        self.last = self.last.max(value);
        delta
    }

    #[inline]
    pub(super) fn put(&mut self, value: u64) {
        let delta = self.next(value);
        self.column.put(delta);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_leb128() {
        let mut column = Column::default();
        [0, 127, 128, u64::MAX].into_iter().for_each(|number| column.put(number));
        assert_eq!(column.0[..4], [0, 0x7f, 0x80, 1]);
        assert_eq!(column.0.len(), 4 + 10);
        assert_eq!([0, -1, 1, i64::MIN].map(zigzag), [0, 1, 2, u64::MAX]);
    }

    #[test]
    fn an_error_of_the_output_is_returned() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut records = Records::new(Full);
        records.bytes(Tag::Json, &vec![7; 1 << 20]);
        assert_eq!(records.finish().map(drop).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
