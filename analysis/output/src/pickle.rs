//! Writes pickles of protocol 4 with only the opcodes that memory_viz's own reader supports.
//!
//! That reader counts MEMOIZE opcodes only. It passes each APPENDS batch to one call, so batches have at most 1000
//! items, as Python's have. It converts integers to JavaScript numbers, which are exact up to 2^53. Values are written
//! as they come; only memo numbers are kept.

use std::io::{self, Write};

/// Python's own batch size, in items.
const BATCH_SIZE: usize = 1000;
/// The number of bytes buffered before a write.
const BUFFER_SIZE: usize = 256 * 1024;

/// A memoized value that can be referred to again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Memo(u32);

/// A few bytes that are written repeatedly. The whole array is copied, which is faster than copying a variable length.
#[derive(Clone, Copy, Debug)]
pub(super) struct EncodedBytes {
    bytes: [u8; EncodedBytes::CAPACITY],
    len: usize,
}

impl EncodedBytes {
    const CAPACITY: usize = 32;

    /// The bytes that `write` writes; `None` if they are too long.
    pub(super) fn of(write: impl FnOnce(&mut PickleWriter<io::Sink>)) -> Option<EncodedBytes> {
        let mut scratch = PickleWriter::new(io::sink());
        scratch.len = 0;
        write(&mut scratch);
        let bytes = *scratch.buffer.first_chunk()?;
        (scratch.len <= EncodedBytes::CAPACITY).then_some(EncodedBytes { bytes, len: scratch.len })
    }
}

/// The writer of a pickle.
pub(super) struct PickleWriter<W: Write> {
    out: W,
    /// Valid up to `len`; the rest is spare capacity.
    buffer: Vec<u8>,
    len: usize,
    memo_count: u32,
    written: u64,
}

/// A list that is being written.
#[derive(Debug)]
pub(super) struct List {
    in_batch: usize,
}

impl<W: Write> PickleWriter<W> {
    /// Begins a pickle.
    pub(super) fn new(out: W) -> PickleWriter<W> {
        let mut pickle = PickleWriter { out, buffer: Vec::new(), len: 0, memo_count: 0, written: 0 };
        pickle.put(&[0x80, 4]);
        pickle
    }

    /// Ends the pickle and returns its size in bytes.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        self.put(b".");
        self.flush()?;
        self.out.flush()?;
        Ok(self.written)
    }

    /// Writes the buffer to the output if it is large enough.
    #[inline]
    pub(super) fn drain(&mut self) -> io::Result<()> {
        if self.len >= BUFFER_SIZE { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        let bytes = self.buffer.get(..self.len).unwrap_or_default();
        self.out.write_all(bytes)?;
        self.written += self.len as u64;
        self.len = 0;
        Ok(())
    }

    /// Appends `bytes`, of which only the first `len` count. The next write overwrites the others.
    #[inline(always)]
    fn put_prefix<const N: usize>(&mut self, bytes: &[u8; N], len: usize) {
        if self.buffer.len() < self.len + N {
            self.grow(N);
        }
        self.buffer[self.len..self.len + N].copy_from_slice(bytes);
        self.len += len;
    }

    #[inline(always)]
    fn put<const N: usize>(&mut self, bytes: &[u8; N]) {
        self.put_prefix(bytes, N);
    }

    fn put_slice(&mut self, bytes: &[u8]) {
        if self.buffer.len() < self.len + bytes.len() {
            self.grow(bytes.len());
        }
        self.buffer[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    #[cold]
    fn grow(&mut self, more: usize) {
        let new_len = (self.len + more).max(2 * self.buffer.len()).max(256);
        self.buffer.resize(new_len, 0);
    }

    /// Writes bytes that were encoded before.
    #[inline(always)]
    pub(super) fn put_encoded(&mut self, encoded: &EncodedBytes) {
        self.put_prefix(&encoded.bytes, encoded.len);
    }

    /// Opens a dictionary: keys and values alternate until [`Self::end_dict`].
    #[inline]
    pub(super) fn begin_dict(&mut self) {
        self.put(b"}(");
    }

    /// Opens a dictionary that will be referred to again.
    pub(super) fn begin_shared_dict(&mut self) -> Memo {
        self.put(b"}");
        let memo = self.memoize();
        self.put(b"(");
        memo
    }

    /// Closes a dictionary.
    #[inline]
    pub(super) fn end_dict(&mut self) {
        self.put(b"u");
    }

    /// Opens a list.
    pub(super) fn begin_list(&mut self) -> List {
        self.put(b"]");
        List { in_batch: 0 }
    }

    /// Opens a list that will be referred to again.
    pub(super) fn begin_shared_list(&mut self) -> (List, Memo) {
        let list = self.begin_list();
        (list, self.memoize())
    }

    /// Must be called before each item of a list.
    #[inline]
    pub(super) fn begin_item(&mut self, list: &mut List) {
        if list.in_batch == BATCH_SIZE {
            self.put(b"e");
            list.in_batch = 0;
        }
        if list.in_batch == 0 {
            self.put(b"(");
        }
        list.in_batch += 1;
    }

    /// Closes a list.
    pub(super) fn end_list(&mut self, list: List) {
        if list.in_batch > 0 {
            self.put(b"e");
        }
    }

    /// Writes an integer. The viewer is exact up to 2^53.
    #[inline]
    pub(super) fn int(&mut self, value: i64) {
        let b = value.to_le_bytes();
        match value {
            0..=0xff => self.put(&[b'K', b[0]]),
            0x100..=0xffff => self.put(&[b'M', b[0], b[1]]),
            -0x8000_0000..=0x7fff_ffff => self.put(&[b'J', b[0], b[1], b[2], b[3]]),
            _ => {
                // LONG1: the minimum number of two's complement bytes that hold the value and its sign.
                let bits = 65 - if value < 0 { (!value).leading_zeros() } else { value.leading_zeros() };
                let len = bits.div_ceil(8) as u8;
                self.put_prefix(&[0x8a, len, b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]], 2 + usize::from(len));
            }
        }
    }

    /// Writes an unsigned integer. A value above 63 bits becomes the largest one of 63 bits; no address or size is that
    /// large.
    #[inline]
    pub(super) fn uint(&mut self, value: u64) {
        self.int(i64::try_from(value).unwrap_or(i64::MAX));
    }

    /// Writes a boolean.
    pub(super) fn bool(&mut self, value: bool) {
        self.put(&[if value { 0x88 } else { 0x89 }]);
    }

    /// Writes a pair of integers as a tuple.
    pub(super) fn pair(&mut self, first: u64, second: u64) {
        self.uint(first);
        self.uint(second);
        self.put(&[0x86]);
    }

    /// Writes a string that is not referred to again.
    pub(super) fn str(&mut self, text: &str) {
        if let Ok(len) = u8::try_from(text.len()) {
            self.put(&[0x8c, len]);
        } else {
            self.put(b"X");
            self.put(&(text.len() as u32).to_le_bytes());
        }
        self.put_slice(text.as_bytes());
    }

    /// Writes a string that will be referred to again.
    pub(super) fn shared_str(&mut self, text: &str) -> Memo {
        self.str(text);
        self.memoize()
    }

    /// Writes a reference to a memoized value.
    #[inline]
    pub(super) fn get(&mut self, memo: Memo) {
        let b = memo.0.to_le_bytes();
        if memo.0 <= 0xff { self.put(&[b'h', b[0]]) } else { self.put(&[b'j', b[0], b[1], b[2], b[3]]) }
    }

    fn memoize(&mut self) -> Memo {
        self.put(&[0x94]);
        self.memo_count += 1;
        Memo(self.memo_count - 1)
    }
}

/// Words that occur in every event: written once, then referred to.
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

            /// Every word, in order.
            pub(super) fn all() -> impl Iterator<Item = Word> {
                [$(Word::$name),*].into_iter()
            }

            /// The word with this text; `None` if there is none.
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
    Eval "eval", Generate "generate", Rollout "rollout", Unknown "unknown",
    Name "name", Filename "filename", Line "line",
    Device "device", Address "address", TotalSize "total_size", AllocatedSize "allocated_size",
    ActiveSize "active_size", RequestedSize "requested_size", SegmentType "segment_type",
    SegmentPoolId "segment_pool_id", PoolId "pool_id", IsExpandable "is_expandable", Blocks "blocks", State "state",
    Large "large", Small "small", ActiveAllocated "active_allocated", ActivePendingFree "active_pending_free",
    Inactive "inactive",
}

impl Words {
    pub(super) fn new() -> Words {
        Words { memos: vec![None; Word::TEXTS.len()] }
    }

    /// Writes a word.
    #[inline]
    pub(super) fn put<W: Write>(&mut self, out: &mut PickleWriter<W>, word: Word) {
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
        let mut pickle = PickleWriter::new(Vec::new());
        pickle.int(value);
        pickle.buffer[2..pickle.len].to_vec()
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
        let mut pickle = PickleWriter::new(Vec::new());
        let mut list = pickle.begin_list();
        for i in 0..1001 {
            pickle.begin_item(&mut list);
            pickle.int(i % 100);
        }
        pickle.end_list(list);
        let marks = pickle.buffer[..pickle.len].iter().filter(|b| **b == b'(').count();
        assert_eq!(marks, 12, "two batches, and ten times the number 40");
        assert_eq!(pickle.buffer[pickle.len - 1], b'e');
    }
}
