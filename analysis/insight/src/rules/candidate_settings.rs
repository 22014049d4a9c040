//! Settings of PyTorch's CUDA caching allocator that users try against fragmentation.

/// A setting to replay.
#[derive(PartialEq, Eq, Debug)]
pub struct CandidateSetting {
    /// The setting in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
    pub name: &'static str,
}

const SETTINGS: &[CandidateSetting] = &[
    CandidateSetting { name: "expandable_segments:True" },
    CandidateSetting { name: "max_split_size_mb:64" },
    CandidateSetting { name: "max_split_size_mb:256" },
    CandidateSetting { name: "roundup_power2_divisions:8" },
];

/// All settings, the one with the fewest side effects first.
pub fn candidate_settings() -> &'static [CandidateSetting] {
    SETTINGS
}
