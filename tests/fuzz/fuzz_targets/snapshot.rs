//! A PyTorch snapshot, byte for byte: pickle or JSON, gzipped or not, through the reader and the whole analysis.
#![no_main]

use std::io;

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::{TextOptions, ToText, open_run, summarize};
use memtrace_fuzz::Folder;

fuzz_target!(|data: &[u8]| {
    let folder = Folder::here();
    folder.put("a.pickle", data);
    let Ok(run) = open_run(folder.path().join("a.pickle")) else { return };
    let [process] = run.processes() else { panic!("a snapshot is of one process") };
    let mut read = 0;
    process.recording().stream(&mut |events| {
        for e in events {
            read += 1;
            assert_eq!(e.seq, read, "numbered without gaps");
        }
    });
    assert_eq!(read, process.recording().event_count());
    assert_eq!(process.recording().event_counts().0.events(), read);
    let summary = summarize(&run, &mut |_| {}).expect("a summary");
    let text = summary.to_text(&TextOptions::default());
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "nothing reaches a terminal but text");
    let mut out = Vec::new();
    snapshot(process, &mut out, &SnapshotOptions::default(), &mut |_| {}).expect("memory");
    // The reader must accept our own snapshot completely.
    folder.put("b.pickle", &out);
    let again = open_run(folder.path().join("b.pickle")).expect("our own snapshot");
    assert!(again.problems().is_empty());
    snapshot(&again.processes()[0], &mut io::sink(), &SnapshotOptions::default(), &mut |_| {}).expect("memory");
});
