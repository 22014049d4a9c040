//! `web/src/data/schema.ts` has the TypeScript types of the JSON that pages show, made from the JSON Schemas.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it typescript` rewrites the file.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use memtrace_analysis::{DiffReport, JobReport, LinesReport, Summary};
use serde_json::Value;

const HEAD: &str = "\
/**
 * The JSON of memtrace, from analysis/schema, where every field has its meaning. Generated: see
 * analysis/tests/it/typescript.rs.
 */
";
/// The longest line, as `web/biome.jsonc` has it.
const LINE_WIDTH: usize = 120;

#[test]
fn the_types_of_pages_are_those_of_the_schemas() {
    let schemas =
        [Summary::json_schema(), DiffReport::json_schema(), LinesReport::json_schema(), JobReport::json_schema()];
    let mut types = BTreeMap::new();
    for schema in &schemas {
        let schema: Value = serde_json::from_str(schema).unwrap();
        let title = schema["title"].as_str().unwrap().to_owned();
        add_type(&mut types, title, declaration(&schema));
        for (name, definition) in schema["$defs"].as_object().unwrap() {
            add_type(&mut types, name.clone(), declaration(definition));
        }
    }
    let mut text = HEAD.to_owned();
    for (name, declaration) in types {
        match declaration {
            Declaration::Interface(fields) => _ = write!(text, "\nexport interface {name} {fields}\n"),
            Declaration::Alias(alias) => _ = write!(text, "\n{}\n", alias_text(&name, &alias)),
        }
    }
    crate::golden::assert_matches("../../../web/src/data/schema.ts", &text);
}

/// An alias in one line, or with an alternative a line.
fn alias_text(name: &str, alias: &str) -> String {
    let line = format!("export type {name} = {alias};");
    if line.len() <= LINE_WIDTH {
        return line;
    }
    format!("export type {name} =\n  | {};", alias.replace(" | ", "\n  | "))
}

#[derive(PartialEq, Debug)]
enum Declaration {
    Interface(String),
    Alias(String),
}

fn add_type(types: &mut BTreeMap<String, Declaration>, name: String, declaration: Declaration) {
    if let Some(other) = types.get(&name) {
        assert_eq!(*other, declaration, "two types are named {name}");
    }
    types.insert(name, declaration);
}

fn declaration(schema: &Value) -> Declaration {
    let Some(fields) = schema["properties"].as_object() else { return Declaration::Alias(type_text(schema, false)) };
    let is_required = |name: &str| schema["required"].as_array().into_iter().flatten().any(|one| one == name);
    let mut text = "{\n".to_owned();
    for (name, field) in fields {
        let required = is_required(name);
        let mark = if required { "" } else { "?" };
        _ = writeln!(text, "  {name}{mark}: {};", type_text(field, !required));
    }
    Declaration::Interface(text + "}")
}

/// The type of a value. A field that can be absent is never null.
fn type_text(schema: &Value, can_be_absent: bool) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        return reference.rsplit('/').next().unwrap().to_owned();
    }
    if let Some(constant) = schema.get("const") {
        return constant.to_string().replace('"', "'");
    }
    if let Some(all) = schema["anyOf"].as_array().or(schema["oneOf"].as_array()) {
        let parts = all.iter().filter(|part| !(can_be_absent && part["type"] == "null"));
        return parts.map(|part| type_text(part, false)).collect::<Vec<_>>().join(" | ");
    }
    if let Some(names) = schema["type"].as_array() {
        let names = names.iter().filter(|name| !(can_be_absent && *name == "null"));
        return names.map(|name| basic_type(name.as_str().unwrap())).collect::<Vec<_>>().join(" | ");
    }
    match schema["type"].as_str().unwrap_or_else(|| panic!("no type: {schema}")) {
        "array" => {
            let item = type_text(&schema["items"], false);
            if item.contains(' ') { format!("({item})[]") } else { format!("{item}[]") }
        }
        "object" => format!("Record<string, {}>", type_text(&schema["additionalProperties"], false)),
        name => basic_type(name).to_owned(),
    }
}

fn basic_type(name: &str) -> &'static str {
    match name {
        "string" => "string",
        "integer" | "number" => "number",
        "boolean" => "boolean",
        "null" => "null",
        _ => panic!("unknown type {name}"),
    }
}
