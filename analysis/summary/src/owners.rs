//! Who has allocated memory from CUDA, by name.

use memtrace_insight::rules::library_name;
use memtrace_replay::{DeviceAllocations, Owner};
use memtrace_trace::file::Definitions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The name in reports for the memory of stream-ordered pools that is not in use.
pub(crate) const UNUSED_POOLS: &str = "unused memory of stream-ordered pools";
/// The name in reports for the part of the driver's pages beyond the allocations in them.
pub(crate) const ROUNDING: &str = "rounding to the driver's pages";

/// Memory outside PyTorch's caching allocator.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OwnerBytes {
    /// The library that allocated the memory from CUDA, for example `NCCL` or `cuBLAS`.
    pub owner: String,
    /// The bytes of the memory.
    pub bytes: u64,
}

/// The name of an owner.
pub(crate) fn owner_name(owner: Owner, definitions: &Definitions) -> &str {
    match owner {
        Owner::CachingAllocator => "PyTorch's caching allocator",
        Owner::Module(id) => library_name(definitions.module(id).unwrap_or_default()),
    }
}

/// The bytes by the owner's name, most bytes first. Several objects of one library are one.
pub(crate) fn by_owner(held: impl Iterator<Item = (Owner, u64)>, definitions: &Definitions) -> Vec<OwnerBytes> {
    let mut all: Vec<OwnerBytes> = Vec::new();
    for (owner, bytes) in held {
        let name = owner_name(owner, definitions);
        match all.iter_mut().find(|one| one.owner == name) {
            Some(one) => one.bytes += bytes,
            None => all.push(OwnerBytes { owner: name.to_owned(), bytes }),
        }
    }
    all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.owner.cmp(&b.owner)));
    all
}

/// The names of libraries and what they have allocated on a device. Managed memory may be on the host, so it does not
/// count.
pub(crate) fn library_bytes<'a>(
    allocations: &DeviceAllocations,
    definitions: &'a Definitions,
) -> impl Iterator<Item = (&'a str, u64)> {
    let mut managed = allocations.managed;
    allocations.by_owner.iter().filter(|(owner, _)| *owner != Owner::CachingAllocator).map(move |(owner, bytes)| {
        let on_host = managed.min(*bytes);
        managed -= on_host;
        (owner_name(*owner, definitions), bytes - on_host)
    })
}
