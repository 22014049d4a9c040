//! Provides the file of the preloaded library.
//!
//! The library is embedded in this binary, so it always comes from the same build. The two must agree exactly on the
//! layout of the shared memory. On first use the library is written to a folder that only this user can write to. Its
//! name is derived from its content, and an existing file is compared byte by byte before it is used.
//! `MEMTRACE_LIBRARY` names another file, for work on the library itself.
//!
//! If the dynamic loader of a traced process cannot read the file, it prints an error on that process's stderr. Root's
//! copy therefore lies where every user can read it, because the command may change its user. A copy of another build
//! is removed only when it is unused for [`MAX_UNUSED`] and no launcher holds a lock on it. A running process has its
//! copy mapped, but the processes that it starts load the file again.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

use crate::message::WithHelp;

const CONTENT: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_LIBRARY"));
/// A hash of the library's content, used as a folder name.
const HASH: &str = env!("MEMTRACE_EMBEDDED_HASH");
const NAME: &str = "libmemtrace_interpose.so";
/// The age after which an unused copy of another build is removed.
const MAX_UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);

/// The library's file. A shared lock keeps other launchers from removing it while this value exists.
#[derive(Debug)]
pub(crate) struct Library {
    /// The absolute path, suitable for `LD_PRELOAD`.
    pub(crate) path: PathBuf,
    _lock: Option<File>,
}

/// Finds the library's file or writes it. `run_folder` holds the file when no other folder can.
///
/// Fails when `MEMTRACE_LIBRARY` is unusable, or when no folder can hold the file.
pub(crate) fn library(run_folder: &Path) -> anyhow::Result<Library> {
    if let Some(path) = std::env::var_os("MEMTRACE_LIBRARY").filter(|p| !p.is_empty()) {
        const UNSET: &str = "unset MEMTRACE_LIBRARY to use the library of this memtrace";
        let shown = path.display();
        let path = Path::new(&path)
            .canonicalize()
            .with_context(|| WithHelp::new(format!("cannot use MEMTRACE_LIBRARY={shown}"), UNSET))?;
        ensure!(
            is_preloadable(&path),
            WithHelp::new(
                format!("cannot use MEMTRACE_LIBRARY={shown}: LD_PRELOAD cannot hold a path with spaces, `:` or `$`"),
                UNSET
            )
        );
        return Ok(Library { path, _lock: None });
    }
    let mut reasons = Vec::new();
    for base in candidates() {
        match check_ancestors(&base).and_then(|()| install(&base)) {
            Ok(library) => {
                remove_unused(&base, MAX_UNUSED);
                return Ok(library);
            }
            Err(e) => reasons.push(format!("{}: {e:#}", base.display())),
        }
    }
    let own = std::path::absolute(run_folder)?.join(".lib");
    match check_ancestors(&own).and_then(|()| install(&own)) {
        Ok(library) => return Ok(library),
        Err(e) => reasons.push(format!("{}: {e:#}", own.display())),
    }
    bail!(WithHelp::new(
        format!("no folder can hold the preloaded library: {}", reasons.join("; ")),
        "set XDG_CACHE_HOME to a folder that belongs to you, without spaces in its path and not mounted noexec"
    ))
}

fn candidates() -> Vec<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v: &OsString| Path::new(v).is_absolute()).map(PathBuf::from);
    let uid = geteuid().as_raw();
    let cache = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|h| h.join(".cache"))).map(|c| c.join("memtrace/lib"));
    let runtime = var("XDG_RUNTIME_DIR").map(|r| r.join("memtrace/lib"));
    let system = (uid == 0).then(|| PathBuf::from("/var/cache/memtrace/lib"));
    let [temporary, lasting] = [std::env::temp_dir(), "/var/tmp".into()].map(|t| t.join(format!("memtrace-{uid}")));
    let mut all: Vec<PathBuf> =
        [cache, runtime, system, Some(temporary), Some(lasting)].into_iter().flatten().collect();
    if uid == 0 {
        all.sort_by_key(|base| !is_open_to_all(base));
    }
    all
}

/// Whether every user can search the existing parent folders of `path` that are not named `memtrace`.
fn is_open_to_all(path: &Path) -> bool {
    let foreign = path.ancestors().skip(1).filter(|a| a.file_name().is_none_or(|n| n != "memtrace"));
    foreign.filter_map(|a| std::fs::metadata(a).ok()).all(|meta| meta.mode() & 0o001 != 0)
}

/// The mode of the folders and files that this module creates. Root's are readable by all, because the command may
/// change its user.
fn mode() -> u32 {
    if geteuid().is_root() { 0o755 } else { 0o700 }
}

/// Whether `LD_PRELOAD` can hold this path. The loader splits the variable at spaces and colons and expands `$`
/// (ld.so(8)).
fn is_preloadable(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_bytes().iter().any(|b| b" :$\n\t".contains(b))
}

/// Makes sure that a valid copy of the library exists under `base`, and locks it.
fn install(base: &Path) -> anyhow::Result<Library> {
    let dir = base.join(HASH);
    ensure!(is_preloadable(&dir), "LD_PRELOAD cannot hold a path with spaces, `:` or `$`");
    let above = base.parent().filter(|p| p.file_name().is_some_and(|n| n == "memtrace"));
    let ours = || above.into_iter().chain([base, &dir]);
    // Another user may have put a link there. Nothing is created behind it.
    for existing in ours().filter_map(|dir| std::fs::symlink_metadata(dir).ok()) {
        check_owner(&existing)?;
    }
    DirBuilder::new().recursive(true).mode(mode()).create(&dir)?;
    for dir in ours() {
        let meta = std::fs::symlink_metadata(dir)?;
        check_owner(&meta)?;
        // The umask may have removed permission bits.
        if meta.mode() & mode() != mode() {
            std::fs::set_permissions(dir, Permissions::from_mode(mode()))?;
        }
    }
    let path = dir.join(NAME);
    // Try again once, in case another launcher has just removed the copy.
    for _ in 0..2 {
        if let Some(lock) = lock_shared(&path).filter(|_| is_intact(&path)) {
            check_executable(&lock)?;
            return Ok(Library { path, _lock: Some(lock) });
        }
        write(&dir, &path)?;
    }
    ensure!(is_intact(&path), "its content differs from what was written");
    check_executable(&File::open(&path)?)?;
    Ok(Library { path, _lock: None })
}

/// Opens the copy under a shared lock and updates its modification time, so that other launchers keep it for
/// [`MAX_UNUSED`].
fn lock_shared(path: &Path) -> Option<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path).ok()?;
    let _ = flock(&file, FlockOperation::LockShared);
    // This fails for a file of another user or on a read-only file system. Then nobody can remove the file either.
    file.set_modified(SystemTime::now()).ok();
    Some(file)
}

/// Removes the copies of other builds under `base` that are older than `age` and that no launcher has locked.
fn remove_unused(base: &Path, age: Duration) {
    let is_hash = |name: &OsString| name.len() == HASH.len() && name.as_bytes().iter().all(u8::is_ascii_hexdigit);
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten();
    for dir in entries.filter(|e| is_hash(&e.file_name()) && e.file_name() != HASH).map(|e| e.path()) {
        let path = dir.join(NAME);
        let Ok(file) = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path) else { continue };
        let is_unlocked = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        let unused = file.metadata().and_then(|meta| meta.modified()).ok().and_then(|m| m.elapsed().ok());
        if is_unlocked && unused.is_some_and(|unused| unused > age) && std::fs::remove_file(&path).is_ok() {
            let made = std::fs::read_dir(&dir).into_iter().flatten().flatten();
            made.filter(|e| e.file_name().as_bytes().starts_with(b"simulated")).for_each(|e| {
                std::fs::remove_dir_all(e.path()).ok();
            });
            // This fails when the folder contains other files. They stay.
            std::fs::remove_dir(&dir).ok();
        }
    }
}

fn check_owner(meta: &std::fs::Metadata) -> anyhow::Result<()> {
    let uid = geteuid().as_raw();
    ensure!(!meta.is_symlink(), "it is a symbolic link");
    ensure!(meta.uid() == uid, "it belongs to another user");
    ensure!(meta.mode() & 0o022 == 0, "other users can write to it");
    Ok(())
}

/// Checks that only this user and root can replace a folder on the way to `path`. The targets of symbolic links on the
/// way are checked too.
fn check_ancestors(path: &Path) -> anyhow::Result<()> {
    let uid = geteuid().as_raw();
    let real = path.ancestors().skip(1).find_map(|ancestor| ancestor.canonicalize().ok());
    for ancestor in path.ancestors().skip(1).chain(real.iter().flat_map(|real| real.ancestors())) {
        let Ok(meta) = std::fs::metadata(ancestor) else { continue };
        let trusted = meta.uid() == uid || meta.uid() == 0;
        let closed = meta.mode() & 0o022 == 0 || meta.mode() & libc::S_ISVTX != 0;
        ensure!(trusted && closed, "other users can write to {}", ancestor.display());
    }
    Ok(())
}

fn is_intact(path: &Path) -> bool {
    let meta = std::fs::symlink_metadata(path);
    meta.is_ok_and(|m| m.is_file() && check_owner(&m).is_ok())
        && std::fs::read(path).is_ok_and(|bytes| bytes == CONTENT)
}

fn write(dir: &Path, path: &Path) -> io::Result<()> {
    // A process id would not be unique, because containers may share the folder.
    let partial = dir.join(format!(".{NAME}.{}", crate::session::token().map_err(io::Error::other)?));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode())
        .custom_flags(libc::O_NOFOLLOW)
        .open(&partial)
        .and_then(|mut file| {
            file.write_all(CONTENT).and_then(|()| file.set_permissions(Permissions::from_mode(mode())))
        })
        .and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        std::fs::remove_file(&partial).ok();
    }
    written
}

/// Checks that code can be mapped from this file. On a `noexec` file system the loader would print an error on the
/// stderr of every process.
fn check_executable(file: &File) -> anyhow::Result<()> {
    // SAFETY: `file` keeps its descriptor open during the call. The kernel chooses the address, so the private mapping
    // replaces no other. The page is never accessed, and `munmap` gets exactly the mapping that `mmap` returned.
    unsafe {
        let flags = libc::PROT_READ | libc::PROT_EXEC;
        let page = libc::mmap(std::ptr::null_mut(), 4096, flags, libc::MAP_PRIVATE, file.as_raw_fd(), 0);
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error())
                .context("cannot map code from its file system, which may be mounted noexec");
        }
        libc::munmap(page, 4096);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_written_once_and_replaced_when_it_differs() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("lib");
        let path = install(&base).unwrap().path;
        assert_eq!(std::fs::read(&path).unwrap(), CONTENT);
        let first = std::fs::metadata(&path).unwrap().ino();
        assert_eq!(std::fs::metadata(install(&base).unwrap().path).unwrap().ino(), first);
        std::fs::write(&path, b"forged").unwrap();
        assert_eq!(std::fs::read(install(&base).unwrap().path).unwrap(), CONTENT);
    }

    #[test]
    fn old_unlocked_copies_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let copy = |hash: &str, days: u64| {
            let path = dir.path().join(hash).join(NAME);
            std::fs::create_dir(path.parent().unwrap()).unwrap();
            let file = File::create(&path).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(days * 24 * 3600)).unwrap();
            path
        };
        let (old, locked, young) =
            (copy("00000000000000aa", 31), copy("00000000000000bb", 31), copy("00000000000000cc", 29));
        let (ours, other) = (copy(HASH, 31), copy("not-a-copy-of-us", 31));
        let lock = File::open(&locked).unwrap();
        flock(&lock, FlockOperation::LockShared).unwrap();
        remove_unused(dir.path(), MAX_UNUSED);
        assert!(!old.parent().unwrap().exists());
        assert!([&locked, &young, &ours, &other].iter().all(|path| path.exists()));
        drop(lock);
        // Locking a copy updates its modification time.
        drop(lock_shared(&locked).unwrap());
        remove_unused(dir.path(), MAX_UNUSED);
        assert!(locked.exists());
    }

    #[test]
    fn folders_that_others_can_change_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(install(&dir.path().join("with space")).is_err());
        let open = dir.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(install(&open).is_err());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(install(&link).is_err());
        assert!(check_ancestors(&open.join("lib")).is_err());
        // A symbolic link of this user leads into a folder that other users can replace.
        std::fs::create_dir(open.join("inside")).unwrap();
        let way = dir.path().join("way");
        std::os::unix::fs::symlink(open.join("inside"), &way).unwrap();
        assert!(check_ancestors(&way.join("memtrace/lib")).is_err());
        assert!(check_ancestors(Path::new("/tmp/memtrace-0")).is_ok());
    }
}
