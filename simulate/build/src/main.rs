//! `simcuda-build`: makes the simulated CUDA libraries from the cores that cargo built.
//!
//!     simcuda-build plain CORES OUT           libcuda.so.1, libcudart.so.12 and .13, libnvidia-ml.so.1: for programs
//!                                             without PyTorch
//!     simcuda-build torch CORES TORCH [OUT]   every NVIDIA library that the PyTorch in the folder TORCH links, in OUT
//!                                             or where its run path looks for them; prints that folder

use anyhow::{Context, Result, bail};
use simcuda_build::{Cores, Imports, libraries_of, plain_libraries};
use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const USAGE: &str = "usage: simcuda-build plain CORES OUT | simcuda-build torch CORES TORCH [OUT]";

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [what, cores, target, out @ ..] = args.as_slice() else { bail!(USAGE) };
    let cores = Path::new(cores);
    let read = |name: &str| {
        let path = cores.join(format!("libsimcuda_{name}.so"));
        fs::read(&path).with_context(|| format!("reading {}", path.display()))
    };
    let cores = Cores::new(read("driver")?, read("runtime")?, read("libs")?)?;
    let target = Path::new(target);
    match what.as_str() {
        "plain" => {
            write(target, &plain_libraries(&cores)?)?;
            alias(target, "libcuda.so.1", "libcuda.so")?;
            alias(target, "libcudart.so.13", "libcudart.so")
        }
        "torch" => {
            let imports = Imports::of_torch(target)?;
            let folder = out.first().map(PathBuf::from).or_else(|| imports.install_to.clone()).with_context(|| {
                format!("{} looks for CUDA in no folder of its own: is it the CUDA build?", target.display())
            })?;
            write(&folder, &libraries_of(&cores, &imports)?)?;
            println!("{}", folder.display());
            Ok(())
        }
        _ => bail!(USAGE),
    }
}

/// Writes the libraries into a folder. Each file is written under a temporary name and then renamed, so a running
/// program keeps the old one.
fn write(folder: &Path, libraries: &[(String, Vec<u8>)]) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for (soname, content) in libraries {
        let new = folder.join(format!(".{soname}.{}", std::process::id()));
        fs::write(&new, content).with_context(|| format!("writing {}", new.display()))?;
        fs::rename(&new, folder.join(soname))?;
    }
    Ok(())
}

/// Creates a symbolic link under a second name.
fn alias(folder: &Path, soname: &str, name: &str) -> Result<()> {
    let path = folder.join(name);
    let _ = fs::remove_file(&path);
    symlink(soname, &path).with_context(|| format!("making {}", path.display()))
}
