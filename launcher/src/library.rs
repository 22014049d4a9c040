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
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

use crate::message::WithHelp;
use crate::private_folder::{PrivateFolder, Readers};

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
        match install(&base) {
            Ok(library) => {
                remove_unused(&base, MAX_UNUSED);
                return Ok(library);
            }
            Err(e) => reasons.push(format!("{}: {e:#}", base.path().display())),
        }
    }
    let own = Base { parent: std::path::absolute(run_folder)?, names: vec![".lib".to_owned()] };
    match install(&own) {
        Ok(library) => return Ok(library),
        Err(e) => reasons.push(format!("{}: {e:#}", own.path().display())),
    }
    bail!(WithHelp::new(
        format!("no folder can hold the preloaded library: {}", reasons.join("; ")),
        "set XDG_CACHE_HOME to a folder that belongs to you, without spaces in its path and not mounted noexec"
    ))
}

/// A folder for copies of the library of every build: folders of memtrace, one in the other, in a folder that may be
/// there.
#[derive(Clone, Debug)]
struct Base {
    parent: PathBuf,
    names: Vec<String>,
}

impl Base {
    fn path(&self) -> PathBuf {
        self.names.iter().fold(self.parent.clone(), |path, name| path.join(name))
    }

    fn enter(&self, more: &[&str]) -> anyhow::Result<PrivateFolder> {
        let names: Vec<&str> = self.names.iter().map(String::as_str).chain(more.iter().copied()).collect();
        PrivateFolder::enter(&self.parent, &names, Readers::of_code())
    }
}

fn candidates() -> Vec<Base> {
    let var = |name| std::env::var_os(name).filter(|v: &OsString| Path::new(v).is_absolute()).map(PathBuf::from);
    let uid = geteuid().as_raw();
    let shared = |parent: PathBuf| Base { parent, names: vec!["memtrace".to_owned(), "lib".to_owned()] };
    let own = |parent: PathBuf| Base { parent, names: vec![format!("memtrace-{uid}")] };
    let cache = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache"))).map(shared);
    let runtime = var("XDG_RUNTIME_DIR").map(shared);
    let system = (uid == 0).then(|| shared("/var/cache".into()));
    let [temporary, lasting] = [std::env::temp_dir(), "/var/tmp".into()].map(own);
    let mut all: Vec<Base> = [cache, runtime, system, Some(temporary), Some(lasting)].into_iter().flatten().collect();
    if uid == 0 {
        all.sort_by_key(|base| !is_open_to_all(&base.parent));
    }
    all
}

/// Whether every user can search a folder and those on the way to it, as far as they exist.
fn is_open_to_all(folder: &Path) -> bool {
    folder.ancestors().filter_map(|a| std::fs::metadata(a).ok()).all(|meta| meta.mode() & 0o001 != 0)
}

/// Whether `LD_PRELOAD` can hold this path. The loader splits the variable at spaces and colons and expands `$`
/// (ld.so(8)).
fn is_preloadable(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_bytes().iter().any(|b| b" :$\n\t".contains(b))
}

/// Makes sure that a valid copy of the library exists under `base`, and locks it.
fn install(base: &Base) -> anyhow::Result<Library> {
    ensure!(is_preloadable(&base.path().join(HASH)), "LD_PRELOAD cannot hold a path with spaces, `:` or `$`");
    let folder = base.enter(&[HASH])?;
    let path = folder.path().join(NAME);
    // Try again once, in case another launcher has just removed the copy.
    for _ in 0..2 {
        if let Some(lock) = lock_shared(&folder).filter(|_| folder.holds(NAME, CONTENT)) {
            check_executable(&lock)?;
            return Ok(Library { path, _lock: Some(lock) });
        }
        folder.replace(NAME, CONTENT)?;
    }
    ensure!(folder.holds(NAME, CONTENT), "its content differs from what was written");
    check_executable(&folder.open(NAME)?)?;
    Ok(Library { path, _lock: None })
}

/// Opens the copy under a shared lock and updates its modification time, so that other launchers keep it for
/// [`MAX_UNUSED`].
fn lock_shared(folder: &PrivateFolder) -> Option<File> {
    let file = folder.open(NAME).ok()?;
    let _ = flock(&file, FlockOperation::LockShared);
    // This fails on a read-only file system. Then nobody can remove the file either.
    file.set_modified(SystemTime::now()).ok();
    Some(file)
}

/// A folder with the copy of the library of one build, and with the simulated libraries of its dry runs.
#[derive(Debug)]
pub(crate) struct LibraryCopy {
    base: Base,
    name: String,
}

impl LibraryCopy {
    /// The path of the folder.
    pub(crate) fn path(&self) -> PathBuf {
        self.base.path().join(&self.name)
    }

    /// Whether a launcher has locked the copy.
    pub(crate) fn is_in_use(&self) -> bool {
        let copy = self.open();
        copy.is_some_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_err())
    }

    fn open(&self) -> Option<File> {
        self.base.enter(&[]).ok()?.existing(&self.name)?.open(NAME).ok()
    }

    /// Removes the folder, and those of memtrace around it that are empty then.
    ///
    /// # Errors
    ///
    /// If the folder cannot be removed, or a launcher has locked the copy.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        // A launcher that opens the copy now waits for the lock, and then writes the copy again.
        let copy = self.open();
        if let Some(file) = &copy {
            flock(file, FlockOperation::NonBlockingLockExclusive).context("a running memtrace uses it")?;
        }
        self.base.enter(&[])?.remove_folder(&self.name)?;
        for folder in self.base.path().ancestors().take(self.base.names.len()) {
            // A folder that is not empty stays.
            std::fs::remove_dir(folder).ok();
        }
        Ok(())
    }
}

/// The copies of all builds that this user has.
pub(crate) fn copies() -> Vec<LibraryCopy> {
    let mut copies = Vec::new();
    for base in candidates().into_iter().filter(|base| base.path().is_dir()) {
        let Ok(all) = base.enter(&[]) else { continue };
        let mut names: Vec<String> = all.names().into_iter().filter(|name| is_hash(name)).collect();
        names.sort();
        names.retain(|name| all.existing(name).is_some());
        copies.extend(names.into_iter().map(|name| LibraryCopy { base: base.clone(), name }));
    }
    copies
}

/// Whether a name has the form of [`HASH`].
fn is_hash(name: &str) -> bool {
    name.len() == HASH.len() && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Removes the copies of other builds under `base` that are older than `age` and that no launcher has locked, with the
/// simulated libraries beside them.
fn remove_unused(base: &Base, age: Duration) {
    let Ok(all) = base.enter(&[]) else { return };
    for name in all.names().iter().filter(|name| is_hash(name) && *name != HASH) {
        let Some(file) = all.existing(name).and_then(|folder| folder.open(NAME).ok()) else { continue };
        let is_unlocked = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        let unused = file.metadata().and_then(|meta| meta.modified()).ok().and_then(|m| m.elapsed().ok());
        if is_unlocked && unused.is_some_and(|unused| unused > age) {
            // Folders that cannot be removed now are tried again later.
            all.remove_folder(name).ok();
        }
    }
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
            return Err(std::io::Error::last_os_error())
                .context("cannot map code from its file system, which may be mounted noexec");
        }
        libc::munmap(page, 4096);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(parent: &Path, name: &str) -> Base {
        Base { parent: parent.to_owned(), names: vec![name.to_owned()] }
    }

    #[test]
    fn a_copy_is_written_once_and_replaced_when_it_differs() {
        let dir = tempfile::tempdir().unwrap();
        let base = base(dir.path(), "lib");
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
        let base = base(dir.path(), "lib");
        let copy = |hash: &str, days: u64| {
            let folder = base.enter(&[hash]).unwrap();
            let file = folder.create(NAME).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(days * 24 * 3600)).unwrap();
            folder.path().join(NAME)
        };
        let (old, locked, young) =
            (copy("00000000000000aa", 31), copy("00000000000000bb", 31), copy("00000000000000cc", 29));
        let (ours, other) = (copy(HASH, 31), copy("not-a-copy-of-us", 31));
        let lock = File::open(&locked).unwrap();
        flock(&lock, FlockOperation::LockShared).unwrap();
        remove_unused(&base, MAX_UNUSED);
        assert!(!old.parent().unwrap().exists());
        assert!([&locked, &young, &ours, &other].iter().all(|path| path.exists()));
        drop(lock);
        // Locking a copy updates its modification time.
        drop(lock_shared(&base.enter(&["00000000000000bb"]).unwrap()).unwrap());
        remove_unused(&base, MAX_UNUSED);
        assert!(locked.exists());
    }

    #[test]
    fn paths_that_ld_preload_cannot_hold_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(install(&base(dir.path(), "with space")).is_err());
    }
}
