//! One device: its capacity and what is taken of it.

use crate::error::{Error, Result};

/// Exact accounting of a device's memory, in bytes.
#[derive(Clone, Debug)]
pub struct Device {
    /// Ordinal on the host, before `CUDA_VISIBLE_DEVICES`: names, UUID and PCI address come from it.
    pub physical: u32,
    total: u64,
    used: u64,
    peak: u64,
    /// Whether the primary context exists.
    pub primary_active: bool,
    /// When all work given to the device so far is done (virtual time, nanoseconds).
    pub busy_until: u64,
}

impl Device {
    /// An empty device.
    pub fn new(physical: u32, total: u64) -> Self {
        Device { physical, total, used: 0, peak: 0, primary_active: false, busy_until: 0 }
    }

    /// Capacity.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Taken now.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Most taken at any time.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// Left.
    pub fn free(&self) -> u64 {
        self.total - self.used
    }

    /// Takes memory, or nothing at all.
    pub fn take(&mut self, bytes: u64) -> Result<()> {
        if bytes > self.free() {
            return Err(Error::OutOfMemory);
        }
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
    }

    /// Gives memory back that was taken.
    pub fn give(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used, "more given back than taken");
        self.used = self.used.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_request_takes_nothing() {
        let mut device = Device::new(0, 100);
        assert_eq!(device.take(60), Ok(()));
        assert_eq!(device.take(41), Err(Error::OutOfMemory));
        assert_eq!(device.take(40), Ok(()));
        assert_eq!((device.used(), device.free(), device.peak()), (100, 0, 100));
        device.give(70);
        assert_eq!((device.used(), device.peak()), (30, 100));
        assert_eq!(device.take(u64::MAX), Err(Error::OutOfMemory));
    }
}
