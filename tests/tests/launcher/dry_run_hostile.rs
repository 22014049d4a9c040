//! Files that the program of a dry run leaves for memtrace: pipes, links, files without an end, folders in the place of
//! others. No PyTorch is needed: the programs are shell scripts.

use std::io::Read;
use std::mem::MaybeUninit;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::launcher_support::*;

/// The most memory that any process of a dry run takes, in KiB.
const MAX_MEMORY: i64 = 200 << 10;

/// How a command ended.
struct Ended {
    code: i32,
    stdout: String,
    stderr: String,
    /// The most memory that it or a process that it waited for took, in KiB.
    memory: i64,
}

/// Runs `memtrace dry-run OPTIONS -- sh -c SCRIPT sh {bs}` in a folder. In the script, `$run` is the run folder.
#[expect(clippy::zombie_processes, reason = "`wait4` below waits for it, and says how much memory it took")]
fn dry_run(here: &Path, options: &[&str], script: &str) -> Ended {
    let script = format!("PATH=$TOOLS; run=${{SIMCUDA_EXCEPTIONS%/*/*}}; {script}");
    let mut command = Command::new(memtrace());
    command.arg("dry-run").args(options).args(["--", "/bin/sh", "-c", &script, "sh", "{bs}"]).current_dir(here);
    // Without a Python there is none to ask for its PyTorch.
    command.env("TOOLS", std::env::var_os("PATH").unwrap()).env("PATH", here.join("nothing"));
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read = |stream: &mut dyn Read| {
        let mut text = Vec::new();
        stream.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    };
    let (stdout, stderr) = std::thread::scope(|scope| {
        let stdout = scope.spawn(|| read(&mut out));
        let stderr = read(&mut err);
        (stdout.join().unwrap(), stderr)
    });
    let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: both are live and writable, and zeros are a valid `rusage`.
    let usage = unsafe {
        assert_eq!(libc::wait4(child.id() as i32, &mut status, 0, usage.as_mut_ptr()), child.id() as i32);
        usage.assume_init()
    };
    assert!(libc::WIFEXITED(status), "{status:x}: {stderr}");
    Ended { code: libc::WEXITSTATUS(status), stdout, stderr, memory: usage.ru_maxrss }
}

#[test]
fn files_about_exceptions_and_workspaces_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let (exceptions, workspaces) = ("$SIMCUDA_EXCEPTIONS", "$run/.simulated/workspaces");
    for place in [exceptions, workspaces] {
        for (number, (attack, expected)) in [
            ("mkfifo PLACE/1.json", "1.json: it is not a regular file"),
            ("ln -s /dev/zero PLACE/1.json", "1.json: it is a symbolic link"),
            ("truncate -s 100G PLACE/1.json", "1.json: it has 107374182400 bytes, more than memtrace writes"),
            ("mkdir PLACE/1.json; mkfifo PLACE/2.json", "cannot read 2 files in"),
            ("rmdir PLACE && ln -s /dev PLACE", "cannot read"),
            ("rmdir PLACE && mkfifo PLACE", "cannot read"),
        ]
        .into_iter()
        .enumerate()
        {
            let run = format!("run{number}{}", place.len());
            let script = format!("{}; echo done; exit 7", attack.replace("PLACE", &format!("\"{place}\"")));
            let ended = dry_run(folder.path(), &["--quiet", "-o", &run], &script);
            assert_eq!((ended.code, &*ended.stdout), (7, "done\n"), "{attack}: {}", ended.stderr);
            let warning = ended.stderr.lines().find(|line| line.starts_with("memtrace: warning: "));
            assert!(warning.is_some_and(|warning| warning.contains(expected)), "{attack}: {}", ended.stderr);
            assert!(ended.memory < MAX_MEMORY, "{attack}: {} KiB", ended.memory);
            assert!(!folder.path().join(run).join(".simulated").exists(), "{attack}");
        }
    }
}

/// The folder of the files, or the run folder, is another one by the end.
#[test]
fn nothing_outside_the_run_folder_is_read_or_removed() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    std::fs::create_dir_all(other.join(".simulated/exceptions")).unwrap();
    let kept = other.join(".simulated/exceptions/1.json");
    std::fs::write(&kept, r#"{"exception": "Other", "location": "a", "read_location": "b"}"#).unwrap();
    for (run, attack) in [
        ("link", "rm -r $run/.simulated && ln -s ../other/.simulated $run/.simulated"),
        ("moved", "mv $run $run-moved && ln -s other $run"),
        ("gone", "rm -r $run/.simulated"),
    ] {
        let ended = dry_run(folder.path(), &["--quiet", "-o", run], &format!("{attack}; exit 7"));
        assert_eq!(ended.code, 7, "{attack}: {}", ended.stderr);
        assert!(kept.exists(), "{attack}");
    }
    let manifest = std::fs::read_to_string(folder.path().join("moved-moved/run.json")).unwrap();
    assert!(manifest.contains("\"ended\"") && !manifest.contains("Other"), "{manifest}");
    assert!(!folder.path().join("moved-moved/.simulated").exists());
}

/// A tree that is deeper than any path can name.
#[test]
fn a_deep_tree_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let deep = "import os\nfor _ in range(40): os.mkdir('d' * 200); os.chdir('d' * 200)";
    let script = format!("cd $run/.simulated && python3 -c \"{deep}\"; exit 7");
    let ended = dry_run(folder.path(), &["--quiet", "-o", "run"], &script);
    assert_eq!((ended.code, &*ended.stderr), (7, ""));
    assert!(!folder.path().join("run/.simulated").exists());
}

#[test]
fn the_output_of_a_failed_try_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    for (number, attack) in [
        "head -c 300000000 /dev/zero; echo; echo the last line",
        "rm $run.txt; ln -s /dev/zero $run.txt; echo the last line",
        "rm $run.txt; mkfifo $run.txt; echo the last line",
        "truncate -s 100G $run.txt; printf '\\nthe last line\\n' >>$run.txt",
    ]
    .into_iter()
    .enumerate()
    {
        let tries = format!("tries{number}");
        let ended = dry_run(folder.path(), &["--vary", "bs=1", "-o", &tries], &format!("{attack}; exit 7"));
        assert_eq!(ended.code, 1, "{attack}: {}", ended.stderr);
        assert!(ended.stderr.contains("its output ends with\n"), "{attack}: {}", ended.stderr);
        assert!(ended.stderr.contains("the last line\n"), "{attack}: {}", ended.stderr);
        assert!(ended.stderr.len() < 20_000, "{attack}: {} bytes", ended.stderr.len());
        assert!(ended.stdout.contains("the program failed with exit code 7"), "{attack}: {}", ended.stdout);
        assert!(ended.memory < MAX_MEMORY, "{attack}: {} KiB", ended.memory);
    }
}

/// The program has recorded nothing, so what it leaves in the place of the summary stays there.
#[test]
fn the_summary_of_a_try_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (attack, expected)) in [
        ("mkfifo $run/summary.json", "it is not a regular file"),
        ("ln -s /dev/zero $run/summary.json", "it is a symbolic link"),
        ("truncate -s 100G $run/summary.json", "has 107374182400 bytes, more than memtrace writes"),
        ("head -c 60000000 /dev/zero | tr '\\0' '[' >$run/summary.json", "not a summary.json of memtrace"),
        ("mv $run $run-moved && ln -s / $run", "summary.json: "),
    ]
    .into_iter()
    .enumerate()
    {
        let tries = format!("tries{number}");
        let ended = dry_run(folder.path(), &["--max", "bs=1:2", "-o", &tries], &format!("{attack}; exit 7"));
        assert_eq!(ended.code, 1, "{attack}: {}", ended.stderr);
        let warning = ended.stderr.lines().find(|line| line.starts_with("warning: cannot read "));
        assert!(warning.is_some_and(|warning| warning.contains(expected)), "{attack}: {}", ended.stderr);
        assert!(ended.stdout.contains("No answer: the program failed with bs=1"), "{attack}: {}", ended.stdout);
        assert!(ended.memory < MAX_MEMORY, "{attack}: {} KiB", ended.memory);
    }
}

/// As many tries run at a time as requested, and a failed one ends the others that have not begun.
#[test]
fn tries_run_at_the_same_time() {
    let folder = tempfile::tempdir().unwrap();
    // Each waits for the other.
    let script =
        "touch $run/../began-$1; while [ ! -e $run/../began-1 ] || [ ! -e $run/../began-2 ]; do sleep 0.01; done";
    let ended = dry_run(folder.path(), &["--vary", "bs=1,2", "--jobs", "2", "-o", "both"], script);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let script = "[ $1 != 1 ]";
    let ended = dry_run(folder.path(), &["--vary", "bs=1,2,3,4", "--json", "-o", "failed"], script);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((ended.code, report["tries"].as_array().unwrap().len()), (1, 1), "{report}");
}
