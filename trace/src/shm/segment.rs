//! The shared memory of one traced process. The launcher creates it, and both sides map it.

use std::ffi::CStr;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::layout::{
    BUILD, FIRST_SEQ, MAGIC, RING_COUNT, RING_SLOTS, RINGS, RingHeader, SEGMENT_SIZE, SLOTS, SegmentHeader,
};
use super::memory;
use super::owner_word::NOBODY;
use super::ring::{Ring, SharedSlot};
use crate::sync::Ordering;

/// The name of the memory in `/proc/PID/maps`.
const NAME: &CStr = c"memtrace";

/// A mapped segment. Unmapped on drop.
#[derive(Debug)]
pub struct Segment {
    /// The header and the headers of the rings.
    headers: NonNull<u8>,
    /// The slots of all rings.
    slots: NonNull<u8>,
}

/// The size of the slots in bytes.
const SLOTS_SIZE: usize = SEGMENT_SIZE - SLOTS;

/// The addresses of the slots of an abandoned segment. They stay mapped, for the next one.
#[derive(Debug)]
pub struct SlotAddresses(NonNull<u8>);

/// The addresses of the headers of an abandoned segment. They stay mapped, for a later one.
#[derive(Clone, Copy, Debug)]
pub struct HeaderAddresses(NonNull<u8>);

// SAFETY: all memory of the segment is accessed through shared references to atomics.
unsafe impl Send for Segment {}
// SAFETY: all memory of the segment is accessed through shared references to atomics.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates a segment, on the launcher's side: new shared memory, mapped, with its header written.
    pub fn create() -> io::Result<(Segment, OwnedFd)> {
        let fd = memory::create(NAME, SEGMENT_SIZE)?;
        let segment = Segment::map_whole(fd.as_fd())?;
        let header = segment.header();
        header.build.store(BUILD, Ordering::Relaxed);
        header.next_seq.0.store(FIRST_SEQ, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((segment, fd))
    }

    /// Maps a received segment, on the traced process's side. The error is `InvalidData` if it is no sealed segment of
    /// this build.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Segment> {
        let segment = Segment::map_whole(fd)?;
        segment.check_header().map(|()| segment)
    }

    /// [`Self::map`], with the slots at the addresses of a segment that was abandoned, and the headers at those of
    /// another one. The addresses of the slots are given back with an error.
    ///
    /// A thread that has not yet left the first one may write to a slot of the ring that it had there. So no other
    /// thread may claim the ring with this index here. No thread may be left that uses the second one.
    pub fn map_over(
        fd: BorrowedFd<'_>,
        slots: SlotAddresses,
        headers: Option<HeaderAddresses>,
    ) -> Result<Segment, (io::Error, SlotAddresses)> {
        match Segment::map_parts(fd, &slots, headers) {
            Ok(segment) => Ok(segment),
            Err(error) => Err((error, slots)),
        }
    }

    fn check_header(&self) -> io::Result<()> {
        let header = self.header();
        let is_ours = header.magic.load(Ordering::Acquire) == MAGIC && header.build.load(Ordering::Relaxed) == BUILD;
        if is_ours { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn map_whole(fd: BorrowedFd<'_>) -> io::Result<Segment> {
        let headers = memory::map(fd, SEGMENT_SIZE)?;
        // SAFETY: the slots are inside the new mapping.
        Ok(Segment { headers, slots: unsafe { headers.add(SLOTS) } })
    }

    fn map_parts(fd: BorrowedFd<'_>, slots: &SlotAddresses, headers: Option<HeaderAddresses>) -> io::Result<Segment> {
        memory::check(fd, SEGMENT_SIZE)?;
        let shared = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let map = |at: Option<NonNull<u8>>, size: usize, flags: i32, offset: usize| {
            let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
            let at = at.map_or(std::ptr::null_mut(), |at| at.as_ptr().cast());
            let fd = if flags == shared { fd.as_raw_fd() } else { -1 };
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: creates a new mapping, or replaces a part of an abandoned segment, which is only accessed through
            // atomics. The file has the part, and is sealed against shrinking.
            let mapped = unsafe { libc::mmap(at, size, protection, flags | fixed, fd, offset as libc::off_t) };
            if mapped == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            NonNull::new(mapped.cast::<u8>()).ok_or_else(|| io::ErrorKind::Other.into())
        };
        let given = headers.map(|headers| headers.0);
        let restore = |at: NonNull<u8>, size: usize| drop(map(Some(at), size, private, 0));
        let result = map(given, SLOTS, shared, 0).and_then(|headers| {
            // Not dropped in an error: the slots must stay mapped.
            let segment = ManuallyDrop::new(Segment { headers, slots: slots.0 });
            let mapped = segment.check_header().and_then(|()| {
                // The kernel may have unmapped them in an error.
                let mapped = map(Some(slots.0), SLOTS_SIZE, shared, SLOTS);
                mapped.inspect_err(|_| restore(slots.0, SLOTS_SIZE))
            });
            if mapped.is_err() && given.is_none() {
                // SAFETY: this is a new mapping, and nobody else has its address.
                unsafe { libc::munmap(headers.as_ptr().cast(), SLOTS) };
            }
            mapped.map(|_| ManuallyDrop::into_inner(segment))
        });
        if result.is_err() {
            given.into_iter().for_each(|headers| restore(headers, SLOTS));
        }
        result
    }

    /// Replaces the shared memory by memory of this process, which reads as a closed segment whose rings nobody can
    /// claim any more. All addresses stay valid. Returns them, `None` if the shared memory could not be replaced.
    pub fn abandon(&self) -> Option<(SlotAddresses, HeaderAddresses)> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: replaces exactly the mappings of this segment. Their content is only accessed through atomics, for
        // which every bit pattern is valid. The headers are replaced at once by complete ones.
        unsafe {
            let slots = libc::mmap(self.slots.as_ptr().cast(), SLOTS_SIZE, protection, flags | libc::MAP_FIXED, -1, 0);
            let headers = libc::mmap(std::ptr::null_mut(), SLOTS, protection, flags, -1, 0);
            if headers == libc::MAP_FAILED {
                return None;
            }
            // The copy is never dropped: its memory takes the place of the old one.
            let new = ManuallyDrop::new(Segment { headers: NonNull::new(headers.cast())?, slots: self.slots });
            new.header().closed.0.store(1, Ordering::Relaxed);
            let owners = new.ring_headers().iter().map(|ring| &ring.owner.0).chain([&new.header().common_lock.0]);
            for owner in owners {
                owner.take(NOBODY, |_| true);
            }
            let moved = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let at = libc::mremap(headers, SLOTS, SLOTS, moved, self.headers.as_ptr().cast::<libc::c_void>());
            if at == libc::MAP_FAILED {
                libc::munmap(headers, SLOTS);
                self.header().closed.0.store(1, Ordering::Relaxed);
                return None;
            }
            (slots != libc::MAP_FAILED).then_some((SlotAddresses(self.slots), HeaderAddresses(self.headers)))
        }
    }

    /// The segment's header.
    pub fn header(&self) -> &SegmentHeader {
        // SAFETY: the mapping starts with a `SegmentHeader`. It is page-aligned, and its atomics are valid for every
        // bit pattern.
        unsafe { self.headers.cast::<SegmentHeader>().as_ref() }
    }

    /// The headers of all rings.
    pub fn ring_headers(&self) -> &[RingHeader] {
        // SAFETY: the headers are inside the mapping and aligned, because `RINGS` is a multiple of a page. Their
        // atomics are valid for every bit pattern.
        unsafe { std::slice::from_raw_parts(self.headers.add(RINGS).cast::<RingHeader>().as_ptr(), RING_COUNT) }
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
            let first = self.slots.cast::<SharedSlot>().add(index * RING_SLOTS);
            std::slice::from_raw_parts(first.as_ptr(), RING_SLOTS)
        };
        Some(Ring::new(&header.tail.0, &header.head.0, slots))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: these ranges were mapped for this segment, and no reference into them outlives it.
        unsafe {
            libc::munmap(self.headers.as_ptr().cast(), SLOTS);
            libc::munmap(self.slots.as_ptr().cast(), SLOTS_SIZE);
        }
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
    fn the_next_segment_takes_the_addresses_of_an_abandoned_one() {
        let (_launcher, fd) = Segment::create().unwrap();
        let first = ManuallyDrop::new(Segment::map(fd.as_fd()).unwrap());
        let mut late = Producer::new(first.ring(5).unwrap());
        let slot = |seq| Event { seq, ..Event::EMPTY }.to_slot();
        late.write(&slot(1)).unwrap();
        late.publish();
        let (addresses, headers) = first.abandon().unwrap();
        let header = first.header();
        assert_eq!((header.closed.0.load(Ordering::Relaxed), header.common_lock.0.tid()), (1, NOBODY));
        assert!(first.ring_headers().iter().all(|ring| !ring.owner.0.take(7, |_| true)));
        // Whatever a thread still writes stays in this process.
        late.write(&slot(2)).unwrap();
        late.publish();
        let (launcher, fd) = Segment::create().unwrap();
        let at = addresses.0;
        let second = Segment::map_over(fd.as_fd(), addresses, None).unwrap();
        assert_eq!(second.slots, at);
        let mut producer = Producer::new(second.ring(5).unwrap());
        producer.write(&slot(3)).unwrap();
        producer.publish();
        late.write(&slot(4)).unwrap();
        late.publish();
        let mut seen = Vec::new();
        let mut consumer = Consumer::new(launcher.ring(5).unwrap());
        let drained = consumer.drain(|record| {
            if let Record::Event(slot) = record {
                seen.push(slot)
            }
        });
        assert_eq!((drained.is_ok(), seen), (true, vec![slot(3)]));
        // A file that is refused costs the addresses nothing.
        let second = ManuallyDrop::new(second);
        let (addresses, _) = second.abandon().unwrap();
        let file = memory::memfd(NAME, 0).unwrap();
        let (_, addresses) = Segment::map_over(file.as_fd(), addresses, Some(headers)).unwrap_err();
        assert_eq!(addresses.0, at);
        let (_launcher, fd) = Segment::create().unwrap();
        let third = Segment::map_over(fd.as_fd(), addresses, Some(headers)).unwrap();
        assert_eq!((third.slots, third.headers), (at, headers.0));
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
            let header = std::slice::from_raw_parts(segment.headers.as_ptr(), size_of::<SegmentHeader>());
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
