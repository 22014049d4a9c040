//! The host memory behind simulated memory. Only this module maps memory.
//!
//! Device memory lies in memory files (`memfd_create`), which commit pages only when data is written to them. A 70 GiB
//! tensor to which nothing is copied costs no RAM. One file serves the whole process. Offsets are never reused, and a
//! hole is punched for each freed extent. Another process can map the file, which implements CUDA IPC. One extent can
//! be mapped at several addresses, which implements virtual memory management. Host memory is anonymous.

use crate::arch;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::Arc;

/// The page size to which mappings are rounded, in bytes: that of any kernel for this processor, or a multiple.
pub const PAGE: u64 = arch::LARGEST_PAGE;

/// The size of the process's memory file in bytes. The file is sparse, so its size costs nothing. No allocation can
/// reach its end.
const FILE_BYTES: i64 = 1 << 60;

/// Rounds `n` up to a multiple of `to`. Saturates instead of wrapping.
pub fn round_up(n: u64, to: u64) -> u64 {
    n.div_ceil(to).saturating_mul(to)
}

/// A piece of a memory file.
#[derive(Clone, Debug)]
pub struct Extent {
    file: Arc<OwnedFd>,
    /// Its offset in the file, in bytes.
    pub offset: u64,
    /// Its size in bytes, a multiple of [`PAGE`].
    pub size: u64,
}

impl Extent {
    /// The file's descriptor in this process.
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Frees the pages. Later reads return zeros.
    pub fn punch(&self) {
        // SAFETY: the `Arc` keeps the descriptor open. `fallocate` takes integers and accesses no memory of ours by
        // address.
        unsafe {
            libc::fallocate(
                self.descriptor(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                self.offset as i64,
                self.size as i64,
            );
        }
    }

    /// The parts of `[from, until)` to which something was written, as offsets in the extent. All else is zeros.
    pub fn written(&self, from: u64, until: u64) -> Vec<Range<u64>> {
        let seek = |offset: u64, whence| {
            // SAFETY: the `Arc` keeps the descriptor open. The call moves only the file's position, which nothing uses.
            let found = unsafe { libc::lseek(self.descriptor(), offset as i64, whence) };
            // There is no data behind the last, but a hole at the end of the file.
            if found < 0 { u64::MAX } else { found as u64 }
        };
        let (mut at, end) = (self.offset + from, self.offset + until.min(self.size));
        let mut parts = Vec::new();
        loop {
            let data = seek(at, libc::SEEK_DATA);
            if data >= end {
                return parts;
            }
            at = seek(data, libc::SEEK_HOLE).min(end);
            parts.push(data - self.offset..at - self.offset);
        }
    }

    /// Opens a descriptor from which another process can [`Extent::import`] this extent.
    ///
    /// The descriptor is positioned at the extent, and the page before the extent stores its size. Only extents of
    /// [`Backing::shareable`] have that page.
    pub fn export(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.descriptor());
        let mut file = File::options().read(true).write(true).open(path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        file.write_all_at(&note(self.size), self.offset - PAGE)?;
        Ok(file.into())
    }

    /// The extent of a descriptor from [`Extent::export`]. Fails when the descriptor is not one.
    pub fn import(file: OwnedFd) -> io::Result<Self> {
        let mut file = File::from(file);
        let offset = file.stream_position()?;
        let before = offset.checked_sub(PAGE).ok_or_else(|| io::Error::other("not an exported extent"))?;
        let mut found = [0; 16];
        file.read_exact_at(&mut found, before)?;
        let size = u64::from_ne_bytes(*found.last_chunk().expect("8 of 16 bytes"));
        if note(size) != found {
            return Err(io::Error::other("not an exported extent"));
        }
        // Every copy of the descriptor shares one position, which other imports read. `written` moves the position of
        // its file, so the extent opens the file again.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let own = File::options().read(true).write(true).open(path)?;
        Ok(Extent { file: Arc::new(own.into()), offset, size })
    }

    /// A part of another process's memory file, opened through `/proc`.
    pub fn of_process(pid: u32, descriptor: RawFd, offset: u64, size: u64) -> io::Result<Self> {
        let path = format!("/proc/{pid}/fd/{descriptor}");
        let file = File::options().read(true).write(true).open(path)?;
        Ok(Extent { file: Arc::new(file.into()), offset, size })
    }
}

/// The note that precedes an exported extent: a magic string and the size.
fn note(size: u64) -> [u8; 16] {
    let mut bytes = *b"simcuda:________";
    bytes[8..].copy_from_slice(&size.to_ne_bytes());
    bytes
}

fn memory_file() -> io::Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated string. The result is checked before it becomes an owned descriptor, and
    // nothing else owns it.
    let file = unsafe {
        let fd = libc::memfd_create(c"simcuda".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    // SAFETY: `file` owns the descriptor, so it is open.
    if unsafe { libc::ftruncate(file.as_raw_fd(), FILE_BYTES) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// The process's memory file and the offset of its unused part.
#[derive(Debug, Default)]
pub struct Backing {
    file: Option<Arc<OwnedFd>>,
    next: u64,
}

impl Backing {
    /// Allocates a new, zeroed extent of at least `size` bytes.
    pub fn extent(&mut self, size: u64) -> io::Result<Extent> {
        let file = match &self.file {
            Some(file) => Arc::clone(file),
            None => Arc::clone(self.file.insert(Arc::new(memory_file()?))),
        };
        let size = round_up(size, PAGE);
        let offset = self.next;
        self.next += size;
        Ok(Extent { file, offset, size })
    }

    /// Allocates a new extent that can be exported. A page before it holds the note.
    pub fn shareable(&mut self, size: u64) -> io::Result<Extent> {
        self.extent(PAGE)?;
        self.extent(size)
    }
}

/// Reserves addresses without memory. `align` is a power of two.
pub fn reserve(size: u64, align: u64) -> io::Result<u64> {
    area(size, align, libc::PROT_NONE)
}

/// Maps anonymous host memory of at least `size` bytes.
pub fn host(size: u64) -> io::Result<u64> {
    area(size, PAGE, libc::PROT_READ | libc::PROT_WRITE)
}

fn area(size: u64, align: u64, protection: i32) -> io::Result<u64> {
    let size = round_up(size, PAGE);
    let align = align.max(PAGE);
    let slack = if align > PAGE { align } else { 0 };
    let total = usize::try_from(size.saturating_add(slack)).map_err(io::Error::other)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the kernel chooses the address of the new mapping, so the call replaces no existing mapping.
    let raw = unsafe { libc::mmap(ptr::null_mut(), total, protection, flags, -1, 0) };
    if raw == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let raw = raw as u64;
    let base = round_up(raw, align);
    if base > raw {
        unmap(raw, base - raw);
    }
    let tail = raw + total as u64 - (base + size);
    if tail > 0 {
        unmap(base + size, tail);
    }
    Ok(base)
}

/// Maps an extent at an address that is a multiple of `align`, and returns the address.
pub fn map(extent: &Extent, align: u64) -> io::Result<u64> {
    let base = reserve(extent.size, align)?;
    map_at(base, extent.size, extent, 0).inspect_err(|_| unmap(base, extent.size))?;
    Ok(base)
}

/// Maps `size` bytes of an extent, from offset `skip` on, over reserved addresses.
pub fn map_at(base: u64, size: u64, extent: &Extent, skip: u64) -> io::Result<()> {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: callers pass addresses from `reserve` that are still reserved, so `MAP_FIXED` replaces only that
    // reservation.
    let mapped = unsafe {
        libc::mmap(
            base as *mut libc::c_void,
            size as usize,
            protection,
            flags,
            extent.descriptor(),
            (extent.offset + skip) as i64,
        )
    };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Turns a mapped range back into reserved addresses.
pub fn unmap_to_reserved(base: u64, size: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: callers pass a range that they mapped with `map_at`. The program asked to unmap it, so it must not use
    // the range any more.
    unsafe {
        libc::mmap(base as *mut libc::c_void, size as usize, libc::PROT_NONE, flags, -1, 0);
    }
}

/// Allows or forbids access to a mapped range.
pub fn protect(base: u64, size: u64, accessible: bool) -> io::Result<()> {
    let protection = if accessible { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
    // SAFETY: callers pass a range that this module mapped completely.
    match unsafe { libc::mprotect(base as *mut libc::c_void, size as usize, protection) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Removes a mapping of this module.
pub fn unmap(base: u64, size: u64) {
    // SAFETY: callers pass a range from this module that they have removed from every table, so nothing refers to it.
    unsafe {
        libc::munmap(base as *mut libc::c_void, round_up(size, PAGE) as usize);
    }
}

/// Zeroes whole pages of device memory without committing them. Returns false when that is impossible.
pub fn zero_pages(base: u64, size: u64) -> bool {
    // SAFETY: callers pass whole pages inside one of their allocations. The effect on the program is that of writing
    // zeros.
    unsafe { libc::madvise(base as *mut libc::c_void, size as usize, libc::MADV_REMOVE) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(address: u64, value: u64) {
        // SAFETY: the tests pass addresses inside mappings that they created and not yet removed.
        unsafe { ptr::write(address as *mut u64, value) }
    }

    fn read(address: u64) -> u64 {
        // SAFETY: the tests pass addresses inside mappings that they created and not yet removed.
        unsafe { ptr::read(address as *const u64) }
    }

    #[test]
    fn an_extent_mapped_twice_shares_its_memory() {
        let mut backing = Backing::default();
        let extent = backing.extent(2 << 20).unwrap();
        let (a, b) = (map(&extent, 2 << 20).unwrap(), map(&extent, PAGE).unwrap());
        assert_eq!(a % (2 << 20), 0);
        write(a + 4096, 77);
        assert_eq!(read(b + 4096), 77);
        assert!(zero_pages(a, extent.size));
        assert_eq!(read(b + 4096), 0);
        unmap(a, extent.size);
        unmap(b, extent.size);
    }

    #[test]
    fn written_parts_are_whole_pages() {
        let mut backing = Backing::default();
        backing.extent(PAGE).unwrap();
        let extent = backing.extent(100 * PAGE).unwrap();
        let base = map(&extent, PAGE).unwrap();
        assert_eq!(extent.written(0, extent.size), []);
        write(base + 3 * PAGE + 8, 1);
        write(base + 4 * PAGE, 1);
        write(base + 99 * PAGE, 1);
        assert_eq!(extent.written(0, extent.size), [3 * PAGE..5 * PAGE, 99 * PAGE..100 * PAGE]);
        assert_eq!(extent.written(4 * PAGE + 1, 100 * PAGE), [4 * PAGE + 1..5 * PAGE, 99 * PAGE..100 * PAGE]);
        unmap(base, extent.size);
    }

    #[test]
    fn extents_do_not_overlap_and_huge_ones_use_no_memory() {
        let mut backing = Backing::default();
        let small = backing.extent(1).unwrap();
        let huge = backing.extent(1 << 40).unwrap();
        assert_eq!(small.size, PAGE);
        assert_eq!(huge.offset, PAGE);
        let base = map(&huge, PAGE).unwrap();
        write(base + (1 << 39), 5);
        assert_eq!(read(base + (1 << 39)), 5);
        unmap(base, huge.size);
        huge.punch();
    }

    #[test]
    fn an_exported_extent_shares_its_memory() {
        let mut backing = Backing::default();
        let extent = backing.shareable(2 << 20).unwrap();
        let (a, b) = (map(&extent, PAGE).unwrap(), {
            let imported = Extent::import(extent.export().unwrap()).unwrap();
            assert_eq!((imported.offset, imported.size), (extent.offset, extent.size));
            map(&imported, PAGE).unwrap()
        });
        write(a + 8, 3);
        assert_eq!(read(b + 8), 3);
        assert!(Extent::import(File::open("/dev/null").unwrap().into()).is_err());
        unmap(a, extent.size);
        unmap(b, extent.size);
    }

    #[test]
    fn a_descriptor_is_imported_again_after_the_extent_was_searched() {
        let mut backing = Backing::default();
        backing.extent(PAGE).unwrap();
        let extent = backing.shareable(2 << 20).unwrap();
        let base = map(&extent, PAGE).unwrap();
        for page in [1, 3] {
            write(base + page * PAGE, 3);
        }
        let exported = extent.export().unwrap();
        for _ in 0..2 {
            // As pidfd_getfd does, so that all share one position.
            let imported = Extent::import(exported.try_clone().unwrap()).unwrap();
            assert_eq!((imported.offset, imported.size), (extent.offset, extent.size));
            assert_eq!(imported.written(0, imported.size), [PAGE..2 * PAGE, 3 * PAGE..4 * PAGE]);
        }
        unmap(base, extent.size);
    }

    #[test]
    fn unmapped_memory_is_reserved_again() {
        let mut backing = Backing::default();
        let base = reserve(4 << 20, 2 << 20).unwrap();
        let extent = backing.extent(2 << 20).unwrap();
        map_at(base + (2 << 20), 2 << 20, &extent, 0).unwrap();
        write(base + (2 << 20), 9);
        unmap_to_reserved(base + (2 << 20), 2 << 20);
        map_at(base, 2 << 20, &extent, 0).unwrap();
        assert_eq!(read(base), 9, "contents stay with the physical memory");
        unmap(base, 4 << 20);
    }
}
