//! The simulated libraries for the Python environment of a command. The name of their folder says from what they were
//! made, so an environment that changes, and another build of memtrace, has others.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use sha2::{Digest, Sha256};
use simcuda_build::{Cores, Imports, libraries_of, plain_libraries};

use super::torch::{self, PyTorch};
use super::values;
use crate::message::WithHelp;
use crate::private_folder::PrivateFolder;

const DRIVER: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_DRIVER"));
const RUNTIME: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_RUNTIME"));
const LIBS: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_LIBS"));

/// The file that lists the libraries beside it, one a line: the SHA-256 of the content in hexadecimal, a space, and the
/// soname. It is written last, and its modification time is that of the last use.
const LIST: &str = "list";
/// The maximum length of the list, in bytes. PyTorch needs about twenty libraries.
const MAX_LIST: u64 = 1 << 16;
/// The maximum length of a library, in bytes.
const MAX_LIBRARY: u64 = 1 << 28;
/// The folder beside each module in which Python keeps the compiled one. It is made before Python makes it, which would
/// let other users write to it under a umask that allows it.
const COMPILED: &str = "__pycache__";
/// The names under which compilers and older versions of Triton look for libraries, and what they stand for.
const ALIASES: [(&str, &str); 1] = [("libcuda.so", "libcuda.so.1")];
/// The age after which unused libraries of an earlier state are removed.
const MAX_UNUSED: Duration = Duration::from_secs(24 * 3600);

/// The simulated libraries of one environment.
#[derive(Debug)]
pub(super) struct Libraries {
    /// The folder of the PyTorch that they are made for; empty without one.
    pub(super) torch: PathBuf,
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
    pub(super) fn for_command(command: &[OsString], parent: &PrivateFolder) -> anyhow::Result<Self> {
        let torch = torch::of_command(command);
        let place = torch.as_ref().map_or(Path::new(""), |torch| &torch.folder).to_owned();
        let beginning = format!("simulated-{:016x}-", fnv1a(place.as_os_str().as_bytes()));
        let name = format!("{beginning}{:016x}", state_of(torch.as_ref()));
        let path = parent.path().join(&name);
        if let Some(sonames) = parent.existing(&name).and_then(|folder| intact(&folder)) {
            return Ok(Libraries { torch: place, folder: path, sonames });
        }
        remove_unused(parent, &beginning);
        let libraries = make(torch.as_ref())?;
        write(parent, &name, &libraries).with_context(|| {
            WithHelp::new(
                format!("cannot write the simulated CUDA libraries into {}", path.display()),
                "free some space there, or set XDG_CACHE_HOME to another folder",
            )
        })?;
        Ok(Libraries { torch: place, folder: path, sonames: libraries.into_iter().map(|(soname, _)| soname).collect() })
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

/// A hash of what the libraries are made from: this memtrace, PyTorch, and the folders of packages. Installing a
/// package changes the modification time of its folder.
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

/// The sonames of the libraries in a folder, if all files are there, are what was written, and only this user can
/// change them.
fn intact(folder: &PrivateFolder) -> Option<Vec<String>> {
    let text = String::from_utf8(folder.read(LIST, MAX_LIST).ok()?).ok()?;
    let mut sonames = Vec::new();
    for line in text.lines() {
        let (hash, soname) = line.split_once(' ')?;
        if hash != hash_of(&folder.read(soname, MAX_LIBRARY).ok()?) {
            return None;
        }
        sonames.push(soname.to_owned());
    }
    let has_module = |(name, text): &(&str, &str)| {
        let (folder, name) = module_folder(folder, name).ok()?;
        folder.existing(COMPILED)?;
        folder.holds(name, text.as_bytes()).then_some(())
    };
    if !values::MODULES.iter().all(|module| has_module(module).is_some()) {
        return None;
    }
    // A time that cannot be set costs only that they are made again some day.
    folder.open(LIST).and_then(|file| Ok(file.set_modified(SystemTime::now())?)).ok();
    Some(sonames)
}

fn hash_of(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The folder of a Python module, and the name of its file there.
fn module_folder<'a>(folder: &PrivateFolder, module: &'a str) -> anyhow::Result<(PrivateFolder, &'a str)> {
    let modules = folder.subfolder(values::FOLDER)?;
    match module.split_once('/') {
        Some((package, name)) => Ok((modules.subfolder(package)?, name)),
        None => Ok((modules, module)),
    }
}

/// Removes the libraries of earlier states that are unused for [`MAX_UNUSED`].
fn remove_unused(parent: &PrivateFolder, beginning: &str) {
    for name in parent.names().iter().filter(|name| name.starts_with(beginning)) {
        let list = parent.existing(name).and_then(|folder| folder.open(LIST).ok());
        let used = list.and_then(|list| list.metadata().ok()?.modified().ok()?.elapsed().ok());
        if used.is_some_and(|age| age > MAX_UNUSED) {
            // Folders that cannot be removed now are tried again later.
            parent.remove_folder(name).ok();
        }
    }
}

/// Writes the libraries and the Python modules, and then the list. A folder that others could change is removed before.
fn write(parent: &PrivateFolder, name: &str, libraries: &[(String, Vec<u8>)]) -> anyhow::Result<()> {
    let written = write_into(parent, name, libraries);
    if written.is_ok() || !parent.path().join(name).exists() {
        return written;
    }
    parent.remove_folder(name)?;
    write_into(parent, name, libraries)
}

fn write_into(parent: &PrivateFolder, name: &str, libraries: &[(String, Vec<u8>)]) -> anyhow::Result<()> {
    let folder = parent.subfolder(name)?;
    for (soname, content) in libraries {
        folder.replace(soname, content)?;
    }
    for (name, text) in values::MODULES {
        let (folder, name) = module_folder(&folder, name)?;
        folder.subfolder(COMPILED)?;
        folder.replace(name, text.as_bytes())?;
    }
    for (name, soname) in ALIASES {
        folder.link(name, soname)?;
    }
    let list: Vec<String> =
        libraries.iter().map(|(soname, content)| format!("{} {soname}", hash_of(content))).collect();
    Ok(folder.replace(LIST, list.join("\n").as_bytes())?)
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
