//! Allocations beyond the device's memory that succeed: their memory is on the host, and every access goes over PCI
//! Express.
//!
//! [`DeviceMemory`](crate::passes::DeviceMemory) has the signal, since the driver's allocations show it, not PyTorch's
//! blocks.

use super::device_facts::{DeviceFacts, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::pass::Pass;
use crate::rules::RuleId;
use crate::units::size_text;

/// More memory was allocated than the device has.
static SPILLED_TO_HOST: DiagnosticRule = DiagnosticRule {
    id: RuleId::SpilledToHost,
    meaning: "Allocations of GPU memory succeed although the device has no memory left: a part is on the host, where \
              the GPU reads it over PCI Express.",
    evidence: "The allocations of this process on the device, managed memory included, add up to more than the device \
               has. Or at two readings in a row, the driver reports less memory in use on the device than this \
               process alone has allocated there, by 32 MiB and 2 % of the peak at least.",
    limits: "The bytes are a lower bound: contexts, kernels and other processes have a part of the device that is not \
             counted. Managed memory takes memory only when it is used, and the rule does not know which part is.",
    code: &["torch.cuda.set_per_process_memory_fraction(0.95)  # an out-of-memory error instead of a slow program"],
    link: "https://nvidia.custhelp.com/app/answers/detail/a_id/5490",
    kept_by: KeptBy::Nothing,
};

/// Needs no signal of its own: the readings of the device's memory show the issue.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpilledToHost;

impl SpilledToHost {
    fn issue(device: &DeviceFacts<'_>) -> Option<Issue> {
        let memory = device.capacity.readings?;
        let spilled = memory.spilled.as_ref().filter(|spilled| device.matters(spilled.bytes))?;
        let total = size_text(memory.total);
        let allocated = size_text(spilled.allocated);
        let mut evidence = vec![if spilled.allocated > memory.total {
            format!("this process had {allocated} allocated on a device with {total}")
        } else {
            format!("the driver reported less memory in use on the device than the {allocated} of this process alone")
        }];
        if spilled.managed > 0 {
            evidence.push(format!("{} of them were managed memory", size_text(spilled.managed)));
        }
        let fix = if spilled.managed > 0 {
            "allocate less managed memory than the device has free, or prefetch the part that the GPU uses next"
        } else {
            "use less memory, or let the allocation fail instead: torch.cuda.set_per_process_memory_fraction, or in \
             NVIDIA's settings for Windows (WSL2 too) the CUDA sysmem fallback policy \"Prefer No Sysmem Fallback\""
        };
        Some(Issue {
            headline: format!("at least {} of GPU memory are on the host, not on the GPU", size_text(spilled.bytes)),
            evidence,
            place: Some(spilled.first),
            fix: fix.to_owned(),
            ..device.issue(&SPILLED_TO_HOST, spilled.bytes)
        })
    }
}

impl Pass for SpilledToHost {}

impl Diagnostic for SpilledToHost {
    const RULES: &'static [&'static DiagnosticRule] = &[&SPILLED_TO_HOST];

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(Self::issue(device));
    }
}
