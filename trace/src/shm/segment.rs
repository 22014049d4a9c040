//! The shared memory of one traced process. The launcher creates it, and both sides map it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use super::layout::{BUILD, MAGIC, RING_COUNT, RING_SLOTS, RINGS, RingHeader, SEGMENT_SIZE, SLOTS, SegmentHeader};
use super::ring::{Ring, SharedSlot};
use crate::sync::Ordering;

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
    /// Creates a segment, on the launcher's side: a new memfd, mapped, with its header written. It is sealed, so that
    /// it cannot be shrunk while it is mapped.
    pub fn create() -> io::Result<(Segment, OwnedFd)> {
        let created = memfd(libc::MFD_NOEXEC_SEAL).or_else(|e| match e.raw_os_error() {
            // Linux before 6.3 does not know this flag. Later ones may be configured to require it.
            Some(libc::EINVAL) => memfd(0),
            _ => Err(e),
        });
        let fd = created?;
        // SAFETY: these calls take plain arguments, and the descriptor is open.
        let is_prepared = unsafe {
            libc::fchmod(fd.as_raw_fd(), 0o600) == 0
                && libc::ftruncate(fd.as_raw_fd(), SEGMENT_SIZE as libc::off_t) == 0
                && libc::fcntl(
                    fd.as_raw_fd(),
                    libc::F_ADD_SEALS,
                    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
                ) == 0
        };
        if !is_prepared {
            return Err(io::Error::last_os_error());
        }
        let segment = Segment::map_unchecked(fd.as_fd())?;
        let header = segment.header();
        header.build.store(BUILD, Ordering::Relaxed);
        header.next_seq.0.store(1, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((segment, fd))
    }

    /// Maps a received segment, on the traced process's side. The error is `InvalidData` if it is no sealed segment of
    /// this build.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Segment> {
        // SAFETY: `stat` is plain data, for which zeros are valid.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and `stat` is writable.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is open. The call returns an error for files that do not support seals.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        // Without the seal, another process could shrink the file, and an access would kill this process.
        if stat.st_size != SEGMENT_SIZE as libc::off_t || seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let segment = Segment::map_unchecked(fd)?;
        let header = segment.header();
        if header.magic.load(Ordering::Acquire) != MAGIC || header.build.load(Ordering::Relaxed) != BUILD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(segment)
    }

    fn map_unchecked(fd: BorrowedFd<'_>) -> io::Result<Segment> {
        // SAFETY: creates a new mapping at an address that the kernel chooses. The file has `SEGMENT_SIZE` bytes and is
        // sealed against shrinking, so no access inside can fault.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                SEGMENT_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(base.cast()).map(|base| Segment { base }).ok_or_else(|| io::ErrorKind::Other.into())
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

fn memfd(flags: libc::c_uint) -> io::Result<OwnedFd> {
    let flags = flags | libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string and the flags are valid. The new descriptor belongs to this function alone.
    unsafe {
        let fd = libc::memfd_create(c"memtrace".as_ptr(), flags);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `map_unchecked` has mapped this range, and no reference into it outlives the segment.
        unsafe { libc::munmap(self.base.as_ptr().cast(), SEGMENT_SIZE) };
    }
}

#[cfg(test)]
mod tests {
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
        let file = memfd(0).unwrap();
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
