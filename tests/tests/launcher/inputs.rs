//! The input that the reading commands accept, and the stack on which they run: paths that are no run end each command
//! with an error, and a small stack limit changes nothing.

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

const MIB: u64 = 1 << 20;

/// A snapshot, as JSON, of one allocation of `mib` MiB on device 0.
fn snapshot_of(mib: u64) -> String {
    let (address, size) = (1u64 << 40, mib * MIB);
    let event = |action: &str, time_us: u64| {
        let (stream, frames) = (0, [0u8; 0]);
        serde_json::json!({
            "action": action, "addr": address, "size": size, "stream": stream, "time_us": time_us, "frames": frames,
        })
    };
    let block = serde_json::json!({
        "address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": [],
    });
    let segment = serde_json::json!({
        "device": 0, "address": address, "total_size": size, "allocated_size": size, "active_size": size, "stream": 0,
        "segment_type": "large", "blocks": [block],
    });
    let events = [event("segment_alloc", 1), event("alloc", 2)];
    serde_json::json!({"segments": [segment], "device_traces": [events]}).to_string()
}

/// The ranks of a report in their order: rank, source, peak in MiB, and file.
fn ranks_of(folder: &Path, arguments: &[&str]) -> Vec<(u64, String, u64, String)> {
    let ended = output(Command::new(memtrace()).arg("report").arg("--json").args(arguments).current_dir(folder));
    assert!(ended.status.success(), "{arguments:?}: {}", stderr(&ended));
    let summary: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert!(summary["launch"]["issues"].as_array().is_none_or(Vec::is_empty), "{}", summary["launch"]);
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let ranks = summary["launch"]["ranks"].as_array().unwrap().iter().map(|rank| {
        let peak = rank["peak_bytes"].as_u64().unwrap();
        assert_eq!((peak % MIB, rank["reserved_bytes"].as_u64()), (0, Some(peak)));
        (rank["rank"].as_u64().unwrap(), text(&rank["rank_source"]), peak / MIB, text(&rank["trace"]))
    });
    ranks.collect()
}

#[test]
fn snapshots_of_several_ranks_are_one_launch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let write = |name: &str, mib: u64| {
        std::fs::create_dir_all(path.join(name).parent().unwrap()).unwrap();
        std::fs::write(path.join(name), snapshot_of(mib)).unwrap();
    };
    write("named/rank1.json", 300);
    write("named/rank0.json", 100);
    write("numbered/snapshot_10.json", 100);
    write("numbered/snapshot_9.json", 200);
    write("unnamed/a\u{1b}[31m\n\u{202e}.json", 100);
    write("unnamed/b<script>.json", 200);
    write("3/memory.json", 100);
    write("2/memory.json", 200);
    std::fs::create_dir(path.join("empty")).unwrap();
    let gzip = Command::new("gzip").arg(path.join("named/rank1.json")).status().unwrap();
    assert!(gzip.success());
    let found = |source: &str, ranks: &[(u64, u64, &str)]| {
        let row = |(rank, peak, file): &(u64, u64, &str)| (*rank, source.to_owned(), *peak, (*file).to_owned());
        ranks.iter().map(row).collect::<Vec<_>>()
    };
    let named = found("file_name", &[(1, 300, "rank1.json.gz"), (0, 100, "rank0.json")]);
    assert_eq!(ranks_of(path, &["named"]), named);
    assert_eq!(ranks_of(path, &["named/rank0.json", "named/rank1.json.gz"]), named);
    assert_eq!(ranks_of(path, &["named/rank1.json.gz", "named"]), named, "a file that is named twice counts once");
    let numbered = [(9, 200, "snapshot_9.json"), (10, 100, "snapshot_10.json")];
    assert_eq!(ranks_of(path, &["numbered"]), found("file_name", &numbered));
    let unnamed = [(1, 200, "b<script>.json"), (0, 100, "a\u{1b}[31m\n\u{202e}.json")];
    assert_eq!(ranks_of(path, &["unnamed"]), found("file_order", &unnamed));
    let folders = [(2, 200, "2/memory.json"), (3, 100, "3/memory.json")];
    assert_eq!(ranks_of(path, &["3", "2/memory.json"]), found("file_name", &folders));
    let mixed = ranks_of(path, &["named", "unnamed"]);
    assert_eq!(mixed.iter().map(|(rank, _, peak, _)| (*rank, *peak)).collect::<Vec<_>>()[..2], [(1, 300), (2, 200)]);

    let run = |arguments: &[&str]| {
        let ended = output(Command::new(memtrace()).args(arguments).current_dir(path));
        (ended.status.code(), String::from_utf8(ended.stdout.clone()).unwrap(), stderr(&ended))
    };
    let (code, text, messages) = run(&["report", "named"]);
    assert_eq!((code, messages.as_str()), (Some(0), ""));
    assert!(text.starts_with("+ 2 snapshots: "), "{text}");
    assert!(text.contains("rank 1, peak 300 MiB, 200 MiB (200 %) more than the median (rank 0)"), "{text}");
    assert_eq!(text.matches("a snapshot omits the command").count(), 1, "{text}");
    let (_, text, messages) = run(&["report", "unnamed", "--ranks"]);
    assert!(text.contains("The order of the files gives ranks 0, 1; "), "{text}");
    assert!(!(text.clone() + &messages).contains(['\u{1b}', '\u{202e}']), "{text}{messages}");
    // `check` holds each rank to the limits.
    let (code, text, _) = run(&["check", "named/rank0.json", "named/rank1.json.gz", "--max-peak", "200MiB"]);
    assert!(code == Some(1) && text.contains("peak 300 MiB > 200 MiB (rank 1, GPU 0"), "{text}");
    assert_eq!(run(&["check", "named", "--max-peak", "200MiB", "--rank", "0"]).0, Some(0));
    assert_eq!(run(&["export", "named", "--to", "parquet", "--partition", "-o", "tables"]).0, Some(0));
    assert!(path.join("tables/blocks/run=named/rank=1/rank1.parquet").is_file());

    // Other files of a folder are named once.
    std::fs::write(path.join("named/\u{1b}[31mnotes.txt"), "no snapshot").unwrap();
    std::fs::write(path.join("named/trace.json"), r#"{"traceEvents":[]}"#).unwrap();
    let (code, _, messages) = run(&["report", "named"]);
    assert!(code == Some(0) && messages.lines().count() == 1 && !messages.contains('\u{1b}'), "{messages}");
    let skipped =
        "warning: named: 2 of its entries are no readable snapshots: trace.json (it is a trace of torch.profiler";
    assert!(messages.starts_with(skipped) && messages.contains("notes.txt"), "{messages}");
    assert_eq!(ranks_of(path, &["named"]), named);

    std::fs::write(path.join("unnamed/cut.pickle"), b"\x80\x04").unwrap();
    std::fs::create_dir(path.join("damaged")).unwrap();
    std::fs::rename(path.join("unnamed/cut.pickle"), path.join("damaged/cut.pickle")).unwrap();
    std::fs::create_dir(path.join("run")).unwrap();
    std::fs::write(path.join("run/run.json"), "{}").unwrap();
    write("again/rank1.json", 1);
    for (arguments, error) in [
        (&["empty"][..], "cannot read empty: the folder contains no trace (*.mtr) and no snapshot (*.pickle, *.json)"),
        (&["named", "empty"], "cannot read empty: the folder contains no trace"),
        (&["named", "missing"], "cannot read missing: No such file or directory"),
        (&["damaged"], "cannot read any of the 1 snapshots in damaged, for example cut.pickle: it is cut off"),
        (&["named", "damaged/cut.pickle"], "cannot read damaged/cut.pickle: it is cut off at byte 2"),
        (&["named", "again/rank1.json"], "cannot read again/rank1.json: it is of rank 1, as named/rank1.json.gz is"),
        (&["named", "run"], "cannot read run beside others: it is a recorded run"),
    ] {
        let (code, text, messages) = run(&[&["report"], arguments].concat());
        assert_eq!((code, text.as_str()), (Some(2), ""), "{arguments:?}: {messages}");
        let messages = messages.lines().filter(|line| !line.starts_with("warning: ")).collect::<Vec<_>>().join("\n");
        assert!(messages.starts_with(&format!("error: {error}")) && messages.contains("\nhelp: "), "{messages}");
    }
}
