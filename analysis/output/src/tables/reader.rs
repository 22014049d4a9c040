//! Reads a small Parquet file whole: its numbers and texts, by column. It uses column readers only; rows as the library
//! makes them would double the code.

use std::collections::HashMap;
use std::fs::File;

use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, DataType};
use parquet::errors::Result;
use parquet::file::reader::{FileReader, SerializedFileReader};

/// The largest number of rows that are read. A run has a row for each device of each process.
const MAX_ROWS: usize = 1 << 22;

/// The values of a column; `None` is null.
enum Values {
    Numbers(Vec<Option<i64>>),
    Texts(Vec<Option<ByteArray>>),
}

/// A table in memory.
pub(super) struct ReadTable {
    columns: HashMap<String, Values>,
    /// The number of rows.
    pub(super) rows: usize,
}

impl ReadTable {
    /// Reads the columns with integers, booleans and texts. Others are left out.
    pub(super) fn of(file: File) -> Result<ReadTable> {
        let reader = SerializedFileReader::new(file)?;
        let mut table = ReadTable { columns: HashMap::new(), rows: 0 };
        for index in 0..reader.num_row_groups() {
            let group = reader.get_row_group(index)?;
            let metadata = group.metadata();
            let rows = usize::try_from(metadata.num_rows()).unwrap_or(0);
            if table.rows.saturating_add(rows) > MAX_ROWS {
                return Err(parquet::errors::ParquetError::General("it has too many rows".to_owned()));
            }
            for (at, column) in metadata.columns().iter().enumerate() {
                let name = column.column_descr().name();
                let is_optional = column.column_descr().max_def_level() > 0;
                // Nested columns are of another program.
                if column.column_descr().max_rep_level() > 0 || column.column_descr().max_def_level() > 1 {
                    continue;
                }
                let values = match group.get_column_reader(at)? {
                    ColumnReader::BoolColumnReader(reader) => {
                        Values::Numbers(read(reader, rows, is_optional, |value| i64::from(*value))?)
                    }
                    ColumnReader::Int32ColumnReader(reader) => {
                        Values::Numbers(read(reader, rows, is_optional, |value| i64::from(*value))?)
                    }
                    ColumnReader::Int64ColumnReader(reader) => {
                        Values::Numbers(read(reader, rows, is_optional, |value| *value)?)
                    }
                    ColumnReader::ByteArrayColumnReader(reader) => {
                        Values::Texts(read(reader, rows, is_optional, Clone::clone)?)
                    }
                    _ => continue,
                };
                match (table.columns.get_mut(name), values) {
                    (Some(Values::Numbers(all)), Values::Numbers(more)) => all.extend(more),
                    (Some(Values::Texts(all)), Values::Texts(more)) => all.extend(more),
                    (_, values) => _ = table.columns.insert(name.to_owned(), values),
                }
            }
            table.rows += rows;
        }
        Ok(table)
    }

    /// Whether the file has this column.
    pub(super) fn has(&self, column: &str) -> bool {
        self.columns.contains_key(column)
    }

    /// The integer in a column, or 1 for true and 0 for false. `None` if it is null, or not there.
    pub(super) fn number(&self, column: &str, row: usize) -> Option<i64> {
        match self.columns.get(column)? {
            Values::Numbers(values) => values.get(row).copied().flatten(),
            Values::Texts(_) => None,
        }
    }

    /// The text in a column. Empty if it is null, or not there.
    pub(super) fn text(&self, column: &str, row: usize) -> String {
        match self.columns.get(column) {
            Some(Values::Texts(values)) => {
                let text = values.get(row).and_then(Option::as_ref);
                text.map(|text| String::from_utf8_lossy(text.data()).into_owned()).unwrap_or_default()
            }
            _ => String::new(),
        }
    }
}

/// The values of one column in a group of rows.
fn read<T: DataType, V>(
    mut reader: ColumnReaderImpl<T>,
    rows: usize,
    is_optional: bool,
    of: impl Fn(&T::T) -> V,
) -> Result<Vec<Option<V>>> {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let mut read = 0;
    while read < rows {
        let (records, ..) = reader.read_records(rows - read, Some(&mut levels), None, &mut values)?;
        if records == 0 {
            break;
        }
        read += records;
    }
    if !is_optional {
        return Ok(values.iter().map(|value| Some(of(value))).collect());
    }
    // Only values that are not null are stored.
    let mut stored = values.iter();
    Ok(levels.iter().map(|level| if *level > 0 { stored.next().map(&of) } else { None }).collect())
}
