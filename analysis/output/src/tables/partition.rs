//! The folders of partitioned tables, as Hive names them: `TABLE/run=NAME/rank=3`. DuckDB, Spark, Polars, pyarrow and
//! Ray Data read them as one table with the columns `run` and `rank`.

use std::borrow::Cow;
use std::path::PathBuf;

/// The value of a column that is null.
const NULL: &str = "__HIVE_DEFAULT_PARTITION__";

/// The folder of a part of a table, relative to the folder of all tables. Without `rank`, `None`: the table is not
/// divided by rank. `Some(None)`: the process has no rank.
pub fn partition_folder(table: &str, run: &str, rank: Option<Option<u32>>) -> PathBuf {
    let mut folder = PathBuf::from(table);
    folder.push(format!("run={}", escaped(run)));
    if let Some(rank) = rank {
        folder.push(format!("rank={}", rank.map_or(NULL.to_owned(), |rank| rank.to_string())));
    }
    folder
}

/// The value in the name of a partition's folder: `run=a%3Ab` has the value `a:b` of `run`. `None` if it is a folder of
/// another column.
pub fn unpartitioned_value(folder: &str, column: &str) -> Option<String> {
    let value = folder.strip_prefix(column)?.strip_prefix('=')?;
    let (mut bytes, mut rest) = (Vec::new(), value.as_bytes());
    while let [first, others @ ..] = rest {
        let digits = others.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = others.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = others;
            }
        }
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The value with a percent sign and two digits for each byte that Hive escapes, or that is not ASCII.
fn escaped(value: &str) -> Cow<'_, str> {
    if value.is_empty() {
        return NULL.into();
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+@~ ,()".contains(&byte);
    if value.bytes().all(is_plain) {
        return value.into();
    }
    let byte = |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    value.bytes().map(byte).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_the_path() {
        for run in ["memtrace-train-20261124-110000", "a/b=c%d:e", "../..", "ä\n", "100%", "%4", "x y"] {
            let folder = partition_folder("events", run, Some(Some(3)));
            let parts: Vec<_> = folder.components().map(|part| part.as_os_str().to_str().unwrap()).collect();
            let [table, run_folder, rank] = parts[..] else { panic!("{folder:?}") };
            assert_eq!((table, rank), ("events", "rank=3"));
            assert_eq!(unpartitioned_value(run_folder, "run").as_deref(), Some(run), "{run_folder}");
            assert_eq!(unpartitioned_value(rank, "run"), None);
        }
        let no_rank = partition_folder("events", "a", Some(None));
        assert_eq!(no_rank, PathBuf::from("events/run=a/rank=__HIVE_DEFAULT_PARTITION__"));
        assert_eq!(partition_folder("ranks", "a", None), PathBuf::from("ranks/run=a"));
    }
}
