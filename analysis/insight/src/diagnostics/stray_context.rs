//! Processes that hold memory on GPUs that are not theirs. Each of them has a CUDA context there, which takes memory of
//! the rank that owns the GPU.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::diagnostic::Diagnostic;
use super::launch::{GpuUse, Gpus, LaunchIssue, LaunchProcess, ProcessOnGpu};
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::pass::Pass;
use crate::rules::RuleId;
use crate::units::size_text;

/// A process holds memory or a context on a GPU that is another rank's.
static STRAY_CONTEXT: DiagnosticRule = DiagnosticRule {
    id: RuleId::StrayContext,
    meaning: "A rank has a CUDA context, and maybe memory, on the GPU of another rank.",
    evidence: "A process of one rank allocates or creates a CUDA context on a GPU that is another rank's own, besides \
               the GPU of its own rank. A rank's own GPU is the one with its local rank, else the one on which it \
               computes most. GPUs are compared by PCI bus id, else by CUDA_VISIBLE_DEVICES. A GPU on which the \
               program itself opens memory of another process (CUDA IPC) does not count. NCCL opens memory on the \
               other GPUs of a host too, and needs no context there.",
    limits: "The bytes are those that the process allocated. Its CUDA context takes several hundred MiB besides. A \
             context without an allocation has a line only if the process had allocated on another GPU before. Ranks \
             that share a GPU on purpose have the same own GPU and are not reported.",
    code: &[
        "torch.cuda.set_device(local_rank)  # before the first call of CUDA",
        r#"state = torch.load(path, map_location=f"cuda:{local_rank}")"#,
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html",
    kept_by: KeptBy::Nothing,
};

/// A DataLoader worker holds memory on a GPU.
static WORKER_CONTEXT: DiagnosticRule = DiagnosticRule {
    id: RuleId::WorkerContext,
    meaning: "A worker process of a DataLoader allocates on the GPU, and has a CUDA context of its own.",
    evidence: "The first allocation of a process on a GPU comes from the worker loop of torch.utils.data.",
    limits: "The bytes are those that the worker allocated. Its CUDA context takes several hundred MiB besides.",
    code: &[
        "loader = DataLoader(dataset, num_workers=4, pin_memory=True)  # the dataset returns CPU tensors",
        "inputs = inputs.cuda(non_blocking=True)                        # in the training process",
    ],
    link: "https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
    kept_by: KeptBy::Nothing,
};

/// The maximum number of processes named in the evidence of an issue.
const NAMED: usize = 8;

/// Needs no signal of its own: the first allocations of the processes show the issues.
#[derive(Clone, Debug, Default)]
pub(crate) struct StrayContexts;

impl Pass for StrayContexts {}

impl Diagnostic for StrayContexts {
    const RULES: &'static [&'static DiagnosticRule] = &[&STRAY_CONTEXT, &WORKER_CONTEXT];

    fn launch_issues(processes: &[LaunchProcess<'_>]) -> Vec<LaunchIssue> {
        launch_issues(processes)
    }
}

fn launch_issues(processes: &[LaunchProcess<'_>]) -> Vec<LaunchIssue> {
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
    found.into_iter().map(|((rule, gpu), uses)| issue(rule, owners.get(gpu).copied(), uses)).collect()
}

fn name(process: &LaunchProcess<'_>) -> String {
    match process.rank {
        Some(rank) if process.is_rank => format!("rank {rank}"),
        Some(rank) => format!("pid {} of rank {rank}", process.pid),
        None => format!("pid {}", process.pid),
    }
}

fn issue(id: RuleId, owner: Option<u32>, mut uses: Vec<(&LaunchProcess<'_>, &GpuUse)>) -> LaunchIssue {
    uses.sort_by_key(|(process, one)| (Reverse(one.bytes), process.rank, process.pid));
    let bytes: u64 = uses.iter().map(|(_, one)| one.bytes).sum();
    let device = uses.first().map_or(0, |(_, one)| one.device);
    let gpu = match owner {
        Some(rank) => format!("GPU {device}, the GPU of rank {rank}"),
        None => format!("GPU {device}"),
    };
    let (count, size) = (uses.len(), size_text(bytes));
    let (rule, what, plural, fix) = match id {
        RuleId::WorkerContext => (
            &WORKER_CONTEXT,
            "DataLoader worker",
            "s",
            "return CPU tensors from the Dataset and the collate function, set pin_memory=True, and move the batch to \
             the GPU in the training process",
        ),
        _ => (
            &STRAY_CONTEXT,
            "process",
            "es",
            "call torch.cuda.set_device(local_rank) before anything else uses CUDA, and pass the rank's device to \
             torch.load(map_location=...) and .to(...)",
        ),
    };
    let held = if bytes == 0 { String::new() } else { format!("{size} and ") };
    let headline = match (uses.first(), count) {
        (Some((process, _)), 1) if id == RuleId::StrayContext => {
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
    LaunchIssue {
        rule,
        device,
        bytes,
        headline,
        evidence,
        stack: uses.first().map(|(_, one)| one.first_used_at.clone()),
        fix: fix.to_owned(),
        processes: uses
            .iter()
            .map(|(process, one)| ProcessOnGpu {
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
    use crate::diagnostics::launch::GpuName;

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
        assert_eq!((found.rule.id, found.bytes), (RuleId::StrayContext, 5));
        assert_eq!(
            found.processes.iter().map(|one| (one.rank, one.bytes)).collect::<Vec<_>>(),
            [(Some(2), 3), (Some(1), 2)]
        );
        assert!(found.headline.starts_with("2 processes hold 5 B and a CUDA context each on GPU 0, the GPU of rank 0"));
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
