//! Finds processes that hold memory on GPUs that are not theirs. Each of them has a CUDA context there, which takes
//! memory of the rank that owns the GPU.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::launch::{IssueProcessSummary, LaunchIssueSummary};
use crate::summary::{IssueSummary, StackSummary};
use memtrace_insight::rules::RuleId;
use memtrace_insight::units::size_text;

/// The maximum number of processes named in the evidence of an issue.
const NAMED: usize = 8;

/// How a process names a GPU.
#[derive(Clone, Debug, Default)]
pub(crate) struct GpuName {
    /// The PCI bus id; `None` if it was not recorded.
    pub(crate) pci_bus_id: Option<String>,
    /// The entry of `CUDA_VISIBLE_DEVICES`, else the ordinal.
    pub(crate) index: String,
}

/// A GPU that a process used.
#[derive(Clone, Debug, Default)]
pub(crate) struct GpuUse {
    /// The ordinal in the process.
    pub(crate) device: i16,
    pub(crate) name: GpuName,
    /// The highest number of bytes that the process allocated there.
    pub(crate) bytes: u64,
    /// The stack of the first allocation. Without one, that of the context's creation, if it was recorded.
    pub(crate) first_used_at: StackSummary,
    /// Whether a DataLoader worker's loop made the first allocation.
    pub(crate) is_by_data_loader: bool,
    /// Whether the process, and not only NCCL in it, opened memory of another process there.
    pub(crate) has_imports: bool,
}

/// A process of the launch.
#[derive(Debug)]
pub(crate) struct LaunchProcess<'a> {
    pub(crate) pid: u32,
    /// The rank to which it belongs.
    pub(crate) rank: Option<u32>,
    /// Whether it is the rank itself.
    pub(crate) is_rank: bool,
    /// The rank's own device, if it is the rank itself.
    pub(crate) own_device: Option<i16>,
    pub(crate) uses: &'a [GpuUse],
}

/// Identifies GPUs across processes, by PCI bus id where one process recorded it.
pub(crate) struct Gpus<'a> {
    by_index: BTreeMap<&'a str, &'a str>,
}

impl<'a> Gpus<'a> {
    pub(crate) fn of(processes: &'a [LaunchProcess<'a>]) -> Gpus<'a> {
        let uses = processes.iter().flat_map(|process| process.uses);
        let known = uses.filter_map(|one| Some((one.name.index.as_str(), one.name.pci_bus_id.as_deref()?)));
        Gpus { by_index: known.collect() }
    }

    pub(crate) fn identity(&self, name: &'a GpuName) -> &'a str {
        let index = name.index.as_str();
        name.pci_bus_id.as_deref().unwrap_or_else(|| self.by_index.get(index).copied().unwrap_or(index))
    }
}

/// The issues that concern several processes, by bytes in descending order.
pub(crate) fn launch_issues(processes: &[LaunchProcess<'_>]) -> Vec<LaunchIssueSummary> {
    let gpus = Gpus::of(processes);
    // By GPU: the rank whose own it is. Of several ranks, the first.
    let mut owners: BTreeMap<&str, u32> = BTreeMap::new();
    let mut own_gpus: BTreeMap<u32, &str> = BTreeMap::new();
    for process in processes.iter().filter(|process| process.is_rank) {
        let own = process.uses.iter().find(|one| Some(one.device) == process.own_device);
        if let Some((rank, own)) = process.rank.zip(own) {
            let gpu = gpus.identity(&own.name);
            own_gpus.insert(rank, gpu);
            owners.entry(gpu).and_modify(|owner| *owner = rank.min(*owner)).or_insert(rank);
        }
    }
    let mut found: BTreeMap<(RuleId, &str), Vec<(&LaunchProcess<'_>, &GpuUse)>> = BTreeMap::new();
    for process in processes {
        let own = process.rank.and_then(|rank| own_gpus.get(&rank)).copied();
        for one in process.uses {
            let gpu = gpus.identity(&one.name);
            let is_of_other = owners.get(gpu).is_some_and(|owner| Some(*owner) != process.rank) && own.is_some();
            let rule = match () {
                () if one.is_by_data_loader => RuleId::WorkerContext,
                () if is_of_other && own != Some(gpu) && !one.has_imports => RuleId::StrayContext,
                () => continue,
            };
            found.entry((rule, gpu)).or_default().push((process, one));
        }
    }
    let mut issues: Vec<LaunchIssueSummary> =
        found.into_iter().map(|((rule, gpu), uses)| issue(rule, owners.get(gpu).copied(), uses)).collect();
    issues.sort_by_key(|one| (Reverse(one.issue.bytes), one.issue.rule, one.processes.first().map(|first| first.pid)));
    issues
}

fn name(process: &LaunchProcess<'_>) -> String {
    match process.rank {
        Some(rank) if process.is_rank => format!("rank {rank}"),
        Some(rank) => format!("pid {} of rank {rank}", process.pid),
        None => format!("pid {}", process.pid),
    }
}

fn issue(rule: RuleId, owner: Option<u32>, mut uses: Vec<(&LaunchProcess<'_>, &GpuUse)>) -> LaunchIssueSummary {
    uses.sort_by_key(|(process, one)| (Reverse(one.bytes), process.rank, process.pid));
    let bytes: u64 = uses.iter().map(|(_, one)| one.bytes).sum();
    let device = uses.first().map_or(0, |(_, one)| one.device);
    let gpu = match owner {
        Some(rank) => format!("GPU {device}, the GPU of rank {rank}"),
        None => format!("GPU {device}"),
    };
    let (count, size) = (uses.len(), size_text(bytes));
    let what = if rule == RuleId::WorkerContext { "DataLoader worker" } else { "process" };
    let plural = if rule == RuleId::WorkerContext { "s" } else { "es" };
    let held = if bytes == 0 { String::new() } else { format!("{size} and ") };
    let headline = match (uses.first(), count) {
        (Some((process, _)), 1) if rule == RuleId::StrayContext => {
            format!("{} holds {held}a CUDA context on {gpu}", name(process))
        }
        (_, 1) => format!("1 {what} holds {held}a CUDA context on {gpu}"),
        _ => format!("{count} {what}{plural} hold {held}a CUDA context each on {gpu}"),
    };
    let mut evidence: Vec<String> = uses
        .iter()
        .take(NAMED)
        .map(|(process, one)| {
            let location = &one.first_used_at.location;
            let (allocated, what) = match one.bytes {
                0 => ("nothing".to_owned(), "the context was created"),
                bytes => (size_text(bytes), "first"),
            };
            let at = if location.is_empty() { String::new() } else { format!(", {what} at {location}") };
            format!("{} allocated {allocated} there{at}", name(process))
        })
        .collect();
    if count > NAMED {
        evidence.push(format!("{} more processes", count - NAMED));
    }
    let fix = match rule {
        RuleId::WorkerContext => {
            "return CPU tensors from the Dataset and the collate function, set pin_memory=True, and move the batch to the \
             GPU in the training process"
        }
        _ => {
            "call torch.cuda.set_device(local_rank) before anything else uses CUDA, and pass the rank's device to \
             torch.load(map_location=...) and .to(...)"
        }
    };
    LaunchIssueSummary {
        issue: IssueSummary {
            rule,
            device,
            bytes,
            headline,
            evidence,
            stack: uses.first().map(|(_, one)| one.first_used_at.clone()),
            fix: fix.to_owned(),
            saves_bytes: None,
            forecast: None,
            files: Vec::new(),
            held_by: Vec::new(),
            help: None,
        },
        processes: uses
            .iter()
            .map(|(process, one)| IssueProcessSummary {
                pid: process.pid,
                rank: process.rank,
                device: one.device,
                bytes: one.bytes,
                location: one.first_used_at.location.clone(),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(device: i16, index: &str, pci: Option<&str>, bytes: u64) -> GpuUse {
        let name = GpuName { index: index.into(), pci_bus_id: pci.map(str::to_owned) };
        GpuUse { device, name, bytes, ..GpuUse::default() }
    }

    fn rank(rank: u32, own_device: i16, uses: &[GpuUse]) -> LaunchProcess<'_> {
        LaunchProcess { pid: 10 + rank, rank: Some(rank), is_rank: true, own_device: Some(own_device), uses }
    }

    #[test]
    fn ranks_on_the_gpu_of_another_are_reported_together() {
        let uses = [
            vec![used(0, "0", Some("a"), 100)],
            // The bus id of GPU 0 is known from rank 0.
            vec![used(0, "0", None, 2), used(1, "1", Some("b"), 100)],
            vec![used(0, "0", Some("a"), 3), used(2, "2", Some("c"), 100)],
        ];
        let all: Vec<_> = uses.iter().zip(0..).map(|(uses, at)| rank(at, at as i16, uses)).collect();
        let issues = launch_issues(&all);
        let [found] = &issues[..] else { panic!("{issues:?}") };
        assert_eq!((found.issue.rule, found.issue.bytes), (RuleId::StrayContext, 5));
        assert_eq!(
            found.processes.iter().map(|one| (one.rank, one.bytes)).collect::<Vec<_>>(),
            [(Some(2), 3), (Some(1), 2)]
        );
        assert!(
            found
                .issue
                .headline
                .starts_with("2 processes hold 5 B and a CUDA context each on GPU 0, the GPU of rank 0")
        );
    }

    #[test]
    fn what_is_meant_is_no_issue() {
        // Each rank sees its GPU as GPU 0. Rank 2 uses two GPUs of its own. Rank 3 opened memory of rank 0.
        let mut imported = used(1, "0", Some("a"), 1);
        imported.has_imports = true;
        let uses = [
            vec![used(0, "0", Some("a"), 100)],
            vec![used(0, "1", Some("b"), 100)],
            vec![used(0, "2", Some("c"), 100), used(1, "3", Some("d"), 50)],
            vec![used(0, "4", Some("e"), 100), imported],
        ];
        let all: Vec<_> = uses.iter().zip(0..).map(|(uses, at)| rank(at, 0, uses)).collect();
        assert_eq!(launch_issues(&all), []);
    }
}
