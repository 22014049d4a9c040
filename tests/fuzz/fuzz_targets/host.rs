//! Samples of main memory, beside a trace.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::load::Exit;
use memtrace_analysis::{RunFolder, host_kill, open_run, summarize};
use memtrace_fuzz::{Folder, analyse, device_trace};

fuzz_target!(init: Folder::here().put("7.mtr", &device_trace()), |data: &[u8]| {
    let folder = Folder::here();
    folder.put("host.jsonl", data);
    analyse(folder.path());
    let run = open_run(folder.path()).expect("the trace is sound");
    let summary = summarize(&run, &mut |_| {}).expect("the trace is sound");
    if let Some(host) = &summary.host {
        assert!(host.history.iter().all(|state| state.bytes <= host.peak.bytes), "{host:?}");
        assert!(host.history.is_sorted_by_key(|state| state.time_ns) && host.processes.len() <= 32, "{host:?}");
    }
    let folder = RunFolder::open(folder.path()).expect("the folder");
    host_kill(&folder, Exit { code: Some(137), signal: None });
});
