//! The memory that CUDA's driver takes for allocations beyond their sizes.
//!
//! The driver gives out device memory in pages of 2 MiB. Allocations of at most half a page share pages, all others
//! have pages of their own (measured: docs/dev/device-memory.md).

use memtrace_trace::api::MemoryKind;

/// The size of the driver's pages of device memory, in bytes.
const PAGE_BYTES: u64 = 2 << 20;
/// The size of the largest allocation that shares a page with others, in bytes.
const MAX_SHARED_BYTES: u64 = 1 << 20;

/// The allocations of one device, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DriverPages {
    /// Bytes of allocations that share pages.
    small: u64,
    /// Bytes by which the pages of all other allocations exceed their sizes.
    unused: u64,
    /// Bytes of managed memory, which may be on the host.
    managed: u64,
}

impl DriverPages {
    /// Counts an allocation of this kind and size.
    pub(crate) fn add(&mut self, kind: MemoryKind, size: u64) {
        if let Some(sum) = self.sum_of(kind, size) {
            *sum = sum.saturating_add(share(kind, size));
        }
    }

    /// Counts the free of an allocation of this kind and size.
    pub(crate) fn subtract(&mut self, kind: MemoryKind, size: u64) {
        if let Some(sum) = self.sum_of(kind, size) {
            *sum = sum.saturating_sub(share(kind, size));
        }
    }

    /// The bytes that pages have beyond the sizes of the allocations in them. For allocations that share pages this is
    /// the least possible.
    pub(crate) fn rounding(&self) -> u64 {
        self.unused + (self.small.next_multiple_of(PAGE_BYTES) - self.small)
    }

    /// Bytes of managed memory.
    pub(crate) fn managed(&self) -> u64 {
        self.managed
    }

    fn sum_of(&mut self, kind: MemoryKind, size: u64) -> Option<&mut u64> {
        match kind {
            MemoryKind::Managed => Some(&mut self.managed),
            MemoryKind::Device | MemoryKind::Array if size <= MAX_SHARED_BYTES => Some(&mut self.small),
            MemoryKind::Device | MemoryKind::Array => Some(&mut self.unused),
            // The sizes of physical memory and of pools are multiples of a page already.
            _ => None,
        }
    }
}

/// The amount that an allocation adds to its sum.
fn share(kind: MemoryKind, size: u64) -> u64 {
    if kind == MemoryKind::Managed || size <= MAX_SHARED_BYTES {
        size
    } else {
        size.checked_next_multiple_of(PAGE_BYTES).map_or(0, |pages| pages - size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_allocations_share_pages_and_large_ones_do_not() {
        let mut pages = DriverPages::default();
        // cuBLAS on an H200: 64 MiB, 128 KiB and 1 KiB. The process then has 66 MiB more.
        for size in [64 << 20, 128 << 10, 1 << 10] {
            pages.add(MemoryKind::Device, size);
        }
        assert_eq!(pages.rounding(), (2 << 20) - (129 << 10));
        pages.add(MemoryKind::Device, (4 << 20) + 1);
        assert_eq!(pages.rounding(), (2 << 20) - (129 << 10) + (2 << 20) - 1);
        pages.subtract(MemoryKind::Device, (4 << 20) + 1);
        // 64 of 1.5 MiB take 128 MiB there.
        let before = pages;
        (0..64).for_each(|_| pages.add(MemoryKind::Device, 3 << 19));
        assert_eq!(pages.rounding() - before.rounding(), 32 << 20);
        pages = before;
        pages.add(MemoryKind::Managed, 77);
        pages.add(MemoryKind::Physical, 2 << 20);
        assert_eq!((pages.rounding(), pages.managed()), ((2 << 20) - (129 << 10), 77));
        [128 << 10, 1 << 10].iter().for_each(|size| pages.subtract(MemoryKind::Device, *size));
        assert_eq!(pages.rounding(), 0);
        pages.add(MemoryKind::Device, u64::MAX);
        assert_eq!(pages.rounding(), 0, "a size that no device has");
    }
}
