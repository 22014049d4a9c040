//! Samples of NVML, beside a trace whose device they sample.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::{open_run, summarize};
use memtrace_fuzz::{Folder, analyse, device_trace};

fuzz_target!(init: Folder::here().put("7.mtr", &device_trace()), |data: &[u8]| {
    let folder = Folder::here();
    folder.put("nvml.jsonl", data);
    analyse(folder.path());
    let run = open_run(folder.path()).expect("the trace is sound");
    let summary = summarize(&run, &mut |_| {}).expect("the trace is sound");
    let memory = summary.processes[0].devices[0].device_memory.as_ref().expect("the trace has readings");
    let states = [Some(&memory.at_peak), memory.at_allocated_peak.as_ref(), Some(&memory.at_end)];
    for state in states.into_iter().flatten() {
        let sum = state.parts.iter().map(|part| u128::from(part.bytes)).sum::<u128>();
        assert_eq!(sum, u128::from(state.used_bytes), "the parts are the memory in use: {state:?}");
    }
});
