//! Finds the PyTorch that a command will import, and the folders of packages beside it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::preflight;

/// Prints the folder of PyTorch without importing it, and the folders of installed packages, each with a NUL behind it.
const PROGRAM: &str = "import importlib.util as u, sys; s = u.find_spec('torch'); \
    p = [f for f in sys.path if f.endswith(('site-packages', 'dist-packages'))]; \
    print(*(list(s.submodule_search_locations or [''])[:1] if s else ['']), *p, sep='\\0', end='\\0')";

/// The interpreters to ask where the command itself is none: PATH's.
const INTERPRETERS: [&str; 2] = ["python", "python3"];
/// The maximum depth of scripts that name each other as interpreters.
const MAX_SCRIPTS: usize = 5;

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
    let own =
        command.first().and_then(|program| preflight::resolve_program(program)).and_then(|path| interpreter(&path, 0));
    let others = INTERPRETERS.iter().filter_map(|name| preflight::resolve_program(OsStr::new(name)));
    own.into_iter().chain(others).find_map(|python| ask(&python))
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
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    let first = words.next()?;
    let next = if Path::new(first).file_name() == Some(OsStr::new("env")) {
        preflight::resolve_program(words.find(|word| !word.as_bytes().starts_with(b"-"))?)?
    } else {
        PathBuf::from(first)
    };
    if depth < MAX_SCRIPTS { interpreter(&next, depth + 1) } else { None }
}

/// Asks an interpreter for its PyTorch.
fn ask(python: &Path) -> Option<PyTorch> {
    let output = Command::new(python).args(["-c", PROGRAM]).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let mut folders = output.stdout.split(|byte| *byte == 0).map(|path| PathBuf::from(OsStr::from_bytes(path)));
    let folder = folders.next()?;
    let packages = folders.filter(|folder| folder.is_dir()).collect();
    (output.status.success() && folder.is_dir()).then_some(PyTorch { folder, packages })
}
