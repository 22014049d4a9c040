//! Signals and job control work as they do without the launcher.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::launcher_support::*;

/// Starts the program under memtrace in its own process group, and waits until it is ready.
fn start(folder: &Path, what: &str) -> Running {
    let mut command = recording(&folder.join("run"));
    command.arg(compiled("process_state.c")).arg(what).process_group(0);
    let mut running = Running::start(&mut command);
    assert_eq!(running.line(), "ready");
    running
}

/// The command's process id: the launcher's child that runs the program, as opposed to its signal probe.
fn program_of(launcher: i32) -> i32 {
    let exe = |pid: &i32| std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|p| p.ends_with("process_state"));
    children(launcher).into_iter().find(exe).unwrap()
}

#[test]
fn a_signal_to_the_launcher_reaches_the_command_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = start(folder.path(), "signals");
    let signals =
        [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGALRM, libc::SIGWINCH];
    for signal in signals {
        running.signal(signal);
        assert_eq!(running.line(), signal.to_string());
    }
    running.signal(libc::SIGUSR2);
    assert_eq!(running.rest(), [libc::SIGUSR2.to_string()]);
    assert!(running.child.wait().unwrap().success());
}

#[test]
fn the_value_of_a_queued_signal_is_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = start(folder.path(), "signals");
    let value = libc::sigval { sival_ptr: 4711 as *mut libc::c_void };
    let signal = libc::SIGRTMIN() + 1;
    // SAFETY: `sigqueue` takes integers and a value that only the receiver reads. The target is a child of this test.
    assert_eq!(unsafe { libc::sigqueue(running.pid(), signal, value) }, 0);
    assert_eq!(running.line(), signal.to_string());
    assert_eq!(running.line(), "value 4711");
    running.signal(libc::SIGUSR2);
    assert!(running.child.wait().unwrap().success());
}

#[test]
fn a_signal_to_the_process_group_arrives_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = start(folder.path(), "signals");
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        kill(-running.pid(), signal);
        assert_eq!(running.line(), signal.to_string());
        // The launcher handles signals in order: a duplicate would arrive before this signal.
        running.signal(libc::SIGUSR1);
        assert_eq!(running.line(), libc::SIGUSR1.to_string());
        // The same signal sent to the launcher alone is passed on.
        running.signal(signal);
        assert_eq!(running.line(), signal.to_string());
    }
    running.signal(libc::SIGUSR2);
    assert!(running.rest().iter().all(|l| *l == libc::SIGUSR2.to_string()));
    assert!(running.child.wait().unwrap().success());
}

#[test]
fn a_signal_that_kills_the_command_is_the_exit_status() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = start(folder.path(), "default");
    running.signal(libc::SIGTERM);
    assert_eq!(running.child.wait().unwrap().code(), Some(128 + libc::SIGTERM));
    assert_eq!(manifest(&folder.path().join("run"))["exit"]["signal"], libc::SIGTERM);
}

#[test]
fn launcher_and_command_stop_and_continue_as_one_job() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = start(folder.path(), "default");
    let launcher = running.pid();
    let program = program_of(launcher);
    for _ in 0..3 {
        // A terminal does this for Ctrl-Z.
        kill(-launcher, libc::SIGTSTP);
        let status = wait(launcher, libc::WUNTRACED);
        assert!(libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == libc::SIGTSTP, "{status:x}");
        wait_for(|| state_of(program) == 'T');
        // A shell does this for `fg`.
        kill(-launcher, libc::SIGCONT);
        wait_for(|| state_of(program) != 'T' && state_of(launcher) != 'T');
        // To stop itself, the launcher unblocks the signal. Once it blocks the signal again, it reads signals as
        // before.
        wait_for(|| blocks(launcher, libc::SIGTSTP));
    }
    // The same steps, with signals to the launcher's process only.
    kill(launcher, libc::SIGTSTP);
    assert!(libc::WIFSTOPPED(wait(launcher, libc::WUNTRACED)));
    wait_for(|| state_of(program) == 'T');
    kill(launcher, libc::SIGCONT);
    wait_for(|| state_of(program) != 'T' && state_of(launcher) != 'T');
    kill(launcher, libc::SIGTERM);
    assert_eq!(running.child.wait().unwrap().code(), Some(128 + libc::SIGTERM));
}

fn state_of(pid: i32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
}

fn blocks(pid: i32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigBlk:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (signal - 1) != 0
}

#[test]
fn ctrl_c_arrives_once_and_leaves_the_terminal_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let (mut ours, theirs) = terminal();
    let mut command = recording(&folder.path().join("run"));
    command.arg(compiled("process_state.c")).arg("signals");
    let mut child = start_on(&theirs, &mut command);
    drop(theirs);
    let mut lines = BufReader::new(ours.try_clone().unwrap()).lines();
    let mut line = || lines.next().unwrap().unwrap();
    assert_eq!(line(), "ready");
    ours.write_all(b"\x03").unwrap();
    assert_eq!(line(), libc::SIGINT.to_string());
    ours.write_all(b"\x1c").unwrap();
    assert_eq!(line(), libc::SIGQUIT.to_string());
    kill(child.id() as i32, libc::SIGUSR1);
    assert_eq!(line(), libc::SIGUSR1.to_string());
    kill(child.id() as i32, libc::SIGUSR2);
    assert_eq!(line(), libc::SIGUSR2.to_string());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_shell_on_a_terminal_controls_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let (mut ours, theirs) = terminal();
    let run = folder.path().join("run");
    let mut child = start_on(&theirs, Command::new("bash").args(["--norc", "--noediting", "-i"]).env("PS1", ""));
    drop(theirs);
    let mut lines = BufReader::new(ours.try_clone().unwrap()).lines();
    let mut until = |what: &str| loop {
        let line = lines.next().unwrap().unwrap();
        if line.contains(what) {
            return line;
        }
    };
    let program = compiled("process_state.c").display();
    writeln!(ours, "{} --quiet -o {} -- {program} default", memtrace().display(), run.display()).unwrap();
    until("ready");
    let program = program_of(children(child.id() as i32)[0]);
    ours.write_all(b"\x1a").unwrap();
    until("Stopped");
    writeln!(ours, "jobs").unwrap();
    until("Stopped");
    writeln!(ours, "fg").unwrap();
    until("default");
    // The shell prints the job that it continues first, then gives the terminal to it, and only then continues it.
    wait_for(|| state_of(program) != 'T');
    ours.write_all(b"\x03").unwrap();
    writeln!(ours, "echo status=$?").unwrap();
    until("status=130");
    writeln!(ours, "exit").unwrap();
    child.wait().unwrap();
    assert_eq!(manifest(&run)["exit"]["signal"], libc::SIGINT);
}
