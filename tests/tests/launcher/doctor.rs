//! `memtrace doctor` reports what can be recorded, and each failed check with its reason and fix. Its exit status gives
//! the same answer.
//!
//! Every report is compared with an independent source: the trace, the Pythons themselves, the test suite's own text.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::json_schema;
use memtrace_tests::programs::{ProgramFolder, simcuda};
use memtrace_tests::traced_program::{TracedProgram, memtrace, root};
use memtrace_tests::versions::{TRACKED, Versions};
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Reader;
use serde_json::Value;

/// A PATH with few Pythons, because doctor runs each of them.
const SHORT_PATH: &str = "/usr/bin:/bin";

/// A report of doctor, after the checks that hold for every report.
struct DoctorReport {
    json: Value,
    stderr: String,
}

impl DoctorReport {
    #[track_caller]
    fn of(output: &Output) -> DoctorReport {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let json: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{e}\nstdout: {}\nstderr: {stderr}", String::from_utf8_lossy(&output.stdout)));
        let schema = std::fs::read_to_string(root().join("launcher/schema/doctor.schema.json")).unwrap();
        json_schema::assert_valid(&serde_json::from_str(&schema).unwrap(), &json);
        let report = DoctorReport { json, stderr };
        let failed: Vec<&Value> = report.checks().into_iter().filter(|f| f["status"] == "failed").collect();
        for check in &failed {
            assert!(check["fix"].as_str().is_some_and(|m| m.len() > 10), "no fix: {check}");
            assert!(check["detail"].as_str().is_some_and(|m| m.len() > 3), "no reason: {check}");
        }
        assert_eq!(report.json["failed"], failed.len());
        assert_eq!(report.json["ok"], failed.is_empty());
        assert_eq!(output.status.code(), Some(i32::from(!failed.is_empty())), "{failed:#?}\n{}", report.stderr);
        report
    }

    /// Every check, at any depth of the JSON.
    fn checks(&self) -> Vec<&Value> {
        fn collect<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
            match value {
                Value::Object(map) if map.contains_key("status") && map.contains_key("detail") => found.push(value),
                Value::Object(map) => map.values().for_each(|v| collect(v, found)),
                Value::Array(all) => all.iter().for_each(|v| collect(v, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        collect(&self.json, &mut found);
        found
    }

    /// The check of this name about the machine.
    #[track_caller]
    fn machine(&self, what: &str) -> &Value {
        named(&self.json["machine"]["checks"], what)
    }

    /// The only recorded process.
    #[track_caller]
    fn process(&self) -> &Value {
        let processes = self.json["program"]["processes"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{:#}", self.json["program"]);
        &processes[0]
    }

    /// The names of the checks that failed.
    fn failed(&self) -> Vec<&str> {
        let failed = self.checks().into_iter().filter(|f| f["status"] == "failed");
        failed.filter_map(|f| f["name"].as_str()).collect()
    }
}

#[track_caller]
fn named<'a>(checks: &'a Value, what: &str) -> &'a Value {
    let all = checks.as_array().unwrap();
    all.iter().find(|f| f["name"] == what).unwrap_or_else(|| panic!("no check {what} in {all:#?}"))
}

fn doctor<S: AsRef<OsStr>>(words: &[S]) -> Command {
    let mut command = Command::new(memtrace());
    command.args(["doctor", "--json"]).args(words).env("PATH", SHORT_PATH);
    command
}

#[track_caller]
fn ask<S: AsRef<OsStr>>(words: &[S]) -> DoctorReport {
    DoctorReport::of(&doctor(words).output().unwrap())
}

/// Runs doctor on a program over the simulated CUDA, with only the environment's own Python on PATH.
fn over_simcuda(versions: Versions, words: &[&str]) -> Output {
    let script = "PATH=${PATH%%:*}:/usr/bin:/bin; exec \"$@\"";
    let memtrace = memtrace();
    let start = ["sh", "-c", script, "sh", memtrace.to_str().unwrap(), "doctor"];
    let traced = TracedProgram::command(&[&start, words].concat()).over_simcuda();
    traced.on(versions).run_alone()
}

fn program(name: &str) -> String {
    root().join("tests/programs").join(name).to_str().unwrap().to_owned()
}

#[test]
fn doctor_checks_this_machine() {
    // The PATH of the user who runs the tests, with all its Pythons.
    let output = Command::new(memtrace()).args(["doctor", "--json"]).output().unwrap();
    let report = DoctorReport::of(&output);
    assert_eq!(report.json["program"], Value::Null);
    assert_eq!(report.machine("Self-test")["status"], "ok", "{}", report.machine("Self-test"));
    let name = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(report.machine("System")["detail"].as_str().unwrap().contains(name.trim()));

    let pythons = report.json["machine"]["pythons"].as_array().unwrap();
    assert!(pythons.first().is_some_and(|p| p["is_default"] == true), "{pythons:#?}");
    for python in pythons {
        // The interpreter's own `--version` is the independent source.
        let version_text = Command::new(python["path"].as_str().unwrap()).arg("--version").output().unwrap();
        let version_text = String::from_utf8_lossy(&[version_text.stdout, version_text.stderr].concat()).into_owned();
        let version = python["version"].as_str().unwrap();
        assert_eq!(version_text.trim(), format!("Python {version}"));
        let minor: u32 = version.split('.').nth(1).unwrap().parse().unwrap();
        let supported = version.starts_with("3.") && (8..=14).contains(&minor);
        let stacks = &python["stacks"];
        assert_eq!(stacks["status"] == "ok", supported, "{python:#}");
        assert!(supported || stacks["fix"].is_string(), "{python:#}");
    }

    // The text output agrees with the JSON, without terminal escapes.
    let page = Command::new(memtrace()).arg("doctor").env("PATH", SHORT_PATH).output().unwrap();
    let text = String::from_utf8(page.stdout).unwrap();
    let first = text.lines().next().unwrap();
    assert_eq!(page.status.code() == Some(0), first == "All checks passed", "{text}");
    assert!(text.contains("Self-test            ok   4,000 events"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
}

/// The number of a trace's events that match.
fn number(events: &[Event], which: impl Fn(&Event) -> bool) -> u64 {
    events.iter().filter(|e| which(e)).count() as u64
}

/// The number that a check's text begins with.
#[track_caller]
fn figure(check: &Value) -> u64 {
    let found = check["detail"].as_str().unwrap();
    let digits: String = found.chars().take_while(|c| c.is_ascii_digit() || *c == ',').filter(|c| *c != ',').collect();
    digits.parse().unwrap_or_else(|_| panic!("{check}"))
}

#[test]
fn doctor_checks_a_training_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mlp = program("torch/mlp.py");
    let output = over_simcuda(Versions::DEFAULT, &["--json", "-o", run.to_str().unwrap(), "--", "python", &mlp]);
    let report = DoctorReport::of(&output);
    assert_eq!(output.status.code(), Some(0), "{:?}", report.failed());
    // The program's own output has PyTorch's peak, and so has the recording.
    let summary = Command::new(memtrace()).args(["report", "--json"]).arg(&run).output().unwrap();
    let summary: Value = serde_json::from_slice(&summary.stdout).unwrap();
    let peak = &summary["processes"][0]["devices"][0]["highest"]["allocated_bytes"];
    assert!(report.stderr.contains(&format!("peak {peak} reserved ")), "{peak}: {}", report.stderr);

    // Compare every number with the trace, which `-o` kept.
    let traces: Vec<_> = std::fs::read_dir(&run)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "mtr"))
        .collect();
    let trace = Reader::open(&traces[0]).unwrap();
    let events: Vec<Event> = trace.events().flat_map(|b| b.unwrap()).collect();
    let process = report.process();
    let layer = |name: &str| {
        let check = named(&process["layers"], name);
        assert_eq!(check["status"], "ok", "{check}");
        check
    };
    let has = |e: &Event, flags| e.flags.contains(flags);
    let blocks = |e: &Event| e.source == Source::Torch && e.action == Action::Alloc;
    let is_counted = |e: &Event| !matches!(e.action, Action::Totals | Action::DeviceUsage) && e.source != Source::Label;
    let backward = |e: &Event| e.source.is_torch() && has(e, Flags::IN_BACKWARD) && is_counted(e);
    let figures = [
        ("CUDA driver", number(&events, |e| e.source == Source::Driver)),
        ("CUDA runtime", number(&events, |e| e.source == Source::Runtime)),
        ("Allocator tracker", number(&events, |e| e.source == Source::Torch)),
        ("Profiler reporter", number(&events, blocks)),
        ("CPU tensors", number(&events, |e| e.source == Source::TorchCpu)),
        ("Autograd nodes", number(&events, backward)),
        ("Forward stacks", number(&events, backward)),
        ("Grad mode", number(&events, |e| e.source.is_torch() && is_counted(e))),
    ];
    for (name, expected) in figures {
        assert_eq!((name, figure(layer(name))), (name, expected));
        assert!(expected > 0, "{name}");
    }
    let is_python = |e: &Event| {
        let definitions = trace.definitions();
        definitions.walk_ids(e.stack).any(|(_, f)| !definitions.native_frames.contains_key(&f))
    };
    let stacks = &process["stacks"];
    assert_eq!(stacks["python"], number(&events, |e| is_python(e) && is_counted(e)));
    assert_eq!(figure(layer("Python stacks")), stacks["python"]);
    assert_eq!(figure(layer("Native stacks")), stacks["native"]);
    let sum: u64 =
        ["python", "merged", "native", "autograd", "none"].iter().map(|k| stacks[*k].as_u64().unwrap()).sum();
    assert_eq!(sum, number(&events, is_counted));
    assert_eq!(process["events"], events.len());
    // The output names what was verified.
    for (name, proof) in [
        ("Allocator tracker", "TraceEntry verified"),
        ("Python stacks", "layout verified"),
        ("Autograd nodes", "Node verified"),
        ("Grad mode", "AutogradState verified"),
    ] {
        assert!(layer(name)["detail"].as_str().unwrap().contains(proof), "{}", layer(name));
    }
    // The folder of the environment is named after the installed release.
    let environment = Command::new(root().join("scripts/venv")).output().unwrap();
    let environment = String::from_utf8_lossy(&environment.stdout).into_owned();
    let version = process["pytorch"]["version"].as_str().unwrap();
    let release = version.split('+').next().unwrap();
    assert!(environment.contains(&format!("/torch-{release}-py")), "{version}: {environment}");
    assert_eq!(process["pytorch"]["tested"]["status"], "ok");
    // Doctor also finds this PyTorch in the environment's Python, from its files alone.
    let python = &report.json["machine"]["pythons"][0];
    assert_eq!(python["pytorch"]["version"], process["pytorch"]["version"], "{python:#}");
}

#[test]
fn doctor_checks_labels_names_and_modules() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let program = program("doctor/meaning.py");
    let output = over_simcuda(Versions::DEFAULT, &["--json", "-o", run.to_str().unwrap(), "--", "python", &program]);
    let report = DoctorReport::of(&output);
    assert_eq!(output.status.code(), Some(0), "{:?}", report.failed());
    let mut traces = std::fs::read_dir(&run).unwrap().map(|e| e.unwrap().path());
    let trace = Reader::open(traces.find(|p| p.extension().is_some_and(|e| e == "mtr")).unwrap()).unwrap();
    let events: Vec<Event> = trace.events().flat_map(|b| b.unwrap()).collect();
    let definitions = trace.definitions();
    let labels = |origin| definitions.labels.values().filter(|l| l.origin == origin).count() as u64;
    let collected = number(&events, |e| e.flags.contains(Flags::IN_GC) && e.action == Action::FreeRequested);
    assert!(collected >= 1);
    let figures = [
        ("Tensor names", definitions.tensor_names.len() as u64),
        ("Module calls", definitions.nn_calls.len() as u64),
        ("record_function", labels(LabelOrigin::RecordFunction)),
        ("NVTX", labels(LabelOrigin::Nvtx)),
        ("Garbage collector", collected),
    ];
    for (name, expected) in figures {
        let check = named(&report.process()["layers"], name);
        assert_eq!(check["status"], "ok", "{check}");
        assert!(expected > 0 && figure(check) == expected, "{expected}: {check}");
    }
    // A program without these features: no check fails, and each check gives the reason for its absence.
    let one = "import torch; torch.zeros(1 << 20, device='cuda')";
    let plain = DoctorReport::of(&over_simcuda(Versions::DEFAULT, &["--json", "--", "python", "-c", one]));
    assert!(plain.failed().is_empty(), "{:?}", plain.failed());
    for name in ["Tensor names", "Module calls", "NVTX"] {
        let check = named(&plain.process()["layers"], name);
        assert_eq!(check["status"], "unused", "{check}");
        assert!(check["detail"].as_str().unwrap().len() > 10, "{check}");
    }
}

#[test]
fn a_static_program_is_reported_before_it_runs() {
    let programs = ProgramFolder::new();
    let program = programs.path("static");
    let source = root().join("tests/programs/host/quiet.c");
    let status = Command::new("cc").args(["-static", "-o"]).arg(&program).arg(source).status().unwrap();
    assert!(status.success());
    let report = ask(&["--", program.to_str().unwrap()]);
    assert_eq!(report.failed(), ["Command"]);
    let check = named(&report.json["program"]["checks"], "Command");
    assert!(check["detail"].as_str().unwrap().contains("statically linked"), "{check}");
    assert_eq!(report.json["program"]["ending"], "");
}

#[test]
fn programs_that_allocate_nothing_or_fail_are_reported() {
    let report = ask(&["--", "true"]);
    assert_eq!(report.json["program"]["processes"].as_array().map(Vec::len), Some(0));
    assert_eq!(named(&report.json["program"]["checks"], "Recording")["status"], "unused");
    let report = ask(&["--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(report.json["program"]["ending"], "exit status 7");
    assert!(report.stderr.contains("out") && report.stderr.contains("err"), "{}", report.stderr);
    let missing = ask(&["--", "no-such-program-here"]);
    assert_eq!(missing.failed(), ["Command"]);
}

#[test]
fn a_python_with_an_unknown_layout_is_reported() {
    let programs = ProgramFolder::new();
    let python = programs.program("doctor/other_python.c", "python9", &["-rdynamic"]);
    let report = ask(&["--", python.to_str().unwrap()]);
    // Without PyTorch the checks of grad mode and named ranges fail too.
    assert_eq!(report.failed(), ["Python stacks", "Grad mode", "record_function"]);
    let stacks = named(&report.process()["layers"], "Python stacks");
    assert!(stacks["detail"].as_str().unwrap().contains("version is not supported"), "{stacks}");
    assert!(stacks["fix"].as_str().unwrap().contains("CPython 3.8 to 3.15"), "{stacks}");
    // The event is recorded nevertheless, with its native stack.
    assert_eq!(report.process()["stacks"]["native"], 1);
    assert_eq!(figure(named(&report.process()["layers"], "CPU tensors")), 1);
}

#[test]
fn doctor_works_without_home_and_path() {
    let mut command = doctor::<&str>(&[]);
    for name in ["HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"] {
        command.env_remove(name);
    }
    let report = DoctorReport::of(&command.env("PATH", "/nonexistent").output().unwrap());
    assert_eq!(report.failed(), [""; 0]);
    assert_eq!(report.json["machine"]["pythons"].as_array().map(Vec::len), Some(0));
    assert_eq!(report.machine("Self-test")["status"], "ok");
    let library = report.machine("Preloaded library")["detail"].as_str().unwrap();
    assert!(Path::new(library).is_absolute(), "{library}");
}

#[test]
fn another_memtrace_on_path_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("memtrace");
    std::fs::copy("/bin/true", &other).unwrap();
    let path = |first: &Path| format!("{}:{SHORT_PATH}", first.display());
    let name = "Command memtrace";
    let this = memtrace().canonicalize().unwrap();

    let report = DoctorReport::of(&doctor::<&str>(&[]).env("PATH", path(folder.path())).output().unwrap());
    let check = report.machine(name);
    assert_eq!(check["status"], "note", "{check}");
    let detail = check["detail"].as_str().unwrap();
    assert!(detail.contains(other.to_str().unwrap()) && detail.contains(this.to_str().unwrap()), "{detail}");
    assert!(check["fix"].as_str().unwrap().contains(this.to_str().unwrap()), "{check}");
    // The text report for people has both lines.
    let text = doctor_as_text(&path(folder.path()));
    assert!(text.contains(&format!("{name}     note on PATH it is another program")), "{text}");

    let report = DoctorReport::of(&doctor::<&str>(&[]).env("PATH", path(this.parent().unwrap())).output().unwrap());
    assert_eq!(report.machine(name)["status"], "ok", "{}", report.machine(name));
}

fn doctor_as_text(path: &str) -> String {
    let output = Command::new(memtrace()).arg("doctor").env("PATH", path).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Makes a system call fail with EPERM in a child, as a sandbox does.
fn forbid(command: &mut Command, call: libc::c_long) {
    let filter = move || {
        let line = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let mut lines = [
            // Load the system call's number.
            line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            line(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
            line(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            line(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
        // SAFETY: `program` points to `lines`; both live until `prctl` returns, and the kernel copies the filter.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure only calls `prctl`, which is async-signal-safe. It allocates nothing.
    unsafe { command.pre_exec(filter) };
}

#[test]
fn a_sandbox_without_shared_memory_is_reported() {
    let mut command = doctor::<&str>(&[]);
    forbid(&mut command, libc::SYS_memfd_create);
    let report = DoctorReport::of(&command.output().unwrap());
    assert!(
        report.failed().starts_with(&["Shared memory"]) && report.failed().contains(&"Self-test"),
        "{:?}",
        report.failed()
    );
    let memory = report.machine("Shared memory");
    assert!(memory["fix"].as_str().unwrap().contains("seccomp"), "{memory}");
    assert_eq!(report.machine("seccomp")["status"], "note");
}

#[test]
fn resource_limits_and_a_read_only_folder_are_reported() {
    let output = Command::new("/bin/sh")
        .args(["-c", "ulimit -v 300000; cd /proc && exec \"$@\"", "sh"])
        .arg(memtrace())
        .args(["doctor", "--json"])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    let report = DoctorReport::of(&output);
    for what in ["Shared memory", "Address space", "Run folder"] {
        assert_eq!(report.machine(what)["status"], "failed", "{}", report.machine(what));
    }
    assert!(report.machine("Address space")["fix"].as_str().unwrap().contains("ulimit -v"));
}

/// Doctor ends a program that would run forever after two seconds, and reports the process that could not be recorded.
#[test]
fn doctor_ends_at_its_time_limit_and_reports_an_unrecorded_child() {
    let programs = ProgramFolder::new();
    let pid_file = programs.path("pid");
    let python = "import ctypes, os, time; ctypes.CDLL('libcuda.so.1'); \
                  open(os.environ['PID'], 'w').write(str(os.getpid())); time.sleep(1000)";
    let script = format!(
        "env -i LD_LIBRARY_PATH={} PID={} /usr/bin/python3 -c \"{python}\" & trap '' HUP; wait",
        simcuda().display(),
        pid_file.display()
    );
    let report = ask(&["--duration", "2", "--", "sh", "-c", &script]);
    let program = &report.json["program"];
    assert_eq!(program["stopped"], true);
    assert!((2.0..20.0).contains(&program["seconds"].as_f64().unwrap()), "{program:#}");
    let pid: u32 = std::fs::read_to_string(&pid_file).unwrap().parse().unwrap();
    let not_recorded = program["not_recorded"].as_array().unwrap();
    let process = not_recorded.iter().find(|s| s["pid"] == pid).unwrap_or_else(|| panic!("{pid}: {not_recorded:#?}"));
    assert_eq!(process["check"]["status"], "failed", "{process}");
    assert!(process["check"]["detail"].as_str().unwrap().contains("LD_PRELOAD"), "{process}");
    assert!(process["check"]["fix"].as_str().unwrap().contains("MEMTRACE_SESSION"), "{process}");
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z"), "it still runs: {state}");
}

#[test]
fn bad_usage_gives_no_report() {
    for words in [&["--no-such-option"][..], &["--duration", "0", "--", "true"], &["--duration", "3"], &["-o", "x"]] {
        let output = doctor(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{words:?}");
    }
}

/// The single list of tested versions has the versions that the suite runs, and the documentation agrees with it.
#[test]
fn the_list_of_tested_versions_is_complete() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let list: Value = serde_json::from_str(&read("launcher/src/doctor/tested-versions.json")).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let pairs = list["pairs"].as_array().unwrap();
    let listed: Vec<_> = pairs.iter().map(|pair| (text(&pair["pytorch"]), text(&pair["cpython"]))).collect();
    let run = std::iter::once(&Versions::REPORTER_ONLY).chain(TRACKED).chain([&Versions::FREE_THREADED]);
    let run: BTreeSet<_> = run.map(|v| (v.torch.to_owned(), v.python.to_owned())).collect();
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), run, "tests/src/versions.rs");

    let stacks: Vec<String> = list["stacks"].as_array().unwrap().iter().map(text).collect();
    let layouts = read("interpose/stackwalk/src/python/layout.rs");
    let known: BTreeSet<String> = layouts
        .lines()
        .filter_map(|l| l.split_once("Version { major: 3, minor: ")?.1.split_once(" }"))
        .filter_map(|(minor, _)| minor.parse::<u32>().ok())
        .filter(|minor| (8..50).contains(minor))
        .map(|minor| format!("3.{minor}"))
        .collect();
    assert_eq!(stacks.iter().cloned().collect::<BTreeSet<_>>(), known, "layout.rs");

    let page = Command::new(root().join("scripts/versions")).arg("--page").output().unwrap();
    assert!(page.status.success(), "{}", String::from_utf8_lossy(&page.stderr));
    let is_same = page.stdout == read("docs/reference/versions.md").as_bytes();
    assert!(is_same, "docs/reference/versions.md: run scripts/versions --update and look at what changed");

    let (first, last) = (&stacks[0], &stacks[stacks.len() - 1]);
    // The first versions, without the third number, that have a feature.
    let first_with = |feature: &str, key: &str| -> String {
        let has = |pair: &&Value| !pair["off"].as_array().unwrap().iter().any(|off| off["feature"] == feature);
        let version = |pair: &Value| -> Vec<u32> {
            text(&pair[key]).trim_end_matches('t').split('.').map(|n| n.parse().unwrap()).collect()
        };
        let first = pairs.iter().filter(has).map(version).min().unwrap();
        format!("{}.{}", first[0], first[1])
    };
    let names = first_with("Tensor names", "pytorch");
    for (path, statement) in [
        ("README.md", format!("Python stacks: CPython {first} to {last}, ")),
        ("README.md", format!("tensor names need {names} or newer")),
        ("docs/how-to/attach.md", format!("CPython {first} or newer")),
        ("docs/how-to/leaks.md", format!("PyTorch {names} or newer")),
        ("docs/how-to/reference-cycles.md", format!("CPython {} or later", first_with("Reference cycles", "cpython"))),
        ("interpose/stackwalk/src/python/reason.rs", format!("({first} to {last} are)")),
    ] {
        assert!(read(path).contains(&statement), "{path} says otherwise than: {statement}");
    }
}

mod exhaustive {
    use super::*;

    #[test]
    fn a_pytorch_without_a_trace_tracker_is_reported() {
        let mlp = program("torch/mlp.py");
        let report = DoctorReport::of(&over_simcuda(Versions::REPORTER_ONLY, &["--json", "--", "python", &mlp]));
        let layers = &report.process()["layers"];
        let names = named(layers, "Tensor names");
        assert_eq!(names["status"], "failed", "{names}");
        assert!(names["detail"].as_str().unwrap().contains("does not export"), "{names}");
        let tracker = named(layers, "Allocator tracker");
        assert_eq!(tracker["status"], "failed", "{tracker}");
        let why = tracker["detail"].as_str().unwrap();
        assert!(why.contains("not attached") && why.contains("segments and streams are missing"), "{why}");
        assert!(tracker["fix"].as_str().unwrap().contains("2.11.0"), "{tracker}");
        let reporter = named(layers, "Profiler reporter");
        assert!(reporter["status"] == "ok" && figure(reporter) > 250, "{reporter}");
        let pytorch = &report.process()["pytorch"];
        assert!(
            pytorch["version"].as_str().unwrap().starts_with("2.1.2") && pytorch["tested"]["status"] == "failed",
            "{pytorch}"
        );
    }
}
