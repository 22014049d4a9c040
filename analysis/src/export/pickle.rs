//! Writing pickles of protocol 4, with nothing but the opcodes that memory_viz's own reader knows.
//!
//! That reader counts MEMOIZE opcodes and nothing else, spreads each APPENDS batch into one call (so batches stay at
//! 1000, as Python's), and makes Numbers of integers: exact up to 2^53. Values go out as they
//! come; only memo numbers are kept.

use std::io::{self, Write};

/// Python's own batch size.
const BATCH: usize = 1000;
/// Bytes gathered before they are written.
const BUFFER: usize = 256 * 1024;

/// A value that was memoised and can be referred to again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Memo(u32);

/// See the module.
pub(super) struct Pickle<W: Write> {
    out: W,
    buffer: Vec<u8>,
    memos: u32,
    written: u64,
}

/// A list being written.
#[derive(Debug)]
pub(super) struct List {
    in_batch: usize,
}

impl<W: Write> Pickle<W> {
    /// Begins a pickle.
    pub(super) fn new(out: W) -> Pickle<W> {
        let mut buffer = Vec::with_capacity(BUFFER + 16 * 1024);
        buffer.extend_from_slice(&[0x80, 4]);
        Pickle { out, buffer, memos: 0, written: 0 }
    }

    /// Ends it; gives the number of bytes.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        self.buffer.push(b'.');
        self.flush()?;
        self.out.flush()?;
        Ok(self.written)
    }

    /// Hands what has gathered to the sink, when it is enough to be worth a call.
    #[inline]
    pub(super) fn drain(&mut self) -> io::Result<()> {
        if self.buffer.len() >= BUFFER { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.write_all(&self.buffer)?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Opens a dictionary: key and value alternate until [`Self::end_dict`].
    #[inline]
    pub(super) fn begin_dict(&mut self) {
        self.buffer.extend_from_slice(b"}(");
    }

    /// Opens a dictionary that will be referred to again.
    pub(super) fn begin_shared_dict(&mut self) -> Memo {
        self.buffer.push(b'}');
        let memo = self.memoize();
        self.buffer.push(b'(');
        memo
    }

    /// Closes a dictionary.
    #[inline]
    pub(super) fn end_dict(&mut self) {
        self.buffer.push(b'u');
    }

    /// Opens a list.
    pub(super) fn begin_list(&mut self) -> List {
        self.buffer.push(b']');
        List { in_batch: 0 }
    }

    /// Opens a list that will be referred to again.
    pub(super) fn begin_shared_list(&mut self) -> (List, Memo) {
        let list = self.begin_list();
        (list, self.memoize())
    }

    /// Goes before each item of a list.
    #[inline]
    pub(super) fn item(&mut self, list: &mut List) {
        if list.in_batch == BATCH {
            self.buffer.push(b'e');
            list.in_batch = 0;
        }
        if list.in_batch == 0 {
            self.buffer.push(b'(');
        }
        list.in_batch += 1;
    }

    /// Closes a list.
    pub(super) fn end_list(&mut self, list: List) {
        if list.in_batch > 0 {
            self.buffer.push(b'e');
        }
    }

    /// An integer; the viewer is exact up to 2^53.
    #[inline]
    pub(super) fn int(&mut self, value: i64) {
        match value {
            0..=0xff => self.buffer.extend_from_slice(&[b'K', value as u8]),
            0x100..=0xffff => {
                let b = (value as u16).to_le_bytes();
                self.buffer.extend_from_slice(&[b'M', b[0], b[1]]);
            }
            -0x8000_0000..=0x7fff_ffff => {
                let b = (value as i32).to_le_bytes();
                self.buffer.extend_from_slice(&[b'J', b[0], b[1], b[2], b[3]]);
            }
            _ => {
                // LONG1: as few bytes of two's complement as hold the value and its sign.
                let bits = 65 - if value < 0 { (!value).leading_zeros() } else { value.leading_zeros() };
                let len = (bits as usize).div_ceil(8);
                self.buffer.extend_from_slice(&[0x8a, len as u8]);
                self.buffer.extend_from_slice(&value.to_le_bytes()[..len]);
            }
        }
    }

    /// An unsigned integer. What does not fit 63 bits (no address or size does) is cut to the largest that does.
    #[inline]
    pub(super) fn uint(&mut self, value: u64) {
        self.int(i64::try_from(value).unwrap_or(i64::MAX));
    }

    /// A truth value.
    pub(super) fn bool(&mut self, value: bool) {
        self.buffer.push(if value { 0x88 } else { 0x89 });
    }

    /// A pair of integers, as a tuple.
    pub(super) fn pair(&mut self, first: u64, second: u64) {
        self.uint(first);
        self.uint(second);
        self.buffer.push(0x86);
    }

    /// A string that is not referred to again.
    pub(super) fn str(&mut self, text: &str) {
        if let Ok(len) = u8::try_from(text.len()) {
            self.buffer.extend_from_slice(&[0x8c, len]);
        } else {
            self.buffer.push(b'X');
            self.buffer.extend_from_slice(&(text.len() as u32).to_le_bytes());
        }
        self.buffer.extend_from_slice(text.as_bytes());
    }

    /// A string that will be referred to again.
    pub(super) fn shared_str(&mut self, text: &str) -> Memo {
        self.str(text);
        self.memoize()
    }

    /// Something memoised before.
    #[inline]
    pub(super) fn get(&mut self, memo: Memo) {
        if let Ok(short) = u8::try_from(memo.0) {
            self.buffer.extend_from_slice(&[b'h', short]);
        } else {
            let b = memo.0.to_le_bytes();
            self.buffer.extend_from_slice(&[b'j', b[0], b[1], b[2], b[3]]);
        }
    }

    fn memoize(&mut self) -> Memo {
        self.buffer.push(0x94);
        self.memos += 1;
        Memo(self.memos - 1)
    }
}

/// Words that occur in every event: written out once, then referred to.
#[derive(Debug)]
pub(super) struct Words {
    memos: Vec<Option<Memo>>,
}

macro_rules! words {
    ($($name:ident $text:literal),* $(,)?) => {
        /// A word of the snapshot format.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Word { $($name,)* }

        impl Word {
            const TEXTS: &'static [&'static str] = &[$($text),*];

            /// The word that is written so.
            pub(super) fn of(text: &str) -> Option<Word> {
                match text { $($text => Some(Word::$name),)* _ => None }
            }
        }
    };
}

words! {
    Action "action", Addr "addr", DeviceFree "device_free", Size "size", Stream "stream", TimeUs "time_us",
    CompileContext "compile_context", UserMetadata "user_metadata", Frames "frames",
    ForwardFrames "forward_frames", Category "category", Empty "", NotAvailable "N/A",
    Alloc "alloc", FreeRequested "free_requested", FreeCompleted "free_completed", SegmentAlloc "segment_alloc",
    SegmentFree "segment_free", SegmentMap "segment_map", SegmentUnmap "segment_unmap", Oom "oom",
    Snapshot "snapshot",
    Load "load", Data "data", Forward "forward", Backward "backward", Recompute "recompute", Optimizer "optimizer",
    Eval "eval", Unknown "unknown",
    Name "name", Filename "filename", Line "line",
    Device "device", Address "address", TotalSize "total_size", AllocatedSize "allocated_size",
    ActiveSize "active_size", RequestedSize "requested_size", SegmentType "segment_type",
    SegmentPoolId "segment_pool_id", IsExpandable "is_expandable", Blocks "blocks", State "state",
    Large "large", Small "small", ActiveAllocated "active_allocated", ActivePendingFree "active_pending_free",
    Inactive "inactive",
}

impl Words {
    pub(super) fn new() -> Words {
        Words { memos: vec![None; Word::TEXTS.len()] }
    }

    /// Writes a word.
    #[inline]
    pub(super) fn put<W: Write>(&mut self, out: &mut Pickle<W>, word: Word) {
        match self.memos[word as usize] {
            Some(memo) => out.get(memo),
            None => self.memos[word as usize] = Some(out.shared_str(Word::TEXTS[word as usize])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int(value: i64) -> Vec<u8> {
        let mut pickle = Pickle::new(Vec::new());
        pickle.int(value);
        pickle.buffer[2..].to_vec()
    }

    #[test]
    fn integers_take_the_shortest_opcode() {
        assert_eq!(int(0), [b'K', 0]);
        assert_eq!(int(255), [b'K', 255]);
        assert_eq!(int(256), [b'M', 0, 1]);
        assert_eq!(int(65536), [b'J', 0, 0, 1, 0]);
        assert_eq!(int(-1), [b'J', 255, 255, 255, 255]);
        assert_eq!(int(0x7fff_ffff), [b'J', 255, 255, 255, 127]);
        assert_eq!(int(0x8000_0000), [0x8a, 5, 0, 0, 0, 0x80, 0]);
        assert_eq!(int(0x7f00_0000_0000), [0x8a, 6, 0, 0, 0, 0, 0, 0x7f]);
        assert_eq!(int(i64::MAX).len(), 10);
        assert_eq!(int(i64::MIN)[..2], [0x8a, 8]);
    }

    #[test]
    fn lists_are_appended_in_batches() {
        let mut pickle = Pickle::new(Vec::new());
        let mut list = pickle.begin_list();
        for i in 0..1001 {
            pickle.item(&mut list);
            pickle.int(i % 100);
        }
        pickle.end_list(list);
        let marks = pickle.buffer.iter().filter(|b| **b == b'(').count();
        assert_eq!(marks, 12, "two batches, and ten times the number 40");
        assert_eq!(*pickle.buffer.last().unwrap(), b'e');
    }
}
