//! Privacy and safety of runs. docs/reference/safety.md lists the promises.
//!
//! Privacy: only its owner can read a run, during the recording and afterwards. Safety: memtrace writes nothing outside
//! the run folder, and no content of a recording harms its reader.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::launcher_support::*;
use memtrace_tests::programs::ProgramFolder;

const INTRUDER: &str = env!("CARGO_BIN_EXE_intruder");
/// The user id of `nobody`.
const OTHER_USER: u32 = 65_534;

/// A folder that every user can read, with a copy of the intruder that every user can run.
fn open_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    chmod(folder.path(), 0o755);
    std::fs::copy(INTRUDER, folder.path().join("intruder")).unwrap();
    folder
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// A command that runs as another user.
///
/// # Panics
/// Without root privileges, because the test would check nothing then.
#[track_caller]
fn as_another_user(program: impl AsRef<std::ffi::OsStr>) -> Command {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    let root = unsafe { libc::geteuid() } == 0;
    assert!(root, "only root can become another user: run this test as root, in a container for example");
    let mut command = Command::new(program);
    command.uid(OTHER_USER).gid(OTHER_USER).current_dir("/");
    command
}

/// Those of the files and folders that another user can read.
#[track_caller]
fn readable_by_another(paths: &[PathBuf]) -> Vec<PathBuf> {
    let script =
        r#"for f; do if [ -d "$f" ]; then ls "$f"; else head -c 1 "$f"; fi >/dev/null 2>&1 && echo "$f"; done; true"#;
    let output = output(as_another_user("sh").args(["-c", script, "sh"]).args(paths));
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().lines().map(PathBuf::from).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    entries
}

#[test]
fn another_user_can_neither_read_a_run_nor_send_events() {
    let folder = open_folder();
    let run = folder.path().join("run");
    let mut command = Command::new(memtrace());
    command.arg("-o").arg(&run).args(["--", PRODUCER, "define", "events=1000", "write", "say=ready", "wait", "write"]);
    let mut running = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(running.line(), "ready");
    let launcher = running.pid();
    let family = children(launcher);
    let producer = *family
        .iter()
        .find(|p| std::fs::read_link(format!("/proc/{p}/exe")).is_ok_and(|e| e == Path::new(PRODUCER)))
        .unwrap();
    // During the recording: the folder, its files, and everything that the processes have open or mapped.
    let everybodys = folder.path().join("intruder");
    let mut secrets = vec![run.clone(), run.join("run.json"), run.join(format!("{producer}.mtr"))];
    for pid in [launcher, producer] {
        secrets.extend(["fd", "map_files", "environ", "mem", "maps"].map(|name| format!("/proc/{pid}/{name}").into()));
        let open = entries(Path::new(&format!("/proc/{pid}/fd")));
        secrets.extend(open);
        secrets.extend(entries(Path::new(&format!("/proc/{pid}/map_files"))).into_iter().take(50));
    }
    assert!(secrets.len() > 30, "{secrets:?}");
    secrets.push(everybodys.clone());
    assert_eq!(readable_by_another(&secrets), std::slice::from_ref(&everybodys));
    // Every user can read the socket's name in /proc/net/unix, so another user can know the session.
    let environment = std::fs::read(format!("/proc/{producer}/environ")).unwrap();
    let session = environment.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"MEMTRACE_SESSION=")).unwrap();
    let session = std::str::from_utf8(session).unwrap();
    let token = session.split(';').next().unwrap();
    assert!(std::fs::read_to_string("/proc/net/unix").unwrap().contains(token));
    let mut intruder = as_another_user(&everybodys);
    let refused = output(intruder.args(["ask", "flood=300", "ask"]).env("MEMTRACE_SESSION", session));
    assert_eq!(String::from_utf8_lossy(&refused.stdout), "refused\nrefused\n");
    // The launcher's own user is served over the same connection.
    let served = output(Command::new(&everybodys).arg("ask").env("MEMTRACE_SESSION", session));
    assert_eq!(String::from_utf8_lossy(&served.stdout), "served\n");
    drop(running.child.stdin.take());
    assert!(running.child.wait().unwrap().success());
    let manifest = manifest(&run);
    assert!(manifest["refused"]["process of another user"].as_u64().unwrap() >= 2, "{:#}", manifest["refused"]);
    let honest = manifest["processes"].as_array().unwrap().iter().find(|p| p["pid"] == producer).unwrap();
    assert_eq!((&honest["events"], &honest["lost"], &honest["late"]), (&2000.into(), &0.into(), &0.into()));
    // Afterwards: every file, including those that the analysis wrote.
    let files = entries(&run);
    for name in ["run.json", "summary.json", "summary.txt", &format!("{producer}.mtr"), &format!("{producer}.pickle")] {
        assert!(files.contains(&run.join(name)), "{name}: {files:?}");
    }
    assert_eq!(readable_by_another(&files), [] as [PathBuf; 0]);
}

#[test]
fn files_are_readable_by_their_owner_only() {
    let folder = open_folder();
    for (name, prepared) in [("new", None), ("there", Some(0o777)), ("deep/down", None)] {
        let run = folder.path().join(name);
        if let Some(mode) = prepared {
            std::fs::create_dir(&run).unwrap();
            chmod(&run, mode);
        }
        let script = format!("umask 0; exec {} -o {} -- {PRODUCER} define write", memtrace().display(), run.display());
        let output = output(Command::new("sh").args(["-c", &script]));
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(mode(&run), 0o700, "{name}");
        let files = entries(&run);
        assert!(files.len() >= 5, "{files:?}");
        for file in files {
            assert_eq!(mode(&file), 0o600, "{}", file.display());
        }
    }
    // The program's umask stays unchanged.
    let script = format!(
        "umask 027; exec {} --quiet -o {} -- sh -c umask",
        memtrace().display(),
        folder.path().join("u").display()
    );
    assert_eq!(output(Command::new("sh").args(["-c", &script])).stdout, b"0027\n");
}

#[test]
fn a_folder_of_another_user_is_refused() {
    let folder = open_folder();
    let theirs = folder.path().join("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(OTHER_USER), Some(OTHER_USER)).expect("run this test as root");
    let output = output(recording(&theirs).arg("true"));
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("belongs to another user"), "{}", stderr(&output));
    assert!(entries(&theirs).is_empty());
}

/// The launcher is gone, and another user binds its socket's name.
#[test]
fn a_program_records_only_for_its_own_user() {
    let programs = ProgramFolder::new();
    let program = programs.program_over_bare_driver("process/process.c", "process");
    let run = programs.path("run");
    let preload = output(recording(&run).args(["printenv", "LD_PRELOAD"])).stdout;
    let preload = String::from_utf8(preload).unwrap();
    let folder = open_folder();
    for (mut squatter, reply) in
        [(as_another_user(folder.path().join("intruder")), "received 0"), (Command::new(INTRUDER), "received 16")]
    {
        let token = format!("safety{}{reply}", std::process::id()).replace(' ', "");
        let mut squatter = Running::start(squatter.arg(format!("squat={token}")));
        assert_eq!(squatter.line(), "listening");
        let mut program_without_launcher = Command::new(&program);
        program_without_launcher
            .args(["some", "3"])
            .env("LD_LIBRARY_PATH", programs.path(""))
            .env("LD_PRELOAD", preload.trim_end());
        let ended = output(program_without_launcher.env("MEMTRACE_SESSION", format!("{token};cpu=never;stacks=none")));
        assert!(ended.status.success(), "{}", stderr(&ended));
        assert_eq!(squatter.line(), reply);
    }
}

/// Every file below a folder with its content; a link is listed as a link.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for path in entries(folder) {
        let metadata = std::fs::symlink_metadata(&path).unwrap();
        if metadata.is_dir() {
            all.insert(path.clone(), b"folder".to_vec());
            all.extend(tree(&path));
        } else if metadata.is_symlink() {
            all.insert(path.clone(), std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes());
        } else if metadata.file_type().is_fifo() {
            all.insert(path, b"pipe".to_vec());
        } else {
            all.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    all
}

#[test]
fn a_program_cannot_make_the_launcher_write_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let outside = folder.path().join("outside");
    std::fs::create_dir_all(outside.join("folder")).unwrap();
    for name in ["untouched", "run.json", "summary.json"] {
        std::fs::write(outside.join(name), name).unwrap();
    }
    let before = tree(&outside);
    let run = folder.path().join("run");
    // Once a process records, the script moves the folder and puts a link in its place. It also puts links in place of
    // every file that will be written, and of files that later processes may get.
    let script = format!(
        r#"cd {here}
        mkfifo ready
        {PRODUCER} events=1000 write say=ready rate=4000 write > ready & read line < ready
        mv run moved; ln -s {here}/outside run; cd moved
        for n in run.json report.html sources.json summary.json summary.txt symbols.json $!.pickle; do
            rm -f $n; ln -s ../outside/untouched $n; ln -s ../outside/untouched .$n.part
        done
        p=$!
        while [ $p -lt $(($! + 300)) ]; do
            p=$((p + 1)); ln -s ../outside/untouched $p.mtr; ln -s ../outside/untouched $p.pickle
        done
        {PRODUCER} events=500 write & echo $!; wait; exit 3"#,
        here = folder.path().display()
    );
    let output = output(Command::new(memtrace()).arg("-o").arg(&run).args(["--", "sh", "-c", &script]));
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert_eq!(tree(&outside), before, "{}", stderr(&output));
    assert!(stderr(&output).lines().count() < 60, "{}", stderr(&output));
    let names: Vec<_> = entries(folder.path()).iter().map(|p| p.file_name().unwrap().to_owned()).collect();
    assert_eq!(names, ["moved", "outside", "ready", "run"]);
    // All events and files are in the moved folder.
    let moved = folder.path().join("moved");
    let manifest = manifest(&moved);
    let counts: Vec<_> = manifest["processes"].as_array().unwrap().iter().map(|p| p["events"].clone()).collect();
    assert_eq!(counts, [2000, 500], "{manifest:#}");
    let second = String::from_utf8(output.stdout).unwrap();
    for name in [
        "run.json",
        "report.html",
        "summary.json",
        "summary.txt",
        &format!("{}.mtr", second.trim()),
        &format!("{}.pickle", second.trim()),
    ] {
        let metadata = std::fs::symlink_metadata(moved.join(name)).unwrap();
        assert!(metadata.is_file() && metadata.len() > 100, "{name}");
    }
}

/// Runs the command and panics if it takes longer than `time`. Returns its output and the peak memory of it and its
/// children, in KiB.
#[track_caller]
#[expect(clippy::zombie_processes, reason = "wait4 collects it, and tells what it took")]
fn within(time: Duration, command: &mut Command) -> (std::process::Output, i64) {
    let name = format!("{command:?}");
    let out = tempfile::tempfile().unwrap();
    let err = tempfile::tempfile().unwrap();
    command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(err.try_clone().unwrap());
    let child = command.spawn().unwrap();
    let (start, pid) = (Instant::now(), child.id() as i32);
    // SAFETY: `rusage` is a C struct of integers, for which all-zero bytes are a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let mut status = 0;
    // SAFETY: `pid` is a child that only this call collects. `status` and `usage` are live and writable during the
    // call.
    while unsafe { libc::wait4(pid, &mut status, libc::WNOHANG, &mut usage) } == 0 {
        if start.elapsed() > time {
            kill(pid, libc::SIGKILL);
            panic!("{name} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let read = |mut file: std::fs::File| {
        let mut bytes = Vec::new();
        std::io::Seek::rewind(&mut file).unwrap();
        std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
        bytes
    };
    let status = std::os::unix::process::ExitStatusExt::from_raw(status);
    (std::process::Output { status, stdout: read(out), stderr: read(err) }, usage.ru_maxrss)
}

fn pipe(path: &Path) {
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: `name` is a live, NUL-terminated C string for the duration of the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

#[test]
fn a_malicious_run_folder_is_read_without_harm() {
    // A reader that waits for one of the traps waits forever. A busy machine needs some time for everything else.
    const TIME: Duration = Duration::from_secs(120);
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let path = |name: &str| folder.path().join(name);
    pipe(&path("pipe"));
    std::fs::File::create(path("huge")).unwrap().set_len(1 << 42).unwrap();
    // The recording defines objects with these paths. The launcher's own analysis is the first reader.
    let here = folder.path().display();
    let names = format!(
        "paths={here}/pipe:/dev/zero:/dev/tty:/proc/kmsg:/proc/self/mem:/sys/kernel/uevent_seqnum:\
         {here}/huge:../../etc/passwd:{here}"
    );
    let (output, memory) = within(TIME, recording(&run).args([INTRUDER, &names]));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(memory < 200 << 10, "{memory} KiB");
    let trace = traces(&run).remove(0);
    // Links take the place of files, as in a run folder that somebody else packed.
    for (name, target) in
        [("run.json", "/dev/zero"), ("zero.mtr", "/dev/zero"), ("kernel.mtr", "/proc/kmsg"), ("up.mtr", "../huge")]
    {
        let _ = std::fs::remove_file(run.join(name));
        symlink(target, run.join(name)).unwrap();
    }
    let _ = std::fs::remove_file(run.join("symbols.json"));
    for name in ["symbols.json", "pipe.mtr"] {
        pipe(&run.join(name));
    }
    std::fs::create_dir(run.join("folder.mtr")).unwrap();
    let before = tree(&run);
    for read in [&run, &trace] {
        for arguments in [&["report"][..], &["report", "--json"], &["export", "--to", "json"]] {
            let mut command = Command::new(memtrace());
            command.args(&arguments[..1]).arg(read).args(&arguments[1..]);
            let (output, memory) = within(TIME, &mut command);
            assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
            assert!(memory < 200 << 10, "{arguments:?}: {memory} KiB");
            if *read == run {
                for name in ["zero.mtr", "kernel.mtr", "up.mtr", "pipe.mtr", "folder.mtr", "run.json", "symbols.json"] {
                    assert!(stderr(&output).contains(name), "{name}: {}", stderr(&output));
                }
            }
        }
    }
    assert_eq!(tree(&run), before, "reading writes nothing");
    for name in ["pipe", "huge", "run/run.json", "run/pipe.mtr", "run/symbols.json"] {
        let (output, _) = within(TIME, Command::new(memtrace()).arg("report").arg(path(name)));
        assert_eq!(output.status.code(), Some(2), "{name}");
    }
}

/// A manifest names files that do not exist. Readers do not follow its paths to files elsewhere.
#[test]
fn paths_in_a_manifest_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    assert!(output(recording(&run).args([PRODUCER, "define", "write"])).status.success());
    let secret = folder.path().join("secret.mtr");
    std::fs::copy(&traces(&run)[0], &secret).unwrap();
    std::fs::remove_file(&traces(&run)[0]).unwrap();
    let mut manifest = manifest(&run);
    for name in ["../secret.mtr", secret.to_str().unwrap()] {
        manifest["processes"][0]["trace"] = name.into();
        std::fs::write(run.join("run.json"), manifest.to_string()).unwrap();
        let report = output(Command::new(memtrace()).arg("report").arg(&run));
        assert_eq!(report.status.code(), Some(2));
        assert!(stderr(&report).contains("contains no trace"), "{}", stderr(&report));
    }
}

#[test]
fn an_export_follows_no_symbolic_link() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    assert!(output(recording(&run).args([PRODUCER, "define", "write"])).status.success());
    let untouched = folder.path().join("untouched");
    std::fs::write(&untouched, "mine").unwrap();
    let pickle = run.join(format!("{}.pickle", only_process(&run)["pid"]));
    std::fs::remove_file(&pickle).unwrap();
    symlink(&untouched, &pickle).unwrap();
    let exported = output(Command::new(memtrace()).args(["export", ".", "--to", "snapshot"]).current_dir(&run));
    assert!(exported.status.success(), "{}", stderr(&exported));
    assert_eq!(std::fs::read(&untouched).unwrap(), b"mine");
    assert!(std::fs::symlink_metadata(&pickle).unwrap().is_file() && mode(&pickle) == 0o600);
}

/// Panics when the text contains a control character other than a newline, or a character that changes the text's
/// direction.
#[track_caller]
fn assert_printable(what: &str, bytes: &[u8]) {
    let text = std::str::from_utf8(bytes).unwrap_or_else(|e| panic!("{what}: {e}"));
    let bad = text.chars().find(|c| c.is_control() && *c != '\n' || ('\u{202a}'..='\u{202e}').contains(c));
    assert_eq!(bad, None, "{what}: {text:?}");
}

#[test]
fn control_characters_never_reach_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("a\x1b[2Jb");
    let evil = "say=\x1b]0;owned\x07\u{9b}31m\u{202e}\r\n";
    let mut command = Command::new(memtrace());
    // The argument is not valid UTF-8.
    let broken: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"say=\xff\xfe\x1b[1m");
    command.arg("-o").arg(&run).arg("--").args([INTRUDER, "names", evil]).arg(broken);
    let ended = output(&mut command);
    assert!(ended.status.success());
    assert_printable("the end-of-run summary", &ended.stderr);
    assert!(stderr(&ended).contains("train.py") && stderr(&ended).lines().count() < 60, "{}", stderr(&ended));
    for name in ["run.json", "report.html", "summary.json", "summary.txt", "symbols.json"] {
        assert_printable(name, &std::fs::read(run.join(name)).unwrap());
    }
    for json in [false, true] {
        let mut report = Command::new(memtrace());
        report.arg("report").arg(&run).args(json.then_some("--json"));
        let report = output(&mut report);
        assert!(report.status.success());
        assert_printable("report", &report.stdout);
        assert_printable("report's messages", &report.stderr);
        if json {
            // JSON keeps the characters that a terminal cannot print.
            let summary: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
            let notice = summary["processes"][0]["notices"][0]["text"].as_str().unwrap();
            assert!(notice.starts_with("\x1b]0;owned\x07\x1b[2J\u{9b}31m\u{202e}\r\n\"\\"), "{notice:?}");
        }
    }
    let missing = output(Command::new(memtrace()).arg("report").arg(folder.path().join("\x1b[2J")));
    assert_printable("an error", &missing.stderr);
}

/// An analysis that exceeds the memory limit fails alone. The run stays intact, and the exit status is the command's.
#[test]
fn an_analysis_over_its_memory_limit_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let script = format!(
        "ulimit -d 131072; exec {} -o {} -- sh -c '{INTRUDER} live=2000000; exit 9'",
        memtrace().display(),
        run.display()
    );
    let ended = output(Command::new("sh").args(["-c", &script]));
    assert_eq!(ended.status.code(), Some(9), "{}", stderr(&ended));
    assert!(
        stderr(&ended).contains("cannot analyze the run: the worker process exceeded its memory limit"),
        "{}",
        stderr(&ended)
    );
    assert_eq!(only_process(&run)["events"], 2_000_000);
    assert_eq!(only_trace(&run).event_count(), 2_000_000);
}
