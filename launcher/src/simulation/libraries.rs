//! The simulated libraries for the Python environment of a command. The name of their folder says from what they were made,
//! so an environment that changes, and another build of memtrace, has others.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use simcuda_build::{Cores, Imports, libraries_of, plain_libraries};

use super::torch::{self, PyTorch};
use super::values;
use crate::message::WithHelp;

const DRIVER: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_DRIVER"));
const RUNTIME: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_RUNTIME"));
const LIBS: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_LIBS"));

/// The file that lists the sonames of the libraries beside it, one a line. It is written last, and its modification time is
/// that of the last use.
const LIST: &str = "list";
/// The names under which compilers and older versions of Triton look for libraries, and what they stand for.
const ALIASES: [(&str, &str); 1] = [("libcuda.so", "libcuda.so.1")];
/// The folder of the Python modules, beside the libraries. Reports take what is below such a folder for a library.
const MODULES: &str = "site-packages";
/// The age after which unused libraries of an earlier state are removed.
const MAX_UNUSED: Duration = Duration::from_secs(24 * 3600);

/// The simulated libraries of one environment.
#[derive(Debug)]
pub(super) struct Libraries {
    /// Their folder.
    pub(super) folder: PathBuf,
    /// Their sonames, which are their file names.
    pub(super) sonames: Vec<String>,
}

impl Libraries {
    /// The libraries for the PyTorch that a command will import. `parent` is a folder of this user.
    ///
    /// # Errors
    ///
    /// If the PyTorch has no CUDA, or the libraries cannot be written.
    pub(super) fn for_command(command: &[OsString], parent: &Path) -> anyhow::Result<Self> {
        let torch = torch::of_command(command);
        let place = torch.as_ref().map_or(Path::new(""), |torch| &torch.folder);
        let beginning = format!("simulated-{:016x}-", fnv1a(place.as_os_str().as_bytes()));
        let folder = parent.join(format!("{beginning}{:016x}", state_of(torch.as_ref())));
        if let Some(sonames) = list(&folder) {
            return Ok(Libraries { folder, sonames });
        }
        remove_unused(parent, &beginning);
        let libraries = make(torch.as_ref())?;
        write(&folder, &libraries).with_context(|| {
            WithHelp::new(
                format!("cannot write the simulated CUDA libraries into {}", folder.display()),
                "free some space there, or set XDG_CACHE_HOME to another folder",
            )
        })?;
        Ok(Libraries { folder, sonames: libraries.into_iter().map(|(soname, _)| soname).collect() })
    }

    /// The folder of the Python modules beside them.
    pub(super) fn modules(&self) -> PathBuf {
        self.folder.join(MODULES)
    }

    /// The paths of the libraries.
    pub(super) fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.sonames.iter().map(|soname| self.folder.join(soname))
    }
}

/// Makes the libraries: the soname and the content of each.
fn make(torch: Option<&PyTorch>) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let cores = Cores::new(DRIVER.to_vec(), RUNTIME.to_vec(), LIBS.to_vec())?;
    let Some(torch) = torch else { return plain_libraries(&cores) };
    let mut imports = Imports::of_torch(&torch.folder).with_context(|| {
        WithHelp::new(
            format!("cannot simulate CUDA for the PyTorch in {}", torch.folder.display()),
            "install a PyTorch with CUDA: pip install torch",
        )
    })?;
    imports.add_packages(&torch.packages);
    imports.add_exports_of_runtime();
    libraries_of(&cores, &imports)
}

/// A hash of what the libraries are made from: this memtrace, PyTorch, and the folders of packages. Installing a package
/// changes the modification time of its folder.
fn state_of(torch: Option<&PyTorch>) -> u64 {
    let of_torch = |torch: &PyTorch| {
        let own = ["lib", "version.py"].map(|name| torch.folder.join(name));
        own.into_iter().chain(torch.packages.clone()).collect::<Vec<_>>()
    };
    let paths = [PathBuf::from("/proc/self/exe")].into_iter().chain(torch.map(of_torch).unwrap_or_default());
    let mut state = Vec::new();
    for path in paths {
        state.extend(path.as_os_str().as_bytes());
        if let Ok(metadata) = std::fs::metadata(&path) {
            let words = [metadata.mtime() as u64, metadata.mtime_nsec() as u64, metadata.size(), metadata.ino()];
            state.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
    }
    fnv1a(&state)
}

/// The sonames of the libraries in a folder, if all are there.
fn list(folder: &Path) -> Option<Vec<String>> {
    let path = folder.join(LIST);
    let sonames: Vec<String> = std::fs::read_to_string(&path).ok()?.lines().map(str::to_owned).collect();
    // A time that cannot be set costs only that they are made again some day.
    File::open(&path).and_then(|file| file.set_modified(SystemTime::now())).ok();
    sonames.iter().all(|soname| folder.join(soname).is_file()).then_some(sonames)
}

/// Removes the libraries of earlier states that are unused for [`MAX_UNUSED`].
fn remove_unused(parent: &Path, beginning: &str) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_earlier = entry.file_name().as_bytes().starts_with(beginning.as_bytes());
        let used = entry.path().join(LIST).metadata().and_then(|metadata| metadata.modified());
        if is_earlier && used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > MAX_UNUSED)) {
            // What cannot be removed now is tried again later.
            std::fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// Writes the libraries and the Python modules, and then the list of the libraries.
fn write(folder: &Path, libraries: &[(String, Vec<u8>)]) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    for (soname, content) in libraries {
        replace(&folder.join(soname), content)?;
    }
    for (name, text) in values::MODULES {
        let path = folder.join(MODULES).join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        replace(&path, text.as_bytes())?;
    }
    for (name, soname) in ALIASES {
        let made = std::os::unix::fs::symlink(soname, folder.join(name));
        made.or_else(|error| if error.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })?;
    }
    let sonames: Vec<&str> = libraries.iter().map(|(soname, _)| soname.as_str()).collect();
    replace(&folder.join(LIST), sonames.join("\n").as_bytes())
}

/// Writes a file under a temporary name and then renames it, so a running program keeps the old one.
fn replace(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let partial = path.with_file_name(format!(".{}", crate::session::token()?));
    std::fs::write(&partial, content).and_then(|()| std::fs::rename(&partial, path)).inspect_err(|_| {
        std::fs::remove_file(&partial).ok();
    })?;
    Ok(())
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
