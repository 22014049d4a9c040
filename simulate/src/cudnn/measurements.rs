//! Reads `simulate/measurements` for tests.

use flate2::read::GzDecoder;
use serde_json::{Map, Value};
use std::fs::File;
use std::path::Path;

/// The rows of a file with measurements: each is a map from the names of its columns.
pub(super) fn rows(name: &str) -> Vec<Map<String, Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("measurements").join(format!("{name}.json.gz"));
    let file: Value = serde_json::from_reader(GzDecoder::new(File::open(path).unwrap())).unwrap();
    let columns: Vec<&str> = file["columns"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let rows = file["rows"].as_array().unwrap().iter();
    let rows: Vec<_> = rows
        .map(|row| {
            columns.iter().zip(row.as_array().unwrap()).map(|(name, value)| (name.to_string(), value.clone())).collect()
        })
        .collect();
    assert!(rows.len() >= 1000, "{} rows", rows.len());
    rows
}

/// A number of a row.
pub(super) fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap()
}
