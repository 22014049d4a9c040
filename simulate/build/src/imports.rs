//! Reads which functions an installed PyTorch imports from NVIDIA's libraries, and where it searches for them.

use anyhow::{Context, Result};
use object::elf;
use object::read::elf::{Dyn, ElfFile64, FileHeader, Sym};
use object::{Endianness, StringTable};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// One library to link.
#[derive(Debug, Default)]
pub struct Library {
    /// The soname, such as `libcublas.so.13`.
    pub soname: String,
    /// The names by symbol version. "" for names without a version.
    pub(crate) versions: BTreeMap<String, BTreeSet<String>>,
}

impl Library {
    /// A library from which nothing is imported yet. Its symbol version is its soname, as for cudart.
    pub(crate) fn named(soname: &str) -> Self {
        let versions = BTreeMap::from([(soname.to_string(), BTreeSet::new())]);
        Library { soname: soname.to_string(), versions }
    }

    /// A library without symbol versions, from which nothing is imported yet.
    pub(crate) fn unversioned(soname: &str) -> Self {
        Library { soname: soname.to_string(), versions: BTreeMap::new() }
    }

    /// The soname without `lib` and version: `cublas`.
    pub(crate) fn key(&self) -> &str {
        key(&self.soname)
    }

    /// The versions that importers ask for, without that of unversioned names.
    pub(crate) fn version_names(&self) -> impl Iterator<Item = &str> {
        self.versions.keys().map(String::as_str).filter(|version| !version.is_empty())
    }

    /// All names of all versions.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.versions.values().flatten()
    }
}

fn key(soname: &str) -> &str {
    let stem = soname.split(".so").next().unwrap_or(soname);
    stem.strip_prefix("lib").unwrap_or(stem)
}

/// The imports of one PyTorch.
#[derive(Debug)]
pub struct Imports {
    /// The libraries, without the driver.
    pub libraries: Vec<Library>,
    /// A folder that every one of its libraries searches. `None` when there is none, as with libraries of the system.
    pub install_to: Option<PathBuf>,
    /// The CUDA version: 1000 * major + 10 * minor.
    pub cuda_version: u32,
}

/// The imports of one ELF file.
#[derive(Debug, Default)]
struct Needs {
    sonames: BTreeSet<String>,
    search: Vec<String>,
    /// (library or "", version or "", name)
    symbols: Vec<(String, String, String)>,
}

const DRIVER: &str = "libcuda.so.1";

/// Whether a soname is one of NVIDIA's libraries, apart from the driver.
fn is_nvidia(soname: &str) -> bool {
    ["libcu", "libnv", "libnccl"].iter().any(|p| soname.starts_with(p)) && soname != DRIVER
}

/// The library of a name without a version, found by the name's prefix.
fn by_prefix(name: &str) -> Option<&'static str> {
    const PREFIXES: [(&str, &str); 5] = [
        ("cusparseLt", "cusparseLt"),
        ("nccl", "nccl"),
        ("cuFile", "cufile"),
        ("nvshmem", "nvshmem_host"),
        ("nvtx", "nvToolsExt"),
    ];
    PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, key)| *key)
}

impl Imports {
    /// Reads the libraries of an installed PyTorch. `folder` is its `torch` folder.
    ///
    /// Fails when this is not the CUDA build of PyTorch or a library cannot be read.
    pub fn of_torch(folder: &Path) -> Result<Self> {
        let lib = folder.join("lib");
        let mut files: Vec<PathBuf> = fs::read_dir(&lib)
            .with_context(|| format!("{} is no PyTorch: no folder lib", folder.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.is_file() && path.to_string_lossy().contains(".so"))
            .collect();
        files.sort();
        let own: BTreeSet<String> =
            files.iter().filter_map(|p| Some(p.file_name()?.to_string_lossy().into_owned())).collect();
        let mut libraries: BTreeMap<String, Library> = BTreeMap::new();
        let mut search: Option<Vec<PathBuf>> = None;
        let mut unversioned = Vec::new();
        for path in &files {
            let needs = needs(path).with_context(|| format!("reading {}", path.display()))?;
            let nvidia: Vec<&String> = needs.sonames.iter().filter(|s| is_nvidia(s) && !own.contains(*s)).collect();
            if nvidia.is_empty() {
                continue;
            }
            for soname in nvidia {
                let library = libraries.entry(soname.clone()).or_default();
                library.soname.clone_from(soname);
            }
            let folders = needs.search.iter().filter_map(|entry| below(entry, &lib)).collect();
            search = Some(match search {
                None => folders,
                Some(before) => before.into_iter().filter(|f| folders.contains(f)).collect(),
            });
            for (soname, version, name) in needs.symbols {
                match libraries.get_mut(&soname) {
                    Some(library) => drop(library.versions.entry(version).or_default().insert(name)),
                    None if soname.is_empty() => unversioned.push(name),
                    None => {}
                }
            }
        }
        for name in unversioned {
            let Some(key) = by_prefix(&name) else { continue };
            if let Some(library) = libraries.values_mut().find(|l| l.key() == key) {
                library.versions.entry(String::new()).or_default().insert(name);
            }
        }
        let install_to = search.unwrap_or_default().into_iter().max_by_key(|folder| preference(folder));
        Ok(Imports { libraries: libraries.into_values().collect(), install_to, cuda_version: cuda_version(folder)? })
    }
}

/// The folder of a run-path entry, if the entry points into one of the nvidia wheels.
fn below(entry: &str, lib: &Path) -> Option<PathBuf> {
    let rest = entry.strip_prefix("$ORIGIN/../../nvidia/")?;
    Some(lib.parent()?.parent()?.join("nvidia").join(rest))
}

/// The order of folders: those of cudart come first (`nvidia/cu13/lib`, `nvidia/cuda_runtime/lib`).
fn preference(folder: &Path) -> (bool, bool) {
    let has = |part: &str| folder.components().any(|c| c.as_os_str().to_string_lossy().starts_with(part));
    (has("cu13") || has("cu14"), has("cuda_runtime"))
}

/// The CUDA version from a line such as `cuda = '13.0'` in version.py.
fn cuda_version(folder: &Path) -> Result<u32> {
    let path = folder.join("version.py");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let line = text.lines().find(|line| line.starts_with("cuda"));
    let version = line.and_then(|line| line.split(['\'', '"']).nth(1));
    let parse = |version: &str| {
        let (major, minor) = version.split_once('.')?;
        Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10)
    };
    version.and_then(parse).with_context(|| format!("{} names no CUDA version: is it the CUDA build?", path.display()))
}

fn needs(path: &Path) -> Result<Needs> {
    let file = fs::File::open(path)?;
    // SAFETY: the libraries of an installed PyTorch are not changed while it is about to be used.
    let data = unsafe { memmap2::Mmap::map(&file)? };
    let mut needs = Needs::default();
    // Skip scripts and other files that are not ELF.
    let Ok(file) = ElfFile64::<Endianness>::parse(&*data) else { return Ok(needs) };
    let endian = file.endian();
    let sections = file.elf_section_table();
    if let Some((entries, strings)) = sections.dynamic(endian, &*data)? {
        let strings: StringTable<'_> = sections.strings(endian, &*data, strings)?;
        for entry in entries {
            let text = || -> Result<String> {
                let at = entry.d_val(endian) as u32;
                let bytes = strings.get(at).ok().context("a name outside the string table")?;
                Ok(String::from_utf8_lossy(bytes).into_owned())
            };
            match entry.tag32(endian) {
                Some(elf::DT_NEEDED) => drop(needs.sonames.insert(text()?)),
                Some(elf::DT_RPATH | elf::DT_RUNPATH) => {
                    needs.search.extend(text()?.split(':').map(str::to_string));
                }
                _ => {}
            }
        }
    }
    let versions = file.elf_header().sections(endian, &*data)?.versions(endian, &*data)?;
    let table = file.elf_dynamic_symbol_table();
    for (index, symbol) in table.enumerate() {
        if !symbol.is_undefined(endian) {
            continue;
        }
        let name = String::from_utf8_lossy(table.symbol_name(endian, symbol)?).into_owned();
        let version = match &versions {
            Some(versions) => versions.version(versions.version_index(endian, index)).ok().flatten(),
            None => None,
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let soname = version.and_then(|v| v.file()).map(text).unwrap_or_default();
        needs.symbols.push((soname, version.map(|v| text(v.name())).unwrap_or_default(), name));
    }
    Ok(needs)
}
