//! Creates the folder of one run. Only its owner can read it, and it never contains other files.
//!
//! The folder's mode is 0700 although every file in it has mode 0600. The file names show who ran what and when, and a
//! user with write access could replace files. An existing folder of this user is closed to other users when the run
//! begins. A folder of another user is refused, because its owner could open it again.

use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use memtrace_analysis::RunFolder;
use memtrace_analysis::load::MANIFEST_FILE;

use crate::host;
use crate::message::WithHelp;

/// The mode bits of users other than the owner.
const OTHERS_MODE: u32 = 0o077;
/// The help if the folder cannot be used.
pub(crate) const CHOOSE_ANOTHER: &str = "choose another folder with -o";

/// A new run folder and whether it is private.
#[derive(Debug)]
pub(crate) struct CreatedFolder {
    pub(crate) folder: RunFolder,
    /// Whether other users can read the recording, because the file system does not store modes.
    pub(crate) is_open_to_others: bool,
}

/// Where to create the run folder.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place<'a> {
    /// Exactly here. The folder must be new or empty.
    At(&'a Path),
    /// In this folder, named after the program and the time.
    In(&'a Path),
}

/// Creates the run folder. `stamp` is the time in its name.
///
/// Fails when the folder cannot be created or is not empty, writable and owned by this user.
pub(crate) fn create(place: Place<'_>, command: &[OsString], stamp: &str) -> anyhow::Result<CreatedFolder> {
    let cannot_create = |path: &Path| WithHelp::new(format!("cannot create {}", path.display()), CHOOSE_ANOTHER);
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    let create_parent = |parent: &Path| {
        if parent.as_os_str().is_empty() { Ok(()) } else { std::fs::create_dir_all(parent) }
            .with_context(|| cannot_create(parent))
    };
    let parent = match place {
        Place::At(path) => {
            path.parent().map_or(Ok(()), create_parent)?;
            match builder.create(path) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e).with_context(|| cannot_create(path)),
            }
            return claim(path);
        }
        Place::In(parent) => parent,
    };
    create_parent(parent)?;
    let session = std::env::var_os(NOTEBOOK);
    let name = format!("memtrace-{}-{stamp}", program_name(command, session.as_deref()));
    for name in names(&name, &host::name(), std::process::id()) {
        let path = parent.join(name);
        match builder.create(&path) {
            Ok(()) => return claim(&path),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e).with_context(|| cannot_create(&path)),
        }
    }
    bail!(WithHelp::new(format!("cannot create {name}: too many folders have this name"), CHOOSE_ANOTHER))
}

/// The names to try, in order. `mkdir` is atomic, also on network file systems, so each name has one owner.
///
/// The ranks of a job can begin in one shared folder in the same second. After a few short names, a name has the host
/// and the process id, so that a thousand launchers need a dozen calls each.
fn names(name: &str, host: &str, pid: u32) -> impl Iterator<Item = String> {
    const SHORT: u32 = 9;
    const LONG: u32 = 1000;
    let own = format!("{name}-{}-{pid}", file_name_part(host));
    let short = name.to_owned();
    let numbered = move |name: String, i: u32| if i == 1 { name } else { format!("{name}-{i}") };
    (1..=SHORT).map(move |i| numbered(short.clone(), i)).chain((1..=LONG).map(move |i| numbered(own.clone(), i)))
}

/// The text with only those characters that need no quotes anywhere, at most 48.
fn file_name_part(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' }).take(48).collect()
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

/// The variable in which Jupyter gives a kernel the path of its notebook.
const NOTEBOOK: &str = "JPY_SESSION_NAME";
/// The module of a kernel.
const KERNEL: &str = "ipykernel_launcher";

/// A short name for the program. If an interpreter runs a script or module, its name; for a kernel, that of its
/// notebook.
fn program_name(command: &[OsString], notebook: Option<&OsStr>) -> String {
    let stem = |a: &OsStr| Path::new(a).file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let first = command.first().map(|first| stem(first)).unwrap_or_default();
    let arguments = command.get(1..).unwrap_or_default();
    let module = arguments.iter().position(|a| a == "-m").filter(|_| first.starts_with("python"));
    let script = arguments.iter().find(|a| Path::new(a).extension().is_some_and(|e| e == "py"));
    let name = match (script, module.and_then(|i| arguments.get(i + 1))) {
        (Some(script), _) => stem(script),
        (None, Some(module)) if module == KERNEL => notebook.map_or("notebook".to_owned(), stem),
        (None, Some(module)) => module.to_string_lossy().into_owned(),
        (None, None) => first,
    };
    let name = file_name_part(&name);
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
        program_name(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>(), None)
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
        assert_eq!(name("/opt/bin/python3 -m ipykernel_launcher -f k.json"), "notebook");
        let kernel = ["python", "-m", KERNEL].map(OsString::from);
        assert_eq!(program_name(&kernel, Some("/home/a/lab 1/train gpt.ipynb".as_ref())), "train_gpt");
        assert_eq!(program_name(&["train".into()], Some("a.ipynb".as_ref())), "train");
    }

    #[test]
    fn launchers_that_begin_together_share_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let stamp = "20261124-110000";
        let command = ["train".into()];
        // Other hosts have taken the short names. Another container with this host name and process id took the next.
        for name in names(&format!("memtrace-train-{stamp}"), &host::name(), std::process::id()).take(10) {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let paths: Vec<_> = std::thread::scope(|scope| {
            let start = || {
                let create = |_| create(Place::In(dir.path()), &command, stamp).unwrap().folder.path().to_owned();
                (0..50).map(create).collect::<Vec<_>>()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let distinct: std::collections::BTreeSet<_> = paths.iter().collect();
        assert_eq!((paths.len(), distinct.len()), (200, 200));
        assert!(paths.iter().all(|path| path.join(MANIFEST_FILE).exists()));
        // On another host, a dozen calls are enough.
        let name = |at| names("memtrace-train", "node/7", 42).nth(at).unwrap();
        assert_eq!([name(0), name(8), name(9)], ["memtrace-train", "memtrace-train-9", "memtrace-train-node_7-42"]);
    }

    #[test]
    fn a_folder_must_be_new_or_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let created = create(Place::At(&path), &[], "").unwrap();
        assert_eq!((created.folder.path(), created.is_open_to_others), (&*path, false));
        assert_eq!(mode(&path), 0o700);
        // An existing folder is closed to other users.
        created.folder.remove(MANIFEST_FILE).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!create(Place::At(&path), &[], "").unwrap().is_open_to_others);
        assert_eq!((mode(&path), mode(&path.join(MANIFEST_FILE))), (0o700, 0o600));
        let error = create(Place::At(&path), &[], "").unwrap_err().to_string();
        assert!(error.contains("not empty"), "{error}");
        let error = create(Place::At(&path.join("run.json")), &[], "").unwrap_err();
        assert_eq!(help_of(&error).as_deref(), Some(CHOOSE_ANOTHER), "{error:#}");
    }
}
