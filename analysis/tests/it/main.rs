//! Tests of the analysis on recordings made here: what it reads, concludes and writes.

mod categories;
mod check;
mod compile_contexts;
mod conclusions;
mod cuda_calls;
mod custom_categories;
mod damaged;
mod device_memory;
mod diff;
mod export_golden;
#[path = "../golden/mod.rs"]
mod golden;
mod hostile_names;
mod html;
mod job;
#[path = "../../../tests/src/json_schema.rs"]
#[allow(unreachable_pub, reason = "a public module of another crate")]
mod json_schema;
mod launch;
mod lines;
mod live;
mod many_errors;
mod modules_at_peak;
#[path = "../native_objects/mod.rs"]
mod native_objects;
mod native_stacks;
mod odd_snapshots;
mod page_data;
mod page_views;
mod phase_rows;
mod reading;
mod redact;
mod replay;
mod rotation;
mod round_trips;
mod run_folder;
mod schemas;
#[path = "../showcase/mod.rs"]
mod showcase;
#[path = "../small_trace/mod.rs"]
mod small_trace;
#[path = "../snapshot_files/mod.rs"]
mod snapshot_files;
mod snapshots;
mod streams;
mod symbols;
mod tensor_shapes;
#[path = "../training/mod.rs"]
mod training;
mod training_analysis;
mod typescript;
