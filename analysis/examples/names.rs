//! Prints the names of a run's allocations: event number, kind, names, data type and shape, and the modules.
//!
//! ```text
//! cargo run --release -p memtrace-analysis --example names -- RUN
//! ```

#![expect(clippy::disallowed_macros, reason = "a tool for developers prints its results")]

use std::path::PathBuf;
use std::time::Instant;

use memtrace_analysis::model::Names;
use memtrace_analysis::open_run;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(std::env::args().nth(1).ok_or("RUN")?);
    for process in open_run(&path)?.processes() {
        let start = Instant::now();
        let names = Names::of_process(process);
        eprintln!("names      {:>7.1} ms", start.elapsed().as_secs_f64() * 1e3);
        process.recording().stream(&mut |events| {
            for event in events {
                if let Some(named) = names.of_allocation(event.seq) {
                    println!("{}\t{:?}\t{}\t{}\t{}", event.seq, named.kind, named.text(), named.shape, event.size);
                }
            }
        });
        let definitions = process.definitions();
        for module in &definitions.nn_names {
            println!("module {:x} {} {:?} after {}", module.object, module.class, module.name, module.seq);
        }
        let (tensor_names, unmatched) = (definitions.tensor_names.len(), names.unmatched());
        println!(
            "{} allocations have names; {unmatched} of {tensor_names} names have no allocation",
            names.named_allocations()
        );
    }
    Ok(())
}
