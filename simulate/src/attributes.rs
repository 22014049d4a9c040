//! The attributes of a simulated device, with the figures of an H200-like device. `CUdevice_attribute` and
//! `cudaDeviceAttr` use the same numbers.

/// The device's name.
pub const NAME: &std::ffi::CStr = c"Simulated CUDA device";
/// The size of the L2 cache in bytes.
pub const L2_CACHE_BYTES: i32 = 50 << 20;
/// The number of multiprocessors.
pub const MULTIPROCESSORS: i32 = 132;
/// The maximum pitch of a copy in bytes.
pub const MAX_PITCH: i32 = i32::MAX;
/// The alignment of rows in pitched memory, in bytes.
pub const PITCH_ALIGNMENT: u64 = 512;

/// The value of an attribute. 0 for attributes that are not listed.
///
/// `physical` is the device's physical ordinal, and `sm` is the compute capability times ten.
pub fn attribute(code: i32, physical: u32, sm: u32) -> i32 {
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
        16 => MULTIPROCESSORS,
        19 => 1,                   // can map host memory
        31 => 1,                   // concurrent kernels
        33 => physical as i32 + 1, // PCI bus
        36 => 2_619_000,           // memory clock rate, kHz
        37 => 5120,                // memory bus width, bits
        38 => L2_CACHE_BYTES,
        39 => 2048, // multiprocessor: threads
        40 => 3,    // copy engines
        41 => 1,    // unified addressing
        51 => 32,   // texture pitch alignment, bytes
        75 => (sm / 10) as i32,
        76 => (sm % 10) as i32,
        78 => 1,                    // stream priorities
        81 => 233_472,              // multiprocessor: shared memory
        82 => 65536,                // multiprocessor: registers
        83 => 1,                    // managed memory
        89 => 1,                    // concurrent managed access
        90 => 1,                    // compute preemption
        95 => 1,                    // cooperative launch
        97 => 232_448,              // block: opt-in shared memory
        99 => 1,                    // host registration
        102 | 103 => 1,             // virtual memory management, file descriptor handles
        106 => 32,                  // multiprocessor: blocks
        111 => 1024,                // block: reserved shared memory
        115 => 1,                   // memory pools
        119 => 1,                   // pool handle types: file descriptor
        120 => i32::from(sm >= 90), // clusters
        125 => 1,                   // IPC events
        _ => 0,
    }
}
