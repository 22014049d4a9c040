//! The memory that other recorded processes of a run had on the device when a request failed.
//!
//! CUDA reports the free bytes only. A process of the same run that shares the GPU, such as the trainer beside an
//! engine, shows what it had in use and what it merely cached.

use memtrace_insight::units::size_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The memory of another process of the run on the device.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ProcessBeside {
    /// The process id.
    pub pid: u32,
    /// The name of the process in texts: its rank or its process id.
    pub name: String,
    /// The bytes that its PyTorch had reserved.
    pub reserved_bytes: u64,
    /// The bytes of them that were in use.
    pub allocated_bytes: u64,
}

impl ProcessBeside {
    /// The bytes that its allocator cached.
    fn cached_bytes(&self) -> u64 {
        self.reserved_bytes.saturating_sub(self.allocated_bytes)
    }

    /// The sentence about a cache that would have served a request which lacked `short` bytes. `None` if it would not.
    fn cache_sentence(&self, short: u64) -> Option<String> {
        let cached = self.cached_bytes();
        (cached > 0 && cached >= short).then(|| {
            format!(
                "{} caches {} of its {}, which only it can use: call torch.cuda.empty_cache() there before this \
                 process allocates",
                self.name,
                size_text(cached),
                size_text(self.reserved_bytes)
            )
        })
    }
}

/// The clause about the others: the cache that would have served the request, else who had most.
pub(crate) fn text(others: &[ProcessBeside], short: u64) -> Option<String> {
    let cache = others.iter().max_by_key(|other| other.cached_bytes())?.cache_sentence(short);
    let most = || {
        let most = others.iter().max_by_key(|other| other.reserved_bytes)?;
        Some(format!("{} has {} of it", most.name, size_text(most.reserved_bytes)))
    };
    cache.or_else(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(pid: u32, reserved: u64, allocated: u64) -> ProcessBeside {
        ProcessBeside {
            pid,
            name: format!("pid {pid}"),
            reserved_bytes: reserved << 20,
            allocated_bytes: allocated << 20,
        }
    }

    #[test]
    fn a_cache_is_named_if_it_would_have_served_the_request() {
        let trainer = other(7, 2794, 641);
        let text = |others: &[ProcessBeside], short: u64| text(others, short << 20).unwrap();
        assert_eq!(
            text(&[trainer.clone(), other(8, 100, 100)], 234),
            "pid 7 caches 2.10 GiB of its 2.73 GiB, which only it can use: call torch.cuda.empty_cache() there before \
             this process allocates"
        );
        assert_eq!(text(&[trainer], 4096), "pid 7 has 2.73 GiB of it");
        assert_eq!(text(&[other(9, 512, 512)], 1), "pid 9 has 512 MiB of it");
    }

    #[test]
    fn without_others_there_is_nothing_to_say() {
        assert_eq!(super::text(&[], 1), None);
    }
}
