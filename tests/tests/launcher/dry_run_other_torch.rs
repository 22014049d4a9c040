//! A dry run whose command starts the interpreter of another environment: libraries for its PyTorch are made then.

use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_tests::traced_program::root;
use memtrace_tests::versions::Versions;

use crate::launcher_support::*;

/// The interpreter of the environment with the PyTorch of the checks on GPUs.
fn other_python() -> PathBuf {
    let Versions { torch, python } = Versions::ON_GPUS;
    let found = output(Command::new(root().join("scripts/venv")).args(["--torch", torch, "--python", python]));
    assert!(found.status.success(), "{}", stderr(&found));
    Path::new(String::from_utf8_lossy(&found.stdout).trim()).join("bin/python")
}

#[test]
fn a_script_can_start_the_python_of_another_environment() {
    let folder = tempfile::tempdir().unwrap();
    let python = other_python();
    let program = "import torch; x = torch.zeros(1 << 20, device='cuda'); print(torch.__version__, x.device)";
    let script = format!("exec '{}' -c \"{program}\"\n", python.display());
    std::fs::write(folder.path().join("run.sh"), script).unwrap();
    // The python on PATH has the default PyTorch.
    let mut command = Command::new(root().join("scripts/sim"));
    command.current_dir(folder.path()).arg(memtrace()).args(["dry-run", "-o", "run", "--", "bash", "run.sh"]);
    let ended = output(&mut command);
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && text.starts_with(Versions::ON_GPUS.torch), "{text}{}", stderr(&ended));
    assert!(text.ends_with("cuda:0\n") && stderr(&ended).contains("+ Finished: peak 4.00 MiB"), "{}", stderr(&ended));
}

/// The hidden command that such an interpreter calls, as in a process whose libraries are in `libraries`.
fn simulated_libraries(libraries: &Path, python: &Path) -> Command {
    let mut command = Command::new(memtrace());
    command.env("SIMCUDA_LIBRARIES", libraries).arg("simulated-libraries").arg(python);
    command
}

/// The paths that it prints: that of PyTorch, that of the libraries, and each library.
fn paths(ended: &Output) -> Vec<PathBuf> {
    assert!(ended.status.success(), "{}", stderr(ended));
    String::from_utf8_lossy(&ended.stdout).lines().map(PathBuf::from).collect()
}

#[test]
fn processes_that_ask_at_once_without_a_umask_get_the_same_closed_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let python = other_python();
    let start = || {
        let mut command = simulated_libraries(&folder.path().join("x"), &python);
        // SAFETY: between fork and exec the closure makes one system call.
        unsafe {
            command.pre_exec(|| {
                libc::umask(0);
                Ok(())
            })
        };
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..6).map(|_| start()).collect();
    let answers: Vec<_> = children.into_iter().map(|child| paths(&child.wait_with_output().unwrap())).collect();
    assert!(answers.iter().all(|answer| *answer == answers[0] && answer.len() > 10), "{answers:?}");
    for path in &answers[0][1..] {
        let mode = std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o022, 0, "{}: {mode:o}", path.display());
    }
}

#[test]
fn folders_that_others_can_change_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let python = other_python();
    let refused = |libraries: &Path, python: &Path| {
        let ended = output(&mut simulated_libraries(libraries, python));
        let text = stderr(&ended);
        assert!(!ended.status.success() && ended.stdout.is_empty(), "{}: {text}", libraries.display());
        assert!(text.starts_with("error: ") && !text.contains('\u{1b}'), "{text}");
    };
    let open = folder.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    refused(&open.join("x"), &python);
    let link = folder.path().join("link");
    symlink(&open, &link).unwrap();
    refused(&link.join("x"), &python);
    refused(Path::new("relative/x"), &python);
    refused(Path::new(""), &python);
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } == 0 {
        let foreign = folder.path().join("foreign");
        std::fs::create_dir(&foreign).unwrap();
        chown(&foreign, Some(65533), Some(65533)).unwrap();
        refused(&foreign.join("x"), &python);
    }
    assert_eq!(std::fs::read_dir(&open).unwrap().count(), 0);
}
