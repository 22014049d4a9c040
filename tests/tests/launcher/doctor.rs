//! `memtrace doctor` reports what can be recorded, what is off and why, and the fix. Its exit status gives the same
//! answer.
//!
//! Every answer is compared with an independent source: the trace, the Pythons themselves, the test suite's own text.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::json_schema;
use memtrace_tests::programs::{Workshop, simcuda};
use memtrace_tests::victim::{Victim, memtrace, root};
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Reader;
use serde_json::Value;

/// A PATH with few Pythons, because doctor runs each of them.
const SHORT_PATH: &str = "/usr/bin:/bin";

/// An answer of doctor, after the checks that hold for every answer.
struct Answer {
    json: Value,
    stderr: String,
}

impl Answer {
    #[track_caller]
    fn of(output: &Output) -> Answer {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let json: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{e}\nstdout: {}\nstderr: {stderr}", String::from_utf8_lossy(&output.stdout)));
        let schema = std::fs::read_to_string(root().join("launcher/schema/doctor.schema.json")).unwrap();
        json_schema::assert_valid(&serde_json::from_str(&schema).unwrap(), &json);
        let answer = Answer { json, stderr };
        let off: Vec<&Value> = answer.findings().into_iter().filter(|f| f["state"] == "off").collect();
        for finding in &off {
            assert!(finding["mend"].as_str().is_some_and(|m| m.len() > 10), "no mend: {finding}");
            assert!(finding["found"].as_str().is_some_and(|m| m.len() > 3), "no reason: {finding}");
        }
        assert_eq!(answer.json["off"], off.len());
        assert_eq!(answer.json["ok"], off.is_empty());
        assert_eq!(output.status.code(), Some(i32::from(!off.is_empty())), "{off:#?}\n{}", answer.stderr);
        answer
    }

    /// Every finding, at any depth of the JSON.
    fn findings(&self) -> Vec<&Value> {
        fn collect<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
            match value {
                Value::Object(map) if map.contains_key("state") && map.contains_key("found") => found.push(value),
                Value::Object(map) => map.values().for_each(|v| collect(v, found)),
                Value::Array(all) => all.iter().for_each(|v| collect(v, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        collect(&self.json, &mut found);
        found
    }

    /// The finding of this name about the machine.
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

    /// The names of the findings that are off.
    fn off(&self) -> Vec<&str> {
        let off = self.findings().into_iter().filter(|f| f["state"] == "off");
        off.filter_map(|f| f["what"].as_str()).collect()
    }
}

#[track_caller]
fn named<'a>(findings: &'a Value, what: &str) -> &'a Value {
    let all = findings.as_array().unwrap();
    all.iter().find(|f| f["what"] == what).unwrap_or_else(|| panic!("no finding {what} in {all:#?}"))
}

fn doctor<S: AsRef<OsStr>>(words: &[S]) -> Command {
    let mut command = Command::new(memtrace());
    command.args(["doctor", "--json"]).args(words).env("PATH", SHORT_PATH);
    command
}

#[track_caller]
fn ask<S: AsRef<OsStr>>(words: &[S]) -> Answer {
    Answer::of(&doctor(words).output().unwrap())
}

/// Runs doctor on a program over the simulated CUDA, with only the environment's own Python on PATH.
fn over_simcuda(torch: Option<&str>, words: &[&str]) -> Output {
    let script = "PATH=${PATH%%:*}:/usr/bin:/bin; exec \"$@\"";
    let memtrace = memtrace();
    let start = ["sh", "-c", script, "sh", memtrace.to_str().unwrap(), "doctor"];
    let victim = Victim::command(&[&start, words].concat()).over_simcuda();
    match torch {
        Some(torch) => victim.env("SIM_TORCH", torch).run_alone(),
        None => victim.run_alone(),
    }
}

fn program(name: &str) -> String {
    root().join("tests/programs").join(name).to_str().unwrap().to_owned()
}

#[test]
fn this_machine() {
    // The PATH of the user who runs the tests, with all its Pythons.
    let output = Command::new(memtrace()).args(["doctor", "--json"]).output().unwrap();
    let answer = Answer::of(&output);
    assert_eq!(answer.json["program"], Value::Null);
    assert_eq!(answer.machine("self-test")["state"], "ok", "{}", answer.machine("self-test"));
    let name = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(answer.machine("system")["found"].as_str().unwrap().contains(name.trim()));

    let pythons = answer.json["machine"]["pythons"].as_array().unwrap();
    assert!(pythons.first().is_some_and(|p| p["is_default"] == true), "{pythons:#?}");
    for python in pythons {
        // The interpreter's own `--version` is the independent source.
        let said = Command::new(python["path"].as_str().unwrap()).arg("--version").output().unwrap();
        let said = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
        let version = python["version"].as_str().unwrap();
        assert_eq!(said.trim(), format!("Python {version}"));
        let minor: u32 = version.split('.').nth(1).unwrap().parse().unwrap();
        let supported = version.starts_with("3.") && (8..=14).contains(&minor);
        let stacks = &python["stacks"];
        assert_eq!(stacks["state"] == "ok", supported, "{python:#}");
        assert!(supported || stacks["mend"].is_string(), "{python:#}");
    }

    // The text output agrees with the JSON, without terminal escapes.
    let page = Command::new(memtrace()).arg("doctor").env("PATH", SHORT_PATH).output().unwrap();
    let text = String::from_utf8(page.stdout).unwrap();
    let first = text.lines().next().unwrap();
    assert_eq!(page.status.code() == Some(0), first == "memtrace can record everything here", "{text}");
    assert!(text.contains("self-test            ok   4,000 events"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
}

/// The number of a trace's events that match.
fn number(events: &[Event], which: impl Fn(&Event) -> bool) -> u64 {
    events.iter().filter(|e| which(e)).count() as u64
}

/// The number that a finding's text begins with.
#[track_caller]
fn figure(finding: &Value) -> u64 {
    let found = finding["found"].as_str().unwrap();
    let digits: String = found.chars().take_while(|c| c.is_ascii_digit() || *c == ',').filter(|c| *c != ',').collect();
    digits.parse().unwrap_or_else(|_| panic!("{finding}"))
}

#[test]
fn a_training_run_over_the_simulated_cuda() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mlp = program("torch/mlp.py");
    let output = over_simcuda(None, &["--json", "-o", run.to_str().unwrap(), "--", "python", &mlp]);
    let answer = Answer::of(&output);
    assert_eq!(output.status.code(), Some(0), "{:?}", answer.off());
    assert!(answer.stderr.contains("peak 489624576"), "the program's own output: {}", answer.stderr);

    // Compare every number with the trace, which `-o` kept.
    let traces: Vec<_> = std::fs::read_dir(&run)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "mtr"))
        .collect();
    let trace = Reader::open(&traces[0]).unwrap();
    let events: Vec<Event> = trace.events().flat_map(|b| b.unwrap()).collect();
    let process = answer.process();
    let layer = |name: &str| {
        let finding = named(&process["layers"], name);
        assert_eq!(finding["state"], "ok", "{finding}");
        finding
    };
    let has = |e: &Event, flags| e.flags.contains(flags);
    let blocks = |e: &Event| e.source == Source::Torch && e.action == Action::Alloc;
    let told = |e: &Event| e.action != Action::Totals && e.source != Source::Label;
    let backward = |e: &Event| e.source.is_torch() && has(e, Flags::IN_BACKWARD) && told(e);
    let figures = [
        ("CUDA driver", number(&events, |e| e.source == Source::Driver)),
        ("CUDA runtime", number(&events, |e| e.source == Source::Runtime)),
        ("PyTorch tracker", number(&events, |e| e.source == Source::Torch)),
        ("PyTorch reporter", number(&events, blocks)),
        ("CPU tensors", number(&events, |e| e.source == Source::TorchCpu)),
        ("autograd nodes", number(&events, backward)),
        ("forward stacks", number(&events, backward)),
        ("grad mode", number(&events, |e| e.source.is_torch() && told(e))),
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
    assert_eq!(stacks["python"], number(&events, |e| is_python(e) && told(e)));
    assert_eq!(figure(layer("Python stacks")), stacks["python"]);
    assert_eq!(figure(layer("native stacks")), stacks["native"]);
    let sum: u64 =
        ["python", "merged", "native", "autograd", "none"].iter().map(|k| stacks[*k].as_u64().unwrap()).sum();
    assert_eq!(sum, number(&events, told));
    assert_eq!(process["events"], events.len());
    // The output names what was verified.
    for (name, proof) in [
        ("PyTorch tracker", "TraceEntry verified"),
        ("Python stacks", "layout verified"),
        ("autograd nodes", "Node verified"),
        ("grad mode", "AutogradState verified"),
    ] {
        assert!(layer(name)["found"].as_str().unwrap().contains(proof), "{}", layer(name));
    }
    assert!(process["pytorch"]["version"].as_str().unwrap().starts_with("2.11.0"), "{}", process["pytorch"]);
    assert_eq!(process["pytorch"]["tested"]["state"], "ok");
    // Doctor also finds this PyTorch in the environment's Python, from its files alone.
    let python = &answer.json["machine"]["pythons"][0];
    assert_eq!(python["pytorch"]["version"], process["pytorch"]["version"], "{python:#}");
}

#[test]
fn what_gives_memory_a_meaning() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let program = program("doctor/meaning.py");
    let output = over_simcuda(None, &["--json", "-o", run.to_str().unwrap(), "--", "python", &program]);
    let answer = Answer::of(&output);
    assert_eq!(output.status.code(), Some(0), "{:?}", answer.off());
    let mut traces = std::fs::read_dir(&run).unwrap().map(|e| e.unwrap().path());
    let trace = Reader::open(traces.find(|p| p.extension().is_some_and(|e| e == "mtr")).unwrap()).unwrap();
    let events: Vec<Event> = trace.events().flat_map(|b| b.unwrap()).collect();
    let definitions = trace.definitions();
    let labels = |origin| definitions.labels.values().filter(|l| l.origin == origin).count() as u64;
    let collected = number(&events, |e| e.flags.contains(Flags::IN_GC) && e.action == Action::FreeRequested);
    assert!(collected >= 1);
    let figures = [
        ("tensor names", definitions.tensor_names.len() as u64),
        ("module calls", definitions.nn_calls.len() as u64),
        ("record_function", labels(LabelOrigin::RecordFunction)),
        ("NVTX", labels(LabelOrigin::Nvtx)),
        ("garbage collector", collected),
    ];
    for (name, expected) in figures {
        let finding = named(&answer.process()["layers"], name);
        assert_eq!(finding["state"], "ok", "{finding}");
        assert!(expected > 0 && figure(finding) == expected, "{expected}: {finding}");
    }
    // A program without these features: nothing is off, and each finding gives the reason for its absence.
    let one = "import torch; torch.zeros(1 << 20, device='cuda')";
    let plain = Answer::of(&over_simcuda(None, &["--json", "--", "python", "-c", one]));
    assert!(plain.off().is_empty(), "{:?}", plain.off());
    for name in ["tensor names", "module calls", "NVTX"] {
        let finding = named(&plain.process()["layers"], name);
        assert_eq!(finding["state"], "unused", "{finding}");
        assert!(finding["found"].as_str().unwrap().len() > 10, "{finding}");
    }
}

#[test]
fn a_static_program_is_told_before_it_runs() {
    let workshop = Workshop::new();
    let program = workshop.path("static");
    let source = root().join("tests/programs/host/quiet.c");
    let status = Command::new("cc").args(["-static", "-o"]).arg(&program).arg(source).status().unwrap();
    assert!(status.success());
    let answer = ask(&["--", program.to_str().unwrap()]);
    assert_eq!(answer.off(), ["program"]);
    let finding = named(&answer.json["program"]["checks"], "program");
    assert!(finding["found"].as_str().unwrap().contains("statically linked"), "{finding}");
    assert_eq!(answer.json["program"]["ending"], "");
}

#[test]
fn a_program_that_allocates_nothing_or_fails() {
    let answer = ask(&["--", "true"]);
    assert_eq!(answer.json["program"]["processes"].as_array().map(Vec::len), Some(0));
    assert_eq!(named(&answer.json["program"]["checks"], "recorded")["state"], "unused");
    let answer = ask(&["--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(answer.json["program"]["ending"], "exit status 7");
    assert!(answer.stderr.contains("out") && answer.stderr.contains("err"), "{}", answer.stderr);
    let missing = ask(&["--", "no-such-program-here"]);
    assert_eq!(missing.off(), ["program"]);
}

#[test]
fn a_python_of_an_unknown_layout() {
    let workshop = Workshop::new();
    let python = workshop.program("doctor/other_python.c", "python9", &["-rdynamic"]);
    let answer = ask(&["--", python.to_str().unwrap()]);
    // Without PyTorch the grad mode and the named ranges are off as well.
    assert_eq!(answer.off(), ["Python stacks", "grad mode", "record_function"]);
    let stacks = named(&answer.process()["layers"], "Python stacks");
    assert!(stacks["found"].as_str().unwrap().contains("version is not known"), "{stacks}");
    assert!(stacks["mend"].as_str().unwrap().contains("CPython 3.8 to 3.14"), "{stacks}");
    // The event is recorded nevertheless, with its native stack.
    assert_eq!(answer.process()["stacks"]["native"], 1);
    assert_eq!(figure(named(&answer.process()["layers"], "CPU tensors")), 1);
}

#[test]
fn no_home_and_no_path() {
    let mut command = doctor::<&str>(&[]);
    for name in ["HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"] {
        command.env_remove(name);
    }
    let answer = Answer::of(&command.env("PATH", "/nonexistent").output().unwrap());
    assert_eq!(answer.off(), [""; 0]);
    assert_eq!(answer.json["machine"]["pythons"].as_array().map(Vec::len), Some(0));
    assert_eq!(answer.machine("self-test")["state"], "ok");
    let library = answer.machine("recorder's library")["found"].as_str().unwrap();
    assert!(Path::new(library).is_absolute(), "{library}");
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
fn a_sandbox_that_forbids_shared_memory() {
    let mut command = doctor::<&str>(&[]);
    forbid(&mut command, libc::SYS_memfd_create);
    let answer = Answer::of(&command.output().unwrap());
    assert!(answer.off().starts_with(&["shared memory"]) && answer.off().contains(&"self-test"), "{:?}", answer.off());
    let memory = answer.machine("shared memory");
    assert!(memory["mend"].as_str().unwrap().contains("seccomp"), "{memory}");
    assert_eq!(answer.machine("seccomp")["state"], "note");
}

#[test]
fn limits_and_a_read_only_folder() {
    let output = Command::new("/bin/sh")
        .args(["-c", "ulimit -v 300000; cd /proc && exec \"$@\"", "sh"])
        .arg(memtrace())
        .args(["doctor", "--json"])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    let answer = Answer::of(&output);
    for what in ["shared memory", "address space", "runs go to"] {
        assert_eq!(answer.machine(what)["state"], "off", "{}", answer.machine(what));
    }
    assert!(answer.machine("address space")["mend"].as_str().unwrap().contains("ulimit -v"));
}

/// Doctor ends a program that would run forever after two seconds, and reports the process that could not be recorded.
#[test]
fn time_is_up_and_a_child_without_the_recorder() {
    let workshop = Workshop::new();
    let pid_file = workshop.path("pid");
    let python = "import ctypes, os, time; ctypes.CDLL('libcuda.so.1'); open(os.environ['PID'], 'w').write(str(os.getpid())); time.sleep(1000)";
    let script = format!(
        "env -i LD_LIBRARY_PATH={} PID={} /usr/bin/python3 -c \"{python}\" & trap '' HUP; wait",
        simcuda().display(),
        pid_file.display()
    );
    let answer = ask(&["--seconds", "2", "--", "sh", "-c", &script]);
    let program = &answer.json["program"];
    assert_eq!(program["stopped"], true);
    assert!((2.0..20.0).contains(&program["seconds"].as_f64().unwrap()), "{program:#}");
    let pid: u32 = std::fs::read_to_string(&pid_file).unwrap().parse().unwrap();
    let strangers = program["not_recorded"].as_array().unwrap();
    let stranger = strangers.iter().find(|s| s["pid"] == pid).unwrap_or_else(|| panic!("{pid}: {strangers:#?}"));
    assert_eq!(stranger["why"]["state"], "off", "{stranger}");
    assert!(stranger["why"]["found"].as_str().unwrap().contains("LD_PRELOAD"), "{stranger}");
    assert!(stranger["why"]["mend"].as_str().unwrap().contains("MEMTRACE_SESSION"), "{stranger}");
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z"), "it still runs: {state}");
}

#[test]
fn bad_usage_is_no_answer() {
    for words in [&["--no-such-option"][..], &["--seconds", "0", "--", "true"], &["--seconds", "3"], &["-o", "x"]] {
        let output = doctor(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{words:?}");
    }
}

/// The string constants (name, value) of a Rust file.
fn constants(text: &str) -> BTreeSet<(String, String)> {
    let lines = text.lines().filter_map(|l| l.strip_prefix("const ")?.split_once(": &str = \""));
    lines.map(|(name, rest)| (name.to_owned(), rest.trim_end_matches("\";").to_owned())).collect()
}

/// The single list of tested versions equals the versions that the suite runs and those in the documentation.
#[test]
fn the_list_of_tested_versions() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let list: Value = serde_json::from_str(&read("launcher/src/doctor/tested-versions.json")).unwrap();
    let releases = list["pytorch"].as_array().unwrap();
    let listed: BTreeSet<(&str, bool)> =
        releases.iter().map(|r| (r["version"].as_str().unwrap(), r["tracker"] == true)).collect();
    let constants = constants(&read("tests/tests/recording/exhaustive/versions.rs"));
    let venv = read("scripts/venv");
    let default = venv.lines().find_map(|l| l.strip_prefix("default_torch=")).unwrap();
    let mut run: BTreeSet<(&str, bool)> =
        constants.iter().map(|(name, version)| (version.as_str(), name != "REPORTER_ONLY")).collect();
    run.insert((default, true));
    assert_eq!(listed, run, "tests/tests/recording/exhaustive/versions.rs and scripts/venv");

    let text = |name: &str| -> Vec<String> {
        list["cpython"][name].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
    };
    let layouts = read("interpose/src/stack/python/layout.rs");
    let known: BTreeSet<String> = layouts
        .lines()
        .filter_map(|l| l.split_once("Version { major: 3, minor: ")?.1.split_once(" }"))
        .filter_map(|(minor, _)| minor.parse::<u32>().ok())
        .filter(|minor| (8..50).contains(minor))
        .map(|minor| format!("3.{minor}"))
        .collect();
    assert_eq!(text("tested").into_iter().chain(text("known")).collect::<BTreeSet<_>>(), known, "layout.rs");

    let mut table = String::from("| PyTorch | how its blocks are seen | tests |\n|---|---|---|\n");
    for release in releases {
        let how = if release["tracker"] == true {
            "the allocator's own tracker"
        } else {
            "the profiler's reporter (rounded sizes, no segments)"
        };
        table +=
            &format!("| {} | {how} | {} |\n", release["version"].as_str().unwrap(), release["tests"].as_str().unwrap());
    }
    table += "\n| CPython | stacks |\n|---|---|\n";
    for (name, what) in [("tested", "tested"), ("known", "layout from its headers, not met yet")] {
        text(name).iter().for_each(|version| table += &format!("| {version} | {what} |\n"));
    }
    let page = root().join("docs/reference/versions.md");
    let before = std::fs::read_to_string(&page).unwrap();
    let (head, rest) = before.split_once("<!-- made from launcher/src/doctor/tested-versions.json -->\n").unwrap();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&page, format!("{head}<!-- made from launcher/src/doctor/tested-versions.json -->\n{table}"))
            .unwrap();
    } else {
        assert!(rest == table, "docs/reference/versions.md: run with UPDATE_GOLDEN=1 and look at what changed");
    }
}

mod exhaustive {
    use super::*;

    #[test]
    fn a_pytorch_without_a_tracker() {
        let mlp = program("torch/mlp.py");
        let answer = Answer::of(&over_simcuda(Some("2.1.2"), &["--json", "--", "python", &mlp]));
        let layers = &answer.process()["layers"];
        let names = named(layers, "tensor names");
        assert_eq!(names["state"], "off", "{names}");
        assert!(names["found"].as_str().unwrap().contains("does not export"), "{names}");
        let tracker = named(layers, "PyTorch tracker");
        assert_eq!(tracker["state"], "off", "{tracker}");
        let why = tracker["found"].as_str().unwrap();
        assert!(why.contains("not attached") && why.contains("no segments"), "{why}");
        assert!(tracker["mend"].as_str().unwrap().contains("2.11.0"), "{tracker}");
        let reporter = named(layers, "PyTorch reporter");
        assert!(reporter["state"] == "ok" && figure(reporter) > 250, "{reporter}");
        let pytorch = &answer.process()["pytorch"];
        assert!(
            pytorch["version"].as_str().unwrap().starts_with("2.1.2") && pytorch["tested"]["state"] == "off",
            "{pytorch}"
        );
    }
}
