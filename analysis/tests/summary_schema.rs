//! `analysis/schema/summary.schema.json` is what the structures say, and what summaries are.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test summary_schema` rewrites the file; a change that removes or
//! renames anything needs a new major version.

mod training;

use std::path::Path;

use memtrace_analysis::{Summary, summarize};
use serde_json::Value;

fn schema_file() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/summary.schema.json")
}

#[test]
fn the_file_is_what_the_structures_say() {
    let made = Summary::json_schema();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(schema_file(), &made).unwrap();
    }
    let committed = std::fs::read_to_string(schema_file()).unwrap();
    assert!(made == committed, "run with UPDATE_GOLDEN=1 and look at what changed");
}

#[test]
fn summaries_are_valid() {
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(schema_file()).unwrap()).unwrap();
    for run in [training::run(3, false), training::run(1, true), training::run(0, false)] {
        let summary = summarize(&run, &mut |_| {}).unwrap();
        let json: Value = serde_json::from_str(&summary.to_json()).unwrap();
        validate(&schema, &schema, &json, "$");
    }
}

/// As much of JSON Schema as the file uses. Unknown properties are refused: the schema is to name everything.
fn validate(root: &Value, schema: &Value, value: &Value, at: &str) {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = root.pointer(reference.trim_start_matches('#')).unwrap_or_else(|| panic!("{reference}"));
        return validate(root, target, value, at);
    }
    for alternatives in ["anyOf", "oneOf"] {
        if let Some(all) = schema[alternatives].as_array() {
            let fits = all.iter().any(|s| std::panic::catch_unwind(|| validate(root, s, value, at)).is_ok());
            assert!(fits, "{at}: {value} fits none of {all:?}");
            return;
        }
    }
    if let Some(constant) = schema.get("const") {
        assert_eq!(constant, value, "{at}");
    }
    if let Some(all) = schema["enum"].as_array() {
        assert!(all.contains(value), "{at}: {value} is none of {all:?}");
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
        _ => return,
    };
    let fits = types.iter().any(|t| match *t {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => false,
    });
    assert!(fits, "{at}: {value} is no {types:?}");
    if let Some(minimum) = schema["minimum"].as_f64() {
        assert!(value.as_f64().is_none_or(|v| v >= minimum), "{at}: {value}");
    }
    if let (Some(items), Some(values)) = (schema.get("items"), value.as_array()) {
        for (i, value) in values.iter().enumerate() {
            validate(root, items, value, &format!("{at}[{i}]"));
        }
    }
    let Some(object) = value.as_object() else { return };
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        assert!(object.contains_key(name), "{at}: {name} is missing");
    }
    for (name, value) in object {
        match (schema["properties"].get(name), schema.get("additionalProperties")) {
            (Some(property), _) | (None, Some(property)) => validate(root, property, value, &format!("{at}.{name}")),
            (None, None) => panic!("{at}: the schema does not know {name}"),
        }
    }
}
