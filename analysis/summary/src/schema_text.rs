//! JSON Schemas as text.

/// A schema as text, exactly as its file stores it.
pub(crate) fn schema_text(schema: &schemars::Schema) -> String {
    let mut text = serde_json::to_string_pretty(schema).unwrap_or_default();
    text.push('\n');
    text
}
