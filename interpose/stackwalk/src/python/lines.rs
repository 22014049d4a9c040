//! Decodes a code object's line table: pure functions over bytes.
//!
//! `PyCode_Addr2Line` is not used on the event path. From 3.12 on it may read monitoring data that another thread,
//! which holds the GIL, is changing. The tables themselves never change. Verification compares both results.

use super::layout::LinesKind;

/// The line of the instruction at `offset` bytes; a negative offset means not started. 0 if the table has no line for
/// it.
pub(super) fn line_at(kind: LinesKind, table: &[u8], first_line: u32, offset: i32) -> u32 {
    let Ok(offset) = u32::try_from(offset) else {
        return first_line;
    };
    match kind {
        LinesKind::Lnotab => lnotab(table, first_line, offset),
        LinesKind::Ranges => ranges(table, first_line, offset),
        LinesKind::Locations => locations(table, first_line, offset),
    }
}

/// Pairs of (bytes of code: u8, lines: i8). The lines are added at the end of the bytes.
fn lnotab(table: &[u8], first_line: u32, offset: u32) -> u32 {
    let (mut line, mut address) = (first_line, 0u32);
    for [bytes, lines] in table.as_chunks::<2>().0 {
        address += u32::from(*bytes);
        if address > offset {
            break;
        }
        line = line.wrapping_add_signed(i32::from(lines.cast_signed()));
    }
    line
}

/// Pairs of (bytes of code: u8, lines: i8, where -128 means "no line"). The lines are added before the range.
fn ranges(table: &[u8], first_line: u32, offset: u32) -> u32 {
    const NO_LINE: i8 = -128;
    let (mut line, mut end) = (first_line, 0u32);
    for [bytes, lines] in table.as_chunks::<2>().0 {
        let lines = lines.cast_signed();
        if lines != NO_LINE {
            line = line.wrapping_add_signed(i32::from(lines));
        }
        end += u32::from(*bytes);
        if offset < end {
            return if lines == NO_LINE { 0 } else { line };
        }
    }
    0
}

/// Entries that start with a byte whose top bit is set: 4 bits of kind, 3 bits of (2-byte units of code - 1). Depending
/// on the kind, a signed variable-length number of lines follows, then columns, which are skipped.
fn locations(table: &[u8], first_line: u32, offset: u32) -> u32 {
    const NO_LOCATION: u8 = 15;
    const LONG: u8 = 14;
    const NO_COLUMNS: u8 = 13;
    let (mut line, mut end) = (first_line, 0u32);
    let mut rest = table;
    while let Some((first, mut body)) = rest.split_first() {
        let kind = first >> 3 & 15;
        let lines = match kind {
            NO_LOCATION => 0,
            LONG | NO_COLUMNS => signed_varint(&mut body),
            10..=12 => i32::from(kind) - 10,
            _ => 0,
        };
        line = line.wrapping_add_signed(lines);
        end += (u32::from(first & 7) + 1) * 2;
        if offset < end {
            return if kind == NO_LOCATION { 0 } else { line };
        }
        let next = body.iter().position(|byte| byte & 0x80 != 0).unwrap_or(body.len());
        rest = body.get(next..).unwrap_or_default();
    }
    0
}

/// Six bits a byte, lowest first; bit 6 means that another byte follows. The lowest bit of the value is the sign.
fn signed_varint(bytes: &mut &[u8]) -> i32 {
    let (mut value, mut shift) = (0u32, 0);
    while let Some((byte, rest)) = bytes.split_first() {
        *bytes = rest;
        value |= u32::from(byte & 63).checked_shl(shift).unwrap_or(0);
        shift += 6;
        if byte & 64 == 0 {
            break;
        }
    }
    let magnitude = (value >> 1).cast_signed();
    if value & 1 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(kind: LinesKind, table: &[u8], first_line: u32, offsets: &[i32]) -> Vec<u32> {
        offsets.iter().map(|offset| line_at(kind, table, first_line, *offset)).collect()
    }

    #[test]
    fn lnotab_counts_from_the_end_of_each_piece() {
        // Lines 10 (bytes 0-5), 11 (6-13), 9 (14-).
        let table = [6, 1, 8, 254];
        assert_eq!(all(LinesKind::Lnotab, &table, 10, &[-1, 0, 5, 6, 13, 14, 400]), [10, 10, 10, 11, 11, 9, 9]);
        assert_eq!(all(LinesKind::Lnotab, &[], 10, &[-1, 0, 7]), [10, 10, 10]);
    }

    #[test]
    fn ranges_may_have_no_line() {
        let table = [4, 0, 2, 128, 6, 3, 2, 255];
        assert_eq!(
            all(LinesKind::Ranges, &table, 10, &[-1, 0, 3, 4, 5, 6, 11, 12, 14]),
            [10, 10, 10, 0, 0, 13, 13, 12, 0]
        );
    }

    #[test]
    fn locations_of_every_kind() {
        let entry = |kind: u8, units: u8| 0x80 | kind << 3 | (units - 1);
        #[rustfmt::skip]
        let table = [
            entry(0, 1), 0x12,                    // short form, same line: 10
            entry(11, 2), 1, 2,                   // one line further: 11
            entry(15, 1),                         // no line
            entry(13, 1), 64 | 0b000_001, 0b1,    // no columns; 1 | 1 << 6 = 65, odd: -32
            entry(14, 8), 4, 0, 0, 0,             // long; +2
        ];
        assert_eq!(
            all(LinesKind::Locations, &table, 100, &[-1, 0, 1, 2, 5, 6, 7, 8, 9, 10, 25, 26]),
            [100, 100, 100, 101, 101, 0, 0, 69, 69, 71, 71, 0]
        );
    }

    #[test]
    fn arbitrary_bytes_give_a_line() {
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut table = [0; 24];
            for byte in &mut table {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = (state >> 56) as u8;
            }
            for kind in [LinesKind::Lnotab, LinesKind::Ranges, LinesKind::Locations] {
                line_at(kind, &table, u32::MAX, (state >> 32 & 127) as i32);
            }
        }
    }
}
