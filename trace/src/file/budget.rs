//! Bounds what reading files may cost: memory and work in proportion to the bytes that the files store.
//!
//! Bytes from elsewhere can state any count, decompress to thousands of times their length, contain holes that take no
//! disk space, and use one large part any number of times. Every reader of such bytes charges one [`Budget`]: the trace
//! reader, the snapshot reader with its decompression, the readers of `run.json` and `symbols.json`, and the symbol
//! readers. All files of a run share one budget, so many small files cost no more than one large file.
//!
//! The limits count operations and bytes, never time. The same file gives the same result on a busy machine.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::untrusted;

/// The memory that files of any size may take, in bytes.
pub const MEMORY_FLOOR: u64 = 128 << 20;
/// The further memory for each stored byte, in bytes. A gzipped snapshot decompresses to thirty times its size, and its
/// events take up to three times the decompressed size.
pub const MEMORY_PER_BYTE: u64 = 256;
/// The memory that files may take at most, in bytes, whatever their size.
pub const MEMORY_CEILING: u64 = 64 << 30;
/// The work that files of any size may take, in steps. A step takes a few nanoseconds: one record, one decompressed
/// byte, one table entry.
pub const WORK_FLOOR: u64 = 128 << 20;
/// The further work for each stored byte, in steps.
pub const WORK_PER_BYTE: u64 = 256;
/// The work that files may take at most, in steps, whatever their size.
pub const WORK_CEILING: u64 = 1 << 42;

/// The limit that was exceeded, and the bytes of input that the limit was computed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exceeded {
    /// The limit of the memory in bytes.
    Memory {
        /// The limit in bytes.
        limit: u64,
        /// The stored bytes of the input.
        input: u64,
    },
    /// The limit of the work.
    Work {
        /// The stored bytes of the input.
        input: u64,
    },
}

impl Exceeded {
    /// The help for the user.
    pub const HELP: &'static str =
        "copy the file again; if the error remains, the file was damaged or made to exhaust memory";
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exceeded::Memory { limit, input } => {
                write!(f, "it needs more memory than {}, the limit for {} of input", Size(*limit), Size(*input))
            }
            Exceeded::Work { input } => write!(f, "it needs more work than the limit for {} of input", Size(*input)),
        }
    }
}

impl std::error::Error for Exceeded {}

/// The memory that a JSON text takes when it is parsed, with the text itself, in bytes: at least that of every object,
/// element and key in it, whatever the types.
pub fn json_memory(text: &[u8]) -> u64 {
    let nodes = text.iter().map(|byte| match byte {
        b'{' => 160u64,
        b'[' | b',' | b':' => 64,
        _ => 0,
    });
    text.len() as u64 + nodes.sum::<u64>()
}

/// A number of bytes in binary units.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        if self.0 < 1024 {
            return write!(f, "{} bytes", self.0);
        }
        let exponent = (self.0.ilog2() / 10).min(UNITS.len() as u32);
        let value = self.0 as f64 / (1u64 << (10 * exponent)) as f64;
        write!(f, "{value:.1} {}", UNITS[exponent as usize - 1])
    }
}

/// The memory and the work that reading some files may take. It belongs to one thread.
#[derive(Debug)]
pub struct Budget {
    /// The stored bytes of all files so far.
    input: Cell<u64>,
    /// Held memory in bytes, and its limit.
    held: Cell<u64>,
    memory_limit: Cell<u64>,
    /// Steps done, and their limit.
    done: Cell<u64>,
    work_limit: Cell<u64>,
    /// Device and inode of the files that have been added. A file that is read again gives no further allowance.
    files: RefCell<HashSet<(u64, u64)>>,
}

impl Default for Budget {
    fn default() -> Budget {
        let budget = Budget {
            input: Cell::new(0),
            held: Cell::new(0),
            memory_limit: Cell::new(0),
            done: Cell::new(0),
            work_limit: Cell::new(0),
            files: RefCell::default(),
        };
        budget.add_input(0);
        budget
    }
}

impl Budget {
    /// The budget for reading an open file alone.
    pub fn of_file(file: &File) -> io::Result<Budget> {
        let budget = Budget::default();
        budget.add_file(file)?;
        Ok(budget)
    }

    /// Raises the limits by the allowance for one more file, unless the file has been added already.
    pub fn add_file(&self, file: &File) -> io::Result<()> {
        let metadata = file.metadata()?;
        if self.files.borrow_mut().insert((metadata.dev(), metadata.ino())) {
            self.add_input(untrusted::stored_len(file)?);
        }
        Ok(())
    }

    /// Raises the limits by the allowance for `bytes` more stored bytes.
    pub fn add_input(&self, bytes: u64) {
        let input = self.input.get().saturating_add(bytes);
        self.input.set(input);
        let limit = |floor: u64, per_byte: u64| floor.saturating_add(input.saturating_mul(per_byte));
        self.memory_limit.set(limit(MEMORY_FLOOR, MEMORY_PER_BYTE).min(MEMORY_CEILING));
        self.work_limit.set(limit(WORK_FLOOR, WORK_PER_BYTE).min(WORK_CEILING));
    }

    /// Charges memory that stays in use. The error means that the limit would be exceeded; nothing is charged then.
    #[inline]
    pub fn hold(&self, bytes: u64) -> Result<(), Exceeded> {
        self.check(bytes)?;
        self.held.set(self.held.get() + bytes);
        Ok(())
    }

    /// Checks whether `bytes` more could be held, without charging them. For memory whose owner counts it.
    #[inline]
    pub fn check(&self, bytes: u64) -> Result<(), Exceeded> {
        if self.held.get().saturating_add(bytes) <= self.memory_limit.get() {
            return Ok(());
        }
        Err(Exceeded::Memory { limit: self.memory_limit.get(), input: self.input.get() })
    }

    /// Returns memory that was charged and is no longer in use.
    pub fn release(&self, bytes: u64) {
        self.held.set(self.held.get().saturating_sub(bytes));
    }

    /// Charges work. The error means that the limit is reached.
    #[inline]
    pub fn work(&self, steps: u64) -> Result<(), Exceeded> {
        let done = self.done.get().saturating_add(steps);
        self.done.set(done);
        if done <= self.work_limit.get() { Ok(()) } else { Err(self.out_of_work()) }
    }

    /// The error of exceeded work.
    pub fn out_of_work(&self) -> Exceeded {
        Exceeded::Work { input: self.input.get() }
    }

    /// The steps that are left.
    pub fn work_left(&self) -> u64 {
        self.work_limit.get().saturating_sub(self.done.get())
    }

    /// The held memory in bytes.
    pub fn held(&self) -> u64 {
        self.held.get()
    }

    /// The steps done so far.
    pub fn done(&self) -> u64 {
        self.done.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_grow_with_the_input_up_to_the_ceilings() {
        let budget = Budget::default();
        assert!(budget.hold(MEMORY_FLOOR).is_ok() && budget.work(WORK_FLOOR).is_ok());
        assert_eq!(budget.hold(1), Err(Exceeded::Memory { limit: MEMORY_FLOOR, input: 0 }));
        assert_eq!(budget.work(1), Err(Exceeded::Work { input: 0 }));
        budget.add_input(10);
        assert!(budget.hold(10 * MEMORY_PER_BYTE).is_ok() && budget.hold(1).is_err());
        // The refused step was counted.
        assert_eq!(budget.work_left(), 10 * WORK_PER_BYTE - 1);
        budget.release(5);
        assert!(budget.check(5).is_ok() && budget.hold(5).is_ok() && budget.check(1).is_err());
        budget.add_input(u64::MAX);
        assert!(budget.hold(MEMORY_CEILING).is_err());
        assert!(budget.work(WORK_CEILING).is_err());
        assert!(budget.hold(u64::MAX).is_err() && budget.work(u64::MAX).is_err());
    }

    #[test]
    fn a_file_is_added_once_and_holes_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        let file = File::create(&path).unwrap();
        file.set_len(4 << 40).unwrap();
        let budget = Budget::of_file(&file).unwrap();
        budget.add_file(&File::open(&path).unwrap()).unwrap();
        assert_eq!(budget.input.get(), 0, "the hole of 4 TiB");
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 5000], 1 << 40).unwrap();
        let again = Budget::of_file(&file).unwrap();
        assert!((5000..1 << 20).contains(&again.input.get()), "{}", again.input.get());
        again.add_file(&file).unwrap();
        again.add_file(&File::open(&path).unwrap()).unwrap();
        assert!(again.input.get() < 1 << 20);
    }

    #[test]
    fn messages_have_units() {
        let memory = Exceeded::Memory { limit: 3 << 29, input: 6451 };
        assert_eq!(memory.to_string(), "it needs more memory than 1.5 GiB, the limit for 6.3 KiB of input");
        assert_eq!(Exceeded::Work { input: 12 }.to_string(), "it needs more work than the limit for 12 bytes of input");
    }
}
