//! One device: its capacity and the memory in use.

use crate::error::{Error, Result};

/// The exact accounting of a device's memory, in bytes.
#[derive(Clone, Debug)]
pub struct Device {
    /// The ordinal on the host, before `CUDA_VISIBLE_DEVICES`. The names, UUID and PCI address derive from it.
    pub physical: u32,
    total: u64,
    used: u64,
    peak: u64,
    /// Whether the primary context exists.
    pub primary_active: bool,
    /// When all work issued to the device so far is done, in nanoseconds of virtual time.
    pub busy_until: u64,
}

impl Device {
    /// Creates a device with `total` bytes, all free.
    pub fn new(physical: u32, total: u64) -> Self {
        Device { physical, total, used: 0, peak: 0, primary_active: false, busy_until: 0 }
    }

    /// The capacity in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The bytes in use now.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// The maximum of bytes in use so far.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// The free bytes.
    pub fn free(&self) -> u64 {
        self.total - self.used
    }

    /// Takes `bytes`. Fails and takes nothing when not enough is free.
    pub fn take(&mut self, bytes: u64) -> Result<()> {
        if bytes > self.free() {
            return Err(Error::OutOfMemory);
        }
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
    }

    /// Returns bytes that were taken.
    pub fn give(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used, "more given back than taken");
        self.used = self.used.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_request_uses_no_memory() {
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
