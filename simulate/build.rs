//! Packs the measured convolutions for `src/cudnn/convolution.rs`: one record each, of little-endian numbers.

use flate2::read::GzDecoder;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::{env, fs};

const MEASUREMENTS: &str = "measurements/convolutions.json.gz";

fn main() {
    println!("cargo::rerun-if-changed={MEASUREMENTS}");
    println!("cargo::rerun-if-changed=build.rs");
    let folder = |name: &str| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    let records = pack(&folder("CARGO_MANIFEST_DIR").join(MEASUREMENTS));
    fs::write(folder("OUT_DIR").join("convolutions.bin"), records).expect("cargo's folder is writable");
}

/// The records of all rows.
fn pack(measurements: &Path) -> Vec<u8> {
    let file = fs::File::open(measurements).unwrap_or_else(|e| panic!("cannot read {}: {e}", measurements.display()));
    let file: Value = serde_json::from_reader(GzDecoder::new(file)).expect("the measurements are JSON");
    let columns = file["columns"].as_array().expect("a list of names");
    let mut records = Vec::new();
    for row in file["rows"].as_array().expect("a list of rows") {
        let column = |name: &str| &row[columns.iter().position(|column| column == name).expect("a known column")];
        pack_row(&column, &mut records);
    }
    records
}

fn pack_row<'a>(column: &dyn Fn(&str) -> &'a Value, records: &mut Vec<u8>) {
    let number = |name: &str| column(name).as_u64().expect("a number");
    let list = |name: &str| column(name).as_array().expect("a list").iter().map(|n| n.as_u64().expect("a number"));
    let data_type = match column("data_type").as_str() {
        Some("float32") => 0,
        Some("float16") => 2,
        Some("bfloat16") => 9,
        other => panic!("unknown data type {other:?}"),
    };
    let dimensions = list("stride").count() as u8;
    records.extend([data_type, number("channels_last") as u8, number("transposed") as u8, dimensions]);
    for n in [number("groups")].into_iter().chain(list("input")).chain(list("weight").take(2)) {
        records.extend((n as u16).to_le_bytes());
    }
    let small = list("weight").skip(2).chain(list("stride")).chain(list("padding")).chain(list("dilation"));
    records.extend(small.map(|n| n as u8));
    for name in ["forward", "backward_input", "backward_weight"] {
        records.extend((number(name) as u32).to_le_bytes());
    }
    let benchmarked = column("benchmarked").as_array();
    records.push(u8::from(benchmarked.is_some()));
    for bytes in benchmarked.into_iter().flatten() {
        // Some have more than 4 GiB.
        records.extend(&bytes.as_u64().expect("a number").to_le_bytes()[..5]);
    }
}
