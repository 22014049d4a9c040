//! Checks whether the command `memtrace` runs this program. Other packages have a program of that name too.

use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::report::Check;

const COMMAND: &str = "memtrace";
/// The same program under a name that no other package has. The Python distribution installs it beside this file.
const OTHER_COMMAND: &str = "gpu-memtrace";

/// Checks the first `memtrace` on PATH.
pub(super) fn own_command() -> Check {
    match std::env::current_exe() {
        Ok(this) => of_path(&this, &std::env::var_os("PATH").unwrap_or_default()),
        Err(e) => Check::note(NAME, format!("cannot find the file of this program: {e}")),
    }
}

const NAME: &str = "Command memtrace";

/// Checks the first `memtrace` in the folders of `path` against the file `this`.
fn of_path(this: &Path, path: &OsStr) -> Check {
    let shown = this.display();
    let Some(first) = find(COMMAND, path) else {
        return Check::ok(NAME, format!("not on PATH; this is {shown}"));
    };
    if is_same_program(&first, this) {
        return Check::ok(NAME, first.display().to_string());
    }
    let beside = this.with_file_name(OTHER_COMMAND);
    let has_other_command = find(OTHER_COMMAND, path).is_some_and(|found| is_same_file(&found, &beside));
    let command = if has_other_command { OTHER_COMMAND.to_owned() } else { shown.to_string() };
    let text = format!("on PATH it is another program, {}; this is {shown}", first.display());
    let folder = this.parent().unwrap_or(this).display();
    Check::note(NAME, text).with_fix(format!("run {command} instead, or move {folder} to the front of PATH"))
}

/// The first executable file of this name, as a shell finds it.
fn find(command: &str, path: &OsStr) -> Option<PathBuf> {
    let is_executable = |file: &PathBuf| {
        std::fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path).map(|folder| folder.join(command)).find(is_executable)
}

/// Whether both paths lead to one file, or to two with the same content.
fn is_same_program(a: &Path, b: &Path) -> bool {
    let size = |path: &Path| std::fs::metadata(path).map(|meta| meta.len()).ok();
    is_same_file(a, b)
        || size(a) == size(b) && std::fs::read(a).is_ok_and(|bytes| std::fs::read(b).is_ok_and(|other| bytes == other))
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    id(a).is_some() && id(a) == id(b)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, set_permissions, write};

    use super::*;
    use crate::doctor::report::CheckStatus;

    /// A folder of this name with these executable files.
    fn folder(root: &Path, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = root.join(name);
        create_dir(&folder).unwrap();
        for (file, content) in files {
            write(folder.join(file), content).unwrap();
            set_permissions(folder.join(file), Permissions::from_mode(0o755)).unwrap();
        }
        folder
    }

    fn joined(folders: &[&Path]) -> std::ffi::OsString {
        std::env::join_paths(folders).unwrap()
    }

    #[test]
    fn the_first_memtrace_on_path_is_compared_with_this_program() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let ours = folder(root, "ours", &[("memtrace", "us"), ("gpu-memtrace", "script")]);
        let other = folder(root, "other", &[("memtrace", "no")]);
        let copy = folder(root, "copy", &[("memtrace", "us")]);
        let linked = folder(root, "linked", &[]);
        std::os::unix::fs::symlink(ours.join("memtrace"), linked.join("memtrace")).unwrap();
        let data = folder(root, "data", &[("memtrace", "no")]);
        set_permissions(data.join("memtrace"), Permissions::from_mode(0o644)).unwrap();
        let this = ours.join("memtrace");

        for first in [&ours, &copy, &linked] {
            let check = of_path(&this, &joined(&[&data, first, &other]));
            assert_eq!(check, Check::ok(NAME, first.join("memtrace").display().to_string()));
        }
        assert_eq!(of_path(&this, &joined(&[&data])).status, CheckStatus::Ok);

        let check = of_path(&this, &joined(&[&other, &ours]));
        assert_eq!(check.status, CheckStatus::Note);
        assert!(check.detail.contains(other.join("memtrace").to_str().unwrap()), "{}", check.detail);
        assert!(check.fix.unwrap().starts_with("run gpu-memtrace instead, or move "));
        // gpu-memtrace of this installation is not on PATH.
        let check = of_path(&this, &joined(&[&other]));
        assert!(check.fix.unwrap().starts_with(&format!("run {} instead", this.display())));
    }
}
