//! `simcuda-build`: links the simulated CUDA libraries from the archives that cargo built.
//!
//!     simcuda-build plain ARCHIVES OUT     libcuda.so.1, libcudart.so.12 and .13, libnvidia-ml.so.1: for programs without PyTorch
//!     simcuda-build torch ARCHIVES TORCH   every NVIDIA library that the PyTorch in the folder TORCH links, where its
//!                                          run path looks for them; prints that folder
//!
//! The sonames, versions and names that a PyTorch needs are read from its own libraries, so a new version needs no
//! change here. A function that the archives do not define becomes a stub that returns 0. `cc` does the linking.

mod archive;
mod imports;
mod link;
mod stubs;

use anyhow::{Context, Result, bail};
use std::env;
use std::path::{Path, PathBuf};

const USAGE: &str = "usage: simcuda-build plain ARCHIVES OUT | simcuda-build torch ARCHIVES TORCH";

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [what, archives, target] = args.as_slice() else { bail!(USAGE) };
    let archives = archive::Archives::open(Path::new(archives))?;
    let target = PathBuf::from(target);
    match what.as_str() {
        "plain" => plain(&archives, &target),
        "torch" => torch(&archives, &target),
        _ => bail!(USAGE),
    }
}

fn plain(archives: &archive::Archives, out: &Path) -> Result<()> {
    let linker = link::Linker::new(out)?;
    linker.driver(&archives.driver)?;
    for major in [12, 13] {
        let runtime = imports::Library::named(&format!("libcudart.so.{major}"));
        // The versions that a program gets when it asks: 12.8 and 13.0.
        let version = if major == 12 { 12080 } else { 13000 };
        linker.runtime(&archives.runtime, &runtime, version)?;
    }
    linker.library(&archives.libs, &nvml())?;
    linker.alias("libcuda.so.1", "libcuda.so")?;
    linker.alias("libcudart.so.13", "libcudart.so")
}

/// NVML is part of the driver. Nothing links it, and PyTorch opens it by name.
fn nvml() -> imports::Library {
    imports::Library { soname: "libnvidia-ml.so.1".to_string(), ..imports::Library::default() }
}

fn torch(archives: &archive::Archives, folder: &Path) -> Result<()> {
    let imports = imports::Imports::of_torch(folder)?;
    let out = &imports.install_to;
    let linker = link::Linker::new(out)?;
    linker.driver(&archives.driver)?;
    for library in &imports.libraries {
        if library.key() == "cudart" {
            linker.runtime(&archives.runtime, library, imports.cuda_version)
        } else {
            linker.library(&archives.libs, library)
        }
        .with_context(|| format!("linking {}", library.soname))?;
    }
    linker.library(&archives.libs, &nvml())?;
    println!("{}", out.display());
    Ok(())
}
