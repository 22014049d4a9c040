//! All address ranges of the process: their kind, and their cost to a device.

use crate::backing::{self, Backing, Extent};
use crate::config::MIB;
use crate::error::{Error, Result};
use crate::ranges::RangeMap;

/// The kind of an address range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc` and its variants.
    Device,
    /// Stream-ordered memory from the pool with this handle.
    Pooled(u64),
    /// `cuMemAllocManaged`. It takes no device memory.
    Managed,
    /// Page-locked host memory that the simulation allocated.
    Host,
    /// The program's own host memory, registered.
    Registered,
    /// Reserved addresses. [`crate::vmm`] knows the memory that is mapped in them.
    Reserved,
    /// Device memory of another process, opened through IPC.
    Imported,
    /// A `__device__` variable.
    Symbol,
}

/// One address range.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// The device ordinal.
    pub device: usize,
    /// The kind of memory.
    pub kind: Kind,
    /// The bytes charged to its device or pool.
    pub charged: u64,
    extent: Option<Extent>,
}

/// A freed range, for the accounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The size in bytes that the program had requested.
    pub size: u64,
    /// The device ordinal.
    pub device: usize,
    /// The kind of memory.
    pub kind: Kind,
    /// The bytes that were charged.
    pub charged: u64,
}

/// The address ranges of the process.
#[derive(Debug, Default)]
pub struct Memory {
    ranges: RangeMap<Allocation>,
    backing: Backing,
}

/// The device memory that an allocation of `size` bytes takes: whole 2 MiB pages, or 512-byte units for requests below
/// 1 MiB.
pub fn charge(size: u64) -> u64 {
    backing::round_up(size, if size >= MIB { 2 * MIB } else { 512 })
}

fn no_memory(_: std::io::Error) -> Error {
    Error::OutOfMemory
}

impl Memory {
    /// Maps device memory and registers it. The caller has charged the device and refunds it if this fails.
    pub fn allocate(&mut self, size: u64, device: usize, kind: Kind, charged: u64) -> Result<u64> {
        let extent = self.backing.extent(size).map_err(no_memory)?;
        let base = backing::map(&extent, if size >= MIB { 2 * MIB } else { 4096 }).map_err(no_memory)?;
        self.enter(base, size, Allocation { device, kind, charged, extent: Some(extent) })
    }

    /// Maps page-locked host memory.
    pub fn allocate_host(&mut self, size: u64, device: usize) -> Result<u64> {
        let base = backing::host(size).map_err(no_memory)?;
        self.enter(base, size, Allocation { device, kind: Kind::Host, charged: 0, extent: None })
    }

    /// Reserves addresses.
    pub fn reserve(&mut self, size: u64, align: u64, device: usize) -> Result<u64> {
        let base = backing::reserve(size, align).map_err(no_memory)?;
        self.enter(base, size, Allocation { device, kind: Kind::Reserved, charged: 0, extent: None })
    }

    /// Maps memory of another process.
    pub fn import(&mut self, extent: Extent, device: usize) -> Result<u64> {
        let base = backing::map(&extent, 2 * MIB).map_err(|_| Error::MapFailed)?;
        let size = extent.size;
        self.enter(base, size, Allocation { device, kind: Kind::Imported, charged: 0, extent: Some(extent) })
    }

    fn enter(&mut self, base: u64, size: u64, allocation: Allocation) -> Result<u64> {
        let mapped = backing::round_up(size, backing::PAGE);
        match self.ranges.insert(base, size, allocation) {
            Ok(()) => Ok(base),
            Err(_) => {
                // This happens only if the program registered host memory and then unmapped it without unregistering.
                backing::unmap(base, mapped);
                Err(Error::OutOfMemory)
            }
        }
    }

    /// Registers the program's own host memory.
    pub fn register(&mut self, base: u64, size: u64, device: usize) -> Result<()> {
        if base == 0 || size == 0 {
            return Err(Error::InvalidValue);
        }
        let allocation = Allocation { device, kind: Kind::Registered, charged: 0, extent: None };
        self.ranges.insert(base, size, allocation).map_err(|_| Error::HostMemoryAlreadyRegistered)
    }

    /// Removes a registration of host memory.
    pub fn unregister(&mut self, base: u64) -> Result<Freed> {
        match self.ranges.get(base) {
            Some(found) if found.value.kind == Kind::Registered => self.forget(base),
            _ => Err(Error::HostMemoryNotRegistered),
        }
    }

    /// Frees the range that begins at `base`, if `takes` accepts its kind.
    pub fn free(&mut self, base: u64, takes: impl Fn(Kind) -> bool) -> Result<Freed> {
        let found = self.ranges.get(base).filter(|f| takes(f.value.kind)).ok_or(Error::InvalidValue)?;
        let (size, extent) = (found.size, found.value.extent.clone());
        let freed = self.forget(base)?;
        backing::unmap(base, size);
        if let Some(extent) = extent.filter(|_| freed.kind != Kind::Imported) {
            extent.punch();
        }
        Ok(freed)
    }

    fn forget(&mut self, base: u64) -> Result<Freed> {
        let (size, a) = self.ranges.remove(base).ok_or(Error::InvalidValue)?;
        Ok(Freed { size, device: a.device, kind: a.kind, charged: a.charged })
    }

    /// The range that contains an address: base, size, allocation.
    pub fn find(&self, address: u64) -> Option<(u64, u64, &Allocation)> {
        self.ranges.find(address).map(|f| (f.base, f.size, f.value))
    }

    /// The extent behind a device allocation, for another process, and the device ordinal.
    pub fn extent_of(&self, address: u64) -> Result<(&Extent, usize)> {
        let found = self.ranges.find(address).ok_or(Error::InvalidValue)?;
        match (&found.value.extent, found.value.kind) {
            (Some(extent), Kind::Device) => Ok((extent, found.value.device)),
            _ => Err(Error::InvalidValue),
        }
    }

    /// Allocates physical memory without an address.
    pub fn physical(&mut self, size: u64, shareable: bool) -> Result<Extent> {
        if shareable { self.backing.shareable(size) } else { self.backing.extent(size) }.map_err(no_memory)
    }

    /// The extent behind the device memory at an address, and the address at which the extent begins.
    pub fn extent_at(&self, address: u64) -> Option<(&Extent, u64)> {
        let found = self.ranges.find(address)?;
        Some((found.value.extent.as_ref()?, found.base))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charged_bytes_are_rounded_up() {
        assert_eq!([charge(1), charge(512), charge(513)], [512, 512, 1024]);
        assert_eq!(charge(MIB - 1), MIB);
        assert_eq!([charge(MIB), charge(2 * MIB + 1)], [2 * MIB, 4 * MIB]);
    }

    #[test]
    fn a_pointer_is_freed_once_and_only_by_the_matching_function() {
        let mut memory = Memory::default();
        let device = memory.allocate(100, 1, Kind::Device, 512).unwrap();
        let host = memory.allocate_host(100, 0).unwrap();
        assert_eq!(memory.free(host, |k| k == Kind::Device), Err(Error::InvalidValue));
        assert_eq!(memory.free(device + 1, |k| k == Kind::Device), Err(Error::InvalidValue), "inside, not the base");
        let freed = memory.free(device, |k| k == Kind::Device).unwrap();
        assert_eq!(freed, Freed { size: 100, device: 1, kind: Kind::Device, charged: 512 });
        assert_eq!(memory.free(device, |k| k == Kind::Device), Err(Error::InvalidValue), "freed already");
        assert!(memory.free(host, |k| k == Kind::Host).is_ok());
    }

    #[test]
    fn registering_twice_is_refused() {
        let own = vec![0u8; 8192];
        let base = own.as_ptr() as u64;
        let mut memory = Memory::default();
        memory.register(base, 8192, 0).unwrap();
        assert_eq!(memory.register(base + 4096, 100, 0), Err(Error::HostMemoryAlreadyRegistered));
        assert_eq!(memory.find(base + 8191).map(|f| f.2.kind), Some(Kind::Registered));
        assert_eq!(memory.unregister(base + 1), Err(Error::HostMemoryNotRegistered));
        assert!(memory.unregister(base).is_ok());
        assert_eq!(own[0], 0, "still the program's");
    }
}
