//! Runs a command over the simulated CUDA instead of a GPU: `memtrace dry-run`.
//!
//! The simulated libraries are made for the PyTorch of the command (`simcuda-build`) and preloaded. Their sonames are
//! those of NVIDIA's libraries, so the dynamic linker takes them for what PyTorch needs, and nothing is installed. Python
//! modules stand in for the values that kernels would have computed (`values`). What compilers make during a dry run stays
//! in a folder of the run, which is removed when the run ends.

mod gpus;
mod libraries;
mod torch;
mod values;

use std::ffi::OsString;
use std::io::Read;
use std::path::Path;

use anyhow::Context;
use memtrace_analysis::load::{EstimatedWorkspaces, SimulatedGpus, ValueException};

pub(crate) use gpus::Gpu;
pub(crate) use values::Nonzero;

use crate::private_folder::PrivateFolder;
use libraries::Libraries;

/// The folder in the run folder for files that are only needed during the run.
const SCRATCH: &str = ".simulated";
/// The folder in it through which the processes of the run share the memory of each GPU and exchange messages.
const SHARED: &str = "shared";
/// The file in that folder which the first process that uses CUDA creates (`simulate/src/shared.rs`).
const USAGE: &str = "usage";
/// The folder in [`SCRATCH`] in which each process writes what is known of cuDNN's workspaces.
const WORKSPACES: &str = "workspaces";
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

/// What is known of a dry run that ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Whether any process used CUDA.
    pub(crate) used_cuda: bool,
    /// The exception that ended the program after it had read values that nothing computed.
    pub(crate) exception: Option<ValueException>,
    /// What is known of cuDNN's workspaces. `None` if the program used no convolutions of cuDNN.
    pub(crate) workspaces: Option<EstimatedWorkspaces>,
}

impl Simulation {
    /// What reports say of the machine.
    pub(crate) fn description(&self) -> SimulatedGpus {
        SimulatedGpus {
            gpu: self.gpu.name.clone(),
            memory_bytes: self.gpu.memory_bytes,
            count: self.count,
            exception: None,
            workspaces: None,
        }
    }

    /// Makes the libraries for the command, and returns the variables to add to its environment.
    ///
    /// `library_folder` holds the preloaded library: code can be loaded from it, and `LD_PRELOAD` can hold its path.
    ///
    /// # Errors
    ///
    /// If the PyTorch of the command has no CUDA, or the libraries cannot be written.
    pub(crate) fn environment(
        &self,
        command: &[OsString],
        library_folder: &PrivateFolder,
        run_folder: &Path,
    ) -> anyhow::Result<Vec<(OsString, OsString)>> {
        let libraries = Libraries::for_command(command, library_folder)?;
        let mut preload = std::env::var_os("LD_PRELOAD").unwrap_or_default();
        for path in libraries.paths() {
            preload.push(":");
            preload.push(path);
        }
        let gpu = &self.gpu;
        let scratch = std::path::absolute(run_folder)?.join(SCRATCH);
        let (shared, workspaces) = (scratch.join(SHARED), scratch.join(WORKSPACES));
        for folder in [&shared, &workspaces] {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let values = values::environment(&libraries.folder, &scratch, self.nonzero, self.steps)?;
        let settings = [
            ("LD_PRELOAD", preload),
            ("SIMCUDA_DEVICES", self.count.to_string().into()),
            ("SIMCUDA_MEMORY", gpu.memory_bytes.to_string().into()),
            ("SIMCUDA_SHARED", shared.into_os_string()),
            ("SIMCUDA_NAME", gpu.name.clone().into()),
            ("SIMCUDA_SM", gpu.compute_capability.to_string().into()),
            ("SIMCUDA_MULTIPROCESSORS", gpu.multiprocessors.to_string().into()),
            ("SIMCUDA_L2", gpu.l2_cache_bytes.to_string().into()),
            ("SIMCUDA_CONTEXT", gpu.context_bytes.to_string().into()),
            // Of a GPU that is only a size, all is the program's.
            ("SIMCUDA_LIBRARY_MEMORY", u32::from(gpu.context_bytes > 0).to_string().into()),
            ("SIMCUDA_ESTIMATES", workspaces.join("%p").into_os_string()),
            // Triton looks for the driver's file with ldconfig, which knows no preloaded library.
            ("TRITON_LIBCUDA_PATH", libraries.folder.into_os_string()),
            // After a minute without a compilation inductor stops its workers, and forks new ones for the next one. A worker
            // that is forked while the thread that ends the old ones holds a lock never starts, and the program waits for it
            // at its exit. On a machine that computes slowly, a minute passes within a compilation.
            ("TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL", "0".into()),
        ];
        let caches = CACHE_VARIABLES.map(|name| (name, scratch.join(name.to_lowercase()).into_os_string()));
        Ok(settings.into_iter().chain(caches).chain(values).map(|(name, value)| (name.into(), value)).collect())
    }

    /// Reads what the processes left, and removes what was only needed during the run. `has_failed`: whether the command
    /// ended with another status than 0.
    pub(crate) fn finish(run_folder: &Path, has_failed: bool) -> Finished {
        let scratch = run_folder.join(SCRATCH);
        let used_cuda = scratch.join(SHARED).join(USAGE).exists();
        // A program that ends well went on after the exit that it requested.
        let exception = values::exception(&scratch).filter(|found| has_failed || found.exception != values::EXIT);
        let workspaces = workspaces_of_all(&scratch.join(WORKSPACES));
        // A process of the command that still runs may write into it. The folder then stays.
        std::fs::remove_dir_all(scratch).ok();
        Finished { used_cuda, exception, workspaces }
    }
}

/// What the processes wrote of cuDNN's workspaces. `None` if they used no convolutions of cuDNN.
fn workspaces_of_all(folder: &Path) -> Option<EstimatedWorkspaces> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = files.filter(|file| file.file_type().is_ok_and(|kind| kind.is_file()));
    files.filter_map(|file| workspaces_of_process(&file.path())).reduce(|mut all, process| {
        all.add(&process);
        all
    })
}

/// What one process wrote of cuDNN's workspaces. `None` if it is incomplete, because the process ended while it wrote.
fn workspaces_of_process(file: &Path) -> Option<EstimatedWorkspaces> {
    /// The most that is read, in bytes: the simulated cuDNN writes less.
    const MOST: u64 = 4096;
    let file = std::fs::File::open(file).ok()?;
    serde_json::from_reader(file.take(MOST)).ok()
}
