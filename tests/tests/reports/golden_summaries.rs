//! Golden summaries. `UPDATE_GOLDEN=1 cargo test -p memtrace-tests --test reports golden_summaries` rewrites them.

use std::path::Path;

use memtrace_analysis::load::{Exit, Manifest, Process, Run};
use memtrace_analysis::{Summary, TextOptions, ToText, summarize};

fn summary(name: &str, code: i32) -> Summary {
    let recording = memtrace_tests::golden::load(&format!("{name}.json"));
    let manifest = Manifest {
        command: vec!["python".into(), format!("{name}.py")],
        exit: Exit { code: Some(code), signal: None },
        pid: Some(7),
        ..Manifest::default()
    };
    let process = Process::new(Path::new("7.mtr"), Box::new(recording), &manifest);
    let run = Run::from_processes(Path::new("run"), manifest, vec![process]);
    summarize(&run, &mut |_| {}).unwrap()
}

fn is_golden(name: &str, code: i32) {
    let text = summary(name, code).to_text(&TextOptions::default());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("golden/summaries/{name}.txt"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{}", path.display());
    assert!(text.lines().all(|line| line.chars().count() <= TextOptions::default().width));
}

#[test]
fn a_resnet() {
    is_golden("resnet_leak", 0);
}

#[test]
fn an_out_of_memory_error() {
    is_golden("oom", 1);
}

#[test]
fn adam_in_expandable_segments() {
    is_golden("expandable", 0);
}
