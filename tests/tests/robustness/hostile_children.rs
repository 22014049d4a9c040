//! Processes that memtrace cannot record.
//!
//! As the command they are refused with the reason before they start. Deep in the process tree they run unharmed, and
//! the run reports them. Programs of the same kind that can be recorded are recorded.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::hostile_support::*;
use memtrace_tests::programs::Workshop;
use memtrace_tests::victim::{Run, Victim, events, memtrace};

/// A simulated driver and programs that use it: started by each dynamic loader, and by none.
struct Stage {
    workshop: Workshop,
}

impl Stage {
    fn new() -> Stage {
        let workshop = Workshop::new();
        workshop.library("process/bare.c", "libcuda.so.1", NONE);
        open_to_all(&workshop.path(""));
        Stage { workshop }
    }

    /// A program that allocates once, waits to be noticed, and prints that it is fine.
    fn lingering(&self) -> PathBuf {
        let folder = format!("-L{}", self.workshop.path("").display());
        self.workshop.program("hostile/linger.c", "linger", &[folder.as_str(), "-l:libcuda.so.1"])
    }

    /// A program without CUDA, linked by `compiler` with `options`.
    fn plain(&self, name: &str, compiler: &str, options: &[&str]) -> PathBuf {
        let program = self.workshop.path(name);
        let source = memtrace_tests::victim::root().join("tests/programs/hostile/looks_up.c");
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
        same_output(Victim::command(&words).env("LD_LIBRARY_PATH", self.workshop.path("")))
    }
}

/// The only process in the manifest's list of unrecordable processes (`unseen`): program, reason, and whether it uses
/// CUDA.
#[track_caller]
fn only_unseen(run: &Run) -> (String, String, bool) {
    let manifest = run.manifest();
    let unseen = manifest["unseen"].as_array().unwrap();
    assert_eq!(unseen.len(), 1, "{unseen:#?}");
    let text = |key: &str| unseen[0][key].as_str().unwrap().to_owned();
    let program = PathBuf::from(text("program")).file_name().unwrap().to_string_lossy().into_owned();
    (program, text("reason"), unseen[0]["uses_cuda"].as_bool().unwrap())
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn children_with_another_environment_are_told_of() {
    let stage = Stage::new();
    let program = stage.lingering();
    for (script, reason) in [
        (r#"env -i LD_LIBRARY_PATH="$LD_LIBRARY_PATH" "$1"; true"#, "LD_PRELOAD was taken out"),
        (r#"LD_PRELOAD= "$1"; true"#, "LD_PRELOAD was taken out"),
        (r#"LD_PRELOAD=libm.so.6 "$1"; true"#, "LD_PRELOAD was taken out"),
        (r#"env -u MEMTRACE_SESSION "$1"; true"#, "MEMTRACE_SESSION was taken out"),
        (r#"unshare --net "$1"; true"#, "network namespace"),
        (r#"ulimit -v 700000; "$1"; true"#, "address space is limited"),
        (r#""$1" seccomp; true"#, "seccomp"),
    ] {
        let run = stage.same(script, &[&program]);
        let (name, why, uses_cuda) = only_unseen(&run);
        assert!(name == "linger" && why.contains(reason) && uses_cuda, "{script}: {name}: {why}");
        let text = said(&run.output);
        assert!(text.contains("could not be recorded: linger (") && text.contains(reason), "{script}: {text}");
        assert!(run.traces().iter().all(|trace| events(trace).is_empty()), "{script}");
    }
    // A process that can be recorded does not appear in the list.
    let run = stage.same(r#""$1"; true"#, &[&program]);
    assert_eq!(events(&run.trace()).len(), PAIR);
    assert_eq!(run.manifest()["unseen"].as_array().map(Vec::len), Some(0));
    assert!(!said(&run.output).contains("could not"), "{}", said(&run.output));
}

#[test]
fn musl_and_static_programs_are_refused_or_unharmed() {
    let stage = Stage::new();
    let musl = stage.plain("musl", "musl-gcc", &["-rdynamic"]);
    let musl_static = stage.plain("musl-static", "musl-gcc", &["-static"]);
    let glibc_static = stage.plain("glibc-static", "cc", &["-static"]);
    for (program, reason) in [(&musl, "musl program"), (&musl_static, "statically"), (&glibc_static, "statically")] {
        let output = Victim::command(&[program]).run().output;
        assert_eq!(output.status.code(), Some(125));
        assert!(output.stdout.is_empty() && said(&output).contains(reason), "{}", said(&output));
        assert_eq!(said(&output).lines().count(), 1, "{}", said(&output));
        // As a child the program runs as it does without memtrace.
        let run = stage.same(r#""$1" && "$1" linger"#, &[program]);
        assert!(String::from_utf8_lossy(&run.output.stdout).contains("fine"));
        if program != &musl {
            let (_, why, uses_cuda) = only_unseen(&run);
            assert!(why.contains("statically linked") && !uses_cuda, "{why}");
        }
    }
    // When nothing else was recorded, the launcher reports the process unasked.
    let words = ["sh".as_ref(), "-c".as_ref(), r#""$0" linger; true"#.as_ref(), glibc_static.as_os_str()];
    let run = Victim::command(&words).run();
    assert!(said(&run.output).contains("where nothing can be recorded: glibc-static ("), "{}", said(&run.output));
}

#[test]
fn privileged_programs_are_refused_or_told_of() {
    let stage = Stage::new();
    let program = stage.lingering();
    let (setuid, capable) = (stage.workshop.path("setuid"), stage.workshop.path("capable"));
    for copy in [&setuid, &capable] {
        std::fs::copy(&program, copy).unwrap();
    }
    std::fs::set_permissions(&setuid, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let owned = Command::new("chown").arg("65533").arg(&setuid).status().unwrap();
    assert!(owned.success());
    std::fs::set_permissions(&setuid, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let output = Victim::command(&[&setuid]).run().output;
    assert_eq!(output.status.code(), Some(125));
    assert!(said(&output).contains("is setuid, so the system lets nothing be preloaded"), "{}", said(&output));

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
    assert!(said(&output).contains("privileged (it has file capabilities)"), "{}", said(&output));
    // The same program without capabilities passes this check and fails at the folder.
    assert!(said(&as_nobody(&program)).contains("/nowhere"), "{}", said(&as_nobody(&program)));
}

#[test]
fn a_command_that_becomes_another_user_hears_nothing_of_us() {
    // The loader prints an error on the program's own stderr when it cannot read the library. Nothing is recorded: the
    // launcher serves its own user only, and reports that.
    let stage = Stage::new();
    let program = stage.plain("plain", "cc", &["-rdynamic"]);
    let run = stage.same(r#"setpriv --reuid=65534 --regid=65534 --clear-groups "$1""#, &[&program]);
    assert!(String::from_utf8_lossy(&run.output.stdout).contains("fine"));
}
