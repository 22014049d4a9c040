//! `symbols.json`: names of native code.

use serde_json::{Map, Value};

use super::public;
use super::texts::Texts;
use memtrace_input::printable;

pub(super) fn symbols(texts: &mut Texts, text: &str) -> serde_json::Result<String> {
    let mut value: Value = serde_json::from_str(text)?;
    let objects = value.get_mut("objects").and_then(Value::as_array_mut);
    for object in objects.into_iter().flatten().filter_map(Value::as_object_mut) {
        let is_known = public::is_known_object(object.get("path").and_then(Value::as_str).unwrap_or_default());
        replace(object, "path", |path| texts.path(path));
        replace(object, "symbols_from", |path| texts.path(path));
        replace(object, "notes", |note| texts.sentence(note));
        if is_known {
            continue;
        }
        replace(object, "strings", |text| match text {
            _ if public::is_word(text) => text.to_owned(),
            _ if text.contains('/') => texts.path(text),
            // A mangled name has names of types in it.
            _ => texts.host(text),
        });
        // As in the definition of the object.
        object.remove("build_id");
    }
    Ok(printable::json(serde_json::to_string(&value)?))
}

/// Replaces a text, or each text of a list.
fn replace(object: &mut Map<String, Value>, key: &str, mut new: impl FnMut(&str) -> String) {
    match object.get_mut(key) {
        Some(Value::String(text)) => *text = new(text),
        Some(Value::Array(items)) => {
            items.iter_mut().for_each(|item| *item = new(item.as_str().unwrap_or_default()).into());
        }
        Some(other) => *other = Value::Null,
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_public_libraries_stay() {
        let text = r#"{"version": 1, "objects": [
            {"path": "/home/alice/env/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so", "build_id": "00ff",
             "strings": ["at::empty", "/pytorch/aten/empty.cpp"], "places": {"1f": [[0, 1, 5]]}},
            {"path": "/home/alice/libacme.so", "build_id": "11ee", "symbols_from": "/home/alice/libacme.debug",
             "notes": ["no debug file for /home/alice/libacme.so"],
             "strings": ["_ZN4acme5trainEv", "/home/alice/acme.cpp"], "places": {"2f": [[0, 1, 7]]}}]}"#;
        let redacted = symbols(&mut Texts::new([5; 32]), text).unwrap();
        assert!(!redacted.contains("acme") && !redacted.contains("alice") && !redacted.contains("11ee"), "{redacted}");
        assert!(
            redacted.contains("at::empty") && redacted.contains("00ff") && redacted.contains("[0,1,7]"),
            "{redacted}"
        );
        assert_eq!(symbols(&mut Texts::new([5; 32]), "[1]").unwrap(), "[1]");
    }
}
