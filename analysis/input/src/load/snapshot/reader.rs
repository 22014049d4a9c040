//! The bytes of a snapshot file, read in chunks and decompressed if the file is gzipped.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use memtrace_trace::file::Budget;

use super::read_error::ReadError;

/// The size of one read, in bytes.
const CHUNK_SIZE: usize = 256 * 1024;
/// The longest text that is kept, in bytes. Longer texts are cut and counted.
pub(super) const MAX_TEXT: usize = 64 * 1024;

/// Counts the bytes read from the file itself.
struct CountingReader {
    file: File,
    file_bytes: Rc<Cell<u64>>,
}

impl Read for CountingReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        self.file_bytes.set(self.file_bytes.get() + n as u64);
        Ok(n)
    }
}

/// A buffered reader of a snapshot file.
pub(super) struct ByteReader<'a> {
    source: Box<dyn Read>,
    /// Whether the file is gzipped.
    pub(super) is_gzipped: bool,
    bytes: Vec<u8>,
    at: usize,
    /// The number of decompressed bytes before `bytes`.
    consumed_before: u64,
    is_at_end: bool,
    /// The error that ended reading. Bytes read before it are still delivered.
    error: Option<io::Error>,
    file_bytes: Rc<Cell<u64>>,
    progress: &'a mut dyn FnMut(u64),
    /// Charged with a step for each decompressed byte.
    budget: &'a Budget,
    /// The number of texts that were cut.
    pub(super) cut_texts: u64,
    /// How often the buffer was refilled.
    pub(super) refills: u32,
}

impl<'a> ByteReader<'a> {
    /// Reads from an open file, positioned at its beginning. `progress` receives the number of file bytes read so far.
    pub(super) fn new(file: File, budget: &'a Budget, progress: &'a mut dyn FnMut(u64)) -> io::Result<ByteReader<'a>> {
        let file_bytes = Rc::new(Cell::new(0));
        let mut head = [0; 2];
        let mut file = file;
        let (head_len, error) = read_up_to(&mut file, &mut head);
        if let Some(cause) = error {
            return Err(cause);
        }
        let start = io::Cursor::new(head).take(head_len as u64);
        file_bytes.set(head_len as u64);
        let whole = start.chain(CountingReader { file, file_bytes: file_bytes.clone() });
        let is_gzipped = head == [0x1f, 0x8b];
        let source: Box<dyn Read> = if is_gzipped {
            Box::new(MultiGzDecoder::new(io::BufReader::with_capacity(64 * 1024, whole)))
        } else {
            Box::new(whole)
        };
        Ok(ByteReader {
            source,
            is_gzipped,
            bytes: Vec::new(),
            at: 0,
            consumed_before: 0,
            is_at_end: false,
            error: None,
            file_bytes,
            progress,
            budget,
            cut_texts: 0,
            refills: 0,
        })
    }

    /// The number of decompressed bytes consumed so far.
    pub(super) fn position(&self) -> u64 {
        self.consumed_before + self.at as u64
    }

    /// The number of file bytes read so far.
    pub(super) fn file_position(&self) -> u64 {
        self.file_bytes.get()
    }

    /// The buffered bytes.
    #[inline(always)]
    pub(super) fn buffer(&self) -> &[u8] {
        &self.bytes[self.at..]
    }

    /// Whether the file has ended, so that [`Self::buffer`] has the rest.
    pub(super) fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    /// Consumes `n` of the buffered bytes. The caller ensures that there are enough.
    #[inline(always)]
    pub(super) fn consume(&mut self, n: usize) {
        self.at += n;
        debug_assert!(self.at <= self.bytes.len());
    }

    /// Reads more bytes behind the buffered ones. Fails if none are buffered, or if the file needs too much work.
    #[cold]
    pub(super) fn refill(&mut self) -> Result<(), ReadError> {
        if self.error.is_some() && self.buffer().is_empty() {
            return Err(self.premature_end());
        }
        if self.is_at_end || self.error.is_some() {
            return Ok(());
        }
        self.refills = self.refills.wrapping_add(1);
        self.bytes.drain(..self.at);
        self.consumed_before += self.at as u64;
        self.at = 0;
        let kept = self.bytes.len();
        self.bytes.resize(kept + CHUNK_SIZE, 0);
        let (n, error) = read_up_to(&mut self.source, &mut self.bytes[kept..]);
        self.bytes.truncate(kept + n);
        self.budget.work(n as u64)?;
        self.is_at_end = n < CHUNK_SIZE && error.is_none();
        self.error = error;
        (self.progress)(self.file_bytes.get());
        if self.error.is_some() && self.bytes.is_empty() { Err(self.premature_end()) } else { Ok(()) }
    }

    /// The reason why the file ends here.
    #[cold]
    fn premature_end(&self) -> ReadError {
        let Some(cause) = &self.error else { return ReadError::EndOfFile };
        match cause.kind() {
            io::ErrorKind::UnexpectedEof if self.is_gzipped => ReadError::EndOfFile,
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData if self.is_gzipped => ReadError::DamagedGzip,
            kind => ReadError::Io(io::Error::new(kind, cause.to_string())),
        }
    }

    /// Consumes the next `N` bytes.
    #[inline(always)]
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        if self.bytes.len() - self.at < N {
            self.refill()?;
        }
        let Some(bytes) = self.bytes[self.at..].first_chunk::<N>() else { return Err(self.premature_end()) };
        let bytes = *bytes;
        self.at += N;
        Ok(bytes)
    }

    /// Consumes a text of `len` bytes and passes it to `then`, cut to [`MAX_TEXT`].
    #[inline(always)]
    pub(super) fn take_text<T>(&mut self, len: u64, then: impl FnOnce(&[u8]) -> T) -> Result<T, ReadError> {
        let n = len as usize;
        if len <= (self.bytes.len() - self.at) as u64 && n <= MAX_TEXT {
            self.at += n;
            return Ok(then(&self.bytes[self.at - n..self.at]));
        }
        self.long_text(len, then)
    }

    #[cold]
    fn long_text<T>(&mut self, len: u64, then: impl FnOnce(&[u8]) -> T) -> Result<T, ReadError> {
        let mut kept = Vec::new();
        self.for_each_chunk(len, |chunk| {
            let room = MAX_TEXT.saturating_sub(kept.len());
            kept.extend_from_slice(&chunk[..chunk.len().min(room)]);
        })?;
        self.cut_texts += u64::from(len > MAX_TEXT as u64);
        Ok(then(&kept))
    }

    /// Consumes everything, and returns how many bytes are not white space. A gzip file reveals only at its end whether
    /// it is complete.
    pub(super) fn skip_to_end(&mut self) -> Result<u64, ReadError> {
        let mut others = 0;
        loop {
            others += self.buffer().iter().filter(|byte| !byte.is_ascii_whitespace()).count() as u64;
            self.at = self.bytes.len();
            if self.is_at_end {
                return Ok(others);
            }
            self.refill()?;
        }
    }

    /// Consumes `len` bytes.
    pub(super) fn skip(&mut self, len: u64) -> Result<(), ReadError> {
        self.for_each_chunk(len, |_| {})
    }

    /// Consumes `len` bytes and passes them to `each` in chunks.
    fn for_each_chunk(&mut self, len: u64, mut each: impl FnMut(&[u8])) -> Result<(), ReadError> {
        let mut left = len;
        while left > 0 {
            if self.buffer().is_empty() {
                self.refill()?;
            }
            let n = (self.buffer().len() as u64).min(left) as usize;
            if n == 0 {
                return Err(self.premature_end());
            }
            each(&self.buffer()[..n]);
            self.at += n;
            left -= n as u64;
        }
        Ok(())
    }
}

/// Fills as much of `out` as possible. Returns the number of bytes and the error that ended reading.
fn read_up_to(source: &mut impl Read, out: &mut [u8]) -> (usize, Option<io::Error>) {
    let mut n = 0;
    while n < out.len() {
        match source.read(&mut out[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (n, Some(e)),
        }
    }
    (n, None)
}
