//! Reads Python strings in place, as UTF-8.
//!
//! ASCII, by far the most frequent, is borrowed without a copy. Other text is converted into a [`Buffer`]. If it does
//! not fit, it is cut at a character, and the cut is counted. Lone surrogates (file names that are not valid in the
//! file system's encoding) become U+FFFD.

use super::layout::TextLayout;

/// How a string is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Storage {
    /// Bytes a character: 1, 2 or 4.
    pub(super) kind: u32,
    pub(super) compact: bool,
    pub(super) ascii: bool,
}

impl Storage {
    /// Decodes `state`. `None` if it is no string's.
    pub(super) fn of(layout: &TextLayout, state: u32) -> Option<Storage> {
        layout.state_shifts.iter().find_map(|shift| {
            let bits = state >> shift;
            let storage = Storage { kind: bits & 7, compact: bits & 8 != 0, ascii: bits & 16 != 0 };
            let valid = matches!(storage.kind, 1 | 2 | 4) && (!storage.ascii || storage.kind == 1);
            valid.then_some(storage)
        })
    }
}

/// Space for one converted string of at most `SIZE` bytes.
pub(super) struct Buffer<const SIZE: usize> {
    bytes: [u8; SIZE],
    len: usize,
    /// Whether the string did not fit.
    is_truncated: bool,
}

impl<const SIZE: usize> Buffer<SIZE> {
    pub(super) const fn new() -> Self {
        Buffer { bytes: [0; SIZE], len: 0, is_truncated: false }
    }

    /// Whether the string did not fit.
    pub(super) fn is_truncated(&self) -> bool {
        self.is_truncated
    }

    fn push(&mut self, character: char) {
        let length = character.len_utf8();
        match self.bytes.get_mut(self.len..self.len + length) {
            Some(space) if !self.is_truncated => {
                character.encode_utf8(space);
                self.len += length;
            }
            _ => self.is_truncated = true,
        }
    }

    fn fill(&mut self, characters: impl Iterator<Item = u32>) -> &str {
        for character in characters {
            if self.is_truncated {
                break;
            }
            self.push(char::from_u32(character).unwrap_or(char::REPLACEMENT_CHARACTER));
        }
        self.bytes.get(..self.len).and_then(|bytes| str::from_utf8(bytes).ok()).unwrap_or_default()
    }
}

/// The text of the string at `object`. Empty if it is no string.
///
/// # Safety
///
/// `object` is a live `str` with this layout, and stays alive for `'a`.
pub(super) unsafe fn read<'a, const SIZE: usize>(
    layout: &TextLayout,
    object: usize,
    buffer: &'a mut Buffer<SIZE>,
) -> &'a str {
    // SAFETY: the caller guarantees a live string with this layout, which contains both fields.
    let (state, length) = unsafe { (load::<u32>(object + layout.state), load::<usize>(object + layout.length)) };
    let Some(storage) = Storage::of(layout, state) else {
        return "";
    };
    let data = match storage {
        Storage { compact: true, ascii: true, .. } => object + layout.ascii_data,
        Storage { compact: true, ascii: false, .. } => object + layout.compact_data,
        // SAFETY: the caller guarantees the layout, and a string that is not compact has this field.
        Storage { compact: false, .. } => unsafe { load::<usize>(object + layout.data_pointer) },
    };
    if data == 0 {
        return "";
    }
    match storage.kind {
        1 => {
            // SAFETY: the string has `length` characters of one byte there, which never change.
            let bytes = unsafe { characters::<u8>(data, length) };
            match str::from_utf8(bytes) {
                Ok(text) if storage.ascii => text,
                _ => buffer.fill(bytes.iter().map(|byte| u32::from(*byte))),
            }
        }
        // SAFETY: the string has `length` characters of two bytes there, which never change.
        2 => buffer.fill(unsafe { characters::<u16>(data, length) }.iter().map(|unit| u32::from(*unit))),
        // SAFETY: the string has `length` characters of four bytes there, which never change.
        _ => buffer.fill(unsafe { characters::<u32>(data, length) }.iter().copied()),
    }
}

/// # Safety
///
/// A readable, aligned value of a plain type is at `address`.
unsafe fn load<T: Copy>(address: usize) -> T {
    // SAFETY: the caller guarantees a readable, aligned value.
    unsafe { std::ptr::with_exposed_provenance::<T>(address).read() }
}

/// # Safety
///
/// `length` readable, aligned characters are at `address` and do not change for `'a`.
unsafe fn characters<'a, T>(address: usize, length: usize) -> &'a [T] {
    // SAFETY: the caller guarantees readable, aligned and constant characters.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: TextLayout =
        TextLayout { length: 8, state: 4, ascii_data: 16, compact_data: 24, data_pointer: 24, state_shifts: &[2, 16] };
    const FREE_THREADED: TextLayout = TextLayout { state_shifts: &[8], ..LAYOUT };
    const COMPACT: u32 = 8;
    const ASCII: u32 = 16;

    /// A synthetic string object.
    fn object(bits: u32, length: usize, ascii_data: bool, data: &[u8]) -> Vec<u64> {
        let mut bytes = vec![0u8; 24];
        bytes[4..8].copy_from_slice(&(bits << 2).to_le_bytes());
        bytes[8..16].copy_from_slice(&length.to_le_bytes());
        bytes.truncate(if ascii_data { 16 } else { 24 });
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0xff);
        bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }

    fn text(object: &[u64]) -> (String, bool) {
        let mut buffer = Buffer::<16>::new();
        // SAFETY: `object` has this layout and lives as long as the text.
        let text = unsafe { read(&LAYOUT, object.as_ptr().expose_provenance(), &mut buffer) }.to_owned();
        (text, buffer.is_truncated())
    }

    #[test]
    fn strings_of_every_width_are_read() {
        let wide = |characters: &[u16]| characters.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<_>>();
        let widest = |characters: &[u32]| characters.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(text(&object(1 | COMPACT | ASCII, 7, true, b"forward")), ("forward".into(), false));
        assert_eq!(text(&object(1 | COMPACT, 4, false, b"gr\xfcn")), ("grün".into(), false));
        assert_eq!(text(&object(2 | COMPACT, 2, false, &wide(&[0x6e2c, 0x8a66]))), ("測試".into(), false));
        assert_eq!(text(&object(2 | COMPACT, 3, false, &wide(&[97, 0xdc80, 98]))), ("a\u{fffd}b".into(), false));
        assert_eq!(text(&object(4 | COMPACT, 2, false, &widest(&[0x1f600, 0x110000]))), ("😀\u{fffd}".into(), false));
        assert_eq!(text(&object(1 | COMPACT | ASCII, 0, true, b"")), (String::new(), false));
    }

    #[test]
    fn long_ascii_is_complete_and_other_long_text_is_truncated_at_a_character() {
        let (whole, cut) = text(&object(1 | COMPACT | ASCII, 40, true, &[b'x'; 40]));
        assert_eq!((whole.len(), cut), (40, false));
        let (start, cut) = text(&object(1 | COMPACT, 17, false, &[0xfc; 17]));
        assert_eq!((start.as_str(), cut), ("üüüüüüüü", true));
    }

    #[test]
    fn strings_that_are_not_compact_are_read() {
        let data = *b"legacy\0\0";
        let address = data.as_ptr().expose_provenance();
        assert_eq!(text(&object(1 | ASCII, 6, false, &address.to_le_bytes())), ("legacy".into(), false));
        assert_eq!(text(&object(1 | ASCII, 6, false, &[0; 8])), (String::new(), false));
    }

    #[test]
    fn invalid_state_bits_are_rejected() {
        for bits in [0, 3, 5, 6, 7, 2 | ASCII, 4 | ASCII] {
            for shift in LAYOUT.state_shifts {
                assert_eq!(Storage::of(&LAYOUT, bits << shift), None, "{bits} {shift}");
            }
            assert_eq!(Storage::of(&FREE_THREADED, bits << 8 | u32::MAX << 16), None, "{bits}");
        }
        let ascii = Some(Storage { kind: 1, compact: true, ascii: true });
        assert_eq!(Storage::of(&LAYOUT, 3 | (1 | COMPACT | ASCII) << 2), ascii);
        assert_eq!(Storage::of(&LAYOUT, 3 | (1 | COMPACT | ASCII) << 16), ascii);
        assert_eq!(Storage::of(&FREE_THREADED, 3 | (1 | COMPACT | ASCII) << 8 | u32::MAX << 16), ascii);
    }
}
