//! Linkage names, as any object may contain them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::symbols::FunctionName;

fuzz_target!(|data: &[u8]| {
    if let Ok(name) = std::str::from_utf8(data) {
        let name = FunctionName::of(name);
        assert!(name.full.len() <= data.len().max(64 << 10) * 2);
    }
});
