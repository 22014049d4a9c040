//! The figures of memory pools that a process wrote when it ended (`memtrace --pools read`): `pools-PID.json`.

use std::io;
use std::path::Path;

use memtrace_trace::file::Budget;
use serde::Deserialize;

use crate::folder::RunFolder;
use crate::json_file;

/// The maximum size of a file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The figures that a process reported about its memory pools.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PoolFigures {
    /// The pools.
    pub pools: Vec<PoolFigure>,
    /// The pools that could not be read, with the reasons.
    pub errors: Vec<String>,
}

/// The figures of one pool, in bytes, as the library itself reports them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PoolFigure {
    /// `JAX` or `CuPy`.
    pub library: String,
    /// The device ordinal.
    pub device: i16,
    /// The class of CuPy's allocator, such as `MemoryPool`. Empty for JAX.
    pub allocator: String,
    /// The bytes in use. `None` if the library does not report them.
    pub used_bytes: Option<u64>,
    /// The most bytes that were in use at once. `None` if the library does not count them.
    pub used_peak_bytes: Option<u64>,
    /// The bytes that the pool has taken from CUDA. `None` if the library does not report them.
    pub pool_bytes: Option<u64>,
    /// The bytes that the pool may take at most. `None` without a limit.
    pub limit_bytes: Option<u64>,
}

/// Reads the figures of a process. `None` if it wrote none.
///
/// # Errors
///
/// The text says which file cannot be read, why, and what to do.
pub fn read_pool_figures(run: &Path, pid: u32) -> Result<Option<PoolFigures>, String> {
    let Ok(folder) = RunFolder::open(run) else { return Ok(None) };
    let name = format!("pools-{pid}.json");
    let read = folder.open_file(&name).and_then(|file| json_file::read(&file, MAX_BYTES, &Budget::default()));
    match read {
        Ok(figures) => Ok(Some(figures)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(format!("cannot read {name}: {e}; record again with memtrace --pools read, or remove the file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_and_damage_is_reported() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(read_pool_figures(run.path(), 7), Ok(None));
        let path = run.path().join("pools-7.json");
        let text =
            r#"{"version":1,"pools":[{"library":"CuPy","device":1,"used_bytes":5,"pool_bytes":9,"limit_bytes":null}]}"#;
        std::fs::write(&path, text).unwrap();
        let figure = PoolFigure {
            library: "CuPy".into(),
            device: 1,
            used_bytes: Some(5),
            pool_bytes: Some(9),
            ..PoolFigure::default()
        };
        let expected = PoolFigures { pools: vec![figure], errors: Vec::new() };
        assert_eq!(read_pool_figures(run.path(), 7), Ok(Some(expected)));
        for damaged in [&text[..40], r#"{"pools":[{"used_bytes":-1}]}"#, "[[[["] {
            std::fs::write(&path, damaged).unwrap();
            let error = read_pool_figures(run.path(), 7).unwrap_err();
            assert!(error.starts_with("cannot read pools-7.json: ") && error.contains("record again"), "{error}");
        }
    }
}
