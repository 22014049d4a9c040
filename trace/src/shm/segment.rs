//! The shared memory of one traced process. The launcher creates it, and both sides map it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::layout::{
    BUILD, FIRST_SEQ, MAGIC, RING_COUNT, RING_SLOTS, RINGS, RingHeader, SEGMENT_SIZE, SLOTS, SegmentHeader,
};
use super::memory;
use super::ring::{Ring, SharedSlot};
use crate::sync::Ordering;

/// The name of the memory in `/proc/PID/maps`.
const NAME: &CStr = c"memtrace";

/// A mapped segment. Unmapped on drop.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
}

// SAFETY: all memory of the segment is accessed through shared references to atomics.
unsafe impl Send for Segment {}
// SAFETY: all memory of the segment is accessed through shared references to atomics.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates a segment, on the launcher's side: new shared memory, mapped, with its header written.
    pub fn create() -> io::Result<(Segment, OwnedFd)> {
        let fd = memory::create(NAME, SEGMENT_SIZE)?;
        let segment = Segment { base: memory::map(fd.as_fd(), SEGMENT_SIZE)? };
        let header = segment.header();
        header.build.store(BUILD, Ordering::Relaxed);
        header.next_seq.0.store(FIRST_SEQ, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((segment, fd))
    }

    /// Maps a received segment, on the traced process's side. The error is `InvalidData` if it is no sealed segment of
    /// this build.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Segment> {
        let segment = Segment { base: memory::map(fd, SEGMENT_SIZE)? };
        let header = segment.header();
        if header.magic.load(Ordering::Acquire) != MAGIC || header.build.load(Ordering::Relaxed) != BUILD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(segment)
    }

    /// Replaces the shared memory by memory of this process, which reads as a closed segment. The addresses stay valid.
    pub fn abandon(&self) {
        // SAFETY: replaces exactly the mapping of this segment. Its content is only accessed through atomics, for which
        // zeros are valid. If the call fails, the old mapping stays.
        unsafe {
            libc::mmap(
                self.base.as_ptr().cast(),
                SEGMENT_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            );
        }
        self.header().closed.0.store(1, Ordering::Relaxed);
    }

    /// The segment's header.
    pub fn header(&self) -> &SegmentHeader {
        // SAFETY: the mapping starts with a `SegmentHeader`. It is page-aligned, and its atomics are valid for every
        // bit pattern.
        unsafe { self.base.cast::<SegmentHeader>().as_ref() }
    }

    /// The headers of all rings.
    pub fn ring_headers(&self) -> &[RingHeader] {
        // SAFETY: the headers are inside the mapping and aligned, because `RINGS` is a multiple of a page. Their
        // atomics are valid for every bit pattern.
        unsafe { std::slice::from_raw_parts(self.base.add(RINGS).cast::<RingHeader>().as_ptr(), RING_COUNT) }
    }

    /// The header of ring `index`. `None` beyond [`RING_COUNT`].
    pub fn ring_header(&self, index: usize) -> Option<&RingHeader> {
        self.ring_headers().get(index)
    }

    /// Ring `index`; `None` beyond [`RING_COUNT`].
    pub fn ring(&self, index: usize) -> Option<Ring<'_>> {
        let header = self.ring_header(index)?;
        // SAFETY: `ring_header` has checked the index, so the slots are inside the mapping. They are 64-byte aligned
        // atomics, valid for every bit pattern.
        let slots = unsafe {
            let first = self.base.add(SLOTS).cast::<SharedSlot>().add(index * RING_SLOTS);
            std::slice::from_raw_parts(first.as_ptr(), RING_SLOTS)
        };
        Some(Ring::new(&header.tail.0, &header.head.0, slots))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `memory::map` has mapped this range, and no reference into it outlives the segment.
        unsafe { libc::munmap(self.base.as_ptr().cast(), SEGMENT_SIZE) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::event::Event;
    use crate::shm::ring::{Consumer, Producer, Record};

    #[test]
    fn both_sides_see_one_ring() {
        let (launcher, fd) = Segment::create().unwrap();
        let traced = Segment::map(fd.as_fd()).unwrap();
        let last = RING_COUNT - 1;
        let mut producer = Producer::new(traced.ring(last).unwrap());
        let slot = Event { seq: 42, ..Event::EMPTY }.to_slot();
        producer.write(&slot).unwrap();
        producer.publish();
        let mut seen = Vec::new();
        Consumer::new(launcher.ring(last).unwrap())
            .drain(|r| {
                if let Record::Event(s) = r {
                    seen.push(s)
                }
            })
            .unwrap();
        assert_eq!(seen, [slot]);
        assert!(launcher.ring(RING_COUNT).is_none());
    }

    #[test]
    fn a_file_that_is_no_segment_is_rejected() {
        let file = memory::memfd(NAME, 0).unwrap();
        assert!(Segment::map(file.as_fd()).is_err());
        // Everything is right except for the seals.
        let (segment, _fd) = Segment::create().unwrap();
        // SAFETY: the file gets the segment's size, and only its header is read.
        unsafe {
            assert_eq!(libc::ftruncate(file.as_raw_fd(), SEGMENT_SIZE as libc::off_t), 0);
            let header = std::slice::from_raw_parts(segment.base.as_ptr(), size_of::<SegmentHeader>());
            assert_eq!(libc::pwrite(file.as_raw_fd(), header.as_ptr().cast(), header.len(), 0), header.len() as isize);
        }
        assert!(Segment::map(file.as_fd()).is_err());
        // SAFETY: the call takes plain arguments, and the descriptor is open.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
        assert!(Segment::map(file.as_fd()).is_ok());
    }

    #[test]
    fn only_the_owner_can_access_a_segment() {
        let (_segment, fd) = Segment::create().unwrap();
        let metadata = std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&metadata) & 0o7777, 0o600);
        // SAFETY: these calls take plain arguments, and the descriptor is open.
        let (shrunk, sealed) = unsafe {
            (libc::ftruncate(fd.as_raw_fd(), 0), libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE))
        };
        assert_eq!((shrunk, sealed), (-1, -1));
    }
}
