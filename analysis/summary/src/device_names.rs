//! How reports name processes and devices.

use crate::summary::{DeviceSummary, ProcessSummary};

/// The name of a process: `rank 3` or `pid 7`.
pub fn process_name(process: &ProcessSummary) -> String {
    match process.rank {
        Some(rank) => format!("rank {rank}"),
        None => format!("pid {}", process.pid),
    }
}

/// The name of a device: `GPU 0` or `CPU tensors`.
pub fn device_name(device: &DeviceSummary) -> String {
    if device.device < 0 { "CPU tensors".to_owned() } else { format!("GPU {}", device.device) }
}

/// Formats a device: `rank 3, GPU 0` or `pid 7, CPU tensors`.
pub fn device_text(rank: Option<u32>, pid: u32, device: i16) -> String {
    let process = rank.map_or_else(|| format!("pid {pid}"), |rank| format!("rank {rank}"));
    let device = if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") };
    format!("{process}, {device}")
}
