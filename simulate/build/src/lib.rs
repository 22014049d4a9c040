//! Makes the simulated CUDA libraries.
//!
//! The sonames, versions and names that a PyTorch needs are read from its own libraries, so a new version needs no
//! change here. A function that the cores do not define becomes a stub that returns 0. Neither a compiler nor a linker
//! is needed.

mod arch;
mod core;
mod imports;
mod library;
mod stubs;

pub use imports::{Imports, Library};

use crate::core::Core;
use anyhow::{Context, Result};

/// The three shared libraries that cargo built: the functions without sonames and versions.
#[derive(Debug)]
pub struct Cores {
    /// `cu*`
    driver: Core,
    /// `cuda*`
    runtime: Core,
    /// cuBLAS, cuDNN, ...
    libs: Core,
}

impl Cores {
    /// Reads the content of the three files. Fails when one is not a shared library for x86-64.
    pub fn new(driver: Vec<u8>, runtime: Vec<u8>, libs: Vec<u8>) -> Result<Self> {
        let read = |data, name: &str| Core::read(data).with_context(|| format!("reading the core of the {name}"));
        Ok(Cores {
            driver: read(driver, "driver")?,
            runtime: read(runtime, "runtime")?,
            libs: read(libs, "libraries")?,
        })
    }

    fn library(&self, library: &Library, cuda_version: u32, nccl_version: Option<u32>) -> Result<(String, Vec<u8>)> {
        let versions = [("simcuda_cudart_version", cuda_version as i32)];
        let nccl: Vec<_> = nccl_version.map(|version| ("simcuda_nccl_version", version as i32)).into_iter().collect();
        let made = match library.key() {
            "cuda" => library::make(&self.driver, library, |name| name.starts_with("cu"), &[]),
            "cudart" => {
                library::make(&self.runtime, library, |n| n.starts_with("cuda") || n.starts_with("__cuda"), &versions)
            }
            key => library::make(&self.libs, library, |name| family(name) == Some(key), &nccl),
        };
        Ok((library.soname.clone(), made.with_context(|| format!("making {}", library.soname))?))
    }
}

/// The libraries of one PyTorch, with the driver and NVML: the soname and the content of each file.
///
/// Fails when the cores lack what `simcuda-build` needs.
pub fn libraries_of(cores: &Cores, imports: &Imports) -> Result<Vec<(String, Vec<u8>)>> {
    let always = ["libcuda.so.1", "libnvidia-ml.so.1"].map(Library::unversioned);
    let is_missing = |library: &&Library| imports.libraries.iter().all(|own| own.soname != library.soname);
    let libraries = always.iter().filter(is_missing).chain(&imports.libraries);
    libraries.map(|library| cores.library(library, imports.cuda_version, imports.nccl_version)).collect()
}

/// The libraries for programs without PyTorch: driver, NVML, and the runtimes of CUDA 12.8 and 13.0.
///
/// Fails when the cores lack what `simcuda-build` needs.
pub fn plain_libraries(cores: &Cores) -> Result<Vec<(String, Vec<u8>)>> {
    let mut libraries = vec![(Library::unversioned("libcuda.so.1"), 0), (Library::unversioned("libnvidia-ml.so.1"), 0)];
    libraries.extend(
        [("libcudart.so.12", 12080), ("libcudart.so.13", 13000)].map(|(soname, v)| (Library::named(soname), v)),
    );
    libraries.iter().map(|(library, version)| cores.library(library, *version, None)).collect()
}

/// The library to which a function of the libraries' core belongs.
fn family(name: &str) -> Option<&'static str> {
    if name.starts_with("nvml") {
        return Some("nvidia-ml");
    }
    const FAMILIES: [&str; 10] =
        ["cublasLt", "cublas", "cudnn", "cufft", "cupti", "cusolver", "cusparseLt", "cusparse", "nccl", "nvrtc"];
    FAMILIES.into_iter().find(|family| name.starts_with(family))
}
