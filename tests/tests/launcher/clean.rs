//! `memtrace doctor --clean`: it lists and removes the folders that memtrace has written outside of runs, and nothing
//! else.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use memtrace_tests::traced_program::memtrace;

/// A user whose folders the test owns. Root has folders that other tests use.
const USER: u32 = 65_532;
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The files below a folder.
fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.flat_map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { [entry.path()].into() }).collect()
}

#[test]
fn what_memtrace_wrote_outside_of_runs_is_listed_and_removed() {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: only root can become another user: run this test as root, in a container for example");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let binary = folder.path().join("memtrace");
    std::fs::copy(memtrace(), &binary).unwrap();
    let home = folder.path().join("home");
    let temporary = home.join("tmp");
    std::fs::create_dir_all(&temporary).unwrap();
    let command = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        command.args(arguments).uid(USER).gid(USER).current_dir(&home).env_clear();
        command.env("PATH", "/usr/bin:/bin").env("HOME", &home).env("TMPDIR", &temporary);
        command
    };
    std::os::unix::fs::chown(&home, Some(USER), Some(USER)).unwrap();
    std::os::unix::fs::chown(&temporary, Some(USER), Some(USER)).unwrap();
    let text = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let clean = || text(&mut command(&["doctor", "--clean"]));
    assert!(clean().starts_with("memtrace has written nothing outside of run folders.\n"));
    text(&mut command(&["--quiet", "-o", "run", "--", "true"]));
    // A temporary folder of a memtrace that was killed two days ago, and one whose name is another.
    let left = temporary.join(format!("memtrace-doctor-{TOKEN}"));
    let other = temporary.join("memtrace-doctor-results");
    for path in [&left, &other] {
        text(Command::new("install").args(["-d", "-o", "65532", "-g", "65532"]).arg(path));
        text(Command::new("touch").args(["-d", "2 days ago"]).arg(path));
    }
    let run = files(&home.join("run"));
    let written: BTreeSet<PathBuf> = files(&home).difference(&run).cloned().collect();
    assert!(!written.is_empty(), "the preloaded library");
    let listed = clean();
    let paths: Vec<&str> =
        listed.lines().filter_map(|line| line.trim_start().split_once("  ").map(|(_, p)| p)).collect();
    assert!(written.iter().all(|file| paths.iter().any(|path| file.starts_with(path))), "{listed}\n{written:?}");
    assert!(
        paths.iter().any(|path| Path::new(path) == left) && !listed.contains("memtrace-doctor-results"),
        "{listed}"
    );
    assert_eq!(files(&home).difference(&run).count(), written.len(), "it removes nothing without --yes");

    // A copy that a running memtrace uses stays.
    let mut running = command(&["--quiet", "-o", "running", "--", "sh", "-c", "echo ready; read line"]);
    let mut running = running.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(running.stdout.as_mut().unwrap()), &mut line).unwrap();
    let removed = text(&mut command(&["doctor", "--clean", "--yes"]));
    assert!(removed.contains("  in use\n") && removed.contains("  removed\n") && !left.exists(), "{removed}");
    assert!(written.iter().all(|file| file.exists()));
    drop(running.stdin.take());
    running.wait().unwrap();

    let removed = text(&mut command(&["doctor", "--clean", "--yes"]));
    assert!(removed.contains("  removed\n") && !removed.contains("in use"), "{removed}");
    assert!(!home.join(".cache/memtrace").exists() && other.exists());
    assert!(run.is_subset(&files(&home)), "runs stay");
    assert!(clean().starts_with("memtrace has written nothing outside of run folders.\n"));
}
