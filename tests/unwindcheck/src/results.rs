//! The results of the comparisons, in a file that all processes of a run map. So no way to end a process loses it.
//!
//! The file has 4096 bytes: the numbers of [`Results`] in the byte order of the machine, then the text, filled up with
//! zeros.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::fmt::{self, Write};
use std::sync::atomic::AtomicU64;

/// The environment variable with the path of the file, which must exist.
const VARIABLE: &CStr = c"UNWINDCHECK_RESULTS";
const FILE_BYTES: usize = 4096;
const TEXT_BYTES: usize = FILE_BYTES - 4 * size_of::<AtomicU64>();

/// The content of the file.
#[repr(C)]
#[derive(Debug)]
pub struct Results {
    /// The stacks that were compared.
    pub compared: AtomicU64,
    /// Those of them that differ from all earlier ones of their process.
    pub distinct: AtomicU64,
    /// The threads whose stacks were compared.
    pub threads: AtomicU64,
    /// The stacks that differ from libgcc's.
    pub different: AtomicU64,
    /// A description of the first difference.
    text: UnsafeCell<[u8; TEXT_BYTES]>,
}

const _: () = assert!(size_of::<Results>() == FILE_BYTES, "the text fills the file");

// SAFETY: the numbers are atomic. Only the thread that found the first difference writes the text, and nothing here
// reads it.
unsafe impl Sync for Results {}

impl Results {
    /// Maps the file. `None` if there is none.
    pub fn open() -> Option<&'static Results> {
        // SAFETY: `VARIABLE` is a C string. The result is null or a C string, used before the program can change it.
        let path = unsafe { libc::getenv(VARIABLE.as_ptr()) };
        if path.is_null() {
            return None;
        }
        // SAFETY: `path` is a C string.
        let file = unsafe { libc::open(path, libc::O_RDWR | libc::O_CLOEXEC) };
        if file < 0 {
            return None;
        }
        // SAFETY: `file` is open. A new mapping at an address that the kernel chooses touches no other memory.
        let memory = unsafe {
            let size = libc::lseek(file, 0, libc::SEEK_END);
            let memory = if size == FILE_BYTES as i64 {
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(std::ptr::null_mut(), FILE_BYTES, protection, libc::MAP_SHARED, file, 0)
            } else {
                libc::MAP_FAILED
            };
            libc::close(file);
            memory
        };
        // SAFETY: the mapping has the size of `Results`, is page-aligned and is never unmapped. Any bytes are valid.
        (memory != libc::MAP_FAILED).then(|| unsafe { &*memory.cast::<Results>() })
    }

    /// Writes the description of a difference. Only the caller that counted the first one may call this.
    pub fn describe(&self, difference: fmt::Arguments<'_>) {
        let mut text = Text { at: self.text.get().cast(), rest: TEXT_BYTES - 1 };
        // Text that does not fit is cut.
        text.write_fmt(difference).ok();
    }
}

/// Writes to the text of the file.
struct Text {
    at: *mut u8,
    /// How many bytes fit, without the last one, which stays 0.
    rest: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let fits = text.len().min(self.rest);
        // SAFETY: `rest` bytes at `at` are inside the text, which no other thread writes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.at, fits);
            self.at = self.at.add(fits);
        }
        self.rest -= fits;
        Ok(())
    }
}
