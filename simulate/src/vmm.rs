//! Virtual memory management: physical handles, and the part of a reservation to which each is mapped.

use crate::backing::Extent;
use crate::error::{Error, Result};
use crate::ranges::RangeMap;
use std::collections::HashMap;

/// Physical memory, the object of a `CUmemGenericAllocationHandle`.
#[derive(Debug)]
pub struct Physical {
    /// The bytes.
    pub extent: Extent,
    /// The device ordinal. 0 for host memory, which is charged to no device.
    pub device: usize,
    /// The bytes charged to the device. 0 for an import, because another process pays for its memory.
    pub charged: u64,
    /// The properties from its creation, as the program passed them.
    pub properties: [u64; 4],
    handles: u32,
    mappings: u32,
}

/// A mapped part of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The handle of the physical memory.
    pub handle: u64,
    /// The offset of the mapping in it, in bytes.
    pub offset: u64,
}

/// All physical memory and all mappings of the process.
#[derive(Debug, Default)]
pub struct Vmm {
    physical: HashMap<u64, Physical>,
    mappings: RangeMap<Mapping>,
}

impl Vmm {
    /// Registers physical memory under its handle, with one reference.
    pub fn create(&mut self, handle: u64, extent: Extent, device: usize, charged: u64, properties: [u64; 4]) {
        self.physical.insert(handle, Physical { extent, device, charged, properties, handles: 1, mappings: 0 });
    }

    /// The memory of a handle to which the program still has a reference.
    pub fn get(&self, handle: u64) -> Result<&Physical> {
        self.physical.get(&handle).filter(|p| p.handles > 0).ok_or(Error::InvalidValue)
    }

    /// Adds a reference to the memory that is mapped at an address (`cuMemRetainAllocationHandle`).
    pub fn retain(&mut self, address: u64) -> Result<u64> {
        let handle = self.mappings.find(address).ok_or(Error::InvalidValue)?.value.handle;
        self.physical.get_mut(&handle).ok_or(Error::InvalidValue)?.handles += 1;
        Ok(handle)
    }

    /// Removes a reference. Returns the memory if nothing uses it any more.
    pub fn release(&mut self, handle: u64) -> Result<Option<Physical>> {
        let physical = self.physical.get_mut(&handle).filter(|p| p.handles > 0).ok_or(Error::InvalidValue)?;
        physical.handles -= 1;
        Ok(self.take_if_unused(handle))
    }

    fn take_if_unused(&mut self, handle: u64) -> Option<Physical> {
        let unused = self.physical.get(&handle).is_some_and(|p| p.handles == 0 && p.mappings == 0);
        if unused { self.physical.remove(&handle) } else { None }
    }

    /// Registers a mapping of `size` bytes at `base`.
    pub fn map(&mut self, base: u64, size: u64, mapping: Mapping) -> Result<()> {
        let physical = self.get(mapping.handle)?;
        if mapping.offset.checked_add(size).is_none_or(|end| end > physical.extent.size) {
            return Err(Error::InvalidValue);
        }
        self.mappings.insert(base, size, mapping).map_err(|_| Error::InvalidValue)?;
        if let Some(physical) = self.physical.get_mut(&mapping.handle) {
            physical.mappings += 1;
        }
        Ok(())
    }

    /// Removes the mappings that fill `[base, base + size)` exactly. Returns the memory that nothing uses any more.
    pub fn unmap(&mut self, base: u64, size: u64) -> Result<Vec<Physical>> {
        let end = base.checked_add(size).ok_or(Error::InvalidValue)?;
        let parts: Vec<(u64, u64, u64)> =
            self.mappings.overlapping(base, end).map(|f| (f.base, f.size, f.value.handle)).collect();
        let mut at = base;
        for &(start, bytes, _) in &parts {
            if start != at {
                return Err(Error::InvalidValue);
            }
            at += bytes;
        }
        if at != end || parts.is_empty() {
            return Err(Error::InvalidValue);
        }
        let mut unused = Vec::new();
        for (start, _, handle) in parts {
            self.mappings.remove(start);
            if let Some(physical) = self.physical.get_mut(&handle) {
                physical.mappings -= 1;
            }
            unused.extend(self.take_if_unused(handle));
        }
        Ok(unused)
    }

    /// The mapping that contains `address`: base, size, device.
    pub fn find(&self, address: u64) -> Option<(u64, u64, usize)> {
        let found = self.mappings.find(address)?;
        let device = self.physical.get(&found.value.handle)?.device;
        Some((found.base, found.size, device))
    }

    /// The extent that is mapped at an address, the address at which it would begin, and the end of the mapping.
    pub fn extent_at(&self, address: u64) -> Option<(&Extent, u64, u64)> {
        let found = self.mappings.find(address)?;
        let physical = self.physical.get(&found.value.handle)?;
        Some((&physical.extent, found.base.wrapping_sub(found.value.offset), found.base + found.size))
    }

    /// Whether memory is mapped anywhere in `[base, base + size)`.
    pub fn any_mapped(&self, base: u64, size: u64) -> bool {
        self.mappings.overlapping(base, base.saturating_add(size)).next().is_some()
    }

    /// Whether memory is mapped in all of `[base, base + size)`.
    pub fn all_mapped(&self, base: u64, size: u64) -> bool {
        let end = base.saturating_add(size);
        let mut at = base;
        for found in self.mappings.overlapping(base, end) {
            if found.base > at {
                return false;
            }
            at = found.base + found.size;
        }
        at >= end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Backing;

    fn with_handle(vmm: &mut Vmm, handle: u64, size: u64) {
        vmm.create(handle, Backing::default().extent(size).unwrap(), 0, size, [0; 4]);
    }

    #[test]
    fn memory_is_freed_at_its_last_release() {
        let mut vmm = Vmm::default();
        with_handle(&mut vmm, 7, 4096);
        vmm.map(0x10000, 4096, Mapping { handle: 7, offset: 0 }).unwrap();
        assert!(vmm.release(7).unwrap().is_none(), "still mapped");
        assert!(vmm.release(7).is_err(), "released twice");
        assert_eq!(vmm.unmap(0x10000, 4096).unwrap().len(), 1);
        assert!(vmm.release(7).is_err());
    }

    #[test]
    fn a_retained_handle_needs_two_releases() {
        let mut vmm = Vmm::default();
        with_handle(&mut vmm, 7, 8192);
        vmm.map(0x10000, 4096, Mapping { handle: 7, offset: 4096 }).unwrap();
        assert_eq!(vmm.retain(0x10008), Ok(7));
        assert!(vmm.release(7).unwrap().is_none());
        assert!(vmm.unmap(0x10000, 4096).unwrap().is_empty());
        assert!(vmm.release(7).unwrap().is_some());
    }

    #[test]
    fn only_whole_mappings_are_unmapped() {
        let mut vmm = Vmm::default();
        with_handle(&mut vmm, 7, 8192);
        vmm.map(0x10000, 4096, Mapping { handle: 7, offset: 0 }).unwrap();
        vmm.map(0x11000, 4096, Mapping { handle: 7, offset: 4096 }).unwrap();
        assert!(vmm.map(0x11000, 4096, Mapping { handle: 7, offset: 0 }).is_err(), "mapped already");
        assert!(vmm.map(0x12000, 8192, Mapping { handle: 7, offset: 4096 }).is_err(), "longer than the memory");
        assert!(vmm.unmap(0x10000, 2048).is_err());
        assert!(vmm.unmap(0x10000, 12288).is_err());
        assert!(vmm.all_mapped(0x10000, 8192) && !vmm.all_mapped(0x10000, 8193));
        assert!(vmm.unmap(0x10000, 8192).is_ok());
        assert!(!vmm.any_mapped(0, 0x20000));
    }
}
