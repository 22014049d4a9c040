//! Golden text for every export format, so that any change to a file for other programs shows up here first.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it export_golden` rewrites the golden files.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};

use crate::showcase::PLAIN;
use memtrace_analysis::Process;
use memtrace_analysis::export::{
    FlameFormat, FlameWeight, TABLES, TableLayout, TimelineFormat, Window, blocks_csv, flame_graph, perfetto, pprof,
    tables, timeline,
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
const PERFETTO: [(&str, &str); 39] = [
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

/// The names of the fields of pprof's `profile.proto`, as above. A name with an asterisk at its end is a list of
/// numbers.
const PPROF: [(&str, &str); 34] = [
    ("1", "sample_type."),
    ("1.1", "type"),
    ("1.2", "unit"),
    ("2", "sample."),
    ("2.1", "location_id*"),
    ("2.2", "value*"),
    ("2.3", "label."),
    ("2.3.1", "key"),
    ("2.3.2", "str"),
    ("3", "mapping."),
    ("3.1", "id"),
    ("3.5", "filename"),
    ("3.7", "has_functions"),
    ("3.8", "has_filenames"),
    ("3.9", "has_line_numbers"),
    ("4", "location."),
    ("4.1", "id"),
    ("4.2", "mapping_id"),
    ("4.4", "line."),
    ("4.4.1", "function_id"),
    ("4.4.2", "line"),
    ("5", "function."),
    ("5.1", "id"),
    ("5.2", "name"),
    ("5.4", "filename"),
    ("6", "string"),
    ("9", "time_nanos"),
    ("10", "duration_nanos"),
    ("11", "period_type."),
    ("11.1", "type"),
    ("11.2", "unit"),
    ("12", "period"),
    ("13", "comment*"),
    ("14", "default_sample_type"),
];

/// Decodes a message of the wire format. Each field of the file is one line.
fn decode(mut bytes: &[u8], fields: &[(&str, &str)], path: &str, out: &mut String) {
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let at = if path.is_empty() { (key >> 3).to_string() } else { format!("{path}.{}", key >> 3) };
        let name = fields.iter().find(|(path, _)| *path == at).map_or(at.as_str(), |(_, name)| *name);
        match key & 7 {
            0 => {
                let _ = write!(out, " {name}={}", varint(&mut bytes));
            }
            2 => {
                let length = varint(&mut bytes) as usize;
                let (inner, rest) = bytes.split_at(length);
                bytes = rest;
                match name.strip_suffix('.') {
                    Some("packet") => decode(inner, fields, &at, out),
                    Some(name) => {
                        let _ = write!(out, " {name} {{");
                        decode(inner, fields, &at, out);
                        out.push_str(" }");
                    }
                    None if name.ends_with('*') => {
                        let mut inner = inner;
                        let _ = write!(out, " {}", name.replace('*', "="));
                        while !inner.is_empty() {
                            let _ = write!(out, "{} ", varint(&mut inner));
                        }
                        out.truncate(out.trim_end().len());
                    }
                    None => {
                        let _ = write!(out, " {name}={:?}", std::str::from_utf8(inner).unwrap());
                    }
                }
            }
            kind => panic!("field {at} of wire type {kind}"),
        }
        if path.is_empty() {
            *out = out.trim_end().to_owned() + "\n";
        }
    }
}

#[test]
fn perfetto_packets() {
    let trace = bytes(|process, out| perfetto(process, &Window::WHOLE, out, &mut |_| {}));
    let mut text = String::new();
    decode(&trace, &PERFETTO, "", &mut text);
    crate::golden::assert_matches("export.perfetto.txt", &text);
}

#[test]
fn pprof_samples() {
    let file = bytes(|process, out| pprof(process, &Window::WHOLE, out, &mut |_| {}));
    let mut profile = Vec::new();
    flate2::read::GzDecoder::new(&*file).read_to_end(&mut profile).unwrap();
    let mut text = String::new();
    decode(&profile, &PPROF, "", &mut text);
    let text = text.replace(concat!("memtrace ", env!("CARGO_PKG_VERSION")), "memtrace VERSION");
    crate::golden::assert_matches("export.pprof.txt", &text);
}
