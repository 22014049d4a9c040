//! Hooks objects that were loaded with `RTLD_DEEPBIND`. They bind to their own dependencies before preloaded libraries,
//! so interposition by name reaches neither them nor a CUDA runtime that they load.
//!
//! After loading such an object the program calls `dlsym`, which we do intercept. Then new objects are scanned once.
//! The slots through which they call hooked functions are set to our stubs, as the loader would have done without the
//! flag. In all other objects these slots hold our stubs already, or get them on binding.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::{loader, torch};
use crate::objects;

/// How many objects the loader had loaded at the last scan.
static SEEN: AtomicU64 = AtomicU64::new(0);
/// 1 while a thread scans.
static LOOKING: AtomicU32 = AtomicU32::new(0);
/// The load addresses, plus one, of the objects that were scanned. 0 marks the end, [`UNLOADED`] a slot to reuse.
static DONE: [AtomicUsize; 2048] = [const { AtomicUsize::new(0) }; 2048];

/// Scans the objects that were loaded since the last scan.
#[inline]
pub(super) fn look() {
    let loaded = objects::loaded_count();
    if loaded != SEEN.load(Ordering::Relaxed) && LOOKING.swap(1, Ordering::Acquire) == 0 {
        SEEN.store(loaded, Ordering::Relaxed);
        look_at_new();
        LOOKING.store(0, Ordering::Release);
    }
}

/// In [`DONE`]: an object was here and has been unloaded.
const UNLOADED: usize = usize::MAX;

/// Forgets objects that have been unloaded. Their addresses may be reused by others or by themselves.
#[cold]
pub(super) fn forget_unloaded() {
    // A scan ends soon. But a signal handler may have interrupted a scan on this very thread, so the wait is bounded.
    let mut turns = 0;
    while LOOKING.swap(1, Ordering::Acquire) != 0 {
        turns += 1;
        if turns > 1000 {
            return;
        }
        // SAFETY: `sched_yield` takes no arguments and has no preconditions.
        unsafe { libc::sched_yield() };
    }
    let mut loaded = Vec::new();
    objects::find(|object| {
        loaded.push(object.base.wrapping_add(1));
        None::<()>
    });
    loaded.sort_unstable();
    for place in DONE.iter().take_while(|place| place.load(Ordering::Relaxed) != 0) {
        if loaded.binary_search(&place.load(Ordering::Relaxed)).is_err() {
            place.store(UNLOADED, Ordering::Relaxed);
        }
    }
    LOOKING.store(0, Ordering::Release);
}

#[cold]
fn look_at_new() {
    let ours = objects::containing(look_at_new as *const () as usize).map(|o| o.start);
    let mut slots = Vec::new();
    objects::find(|object| {
        if Some(object.base) != ours && first_time(object.base) {
            torch::object_loaded(object.file_name());
            slots.extend(object.import_slots(loader::stub));
        }
        None::<()>
    });
    for (slot, stub) in slots {
        set(slot as *mut usize, stub);
    }
}

/// Whether an object at this address has not been scanned yet. Marks it as scanned.
fn first_time(base: usize) -> bool {
    let mut free = None;
    for place in &DONE {
        match place.load(Ordering::Relaxed) {
            known if known == base.wrapping_add(1) => return false,
            UNLOADED => free = free.or(Some(place)),
            0 => {
                free = free.or(Some(place));
                break;
            }
            _ => {}
        }
    }
    if let Some(place) = free {
        place.store(base.wrapping_add(1), Ordering::Relaxed);
    }
    free.is_some()
}

/// Stores `stub` into a slot of a global offset table, which may be read-only.
fn set(slot: *mut usize, stub: usize) {
    const PAGE: usize = 4096;
    // SAFETY: the object's relocations name this address as a slot. Slots are aligned words, so an atomic store is
    // sound. The object is loaded, so the page stays mapped.
    unsafe {
        let shared = &*slot.cast::<AtomicUsize>();
        let bound = shared.load(Ordering::Relaxed);
        // Replaces only a slot that is bound to another object's function. A slot with our stub is right already. A
        // slot that points into its own object is not bound yet and will bind to our stub.
        if bound == stub || !leads_elsewhere(slot as usize, bound) {
            return;
        }
        let page = (slot as usize & !(PAGE - 1)) as *mut c_void;
        let Some(protection) = protection_of(slot as usize) else { return };
        if protection & libc::PROT_WRITE != 0 {
            shared.store(stub, Ordering::Relaxed);
        } else if libc::mprotect(page, PAGE, protection | libc::PROT_WRITE) == 0 {
            shared.store(stub, Ordering::Relaxed);
            libc::mprotect(page, PAGE, protection);
        }
    }
}

/// Whether a slot is bound, which is so if its value lies in another object than the slot.
fn leads_elsewhere(slot: usize, bound: usize) -> bool {
    let home = objects::containing(slot).map(|o| o.start);
    let there = objects::containing(bound).map(|o| o.start);
    there.is_some() && there != home
}

/// The protection of the page at `address`, from /proc/self/maps. `None` if it is not mapped.
fn protection_of(address: usize) -> Option<i32> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
        if !(start..end).contains(&address) {
            return None;
        }
        let bit = |letter: char, bit: i32| if rest.get(..4).is_some_and(|p| p.contains(letter)) { bit } else { 0 };
        Some(bit('r', libc::PROT_READ) | bit('w', libc::PROT_WRITE) | bit('x', libc::PROT_EXEC))
    })
}
