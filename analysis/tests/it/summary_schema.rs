//! `analysis/schema/summary.schema.json` matches the structures and the summaries.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it summary_schema` rewrites the file. A change that removes
//! or renames anything needs a new major version.

use std::path::Path;

use memtrace_analysis::{Summary, summarize};
use serde_json::Value;

fn schema_file() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/summary.schema.json")
}

#[test]
fn the_schema_file_matches_the_types() {
    let made = Summary::json_schema();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(schema_file(), &made).unwrap();
    }
    let committed = std::fs::read_to_string(schema_file()).unwrap();
    assert!(made == committed, "run with UPDATE_GOLDEN=1 and look at what changed");
}

#[test]
fn the_schema_file_of_manifests_matches_the_types() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/run.schema.json");
    let made = memtrace_analysis::report::run_json_schema();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, &made).unwrap();
    }
    assert!(made == std::fs::read_to_string(file).unwrap(), "run with UPDATE_GOLDEN=1 and look at what changed");
}

#[test]
fn summaries_are_valid() {
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(schema_file()).unwrap()).unwrap();
    for run in [crate::training::run(3, false), crate::training::run(1, true), crate::training::run(0, false)] {
        let summary = summarize(&run, &mut |_| {}).unwrap();
        let json: Value = serde_json::from_str(&summary.to_json()).unwrap();
        crate::json_schema::assert_valid(&schema, &json);
    }
}
