//! Another user of the machine who attacks while memtrace runs: its socket, the folder of the preloaded library, and
//! the run folder. docs/reference/safety.md lists the promises; `safety` has the tests without an attack in progress.
//!
//! Only root can become another user. Without root privileges a test says that it has checked nothing.

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::crash_support::Scenario;
use crate::launcher_support::*;
use memtrace_tests::ledger::{assert_equal, calls_of, pid};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};

const INTRUDER: &str = env!("CARGO_BIN_EXE_intruder");
/// The user id of `nobody`, who attacks.
const ATTACKER: u32 = 65_534;
/// The user who runs memtrace where root would choose other folders.
const VICTIM: u32 = 65_533;

/// Whether this test can become another user. Prints a message if not.
fn is_root() -> bool {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("SKIPPED: only root can become another user: run this test as root, in a container for example");
    }
    root
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A command that runs as the attacker.
fn attacking(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.uid(ATTACKER).gid(ATTACKER).current_dir("/");
    command
}

/// A process that is killed at the end of the test.
struct Attack(Child);

impl Drop for Attack {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Another user connects as fast as possible, all the time, while processes start: every one is recorded in full.
#[test]
fn a_flood_of_connections_delays_no_process_beyond_recording() {
    const TURNS: usize = 3;
    if !is_root() {
        return;
    }
    let programs = ProgramFolder::new();
    chmod(&programs.path(""), 0o755);
    let intruder = programs.path("intruder");
    std::fs::copy(INTRUDER, &intruder).unwrap();
    let program = programs.program("crash/brood.c", "brood", &linked_with("libcudart.so.12"));
    let mut scenario = Scenario::start(with_simcuda(&[program.as_os_str(), "8".as_ref(), "20".as_ref()]), true, None);
    let environment = std::fs::read(format!("/proc/{}/environ", scenario.pid)).unwrap();
    let session = environment.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"MEMTRACE_SESSION=")).unwrap();
    let session = std::str::from_utf8(session).unwrap();
    let floods: Vec<Attack> = (0..2)
        .map(|_| {
            let mut flood = attacking(&intruder);
            flood.args(["say=connecting", "flood=3600000"]).env("MEMTRACE_SESSION", session);
            let mut flood = Attack(flood.stdout(Stdio::piped()).spawn().unwrap());
            let mut line = String::new();
            let stdout = flood.0.stdout.as_mut().unwrap();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
            assert_eq!(line, "connecting\n");
            flood
        })
        .collect();
    for _ in 0..TURNS {
        scenario.send_line();
        println!("eight processes lived for {} ms", scenario.line());
    }
    drop(floods);
    scenario.close_stdin();
    assert_eq!(scenario.end().code, 3, "{}", scenario.launcher_messages());
    let ledgers = scenario.ledgers();
    let mut recorded = BTreeSet::new();
    for (_, trace) in scenario.traces() {
        assert_eq!(trace.end().map(|end| (end.lost, end.late)), Some((0, 0)));
        let events = crate::crash_support::all_events(&trace);
        assert_equal(&calls_of(&trace, &events), &ledgers[&pid(&trace)]);
        recorded.insert(pid(&trace));
    }
    assert_eq!(ledgers.len(), 8 * TURNS);
    assert_eq!(recorded, ledgers.into_keys().collect(), "{:#}", scenario.manifest()["refused"]);
    assert!(scenario.manifest()["refused"]["process of another user"].as_u64() > Some(100));
}

/// The attacker knows the name of the library's folder below a world-writable one, and puts folders and links there
/// before memtrace starts and while it does. The library that is loaded is always the user's own and genuine.
#[test]
fn another_user_cannot_replace_the_preloaded_library() {
    const STARTS: usize = 8;
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    chmod(folder.path(), 0o755);
    let path = |name: &str| folder.path().join(name);
    std::fs::copy(memtrace(), path("memtrace")).unwrap();
    for (name, owner, mode) in [("victims", VICTIM, 0o700), ("trap", ATTACKER, 0o777)] {
        std::fs::create_dir(path(name)).unwrap();
        std::os::unix::fs::chown(path(name), Some(owner), Some(owner)).unwrap();
        chmod(&path(name), mode);
    }
    let places: Vec<_> = (0..STARTS).map(|number| path(&format!("tmp{number}"))).collect();
    for place in &places {
        std::fs::create_dir(place).unwrap();
        chmod(place, 0o1777);
    }
    // Prints the owner of the loaded library and, from the second start on, whether it is the genuine one.
    const PRINT: &str = r#"stat -c %u "$LD_PRELOAD"
        if [ -e "$1" ]; then cmp "$1" "$LD_PRELOAD"; else echo "$LD_PRELOAD"; cp "$LD_PRELOAD" "$1"; fi"#;
    // No other folder of this machine may serve: the next choice, /var/tmp, is empty.
    let isolate =
        r#"mount -t tmpfs -o mode=1777 none /var/tmp && exec setpriv --reuid 65533 --regid 65533 --clear-groups "$@""#;
    let start = |place: &Path, run: &str| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", isolate, "sh"]).arg(path("memtrace")).args(["--quiet", "-o"]);
        command.arg(path("victims").join(run)).args(["--", "sh", "-c", PRINT, "sh"]).arg(path("victims/genuine"));
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("TMPDIR", place).current_dir("/");
        let output = output(&mut command);
        assert!(output.status.success(), "{}: {}", place.display(), stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let undisturbed = start(&places[0], "run");
    let library = undisturbed.strip_prefix("65533\n").expect(&undisturbed).trim();
    let inside = Path::new(library).strip_prefix(&places[0]).expect("the first choice is below TMPDIR");
    let base = inside.components().next().unwrap().as_os_str().to_str().unwrap();
    let mut parts = inside.components().rev();
    let (name, hash) = (parts.next().unwrap(), parts.next().unwrap());
    let [name, hash] = [name, hash].map(|part| part.as_os_str().to_str().unwrap().to_owned());
    // The traps contain a forged library at the place where memtrace looks for its own.
    let trap = path("trap");
    let forge =
        format!(r#"mkdir -p "{0}/{hash}" && echo forged > "{0}/{hash}/{name}" && chmod -R 777 "{0}""#, trap.display());
    assert!(output(attacking("sh").args(["-c", &forge])).status.success());
    let before = std::fs::read(trap.join(&hash).join(&name)).unwrap();
    for (number, attack) in [
        format!(r#"cp -r "{}" "$1/{base}""#, trap.display()),
        format!(r#"ln -s "{}" "$1/{base}""#, trap.display()),
        format!(r#"ln -s "{}" "$1/{base}""#, path("victims").display()),
    ]
    .iter()
    .enumerate()
    {
        let place = &places[number + 1];
        assert!(output(attacking("sh").args(["-c", attack, "sh"]).arg(place)).status.success());
        assert_eq!(start(place, &format!("run{number}")), "65533\n", "{attack}");
    }
    assert!(!path("victims").join(&hash).exists(), "nothing is created behind another user's link");
    // Now the attacker changes the folders as fast as possible while memtrace starts.
    let race = format!(
        r#"while :; do for place; do
            p="$place/{base}"; ln -s "{trap}" "$p"; rm "$p"; mkdir "$p"; cp -r "{trap}/{hash}" "$p"; rm -r "$p"
        done; done 2>/dev/null"#,
        trap = trap.display()
    );
    let mut racing = attacking("sh");
    racing.args(["-c", &race, "sh"]).args(&places[4..]).stdout(Stdio::null()).stderr(Stdio::null());
    let racing = Attack(racing.spawn().unwrap());
    for (number, place) in places.iter().enumerate().skip(4) {
        assert_eq!(start(place, &format!("raced{number}")), "65533\n");
    }
    drop(racing);
    assert_eq!(std::fs::read(trap.join(&hash).join(&name)).unwrap(), before);
    assert_eq!(std::fs::metadata(path("victims/genuine")).unwrap().uid(), VICTIM);
}

/// The run folder lies where every user may rename it. Another user moves it away during the recording and puts a
/// folder of its own in its place: everything goes into the moved one, which stays closed.
#[test]
fn a_run_folder_that_another_user_replaces_gets_nothing() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    chmod(folder.path(), 0o777);
    let run = folder.path().join("run");
    let mut command = Command::new(memtrace());
    command.args(["--quiet", "-o"]).arg(&run).arg("--").arg(PRODUCER);
    command.args(["define", "events=1000", "write", "say=ready", "wait", "write"]);
    let mut running = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(running.line(), "ready");
    let script = r#"cd "$1" && mv run moved && mkdir run && chmod 777 run && ! ls moved 2>/dev/null"#;
    let replaced = output(attacking("sh").args(["-c", script, "sh"]).arg(folder.path()));
    assert!(replaced.status.success(), "{}", stderr(&replaced));
    drop(running.child.stdin.take());
    assert!(running.child.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(&run).unwrap().count(), 0, "the attacker's folder");
    let moved = folder.path().join("moved");
    assert_eq!(std::fs::metadata(&moved).unwrap().mode() & 0o777, 0o700);
    assert_eq!(only_trace(&moved).event_count(), 2000);
    assert!(moved.join("summary.json").exists());
}

/// Listens under many names of the kind that launchers of root have, and answers nobody: some queues are full, so that
/// connecting would wait, other peers are silent, one name is not UTF-8. One peer listens under a name of its own user
/// and sends a byte from time to time.
const LISTEN: &str = r#"
import os, socket, threading, time
def listen(name, backlog):
    one = socket.socket(socket.AF_UNIX)
    one.bind(b"\0" + name)
    one.listen(backlog)
    return one
kept = [listen(b"memtrace-0-%032x" % number, 100) for number in range(100)]
for number in range(1000, 1100):
    name = b"memtrace-0-%032x" % number
    kept.append(listen(name, 0))
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        kept.append(one)
        try:
            one.connect(b"\0" + name)
        except BlockingIOError:
            break
kept.append(listen(b"memtrace-0-\xff\n\xff", 1))
own = listen(b"memtrace-%d-%032x" % (os.getuid(), 1), 100)
def trickle():
    while True:
        peer, _ = own.accept()
        threading.Thread(target=drip, args=[peer], daemon=True).start()
def drip(peer):
    try:
        while True:
            peer.send(b"[")
            time.sleep(0.2)
    except OSError:
        pass
print("listening", flush=True)
trickle()
"#;

/// Another user listens under the names of sessions: commands that look for a recording find it nevertheless, and end.
#[test]
fn another_user_cannot_hang_the_commands_that_find_recordings() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = Command::new(memtrace());
    command.args(["--quiet", "-o"]).arg(&run).arg("--").arg(PRODUCER);
    command.args(["define", "events=1000", "write", "say=ready", "wait"]);
    let mut running = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(running.line(), "ready");
    let mut attack = attacking("python3");
    let mut attack = Attack(attack.args(["-c", LISTEN]).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    let stdout = attack.0.stdout.as_mut().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
    assert_eq!(line, "listening\n");
    let live = output(Command::new(memtrace()).args(["live", "--once"]).arg(&run).current_dir(folder.path()));
    assert!(live.status.success(), "{}", stderr(&live));
    assert!(String::from_utf8_lossy(&live.stdout).contains(&*run.to_string_lossy()), "{live:?}");
    let snapshot = output(Command::new(memtrace()).arg("snapshot").arg(&run).current_dir(folder.path()));
    assert!(snapshot.status.success(), "{}", stderr(&snapshot));
    // It looks for recordings first.
    let attach = output(Command::new(memtrace()).args(["attach", "999999999"]).current_dir(folder.path()));
    assert_eq!(attach.status.code(), Some(2), "{}", stderr(&attach));
    drop(attack);
    drop(running.child.stdin.take());
    assert!(running.child.wait().unwrap().success());
}
