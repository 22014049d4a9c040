//! The figures of `torch.cuda.memory_stats`, computed from the recording.

use std::collections::BTreeMap;

use memtrace_insight::passes::{Figure, LineStatistics, Statistics, Stats};

/// The pools of PyTorch's allocator in `torch.cuda.memory_stats`: all, those of large blocks, those of small blocks.
pub const POOLS: [&str; 3] = ["all", "large_pool", "small_pool"];
/// The values of each figure in `torch.cuda.memory_stats`.
pub const COLUMNS: [&str; 4] = ["current", "peak", "allocated", "freed"];

/// The figures by their keys in `torch.cuda.memory_stats`.
pub(crate) fn by_key(statistics: &Statistics, ooms: u64) -> BTreeMap<String, u64> {
    let mut keys = BTreeMap::from([("num_ooms".to_owned(), ooms)]);
    keys.extend(of_pools([&statistics.all, &statistics.large, &statistics.small]));
    keys
}

/// The figures of a line by the same keys.
pub(crate) fn of_line(statistics: &LineStatistics) -> BTreeMap<String, u64> {
    of_pools(statistics.pools.each_ref()).into_iter().collect()
}

fn of_pools(pools: [&Stats; 3]) -> Vec<(String, u64)> {
    let mut keys = Vec::new();
    for (pool, stats) in POOLS.iter().zip(pools) {
        for (figure, stat) in Figure::ALL.iter().zip(stats) {
            for (column, value) in COLUMNS.iter().zip([stat.current, stat.peak, stat.allocated, stat.freed]) {
                keys.push((format!("{}.{pool}.{column}", figure.name()), value));
            }
        }
    }
    keys
}
