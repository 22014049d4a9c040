//! The memory of a device outside PyTorch's caching allocator.

use memtrace_insight::units::size_text;

use crate::conclusions::OutsidePytorch;
use crate::owners::OwnerBytes;
use crate::summary::{DeviceSummary, OomSummary};

/// The maximum number of owners that a sentence names.
const NAMED_OWNERS: usize = 4;

impl OutsidePytorch {
    /// The memory of a device outside the allocator. `None` if there is none.
    pub(crate) fn of(device: &DeviceSummary) -> Option<OutsidePytorch> {
        let mut owners: Vec<OwnerBytes> = Vec::new();
        for owner in device.owners.iter().filter(|owner| owner.object.is_some()) {
            match owners.iter_mut().find(|one| one.owner == owner.owner) {
                Some(one) => one.bytes = one.bytes.saturating_add(owner.peak_bytes),
                None => owners.push(OwnerBytes { owner: owner.owner.clone(), bytes: owner.peak_bytes }),
            }
        }
        owners.sort_by_key(|owner| std::cmp::Reverse(owner.bytes));
        let bytes = owners.iter().map(|owner| owner.bytes).sum::<u64>();
        let before = device.in_use_before_bytes.unwrap_or(0);
        let mut parts = largest_owners(&owners);
        if before > 0 {
            parts.push(format!("before the program started {}", size_text(before)));
        }
        let text = match device.source.starts_with("torch") && !parts.is_empty() {
            true => format!("up to {} ({})", size_text(bytes.saturating_add(before)), parts.join(", ")),
            false => String::new(),
        };
        (bytes > 0 || !text.is_empty()).then_some(OutsidePytorch { bytes, owners, text })
    }
}

/// The memory outside the allocator at an error, with its largest owners. `None` if there is none.
pub(crate) fn outside_at_error(device: &DeviceSummary, oom: &OomSummary) -> Option<String> {
    let others = oom.contexts_and_other_processes_bytes.unwrap_or(0);
    let mut parts = largest_owners(&oom.outside_pytorch);
    if others > 0 {
        let before = device.in_use_before_bytes.filter(|bytes| *bytes > 0);
        let before = before.map(|bytes| format!(", {} of it before the program started", size_text(bytes)));
        parts.push(format!("CUDA contexts and other processes {}{}", size_text(others), before.unwrap_or_default()));
    }
    let total = oom.outside_pytorch_bytes.saturating_add(others);
    (total > 0).then(|| format!("{} ({})", size_text(total), parts.join(", ")))
}

/// The largest owners as text, and the sum of the others.
fn largest_owners(owners: &[OwnerBytes]) -> Vec<String> {
    let (largest, others) = owners.split_at(owners.len().min(NAMED_OWNERS));
    let mut parts: Vec<String> = largest.iter().map(|one| format!("{} {}", one.owner, size_text(one.bytes))).collect();
    if !others.is_empty() {
        let rest = others.iter().map(|owner| owner.bytes).sum();
        parts.push(format!("{} others {}", others.len(), size_text(rest)));
    }
    parts
}
