//! One device: its capacity and the memory in use.

use crate::backing::round_up;
use crate::config::{MIB, Mig, OtherProcess};
use crate::error::{Error, Result};
use crate::shared::SharedUsage;

/// The bytes of the pages of 2 MiB that small allocations of so many bytes fill.
fn pages(small: u64) -> u64 {
    round_up(small, 2 * MIB)
}

/// The exact accounting of a device's memory, in bytes.
#[derive(Clone, Debug)]
pub struct Device {
    /// The ordinal on the host, before `CUDA_VISIBLE_DEVICES`. The names, UUID and PCI address derive from it.
    pub physical: u32,
    total: u64,
    used: u64,
    peak: u64,
    shared: Option<SharedUsage>,
    /// Processes that are no part of the simulation: their ids and bytes.
    others: Vec<(u32, u64)>,
    /// The bytes of small allocations, where these share pages.
    small: Option<u64>,
    /// Whether allocations beyond the capacity succeed, as where the driver has memory of the host for them.
    spills: bool,
    /// Whether the primary context exists.
    pub primary_active: bool,
    /// When all work issued to the device so far is done, in nanoseconds of virtual time.
    pub busy_until: u64,
}

impl Device {
    /// Creates a device with `total` bytes, of which this process uses none. With `shared`, other processes can use
    /// some.
    pub fn new(physical: u32, total: u64, shared: Option<SharedUsage>) -> Self {
        Device {
            physical,
            total,
            used: 0,
            peak: 0,
            shared,
            others: Vec::new(),
            small: None,
            spills: false,
            primary_active: false,
            busy_until: 0,
        }
    }

    /// Adds the processes of others that use this device.
    pub fn with_others(mut self, processes: &[OtherProcess], mig: Mig) -> Self {
        let is_here = |process: &&OtherProcess| process.device == self.physical && process.shares_memory(mig);
        let own = processes.iter().filter(is_here);
        self.others = own.map(|process| (process.pid, process.bytes)).collect();
        self
    }

    /// Makes small allocations share pages of 2 MiB, as the real driver does, if `shares`.
    pub fn with_shared_pages(mut self, shares: bool) -> Self {
        self.small = shares.then_some(0);
        self
    }

    /// Lets allocations beyond the capacity succeed, if `spills`. The free memory stays 0 then.
    pub fn with_spilling(mut self, spills: bool) -> Self {
        self.spills = spills;
        self
    }

    /// The capacity in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The bytes that this process uses now.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// The maximum of bytes that this process used so far.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// The processes that use the device, and the bytes that each uses. Only this one if the device is not shared.
    pub fn processes(&self) -> Vec<(u32, u64)> {
        let shared = self.shared.as_ref().and_then(|shared| shared.of_device(self.physical).ok());
        let own = || if self.used > 0 { vec![(std::process::id(), self.used)] } else { Vec::new() };
        shared.unwrap_or_else(own).into_iter().chain(self.others.iter().copied()).collect()
    }

    /// The free bytes.
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.processes().iter().map(|(_, used)| used).sum())
    }

    /// Uses `bytes`. Fails without using any if not enough is free.
    pub fn take(&mut self, bytes: u64) -> Result<()> {
        let on_device = self.total.saturating_sub(self.others.iter().map(|(_, bytes)| bytes).sum());
        let capacity = if self.spills { u64::MAX } else { on_device };
        let shared = self.shared.as_mut().and_then(|shared| shared.take(self.physical, bytes, capacity).ok());
        // Without a file, as when the folder of the run was removed, the process has the device for itself.
        shared.unwrap_or(if bytes > capacity.saturating_sub(self.used) { Err(Error::OutOfMemory) } else { Ok(()) })?;
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
    }

    /// Uses the bytes of one allocation, of which small ones may share pages. Fails and takes nothing when not enough
    /// is free.
    pub fn take_block(&mut self, bytes: u64) -> Result<()> {
        match self.small {
            Some(small) if bytes <= MIB => {
                self.take(pages(small + bytes) - pages(small))?;
                self.small = Some(small + bytes);
                Ok(())
            }
            _ => self.take(bytes),
        }
    }

    /// Returns the bytes of an allocation that were taken by [`Self::take_block`].
    pub fn give_block(&mut self, bytes: u64) {
        match self.small {
            Some(small) if bytes <= MIB => {
                let rest = small.saturating_sub(bytes);
                self.give(pages(small) - pages(rest));
                self.small = Some(rest);
            }
            _ => self.give(bytes),
        }
    }

    /// Returns bytes that were taken.
    pub fn give(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used, "more given back than taken");
        self.used = self.used.saturating_sub(bytes);
        if let Some(shared) = &mut self.shared {
            // Without the file there is nobody to share with.
            shared.give(self.physical, bytes).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_request_uses_no_memory() {
        let mut device = Device::new(0, 100, None);
        assert_eq!(device.take(60), Ok(()));
        assert_eq!(device.take(41), Err(Error::OutOfMemory));
        assert_eq!(device.take(40), Ok(()));
        assert_eq!((device.used(), device.free(), device.peak()), (100, 0, 100));
        device.give(70);
        assert_eq!((device.used(), device.peak()), (30, 100));
        assert_eq!(device.take(u64::MAX), Err(Error::OutOfMemory));
    }

    #[test]
    fn others_use_capacity() {
        let others = [(7, 30, 0), (8, 50, 1)];
        let others = others.map(|(pid, bytes, device)| {
            let (name, instance, is_mps) = (String::new(), None, false);
            OtherProcess { pid, name, bytes, device, instance, is_mps }
        });
        let mut device = Device::new(0, 100, None).with_others(&others, Mig::Off);
        assert_eq!((device.free(), device.used()), (70, 0));
        assert_eq!(device.take(71), Err(Error::OutOfMemory));
        assert_eq!(device.take(70), Ok(()));
        assert_eq!(device.processes(), [(std::process::id(), 70), (7, 30)]);
    }

    #[test]
    fn allocations_beyond_the_capacity_spill() {
        let mut device = Device::new(0, 100, None).with_spilling(true);
        assert_eq!(device.take(130), Ok(()));
        assert_eq!((device.free(), device.used(), device.total()), (0, 130, 100));
        device.give(40);
        assert_eq!(device.free(), 10);
    }

    #[test]
    fn small_allocations_share_pages() {
        let mut device = Device::new(0, 100 * MIB, None).with_shared_pages(true);
        for _ in 0..3 {
            assert_eq!(device.take_block(MIB), Ok(()));
        }
        assert_eq!(device.take_block(2 * MIB), Ok(()));
        assert_eq!(device.used(), 6 * MIB);
        device.give_block(MIB);
        assert_eq!(device.used(), 4 * MIB);
        let mut plain = Device::new(0, 100 * MIB, None);
        assert_eq!(plain.take_block(512), Ok(()));
        assert_eq!(plain.used(), 512);
    }
}
