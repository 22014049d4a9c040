//! The memory pools of JAX and CuPy: what they took from CUDA, and what is known to be in use inside them.
//!
//! CUDA calls show the large pieces that a pool takes, not the buffers inside. JAX takes most of the device when it
//! starts, so that memory is never reported as in use by the program without this remark.

use std::collections::BTreeMap;

use memtrace_input::load::Process;
use memtrace_input::pool_figures::{PoolFigure, PoolFigures};
use memtrace_insight::passes::Analysis;
use memtrace_replay::{MemoryLocation, Owner};

use crate::pools::{PoolAllocation, PoolSummary};
use crate::summary::{DeviceSummary, OwnerSummary};

/// The share of the device that JAX takes unless the program says otherwise.
const JAX_FRACTION: f64 = 0.75;
/// How far the first allocation can be from that share, as a share of the device.
const TOLERANCE: f64 = 0.01;

/// Adds the pools to the devices of a process.
pub(crate) fn add_pools(process: &Process, analysis: &Analysis, figures: &PoolFigures, devices: &mut [DeviceSummary]) {
    for device in devices {
        let mut largest: BTreeMap<&str, u64> = BTreeMap::new();
        for ((location, owner), usage) in &analysis.owners {
            if let (MemoryLocation::Device(number), Owner::Module(id)) = (location, owner)
                && *number == device.device
            {
                let object = process.definitions().module(*id).unwrap_or_default();
                let largest = largest.entry(object).or_default();
                *largest = usage.largest.max(*largest);
            }
        }
        let query = PoolQuery {
            owners: &device.owners,
            largest,
            environment: &process.info().env,
            total_bytes: device.total_bytes,
            figures: figures.pools.iter().filter(|figure| figure.device == device.device).collect(),
        };
        device.pools = query.pools();
    }
}

/// The pools of one device.
struct PoolQuery<'a> {
    /// The owners of the device's memory.
    owners: &'a [OwnerSummary],
    /// The largest allocation of each owner's object.
    largest: BTreeMap<&'a str, u64>,
    /// The environment variables with which the process started.
    environment: &'a BTreeMap<String, String>,
    /// The memory of the device.
    total_bytes: Option<u64>,
    /// The figures that the libraries reported about this device.
    figures: Vec<&'a PoolFigure>,
}

impl PoolQuery<'_> {
    /// The pools, the one with the most memory first.
    fn pools(&self) -> Vec<PoolSummary> {
        let mut pools: Vec<PoolSummary> = ["JAX", "CuPy"].iter().filter_map(|library| self.pool(library)).collect();
        pools.sort_by_key(|pool| std::cmp::Reverse(pool.taken_peak_bytes));
        pools
    }

    fn pool(&self, library: &str) -> Option<PoolSummary> {
        let mut pool = PoolSummary { library: library.to_owned(), ..PoolSummary::default() };
        for owner in self.owners.iter().filter(|owner| owner.owner == library) {
            pool.taken_peak_bytes = pool.taken_peak_bytes.saturating_add(owner.peak_bytes);
            pool.taken_end_bytes = pool.taken_end_bytes.saturating_add(owner.end_bytes);
            pool.allocations = pool.allocations.saturating_add(owner.allocations);
            let largest = owner.object.as_deref().and_then(|object| self.largest.get(object));
            pool.largest_bytes = pool.largest_bytes.max(largest.copied().unwrap_or(0));
        }
        if pool.allocations == 0 {
            return None;
        }
        if let Some(figure) = self.figures.iter().find(|figure| figure.library == library) {
            pool.used_peak_bytes = figure.used_peak_bytes;
            pool.used_end_bytes = figure.used_bytes;
            pool.pool_end_bytes = figure.pool_bytes;
        }
        if library == "JAX" {
            pool.preallocated_bytes = self.jax_preallocation(&pool);
            pool.allocation = self.jax(&pool);
        } else {
            pool.allocation = self.cupy();
        }
        Some(pool)
    }

    fn variable(&self, name: &str) -> Option<String> {
        self.environment.get(name).map(|value| value.to_ascii_lowercase())
    }

    fn jax(&self, pool: &PoolSummary) -> PoolAllocation {
        let preallocates = self.variable("XLA_PYTHON_CLIENT_PREALLOCATE");
        match self.variable("XLA_PYTHON_CLIENT_ALLOCATOR").as_deref() {
            Some("platform" | "cuda_async") => PoolAllocation::EachBuffer,
            _ if pool.preallocated_bytes.is_some() => PoolAllocation::Preallocated,
            // A program can set the variables itself, after it started. What it allocated decides then.
            _ if preallocates.is_some_and(|value| value == "false" || value == "0") => PoolAllocation::OnDemand,
            _ if pool.allocations > 1 => PoolAllocation::OnDemand,
            _ => PoolAllocation::Unknown,
        }
    }

    /// The size of the largest allocation, if it has the share of the device that JAX takes when it starts.
    fn jax_preallocation(&self, pool: &PoolSummary) -> Option<u64> {
        let preallocates = self.variable("XLA_PYTHON_CLIENT_PREALLOCATE");
        if preallocates.is_some_and(|value| value == "false" || value == "0") {
            return None;
        }
        let fractions = ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"];
        // Rust's parser takes `.9` as C's does.
        let fraction = fractions.iter().find_map(|name| self.variable(name)?.parse::<f64>().ok());
        let share = pool.largest_bytes as f64 / self.total_bytes.filter(|total| *total > 0)? as f64;
        ((share - fraction.unwrap_or(JAX_FRACTION)).abs() <= TOLERANCE).then_some(pool.largest_bytes)
    }

    fn cupy(&self) -> PoolAllocation {
        match self.figures.iter().find(|figure| figure.library == "CuPy").map(|figure| figure.allocator.as_str()) {
            Some("MemoryPool") => PoolAllocation::OnDemand,
            // CuPy's own function for single allocations belongs to a module.
            Some("MemoryAsyncPool" | "module") => PoolAllocation::EachBuffer,
            _ => PoolAllocation::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(peak: u64, allocations: u64, variables: &[(&str, &str)], figure: Option<PoolFigure>) -> PoolSummary {
        let owner = OwnerSummary {
            owner: "JAX".into(),
            object: Some("/x/xla_cuda_plugin.so".into()),
            end_bytes: peak,
            peak_bytes: peak,
            allocations,
        };
        let environment = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let query = PoolQuery {
            owners: &[owner],
            largest: [("/x/xla_cuda_plugin.so", peak / allocations)].into(),
            environment: &environment,
            total_bytes: Some(1000),
            figures: figure.iter().collect(),
        };
        query.pools().remove(0)
    }

    #[test]
    fn a_preallocated_pool_is_recognized_by_its_share_of_the_device() {
        let kind = |peak, allocations, variables: &[_]| pool(peak, allocations, variables, None).allocation;
        assert_eq!(kind(750, 1, &[]), PoolAllocation::Preallocated);
        assert_eq!(kind(200, 1, &[("XLA_PYTHON_CLIENT_MEM_FRACTION", ".20")]), PoolAllocation::Preallocated);
        assert_eq!(kind(200, 1, &[("XLA_CLIENT_MEM_FRACTION", "0.2")]), PoolAllocation::Preallocated);
        assert_eq!(kind(200, 1, &[]), PoolAllocation::Unknown);
        assert_eq!(kind(200, 4, &[]), PoolAllocation::OnDemand);
        assert_eq!(kind(750, 1, &[("XLA_PYTHON_CLIENT_PREALLOCATE", "False")]), PoolAllocation::OnDemand);
        assert_eq!(kind(750, 9, &[("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")]), PoolAllocation::EachBuffer);
        // The stream-ordered allocator takes the share at the start too, and gives it back.
        let share = |variables: &[_]| pool(750, 1, variables, None).preallocated_bytes;
        assert_eq!(share(&[("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")]), Some(750));
        assert_eq!(share(&[("XLA_PYTHON_CLIENT_PREALLOCATE", "false")]), None);
    }

    #[test]
    fn figures_belong_to_their_library() {
        let figure = |library: &str| PoolFigure {
            library: library.into(),
            used_bytes: Some(3),
            used_peak_bytes: Some(7),
            ..PoolFigure::default()
        };
        let own = pool(750, 1, &[], Some(figure("JAX")));
        assert_eq!((own.used_end_bytes, own.used_peak_bytes, own.taken_peak_bytes), (Some(3), Some(7), 750));
        let other = pool(750, 1, &[], Some(figure("CuPy")));
        assert_eq!((other.used_end_bytes, other.used_peak_bytes), (None, None));
    }
}
