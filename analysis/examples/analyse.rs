//! Analyzes a run folder as the launcher does, and prints the time of each part:
//!
//! ```text
//! cargo run --release -p memtrace-analysis --example analyse -- RUN
//! ```

#![expect(clippy::disallowed_macros, reason = "a tool for developers prints its results")]

use std::path::PathBuf;
use std::time::Instant;

use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::{TextOptions, ToText, open_run, summarize};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(std::env::args().nth(1).ok_or("RUN")?);
    let start = Instant::now();
    let run = open_run(&path)?;
    eprintln!("open       {:>7.1} ms", start.elapsed().as_secs_f64() * 1e3);
    let start = Instant::now();
    let events: u64 = run.processes().iter().map(|p| p.trace_index().total_events).sum();
    eprintln!("index      {:>7.1} ms   {events} events", start.elapsed().as_secs_f64() * 1e3);
    let start = Instant::now();
    let summary = summarize(&run, &mut |_| {})?;
    eprintln!("summary    {:>7.1} ms", start.elapsed().as_secs_f64() * 1e3);
    for process in run.processes() {
        let start = Instant::now();
        let out = std::env::temp_dir().join(format!("analyse-{}.pickle", process.pid()));
        let mut file = std::fs::File::create(&out)?;
        let report = snapshot(process, &mut file, &SnapshotOptions::default(), &mut |_| {})?;
        eprintln!("snapshot   {:>7.1} ms   {} bytes", start.elapsed().as_secs_f64() * 1e3, report.bytes);
    }
    print!("{}", summary.to_text(&TextOptions::default()));
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        eprintln!("{}", status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default());
    }
    Ok(())
}
