//! Processes that memtrace cannot record.
//!
//! As the command they are refused with the reason before they start. Deep in the process tree they run unharmed, and
//! the run reports them. Programs of the same kind that can be recorded are recorded.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::hostile_support::*;
use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::{Run, TracedProgram, events, memtrace};

/// A simulated driver and programs that use it: started by each dynamic loader, and by none.
struct Fixture {
    programs: ProgramFolder,
}

impl Fixture {
    fn new() -> Fixture {
        let programs = ProgramFolder::new();
        programs.library("process/bare.c", "libcuda.so.1", NONE);
        open_to_all(&programs.path(""));
        Fixture { programs }
    }

    /// A program that allocates once, waits to be noticed, and prints that it is fine.
    fn lingering(&self) -> PathBuf {
        let folder = format!("-L{}", self.programs.path("").display());
        self.programs.program("hostile/linger.c", "linger", &[folder.as_str(), "-l:libcuda.so.1"])
    }

    /// A program without CUDA, linked by `compiler` with `options`.
    fn plain(&self, name: &str, compiler: &str, options: &[&str]) -> PathBuf {
        let program = self.programs.path(name);
        let source = memtrace_tests::traced_program::root().join("tests/programs/hostile/lookups.c");
        let output = Command::new(compiler).args(["-O1", "-o"]).arg(&program).arg(source).args(options).output();
        let output = output.expect("a compiler: scripts/test installs it");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    /// Runs a shell script with these arguments, with and without memtrace, and requires the same output.
    #[track_caller]
    fn same<S: AsRef<OsStr>>(&self, script: &str, arguments: &[S]) -> Run {
        let words = ["sh".as_ref(), "-c".as_ref(), script.as_ref(), "sh".as_ref()];
        let words: Vec<&OsStr> = words.into_iter().chain(arguments.iter().map(AsRef::as_ref)).collect();
        same_output(TracedProgram::command(&words).env("LD_LIBRARY_PATH", self.programs.path("")))
    }
}

/// The only process in the manifest's list of unrecordable processes (`unrecordable`): program, reason, and whether it
/// uses CUDA.
#[track_caller]
fn only_unrecordable(run: &Run) -> (String, String, bool) {
    let manifest = run.manifest();
    let unrecordable = manifest["unrecordable"].as_array().unwrap();
    assert_eq!(unrecordable.len(), 1, "{unrecordable:#?}");
    let text = |key: &str| unrecordable[0][key].as_str().unwrap().to_owned();
    let program = PathBuf::from(text("program")).file_name().unwrap().to_string_lossy().into_owned();
    (program, text("reason"), unrecordable[0]["uses_cuda"].as_bool().unwrap())
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn children_with_another_environment_are_reported() {
    let fixture = Fixture::new();
    let program = fixture.lingering();
    for (script, reason) in [
        (r#"env -i LD_LIBRARY_PATH="$LD_LIBRARY_PATH" "$1"; true"#, "LD_PRELOAD in its environment"),
        (r#"LD_PRELOAD= "$1"; true"#, "LD_PRELOAD in its environment"),
        (r#"LD_PRELOAD=libm.so.6 "$1"; true"#, "LD_PRELOAD in its environment"),
        (r#"env -u MEMTRACE_SESSION "$1"; true"#, "MEMTRACE_SESSION is not in its environment"),
        (r#"unshare --net "$1"; true"#, "network namespace"),
        (r#"ulimit -v 700000; "$1"; true"#, "address space limit"),
        (r#""$1" seccomp; true"#, "seccomp"),
    ] {
        let run = fixture.same(script, &[&program]);
        let (name, why, uses_cuda) = only_unrecordable(&run);
        assert!(name == "linger" && why.contains(reason) && uses_cuda, "{script}: {name}: {why}");
        let text = stderr_of(&run.output);
        assert!(text.contains("warning: cannot record linger (") && text.contains(reason), "{script}: {text}");
        assert!(run.traces().iter().all(|trace| events(trace).is_empty()), "{script}");
    }
    // A process that can be recorded does not appear in the list.
    let run = fixture.same(r#""$1"; true"#, &[&program]);
    assert_eq!(events(&run.trace()).len(), PAIR);
    assert_eq!(run.manifest()["unrecordable"].as_array().map(Vec::len), Some(0));
    assert!(!stderr_of(&run.output).contains("cannot record"), "{}", stderr_of(&run.output));
}

#[test]
fn musl_and_static_programs_are_refused_or_unchanged() {
    let fixture = Fixture::new();
    let musl = fixture.plain("musl", "musl-gcc", &["-rdynamic"]);
    let musl_static = fixture.plain("musl-static", "musl-gcc", &["-static"]);
    let glibc_static = fixture.plain("glibc-static", "cc", &["-static"]);
    for (program, reason) in [(&musl, "musl program"), (&musl_static, "statically"), (&glibc_static, "statically")] {
        let output = TracedProgram::command(&[program]).run().output;
        assert_eq!(output.status.code(), Some(125));
        assert!(output.stdout.is_empty() && stderr_of(&output).contains(reason), "{}", stderr_of(&output));
        assert_error_with_help(&stderr_of(&output), "memtrace: ");
        // As a child the program runs as it does without memtrace.
        let run = fixture.same(r#""$1" && "$1" linger"#, &[program]);
        assert!(String::from_utf8_lossy(&run.output.stdout).contains("fine"));
        if program != &musl {
            // The first of the two is too short to be found where the kernel does not report processes.
            let manifest = run.manifest();
            let unrecordable = manifest["unrecordable"].as_array().unwrap();
            let is_static = |process: &serde_json::Value| process["reason"] == "it is statically linked";
            assert!((1..=2).contains(&unrecordable.len()) && unrecordable.iter().all(is_static), "{unrecordable:#?}");
            assert!(unrecordable.iter().all(|process| process["uses_cuda"] == false), "{unrecordable:#?}");
        }
    }
    // When nothing else was recorded, the launcher reports the process unasked.
    let words = ["sh".as_ref(), "-c".as_ref(), r#""$0" linger; true"#.as_ref(), glibc_static.as_os_str()];
    let run = TracedProgram::command(&words).run();
    assert!(stderr_of(&run.output).contains("note: cannot record glibc-static ("), "{}", stderr_of(&run.output));
}

#[test]
fn privileged_programs_are_refused_or_reported() {
    let fixture = Fixture::new();
    let program = fixture.lingering();
    let (setuid, capable) = (fixture.programs.path("setuid"), fixture.programs.path("capable"));
    for copy in [&setuid, &capable] {
        std::fs::copy(&program, copy).unwrap();
    }
    std::fs::set_permissions(&setuid, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let owned = Command::new("chown").arg("65533").arg(&setuid).status().unwrap();
    assert!(owned.success());
    std::fs::set_permissions(&setuid, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let output = TracedProgram::command(&[&setuid]).run().output;
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr_of(&output).contains("it is setuid, so no library can be preloaded"), "{}", stderr_of(&output));

    // File capabilities matter only for a user who lacks these capabilities, so this part runs as another user.
    assert!(Command::new("setcap").arg("cap_net_raw+ep").arg(&capable).status().is_ok_and(|s| s.success()));
    let folder = tempfile::tempdir().unwrap();
    open_to_all(folder.path());
    let here = folder.path().join("memtrace");
    std::fs::copy(memtrace(), &here).unwrap();
    let as_nobody = |program: &Path| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
            .arg(&here)
            .arg("-o")
            .arg("/nowhere/to/be");
        command.arg("--").arg(program).env("HOME", "/nonexistent").current_dir(folder.path());
        command.output().unwrap()
    };
    let output = as_nobody(&capable);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr_of(&output).contains("privileged (it has file capabilities)"), "{}", stderr_of(&output));
    // The same program without capabilities passes this check and fails at the folder.
    assert!(stderr_of(&as_nobody(&program)).contains("/nowhere"), "{}", stderr_of(&as_nobody(&program)));
}

#[test]
fn a_command_that_changes_its_user_is_unchanged() {
    // The loader prints an error on the program's own stderr when it cannot read the library. Nothing is recorded: the
    // launcher serves its own user only, and reports that.
    let fixture = Fixture::new();
    let program = fixture.plain("plain", "cc", &["-rdynamic"]);
    let run = fixture.same(r#"setpriv --reuid=65534 --regid=65534 --clear-groups "$1""#, &[&program]);
    assert!(String::from_utf8_lossy(&run.output.stdout).contains("fine"));
}
