//! Builds the stand-ins for PyTorch's libraries from the sources in `fake/`.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Each library, its source, and the libraries that it links.
const LIBRARIES: &[(&str, &str, &[&str])] = &[
    ("liboracle.so", "oracle.c", &[]),
    ("libc10.so", "c10.cpp", &["-loracle"]),
    ("libc10_cuda.so", "c10_cuda.cpp", &["-loracle", "-lc10", "-l:libcudart.so.13"]),
    ("libtorch_cuda.so", "torch_cuda.cpp", &[]),
    ("libtorch_cpu.so", "torch_cpu.cpp", &[]),
    ("libcalls.so", "calls.c", &["-loracle", "-l:libcuda.so.1", "-l:libcudart.so.13"]),
];

/// Compiles every stand-in into `folder`, linked with the simulated CUDA in `simcuda`.
pub(crate) fn build(sources: &Path, simcuda: &Path, folder: &Path) -> Result<()> {
    for (library, source, linked_with) in LIBRARIES {
        let is_c = Path::new(source).extension() == Some(OsStr::new("c"));
        let mut command = Command::new(if is_c { "cc" } else { "c++" });
        command.args(if is_c { ["-std=gnu11"] } else { ["-std=c++17"] });
        command.args([
            "-O2",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-Wl,-z,now",
            "-Wl,-rpath,$ORIGIN",
        ]);
        command.arg("-o").arg(folder.join(library)).arg(sources.join(source));
        command.arg("-L").arg(folder).arg("-L").arg(simcuda).args(*linked_with);
        let output = command.output().with_context(|| format!("cannot run the compiler for {source}"))?;
        ensure!(output.status.success(), "{source} does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
