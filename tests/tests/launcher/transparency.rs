//! A command cannot detect that memtrace runs it.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use crate::launcher_support::*;

/// Runs a command with and without memtrace, both prepared by `prepare`.
fn both(words: &[&str], prepare: impl Fn(&mut Command)) -> (Output, Output) {
    let folder = tempfile::tempdir().unwrap();
    let mut plain = Command::new(words[0]);
    plain.args(&words[1..]);
    let mut recorded = recording(&folder.path().join("run"));
    recorded.args(words);
    let [plain, recorded] = [plain, recorded].map(|mut command| {
        prepare(command.stdin(Stdio::null()));
        command.output().unwrap()
    });
    (plain, recorded)
}

fn assert_same(words: &[&str], prepare: impl Fn(&mut Command)) -> String {
    let (plain, recorded) = both(words, prepare);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&plain.stdout), text(&recorded.stdout), "{words:?}");
    assert_eq!(text(&plain.stderr), text(&recorded.stderr), "{words:?}");
    assert_eq!(plain.status, recorded.status, "{words:?}");
    text(&plain.stdout)
}

fn state() -> [&'static str; 4] {
    [compiled("process_state.c").to_str().unwrap(), "state", "", "two words"]
}

fn before_exec(command: &mut Command, action: impl FnMut() -> std::io::Result<()> + Send + Sync + 'static) {
    // SAFETY: every closure that this file passes makes async-signal-safe calls only.
    unsafe { command.pre_exec(action) };
}

#[test]
fn inherited_process_state_is_unchanged() {
    let seen = assert_same(&state(), |_| {});
    assert!(seen.contains("argv[3]=two words") && seen.contains("errno after a bad call: 9"), "{seen}");
}

#[test]
fn ignored_and_blocked_signals_are_inherited() {
    let seen = assert_same(&state(), |command| {
        before_exec(command, || {
            // SAFETY: `sigset_t` is initialized before use, and `signal` with `SIG_IGN` installs no handler.
            unsafe {
                for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGPIPE, libc::SIGCHLD, libc::SIGXFSZ, libc::SIGTSTP] {
                    libc::signal(signal, libc::SIG_IGN);
                }
                let mut set: libc::sigset_t = std::mem::zeroed();
                libc::sigaddset(&mut set, libc::SIGUSR1);
                libc::sigaddset(&mut set, libc::SIGTERM);
                libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            }
            Ok(())
        });
    });
    for line in
        ["ignored 1\n", "ignored 2\n", "ignored 13\n", "ignored 17\n", "ignored 25\n", "blocked 10\n", "blocked 15\n"]
    {
        assert!(seen.contains(line), "{line}: {seen}");
    }
}

#[test]
fn sigpipe_has_its_default_disposition() {
    // Rust resets SIGPIPE in children, which would hide an error here. So the test sets the disposition itself.
    let seen = assert_same(&state(), |command| {
        before_exec(command, || {
            // SAFETY: `signal` with `SIG_DFL` installs no handler and touches no memory.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            Ok(())
        });
    });
    assert!(!seen.contains("ignored 13"), "{seen}");
}

#[test]
fn closed_and_extra_descriptors_are_inherited() {
    let seen = assert_same(&state(), |command| {
        before_exec(command, || {
            // SAFETY: the path is a NUL-terminated literal, and the descriptors belong to the forked child.
            unsafe {
                libc::close(0);
                libc::close(2);
                let extra = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
                assert_eq!(libc::fcntl(extra, libc::F_DUPFD, 77), 77);
                libc::close(extra);
            }
            Ok(())
        });
    });
    assert!(seen.contains("fd 77") && !seen.contains("fd 0 ") && !seen.contains("fd 2 "), "{seen}");
}

#[test]
fn umask_limits_and_environment_are_inherited() {
    let seen = assert_same(&state(), |command| {
        command.env_clear().envs([("ZED", "1"), ("ALPHA", "a=b"), ("PATH", "/bin:/usr/bin"), ("HOME", "/nonexistent")]);
        before_exec(command, || {
            // SAFETY: `limit` is a live `rlimit` during the call; `umask` takes an integer.
            unsafe {
                libc::umask(0o137);
                let limit = libc::rlimit { rlim_cur: 100, rlim_max: 200 };
                libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
                libc::setpriority(libc::PRIO_PROCESS, 0, 5);
            }
            Ok(())
        });
    });
    assert!(seen.contains("umask 137") && seen.contains("limit 7 100 200") && seen.contains("nice 5"), "{seen}");
}

#[test]
fn other_preloaded_libraries_are_kept() {
    // The library need not exist: the loader reports it as missing in both runs.
    let (_, recorded) = both(&["sh", "-c", "echo $LD_PRELOAD"], |command| {
        command.env("LD_PRELOAD", "/no/such/one.so /no/such/two.so");
    });
    let preload = String::from_utf8(recorded.stdout).unwrap();
    let entries: Vec<_> = preload.trim().split(':').collect();
    assert!(entries[0].ends_with("libmemtrace_interpose.so"), "{preload}");
    assert_eq!(entries[1..], ["/no/such/one.so", "/no/such/two.so"]);
}

#[test]
fn shells_and_pipelines_work() {
    assert_same(&["sh", "-c", "echo out; echo err >&2; exit 7"], |_| {});
    assert_same(&["sh", "-c", "yes | head -n 3; echo ${PIPESTATUS:-none}"], |_| {});
    assert_same(&["bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}"], |_| {});
    assert_same(&["sh", "-c", "cat /no/such/file"], |_| {});
    assert_same(&["sh", "-c", "ulimit -a; umask; pwd; echo $0 $# $PPID | wc -w"], |_| {});
    assert_same(&["env", "-i", "sh", "-c", "env | sort"], |_| {});
    // A program that passes descriptors on to its children.
    assert_same(&["sh", "-c", "exec 5</dev/null; ls /proc/self/fd | wc -l"], |_| {});
}

#[test]
fn stdin_reaches_the_command_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut child =
        recording(&folder.path().join("run")).arg("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let data: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let (mut stdin, sent) = (child.stdin.take().unwrap(), data.clone());
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.stdout == data && output.status.success());
}

#[test]
fn memtrace_runs_under_memtrace() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    let output = output(recording(&folder.path().join("outer")).arg(memtrace()).args([
        "--quiet",
        "-o",
        inner.to_str().unwrap(),
        "--",
        PRODUCER,
        "events=10",
        "write",
        "exit=9",
    ]));
    assert_eq!(output.status.code(), Some(9), "{}", stderr(&output));
    assert_eq!(only_process(&inner)["events"], 10);
    assert!(traces(&folder.path().join("outer")).is_empty());
}
