//! Segments of PyTorch's allocator whose memory another library maps: an allocator that the program provides, or a
//! library that replaces `cudaMalloc`, such as torch_memory_saver.
//!
//! Such a library can unmap the memory of a segment and map other memory there later. PyTorch does not notice: the
//! segment stays reserved, and its blocks stay allocated. Meanwhile the device has the memory.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::ModuleId;

/// How much of a device's segments had no device memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UnmappedBytes {
    /// The current number of bytes.
    pub current: u64,
    /// The highest number of bytes.
    pub peak: u64,
    /// How often it rose from zero.
    pub times: u64,
    /// The objects that unmapped the memory.
    pub modules: BTreeSet<ModuleId>,
    /// How often `current` changed.
    pub changes: u64,
}

#[derive(Clone, Copy, Debug)]
struct MappedSegment {
    size: u64,
    device: i16,
    unmapped: u64,
}

/// The segments whose memory another library maps.
#[derive(Clone, Debug, Default)]
pub(crate) struct MappedSegments {
    /// By address.
    segments: BTreeMap<u64, MappedSegment>,
    unmapped: BTreeMap<i16, UnmappedBytes>,
}

impl MappedSegments {
    /// The unmapped bytes, by device.
    pub(crate) fn unmapped(&self) -> &BTreeMap<i16, UnmappedBytes> {
        &self.unmapped
    }

    /// The number of segments, and of objects that unmapped memory.
    pub(crate) fn entries(&self) -> usize {
        self.segments.len() + self.unmapped.values().map(|unmapped| 1 + unmapped.modules.len()).sum::<usize>()
    }

    pub(crate) fn insert(&mut self, addr: u64, size: u64, device: i16) {
        self.remove(addr);
        self.segments.insert(addr, MappedSegment { size, device, unmapped: 0 });
    }

    /// Removes a segment that has ended.
    pub(crate) fn remove(&mut self, addr: u64) {
        if let Some(segment) = self.segments.remove(&addr)
            && let Some(unmapped) = self.unmapped.get_mut(&segment.device)
        {
            unmapped.current = unmapped.current.saturating_sub(segment.unmapped);
            unmapped.changes += u64::from(segment.unmapped > 0);
        }
    }

    /// The segments of a device without any memory: address and size, in order.
    pub(crate) fn without_memory(&self, device: i16) -> impl Iterator<Item = (u64, u64)> {
        let of_device = self.segments.iter().filter(move |(_, segment)| segment.device == device);
        of_device.filter(|(_, segment)| segment.unmapped == segment.size).map(|(addr, segment)| (*addr, segment.size))
    }

    fn at(&mut self, addr: u64) -> Option<&mut MappedSegment> {
        let (start, segment) = self.segments.range_mut(..=addr).next_back()?;
        (addr - start < segment.size).then_some(segment)
    }

    /// Observes the mapping of `size` bytes at an address. Returns whether it is in a segment.
    pub(crate) fn mapped(&mut self, addr: u64, size: u64) -> bool {
        let Some(segment) = self.at(addr) else { return false };
        let bytes = size.min(segment.unmapped);
        segment.unmapped -= bytes;
        let device = segment.device;
        if let Some(unmapped) = self.unmapped.get_mut(&device) {
            unmapped.current = unmapped.current.saturating_sub(bytes);
            unmapped.changes += u64::from(bytes > 0);
        }
        true
    }

    /// Observes the end of the mapping of `size` bytes at an address, by an object.
    pub(crate) fn unmapped_by(&mut self, addr: u64, size: u64, module: ModuleId) {
        let Some(segment) = self.at(addr) else { return };
        let bytes = size.min(segment.size - segment.unmapped);
        segment.unmapped += bytes;
        let device = segment.device;
        let unmapped = self.unmapped.entry(device).or_default();
        unmapped.times += u64::from(unmapped.current == 0 && bytes > 0);
        unmapped.current += bytes;
        unmapped.changes += u64::from(bytes > 0);
        unmapped.peak = unmapped.peak.max(unmapped.current);
        unmapped.modules.insert(module);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_unmapped_and_mapped_again_counts_once_each_time() {
        let mut segments = MappedSegments::default();
        segments.insert(0x1000, 0x400, 0);
        segments.insert(0x2000, 0x200, 0);
        for _ in 0..2 {
            segments.unmapped_by(0x1000, 0x400, ModuleId(3));
            segments.unmapped_by(0x2000, 0x200, ModuleId(3));
            assert_eq!(segments.unmapped()[&0].current, 0x600);
            assert_eq!(segments.without_memory(0).collect::<Vec<_>>(), [(0x1000, 0x400), (0x2000, 0x200)]);
            assert!(segments.mapped(0x1000, 0x400) && segments.mapped(0x2000, 0x200));
        }
        segments.unmapped_by(0x5000, 0x100, ModuleId(4));
        assert!(!segments.mapped(0x5000, 0x100));
        segments.unmapped_by(0x2000, 0x200, ModuleId(3));
        segments.remove(0x2000);
        let found = &segments.unmapped()[&0];
        assert_eq!((found.current, found.peak, found.times, found.changes), (0, 0x600, 3, 10));
        assert!(segments.without_memory(0).next().is_none());
        assert_eq!(found.modules, BTreeSet::from([ModuleId(3)]));
    }
}
