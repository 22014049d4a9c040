//! Finds a command in the same way as execvp(3).

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The search path that execvp uses when PATH is not set (`_CS_PATH` of glibc).
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Why there is no file to execute.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum NotFound {
    /// No file has this name.
    Missing,
    /// The name is a directory.
    Directory,
    /// The file exists but may not be executed.
    Forbidden(PathBuf),
}

/// The file that execvp would execute for `command`.
pub(super) fn resolve(command: &OsStr) -> Result<PathBuf, NotFound> {
    if command.is_empty() {
        return Err(NotFound::Missing);
    }
    if command.as_bytes().contains(&b'/') {
        return candidate(Path::new(command));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let mut worst = NotFound::Missing;
    for dir in std::env::split_paths(&path) {
        // An empty entry stands for the current directory.
        let dir = if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir };
        match candidate(&dir.join(command)) {
            Ok(path) => return Ok(path),
            Err(NotFound::Forbidden(path)) if worst == NotFound::Missing => worst = NotFound::Forbidden(path),
            Err(_) => {}
        }
    }
    Err(worst)
}

fn candidate(path: &Path) -> Result<PathBuf, NotFound> {
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => return Err(NotFound::Forbidden(path.to_owned())),
        Err(_) => return Err(NotFound::Missing),
    };
    if meta.is_dir() {
        return Err(NotFound::Directory);
    }
    let c = CString::new(path.as_os_str().as_bytes()).map_err(|_| NotFound::Missing)?;
    // rustix calls faccessat2 first. The seccomp filters of older container runtimes answer it with EPERM, and rustix
    // falls back only on ENOSYS.
    // SAFETY: `c` is a NUL-terminated string, and the other arguments are constants.
    let allowed = unsafe { libc::faccessat(libc::AT_FDCWD, c.as_ptr(), libc::X_OK, libc::AT_EACCESS) } == 0;
    if allowed && meta.is_file() { Ok(path.to_owned()) } else { Err(NotFound::Forbidden(path.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_as_by_execvp() {
        assert!(resolve(OsStr::new("sh")).unwrap().ends_with("sh"));
        assert_eq!(resolve(OsStr::new("/bin/sh")), Ok(PathBuf::from("/bin/sh")));
        assert_eq!(resolve(OsStr::new("")), Err(NotFound::Missing));
        assert_eq!(resolve(OsStr::new("/")), Err(NotFound::Directory));
        assert_eq!(resolve(OsStr::new("/etc/passwd")), Err(NotFound::Forbidden("/etc/passwd".into())));
        assert_eq!(resolve(OsStr::new("/etc/passwd/x")), Err(NotFound::Missing));
    }
}
