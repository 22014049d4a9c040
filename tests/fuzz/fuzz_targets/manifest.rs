//! `run.json` and, after a zero byte, a trace's info object. Whatever they contain, the traces are read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_fuzz::{Folder, analyse};
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{End, Writer};

fuzz_target!(|data: &[u8]| {
    let (manifest, info) = data.split_at(data.iter().position(|byte| *byte == 0).unwrap_or(data.len()));
    let info = String::from_utf8_lossy(info.get(1..).unwrap_or_default());
    let mut writer = Writer::new(Vec::new(), &info).expect("memory");
    writer
        .event(&Event { seq: 1, size: 512, addr: 4096, device: 0, action: Action::Alloc, ..Event::EMPTY })
        .expect("memory");
    let trace = writer.finish(&End { wait_status: None, reason: "exited".into(), ..End::default() }).expect("memory");
    let folder = Folder::here();
    folder.put("7.mtr", &trace);
    folder.put("run.json", manifest);
    analyse(folder.path());
    assert!(memtrace_analysis::open_run(folder.path()).is_ok_and(|run| run.processes().len() == 1));
});
