//! The bytes of a snapshot file, read in pieces and decompressed if the file is gzipped.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;

use super::Stop;

/// The number of bytes that one read requests.
const PIECE: usize = 256 * 1024;
/// The longest text that is kept, in bytes. Longer texts are cut and counted.
const LONGEST_TEXT: usize = 64 * 1024;

/// Counts the bytes read from the file itself.
struct Counted {
    file: File,
    read: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        self.read.set(self.read.get() + n as u64);
        Ok(n)
    }
}

/// A buffered reader of a snapshot file.
pub(super) struct Input<'a> {
    source: Box<dyn Read>,
    /// Whether the file is gzipped.
    pub(super) packed: bool,
    buffer: Vec<u8>,
    at: usize,
    /// The number of decompressed bytes before the buffer.
    before: u64,
    ended: bool,
    /// The error that ended reading. Bytes read before it are still delivered.
    failed: Option<io::Error>,
    read: Rc<Cell<u64>>,
    progress: &'a mut dyn FnMut(u64),
    /// The number of texts that were cut.
    pub(super) cut_texts: u64,
    /// How often the buffer was refilled.
    pub(super) refills: u32,
}

impl<'a> Input<'a> {
    /// Takes an open file, positioned at its beginning. `progress` receives the number of file bytes read so far.
    pub(super) fn new(file: File, progress: &'a mut dyn FnMut(u64)) -> io::Result<Input<'a>> {
        let read = Rc::new(Cell::new(0));
        let mut head = [0; 2];
        let mut file = file;
        let (known, failed) = read_up_to(&mut file, &mut head);
        if let Some(cause) = failed {
            return Err(cause);
        }
        let start = io::Cursor::new(head).take(known as u64);
        read.set(known as u64);
        let whole = start.chain(Counted { file, read: read.clone() });
        let packed = head == [0x1f, 0x8b];
        let source: Box<dyn Read> = if packed {
            Box::new(MultiGzDecoder::new(io::BufReader::with_capacity(64 * 1024, whole)))
        } else {
            Box::new(whole)
        };
        Ok(Input {
            source,
            packed,
            buffer: Vec::new(),
            at: 0,
            before: 0,
            ended: false,
            failed: None,
            read,
            progress,
            cut_texts: 0,
            refills: 0,
        })
    }

    /// The number of decompressed bytes consumed so far.
    pub(super) fn position(&self) -> u64 {
        self.before + self.at as u64
    }

    /// The number of file bytes read so far.
    pub(super) fn file_position(&self) -> u64 {
        self.read.get()
    }

    /// The buffered bytes.
    #[inline(always)]
    pub(super) fn here(&self) -> &[u8] {
        &self.buffer[self.at..]
    }

    /// Whether the file has ended, so that [`Self::here`] is all that is left.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Consumes `n` of the buffered bytes. The caller ensures that there are enough.
    #[inline(always)]
    pub(super) fn skip_here(&mut self, n: usize) {
        self.at += n;
        debug_assert!(self.at <= self.buffer.len());
    }

    /// Reads more bytes behind the buffered ones. Fails only if none are buffered.
    #[cold]
    pub(super) fn refill(&mut self) -> Result<(), Stop> {
        if self.failed.is_some() && self.here().is_empty() {
            return Err(self.short());
        }
        if self.ended || self.failed.is_some() {
            return Ok(());
        }
        self.refills = self.refills.wrapping_add(1);
        self.buffer.drain(..self.at);
        self.before += self.at as u64;
        self.at = 0;
        let kept = self.buffer.len();
        self.buffer.resize(kept + PIECE, 0);
        let (n, failed) = read_up_to(&mut self.source, &mut self.buffer[kept..]);
        self.buffer.truncate(kept + n);
        self.ended = n < PIECE && failed.is_none();
        self.failed = failed;
        (self.progress)(self.read.get());
        if self.failed.is_some() && self.buffer.is_empty() { Err(self.short()) } else { Ok(()) }
    }

    /// The reason for a premature end.
    #[cold]
    fn short(&self) -> Stop {
        let Some(cause) = &self.failed else { return Stop::End };
        match cause.kind() {
            io::ErrorKind::UnexpectedEof if self.packed => Stop::End,
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData if self.packed => Stop::Gzip,
            kind => Stop::Io(io::Error::new(kind, cause.to_string())),
        }
    }

    /// Consumes the next `N` bytes.
    #[inline(always)]
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        if self.buffer.len() - self.at < N {
            self.refill()?;
        }
        let Some(bytes) = self.buffer[self.at..].first_chunk::<N>() else { return Err(self.short()) };
        let bytes = *bytes;
        self.at += N;
        Ok(bytes)
    }

    /// Consumes a text of `len` bytes and passes it to `then`, cut to [`LONGEST_TEXT`].
    #[inline(always)]
    pub(super) fn text<T>(&mut self, len: u64, then: impl FnOnce(&[u8]) -> T) -> Result<T, Stop> {
        let n = len as usize;
        if len <= (self.buffer.len() - self.at) as u64 && n <= LONGEST_TEXT {
            self.at += n;
            return Ok(then(&self.buffer[self.at - n..self.at]));
        }
        self.far_text(len, then)
    }

    #[cold]
    fn far_text<T>(&mut self, len: u64, then: impl FnOnce(&[u8]) -> T) -> Result<T, Stop> {
        let mut kept = Vec::new();
        self.pieces(len, |piece| {
            let room = LONGEST_TEXT.saturating_sub(kept.len());
            kept.extend_from_slice(&piece[..piece.len().min(room)]);
        })?;
        self.cut_texts += u64::from(len > LONGEST_TEXT as u64);
        Ok(then(&kept))
    }

    /// Consumes everything, and returns how many bytes are not white space. A gzip file reveals only at its end whether
    /// it is complete.
    pub(super) fn pass_all(&mut self) -> Result<u64, Stop> {
        let mut more = 0;
        loop {
            more += self.here().iter().filter(|byte| !byte.is_ascii_whitespace()).count() as u64;
            self.at = self.buffer.len();
            if self.ended {
                return Ok(more);
            }
            self.refill()?;
        }
    }

    /// Consumes `len` bytes.
    pub(super) fn pass(&mut self, len: u64) -> Result<(), Stop> {
        self.pieces(len, |_| {})
    }

    /// Consumes `len` bytes and passes them to `each` in pieces.
    fn pieces(&mut self, len: u64, mut each: impl FnMut(&[u8])) -> Result<(), Stop> {
        let mut left = len;
        while left > 0 {
            if self.here().is_empty() {
                self.refill()?;
            }
            let n = (self.here().len() as u64).min(left) as usize;
            if n == 0 {
                return Err(self.short());
            }
            each(&self.here()[..n]);
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

/// The longest text that the JSON reader delivers, in bytes. Longer texts are cut.
pub(super) const fn longest_text() -> usize {
    LONGEST_TEXT
}
