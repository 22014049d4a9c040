//! The loaded object that contains an address, and the indices of the objects that call hooked functions.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::original::{self, OriginalFunction};
use super::shared_objects::find_map;

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
    fn identity(&self) -> usize {
        const PRIME: usize = 0x517c_c1b7_2722_0a95;
        let mix = |hash: usize, word: usize| (hash.rotate_left(5) ^ word).wrapping_mul(PRIME);
        let (words, rest) = self.path().to_bytes().as_chunks();
        let hash = words.iter().fold(self.start, |hash, word| mix(hash, usize::from_le_bytes(*word)));
        rest.iter().fold(hash, |hash, byte| mix(hash, usize::from(*byte))) | 1
    }
}

/// `struct dl_find_object` of glibc 2.35 and later (dlfcn.h).
#[repr(C)]
struct DlFindObject {
    flags: u64,
    map_start: *mut c_void,
    map_end: *mut c_void,
    link_map: *mut LinkMap,
    eh_frame: *mut c_void,
    reserved: [u64; 7],
}

/// The public head of `struct link_map` (link.h).
#[repr(C)]
struct LinkMap {
    addr: usize,
    name: *const libc::c_char,
}

/// The object that contains `address`. `None` if there is none.
///
/// A hook may run under the allocator's lock, so this uses glibc's lock-free `_dl_find_object` (2.35) where it exists.
pub(crate) fn containing(address: usize) -> Option<MappedObject> {
    static FIND_OBJECT: OriginalFunction = OriginalFunction::new();
    static IS_MISSING: AtomicU32 = AtomicU32::new(0);
    if IS_MISSING.load(Ordering::Relaxed) == 0 {
        let find = FIND_OBJECT.get_or_find(|| original::lookup(libc::RTLD_DEFAULT, c"_dl_find_object"));
        if !find.is_null() {
            // SAFETY: this is the type that glibc documents for `_dl_find_object`.
            let find: unsafe extern "C" fn(*mut c_void, *mut DlFindObject) -> c_int =
                unsafe { std::mem::transmute(find) };
            // SAFETY: `DlFindObject` is plain data, for which zeros are valid.
            let mut found: DlFindObject = unsafe { std::mem::zeroed() };
            // SAFETY: `_dl_find_object` accepts any address and writes to `found`.
            if unsafe { find(address as *mut c_void, &mut found) } != 0 || found.link_map.is_null() {
                return None;
            }
            // SAFETY: `link_map` is not null, and it is the loader's own record of a loaded object.
            let path = unsafe { (*found.link_map).name };
            return Some(MappedObject { start: found.map_start as usize, path });
        }
        IS_MISSING.store(1, Ordering::Relaxed);
    }
    // SAFETY: `Dl_info` is plain data, for which zeros are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `dladdr` accepts any address and writes to `info`.
    if unsafe { libc::dladdr(address as *const c_void, &mut info) } == 0 {
        return None;
    }
    Some(MappedObject { start: info.dli_fbase as usize, path: info.dli_fname })
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

/// Keeps the object at this address loaded for good, because we keep pointers to its functions.
pub(crate) fn keep_loaded(address: usize) {
    if let Some(object) = containing(address)
        && !object.path().is_empty()
    {
        original::open_loaded(object.path());
    }
}

/// Whether the loader searches the object of `address` before this library. That is so for the executable and for
/// objects preloaded before us.
pub(crate) fn is_searched_before_us(address: usize) -> bool {
    let [Some(theirs), Some(ours)] = [address, is_searched_before_us as *const () as usize].map(containing) else {
        return false;
    };
    let first = find_map(|o| [theirs, ours].into_iter().position(|caller| caller.path() == o.path.as_c_str()));
    theirs.start != ours.start && first == Some(0)
}
