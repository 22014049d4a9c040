//! The memory of one traced process, as the launcher creates it and both sides map it.

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

// SAFETY: everything inside is reached through shared references to atomics.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// The launcher's side: a new sealed memfd (it cannot be shrunk under us), mapped, with its header written.
    pub fn create() -> io::Result<(Segment, OwnedFd)> {
        let made = memfd(libc::MFD_NOEXEC_SEAL).or_else(|e| match e.raw_os_error() {
            // Before Linux 6.3 nobody can ask for that; since then a system may insist on it.
            Some(libc::EINVAL) => memfd(0),
            _ => Err(e),
        });
        let fd = made?;
        // SAFETY: plain calls on an open descriptor.
        let done = unsafe {
            libc::fchmod(fd.as_raw_fd(), 0o600) == 0
                && libc::ftruncate(fd.as_raw_fd(), SEGMENT_SIZE as libc::off_t) == 0
                && libc::fcntl(
                    fd.as_raw_fd(),
                    libc::F_ADD_SEALS,
                    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
                ) == 0
        };
        if !done {
            return Err(io::Error::last_os_error());
        }
        let segment = Segment::map_unchecked(fd.as_fd())?;
        let header = segment.header();
        header.build.store(BUILD, Ordering::Relaxed);
        header.next_seq.0.store(1, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((segment, fd))
    }

    /// The traced process's side: maps what it was sent and checks that it is a segment of this build.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Segment> {
        // SAFETY: `stat` is plain data that fstat fills.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: an open descriptor and a valid pointer.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a plain call on an open descriptor; what has no seals at all answers with an error.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        // Whoever could shrink it under us could kill us.
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
        // SAFETY: a fresh mapping at an address of the kernel's choice; the file has SEGMENT_SIZE bytes and is sealed
        // against shrinking, so no access inside can fault.
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

    /// The segment's header.
    pub fn header(&self) -> &SegmentHeader {
        // SAFETY: the mapping begins with a SegmentHeader: all atomics, valid for every bit pattern, aligned by the page.
        unsafe { self.base.cast::<SegmentHeader>().as_ref() }
    }

    /// The heads of all rings.
    pub fn ring_headers(&self) -> &[RingHeader] {
        // SAFETY: inside the mapping; all atomics, valid for every bit pattern; aligned, since RINGS is a multiple of a page.
        unsafe { std::slice::from_raw_parts(self.base.add(RINGS).cast::<RingHeader>().as_ptr(), RING_COUNT) }
    }

    /// The head of ring `index`; `None` beyond [`RING_COUNT`].
    pub fn ring_header(&self, index: usize) -> Option<&RingHeader> {
        self.ring_headers().get(index)
    }

    /// Ring `index`; `None` beyond [`RING_COUNT`].
    pub fn ring(&self, index: usize) -> Option<Ring<'_>> {
        let header = self.ring_header(index)?;
        // SAFETY: inside the mapping, since `ring_header` has checked the index; all atomics; 64-byte aligned.
        let slots = unsafe {
            let first = self.base.add(SLOTS).cast::<SharedSlot>().add(index * RING_SLOTS);
            std::slice::from_raw_parts(first.as_ptr(), RING_SLOTS)
        };
        Some(Ring::new(&header.tail.0, &header.head.0, slots))
    }
}

fn memfd(flags: libc::c_uint) -> io::Result<OwnedFd> {
    let flags = flags | libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a valid C string and valid flags; the descriptor is open and nobody else has it.
    unsafe {
        let fd = libc::memfd_create(c"memtrace".as_ptr(), flags);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped by `map_unchecked` with this size; nobody can hold a reference past the segment's life.
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
        let target = Segment::map(fd.as_fd()).unwrap();
        let last = RING_COUNT - 1;
        let mut producer = Producer::new(target.ring(last).unwrap());
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
    fn a_foreign_file_is_refused() {
        let file = memfd(0).unwrap();
        assert!(Segment::map(file.as_fd()).is_err());
        // Everything right but for the seals.
        let (segment, _fd) = Segment::create().unwrap();
        // SAFETY: the file gets the segment's size, and no more than its header is read.
        unsafe {
            assert_eq!(libc::ftruncate(file.as_raw_fd(), SEGMENT_SIZE as libc::off_t), 0);
            let header = std::slice::from_raw_parts(segment.base.as_ptr(), size_of::<SegmentHeader>());
            assert_eq!(libc::pwrite(file.as_raw_fd(), header.as_ptr().cast(), header.len(), 0), header.len() as isize);
        }
        assert!(Segment::map(file.as_fd()).is_err());
        // SAFETY: a plain call on an open descriptor.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
        assert!(Segment::map(file.as_fd()).is_ok());
    }

    #[test]
    fn a_segment_is_its_owners_alone() {
        let (_segment, fd) = Segment::create().unwrap();
        let metadata = std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&metadata) & 0o7777, 0o600);
        // SAFETY: plain calls on an open descriptor.
        let (shrunk, sealed) = unsafe {
            (libc::ftruncate(fd.as_raw_fd(), 0), libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE))
        };
        assert_eq!((shrunk, sealed), (-1, -1));
    }
}
