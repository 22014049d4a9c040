//! Reads which functions an installed PyTorch and other packages import from NVIDIA's libraries, and where PyTorch
//! searches for them.

use crate::arch::LIBRARIES;
use anyhow::{Context, Result, ensure};
use object::elf::{self, Sym64};
use object::read::elf::{Dyn, ElfFile64, FileHeader, Sym};
use object::{Endianness, StringTable};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
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

    /// Whether it is a package's own copy.
    fn is_copy(&self) -> bool {
        !self.soname.starts_with(&format!("lib{}.so", self.key()))
    }

    /// The versions that importers ask for, without that of unversioned names.
    pub(crate) fn version_names(&self) -> impl Iterator<Item = &str> {
        self.versions.keys().map(String::as_str).filter(|version| !version.is_empty())
    }

    /// Adds the names of a library that it lacks.
    fn add(&mut self, other: Library) {
        let own: BTreeSet<String> = self.names().cloned().collect();
        for (version, names) in other.versions {
            let missing: Vec<String> = names.into_iter().filter(|name| !own.contains(name)).collect();
            if !missing.is_empty() {
                self.versions.entry(version).or_default().extend(missing);
            }
        }
    }

    /// All names of all versions.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.versions.values().flatten()
    }
}

fn key(soname: &str) -> &str {
    let stem = soname.split(".so").next().unwrap_or(soname);
    let stem = stem.strip_prefix("lib").unwrap_or(stem);
    copied(stem).unwrap_or(stem)
}

/// The name without the hash that a package gives to its own copy of a library, or `None`: `libcudart.faf08d9a.so.13`
/// and `libcudart-c64a25f3.so.12.3.101` are copies of cudart.
fn copied(stem: &str) -> Option<&str> {
    let (name, hash) = stem.rsplit_once(['.', '-'])?;
    (hash.len() == 8 && hash.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(name)
}

/// The imports of one PyTorch.
#[derive(Debug)]
pub struct Imports {
    /// The libraries.
    pub libraries: Vec<Library>,
    /// A folder that every one of its libraries searches. `None` when there is none, as with libraries of the system.
    pub install_to: Option<PathBuf>,
    /// The folders that any of its libraries searches.
    searched: BTreeSet<PathBuf>,
    /// The CUDA version: 1000 * major + 10 * minor.
    pub cuda_version: u32,
    /// The version of NCCL's wheel: 10000 * major + 100 * minor + patch. `None` where there is none.
    pub nccl_version: Option<u32>,
}

/// The imports of one ELF file.
#[derive(Debug, Default)]
struct Needs {
    sonames: BTreeSet<String>,
    search: Vec<String>,
    /// (library or "", version or "", name)
    symbols: Vec<(String, String, String)>,
    /// Defined names that look like those of NVIDIA's libraries.
    defined: Vec<String>,
}

const DRIVER: &str = "libcuda.so.1";
/// The beginnings of the names of NVIDIA's libraries, apart from the driver.
const NVIDIA: [&str; 19] = [
    "cublas",
    "cudart",
    "cudnn",
    "cudss",
    "cufft",
    "cufile",
    "cupti",
    "curand",
    "cusolver",
    "cusparse",
    "cutensor",
    "nccl",
    "npp",
    "nvJitLink",
    "nvToolsExt",
    "nvidia-ml",
    "nvjpeg",
    "nvrtc",
    "nvshmem",
];
/// The folder in which the wheels of NVIDIA install their libraries, beside the package of PyTorch.
const WHEELS: &str = "nvidia";
/// The folders of libraries that a Linux distribution, a container of NVIDIA or CUDA's installer use.
const SYSTEM_FOLDERS: [&str; 4] = ["/usr/local/cuda/lib64", LIBRARIES, "/usr/lib64", "/usr/lib"];

/// Whether a soname is one of NVIDIA's libraries, apart from the driver, or a package's copy of one.
fn is_nvidia(soname: &str) -> bool {
    let key = key(soname);
    // TileLang's `libcudart_stub.so` has code of its own, which loads the library when it is first called.
    let is_other = key.contains('.') || key.contains('-') && key != "nvidia-ml" || key.ends_with("_stub");
    soname.starts_with("lib") && !is_other && NVIDIA.iter().any(|beginning| key.starts_with(beginning))
}

/// The beginnings of functions' names, and the library of each. A longer beginning comes before its own beginning.
const PREFIXES: [(&str, &str); 22] = [
    ("__cuda", "cudart"),
    ("cuda", "cudart"),
    ("cublasLt", "cublasLt"),
    ("cublas", "cublas"),
    ("cudnn", "cudnn"),
    ("cufft", "cufft"),
    ("cuFile", "cufile"),
    ("cupti", "cupti"),
    ("curand", "curand"),
    ("cusolver", "cusolver"),
    ("cusparseLt", "cusparseLt"),
    ("cusparse", "cusparse"),
    ("cutensor", "cutensor"),
    ("nccl", "nccl"),
    ("nvJitLink", "nvJitLink"),
    ("__nvJitLink", "nvJitLink"),
    ("nvjpeg", "nvjpeg"),
    ("nvml", "nvidia-ml"),
    ("nvrtc", "nvrtc"),
    ("nvshmem", "nvshmem_host"),
    ("nvshmemx", "nvshmem_host"),
    ("nvtx", "nvToolsExt"),
];

/// The library of a name without a version, found by the name's beginning. The rest of the name begins with a capital
/// letter, or in `nvshmem_malloc` with an underscore.
fn by_prefix(name: &str) -> Option<&'static str> {
    let begins_word = |rest: &str| rest.starts_with(|c: char| c.is_ascii_uppercase() || c == '_');
    let has_prefix = |prefix: &str| name.strip_prefix(prefix).is_some_and(begins_word);
    let found = PREFIXES.iter().find(|(prefix, _)| has_prefix(prefix)).map(|(_, key)| *key);
    found.or_else(|| {
        let is_driver = name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
        is_driver.then_some("cuda")
    })
}

impl Imports {
    /// Reads the libraries of an installed PyTorch. `folder` is its `torch` folder.
    ///
    /// Fails when this is not the CUDA build of PyTorch or a library cannot be read.
    pub fn of_torch(folder: &Path) -> Result<Self> {
        let lib = folder.join("lib");
        ensure!(lib.is_dir(), "{} is no PyTorch: no folder lib", folder.display());
        let mut found = Found::default();
        let (mut search, mut searched): (Option<Vec<PathBuf>>, _) = (None, BTreeSet::new());
        for path in shared_libraries(&lib, |_| false) {
            let needs = needs(&path).with_context(|| format!("reading {}", path.display()))?;
            let folders: Vec<PathBuf> = needs.search.iter().filter_map(|entry| below(entry, &lib)).collect();
            let origin = lib.to_string_lossy();
            searched.extend(needs.search.iter().map(|entry| PathBuf::from(entry.replace("$ORIGIN", &origin))));
            if !found.add(needs, |soname| !lib.join(soname).exists()) {
                continue;
            }
            search = Some(match search {
                None => folders,
                Some(before) => before.into_iter().filter(|f| folders.contains(f)).collect(),
            });
        }
        let loose = found.loose_names();
        let libraries = found.libraries();
        let install_to = search.unwrap_or_default().into_iter().max_by_key(|folder| preference(folder));
        let (cuda_version, nccl_version) = (cuda_version(folder)?, nccl_version(folder));
        let mut imports = Imports { libraries, install_to, searched, cuda_version, nccl_version };
        imports.add_loose_names(loose);
        Ok(imports)
    }

    /// Adds what other packages import, from the shared libraries below some folders of packages. Files that cannot be
    /// read are left out, as the program may not use them.
    pub fn add_packages(&mut self, folders: &[PathBuf]) {
        let mut found = Found::default();
        for folder in folders {
            for path in shared_libraries(folder, |name| name == WHEELS || name == "torch") {
                if let Ok(needs) = needs(&path) {
                    found.add(needs, |_| true);
                }
            }
        }
        let loose = found.loose_names();
        for library in found.libraries() {
            let same = self.libraries.iter().position(|own| own.soname == library.soname);
            let is_simulated = self.libraries.iter().any(|own| own.key() == library.key());
            match same.and_then(|place| self.libraries.get_mut(place)) {
                Some(own) => own.add(library),
                // For another version of CUDA. Some packages bring a library for each. But a program can load a copy
                // beside PyTorch's library, and call it by its path.
                None if is_simulated && !library.is_copy() => {}
                None => self.libraries.push(library),
            }
        }
        self.add_loose_names(loose);
    }

    /// Adds names to PyTorch's libraries of their prefixes.
    fn add_loose_names(&mut self, names: BTreeSet<String>) {
        for name in names {
            let Some(key) = by_prefix(&name) else { continue };
            if let Some(library) = self.libraries.iter_mut().find(|library| library.key() == key) {
                let names = BTreeMap::from([(String::new(), BTreeSet::from([name]))]);
                library.add(Library { soname: library.soname.clone(), versions: names });
            }
        }
    }

    /// Adds what NVIDIA's own runtime exports, where it is installed: extensions that a program compiles can import
    /// others than PyTorch does. It stays with the runtime, because PyTorch loads the other libraries too, which call
    /// each other by names that are not part of their interface.
    pub fn add_exports_of_runtime(&mut self) {
        let system = SYSTEM_FOLDERS.map(PathBuf::from);
        for library in self.libraries.iter_mut().filter(|library| library.key() == "cudart") {
            let mut paths = self.searched.iter().chain(&system).map(|folder| folder.join(&library.soname));
            if let Some(exports) = paths.find_map(|path| exports(&path, &library.soname).ok()) {
                library.add(exports);
            }
        }
        // A program that finds a copy in its memory map asks it for any function.
        let runtime = self.libraries.iter().filter(|library| library.key() == "cudart");
        let names: BTreeSet<String> = runtime.flat_map(Library::names).cloned().collect();
        for copy in self.libraries.iter_mut().filter(|library| library.key() == "cudart" && library.is_copy()) {
            let versions = BTreeMap::from([(String::new(), names.clone())]);
            copy.add(Library { soname: copy.soname.clone(), versions });
        }
    }
}

/// The imports of the shared libraries that were read so far.
#[derive(Default)]
struct Found {
    libraries: BTreeMap<String, Library>,
    /// Imported names without a version, which may be those of any library.
    unversioned: BTreeSet<String>,
    /// Names that the libraries define.
    defined: BTreeSet<String>,
}

impl Found {
    /// Adds the imports of a file from those of NVIDIA's libraries that `is_external` selects. Returns whether there
    /// are any besides those from the driver.
    fn add(&mut self, needs: Needs, is_external: impl Fn(&str) -> bool) -> bool {
        let is_imported = |soname: &&String| (is_nvidia(soname) || *soname == DRIVER) && is_external(soname);
        let sonames: Vec<&String> = needs.sonames.iter().filter(is_imported).collect();
        self.defined.extend(needs.defined);
        for soname in &sonames {
            self.libraries.entry((*soname).clone()).or_insert_with(|| Library::unversioned(soname));
        }
        for (soname, version, name) in needs.symbols {
            match self.libraries.get_mut(&soname) {
                Some(library) => drop(library.versions.entry(version).or_default().insert(name)),
                None if soname.is_empty() && by_prefix(&name).is_some() => drop(self.unversioned.insert(name)),
                None => {}
            }
        }
        sonames.iter().any(|soname| *soname != DRIVER)
    }

    /// Removes and returns the names without a version that none of the files defines. An extension that is linked
    /// without a library, and loaded where that of PyTorch is loaded already, imports its names so.
    fn loose_names(&mut self) -> BTreeSet<String> {
        let names = std::mem::take(&mut self.unversioned);
        names.into_iter().filter(|name| !self.defined.contains(name)).collect()
    }

    /// The libraries.
    fn libraries(self) -> Vec<Library> {
        self.libraries.into_values().collect()
    }
}

/// The shared libraries in a folder and in the folders below it, apart from those that `is_left_out` names, in a fixed
/// order.
fn shared_libraries(folder: &Path, is_left_out: impl Fn(&OsStr) -> bool) -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        // A folder that cannot be read has no libraries for the program either.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && !is_left_out(&name) => folders.push(entry.path()),
                Ok(kind) if !kind.is_dir() && is_shared_library(&name) => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files.sort();
    files
}

/// Whether a file name ends with `.so` or with `.so` and a version.
fn is_shared_library(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.ends_with(".so")
        || name.rsplit_once(".so.").is_some_and(|(_, version)| version.starts_with(|c: char| c.is_ascii_digit()))
}

/// The folder of a run-path entry, if the entry points into one of the nvidia wheels.
fn below(entry: &str, lib: &Path) -> Option<PathBuf> {
    let rest = entry.strip_prefix("$ORIGIN/../../nvidia/")?;
    Some(lib.parent()?.parent()?.join(WHEELS).join(rest))
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

/// The version of the wheel of NCCL beside a PyTorch.
fn nccl_version(folder: &Path) -> Option<u32> {
    let names = fs::read_dir(folder.parent()?).ok()?.flatten();
    names.filter_map(|entry| entry.file_name().into_string().ok()).find_map(|name| nccl_of_wheel(&name))
}

/// The version of NCCL in a name such as `nvidia_nccl_cu12-2.21.5.dist-info`.
fn nccl_of_wheel(name: &str) -> Option<u32> {
    let (_, version) = name.strip_prefix("nvidia_nccl_cu")?.strip_suffix(".dist-info")?.split_once('-')?;
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok().filter(|part| *part < 100));
    Some(parts.next()?? * 10_000 + parts.next()?? * 100 + parts.next()??)
}

/// Whether a name begins as those of NVIDIA's libraries do.
fn may_be_nvidias(name: &[u8]) -> bool {
    std::str::from_utf8(name).is_ok_and(|name| by_prefix(name).is_some())
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
    needs.symbols = symbols(&file, |symbol, _| symbol.is_undefined(endian))?;
    let defined = symbols(&file, |symbol, name| symbol.is_definition(endian) && may_be_nvidias(name))?;
    needs.defined = defined.into_iter().map(|(_, _, name)| name).collect();
    Ok(needs)
}

/// The functions that the library at a path exports.
fn exports(path: &Path, soname: &str) -> Result<Library> {
    let file = fs::File::open(path)?;
    // SAFETY: an installed library is not changed while it is about to be used.
    let data = unsafe { memmap2::Mmap::map(&file)? };
    let file = ElfFile64::<Endianness>::parse(&*data)?;
    let endian = file.endian();
    let mut library = Library::unversioned(soname);
    for (_, version, name) in
        symbols(&file, |symbol, _| symbol.is_definition(endian) && symbol.st_type() == elf::STT_FUNC)?
    {
        library.versions.entry(version).or_default().insert(name);
    }
    Ok(library)
}

/// The dynamic symbols of a file that `is_selected` selects: the library from which they are imported or "", the
/// version or "", and the name.
fn symbols(
    file: &ElfFile64<'_, Endianness>,
    is_selected: impl Fn(&Sym64<Endianness>, &[u8]) -> bool,
) -> Result<Vec<(String, String, String)>> {
    let (endian, data) = (file.endian(), file.data());
    let versions = file.elf_header().sections(endian, data)?.versions(endian, data)?;
    let table = file.elf_dynamic_symbol_table();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut symbols = Vec::new();
    for (index, symbol) in table.enumerate() {
        let name = table.symbol_name(endian, symbol)?;
        if !is_selected(symbol, name) {
            continue;
        }
        let version = match &versions {
            Some(versions) => versions.version(versions.version_index(endian, index)).ok().flatten(),
            None => None,
        };
        let soname = version.and_then(|v| v.file()).map(text).unwrap_or_default();
        let version = version.map(|v| text(v.name())).unwrap_or_default();
        symbols.push((soname, version, text(name)));
    }
    Ok(symbols)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_by_prefix() {
        for (name, key) in [
            ("cublasHgemm", Some("cublas")),
            ("cublasLtMatmul", Some("cublasLt")),
            ("cuStreamSetAttribute", Some("cuda")),
            ("cuFileRead", Some("cufile")),
            ("__cudaRegisterFunction", Some("cudart")),
            ("__nvJitLinkCreate_12_8", Some("nvJitLink")),
            ("nvshmemx_init_status", Some("nvshmem_host")),
            ("nvmlInit_v2", Some("nvidia-ml")),
            ("ncclSend", Some("nccl")),
            ("cudagraph_begin", None),
            ("cutlass_gemm", None),
            ("nvtop", None),
        ] {
            assert_eq!(by_prefix(name), key, "{name}");
        }
    }

    #[test]
    fn copies_that_packages_bring_are_simulated_beside_the_libraries() {
        let copies = ["libcudart.faf08d9a.so.13", "libcudart-c64a25f3.so.12.3.101"];
        for soname in ["libcudart.so.13", "libnvidia-ml.so.1", "libcusparseLt.so.0", "libnvshmem_host.so.3"] {
            assert!(is_nvidia(soname) && !Library::named(soname).is_copy(), "{soname}");
        }
        for soname in copies {
            let library = Library::unversioned(soname);
            assert!(is_nvidia(soname) && library.is_copy() && library.key() == "cudart", "{soname}");
        }
        for soname in
            ["libcudart_stub.so", "libcurl.so.4", "cudart.so", "libcudart.faf08d9.so.13", "libcurl-c64a25f3.so.4"]
        {
            assert!(!is_nvidia(soname), "{soname}");
        }
    }

    #[test]
    fn a_copy_of_the_runtime_has_all_functions_that_anyone_imports() {
        let library = |soname: &str, name: &str| {
            let versions = BTreeMap::from([(String::new(), BTreeSet::from([name.to_owned()]))]);
            Library { soname: soname.to_owned(), versions }
        };
        let sonames = ["libcudart.so.77", "libcudart-c64a25f3.so.77.3"];
        let mut imports = Imports {
            libraries: vec![library(sonames[0], "cudaSetDevice"), library(sonames[1], "cudaMalloc")],
            install_to: None,
            searched: BTreeSet::new(),
            cuda_version: 77000,
            nccl_version: None,
        };
        imports.add_exports_of_runtime();
        let names: Vec<Vec<&String>> = imports.libraries.iter().map(|library| library.names().collect()).collect();
        assert_eq!(names, [vec!["cudaSetDevice"], vec!["cudaMalloc", "cudaSetDevice"]]);
    }

    #[test]
    fn versions_of_nccl() {
        assert_eq!(nccl_of_wheel("nvidia_nccl_cu12-2.21.5.dist-info"), Some(22105));
        assert_eq!(nccl_of_wheel("nvidia_nccl_cu13-2.28.9.dist-info"), Some(22809));
        for name in ["nvidia_nccl_cu12", "nvidia_nccl_cu12-2.21.dist-info", "nvidia_nccl_cu12-2.x.5.dist-info"] {
            assert_eq!(nccl_of_wheel(name), None, "{name}");
        }
    }

    #[test]
    fn names_that_a_file_defines_are_its_own() {
        let name = |name: &str| (String::new(), String::new(), name.to_owned());
        let mut found = Found::default();
        let symbols = ["cublasHgemm", "cublasOwn", "memcpy"].map(name).to_vec();
        found.add(Needs { symbols, ..Needs::default() }, |_| true);
        found.add(Needs { defined: vec!["cublasOwn".to_owned()], ..Needs::default() }, |_| true);
        let versions = BTreeMap::from([("libcublas.so.13".to_owned(), BTreeSet::from(["cublasSgemm".to_owned()]))]);
        let mut imports = Imports {
            libraries: vec![Library { soname: "libcublas.so.13".to_owned(), versions }],
            install_to: None,
            searched: BTreeSet::new(),
            cuda_version: 13000,
            nccl_version: None,
        };
        imports.add_loose_names(found.loose_names());
        let names: Vec<&String> = imports.libraries[0].names().collect();
        assert_eq!(names, ["cublasHgemm", "cublasSgemm"]);
    }
}
