//! The multiprocessors of NVIDIA's GPUs.

/// Parts of the names of GPUs, and their multiprocessors (NVIDIA's data sheets). The first that matches counts.
static MULTIPROCESSORS: &[(&str, u32)] = &[
    ("H100 PCIe", 114),
    ("H100", 132),
    ("H200", 132),
    ("H20", 78),
    ("A100", 108),
    ("L40", 142),
    ("L4", 58),
    ("A10G", 80),
    ("A10", 72),
    ("T4", 40),
    ("V100", 80),
    ("GB200", 152),
    ("B200", 148),
    ("A6000", 84),
    ("RTX 3090", 82),
    ("RTX 5090", 170),
];

/// The multiprocessors of the GPU with this name, as CUDA gives it. `None` if the model is not known.
pub fn multiprocessors(name: &str) -> Option<u32> {
    MULTIPROCESSORS.iter().find(|(part, _)| name.contains(part)).map(|(_, count)| *count)
}
