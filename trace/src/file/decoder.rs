//! Decodes blocks into events: checksum, zstd, columns. The buffers and the decompressor are reused, so that a pass
//! over a long trace allocates nothing.

use super::block::{self, PREFIX, Prefix};
use super::event_counts::EventCounts;
use super::reader::{BlockInfo, Reader};
use crate::error::{Error, Result};
use crate::event::Event;

/// A block that could not be decoded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LostBlock {
    /// The offset of the frame in the file, in bytes.
    pub offset: u64,
    /// How many events are lost with it.
    pub events: u32,
    /// The reason.
    pub why: String,
}

impl Reader {
    /// All events, block by block, in order of `seq` except for those that [`End::late`](super::End::late) counts.
    pub fn events(&self) -> Events<'_> {
        Events { decoder: self.decoder(), blocks: self.blocks().iter() }
    }

    /// A decoder for several blocks. Each thread needs its own.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder::new(self)
    }

    /// Decodes one block into `out`. For many blocks, [`Self::decoder`] is cheaper.
    pub fn decode(&self, info: &BlockInfo, out: &mut Vec<Event>) -> Result<(), LostBlock> {
        self.decoder().decode(info, out)
    }
}

/// Decodes the blocks of one trace ([`Reader::decoder`]).
pub struct Decoder<'a> {
    reader: &'a Reader,
    zstd: Option<zstd::bulk::Decompressor<'static>>,
    payload: Vec<u8>,
    raw: Vec<u8>,
}

impl std::fmt::Debug for Decoder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("path", &self.reader.path()).finish_non_exhaustive()
    }
}

impl<'a> Decoder<'a> {
    fn new(reader: &'a Reader) -> Decoder<'a> {
        // This fails only without memory. Each block then returns an error.
        let zstd = zstd::bulk::Decompressor::new().ok();
        Decoder { reader, zstd, payload: Vec::new(), raw: Vec::new() }
    }

    /// Decodes one block into `out`, which is cleared first.
    pub fn decode(&mut self, info: &BlockInfo, out: &mut Vec<Event>) -> Result<(), LostBlock> {
        out.clear();
        let decoded = self.unpack(info).and_then(|prefix| block::decode(&prefix, &self.raw, out));
        decoded.map_err(|e| lost(info, &e))
    }

    /// Adds one block's events to `out`, by kind.
    pub fn count_events(&mut self, info: &BlockInfo, out: &mut EventCounts) -> Result<(), LostBlock> {
        let counted = self.unpack(info).and_then(|prefix| block::count_events(&prefix, &self.raw, out));
        counted.map_err(|e| lost(info, &e))
    }

    /// Reads, verifies and decompresses a block into `raw`.
    fn unpack(&mut self, info: &BlockInfo) -> Result<Prefix> {
        self.reader.read_payload(info.offset, &info.header, &mut self.payload)?;
        let prefix = Prefix::from_bytes(&self.payload).ok_or(Error::Malformed { what: "block: it has no prefix" })?;
        let stored = self.payload.get(PREFIX..).unwrap_or_default();
        let len = info.header.raw_len as usize;
        let zstd = self.zstd.as_mut().ok_or(Error::Malformed { what: "block: no memory to decompress it" })?;
        self.raw.clear();
        self.raw.reserve(len);
        let decompressed = zstd.decompress_to_buffer(stored, &mut self.raw);
        // The buffer's capacity may exceed the length that the frame states.
        if !decompressed.is_ok_and(|got| got <= len) {
            return Err(Error::Malformed { what: "compressed frame" });
        }
        Ok(prefix)
    }
}

fn lost(info: &BlockInfo, why: &Error) -> LostBlock {
    LostBlock { offset: info.offset, events: info.events, why: why.to_string() }
}

/// All events, block by block. A block that cannot be decoded is an `Err` with the loss, and the iteration continues
/// after it.
#[derive(Debug)]
pub struct Events<'a> {
    decoder: Decoder<'a>,
    blocks: std::slice::Iter<'a, BlockInfo>,
}

impl Iterator for Events<'_> {
    type Item = Result<Vec<Event>, LostBlock>;

    fn next(&mut self) -> Option<Self::Item> {
        let info = self.blocks.next()?;
        let mut events = Vec::new();
        Some(self.decoder.decode(info, &mut events).map(|()| events))
    }
}
