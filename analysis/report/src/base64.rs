//! Base64 (RFC 4648) while data is written, for binary data in a page.

use std::io::{self, Write};

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The four letters of up to three bytes.
fn letters(bytes: &[u8]) -> [u8; 4] {
    let byte = |at: usize| u32::from(bytes.get(at).copied().unwrap_or(0));
    let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
    let letter = |at: usize| if at <= bytes.len() { LETTERS[(bits >> (18 - 6 * at)) as usize & 63] } else { b'=' };
    [letter(0), letter(1), letter(2), letter(3)]
}

/// Bytes as base64.
pub(crate) fn base64(bytes: &[u8]) -> String {
    bytes.chunks(3).flat_map(letters).map(char::from).collect()
}

/// Encodes what is written. [`Self::finish`] writes the end.
#[derive(Debug)]
pub(crate) struct Base64Writer<W: Write> {
    out: W,
    /// Bytes that are not encoded yet: fewer than three.
    rest: Vec<u8>,
}

impl<W: Write> Base64Writer<W> {
    pub(crate) fn new(out: W) -> Base64Writer<W> {
        Base64Writer { out, rest: Vec::with_capacity(3) }
    }

    /// Writes the last bytes and their padding.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        if !self.rest.is_empty() {
            self.out.write_all(&letters(&self.rest))?;
        }
        Ok(self.out)
    }
}

impl<W: Write> Write for Base64Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut encoded = Vec::with_capacity(bytes.len() / 3 * 4 + 8);
        let mut left = bytes;
        if !self.rest.is_empty() {
            let missing = (3 - self.rest.len()).min(left.len());
            let (first, others) = left.split_at(missing);
            self.rest.extend_from_slice(first);
            left = others;
            if self.rest.len() == 3 {
                encoded.extend(letters(&self.rest));
                self.rest.clear();
            }
        }
        let chunks = left.chunks_exact(3);
        self.rest.extend_from_slice(chunks.remainder());
        chunks.for_each(|chunk| encoded.extend(letters(chunk)));
        self.out.write_all(&encoded)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_rfc() {
        let examples =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")];
        for (plain, encoded) in examples {
            assert_eq!(base64(plain.as_bytes()), encoded);
            for cut in 0..=plain.len() {
                let mut writer = Base64Writer::new(Vec::new());
                writer.write_all(&plain.as_bytes()[..cut]).unwrap();
                writer.write_all(&plain.as_bytes()[cut..]).unwrap();
                assert_eq!(writer.finish().unwrap(), encoded.as_bytes(), "{plain} cut at {cut}");
            }
        }
    }
}
