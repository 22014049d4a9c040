//! Stream-ordered memory pools: how much device memory they reserve, and how much of it is in use.
//!
//! Only amounts are simulated, and every allocation has an address of its own. A pool grows in steps of 32
//! MiB, also when the device has less left: then it does not grow (driver 580, H200). It keeps freed memory until it is
//! trimmed, or until a synchronization finds more reserved memory than the release threshold.

use crate::backing::round_up;
use crate::config::MIB;
use crate::device::Device;
use crate::error::Result;

const STEP: u64 = 32 * MIB;
/// The memory left by a trim is a multiple of this.
const PAGE: u64 = 2 * MIB;

/// One pool.
#[derive(Clone, Debug)]
pub struct Pool {
    /// The device ordinal.
    pub device: usize,
    /// The release threshold in bytes: the memory that the pool may keep reserved at a synchronization.
    pub threshold: u64,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
}

/// The counters of `cuMemPoolGetAttribute`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// In use now.
    pub used: u64,
    /// The maximum in use since the last reset.
    pub used_high: u64,
    /// Reserved from the device now.
    pub reserved: u64,
    /// The maximum reserved since the last reset.
    pub reserved_high: u64,
}

impl Pool {
    /// Creates an empty pool on a device.
    pub fn new(device: usize) -> Self {
        Pool { device, threshold: 0, used: 0, used_high: 0, reserved: 0, reserved_high: 0 }
    }

    /// Uses `bytes` for an allocation. Grows the pool from its device when needed.
    pub fn take(&mut self, bytes: u64, device: &mut Device) -> Result<()> {
        let need = self.used.saturating_add(bytes);
        if need > self.reserved {
            let grown = round_up(need, STEP) - self.reserved;
            device.take(grown)?;
            self.reserved += grown;
            self.reserved_high = self.reserved_high.max(self.reserved);
        }
        self.used = need;
        self.used_high = self.used_high.max(need);
        Ok(())
    }

    /// Returns the bytes of a freed allocation to the pool.
    pub fn give(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used, "more given back than taken");
        self.used = self.used.saturating_sub(bytes);
    }

    /// Returns the memory beyond the release threshold to the device, after the host has waited for the device.
    pub fn synchronized(&mut self, device: &mut Device) {
        if self.threshold < self.reserved {
            self.trim(self.threshold, device);
        }
    }

    /// Returns unused memory to the device until only `keep` bytes are reserved.
    pub fn trim(&mut self, keep: u64, device: &mut Device) {
        let want = round_up(self.used, PAGE).max(keep);
        if self.reserved > want {
            device.give(self.reserved - want);
            self.reserved = want;
        }
    }

    /// The counters.
    pub fn usage(&self) -> Usage {
        Usage { used: self.used, used_high: self.used_high, reserved: self.reserved, reserved_high: self.reserved_high }
    }

    /// Resets the maximum of reserved memory to the current amount.
    pub fn reset_reserved_high(&mut self) {
        self.reserved_high = self.reserved;
    }

    /// Resets the maximum of used memory to the current amount.
    pub fn reset_used_high(&mut self) {
        self.used_high = self.used;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_pool_grows_by_whole_steps() {
        let mut device = Device::new(0, 63 * MIB, None);
        let mut pool = Pool::new(0);
        pool.take(1, &mut device).unwrap();
        assert_eq!(device.used(), 32 * MIB);
        assert!(pool.take(32 * MIB, &mut device).is_err(), "31 MiB are no step");
        assert_eq!(device.used(), 32 * MIB);
        pool.give(1);
        assert_eq!(device.used(), 32 * MIB, "kept until somebody waits");
        pool.synchronized(&mut device);
        assert_eq!(device.used(), 0, "threshold 0 keeps nothing");
    }

    proptest! {
        /// The reserved memory equals the memory taken from the device, and it always covers the memory in use.
        #[test]
        fn reserved_memory_equals_the_memory_taken_from_the_device(
            steps in prop::collection::vec((any::<bool>(), 1..80u64), 1..100),
            threshold in 0..200u64,
        ) {
            let mut device = Device::new(0, 256 * MIB, None);
            let mut pool = Pool::new(0);
            pool.threshold = threshold * MIB;
            let mut live: Vec<u64> = Vec::new();
            for (alloc, n) in steps {
                if alloc {
                    if pool.take(n * MIB, &mut device).is_ok() {
                        live.push(n * MIB);
                    }
                } else if !live.is_empty() {
                    let bytes = live.swap_remove(n as usize % live.len());
                    pool.give(bytes);
                    if n % 3 == 0 {
                        pool.synchronized(&mut device);
                        prop_assert!(pool.usage().reserved <= pool.threshold.max(round_up(pool.usage().used, PAGE)));
                    }
                }
                let usage = pool.usage();
                prop_assert_eq!(usage.used, live.iter().sum::<u64>());
                prop_assert_eq!(usage.reserved, device.used());
                prop_assert!(usage.used <= usage.reserved);
            }
        }
    }
}
