//! Frames: a trace file is a sequence of these records with checksums.

use crate::error::{Error, Result};
use crate::version::Version;

/// The first bytes of a file, before the version.
pub const MAGIC: [u8; 8] = *b"MEMTRACE";
/// The size of the file header in bytes: magic, major, minor, four zero bytes.
pub(super) const FILE_HEADER: usize = 16;
/// The size of a [`FrameHeader`] in the file, in bytes.
pub(super) const FRAME_HEADER: usize = 24;
/// The first bytes of a frame, with which a reader finds the next frame after damage.
pub(super) const SYNC: [u8; 4] = *b"MTRF";
/// The largest payload of a frame in bytes, stored or raw.
pub(super) const MAX_PAYLOAD: u32 = 16 << 20;

/// The content of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// JSON about the process. The first frame.
    Info,
    /// Definitions, one after another.
    Definitions,
    /// A columnar block of events ([`super::block`]).
    Events,
    /// One clock point.
    Clock,
    /// Counter values.
    Counters,
    /// How the recording ended. The last frame.
    End,
    /// A kind of a newer minor version.
    Unknown(u8),
}

impl Kind {
    const fn to_wire(self) -> u8 {
        match self {
            Kind::Info => 0,
            Kind::Definitions => 1,
            Kind::Events => 2,
            Kind::Clock => 3,
            Kind::Counters => 4,
            Kind::End => 5,
            Kind::Unknown(k) => k,
        }
    }

    const fn from_wire(value: u8) -> Kind {
        match value {
            0 => Kind::Info,
            1 => Kind::Definitions,
            2 => Kind::Events,
            3 => Kind::Clock,
            4 => Kind::Counters,
            5 => Kind::End,
            k => Kind::Unknown(k),
        }
    }
}

/// The header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameHeader {
    pub(super) kind: Kind,
    /// Whether the payload is compressed with zstd. In an event frame this excludes the prefix of fixed size.
    pub(super) compressed: bool,
    pub(super) stored_len: u32,
    pub(super) raw_len: u32,
    pub(super) crc: u32,
}

impl FrameHeader {
    pub(super) fn to_bytes(self) -> [u8; FRAME_HEADER] {
        let mut b = [0; FRAME_HEADER];
        b[0..4].copy_from_slice(&SYNC);
        b[4] = self.kind.to_wire();
        b[5] = u8::from(self.compressed);
        b[8..12].copy_from_slice(&self.stored_len.to_le_bytes());
        b[12..16].copy_from_slice(&self.raw_len.to_le_bytes());
        b[16..20].copy_from_slice(&self.crc.to_le_bytes());
        let header_crc = crc32fast::hash(&b[..20]);
        b[20..24].copy_from_slice(&header_crc.to_le_bytes());
        b
    }

    /// Decodes a header. `None` if the bytes are no header or are damaged.
    pub(super) fn from_bytes(b: &[u8; FRAME_HEADER]) -> Option<FrameHeader> {
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let header = FrameHeader {
            kind: Kind::from_wire(b[4]),
            compressed: b[5] & 1 != 0,
            stored_len: word(8),
            raw_len: word(12),
            crc: word(16),
        };
        let is_valid = b[0..4] == SYNC
            && word(20) == crc32fast::hash(&b[..20])
            && header.stored_len <= MAX_PAYLOAD
            && header.raw_len <= MAX_PAYLOAD;
        is_valid.then_some(header)
    }
}

/// The first [`FILE_HEADER`] bytes of a file.
pub(super) fn file_header() -> [u8; FILE_HEADER] {
    let mut b = [0; FILE_HEADER];
    b[..8].copy_from_slice(&MAGIC);
    b[8..10].copy_from_slice(&Version::CURRENT.major.to_le_bytes());
    b[10..12].copy_from_slice(&Version::CURRENT.minor.to_le_bytes());
    b
}

/// The version of a file with this header. The error is [`Error::NotATrace`] or [`Error::TooNew`].
pub(super) fn check_file_header(b: &[u8]) -> Result<Version> {
    if b.len() < FILE_HEADER || b[..8] != MAGIC {
        return Err(Error::NotATrace { found: b.iter().take(8).copied().collect() });
    }
    let found = Version { major: u16::from_le_bytes([b[8], b[9]]), minor: u16::from_le_bytes([b[10], b[11]]) };
    if !Version::CURRENT.reads(found) {
        return Err(Error::TooNew { found, supported: Version::CURRENT });
    }
    Ok(found)
}
