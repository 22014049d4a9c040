//! The `memtrace` command: its command line, transparency, signals, the drain loop, `memtrace doctor`.

mod attach;
mod attach_safety;
mod categories;
mod clean;
mod command_line;
mod docs;
mod doctor;
mod drain;
mod dry_run;
mod dry_run_hostile;
mod dry_run_other_torch;
mod dry_run_servers;
mod dry_run_tries;
mod dry_run_values;
mod explain;
mod faults;
mod hostile_clients;
mod http;
mod inputs;
#[path = "../launcher_support/mod.rs"]
mod launcher_support;
mod metric_categories;
mod metric_readers;
mod metrics;
#[path = "../../../analysis/tests/native_objects/mod.rs"]
mod native_objects;
#[path = "../../../analysis/tests/it/page_data.rs"]
#[allow(dead_code, reason = "every test binary uses its part")]
mod page_data;
mod rotation;
mod running;
mod serve;
mod signals;
mod suspend;
mod symbols;
mod transparency;
