//! A redacted run has nothing of the files beside the traces: other processes, compiled programs, pools, sources.

use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_tests::traced_program::{TracedProgram, memtrace, root};
use memtrace_trace::file::Reader;
use serde_json::Value;

/// The id of another process on the GPU.
const OTHER_PID: &str = "1987654321";
/// The words that must be in no file of the copy: names of the test's folder, job and processes, and of the program
/// that XLA compiled.
const SECRETS: [&str; 4] = ["acme", OTHER_PID, "me/train.py", "jit_train_step"];

/// All files below a folder, as paths from there.
fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            let list = if entry.is_dir() { &mut folders } else { &mut files };
            list.push(entry);
        }
    }
    let mut files: Vec<PathBuf> = files.iter().map(|path| path.strip_prefix(folder).unwrap().to_owned()).collect();
    files.sort();
    files
}

/// The bytes of a file, and the definitions of a trace, which are compressed in it.
fn content(path: &Path) -> Vec<u8> {
    let mut content = std::fs::read(path).expect("a file");
    if path.extension().is_some_and(|extension| extension == "mtr") {
        let reader = Reader::open(path).expect("a trace");
        assert!(reader.damage().is_none(), "{:?}", reader.damage());
        content.extend_from_slice(format!("{:?} {}", reader.definitions(), reader.info()).as_bytes());
    }
    content
}

/// The secrets that a file of the folder has, with the first file that has each.
fn found(folder: &Path, pci: &str) -> Vec<(String, PathBuf)> {
    let contents: Vec<_> = files(folder).into_iter().map(|path| (content(&folder.join(&path)), path)).collect();
    let has = |bytes: &[u8], word: &str| bytes.windows(word.len()).any(|window| window == word.as_bytes());
    let first = |word: &str| contents.iter().find(|(bytes, _)| has(bytes, word)).map(|(_, path)| path.clone());
    let words = SECRETS.into_iter().chain([pci]);
    words.filter_map(|word| Some((word.to_owned(), first(word)?))).collect()
}

#[test]
fn nothing_beside_the_traces_gets_into_a_copy() {
    let dump = root().join("tests/golden/xla/jax-0.12-cpu/xla");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
    let folder = tempfile::Builder::new().prefix("acme-").tempdir().expect("a folder");
    let (run, copy) = (folder.path().join("run"), folder.path().join("copy"));
    std::os::unix::fs::symlink(root().join("tests/programs/pools"), folder.path().join("acme_pools")).expect("a link");
    let command = ["python", "acme_pools/program.py", dump.to_str().expect("UTF-8")];
    let mut program = TracedProgram::command(&command)
        .over_simcuda()
        .env("SIMCUDA_PROCESSES", format!("{OTHER_PID}:/usr/bin/acme-infer:1G"))
        .env("MEMTRACE_NVML_LIBRARY", target.join("simcuda/lib/libnvidia-ml.so.1"))
        .env("SLURM_JOB_NAME", "acme-nightly");
    for option in ["--pools", "read", "--xla-dump", "--holders", "--cycles", "--stacks", "both", "--job", "acme-17"] {
        program = program.option(option);
    }
    let output = program.prepare(Some(&run)).current_dir(folder.path()).output().expect("the launcher starts");
    assert!(output.status.success(), "{output:?}");
    let original = files(&run);
    for name in ["nvml.jsonl", "sources.json", "symbols.json", "report.html", "run.json"] {
        assert!(original.contains(&name.into()), "{name}: {original:?}");
    }
    let any = |start: &str| original.iter().any(|path| path.to_string_lossy().starts_with(start));
    assert!(any("pools-") && any("xla/"), "{original:?}");
    let samples = std::fs::read_to_string(run.join("nvml.jsonl")).expect("samples of NVML");
    let lines = samples.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let device = lines.into_iter().find(|line| line["kind"] == "device").expect("a device");
    // Domains have four digits or eight.
    let (_, pci) = device["pci"].as_str().and_then(|pci| pci.split_once(':')).expect("a bus id");
    assert_eq!(found(&run, pci).len(), SECRETS.len() + 1, "the run has what a copy must not have");

    let output = Command::new(memtrace()).arg("redact").arg(&run).arg("-o").arg(&copy).output().expect("memtrace");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(found(&copy, pci), [], "{:?}", files(&copy));
    let trace = original.iter().find(|path| path.extension().is_some_and(|extension| extension == "mtr"));
    let trace = trace.expect("a trace").clone();
    let mut expected: Vec<PathBuf> =
        ["report.html", "run.json", "summary.json", "summary.txt", "symbols.json"].iter().map(Into::into).collect();
    expected.extend([trace.with_extension("pickle"), trace]);
    expected.sort();
    assert_eq!(files(&copy), expected);
}
