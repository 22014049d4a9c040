//! Runs a command over the simulated CUDA instead of a GPU: `memtrace dry-run`.
//!
//! The simulated libraries are made for the PyTorch of the command (`simcuda-build`) and preloaded. Their sonames are
//! those of NVIDIA's libraries, so the dynamic linker takes them for what PyTorch needs, and nothing is installed.
//! Python modules stand in for the values that kernels would have computed (`values`). Files that compilers make during
//! a dry run stay in a folder of the run, which is removed when the run ends.

mod gpus;
mod libraries;
mod torch;
mod values;
mod written;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{PeakBounds, SimulatedGpus};
use regex_lite::Regex;

pub(crate) use gpus::Gpu;
use values::Rules;
pub(crate) use values::{Nonzero, Workspaces};
pub(crate) use written::Finished;
use written::{MISSING, SCRATCH, SHARED, WORKSPACES};

use crate::private_folder::PrivateFolder;
use crate::sandbox::{self, Worker};
use libraries::Libraries;

/// How long reading what the processes have written may take, and how long removing their files.
const END_TIME: Duration = Duration::from_secs(60);
/// The variables that name caches of compiled code.
const CACHE_VARIABLES: [&str; 6] = [
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "TORCH_EXTENSIONS_DIR",
    // Also which GPUs access each other, and the kernels that autotuners chose.
    "VLLM_CACHE_ROOT",
    "SGLANG_CACHE_DIR",
];

/// The machine of a dry run.
#[derive(Clone, Debug)]
pub(crate) struct Simulation {
    /// The model of each GPU.
    pub(crate) gpu: Gpu,
    /// The number of GPUs.
    pub(crate) count: u32,
    /// The result of comparisons of values that nothing computed.
    pub(crate) nonzero: Nonzero,
    /// The workspaces of convolutions that were not measured.
    pub(crate) workspaces: Workspaces,
    /// The peaks of the runs of `--bounds`, which ran before.
    pub(crate) bounds: Option<PeakBounds>,
    /// How tokens choose among experts, as `SIMCUDA_ROUTING` has it.
    pub(crate) routing: String,
    /// The number of optimizer steps after which the program ends.
    pub(crate) steps: Option<u32>,
    /// Whether the program ends when it answers requests over HTTP.
    pub(crate) until_ready: bool,
    /// The program ends when it prints a line that matches.
    pub(crate) ready_line: Option<Regex>,
}

impl Simulation {
    /// The description of the machine in reports.
    pub(crate) fn description(&self) -> SimulatedGpus {
        SimulatedGpus {
            gpu: self.gpu.name.clone(),
            memory_bytes: self.gpu.memory_bytes,
            count: self.count,
            bounds: self.bounds.clone(),
            ..SimulatedGpus::default()
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
        let [shared, workspaces, missing] = [SHARED, WORKSPACES, MISSING].map(|name| scratch.join(name));
        for folder in [&shared, &workspaces, &missing] {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let rules = Rules { nonzero: self.nonzero, routing: &self.routing, steps: self.steps };
        let values = values::environment(&libraries.folder, &scratch, &rules)?;
        let estimated =
            (self.workspaces != Workspaces::Likely).then(|| ("SIMCUDA_CUDNN_WORKSPACE", self.workspaces.name().into()));
        let settings = [
            ("LD_PRELOAD", preload),
            ("SIMCUDA_DEVICES", self.count.to_string().into()),
            ("SIMCUDA_MEMORY", gpu.memory_bytes.to_string().into()),
            ("SIMCUDA_SHARED", shared.into_os_string()),
            ("SIMCUDA_NAME", gpu.name.clone().into()),
            ("SIMCUDA_SM", gpu.compute_capability.to_string().into()),
            ("SIMCUDA_MULTIPROCESSORS", gpu.multiprocessors.to_string().into()),
            ("SIMCUDA_L2", gpu.l2_cache_bytes.to_string().into()),
            ("SIMCUDA_NVLINKS", gpu.nvlinks.to_string().into()),
            ("SIMCUDA_CONTEXT", gpu.context_bytes.to_string().into()),
            // Of a GPU that is only a size, all is the program's.
            ("SIMCUDA_LIBRARY_MEMORY", u32::from(gpu.context_bytes > 0).to_string().into()),
            ("SIMCUDA_ESTIMATES", workspaces.join("%p").into_os_string()),
            ("SIMCUDA_MISSING", missing.join("%p").into_os_string()),
            // A process with another PyTorch asks for libraries of its own (`sitecustomize.py`).
            ("SIMCUDA_TORCH", libraries.torch.into_os_string()),
            ("SIMCUDA_LIBRARIES", libraries.folder.clone().into_os_string()),
            ("SIMCUDA_MEMTRACE", std::env::current_exe().unwrap_or_default().into_os_string()),
            // Triton looks for the driver's file with ldconfig, which knows no preloaded library.
            ("TRITON_LIBCUDA_PATH", libraries.folder.into_os_string()),
            // PyTorch refuses a cuDNN that is older than the one it was built with. The simulated one has one version.
            ("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK", "1".into()),
            // After a minute without a compilation inductor stops its workers, and forks new ones for the next one. A
            // worker that is forked while the thread that ends the old ones holds a lock never starts, and the program
            // waits for it at its exit. On a machine that computes slowly, a minute passes within a compilation.
            ("TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL", "0".into()),
        ];
        let caches = CACHE_VARIABLES.map(|name| (name, scratch.join(name.to_lowercase()).into_os_string()));
        Ok(settings
            .into_iter()
            .chain(caches)
            .chain(values)
            .chain(estimated)
            .map(|(name, value)| (name.into(), value))
            .collect())
    }

    /// The simulated libraries for the PyTorch of another interpreter than that of the command: the folder of
    /// PyTorch, that of the libraries, and the paths of the libraries. `library_folder` is that of the preloaded
    /// library.
    ///
    /// # Errors
    ///
    /// If the PyTorch has no CUDA, or the libraries cannot be written.
    pub(crate) fn libraries_for(python: &Path, library_folder: &PrivateFolder) -> anyhow::Result<Vec<PathBuf>> {
        let libraries = Libraries::for_command(&[python.as_os_str().to_owned()], library_folder)?;
        let paths: Vec<PathBuf> = libraries.paths().collect();
        Ok([libraries.torch, libraries.folder].into_iter().chain(paths).collect())
    }

    /// Reads what the processes have written, and removes what was only needed during the run. `has_failed` is true if
    /// the command ended with another status than 0. This process must have no other threads.
    pub(crate) fn finish(run_folder: &RunFolder, has_failed: bool) -> Finished {
        let finished = sandbox::call(END_TIME, || written::read(run_folder, has_failed));
        let mut finished = finished.unwrap_or_else(|e| {
            let problem = format!("cannot read what the processes of the dry run have written: {e:#}");
            // Whether they used CUDA is unknown. That nothing did is reported, so it must be known.
            Finished { used_cuda: true, problems: vec![problem], ..Finished::default() }
        });
        // The program may have made a tree that is deeper than a stack, or one that grows while it is removed.
        let removal = Worker::start(|| u8::from(remove_scratch(run_folder).is_err()));
        let removed = removal.map_err(|(_, e)| e.into()).and_then(|worker| worker.wait_for(END_TIME));
        if !removed.is_ok_and(|code| code == 0) {
            let path = run_folder.path().join(SCRATCH);
            finished.problems.push(format!("cannot remove {}, whose files are not needed any more", path.display()));
        }
        finished
    }
}

/// Removes the folder of the files that were only needed during the run. Changes the working folder, so only a worker
/// may call it.
fn remove_scratch(run_folder: &RunFolder) -> io::Result<()> {
    // The path of the run folder may lead to another one by now.
    rustix::process::fchdir(run_folder.descriptor())?;
    match std::fs::remove_dir_all(SCRATCH) {
        // A process of the command that still runs has written into it. The folder then stays.
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        result => result,
    }
}
