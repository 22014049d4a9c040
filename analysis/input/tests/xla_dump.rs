//! XLA's dumps, as JAX 0.12 wrote them on a CPU and JAX 0.11 on an H100, and damaged copies of them.

use std::fs;
use std::path::{Path, PathBuf};

use memtrace_input::xla::{BufferKind, XlaDump, XlaProgram, read_xla_dump};
use tempfile::TempDir;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/xla").join(name)
}

fn copy(name: &str) -> TempDir {
    let run = tempfile::tempdir().unwrap();
    fs::create_dir(run.path().join("xla")).unwrap();
    for file in fs::read_dir(golden(name).join("xla")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), run.path().join("xla").join(file.file_name())).unwrap();
    }
    run
}

fn train_step(dump: &XlaDump) -> &XlaProgram {
    dump.programs.iter().find(|program| program.name == "jit_train_step").expect("the golden files have it")
}

const TRAIN_STEP: &str = "module_0008.jit_train_step.cpu_after_optimizations";

#[test]
fn a_program_has_the_sums_that_xla_states() {
    let dump = read_xla_dump(&golden("jax-0.12-cpu")).unwrap();
    assert_eq!((dump.programs.len(), dump.problems.len()), (2, 0));
    let program = train_step(&dump);
    assert_eq!((program.module.0, program.is_for_gpu, program.unknown_lines), (8, false, 0));
    // `Total bytes: 6815796` of the memory usage report.
    assert_eq!((program.total_bytes(), program.stated_bytes), (6_815_796, Some(6_815_796)));
    // The figures of `compiled.memory_analysis()`: arguments of 1 MiB and three times 256 KiB.
    assert_eq!(program.bytes_of(BufferKind::Argument), (1 << 20) + 3 * (1 << 18));
    assert_eq!(program.bytes_of(BufferKind::Temporary), 4 << 20);
    assert_eq!(program.bytes_of(BufferKind::Output), 3 * (1 << 18) + 32 + 4);
    let peak = program.peak.as_ref().unwrap();
    // `Stack trace breakdown for peak usage: 6 029 320 bytes` of the live ranges.
    assert_eq!(peak.buffers.iter().map(|buffer| buffer.live.size_bytes).sum::<u64>(), 6_029_320);
    assert!(peak.is_sum_right);
    let tanh = peak.buffers.iter().find(|buffer| &*buffer.live.instruction == "wrapped_tanh").unwrap();
    assert_eq!((tanh.kind, tanh.operation.as_str()), (Some(BufferKind::Temporary), "jit(train_step)/jvp()/tanh"));
    let frames: Vec<_> = tanh.frames.iter().map(|f| format!("{}:{} {}", f.filename, f.line, f.function)).collect();
    let file = "/home/me/train.py";
    let calls = ["8 layer", "13 loss", "19 train_step", "26 <module>"];
    assert_eq!(frames, calls.map(|call| format!("{file}:{call}")));
    let argument = peak.buffers.iter().find(|buffer| &*buffer.live.instruction == "params_1_.1").unwrap();
    assert_eq!((argument.kind, argument.operation.as_str()), (Some(BufferKind::Argument), "params[1]"));
}

#[test]
fn a_program_of_a_gpu_is_read_too() {
    let dump = read_xla_dump(&golden("jax-0.11-h100")).unwrap();
    assert_eq!((dump.programs.len(), dump.problems.len()), (2, 0));
    let step = train_step(&dump);
    // `Total bytes: 9961556`, and `Stack trace breakdown for peak usage: 8 388 612 bytes`.
    assert_eq!((step.total_bytes(), step.stated_bytes), (9_961_556, Some(9_961_556)));
    let peak = step.peak.as_ref().unwrap();
    assert_eq!(peak.buffers.iter().map(|buffer| buffer.live.size_bytes).sum::<u64>(), 8_388_612);
    assert!(peak.is_sum_right && peak.buffers.iter().all(|buffer| buffer.kind.is_some()));
    assert!(dump.programs.iter().all(|program| program.is_for_gpu && program.unknown_lines == 0));
    let program = dump.programs.iter().find(|program| program.name == "jit_multiply").unwrap();
    assert_eq!((program.name.as_str(), program.module.0, program.is_for_gpu), ("jit_multiply", 27_144, true));
    assert_eq!((program.total_bytes(), program.stated_bytes), (33_554_436, Some(33_554_436)));
    let peak = program.peak.as_ref().unwrap();
    let output = peak.buffers.iter().find(|buffer| buffer.kind == Some(BufferKind::Output)).unwrap();
    assert_eq!((output.live.size_bytes, output.operation.as_str()), (16 << 20, "jit(multiply)/mul"));
    assert_eq!(output.frames.first().map(|frame| (frame.line, &*frame.function)), Some((18, "Block.__call__")));
}

#[test]
fn damaged_files_are_reported_with_help() {
    let run = copy("jax-0.12-cpu");
    let path = run.path().join(format!("xla/{TRAIN_STEP}-buffer-assignment.txt"));
    fs::write(&path, "not an assignment\n").unwrap();
    let dump = read_xla_dump(run.path()).unwrap();
    let expected = format!(
        "cannot read xla/{TRAIN_STEP}-buffer-assignment.txt: it is no buffer assignment of XLA; record again with \
         memtrace --xla-dump, or remove the file"
    );
    assert_eq!((dump.problems, dump.programs.len()), (vec![expected], 1));
    // A link could lead anywhere.
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    let dump = read_xla_dump(run.path()).unwrap();
    assert!(dump.problems[0].contains("it is a symbolic link"), "{:?}", dump.problems);
}

#[test]
fn a_wrong_sum_is_found() {
    let run = copy("jax-0.12-cpu");
    let path = run.path().join(format!("xla/{TRAIN_STEP}-buffer-assignment.txt"));
    let text = fs::read_to_string(&path)
        .unwrap()
        .replace("size 4194304, page 0, preallocated", "size 4194303, page 0, preallocated");
    fs::write(&path, text).unwrap();
    let path = run.path().join(format!("xla/{TRAIN_STEP}-live-range.txt"));
    let text = fs::read_to_string(&path).unwrap().replace("x.1{}: 1048576 bytes", "x.1{}: 1048577 bytes");
    fs::write(&path, text).unwrap();
    let dump = read_xla_dump(run.path()).unwrap();
    let program = train_step(&dump);
    assert_ne!(Some(program.total_bytes()), program.stated_bytes);
    assert!(!program.peak.as_ref().unwrap().is_sum_right);
}

/// Cuts and changed bytes at 40 places of each file: no panic, no endless loop, and sums never overflow.
#[test]
fn damage_does_no_harm() {
    for ending in ["-buffer-assignment.txt", "-live-range.txt", "-memory-usage-report.txt", ".txt"] {
        let run = copy("jax-0.12-cpu");
        let path = run.path().join(format!("xla/{TRAIN_STEP}{ending}"));
        let whole = fs::read(&path).unwrap();
        let step = (whole.len() / 40).max(1);
        for at in (0..whole.len()).step_by(step) {
            for damaged in
                [whole[..at].to_vec(), changed(&whole, at, b'9'), changed(&whole, at, 0xff), changed(&whole, at, b'"')]
            {
                fs::write(&path, damaged).unwrap();
                let dump = read_xla_dump(run.path()).unwrap();
                assert!(dump.programs.len() + dump.problems.len() >= 2);
            }
        }
    }
}

fn changed(bytes: &[u8], at: usize, byte: u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] = byte;
    bytes
}

#[test]
fn hostile_sizes_and_lines_stay_within_bounds() {
    let run = copy("jax-0.12-cpu");
    let assignment = run.path().join(format!("xla/{TRAIN_STEP}-buffer-assignment.txt"));
    let most = u64::MAX;
    let mut text =
        format!("BufferAssignment:\nallocation 0: size {most}, constant:\nallocation 1: size {most}, constant:\n");
    text.push_str(&"x".repeat(3 << 20));
    fs::write(&assignment, &text).unwrap();
    let dump = read_xla_dump(run.path()).unwrap();
    let program = dump.programs.iter().find(|program| program.module.0 == 8).unwrap();
    assert_eq!(program.total_bytes(), most);
    // The long line is unknown, and it was cut.
    assert_eq!(program.unknown_lines, 2);
    // A file of holes stores nothing, so reading it may cost next to nothing.
    let sparse = fs::File::create(&assignment).unwrap();
    sparse.set_len(64 << 30).unwrap();
    let dump = read_xla_dump(run.path()).unwrap();
    assert!(dump.problems[0].contains("more work than the limit"), "{:?}", dump.problems);
}

#[test]
fn a_run_without_a_dump_has_none() {
    let run = tempfile::tempdir().unwrap();
    assert!(read_xla_dump(run.path()).is_none());
    fs::create_dir(run.path().join("xla")).unwrap();
    assert!(read_xla_dump(run.path()).unwrap().programs.is_empty());
}
