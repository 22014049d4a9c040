//! Runs a command over the simulated CUDA instead of a GPU: `memtrace dry-run`.
//!
//! The simulated libraries are made for the PyTorch of the command (`simcuda-build`) and preloaded. Their sonames are
//! those of NVIDIA's libraries, so the dynamic linker takes them for what PyTorch needs, and nothing is installed. What
//! compilers make during a dry run stays in a folder of the run, which is removed when the run ends.

mod gpus;
mod torch;

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::Context;
use memtrace_analysis::load::{EstimatedWorkspaces, SimulatedGpus};
use simcuda_build::{Cores, Imports, libraries_of, plain_libraries};

pub(crate) use gpus::Gpu;

use crate::message::WithHelp;

const DRIVER: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_DRIVER"));
const RUNTIME: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_RUNTIME"));
const LIBS: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_LIBS"));

/// The folder in the run folder for what compilers make.
const CACHES: &str = ".simulated-caches";
/// The folder in the run folder in which each process writes what is known of cuDNN's workspaces.
const WORKSPACES: &str = ".simulated-workspaces";
/// The variables that name caches of compiled code.
const CACHE_VARIABLES: [&str; 4] =
    ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCH_EXTENSIONS_DIR"];

/// The machine of a dry run.
#[derive(Clone, Debug)]
pub(crate) struct Simulation {
    /// The model of each GPU.
    pub(crate) gpu: Gpu,
    /// The number of GPUs.
    pub(crate) count: u32,
}

impl Simulation {
    /// What reports say of the machine.
    pub(crate) fn description(&self) -> SimulatedGpus {
        let gpu = &self.gpu;
        SimulatedGpus { gpu: gpu.name.clone(), memory_bytes: gpu.memory_bytes, count: self.count, workspaces: None }
    }

    /// Makes the libraries for the command, and returns the variables to add to its environment.
    ///
    /// `library_folder` holds the preloaded library: a folder of this user from which code can be loaded, whose path
    /// `LD_PRELOAD` can hold.
    ///
    /// # Errors
    ///
    /// If the PyTorch of the command has no CUDA, or the libraries cannot be written.
    pub(crate) fn environment(
        &self,
        command: &[OsString],
        library_folder: &Path,
        run_folder: &Path,
    ) -> anyhow::Result<Vec<(OsString, OsString)>> {
        let cores = Cores::new(DRIVER.to_vec(), RUNTIME.to_vec(), LIBS.to_vec())?;
        let (libraries, name) = match torch::of_command(command) {
            Some(folder) => {
                let imports = Imports::of_torch(&folder).with_context(|| {
                    WithHelp::new(
                        format!("cannot simulate CUDA for the PyTorch in {}", folder.display()),
                        "install a PyTorch with CUDA: pip install torch",
                    )
                })?;
                (libraries_of(&cores, &imports)?, format!("simulated-{:016x}", fnv1a(folder.as_os_str().as_bytes())))
            }
            None => (plain_libraries(&cores)?, "simulated".to_owned()),
        };
        let folder = library_folder.join(name);
        write(&folder, &libraries).with_context(|| {
            WithHelp::new(
                format!("cannot write the simulated CUDA libraries into {}", folder.display()),
                "free some space there, or set XDG_CACHE_HOME to another folder",
            )
        })?;
        let mut preload = std::env::var_os("LD_PRELOAD").unwrap_or_default();
        for (soname, _) in &libraries {
            preload.push(":");
            preload.push(folder.join(soname));
        }
        let gpu = &self.gpu;
        let run_folder = std::path::absolute(run_folder)?;
        let (caches, workspaces) = (run_folder.join(CACHES), run_folder.join(WORKSPACES));
        std::fs::create_dir(&workspaces).with_context(|| format!("cannot create {}", workspaces.display()))?;
        let settings = [
            ("LD_PRELOAD", preload),
            ("SIMCUDA_DEVICES", self.count.to_string().into()),
            ("SIMCUDA_MEMORY", gpu.memory_bytes.to_string().into()),
            ("SIMCUDA_NAME", gpu.name.clone().into()),
            ("SIMCUDA_SM", gpu.compute_capability.to_string().into()),
            ("SIMCUDA_MULTIPROCESSORS", gpu.multiprocessors.to_string().into()),
            ("SIMCUDA_L2", gpu.l2_cache_bytes.to_string().into()),
            ("SIMCUDA_CONTEXT", gpu.context_bytes.to_string().into()),
            ("SIMCUDA_ESTIMATES", workspaces.join("%p").into_os_string()),
            // Triton looks for the driver's file with ldconfig, which knows no preloaded library.
            ("TRITON_LIBCUDA_PATH", folder.into_os_string()),
        ];
        let caches = CACHE_VARIABLES.map(|name| (name, caches.join(name.to_lowercase()).into_os_string()));
        Ok(settings.into_iter().chain(caches).map(|(name, value)| (name.into(), value)).collect())
    }

    /// Reads and removes what the processes wrote of cuDNN's workspaces. `None` if they used no convolutions of cuDNN.
    pub(crate) fn take_workspaces(run_folder: &Path) -> Option<EstimatedWorkspaces> {
        let folder = run_folder.join(WORKSPACES);
        let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let files = files.filter(|file| file.file_type().is_ok_and(|kind| kind.is_file()));
        let all = files.filter_map(|file| workspaces_of_process(&file.path())).reduce(|mut all, process| {
            all.add(&process);
            all
        });
        // A process of the command that still runs may write into it. The folder then stays.
        std::fs::remove_dir_all(&folder).ok();
        all
    }

    /// Removes what compilers made during the run.
    pub(crate) fn remove_caches(run_folder: &Path) {
        // A process of the command that still runs may write into it. The folder then stays.
        std::fs::remove_dir_all(run_folder.join(CACHES)).ok();
    }
}

/// What one process wrote of cuDNN's workspaces. `None` if it is incomplete, because the process ended while it wrote.
fn workspaces_of_process(file: &Path) -> Option<EstimatedWorkspaces> {
    /// The most that is read, in bytes: the simulated cuDNN writes less.
    const MOST: u64 = 4096;
    let file = std::fs::File::open(file).ok()?;
    serde_json::from_reader(file.take(MOST)).ok()
}

/// Writes the libraries that are missing or differ. Each file is written under a temporary name and then renamed, so a
/// running program keeps the old one.
fn write(folder: &Path, libraries: &[(String, Vec<u8>)]) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    for (soname, content) in libraries {
        let path = folder.join(soname);
        if std::fs::read(&path).is_ok_and(|existing| existing == *content) {
            continue;
        }
        let partial = folder.join(format!(".{soname}.{}", crate::session::token()?));
        std::fs::write(&partial, content).and_then(|()| std::fs::rename(&partial, &path)).inspect_err(|_| {
            std::fs::remove_file(&partial).ok();
        })?;
    }
    Ok(())
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
