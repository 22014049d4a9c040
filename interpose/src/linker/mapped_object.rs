//! The loaded object that contains an address, and the indices of the objects that call hooked functions.

use std::ffi::CStr;
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_stackwalk::loader::{Reading, object_containing, our_dynamic_section};

/// A loaded object, as the loader's fast lookup by address returns it.
#[derive(Clone, Copy)]
pub(crate) struct MappedObject {
    /// Where the object starts in memory.
    pub(crate) start: usize,
    path: *const libc::c_char,
}

impl MappedObject {
    /// The object that starts at this address and has this path.
    pub(crate) fn new(start: usize, path: &CStr) -> MappedObject {
        MappedObject { start, path: path.as_ptr() }
    }

    /// The path as the loader has it. Empty for the executable.
    pub(crate) fn path(&self) -> &CStr {
        if self.path.is_null() {
            return c"";
        }
        // SAFETY: `path` is a C string that lives as long as the object is loaded. The object cannot be unloaded now,
        // because its code is on the stack.
        unsafe { CStr::from_ptr(self.path) }
    }

    /// The file name, without the folders.
    pub(crate) fn file_name(&self) -> &[u8] {
        let path = self.path().to_bytes();
        path.rsplit(|b| *b == b'/').next().unwrap_or(path)
    }

    /// A hash that distinguishes objects, including those loaded one after the other at the same address. Never 0. It
    /// reads whole words, because every CUDA call computes it.
    pub(super) fn identity(&self) -> usize {
        const PRIME: usize = 0x517c_c1b7_2722_0a95;
        let mix = |hash: usize, word: usize| (hash.rotate_left(5) ^ word).wrapping_mul(PRIME);
        let (words, rest) = self.path().to_bytes().as_chunks();
        let hash = words.iter().fold(self.start, |hash, word| mix(hash, usize::from_le_bytes(*word)));
        rest.iter().fold(hash, |hash, byte| mix(hash, usize::from(*byte))) | 1
    }
}

/// The object that contains `address`. `None` if there is none. It never locks, because a hook may run under the
/// allocator's lock or while a constructor waits for it.
#[inline]
pub(crate) fn containing(address: usize) -> Option<MappedObject> {
    let found = object_containing(address)?;
    Some(MappedObject { start: found.start, path: with_exposed_provenance(found.path) })
}

/// How many calling objects have an index. Later objects have none.
pub(crate) const MAX_MODULES: usize = 256;

/// The identities of the objects that called hooked functions, by index. 0 is a free slot. They belong to the loaded
/// library, not to a recording, because a forked child has the same objects.
static MODULE_IDENTITIES: [AtomicUsize; MAX_MODULES] = [const { AtomicUsize::new(0) }; MAX_MODULES];

/// The index of a calling object. `None` if [`MAX_MODULES`] others have one already.
pub(crate) fn module_index(caller: &MappedObject) -> Option<usize> {
    let identity = caller.identity();
    for (index, slot) in MODULE_IDENTITIES.iter().enumerate() {
        let known = slot.load(Ordering::Relaxed);
        if known == identity {
            return Some(index);
        }
        if known == 0 {
            match slot.compare_exchange(0, identity, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(index),
                Err(now) if now == identity => return Some(index),
                Err(_) => {}
            }
        }
    }
    None
}

/// Whether the loader searches the object of `address` before this library. That is so for the executable and for
/// objects preloaded before us.
pub(crate) fn is_searched_before_us(address: usize) -> bool {
    let Some(theirs) = containing(address) else { return false };
    let (reading, ours) = (Reading::begin(), our_dynamic_section());
    let mut before_us = reading.objects().take_while(|object| object.dynamic_section() != ours);
    before_us.any(|object| object.with_path(&reading, |path| path == theirs.path()))
}
