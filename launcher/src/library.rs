//! Where the preloaded library comes from.
//!
//! It is embedded in this program, so it is always of this build: the two must agree exactly on the shared memory. On first
//! use it is written to a folder that only we can write to, under a name made from its content; what is there is compared byte
//! by byte before it is used. `MEMTRACE_LIBRARY` names another file, for work on the library itself.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

const CONTENT: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_LIBRARY"));
/// Names the content.
const HASH: &str = env!("MEMTRACE_EMBEDDED_HASH");
const NAME: &str = "libmemtrace_interpose.so";

/// The library's path, fit for LD_PRELOAD.
pub(crate) fn path(run_folder: &Path) -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os("MEMTRACE_LIBRARY").filter(|p| !p.is_empty()) {
        let path = Path::new(&path).canonicalize().with_context(|| format!("MEMTRACE_LIBRARY={}", path.display()))?;
        ensure!(is_preloadable(&path), "MEMTRACE_LIBRARY: LD_PRELOAD cannot hold this path: {}", path.display());
        return Ok(path);
    }
    let mut reasons = Vec::new();
    for base in candidates() {
        match check_ancestors(&base).and_then(|()| place(&base)) {
            Ok(path) => return Ok(path),
            Err(e) => reasons.push(format!("{}: {e:#}", base.display())),
        }
    }
    // Who can write above the run's folder can change the program as well.
    let own = std::path::absolute(run_folder)?.join(".lib");
    match place(&own) {
        Ok(path) => return Ok(path),
        Err(e) => reasons.push(format!("{}: {e:#}", own.display())),
    }
    bail!("no folder for the preloaded library; set XDG_CACHE_HOME to a folder of yours (tried {})", reasons.join("; "))
}

fn candidates() -> Vec<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v: &OsString| Path::new(v).is_absolute()).map(PathBuf::from);
    // SAFETY: a plain call.
    let uid = unsafe { libc::geteuid() };
    let cache = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|h| h.join(".cache"))).map(|c| c.join("memtrace/lib"));
    let runtime = var("XDG_RUNTIME_DIR").map(|r| r.join("memtrace/lib"));
    let temporary = std::env::temp_dir().join(format!("memtrace-{uid}"));
    [cache, runtime, Some(temporary)].into_iter().flatten().collect()
}

/// The loader splits LD_PRELOAD at spaces and colons and expands `$` (ld.so(8)).
fn is_preloadable(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_bytes().iter().any(|b| b" :$\n\t".contains(b))
}

/// Makes sure that the library lies under `base`.
fn place(base: &Path) -> anyhow::Result<PathBuf> {
    let dir = base.join(HASH);
    ensure!(is_preloadable(&dir), "LD_PRELOAD cannot hold this path");
    DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    for dir in [base, &dir] {
        check_ours(&std::fs::symlink_metadata(dir)?)?;
    }
    let path = dir.join(NAME);
    if !is_sound(&path) {
        write(&dir, &path)?;
        ensure!(is_sound(&path), "it does not read back as it was written");
    }
    check_executable(&path)?;
    Ok(path)
}

fn check_ours(meta: &std::fs::Metadata) -> anyhow::Result<()> {
    // SAFETY: a plain call.
    let uid = unsafe { libc::geteuid() };
    ensure!(!meta.is_symlink(), "it is a symbolic link");
    ensure!(meta.uid() == uid, "it belongs to somebody else");
    ensure!(meta.mode() & 0o022 == 0, "others can write to it");
    Ok(())
}

/// Nobody but us and root can put another folder in the place of `path`.
fn check_ancestors(path: &Path) -> anyhow::Result<()> {
    // SAFETY: a plain call.
    let uid = unsafe { libc::geteuid() };
    for ancestor in path.ancestors().skip(1) {
        let Ok(meta) = std::fs::metadata(ancestor) else { continue };
        let trusted = meta.uid() == uid || meta.uid() == 0;
        let closed = meta.mode() & 0o022 == 0 || meta.mode() & libc::S_ISVTX != 0;
        ensure!(trusted && closed, "others can write to {}", ancestor.display());
    }
    Ok(())
}

fn is_sound(path: &Path) -> bool {
    let meta = std::fs::symlink_metadata(path);
    meta.is_ok_and(|m| m.is_file() && check_ours(&m).is_ok()) && std::fs::read(path).is_ok_and(|bytes| bytes == CONTENT)
}

fn write(dir: &Path, path: &Path) -> io::Result<()> {
    let partial = dir.join(format!(".{NAME}.{}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o700)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&partial)
        .and_then(|mut file| file.write_all(CONTENT))
        .and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        std::fs::remove_file(&partial).ok();
    }
    written
}

/// On a file system mounted noexec the loader would complain in every process, on the program's own stderr.
fn check_executable(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path)?;
    // SAFETY: a fresh private mapping of one page of an open file, never touched and unmapped at once.
    unsafe {
        let flags = libc::PROT_READ | libc::PROT_EXEC;
        let page = libc::mmap(std::ptr::null_mut(), 4096, flags, libc::MAP_PRIVATE, file.as_raw_fd(), 0);
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("code cannot be executed from there");
        }
        libc::munmap(page, 4096);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn written_once_and_mended() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("lib");
        let path = place(&base).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), CONTENT);
        let first = std::fs::metadata(&path).unwrap().ino();
        assert_eq!(std::fs::metadata(place(&base).unwrap()).unwrap().ino(), first);
        std::fs::write(&path, b"forged").unwrap();
        assert_eq!(std::fs::read(place(&base).unwrap()).unwrap(), CONTENT);
    }

    #[test]
    fn unsafe_places_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(place(&dir.path().join("with space")).is_err());
        let open = dir.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(place(&open).is_err());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(place(&link).is_err());
        assert!(check_ancestors(&open.join("lib")).is_err());
        assert!(check_ancestors(Path::new("/tmp/memtrace-0")).is_ok());
    }
}
