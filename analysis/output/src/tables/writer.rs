//! One Parquet file, written in row groups. Only one group is in memory.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

/// The number of rows per group: what query engines assign to one thread.
const ROWS_PER_GROUP: usize = 1 << 17;

/// A field of a row.
#[derive(Clone, Copy, Debug)]
pub(super) enum Field<'a> {
    /// 64 bits.
    Int64(u64),
    /// 64 bits, or null.
    OptionalInt64(Option<u64>),
    /// 32 bits, or null.
    OptionalInt32(Option<i32>),
    /// A boolean.
    Bool(bool),
    /// A boolean, or null.
    OptionalBool(Option<bool>),
    /// A text.
    Text(&'a str),
    /// A text; null if it is empty.
    OptionalText(&'a str),
}

/// A column of the current group.
enum Column {
    Int64(Vec<i64>),
    OptionalInt64(Vec<i64>, Vec<i16>),
    OptionalInt32(Vec<i32>, Vec<i16>),
    Bool(Vec<bool>),
    OptionalBool(Vec<bool>, Vec<i16>),
    Text(Vec<ByteArray>),
    OptionalText(Vec<ByteArray>, Vec<i16>),
}

/// The definition of columns: a name and a field of the column's type.
pub(super) type Columns = [(&'static str, Field<'static>)];

/// The writer of one file.
pub(super) struct Table<'a> {
    writer: SerializedFileWriter<&'a mut (dyn Write + Send)>,
    columns: Vec<Column>,
    rows: usize,
    /// The number of leading columns that the file leaves out, because its folder's path has them.
    left_out: usize,
    /// Equal texts share their bytes.
    texts: HashMap<Box<str>, ByteArray>,
}

impl<'a> Table<'a> {
    /// Begins a file without rows. The first `left_out` columns are not in the file.
    pub(super) fn new(
        name: &str,
        columns: &Columns,
        left_out: usize,
        out: &'a mut (dyn Write + Send),
    ) -> Result<Table<'a>> {
        let columns = columns.get(left_out..).unwrap_or_default();
        let column_definitions: Vec<String> = columns
            .iter()
            .map(|(name, field)| match field {
                Field::Int64(_) => format!("required int64 {name};"),
                Field::OptionalInt64(_) => format!("optional int64 {name};"),
                Field::OptionalInt32(_) => format!("optional int32 {name};"),
                Field::Bool(_) => format!("required boolean {name};"),
                Field::OptionalBool(_) => format!("optional boolean {name};"),
                Field::Text(_) => format!("required binary {name} (STRING);"),
                Field::OptionalText(_) => format!("optional binary {name} (STRING);"),
            })
            .collect();
        let schema = Arc::new(parse_message_type(&format!("message {name} {{ {} }}", column_definitions.join(" ")))?);
        let by = concat!("memtrace ", env!("CARGO_PKG_VERSION")).to_owned();
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).set_created_by(by).build();
        let new = |field: &Field<'_>| match field {
            Field::Int64(_) => Column::Int64(Vec::new()),
            Field::OptionalInt64(_) => Column::OptionalInt64(Vec::new(), Vec::new()),
            Field::OptionalInt32(_) => Column::OptionalInt32(Vec::new(), Vec::new()),
            Field::Bool(_) => Column::Bool(Vec::new()),
            Field::OptionalBool(_) => Column::OptionalBool(Vec::new(), Vec::new()),
            Field::Text(_) => Column::Text(Vec::new()),
            Field::OptionalText(_) => Column::OptionalText(Vec::new(), Vec::new()),
        };
        Ok(Table {
            writer: SerializedFileWriter::new(out, schema, Arc::new(properties))?,
            columns: columns.iter().map(|(_, field)| new(field)).collect(),
            rows: 0,
            left_out,
            texts: HashMap::new(),
        })
    }

    /// Adds one row. Each column needs a field of its type, those that the file leaves out too.
    pub(super) fn row(&mut self, fields: &[Field<'_>]) -> Result<()> {
        let fields = fields.get(self.left_out..).unwrap_or_default();
        debug_assert_eq!(fields.len(), self.columns.len());
        let texts = &mut self.texts;
        let mut shared = |text: &str| match texts.get(text) {
            Some(known) => known.clone(),
            None => {
                let new = ByteArray::from(text);
                texts.insert(text.into(), new.clone());
                new
            }
        };
        for (column, field) in self.columns.iter_mut().zip(fields) {
            match (column, field) {
                (Column::Int64(values), Field::Int64(value)) => values.push(*value as i64),
                (Column::OptionalInt64(values, levels), Field::OptionalInt64(value)) => {
                    values.extend(value.map(|value| value as i64));
                    levels.push(value.is_some().into());
                }
                (Column::OptionalInt32(values, levels), Field::OptionalInt32(value)) => {
                    values.extend(*value);
                    levels.push(value.is_some().into());
                }
                (Column::Bool(values), Field::Bool(value)) => values.push(*value),
                (Column::OptionalBool(values, levels), Field::OptionalBool(value)) => {
                    values.extend(*value);
                    levels.push(value.is_some().into());
                }
                (Column::Text(values), Field::Text(text)) => values.push(shared(text)),
                (Column::OptionalText(values, levels), Field::OptionalText(text)) => {
                    values.extend((!text.is_empty()).then(|| shared(text)));
                    levels.push((!text.is_empty()).into());
                }
                (_, field) => debug_assert!(false, "{field:?} is of another type than its column"),
            }
        }
        self.rows += 1;
        if self.rows >= ROWS_PER_GROUP { self.flush() } else { Ok(()) }
    }

    /// Ends the file.
    pub(super) fn finish(mut self) -> Result<()> {
        if self.rows > 0 {
            self.flush()?;
        }
        self.writer.into_inner().map(drop)
    }

    fn flush(&mut self) -> Result<()> {
        let mut group = self.writer.next_row_group()?;
        for column in &mut self.columns {
            let Some(mut out) = group.next_column()? else { break };
            match column {
                Column::Int64(values) => _ = out.typed::<Int64Type>().write_batch(values, None, None)?,
                Column::OptionalInt64(values, levels) => {
                    out.typed::<Int64Type>().write_batch(values, Some(levels), None)?;
                    levels.clear();
                }
                Column::OptionalInt32(values, levels) => {
                    out.typed::<Int32Type>().write_batch(values, Some(levels), None)?;
                    levels.clear();
                }
                Column::Bool(values) => _ = out.typed::<BoolType>().write_batch(values, None, None)?,
                Column::OptionalBool(values, levels) => {
                    out.typed::<BoolType>().write_batch(values, Some(levels), None)?;
                    levels.clear();
                }
                Column::Text(values) => _ = out.typed::<ByteArrayType>().write_batch(values, None, None)?,
                Column::OptionalText(values, levels) => {
                    out.typed::<ByteArrayType>().write_batch(values, Some(levels), None)?;
                    levels.clear();
                }
            }
            out.close()?;
            match column {
                Column::Int64(values) | Column::OptionalInt64(values, _) => values.clear(),
                Column::OptionalInt32(values, _) => values.clear(),
                Column::Bool(values) | Column::OptionalBool(values, _) => values.clear(),
                Column::Text(values) | Column::OptionalText(values, _) => values.clear(),
            }
        }
        group.close()?;
        self.rows = 0;
        self.texts.clear();
        Ok(())
    }
}
