//! The files of `analysis/schema` match the structures, and summaries match their schema.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it schemas` rewrites the files. A change that removes or
//! renames anything needs a new major version.

use std::path::PathBuf;

use memtrace_analysis::report::{LiveReport, run_json_schema};
use memtrace_analysis::{CheckReport, DiffReport, JobReport, LinesReport, Summary, summarize};

fn schema_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("schema")
}

/// Fails where `json` does not match the schema `name`.
#[track_caller]
pub(crate) fn assert_valid(name: &str, json: &str) {
    let schema = std::fs::read_to_string(schema_folder().join(format!("{name}.schema.json"))).unwrap();
    crate::json_schema::assert_valid(&serde_json::from_str(&schema).unwrap(), &serde_json::from_str(json).unwrap());
}

#[test]
fn each_file_matches_its_type() {
    let made = [
        ("check", CheckReport::json_schema()),
        ("diff", DiffReport::json_schema()),
        ("job", JobReport::json_schema()),
        ("lines", LinesReport::json_schema()),
        ("live", LiveReport::json_schema()),
        ("run", run_json_schema()),
        ("summary", Summary::json_schema()),
    ];
    let differing: Vec<&str> = made
        .iter()
        .filter(|(name, schema)| {
            let file = schema_folder().join(format!("{name}.schema.json"));
            if std::env::var_os("UPDATE_GOLDEN").is_some() {
                std::fs::write(&file, schema).unwrap();
            }
            std::fs::read_to_string(&file).ok().as_ref() != Some(schema)
        })
        .map(|(name, _)| *name)
        .collect();
    assert!(differing.is_empty(), "run with UPDATE_GOLDEN=1 and look at what changed: {differing:?}");
    let mut files: Vec<String> = std::fs::read_dir(schema_folder())
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".schema.json").map(str::to_owned))
        .collect();
    files.sort();
    assert_eq!(files, made.map(|(name, _)| name.to_owned()), "each schema has a row above");
}

#[test]
fn summaries_are_valid() {
    for run in [crate::training::run(3, false), crate::training::run(1, true), crate::training::run(0, false)] {
        assert_valid("summary", &summarize(&run, &mut |_| {}).unwrap().to_json());
    }
}
