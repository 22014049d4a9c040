//! Draws the memory pools of JAX and CuPy: what they took from CUDA, and what is known to be in use inside them.

use memtrace_summary::{DeviceSummary, PoolAllocation, PoolSummary, count_text, size_text};

use crate::text_report::TextReport;

impl TextReport {
    /// Adds the memory pools of a device.
    pub(crate) fn pools(&mut self, device: &DeviceSummary) {
        for pool in &device.pools {
            self.labelled(&format!("{} pool", pool.library), &pool_text(pool));
        }
    }
}

fn pool_text(pool: &PoolSummary) -> String {
    let library = pool.library.as_str();
    let taken = size_text(pool.taken_peak_bytes);
    let allocations = match pool.allocations {
        1 => "1 allocation".to_owned(),
        count => format!("{} allocations", count_text(count)),
    };
    let how = match pool.allocation {
        PoolAllocation::Preallocated => {
            format!("{taken} taken from CUDA, {} of it preallocated", size_text(pool.preallocated_bytes.unwrap_or(0)))
        }
        PoolAllocation::OnDemand => format!("{taken} taken from CUDA on demand, in {allocations}"),
        PoolAllocation::EachBuffer => format!("off: each buffer is an allocation ({allocations}, peak {taken})"),
        PoolAllocation::Unknown => format!("{taken} taken from CUDA, in {allocations}"),
    };
    let used = match (pool.used_peak_bytes, pool.used_end_bytes) {
        (Some(peak), _) if pool.allocation == PoolAllocation::EachBuffer => {
            format!("; at most {} in use, as {library} reports", size_text(peak))
        }
        _ if pool.allocation == PoolAllocation::EachBuffer => String::new(),
        (Some(peak), Some(end)) => {
            format!(
                "; in use inside it at most {}, at the end {}, as {library} reports",
                size_text(peak),
                size_text(end)
            )
        }
        (_, Some(end)) => {
            let of = pool.pool_end_bytes.map(|pool| format!(" of {}", size_text(pool))).unwrap_or_default();
            format!("; in use inside it at the end {}{of}, as {library} reports", size_text(end))
        }
        _ => "; the buffers inside it are not recorded (memtrace --pools read or off)".to_owned(),
    };
    format!("{how}{used}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_summary::preallocated_text;

    #[test]
    fn a_preallocated_pool_is_never_in_use() {
        let pool = PoolSummary {
            library: "JAX".into(),
            allocation: PoolAllocation::Preallocated,
            taken_peak_bytes: 60 << 30,
            largest_bytes: 60 << 30,
            preallocated_bytes: Some(60 << 30),
            allocations: 1,
            ..PoolSummary::default()
        };
        let device = |pool: &PoolSummary| DeviceSummary {
            pools: vec![pool.clone()],
            total_bytes: Some(80 << 30),
            ..DeviceSummary::default()
        };
        let unknown = "60.0 GiB (75 % of the device) is the pool that JAX preallocates: how much of it the program \
                       used is not recorded (memtrace --pools read).";
        assert_eq!(preallocated_text(&device(&pool)).as_deref(), Some(unknown));
        assert!(pool_text(&pool).ends_with("the buffers inside it are not recorded (memtrace --pools read or off)"));
        let known = PoolSummary { used_peak_bytes: Some(3 << 30), used_end_bytes: Some(1 << 30), ..pool };
        let text = preallocated_text(&device(&known)).unwrap();
        assert!(text.ends_with("the program used at most 3.00 GiB of it."), "{text}");
        assert!(
            pool_text(&known).ends_with("at most 3.00 GiB, at the end 1.00 GiB, as JAX reports"),
            "{}",
            pool_text(&known)
        );
        let on_demand = PoolSummary { allocation: PoolAllocation::OnDemand, preallocated_bytes: None, ..known };
        assert_eq!(preallocated_text(&device(&on_demand)), None);
    }
}
