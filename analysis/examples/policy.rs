//! Replays the allocator's policy over the recordings of a run:
//! `cargo run --release --example policy -- RUN [SETTINGS]`.

#![expect(clippy::disallowed_macros, reason = "a tool for developers prints its results")]

use memtrace_analysis::model::AllocatorSettings;
use memtrace_analysis::open_run;
use memtrace_analysis::passes::{PolicyReplay, WhatIfQuery};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let run = open_run(std::path::Path::new(&arguments.next().ok_or("RUN")?))?;
    let settings = AllocatorSettings::parse(&arguments.next().unwrap_or_default());
    for process in run.processes() {
        let question = WhatIfQuery { device: 0, settings: settings.clone(), allowed: None, limit: u64::MAX, oom: None };
        let mut replay = PolicyReplay::new(question);
        let began = std::time::Instant::now();
        process.recording().stream(&mut |events| events.iter().for_each(|e| replay.observe(e)));
        println!("{:#?}\n{:?}", replay.finish(None), began.elapsed());
    }
    Ok(())
}
