//! Settings of PyTorch's CUDA caching allocator that users try against fragmentation.

/// A setting to replay.
#[derive(PartialEq, Eq, Debug)]
pub struct AllocatorSetting {
    /// The setting in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
    pub name: &'static str,
}

const SETTINGS: &[AllocatorSetting] = &[
    AllocatorSetting { name: "expandable_segments:True" },
    AllocatorSetting { name: "max_split_size_mb:64" },
    AllocatorSetting { name: "max_split_size_mb:256" },
    AllocatorSetting { name: "roundup_power2_divisions:8" },
];

/// All settings, the one with the fewest side effects first.
pub fn allocator_settings() -> &'static [AllocatorSetting] {
    SETTINGS
}
