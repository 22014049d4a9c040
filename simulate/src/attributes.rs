//! The attributes of a simulated device, with the figures of an H200-like device. `CUdevice_attribute` and
//! `cudaDeviceAttr` use the same numbers.

use crate::config::Model;

/// The maximum pitch of a copy in bytes.
pub const MAX_PITCH: i32 = i32::MAX;
/// The alignment of rows in pitched memory, in bytes.
pub const PITCH_ALIGNMENT: u64 = 512;

/// The value of an attribute. 0 for attributes that are not listed.
///
/// `physical` is the device's physical ordinal.
pub fn attribute(code: i32, physical: u32, model: &Model) -> i32 {
    let sm = model.sm;
    let limits = Limits::of(sm);
    match code {
        1..=3 => 1024,  // block: threads, x, y
        4 => 64,        // block: z
        5 => i32::MAX,  // grid: x
        6 | 7 => 65535, // grid: y, z
        8 => 49152,     // block: shared memory
        9 => 65536,     // constant memory, bytes
        10 => 32,       // warp size
        11 => MAX_PITCH,
        12 => 65536,     // block: registers
        13 => 1_980_000, // clock rate, kHz
        14 => 512,       // texture alignment, bytes
        15 => 1,         // copies overlap kernels
        16 => model.multiprocessors as i32,
        19 => 1,                   // can map host memory
        31 => 1,                   // concurrent kernels
        33 => physical as i32 + 1, // PCI bus
        36 => 2_619_000,           // memory clock rate, kHz
        37 => 5120,                // memory bus width, bits
        38 => i32::try_from(model.l2_bytes).unwrap_or(i32::MAX),
        39 => limits.threads,
        40 => 3,  // copy engines
        41 => 1,  // unified addressing
        51 => 32, // texture pitch alignment, bytes
        75 => (sm / 10) as i32,
        76 => (sm % 10) as i32,
        78 => 1, // stream priorities
        81 => limits.shared_memory + 1024 * i32::from(sm >= 80),
        82 => 65536,                // multiprocessor: registers
        83 => 1,                    // managed memory
        89 => 1,                    // concurrent managed access
        90 => 1,                    // compute preemption
        95 => 1,                    // cooperative launch
        97 => limits.shared_memory, // block: opt-in shared memory
        99 => 1,                    // host registration
        102 | 103 => 1,             // virtual memory management, file descriptor handles
        106 => limits.blocks,
        111 => 1024 * i32::from(sm >= 80), // block: reserved shared memory
        115 => 1,                          // memory pools
        119 => 1,                          // pool handle types: file descriptor
        120 => i32::from(sm >= 90),        // clusters
        125 => 1,                          // IPC events
        _ => 0,
    }
}

/// The limits of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
struct Limits {
    threads: i32,
    blocks: i32,
    /// The maximum shared memory of a block, in bytes.
    shared_memory: i32,
}

impl Limits {
    fn of(sm: u32) -> Self {
        let (threads, blocks, shared_kib) = match sm {
            ..70 => (2048, 32, 48),
            70..75 => (2048, 32, 96),
            75..80 => (1024, 16, 64),
            80 | 87 => (2048, if sm == 80 { 32 } else { 16 }, 163),
            86 => (1536, 16, 99),
            89 => (1536, 24, 99),
            90..110 => (2048, 32, 227),
            _ => (1536, 24, 99),
        };
        Limits { threads, blocks, shared_memory: shared_kib * 1024 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_by_compute_capability() {
        let model = |sm| Model { name: c"".to_owned(), sm, multiprocessors: 40, l2_bytes: 4 << 20, nvlinks: 0 };
        let of = |code: i32| [75, 80, 90, 120].map(|sm| attribute(code, 0, &model(sm)));
        assert_eq!(of(39), [1024, 2048, 2048, 1536]);
        assert_eq!(of(97), [65536, 166_912, 232_448, 101_376]);
        assert_eq!(of(81), [65536, 167_936, 233_472, 102_400]);
        assert_eq!(of(16), [40; 4]);
    }
}
