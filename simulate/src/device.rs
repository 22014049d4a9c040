//! One device: its capacity and the memory in use.

use crate::error::{Error, Result};
use crate::shared::SharedUsage;

/// The UUID of a device: "simcuda", zeros, and the physical ordinal.
pub fn uuid(physical: u32) -> [u8; 16] {
    let mut uuid = *b"simcuda\0\0\0\0\0\0\0\0\0";
    uuid[15] = physical as u8;
    uuid
}

/// The UUID of a device as `nvidia-smi -L` prints it, which `CUDA_VISIBLE_DEVICES` accepts.
pub fn uuid_text(physical: u32) -> String {
    let hex: String = uuid(physical).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
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
    /// Whether the primary context exists.
    pub primary_active: bool,
    /// When all work issued to the device so far is done, in nanoseconds of virtual time.
    pub busy_until: u64,
}

impl Device {
    /// Creates a device with `total` bytes, of which this process uses none. With `shared`, other processes can use some.
    pub fn new(physical: u32, total: u64, shared: Option<SharedUsage>) -> Self {
        Device { physical, total, used: 0, peak: 0, shared, primary_active: false, busy_until: 0 }
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
        shared.unwrap_or_else(|| if self.used > 0 { vec![(std::process::id(), self.used)] } else { Vec::new() })
    }

    /// The free bytes.
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.processes().iter().map(|(_, used)| used).sum())
    }

    /// Takes `bytes`. Fails and takes nothing when not enough is free.
    pub fn take(&mut self, bytes: u64) -> Result<()> {
        let shared = self.shared.as_mut().and_then(|shared| shared.take(self.physical, bytes, self.total).ok());
        // Without a file, as when the folder of the run was removed, the process has the device for itself.
        shared.unwrap_or(if bytes > self.total - self.used { Err(Error::OutOfMemory) } else { Ok(()) })?;
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
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
    fn the_uuid_as_text() {
        assert_eq!(uuid_text(10), "GPU-73696d63-7564-6100-0000-00000000000a");
    }
}
