//! Runs a command over the simulated CUDA instead of a GPU: `memtrace dry-run`.
//!
//! The simulated libraries are made for the PyTorch of the command (`simcuda-build`) and preloaded. Their sonames are
//! those of NVIDIA's libraries, so the dynamic linker takes them for what PyTorch needs, and nothing is installed. Python
//! modules stand in for the values that kernels would have computed (`values`). What
//! compilers make during a dry run stays in a folder of the run, which is removed when the run ends.

mod gpus;
mod torch;
mod values;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::Context;
use memtrace_analysis::load::{SimulatedGpus, ValueException};
use simcuda_build::{Cores, Imports, libraries_of, plain_libraries};

pub(crate) use gpus::Gpu;
pub(crate) use values::Nonzero;

use crate::message::WithHelp;

const DRIVER: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_DRIVER"));
const RUNTIME: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_RUNTIME"));
const LIBS: &[u8] = include_bytes!(env!("MEMTRACE_EMBEDDED_SIMCUDA_LIBS"));

/// The folder in the run folder for what compilers make.
const CACHES: &str = ".simulated-caches";
/// The folder of the Python modules, beside the libraries. Reports take what is below such a folder for a library.
const PYTHON: &str = "site-packages";
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
    /// What comparisons of values that nothing computed select.
    pub(crate) nonzero: Nonzero,
    /// The number of optimizer steps after which the program ends.
    pub(crate) steps: Option<u32>,
}

impl Simulation {
    /// What reports say of the machine.
    pub(crate) fn description(&self) -> SimulatedGpus {
        SimulatedGpus {
            gpu: self.gpu.name.clone(),
            memory_bytes: self.gpu.memory_bytes,
            count: self.count,
            exception: None,
        }
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
        let modules = values::MODULES.map(|(name, text)| (format!("{PYTHON}/{name}"), text.as_bytes().to_vec()));
        write(&folder, libraries.iter().chain(&modules)).with_context(|| {
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
        let values = values::environment(&folder.join(PYTHON), run_folder, self.nonzero, self.steps)?;
        let caches = std::path::absolute(run_folder)?.join(CACHES);
        let settings = [
            ("LD_PRELOAD", preload),
            ("SIMCUDA_DEVICES", self.count.to_string().into()),
            ("SIMCUDA_MEMORY", gpu.memory_bytes.to_string().into()),
            ("SIMCUDA_NAME", gpu.name.clone().into()),
            ("SIMCUDA_SM", gpu.compute_capability.to_string().into()),
            ("SIMCUDA_MULTIPROCESSORS", gpu.multiprocessors.to_string().into()),
            ("SIMCUDA_L2", gpu.l2_cache_bytes.to_string().into()),
            ("SIMCUDA_CONTEXT", gpu.context_bytes.to_string().into()),
            // Triton looks for the driver's file with ldconfig, which knows no preloaded library.
            ("TRITON_LIBCUDA_PATH", folder.into_os_string()),
        ];
        let caches = CACHE_VARIABLES.map(|name| (name, caches.join(name.to_lowercase()).into_os_string()));
        Ok(settings.into_iter().chain(caches).chain(values).map(|(name, value)| (name.into(), value)).collect())
    }

    /// Takes the exception that ended the program after it had read values that nothing computed.
    pub(crate) fn take_exception(run_folder: &Path) -> Option<ValueException> {
        values::take_exception(run_folder)
    }

    /// Removes what compilers made during the run.
    pub(crate) fn remove_caches(run_folder: &Path) {
        // A process of the command that still runs may write into it. The folder then stays.
        std::fs::remove_dir_all(run_folder.join(CACHES)).ok();
    }
}

/// Writes the files that are missing or differ. Each file is written under a temporary name and then renamed, so a
/// running program keeps the old one.
fn write<'a>(folder: &Path, files: impl Iterator<Item = &'a (String, Vec<u8>)>) -> anyhow::Result<()> {
    for (name, content) in files {
        let path = folder.join(name);
        if std::fs::read(&path).is_ok_and(|existing| existing == *content) {
            continue;
        }
        let parent = path.parent().context("a file has a folder")?;
        std::fs::create_dir_all(parent)?;
        let partial = parent.join(format!(".{}", crate::session::token()?));
        std::fs::write(&partial, content).and_then(|()| std::fs::rename(&partial, &path)).inspect_err(|_| {
            std::fs::remove_file(&partial).ok();
        })?;
    }
    Ok(())
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}
