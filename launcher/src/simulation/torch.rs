//! Finds the PyTorch that a command will import, and the folders of packages beside it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::bounded_read::read_until;
use crate::preflight;

/// Prints the folder of PyTorch without importing it, and the folders of installed packages, each with a NUL behind it.
/// A NUL comes first, because modules that Python imports when it starts can print too.
const PROGRAM: &str = "import importlib.util as u, sys; s = u.find_spec('torch'); \
    p = [f for f in sys.path if f.endswith(('site-packages', 'dist-packages'))]; \
    print('', *(list(s.submodule_search_locations or [''])[:1] if s else ['']), *p, sep='\\0', end='\\0')";

/// The interpreters to ask where the command itself is none: PATH's.
const INTERPRETERS: [&str; 2] = ["python", "python3"];
/// The maximum depth of scripts that name each other as interpreters.
const MAX_SCRIPTS: usize = 5;

/// How long an interpreter may take to answer. It may be on a slow file system.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// The longest answer, in bytes. Modules that Python imports when it starts can print anything.
const MAX_ANSWER: usize = 1 << 20;

/// An installed PyTorch.
#[derive(Debug)]
pub(super) struct PyTorch {
    /// The folder of its package.
    pub(super) folder: PathBuf,
    /// The folders of installed packages that its interpreter searches.
    pub(super) packages: Vec<PathBuf>,
}

/// The PyTorch that the command's interpreter finds, or else that of PATH's Python. `None` if there is none.
pub(super) fn of_command(command: &[OsString]) -> Option<PyTorch> {
    let own = executed_program(command.iter().map(OsString::as_os_str)).and_then(|path| interpreter(&path, 0));
    let others = INTERPRETERS.iter().filter_map(|name| preflight::resolve_program(OsStr::new(name)));
    own.into_iter().chain(others).find_map(|python| ask(&python))
}

/// The program that a command executes: its first word, or what `env` executes.
fn executed_program<'a>(mut words: impl Iterator<Item = &'a OsStr>) -> Option<PathBuf> {
    let first = words.next()?;
    if Path::new(first).file_name() != Some(OsStr::new("env")) {
        return preflight::resolve_program(first);
    }
    let is_name = |word: &&OsStr| !word.as_bytes().starts_with(b"-") && !word.as_bytes().contains(&b'=');
    // The name of a variable, behind an option, is that of no program.
    words.filter(is_name).find_map(preflight::resolve_program)
}

/// The Python that executes a program: itself, or the one that its first line names.
fn interpreter(program: &Path, depth: usize) -> Option<PathBuf> {
    let name = program.file_name()?.as_bytes();
    if name.starts_with(b"python") || name.starts_with(b"pypy") {
        return Some(program.to_owned());
    }
    let mut start = Vec::new();
    File::open(program).ok()?.take(256).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    let next = executed_program(words)?;
    if depth < MAX_SCRIPTS { interpreter(&next, depth + 1) } else { None }
}

/// Asks an interpreter for its PyTorch.
fn ask(python: &Path) -> Option<PyTorch> {
    let mut command = Command::new(python);
    let mut child =
        command.args(["-c", PROGRAM]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
    let output = child.stdout.take().map(|output| read_until(output, Instant::now() + ANSWER_TIME, MAX_ANSWER));
    let Some(Ok(output)) = output else {
        // It prints without an end, or has a child process that keeps its output open.
        let _ = child.kill();
        let _ = child.wait();
        return None;
    };
    let mut folders = output.split(|byte| *byte == 0).map(|path| PathBuf::from(OsStr::from_bytes(path)));
    let folder = folders.nth(1).filter(|folder| folder.is_dir());
    let packages = folders.filter(|folder| folder.is_dir()).collect();
    let status = child.wait().ok()?;
    folder.filter(|_| status.success()).map(|folder| PyTorch { folder, packages })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn env_is_seen_through() {
        let found = |line: &str| executed_program(line.split(' ').map(OsStr::new));
        let sh = found("sh -c true").unwrap();
        for line in ["env sh", "/usr/bin/env A=1 sh -c env", "env -i -u NO_SUCH_PROGRAM B= sh"] {
            assert_eq!(found(line).as_ref(), Some(&sh), "{line}");
        }
        assert_eq!(found("env A=1"), None);
    }

    #[test]
    fn a_python_that_prints_when_it_starts_is_understood() {
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("python");
        let torch = folder.path().join("torch");
        std::fs::create_dir(&torch).unwrap();
        let script = format!("#!/bin/sh\nprintf 'hello\\n\\0%s\\0' {}\n", torch.display());
        std::fs::write(&python, script).unwrap();
        std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert_eq!(ask(&python).unwrap().folder, torch);
    }

    #[test]
    fn a_python_that_prints_without_an_end_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("python");
        std::fs::write(&python, "#!/bin/sh\nexec yes\n").unwrap();
        std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert!(ask(&python).is_none());
    }
}
