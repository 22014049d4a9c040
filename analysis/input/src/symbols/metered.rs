//! Reads DWARF with a limited number of reads.
//!
//! DWARF refers to itself: many functions can share one long list of ranges, and many units one long line program. A
//! malicious file of one megabyte can take hours and all memory to read. Every read costs one unit. When the budget
//! is used up, every read fails, and that ends any loop around it.

use std::borrow::Cow;
use std::cell::Cell;

use addr2line::gimli::{EndianSlice, Error, Reader, ReaderOffsetId, Result, RunTimeEndian};

/// This many bytes of text cost as much as one read.
const TEXT_PER_READ: u64 = 16;

/// A section that is read with a budget shared by all sections of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Metered<'a> {
    section: EndianSlice<'a, RunTimeEndian>,
    read_budget: &'a Cell<u64>,
}

impl<'a> Metered<'a> {
    /// Reads `bytes` until `read_budget` is used up.
    pub(super) fn new(bytes: &'a [u8], endian: RunTimeEndian, read_budget: &'a Cell<u64>) -> Metered<'a> {
        Metered { section: EndianSlice::new(bytes, endian), read_budget }
    }

    #[inline]
    fn spend(&self, cost: u64) -> Result<()> {
        match self.read_budget.get().checked_sub(cost) {
            Some(rest) => {
                self.read_budget.set(rest);
                Ok(())
            }
            None => {
                self.read_budget.set(0);
                Err(Error::UnexpectedEof(self.section.offset_id()))
            }
        }
    }

    /// Text that is handed out whole is copied, so it costs by its length.
    fn spend_for_text(&self) -> Result<()> {
        self.spend(1 + self.section.len() as u64 / TEXT_PER_READ)
    }
}

impl Reader for Metered<'_> {
    type Endian = RunTimeEndian;
    type Offset = usize;

    #[inline]
    fn endian(&self) -> RunTimeEndian {
        self.section.endian()
    }

    #[inline]
    fn len(&self) -> usize {
        self.section.len()
    }

    #[inline]
    fn empty(&mut self) {
        self.section.empty();
    }

    #[inline]
    fn truncate(&mut self, len: usize) -> Result<()> {
        self.section.truncate(len)
    }

    #[inline]
    fn offset_from(&self, base: &Self) -> usize {
        self.section.offset_from(base.section)
    }

    #[inline]
    fn offset_id(&self) -> ReaderOffsetId {
        self.section.offset_id()
    }

    #[inline]
    fn lookup_offset_id(&self, id: ReaderOffsetId) -> Option<usize> {
        self.section.lookup_offset_id(id)
    }

    #[inline]
    fn find(&self, byte: u8) -> Result<usize> {
        self.spend(1)?;
        Reader::find(&self.section, byte)
    }

    #[inline]
    fn skip(&mut self, len: usize) -> Result<()> {
        self.spend(1)?;
        self.section.skip(len)
    }

    #[inline]
    fn split(&mut self, len: usize) -> Result<Self> {
        self.spend(1)?;
        Ok(Metered { section: self.section.split(len)?, read_budget: self.read_budget })
    }

    fn to_slice(&self) -> Result<Cow<'_, [u8]>> {
        self.spend_for_text()?;
        self.section.to_slice()
    }

    fn to_string(&self) -> Result<Cow<'_, str>> {
        self.spend_for_text()?;
        Reader::to_string(&self.section)
    }

    fn to_string_lossy(&self) -> Result<Cow<'_, str>> {
        self.spend_for_text()?;
        Reader::to_string_lossy(&self.section)
    }

    #[inline]
    fn read_slice(&mut self, buf: &mut [u8]) -> Result<()> {
        self.spend(1)?;
        Reader::read_slice(&mut self.section, buf)
    }
}
