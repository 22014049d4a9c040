//! Bad input gives an error line and a help line, and the exit status that docs and env(1) define.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use memtrace_tests::traced_program::{TracedProgram, root};

use crate::launcher_support::*;

/// Runs memtrace with these arguments. Returns the exit status and stderr.
fn run(words: &[&str]) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let output = output(Command::new(memtrace()).current_dir(&folder).args(words));
    assert!(output.stdout.is_empty(), "{words:?}");
    (output.status.code().unwrap(), stderr(&output))
}

/// Requires that stderr is an error line and a help line, both with this prefix.
#[track_caller]
fn assert_error_with_help(message: &str, prefix: &str) {
    let lines: Vec<_> = message.lines().collect();
    let [error, help] = lines[..] else { panic!("{message}") };
    assert!(error.starts_with(&format!("{prefix}error: ")), "{message}");
    assert!(help.starts_with(&format!("{prefix}help: ")), "{message}");
}

fn script(folder: &Path, name: &str, content: &str, mode: u32) -> String {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn bad_usage_is_reported() {
    for words in
        [&[][..], &["--"], &["run", "--"], &["--no-such-option", "--", "true"], &["--stacks", "all", "--", "true"]]
    {
        let (code, message) = run(words);
        assert_eq!(code, 125, "{words:?}");
        assert!(message.contains("Usage:") || message.contains("--help"), "{words:?}: {message}");
    }
    for words in [&["report"][..], &["export", "x"], &["export", "x", "--to", "nothing"]] {
        let (code, message) = run(words);
        assert_eq!(code, 2, "{words:?}: {message}");
    }
    let snapshot = root().join("tests/golden/snapshots/oom.json");
    let (code, message) = run(&["report", snapshot.to_str().unwrap(), "--html", "page.html"]);
    assert_eq!((code, message.as_str()), (0, "wrote page.html\n"));
    let (code, message) = run(&["lines", "--html", snapshot.to_str().unwrap()]);
    assert_eq!(code, 2, "{message}");
    assert_error_with_help(&message, "");
    assert!(message.contains("help: name the run first: memtrace lines RUN --html FILE"), "{message}");
}

/// A program that has the name of a mistyped command runs only where it is marked as one.
#[test]
fn mistyped_commands_are_not_run() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["view", "reprot", "python9"] {
        script(folder.path(), name, "#!/bin/sh\n: > ran\n", 0o755);
    }
    let path = std::env::join_paths([folder.path(), Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
    let ran = folder.path().join("ran");
    let run = |words: &[&str]| {
        let ended = output(Command::new(memtrace()).current_dir(&folder).env("PATH", &path).args(words));
        (ended.status.code().unwrap(), stderr(&ended), std::fs::remove_file(&ran).is_ok())
    };
    let cases = [
        (&["view", "x"][..], "`memtrace report` or `memtrace open`"),
        (&["reprot", "x"], "`memtrace report`"),
        (&["-q", "view", "x"], "`memtrace report` or `memtrace open`"),
        (&["stats"], "`memtrace report`"),
        (&["-q", "report", "x"], "`memtrace report`"),
    ];
    for (words, command) in cases {
        let (code, message, has_run) = run(words);
        assert_eq!((code, has_run), (2, false), "{words:?}: {message}");
        assert_error_with_help(&message, "");
        assert!(message.contains(&format!("help: use {command}; ")), "{words:?}: {message}");
    }
    for words in
        [&["--", "view"][..], &["run", "view"], &["run", "--", "reprot"], &["python9", "x.py"], &["-q", "python9"]]
    {
        let (code, message, has_run) = run(words);
        assert_eq!((code, has_run), (0, true), "{words:?}: {message}");
    }
}

/// Without RUN, it is the newest run that has recorded anything. A folder with one run names that run, and one with
/// several lists them.
#[test]
fn runs_are_found_by_their_folder() {
    let folder = tempfile::tempdir().unwrap();
    let here = |words: &[&str]| output(Command::new(memtrace()).current_dir(&folder).args(words));
    let text = |ended: &std::process::Output| String::from_utf8(ended.stdout.clone()).unwrap();
    let record = |path: &str, words: &[&str]| {
        let ended =
            output(recording(&folder.path().join(path)).arg(env!("CARGO_BIN_EXE_intruder")).args(words).arg("say="));
        assert!(ended.status.code().is_some(), "{ended:?}");
    };
    record("runs/first", &["names"]);
    assert!(here(&["-o", "runs/nothing", "--", "true"]).status.success());
    let one = here(&["report", "runs"]);
    assert!(
        text(&one).contains("leak: 2.00 MiB more with each step") && !text(&one).contains("Verdict"),
        "{}",
        text(&one)
    );
    record("runs/a\x1b[2J\nb", &["oom", "exit=3"]);
    let list = here(&["report", "runs"]);
    let (text_of_list, lines) = (text(&list), text(&list).lines().count());
    assert!(
        list.status.success() && text_of_list.contains("2 runs") && !text_of_list.contains('\x1b'),
        "{text_of_list}"
    );
    for words in ["first", "Verdict", "nothing recorded no memory", "choose one, for example: memtrace report runs/"] {
        assert!(text_of_list.contains(words), "{words}: {text_of_list}");
    }
    assert!(lines < 16, "{text_of_list}");
    let names = |command: &[&str]| {
        let ended = output(Command::new(memtrace()).current_dir(folder.path().join("runs")).args(command));
        (ended.status.code(), stderr(&ended))
    };
    // The newest run has recorded nothing.
    std::fs::rename(folder.path().join("runs/a\x1b[2J\nb"), folder.path().join("other")).unwrap();
    assert!(
        output(Command::new(memtrace()).current_dir(folder.path().join("runs")).args(["--", "true"])).status.success()
    );
    for command in
        ["report", "lines --top 1", "check --max-peak 1TiB --allow-incomplete", "export --to json", "redact -o copy"]
    {
        let (code, message) = names(&command.split(' ').collect::<Vec<_>>());
        assert!(message.contains("note: RUN is first, the newest one"), "{command}: {code:?} {message}");
    }
    let (code, message) = names(&["open", "nope"]);
    assert!(code == Some(2) && message.starts_with("error: cannot open nope: No such file"), "{message}");
    assert!(!message.contains("export"), "{message}");
    std::fs::remove_dir_all(folder.path().join("runs/first")).unwrap();
    std::fs::remove_dir_all(folder.path().join("runs/copy")).unwrap();
    let (code, message) = names(&["report"]);
    assert!(code == Some(2) && message.contains("no run in the current folder has recorded anything"), "{message}");
    assert_error_with_help(&message, "");
}

#[test]
fn a_program_without_a_driver_learns_of_dry_runs() {
    let folder = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| output(Command::new(memtrace()).current_dir(&folder).args(words));
    let help = "help: this machine has no NVIDIA driver; `memtrace dry-run -- COMMAND`";
    let has_driver = ["/dev/nvidiactl", "/proc/driver/nvidia/version"].iter().any(|path| Path::new(path).exists());
    assert_eq!(stderr(&run(&["--", "sh", "-c", "exit 1"])).contains(help), !has_driver);
    assert!(!stderr(&run(&["--", "true"])).contains(help));
    let list = run(&["dry-run", "--list-gpus"]);
    let widths: std::collections::BTreeSet<usize> =
        String::from_utf8(list.stdout).unwrap().lines().rev().skip(1).map(|line| line.chars().count()).collect();
    assert_eq!(widths.len(), 1, "the last column is aligned at the right");
}

#[test]
fn commands_that_cannot_be_run_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let plain = script(folder.path(), "tool", "echo", 0o644);
    let python = script(folder.path(), "train.py", "print(1)", 0o644);
    let no_interpreter = script(folder.path(), "script", "#!/no/such/interpreter -x\n", 0o755);
    let directory = folder.path().to_str().unwrap().to_owned();
    let static_program = folder.path().join("static");
    compile("process_state.c", &static_program, &["-static"]);
    let static_program = static_program.to_str().unwrap().to_owned();
    let by_static = script(folder.path(), "by-static", &format!("#!{static_program}\n"), 0o755);
    let foreign = {
        let mut bytes = std::fs::read(&static_program).unwrap();
        bytes[18] = 8; // MIPS
        let path = folder.path().join("foreign");
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let cases = [
        ("no-such-command", 127, "PATH"),
        ("./no-such-file", 127, "current directory"),
        ("", 127, "variable"),
        ("python train.py", 127, "separate words"),
        (&plain, 126, "chmod +x"),
        (&python, 126, "memtrace -- python"),
        (&directory, 126, "directory"),
        (&no_interpreter, 127, "/no/such/interpreter"),
        (&static_program, 125, "statically linked"),
        (&by_static, 125, "statically linked"),
        (&foreign, 125, "machine 8"),
    ];
    for (command, code, hint) in cases {
        let folder = tempfile::tempdir().unwrap();
        let output = output(Command::new(memtrace()).current_dir(&folder).args(["--", command]));
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{command}: {message}");
        assert_error_with_help(&message, "memtrace: ");
        assert!(message.contains(hint), "{command}: {message}");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "{command}: nothing is left behind");
    }
}

#[test]
fn a_setuid_program_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("setuid");
    std::fs::copy(compiled("process_state.c"), &program).unwrap();
    // Only root can change a file's owner. Other users use any setuid program of the system.
    let is_ours = std::os::unix::fs::chown(&program, Some(65534), None).is_ok();
    let program = if is_ours {
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
        program
    } else {
        ["/usr/bin/su", "/bin/su", "/usr/bin/passwd"]
            .iter()
            .map(|p| p.into())
            .find(|p: &std::path::PathBuf| p.exists())
            .unwrap()
    };
    for command in [&["--"][..], &["dry-run", "--"]] {
        let (code, message) = run(&[command, &[program.to_str().unwrap(), "state"]].concat());
        assert_eq!(code, 125, "{message}");
        assert!(message.contains("setuid") && message.contains("help: "), "{message}");
    }
}

#[test]
fn folders_that_cannot_be_used_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let full = folder.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("thesis.tex"), "precious").unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below_file = file.join("run");
    let cases =
        [(full.as_path(), "not empty"), (&file, "-o"), (&below_file, "-o"), (Path::new("/proc/memtrace"), "-o")];
    for (path, hint) in cases {
        let (code, message) = run(&["-o", path.to_str().unwrap(), "--", "true"]);
        assert_eq!(code, 125, "{}: {message}", path.display());
        assert_error_with_help(&message, "memtrace: ");
        assert!(message.contains(hint), "{}: {message}", path.display());
    }
    assert_eq!(std::fs::read(full.join("thesis.tex")).unwrap(), b"precious");
}

#[test]
fn exit_statuses_are_the_commands_own() {
    let folder = tempfile::tempdir().unwrap();
    for (i, (script, code)) in [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
    ]
    .into_iter()
    .enumerate()
    {
        let output = output(recording(&folder.path().join(i.to_string())).args(["sh", "-c", script]));
        assert_eq!(output.status.code(), Some(code), "{script}: {}", stderr(&output));
        assert!(stderr(&output).is_empty(), "{script}: {}", stderr(&output));
    }
}

#[test]
fn the_default_folder_is_named_after_the_script_and_new() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.py"), "").unwrap();
    for _ in 0..2 {
        let output = output(Command::new(memtrace()).current_dir(&folder).args(["--", "cat", "train.py"]));
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let names: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let runs: Vec<_> = names.iter().filter(|n| n.starts_with("memtrace-train-")).collect();
    assert_eq!(runs.len(), 2, "{names:?}");
    for run in runs {
        let mode = std::fs::metadata(folder.path().join(run)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "only the owner may read a run");
        assert_eq!(manifest(&folder.path().join(run))["exit"]["code"], 0);
    }
}

#[test]
fn run_folders_can_be_in_one_folder() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("all/runs");
    for _ in 0..2 {
        let mut command = Command::new(memtrace());
        command.current_dir(&folder).arg("--runs").arg("all/runs").args(["--", "sh", "-c", "exit 3"]);
        assert_eq!(output(&mut command).status.code(), Some(3));
    }
    let names: Vec<_> =
        std::fs::read_dir(&runs).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.len() == 2 && names.iter().all(|name| name.starts_with("memtrace-sh-")), "{names:?}");
    let (code, message) = run(&["--runs", "a", "-o", "b", "--", "true"]);
    assert!(code == 125 && message.contains("cannot be used with"), "{code}: {message}");
}

/// The launcher ends with the command. The reports follow, and each of them is complete when it appears.
#[test]
fn reports_can_be_written_in_the_background() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let program = ["python", "-c", "import torch; kept = torch.zeros(1 << 20, device='cuda')"];
    let memtrace = memtrace();
    let start = [memtrace.to_str().unwrap(), "--reports-in-background", "-o", path.to_str().unwrap(), "--"];
    let output = TracedProgram::command(&[&start[..], &program].concat()).over_simcuda().run_alone();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
    assert_eq!(manifest(&path)["state"], "ended");
    let until = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while !path.join("summary.json").exists() {
        assert!(std::time::Instant::now() < until, "no reports");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(path.join("report.html").exists() && path.join("summary.txt").exists());
}

#[test]
fn a_path_that_is_no_run_is_bad_input() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap();
    for words in [&["report", empty][..], &["report", "/no/such/run"], &["export", empty, "--to", "snapshot"]] {
        let (code, message) = run(words);
        assert_eq!(code, 2, "{words:?}: {message}");
        assert_error_with_help(&message, "");
    }
    let (_, message) = run(&["report", "/no/such/run"]);
    let expected = "error: cannot read /no/such/run: No such file or directory\n\
                    help: pass a run folder, a .mtr file or a PyTorch snapshot\n";
    assert_eq!(message, expected);
    for (content, hint) in [(&b""[..], "it is empty"), (b"print('\x1b[31m')\n", "begins with \"print")] {
        let file = folder.path().join("file.mtr");
        std::fs::write(&file, content).unwrap();
        let (code, message) = run(&["report", file.to_str().unwrap()]);
        assert_eq!(code, 2, "{message}");
        assert_error_with_help(&message, "");
        assert!(message.contains(hint) && !message.contains('\x1b'), "{message}");
    }
}

/// The commands and long options that `--help` lists.
fn helped(words: &[&str]) -> Vec<String> {
    let help = output(Command::new(memtrace()).args(words).arg("--help"));
    let text = String::from_utf8(help.stdout).unwrap();
    text.split_whitespace()
        .filter(|word| word.starts_with("--") && word.len() > 2)
        .map(|word| word.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != '-').to_owned())
        .collect()
}

/// Every command has a manual page. troff reads it without a warning, and it has every option of `--help`.
#[test]
fn every_package_has_the_version_of_the_program() {
    let printed = String::from_utf8(output(Command::new(memtrace()).arg("--version")).stdout).unwrap();
    let version = printed.trim().strip_prefix("memtrace ").unwrap_or_else(|| panic!("{printed}"));
    for (file, line) in [
        ("launcher/python/gpu_memtrace/__init__.py", format!("__version__ = \"{version}\"")),
        ("packaging/conda/recipe.yaml", format!("  version: {version}")),
    ] {
        let text = std::fs::read_to_string(memtrace_tests::traced_program::root().join(file)).unwrap();
        assert!(text.lines().any(|l| l == line), "{file} lacks the line {line}");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let made = output(Command::new(memtrace()).args(["man", "-o"]).arg(folder.path()));
    assert!(made.status.success(), "{}", stderr(&made));
    let pages = std::fs::read_dir(folder.path()).unwrap().map(|page| page.unwrap().file_name().into_string().unwrap());
    let commands: Vec<String> =
        pages.filter_map(|page| Some(page.strip_prefix("memtrace-")?.strip_suffix(".1")?.to_owned())).collect();
    assert!(
        ["run", "report", "export", "doctor"].iter().all(|name| commands.iter().any(|c| c == name)),
        "{commands:?}"
    );
    for command in commands {
        let page = folder.path().join(format!("memtrace-{command}.1"));
        let page = output(Command::new("groff").args(["-man", "-ww", "-Tascii", "-P-cbou", "-rHY=0"]).arg(&page));
        assert_eq!((page.status.success(), stderr(&page).as_str()), (true, ""), "memtrace-{command}.1");
        let text = String::from_utf8(page.stdout).unwrap();
        let options = helped(&[&command]);
        assert!(!options.is_empty());
        for option in options {
            assert!(text.contains(&option), "{option} is missing in memtrace-{command}.1");
        }
    }
    let first = output(Command::new(memtrace()).arg("man"));
    assert_eq!(std::fs::read(folder.path().join("memtrace.1")).unwrap(), first.stdout);
    let (code, message) = run(&["man", "-o", "/proc/no"]);
    assert!(code == 2 && message.contains("/proc/no"), "{code}: {message}");
}

/// Bash completes commands, options and their values.
#[test]
fn bash_completes_commands_and_options() {
    let complete = |words: &[&str]| -> Vec<String> {
        let script = format!(
            "source <({} completions bash); COMP_WORDS=({}); COMP_CWORD={}; _memtrace memtrace '{}' '{}'; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            memtrace().display(),
            words.join(" "),
            words.len() - 1,
            words[words.len() - 1],
            words[words.len() - 2],
        );
        let done = output(Command::new("bash").args(["--norc", "-c", &script]));
        assert!(done.status.success(), "{}", stderr(&done));
        String::from_utf8(done.stdout).unwrap().split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(complete(&["memtrace", "rep"]), ["report"]);
    assert_eq!(complete(&["memtrace", "run", "--no-na"]), ["--no-names"]);
    assert_eq!(complete(&["memtrace", "run", "--cpu", "al"]), ["always"]);
    assert!(complete(&["memtrace", "report", "--section", "p"]).contains(&"peak".to_owned()));
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        let script = output(Command::new(memtrace()).args(["completions", shell]));
        assert!(script.status.success() && String::from_utf8_lossy(&script.stdout).contains("export"), "{shell}");
    }
    assert_eq!(run(&["completions", "cmd"]).0, 2);
}
