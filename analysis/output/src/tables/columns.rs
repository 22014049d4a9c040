//! The common parts of the tables of a process: the types of columns, and the columns that identify the process.

use super::writer::Field;

pub(super) const INT64: Field<'static> = Field::Int64(0);
pub(super) const OPTIONAL_INT64: Field<'static> = Field::OptionalInt64(None);
pub(super) const OPTIONAL_INT32: Field<'static> = Field::OptionalInt32(None);
pub(super) const TEXT: Field<'static> = Field::Text("");
pub(super) const OPTIONAL_TEXT: Field<'static> = Field::OptionalText("");

/// The columns that identify the process of a row.
pub(super) struct ProcessColumns<'a> {
    pub(super) run: &'a str,
    pub(super) rank: Option<i32>,
    pub(super) pid: i32,
}
