//! The section `device`: what nvidia-smi shows, divided by what uses it.

use memtrace_summary::{
    DeviceBreakdown, DeviceMemorySummary, DevicePartKind, DeviceSummary, OtherProcesses, share_text, size_text,
};

use crate::text_report::TextReport;

/// The number of parts in the short form.
const SHORT_PARTS: usize = 5;
/// The short form is left out if everything but PyTorch has fewer bytes.
const LEAST_OUTSIDE_BYTES: u64 = 1 << 20;

impl TextReport {
    /// The whole memory of a device in full.
    pub(crate) fn device_section(&mut self, device: &DeviceSummary) {
        let Some(memory) = &device.device_memory else {
            let why = if device.device < 0 {
                "  the CPU has no device memory"
            } else {
                "  not known: the recording has no readings of the memory in use on the device"
            };
            return self.line(why.to_owned());
        };
        self.breakdown("Most memory in use", &memory.at_peak, memory);
        if let Some(state) = memory.at_allocated_peak.as_ref().filter(|state| state.seq != memory.at_peak.seq) {
            self.breakdown("At the peak of PyTorch's allocated memory", state, memory);
        }
        if memory.at_end.used_bytes != memory.at_peak.used_bytes {
            self.breakdown("At the end of the recording", &memory.at_end, memory);
        }
        self.device_notes(memory);
    }

    fn breakdown(&mut self, what: &str, state: &DeviceBreakdown, memory: &DeviceMemorySummary) {
        let used = size_text(state.used_bytes);
        let share = share_text(state.used_bytes, memory.total_bytes);
        self.list(&format!("{what}: {used} of {} ({share}), as nvidia-smi shows it", size_text(memory.total_bytes)));
        for part in &state.parts {
            self.row(part.bytes, state.used_bytes, &part.label);
        }
        for (bytes, what) in [
            (state.pinned_host_bytes, "pinned host memory of this process"),
            (state.imported_bytes, "opened memory of other processes (CUDA IPC), counted there"),
            (state.managed_bytes, "managed memory, which may be on the host"),
        ] {
            if bytes > 0 {
                self.line(format!("    beside it: {} {what}", size_text(bytes)));
            }
        }
    }

    fn device_notes(&mut self, memory: &DeviceMemorySummary) {
        if let Some(bytes) = memory.nvml_process_peak_bytes {
            self.labelled("NVML", &format!("at most {} for this process, in samples a second apart", size_text(bytes)));
        }
        match memory.other_processes {
            OtherProcesses::Steady | OtherProcesses::None => {}
            OtherProcesses::Changing => {
                self.note("other processes on the device changed their memory; their figures are up to a second old");
            }
            OtherProcesses::OtherPids => self.note(
                "NVML does not list this process, as in some containers: processes that use the device since before \
                 the run count as others",
            ),
            OtherProcesses::UnknownInstance => self.note(
                "the GPU is divided into instances (MIG), and NVML does not report in which one this process runs, so \
                 other processes are not separated",
            ),
            OtherProcesses::Unknown => self.note(
                "NVML has no figures from before the run, so other processes are not separated: what they take after \
                 the start is part of the unattributed memory, as are kernels",
            ),
        }
        let states = [Some(&memory.at_peak), memory.at_allocated_peak.as_ref(), Some(&memory.at_end)];
        let has_kernels = |state: &&DeviceBreakdown| {
            state.parts.iter().any(|part| part.kind == DevicePartKind::Kernels && part.bytes > 0)
        };
        if states.iter().flatten().any(has_kernels) {
            self.note(
                "the driver takes memory without a call that says so: kernels when they first run, local memory, CUDA \
                 graphs. It is what the driver reports beyond all allocations",
            );
        }
    }

    /// Adds the memory in use on the device in short, if more than PyTorch uses it.
    pub(crate) fn device_in_short(&mut self, device: &DeviceSummary) {
        let Some(memory) = &device.device_memory else { return };
        let state = &memory.at_peak;
        let is_pytorch = |kind| matches!(kind, DevicePartKind::PytorchAllocated | DevicePartKind::PytorchCached);
        let outside: u64 = state.parts.iter().filter(|part| !is_pytorch(part.kind)).map(|part| part.bytes).sum();
        if outside < LEAST_OUTSIDE_BYTES {
            return;
        }
        let parts: Vec<_> = state.parts.iter().filter(|part| part.bytes > 0).collect();
        let (listed, rest) = parts.split_at(parts.len().min(SHORT_PARTS));
        let mut texts: Vec<String> =
            listed.iter().map(|part| format!("{} {}", part.label, size_text(part.bytes))).collect();
        if !rest.is_empty() {
            let bytes = rest.iter().map(|part| part.bytes).sum();
            let others = if rest.len() == 1 { "other" } else { "others" };
            texts.push(format!("{} {others} {}", rest.len(), size_text(bytes)));
        }
        let text = format!("{} at most: {}", size_text(state.used_bytes), texts.join(", "));
        self.labelled_list("As nvidia-smi shows it", &text);
    }
}
