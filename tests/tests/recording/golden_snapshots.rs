//! Compares the snapshot writer with snapshots that PyTorch itself wrote on an H200: the same events give the same
//! file.

use std::path::Path;
use std::process::Command;

use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::load::{Manifest, Process};
use memtrace_tests::golden::{golden, load};

fn the_same_file_comes_out(name: &str) {
    let path = golden(name);
    let process = Process::new(Path::new("7.mtr"), Box::new(load(name)), &Manifest::default());
    let folder = tempfile::tempdir().unwrap();
    let ours = folder.path().join("7.pickle");
    let mut file = std::fs::File::create(&ours).unwrap();
    let report = snapshot(&process, &mut file, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(report.bytes, std::fs::metadata(&ours).unwrap().len());
    let output = Command::new("python3").arg(golden("compare.py")).arg(&ours).arg(&path).output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_resnet_with_splits_and_merges() {
    the_same_file_comes_out("resnet_leak.json");
}

#[test]
fn an_out_of_memory_error() {
    the_same_file_comes_out("oom.json");
}

#[test]
fn expandable_segments() {
    the_same_file_comes_out("expandable.json");
}
