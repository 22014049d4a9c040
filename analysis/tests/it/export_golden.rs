//! Golden text for every export format, so that any change to a file for other programs shows up here first.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it export_golden` rewrites the golden files.

use std::fmt::Write as _;
use std::io::Write as _;

use crate::showcase::PLAIN;
use memtrace_analysis::Process;
use memtrace_analysis::export::{
    FlameFormat, FlameWeight, TABLES, TableLayout, TimelineFormat, Window, blocks_csv, flame_graph, perfetto, tables,
    timeline,
};
use parquet::file::reader::{FileReader, SerializedFileReader};

fn process() -> Process {
    crate::showcase::program(&PLAIN, 0).process()
}

fn text(write: impl FnOnce(&Process, &mut Vec<u8>) -> memtrace_analysis::Result<()>) -> String {
    String::from_utf8(bytes(write)).unwrap()
}

fn bytes(write: impl FnOnce(&Process, &mut Vec<u8>) -> memtrace_analysis::Result<()>) -> Vec<u8> {
    let mut out = Vec::new();
    write(&process(), &mut out).unwrap();
    out
}

#[test]
fn csv() {
    crate::golden::assert_matches(
        "export.csv",
        &text(|process, out| blocks_csv(process, &Window::WHOLE, None, out, &mut |_| {})),
    );
}

#[test]
fn folded() {
    let mut all = String::new();
    for of in [FlameWeight::Peak, FlameWeight::Leaks, FlameWeight::Total] {
        let folded =
            text(|process, out| flame_graph(process, &Window::WHOLE, of, FlameFormat::Folded, out, &mut |_| {}));
        let _ = writeln!(all, "# {of:?}\n{folded}");
    }
    crate::golden::assert_matches("export.folded", &all);
}

#[test]
fn speedscope() {
    let file = text(|process, out| {
        flame_graph(process, &Window::WHOLE, FlameWeight::Peak, FlameFormat::Speedscope, out, &mut |_| {})
    });
    let mut file: serde_json::Value = serde_json::from_str(&file).unwrap();
    assert_eq!(file["exporter"], concat!("memtrace ", env!("CARGO_PKG_VERSION")));
    file["exporter"] = "memtrace".into();
    crate::golden::assert_matches("export.speedscope.json", &(serde_json::to_string_pretty(&file).unwrap() + "\n"));
}

fn drawn(format: TimelineFormat) -> Vec<u8> {
    bytes(|process, out| timeline(process, &Window::WHOLE, 0, format, out, &mut |_| {}))
}

#[test]
fn timeline_numbers() {
    let lines = |file: Vec<u8>| String::from_utf8(file).unwrap().replace("], ", "],\n") + "\n";
    crate::golden::assert_matches("export.timeline.json", &lines(drawn(TimelineFormat::Json)));
}

#[test]
fn timeline_picture() {
    crate::golden::assert_matches("export.timeline.svg", &String::from_utf8(drawn(TimelineFormat::Svg)).unwrap());
}

#[test]
fn parquet_rows() {
    let process = process();
    let mut files = [const { Vec::new() }; 4];
    let outputs = files.each_mut().map(|file| file as &mut (dyn std::io::Write + Send));
    tables(&process, "run", TableLayout::Whole, &Window::WHOLE, None, outputs, &mut |_| {}).unwrap();
    let mut all = String::new();
    for (table, bytes) in TABLES.iter().zip(files) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let reader = SerializedFileReader::new(file).unwrap();
        let _ = writeln!(all, "# {table}");
        for column in reader.metadata().file_metadata().schema_descr().columns() {
            let kind = column.logical_type_ref().map(|kind| format!(" {kind:?}")).unwrap_or_default();
            let _ = writeln!(all, "{} {}{kind}", column.name(), column.physical_type());
        }
        for row in reader.get_row_iter(None).unwrap() {
            let _ = writeln!(all, "{}", row.unwrap());
        }
    }
    crate::golden::assert_matches("export.parquet.txt", &all);
}

/// The names of the fields of Perfetto's `protos/perfetto/trace` by their path from `Trace`. A name with a dot at its
/// end is a message.
const FIELDS: [(&str, &str); 39] = [
    ("1", "packet."),
    ("1.8", "timestamp"),
    ("1.10", "trusted_packet_sequence_id"),
    ("1.11", "track_event."),
    ("1.11.3", "category_iids"),
    ("1.11.4", "debug_annotations."),
    ("1.11.4.1", "name_iid"),
    ("1.11.4.3", "uint_value"),
    ("1.11.4.17", "string_value_iid"),
    ("1.11.9", "type"),
    ("1.11.10", "name_iid"),
    ("1.11.11", "track_uuid"),
    ("1.11.30", "counter_value"),
    ("1.12", "interned_data."),
    ("1.12.1", "event_categories."),
    ("1.12.1.1", "iid"),
    ("1.12.1.2", "name"),
    ("1.12.2", "event_names."),
    ("1.12.2.1", "iid"),
    ("1.12.2.2", "name"),
    ("1.12.3", "debug_annotation_names."),
    ("1.12.3.1", "iid"),
    ("1.12.3.2", "name"),
    ("1.12.29", "debug_annotation_string_values."),
    ("1.12.29.1", "iid"),
    ("1.12.29.2", "str"),
    ("1.13", "sequence_flags"),
    ("1.60", "track_descriptor."),
    ("1.60.1", "uuid"),
    ("1.60.2", "name"),
    ("1.60.3", "process."),
    ("1.60.3.1", "pid"),
    ("1.60.3.2", "cmdline"),
    ("1.60.3.6", "process_name"),
    ("1.60.5", "parent_uuid"),
    ("1.60.8", "counter."),
    ("1.60.8.3", "unit"),
    ("1.60.11", "child_ordering"),
    ("1.60.12", "sibling_order_rank"),
];

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

/// Decodes a message of the wire format, one field per line. Each packet is one line.
fn decode(mut bytes: &[u8], path: &str, out: &mut String) {
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let at = if path.is_empty() { (key >> 3).to_string() } else { format!("{path}.{}", key >> 3) };
        let name = FIELDS.iter().find(|(path, _)| *path == at).map_or(at.as_str(), |(_, name)| *name);
        match key & 7 {
            0 => {
                let _ = write!(out, " {name}={}", varint(&mut bytes));
            }
            2 => {
                let length = varint(&mut bytes) as usize;
                let (inner, rest) = bytes.split_at(length);
                bytes = rest;
                match name.strip_suffix('.') {
                    Some("packet") => {
                        decode(inner, &at, out);
                        *out = out.trim_end().to_owned() + "\n";
                    }
                    Some(name) => {
                        let _ = write!(out, " {name} {{");
                        decode(inner, &at, out);
                        out.push_str(" }");
                    }
                    None => {
                        let _ = write!(out, " {name}={:?}", std::str::from_utf8(inner).unwrap());
                    }
                }
            }
            kind => panic!("field {at} of wire type {kind}"),
        }
    }
}

#[test]
fn perfetto_packets() {
    let trace = bytes(|process, out| perfetto(process, &Window::WHOLE, out, &mut |_| {}));
    let mut text = String::new();
    decode(&trace, "", &mut text);
    crate::golden::assert_matches("export.perfetto.txt", &text);
}
