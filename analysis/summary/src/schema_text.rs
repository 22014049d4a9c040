//! JSON Schemas as text.

use memtrace_input::load::Manifest;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;

/// The schema of what this version writes, exactly as its file stores it. A field that is always written is required,
/// also where a file of an older version can lack it.
pub(crate) fn schema_text<T: JsonSchema>() -> String {
    let mut schema = SchemaSettings::draft2020_12().for_serialize().into_generator().into_root_schema_for::<T>();
    remove_defaults(schema.ensure_object());
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}

/// The JSON Schema of `run.json`.
pub fn run_json_schema() -> String {
    schema_text::<Manifest>()
}

/// Removes the values that a reader assumes for absent fields. They say nothing about what is written.
fn remove_defaults(schema: &mut serde_json::Map<String, serde_json::Value>) {
    schema.remove("default");
    for value in schema.values_mut() {
        match value {
            serde_json::Value::Object(map) => remove_defaults(map),
            serde_json::Value::Array(all) => {
                all.iter_mut().filter_map(|one| one.as_object_mut()).for_each(remove_defaults)
            }
            _ => {}
        }
    }
}
