//! The files that XLA wrote about a compiled program, separated by zero bytes: its buffer assignment, live ranges,
//! memory usage and instructions.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::xla::read_xla_dump;
use memtrace_fuzz::{Folder, analyse, device_trace};

const PROGRAM: &str = "xla/module_0008.jit_train_step.sm_9.0a_gpu_after_optimizations";
const ENDINGS: [&str; 4] = ["-buffer-assignment.txt", "-live-range.txt", "-memory-usage-report.txt", ".txt"];

fuzz_target!(init: Folder::here().put("7.mtr", &device_trace()), |data: &[u8]| {
    let folder = Folder::here();
    let mut files = data.splitn(ENDINGS.len(), |byte| *byte == 0);
    for ending in ENDINGS {
        folder.put(&format!("{PROGRAM}{ending}"), files.next().unwrap_or_default());
    }
    let dump = read_xla_dump(folder.path()).expect("the folder is there");
    assert!(dump.programs.len() == 1 || dump.problems.len() == 1, "read or reported: {dump:?}");
    analyse(folder.path());
});
