//! How reports name processes and devices.

use crate::summary::{DeviceSummary, ProcessSummary};

/// The name of a process: `rank 3` or `pid 7`.
pub fn process_name(process: &ProcessSummary) -> String {
    process_text(process.rank, process.pid)
}

/// The name of a device: `GPU 0` or `CPU tensors`.
pub fn device_name(device: &DeviceSummary) -> String {
    ordinal_text(device.device)
}

/// Formats a device: `rank 3, GPU 0` or `pid 7, CPU tensors`.
pub fn device_text(rank: Option<u32>, pid: u32, device: i16) -> String {
    format!("{}, {}", process_text(rank, pid), ordinal_text(device))
}

fn process_text(rank: Option<u32>, pid: u32) -> String {
    rank.map_or_else(|| format!("pid {pid}"), |rank| format!("rank {rank}"))
}

/// The name of a device. `ordinal` is -1 for the CPU.
pub(crate) fn ordinal_text(ordinal: i16) -> String {
    if ordinal < 0 { "CPU tensors".to_owned() } else { format!("GPU {ordinal}") }
}
