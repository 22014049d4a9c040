//! The runs of a job: `run.json` and `summary.json` of up to three run folders, separated by zero bytes. Each run has a
//! sound trace too.
#![no_main]

use std::io;

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::{JobOptions, TextOptions, ToText, job_html, job_report};
use memtrace_fuzz::{Folder, device_trace};

const RUNS: [&str; 3] = ["node0/run", "node1/run", "other"];

fn init() {
    RUNS.iter().for_each(|run| Folder::here().put(&format!("{run}/7.mtr"), &device_trace()));
}

fuzz_target!(init: init(), |data: &[u8]| {
    let folder = Folder::here();
    let mut files = data.splitn(2 * RUNS.len(), |byte| *byte == 0);
    for run in RUNS {
        for file in ["run.json", "summary.json"] {
            folder.put(&format!("{run}/{file}"), files.next().unwrap_or_default());
        }
    }
    let options = JobOptions { job: None, compares: true };
    // Runs of several jobs are an error.
    let Ok(report) = job_report(folder.path(), &options, &mut |_| {}) else { return };
    let text = report.to_text(&TextOptions::default());
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "nothing reaches a terminal but text");
    serde_json::to_string(&report).expect("a report is JSON");
    job_html(&report, &mut io::sink()).expect("a page");
});
