//! The figures that a process wrote about its memory pools, for a process that uses memory of JAX and CuPy.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_fuzz::{Folder, analyse, device_trace};

fuzz_target!(init: Folder::here().put("7.mtr", &device_trace()), |data: &[u8]| {
    let folder = Folder::here();
    folder.put("pools-7.json", data);
    analyse(folder.path());
});
