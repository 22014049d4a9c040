//! Reads text by lines of bounded length, within a budget.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use memtrace_trace::file::Budget;

/// The longest line that is read whole, in bytes. The program's signature takes one line; it can be longer.
const LONGEST_LINE: u64 = 256 << 10;

/// The lines of one file.
pub(super) struct Lines<'a> {
    reader: BufReader<File>,
    budget: &'a Budget,
    line: Vec<u8>,
    /// The number of lines that were longer, of which only the beginning was read.
    pub(super) cut: u64,
}

impl<'a> Lines<'a> {
    pub(super) fn of(file: File, budget: &'a Budget) -> io::Result<Lines<'a>> {
        budget.add_file(&file)?;
        Ok(Lines { reader: BufReader::with_capacity(64 << 10, file), budget, line: Vec::new(), cut: 0 })
    }

    /// The next line without its end; `None` at the end of the file. Bytes that are not UTF-8 become replacement
    /// characters.
    pub(super) fn next(&mut self) -> io::Result<Option<String>> {
        self.line.clear();
        let read = Read::take(&mut self.reader, LONGEST_LINE).read_until(b'\n', &mut self.line)?;
        self.budget.work(read as u64).map_err(io::Error::other)?;
        if read == 0 {
            return Ok(None);
        }
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
        } else if read as u64 == LONGEST_LINE {
            self.cut += 1;
            self.skip_rest()?;
        }
        Ok(Some(String::from_utf8_lossy(&self.line).into_owned()))
    }

    fn skip_rest(&mut self) -> io::Result<()> {
        loop {
            let buffered = self.reader.fill_buf()?;
            if buffered.is_empty() {
                return Ok(());
            }
            let end = buffered.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(buffered.len(), |at| at + 1);
            self.budget.work(used as u64).map_err(io::Error::other)?;
            self.reader.consume(used);
            if end.is_some() {
                return Ok(());
            }
        }
    }
}
