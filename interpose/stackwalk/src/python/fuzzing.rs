//! The entry point of the fuzzer (`tests/fuzz`): line tables of arbitrary bytes.

use super::layout::LinesKind;
use super::lines::line_at;

/// Looks up the line at `offset` in a table of each kind.
pub fn lines(table: &[u8], first_line: u32, offset: i32) {
    for kind in [LinesKind::Lnotab, LinesKind::Ranges, LinesKind::Locations] {
        let line = line_at(kind, table, first_line, offset);
        assert!(offset >= 0 || line == first_line, "a frame that has not started is at its first line");
    }
}
