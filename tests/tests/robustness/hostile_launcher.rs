//! A launcher in a poor environment: it finds an alternative, or it refuses with an error and a help line before
//! the command starts.

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::hostile_support::*;
use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::memtrace;
use memtrace_trace::file::Reader;

struct Fixture {
    programs: ProgramFolder,
    program: PathBuf,
}

impl Fixture {
    fn new() -> Fixture {
        let programs = ProgramFolder::new();
        let program = programs.program_over_bare_driver("hostile/hostile.c", "hostile");
        Fixture { programs, program }
    }

    /// Runs a shell script in its own mount namespace. `$0` is memtrace, `$1` the run folder, `$2` the program, `$3` an
    /// empty folder.
    fn script(&self, script: &str) -> Output {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-ec", script])
            .arg(memtrace())
            .arg(self.run())
            .arg(&self.program)
            .arg(self.free());
        self.output(&mut command)
    }

    fn output(&self, command: &mut Command) -> Output {
        command.env("LD_LIBRARY_PATH", self.programs.path("")).output().expect("a command")
    }

    fn run(&self) -> PathBuf {
        self.programs.path("run")
    }

    fn free(&self) -> PathBuf {
        let free = self.programs.path("free");
        std::fs::create_dir_all(&free).unwrap();
        free
    }

    /// Panics unless the run succeeded and recorded three pairs.
    #[track_caller]
    fn assert_recorded(&self, output: &Output) {
        assert_eq!(String::from_utf8_lossy(&output.stdout), "fine\n", "{}", stderr_of(output));
        assert!(output.status.success(), "{}", stderr_of(output));
        let files = std::fs::read_dir(self.run()).unwrap().map(|e| e.unwrap().path());
        let trace = files.filter(|p| p.extension().is_some_and(|e| e == "mtr")).collect::<Vec<_>>();
        assert_eq!(trace.len(), 1);
        assert_eq!(Reader::open(&trace[0]).unwrap().event_count(), 3 * PAIR as u64);
        std::fs::remove_dir_all(self.run()).unwrap();
    }
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Panics unless stderr is an error line and a help line that contain `words`, the exit status is 125, and the command
/// printed nothing.
#[track_caller]
fn assert_refused(output: &Output, words: &[&str]) {
    let text = stderr_of(output);
    assert_eq!(output.status.code(), Some(125), "{text}");
    assert!(output.stdout.is_empty());
    assert_error_with_help(&text, "memtrace: ");
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn the_launcher_works_with_a_minimal_environment() {
    let fixture = Fixture::new();
    let plain = r#"exec "$0" -q -o "$1" -- "$2" some 3"#;
    for (what, before) in [
        ("nothing set", r#"unset HOME XDG_CACHE_HOME XDG_RUNTIME_DIR TMPDIR"#.to_owned()),
        ("no shared memory folder", "mount -t tmpfs -o ro,mode=0 none /dev/shm".to_owned()),
        (
            "a home that cannot be written to",
            r#"export HOME="$3"; unset XDG_CACHE_HOME; mount -t tmpfs -o ro none "$3""#.to_owned(),
        ),
        (
            "a home without execution",
            r#"export HOME="$3"; unset XDG_CACHE_HOME; mount -t tmpfs -o noexec none "$3""#.to_owned(),
        ),
        ("a home with a space", r#"mkdir "$3/a b"; export HOME="$3/a b"; unset XDG_CACHE_HOME"#.to_owned()),
        ("a folder that cannot be written to", r#"mount -t tmpfs -o ro none "$3"; cd "$3""#.to_owned()),
        ("no /proc", "umount -l /proc".to_owned()),
    ] {
        let output = fixture.script(&format!("{before}; {plain}"));
        eprintln!("{what}");
        fixture.assert_recorded(&output);
    }
    // Without any environment variable, and without a namespace.
    let mut command = Command::new("env");
    let library_path = format!("LD_LIBRARY_PATH={}", fixture.programs.path("").display());
    command.args(["-i", &library_path]).arg(memtrace()).arg("-q").arg("-o").arg(fixture.run());
    let output = fixture.output(command.arg("--").arg(&fixture.program).args(["some", "3"]));
    fixture.assert_recorded(&output);
}

#[test]
fn the_library_is_placed_on_a_file_system_without_noexec() {
    // Everything needed lies in one folder. The namespace mounts it where nothing covers it, wherever the checkout and
    // the temporary folder are.
    const PLACE: &str = "/mnt";
    let fixture = Fixture::new();
    let outside = tempfile::Builder::new().prefix("memtrace-test-").tempdir().unwrap();
    for file in [memtrace(), fixture.programs.path("hostile"), fixture.programs.path("libcuda.so.1")] {
        std::fs::copy(&file, outside.path().join(file.file_name().unwrap())).unwrap();
    }
    std::fs::create_dir(outside.path().join("home")).unwrap();
    let script = |options: &str, run: &str| {
        let script = format!(
            r#"mount --bind "$0" {PLACE}; cd {PLACE}
            export HOME={PLACE}/home LD_LIBRARY_PATH={PLACE}; unset XDG_CACHE_HOME XDG_RUNTIME_DIR TMPDIR
            for place in "$HOME" /var/cache /tmp /var/tmp; do mount -t tmpfs {options} none "$place"; done
            exec ./memtrace -q -o "{run}" -- ./hostile some 3"#
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", &script]).arg(outside.path()).output().unwrap()
    };
    let run = outside.path().join("run");
    let output = script("-o noexec", &format!("{PLACE}/run"));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "fine\n", "{}", stderr_of(&output));
    let manifest = std::fs::read_to_string(run.join("run.json")).unwrap();
    assert!(manifest.contains("\"events\": 12"), "{manifest}");
    // No folder is suitable: the launcher refuses before anything starts.
    assert_refused(
        &script("-o noexec", "/tmp/run"),
        &["no folder can hold the preloaded library", "XDG_CACHE_HOME", "cannot map code"],
    );
    assert_refused(&script("-o ro", "/tmp/run"), &["cannot create /tmp/run", "choose another folder with -o"]);
}

#[test]
fn missing_permissions_of_the_launcher_are_reported() {
    let fixture = Fixture::new();
    let under = |action: &str, call: &str| {
        let mut command = Command::new(&fixture.program);
        command.args(["under", action, call]).arg(memtrace()).arg("-q").arg("-o").arg(fixture.run());
        fixture.output(command.arg("--").arg(&fixture.program).args(["some", "3"]))
    };
    assert_refused(&under("refuse", "memfd_create"), &["memfd_create", "Operation not permitted", "seccomp"]);
    assert_refused(&under("refuse", "socket"), &["Unix socket", "Operation not permitted", "seccomp"]);
    assert!(!fixture.run().exists(), "nothing is left behind");
    // Calls that have an alternative do not prevent recording.
    for call in ["process_vm_readv", "ptrace"] {
        fixture.assert_recorded(&under("refuse", call));
    }
}

#[test]
fn command_lines_and_environments_have_the_systems_limits() {
    let fixture = Fixture::new();
    // The kernel allows arguments and environment a quarter of the stack limit, and 128 KiB for a single string.
    let long = |bytes: usize| vec!["x".repeat(100_000); bytes / 100_000];
    let run = |words: &[String], environment: usize| {
        let mut command = Command::new(memtrace());
        command.arg("-q").arg("-o").arg(fixture.run()).arg("--").arg(&fixture.program).args(["some", "3"]).args(words);
        command.env("HUGE", "y".repeat(environment));
        fixture.output(&mut command)
    };
    let limit = 2 << 20;
    fixture.assert_recorded(&run(&long(limit - 200_000), 10));
    fixture.assert_recorded(&run(&[], 120_000));
    // The space is enough for the launcher but not for what it adds. A long path to the library makes that addition
    // larger.
    let way: PathBuf = std::iter::once(fixture.free()).chain((0..12).map(|_| "d".repeat(200).into())).collect();
    std::fs::create_dir_all(&way).unwrap();
    [fixture.programs.path(""), fixture.free()].iter().for_each(|folder| open_to_all(folder));
    let refused = (0..limit).step_by(512).find_map(|spare| {
        let filler = limit - spare;
        let mut words = long(filler - 150_000);
        words.push(
            "z".repeat(filler - words.iter().map(|w| w.len() + 9).sum::<usize>()).chars().take(120_000).collect(),
        );
        words.push("z".repeat(filler.saturating_sub(words.iter().map(|w| w.len() + 9).sum::<usize>())));
        let mut command = Command::new(memtrace());
        command.arg("-q").arg("-o").arg(fixture.run()).arg("--").arg(&fixture.program).args(["some", "3"]).args(words);
        command.env("XDG_CACHE_HOME", &way).env("LD_LIBRARY_PATH", fixture.programs.path(""));
        command.output().ok()
    });
    let refused = refused.expect("a command line that fits");
    assert_eq!(refused.status.code(), Some(126), "{}", stderr_of(&refused));
    assert!(stderr_of(&refused).contains("which memtrace's variables need"), "{}", stderr_of(&refused));
    assert!(!fixture.run().exists());
}
