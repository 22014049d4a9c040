//! A small JSON Schema validator for the keywords that our schema files use. It refuses unknown properties, because a
//! schema must name every property.

use serde_json::Value;

/// Fails the test unless `value` is valid under `schema`.
///
/// # Panics
/// Names the path of the value that is invalid.
pub fn assert_valid(schema: &Value, value: &Value) {
    validate(schema, schema, value, "$");
}

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
