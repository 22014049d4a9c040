//! What the reading commands accept as input, and on which stack they run: paths that are no run end each command with
//! an error, and a small stack limit changes nothing.

use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use memtrace_tests::programs::ProgramFolder;

use crate::launcher_support::{memtrace, output, stderr};

/// A command that waits for a writer of a pipe waits forever. A busy machine needs some time for everything else.
const TIME: Duration = Duration::from_secs(120);

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/snapshots/resnet_leak.pickle.gz")
}

/// Runs `memtrace` with these arguments. Panics if it does not end.
#[track_caller]
fn ended(arguments: &[&str]) -> Output {
    let mut command = Command::new(memtrace());
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > TIME {
            child.kill().unwrap();
            panic!("{arguments:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn paths_that_are_no_run_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    let _listener = UnixListener::bind(path("socket")).unwrap();
    std::fs::create_dir(path("folder")).unwrap();
    std::fs::write(path("empty"), "").unwrap();
    std::fs::File::create(path("hole")).unwrap().set_len(4 << 40).unwrap();
    std::os::unix::fs::symlink(path("pipe"), path("link")).unwrap();
    let special = ["/dev/zero", "/dev/tty", "/proc/self/environ", "/proc/kmsg", "/sys/kernel/uevent_seqnum"];
    let made = ["pipe", "socket", "folder", "empty", "hole", "link", "missing"].map(path);
    let golden = golden();
    let golden = golden.to_str().unwrap();
    for input in special.iter().copied().chain(made.iter().map(String::as_str)) {
        let commands: [&[&str]; 9] = [
            &["report", input],
            &["report", "--json", input],
            &["lines", input],
            &["diff", input, golden],
            &["diff", golden, input],
            &["check", input, "--max-peak", "1GiB"],
            &["check", golden, "--max-peak", "1TiB", "--baseline", input],
            &["export", input, "--to", "json", "-o", &path("out.json")],
            &["export", input, "--to", "snapshot", "-o", &path("out.pickle")],
        ];
        for arguments in commands {
            let ended = ended(arguments);
            let text = stderr(&ended);
            assert_eq!(ended.status.code(), Some(2), "{arguments:?}: {text}");
            assert!(text.starts_with("error: ") && text.contains(input), "{arguments:?}: {text}");
        }
    }
}

/// The golden snapshot has the steps 0 to 2 of one process without a rank, on device 0.
#[test]
fn every_command_refuses_a_selection_that_is_not_in_the_run() {
    let golden = golden();
    let golden = golden.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let export = ["export", golden, "--to", "snapshot", "-o", out.to_str().unwrap()];
    let commands: [&[&str]; 4] =
        [&["lines", golden], &["diff", golden, golden], &["check", golden, "--max-peak", "1TiB"], &export];
    let refused = |command: &[&str], option: &[&str], error: &str, help: &str| {
        let ended = ended(&[command, option].concat());
        let text = stderr(&ended);
        assert_eq!(ended.status.code(), Some(2), "{command:?} {option:?}: {text}");
        let expected = format!("error: {golden} {error}\nhelp: {help}");
        assert!(text.starts_with(&expected), "{command:?} {option:?}: {text}");
    };
    for command in commands {
        refused(command, &["--rank", "3"], "has no process of rank 3", "its processes are ");
        refused(command, &["--device", "5"], "has no events of device 5", "its devices are 0\n");
    }
    for command in [commands[0], commands[3]] {
        refused(command, &["--pid", "7"], "has no process 7", "its processes are ");
    }
    refused(&["diff", golden], &["--steps", "9", "0"], "has no step 9", "its steps are 0 to 2\n");
    refused(&["diff", golden], &["--steps", "0", "3"], "has no step 3", "its steps are 0 to 2\n");
    refused(&export, &["--steps", "9"], "has no events in step 9", "its steps are 0 to 2\n");
    assert!(!out.exists(), "nothing is written where nothing matches");
}

#[test]
fn diff_writes_its_page_and_never_over_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let golden = golden();
    let diff = |arguments: &[&str]| {
        let ended = output(Command::new(memtrace()).arg("diff").args(arguments).current_dir(folder.path()));
        (ended.status.code(), stderr(&ended))
    };
    let golden = golden.to_str().unwrap();
    for (arguments, file) in [
        (&[golden, golden, "--html"][..], "diff.html"),
        (&[golden, golden, "--html", "of runs.html"], "of runs.html"),
        (&[golden, "--steps", "0", "2", "--html", "of steps.html"], "of steps.html"),
    ] {
        assert_eq!(diff(arguments), (Some(0), format!("wrote {file}\n")));
        let page = std::fs::read_to_string(folder.path().join(file)).unwrap();
        assert!(page.contains("id=\"comparison\"") && page.ends_with("</body></html>\n"), "{file}");
    }
    // Without a FILE, a run after --html is no run but the FILE.
    let copy = folder.path().join("run.pickle.gz");
    std::fs::copy(golden, &copy).unwrap();
    let (code, stderr) = diff(&["--html", "run.pickle.gz", golden, "--steps", "0", "2"]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(
        stderr.starts_with("error: cannot write run.pickle.gz: the name of a page ends in .html\nhelp: "),
        "{stderr}"
    );
    assert_eq!(std::fs::read(&copy).unwrap(), std::fs::read(golden).unwrap(), "the run is as it was");
}

/// A file that needs more than its budget is refused with an error and a help line.
#[test]
fn a_file_that_needs_too_much_memory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pickle");
    // 96 MiB of marks: 768 MiB in memory. Python writes the gzip file.
    let script = "import gzip, sys\n\
                  with gzip.open(sys.argv[1], 'wb') as f:\n    f.write(b'\\x80\\x04}')\n    \
                  for _ in range(96): f.write(b'(' * (1 << 20))";
    assert!(Command::new("python3").args(["-c", script]).arg(&path).status().unwrap().success());
    let ended = ended(&["report", path.to_str().unwrap()]);
    let text = stderr(&ended);
    assert_eq!(ended.status.code(), Some(2), "{text}");
    assert!(
        text.contains("a.pickle: it needs more memory than ") && text.contains("\nhelp: copy the file again"),
        "{text}"
    );
}

#[test]
fn a_small_stack_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let variable = |name| std::env::var_os(name).unwrap_or_default();
    let with_stack = |limit: &str, arguments: &str| {
        let script = format!("ulimit -s {limit}; exec {} {arguments}", memtrace().display());
        // The environment lies on the stack, too.
        output(
            Command::new("sh")
                .args(["-c", &script])
                .env_clear()
                .envs(["PATH", "HOME"].map(|name| (name, variable(name)))),
        )
    };
    let golden = golden();
    let golden = golden.display();
    let html = folder.path().join("out.html");
    for arguments in [
        "--version".to_owned(),
        "--help".to_owned(),
        format!("report {golden}"),
        format!("report --json {golden}"),
        format!("lines --json {golden}"),
        format!("check {golden} --max-peak 1GiB --json"),
        format!("diff {golden} {golden}"),
        format!("export {golden} --to html -o {}", html.display()),
        "report /nowhere".to_owned(),
    ] {
        let usual = with_stack("8192", &arguments);
        for limit in ["64", "16"] {
            let small = with_stack(limit, &arguments);
            let text = stderr(&small);
            assert_eq!(small.status.code(), usual.status.code(), "ulimit -s {limit}, {arguments}: {text}");
            assert!(small.stdout == usual.stdout && text == stderr(&usual), "ulimit -s {limit}, {arguments}: {text}");
        }
    }
    // With 16 KiB, the loader's own work for any preloaded library does not always fit on the command's stack
    // (`the_library_needs_no_more_stack_than_an_empty_one`).
    let command = format!("--quiet -o {} -- sh -c 'ulimit -s; exit 7'", folder.path().join("run").display());
    let ended = with_stack("64", &command);
    assert_eq!(ended.status.code(), Some(7), "{}", stderr(&ended));
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "64\n", "the limit of the command");
}

/// The size of the largest environment with which `true` starts under this preloaded library and a stack limit of 16
/// KiB, in bytes. `None` if memory cannot be laid out the same each time.
fn largest_environment(library: &Path, session: &str) -> Option<usize> {
    let starts = |bytes: usize| {
        let mut command = Command::new("/bin/true");
        command.env_clear().env("LD_PRELOAD", library).env("MEMTRACE_SESSION", session).env("X", "x".repeat(bytes));
        let prepare = || {
            let limit = libc::rlimit { rlim_cur: 16 << 10, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: both calls take plain arguments and a valid limit, and change the child alone.
            let is_prepared = unsafe {
                libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) >= 0
                    && libc::setrlimit(libc::RLIMIT_STACK, &limit) == 0
            };
            if is_prepared { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: between fork and exec the closure only makes system calls.
        unsafe { command.pre_exec(prepare) };
        // A process that cannot be prepared reports an error, one that crashes a status.
        command.status().ok().map(|status| status.success())
    };
    let (mut fits, mut too_large) = (0, 16 << 10);
    assert!(starts(fits)?, "an empty environment does not fit");
    while too_large - fits > 1 {
        let bytes = fits.midpoint(too_large);
        if starts(bytes)? {
            fits = bytes;
        } else {
            too_large = bytes;
        }
    }
    Some(fits)
}

#[test]
fn the_library_needs_no_more_stack_than_an_empty_one() {
    let programs = ProgramFolder::new();
    let empty = programs.path("empty.so");
    let source = programs.path("empty.c");
    std::fs::write(&source, "int memtrace_has_nothing;").unwrap();
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&empty, &source]).status().unwrap();
    assert!(compiled.success());
    // Under a path of the same length, because the path lies on the stack too.
    let ours = programs.path("owned.so");
    let run = programs.path("run");
    let printed = output(Command::new(memtrace()).args(["--quiet", "-o"]).arg(&run).args(["--", "printenv"]));
    let printed = String::from_utf8(printed.stdout).unwrap();
    let variable = |name: &str| printed.lines().find_map(|line| line.strip_prefix(name)).expect("a variable");
    std::fs::copy(variable("LD_PRELOAD=").split(':').next().unwrap(), &ours).unwrap();
    let session = variable("MEMTRACE_SESSION=");
    let [ours, empty] = [&ours, &empty].map(|library| largest_environment(library, session));
    let (Some(ours), Some(empty)) = (ours, empty) else {
        eprintln!("skipped: the kernel lays out memory at random, and its filter forbids to change that");
        return;
    };
    println!("an environment of {ours} bytes fits, of {empty} bytes with an empty library");
    assert!(ours + 512 > empty);
}
