//! The processes of a launch and the GPUs that they used, and issues that concern several processes.

use std::collections::BTreeMap;

use super::rule::DiagnosticRule;
use crate::StackSummary;

/// How a process names a GPU.
#[derive(Clone, Debug, Default)]
pub struct GpuName {
    /// The PCI bus id; `None` if it was not recorded.
    pub pci_bus_id: Option<String>,
    /// The entry of `CUDA_VISIBLE_DEVICES`, else the ordinal.
    pub index: String,
}

/// A GPU that a process used.
#[derive(Clone, Debug, Default)]
pub struct GpuUse {
    /// The ordinal in the process.
    pub device: i16,
    /// Identifies the GPU.
    pub name: GpuName,
    /// The highest number of bytes that the process allocated there.
    pub bytes: u64,
    /// The stack of the first allocation. Without one, that of the context's creation, if it was recorded.
    pub first_used_at: StackSummary,
    /// Whether a DataLoader worker's loop made the first allocation.
    pub is_by_data_loader: bool,
    /// Whether the process, and not only NCCL in it, opened memory of another process there.
    pub has_imports: bool,
}

/// A process of the launch.
#[derive(Debug)]
pub struct LaunchProcess<'a> {
    /// The process id.
    pub pid: u32,
    /// The rank to which it belongs.
    pub rank: Option<u32>,
    /// Whether it is the rank itself.
    pub is_rank: bool,
    /// The rank's own device, if it is the rank itself.
    pub own_device: Option<i16>,
    /// The GPUs that it used.
    pub uses: &'a [GpuUse],
}

/// Identifies GPUs across processes, by PCI bus id where one process recorded it.
#[derive(Debug)]
pub struct Gpus<'a> {
    by_index: BTreeMap<&'a str, &'a str>,
}

impl<'a> Gpus<'a> {
    /// The GPUs of all processes.
    pub fn of(processes: &'a [LaunchProcess<'a>]) -> Gpus<'a> {
        let uses = processes.iter().flat_map(|process| process.uses);
        let known = uses.filter_map(|one| Some((one.name.index.as_str(), one.name.pci_bus_id.as_deref()?)));
        Gpus { by_index: known.collect() }
    }

    /// The bus id of the GPU if any process recorded it, else its index.
    pub fn identity(&self, name: &'a GpuName) -> &'a str {
        let index = name.index.as_str();
        name.pci_bus_id.as_deref().unwrap_or_else(|| self.by_index.get(index).copied().unwrap_or(index))
    }
}

/// An issue that concerns several processes.
#[derive(Clone, PartialEq, Debug)]
pub struct LaunchIssue {
    /// The rule that detected it.
    pub rule: &'static DiagnosticRule,
    /// The ordinal of the GPU in the first of `processes`.
    pub device: i16,
    /// The bytes of all processes.
    pub bytes: u64,
    /// The issue in one line, with figures.
    pub headline: String,
    /// Measured facts, one per line.
    pub evidence: Vec<String>,
    /// The line to change.
    pub stack: Option<StackSummary>,
    /// The fix, in terms of the program's code.
    pub fix: String,
    /// The processes to which it applies, by bytes in descending order.
    pub processes: Vec<ProcessOnGpu>,
}

/// A process to which an issue applies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProcessOnGpu {
    /// The process id.
    pub pid: u32,
    /// The rank to which it belongs.
    pub rank: Option<u32>,
    /// The ordinal of the GPU in the process.
    pub device: i16,
    /// The bytes of this process.
    pub bytes: u64,
    /// The line that made the context, or that first allocated on the GPU. Empty if it is unknown.
    pub location: String,
}
