//! Creates the folder of one run. Only its owner can read it, and it never contains other files.
//!
//! The folder's mode is 0700 although every file in it has mode 0600. The file names show who ran what and when, and a
//! user with write access could replace files. An existing folder of this user is closed to other users when the run
//! begins. A folder of another user is refused, because its owner could open it again.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use memtrace_analysis::RunFolder;
use memtrace_analysis::load::MANIFEST_FILE;

use crate::message::WithHelp;

/// The mode bits of users other than the owner.
const OTHERS_MODE: u32 = 0o077;
/// What to do when the folder cannot be used.
pub(crate) const CHOOSE_ANOTHER: &str = "choose another folder with -o";

/// A new run folder and whether it is private.
#[derive(Debug)]
pub(crate) struct CreatedFolder {
    pub(crate) folder: RunFolder,
    /// Whether other users can read the recording, because the file system does not store modes.
    pub(crate) is_open_to_others: bool,
}

/// Creates the run folder.
///
/// `requested` must be new or empty. Without it, the folder goes into the current directory, named after the program
/// and `stamp`. Fails when the folder cannot be created or is not empty, writable and owned by this user.
pub(crate) fn create(requested: Option<&Path>, command: &[OsString], stamp: &str) -> anyhow::Result<CreatedFolder> {
    let cannot_create = |path: &Path| WithHelp::new(format!("cannot create {}", path.display()), CHOOSE_ANOTHER);
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    if let Some(path) = requested {
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).with_context(|| cannot_create(parent))?;
        }
        match builder.create(path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e).with_context(|| cannot_create(path)),
        }
        return claim(path);
    }
    let name = format!("memtrace-{}-{stamp}", program_name(command));
    for suffix in 1..1000 {
        let path = PathBuf::from(if suffix == 1 { name.clone() } else { format!("{name}-{suffix}") });
        match builder.create(&path) {
            Ok(()) => return claim(&path),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e).with_context(|| cannot_create(&path)),
        }
    }
    bail!(WithHelp::new(format!("cannot create {name}: too many folders have this name"), CHOOSE_ANOTHER))
}

/// Opens the folder and makes sure that it is empty, writable, owned by this user and closed to others.
fn claim(path: &Path) -> anyhow::Result<CreatedFolder> {
    let shown = path.display();
    let fail = |text: String| WithHelp::new(text, CHOOSE_ANOTHER);
    let unusable = || fail(format!("cannot use {shown} as the run folder"));
    let folder = RunFolder::open(path).with_context(unusable)?;
    ensure!(
        folder.file_names().with_context(unusable)?.is_empty(),
        fail(format!("cannot use {shown} as the run folder: it is not empty"))
    );
    // The process that creates the manifest owns the folder. Another process may have found the folder empty at the
    // same time.
    let manifest = folder.create(MANIFEST_FILE).with_context(|| fail(format!("cannot write into {shown}")))?;
    // Compare with the owner of a new file, not with the user id: a file server may map all files of this user to
    // another user.
    let us = manifest.metadata().with_context(unusable)?.uid();
    if folder.stat().with_context(unusable)?.st_uid != us {
        let _ = folder.remove(MANIFEST_FILE);
        bail!(fail(format!(
            "cannot use {shown} as the run folder: it belongs to another user, who could read the run"
        )));
    }
    let mode = || folder.stat().map(|stat| stat.st_mode & OTHERS_MODE);
    if mode().with_context(unusable)? != 0 {
        // Some file systems have no modes, so this may fail.
        let _ = rustix::fs::fchmod(folder.descriptor().as_fd(), rustix::fs::Mode::RWXU);
    }
    let is_open_to_others = mode().with_context(unusable)? != 0;
    Ok(CreatedFolder { folder, is_open_to_others })
}

/// A short name for the program. If an interpreter runs a script or module, its name.
fn program_name(command: &[OsString]) -> String {
    let stem = |a: &OsString| Path::new(a).file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let first = command.first().map(stem).unwrap_or_default();
    let arguments = command.get(1..).unwrap_or_default();
    let module = arguments.iter().position(|a| a == "-m").filter(|_| first.starts_with("python"));
    let script = arguments.iter().find(|a| Path::new(a).extension().is_some_and(|e| e == "py"));
    let name = match (script, module.and_then(|i| arguments.get(i + 1))) {
        (Some(script), _) => stem(script),
        (None, Some(module)) => module.to_string_lossy().into_owned(),
        (None, None) => first,
    };
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' }).take(48).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { "run".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::help_of;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn name(line: &str) -> String {
        program_name(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_default_name_is_that_of_the_script() {
        assert_eq!(name("python train.py --bs 16"), "train");
        assert_eq!(name("/usr/bin/python3.12 -u examples/gpt/train.py"), "train");
        assert_eq!(name("python -m torch.distributed.run --nproc 2 ddp.py"), "ddp");
        assert_eq!(name("python -m pkg.tool"), "pkg.tool");
        assert_eq!(name("torchrun --nproc-per-node 2 x/ddp.py"), "ddp");
        assert_eq!(name("./a b"), "a");
        assert_eq!(name("/bin/.. x"), "run");
        assert_eq!(name("ä/ü"), "_");
    }

    #[test]
    fn a_folder_must_be_new_or_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let created = create(Some(&path), &[], "").unwrap();
        assert_eq!((created.folder.path(), created.is_open_to_others), (&*path, false));
        assert_eq!(mode(&path), 0o700);
        // An existing folder is closed to other users.
        created.folder.remove(MANIFEST_FILE).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!create(Some(&path), &[], "").unwrap().is_open_to_others);
        assert_eq!((mode(&path), mode(&path.join(MANIFEST_FILE))), (0o700, 0o600));
        let error = create(Some(&path), &[], "").unwrap_err().to_string();
        assert!(error.contains("not empty"), "{error}");
        let error = create(Some(&path.join("run.json")), &[], "").unwrap_err();
        assert_eq!(help_of(&error).as_deref(), Some(CHOOSE_ANOTHER), "{error:#}");
    }
}
