//! Run folders: `run.json`, `symbols.json`, the file beside a rotated trace, and many processes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use memtrace_input::load::Manifest;
use memtrace_input::symbols::Symbols;
use memtrace_input::{KeptBlock, KeptState, RunFolder, open_run};
use memtrace_trace::definition::Definition;
use memtrace_trace::file::{End, Writer};
use memtrace_trace::ids::{FrameId, ModuleId, StackId};
use memtrace_trace::rotation::Rotation;

use crate::measured::{measure, open_measured};

fn write_trace(folder: &Path, name: &str, info: &str) {
    let mut definitions = Vec::new();
    Definition::Module { id: ModuleId(1), path: "/nowhere/a.so", build_id: "01" }.encode(&mut definitions);
    Definition::NativeFrame { id: FrameId(1), module: ModuleId(1), address: 16 }.encode(&mut definitions);
    Definition::Stack { id: StackId(1), parent: StackId(0), frame: FrameId(1) }.encode(&mut definitions);
    let mut writer = Writer::new(File::create(folder.join(name)).unwrap(), info).unwrap();
    writer.definition(&definitions).unwrap();
    writer.finish(&End { reason: "exited".into(), ..End::default() }).unwrap();
}

#[test]
fn json_files_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    write_trace(folder.path(), "7.mtr", "{}");
    let list = |start: &str, item: &str, end: &str| [start, &item.repeat(1 << 17), end].concat();
    let texts = [
        list("{\"processes\":[", "{},", "{}]}"),
        list("{\"command\":[", "\"\",", "\"\"]}"),
        list("{\"extra\":[", "[],", "1]}"),
        list("{\"extra\":[", "{\"\":{}},", "1]}"),
        "[".repeat(1 << 20),
        list("", "{\"a\":", ""),
        list("{\"version\":1,\"objects\":[", "{\"path\":\"\"},", "{\"path\":\"\"}]}"),
        list("{\"version\":1,\"objects\":[{\"path\":\"\",\"places\":{\"1\":[", "[0,0,0],", "[0,0,0]]}}]}"),
    ];
    for name in ["run.json", "symbols.json"] {
        for text in &texts {
            std::fs::write(folder.path().join(name), text).unwrap();
            let (run, _) = open_measured(folder.path(), text.len());
            assert_eq!(run.unwrap().processes().len(), 1);
        }
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
}

#[test]
fn holes_and_large_json_files_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    write_trace(folder.path(), "7.mtr", "{}");
    for name in ["run.json", "symbols.json"] {
        let file = File::create(folder.path().join(name)).unwrap();
        file.write_all_at(b"{\"a\":1}", 0).unwrap();
        for (len, reason) in
            [(200 << 20, "is a sparse file"), (1 << 30, "has 1073741824 bytes, more than memtrace writes")]
        {
            file.set_len(len).unwrap();
            let (run, cost) = measure(|| open_run(folder.path()).unwrap());
            assert!(run.problems().iter().any(|problem| problem.text == reason), "{:?}", run.problems());
            assert!(cost.peak < 16 << 20, "{cost:?}");
        }
        file.set_len(7).unwrap();
    }
}

/// The file beside a rotated trace, with a valid checksum.
#[test]
fn states_of_rotated_traces_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let mut definitions = Vec::new();
    let rotation = Rotation { first_seq: 3, dropped: 2, ..Rotation::default() };
    Definition::Rotation { rotation }.encode(&mut definitions);
    let mut writer = Writer::new(File::create(folder.path().join("7.mtr")).unwrap(), "{}").unwrap();
    writer.definition(&definitions).unwrap();
    writer.finish(&End { reason: "exited".into(), ..End::default() }).unwrap();
    let write = |states: &str| {
        let header = format!("{{\"version\":1,\"crc32\":{}}}\n", crc32fast::hash(states.as_bytes()));
        std::fs::write(folder.path().join("7.kept.jsonl"), header + states).unwrap();
        states.len()
    };
    let state = KeptState { rotation, blocks: vec![KeptBlock::default()], ..KeptState::default() };
    let file = String::from_utf8(state.to_file(None)).unwrap();
    let line = file.split_once('\n').unwrap().1;
    let block = r#"[0,null,"",0,0,0,"",null]"#;
    assert!(line.contains(block), "{line}");
    let blocks = line.replace(block, &[block; 100_000].join(","));
    let (run, _) = open_measured(folder.path(), write(&blocks));
    assert_eq!(run.unwrap().processes()[0].recording().kept_state().unwrap().blocks.len(), 100_000);
    let of_another = blocks.replace("\"first_seq\":3", "\"first_seq\":4");
    let hostile = [
        of_another.repeat(4),
        "\n".repeat(1 << 20),
        "[".repeat(1 << 20),
        "{\"more\":[[[".repeat(1 << 17),
        line.replace(block, &"[],".repeat(1 << 18)),
        line.replace(block, &format!("[0,null,\"{}\"", "x".repeat(1 << 22))),
    ];
    for states in &hostile {
        let (run, _) = open_measured(folder.path(), write(states));
        let run = run.unwrap();
        assert!(run.processes()[0].recording().kept_state().is_none());
        assert!(run.problems()[0].path.ends_with("7.kept.jsonl"), "{:?}", run.problems());
    }
}

/// Merging is not linear: each entry of an object would rebuild all entries before.
#[test]
fn an_object_that_occurs_again_is_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let object = |at: u32| format!("{{\"path\":\"a\",\"strings\":[\"f\"],\"places\":{{\"{at:x}\":[[0,0,1]]}}}}");
    let objects: Vec<String> = (0..20_000).map(object).collect();
    let text = format!("{{\"version\":1,\"objects\":[{}]}}", objects.join(","));
    std::fs::write(folder.path().join("symbols.json"), &text).unwrap();
    let run_folder = RunFolder::open(folder.path()).unwrap();
    let (symbols, cost) = measure(|| Symbols::read(&run_folder).unwrap().unwrap());
    assert!(cost.total < 64 * text.len(), "{} bytes: {cost:?}", text.len());
    let written = symbols.to_json();
    assert!(written.contains("more than one entry for this object") && written.len() < 1000, "{written}");
}

/// Each process is looked up in the manifest, and named among all processes that inherited its rank.
#[test]
fn many_processes_take_linear_time() {
    let folder = tempfile::tempdir().unwrap();
    for pid in 1..=300 {
        write_trace(folder.path(), &format!("{pid}.mtr"), &format!("{{\"pid\":{pid},\"env\":{{\"RANK\":\"0\"}}}}"));
    }
    let processes: Vec<String> =
        (1..=100_000).map(|pid| format!("{{\"pid\":{pid},\"ppid\":{}}}", u32::from(pid > 1))).collect();
    let manifest = format!("{{\"pid\":1,\"processes\":[{}]}}", processes.join(","));
    std::fs::write(folder.path().join("run.json"), &manifest).unwrap();
    let (run, _) = open_measured(folder.path(), manifest.len());
    let run = run.unwrap();
    assert_eq!(run.processes().len(), 300);
    assert_eq!(run.process_names()[..2], ["rank0", "rank0-2"]);
    let read = Manifest::read(&RunFolder::open(folder.path()).unwrap()).unwrap().unwrap();
    assert_eq!(read.process(100_000).unwrap().ppid, Some(1));
}
