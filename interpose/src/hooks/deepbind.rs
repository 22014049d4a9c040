//! Objects loaded with `RTLD_DEEPBIND` bind to their own dependencies before anything preloaded: interposition by name does not
//! reach them, nor does it reach the CUDA runtime they bring along.
//!
//! What does reach them: after such an object was loaded, the program asks `dlsym` for one of its functions, and that call is ours.
//! New objects are then looked at once, and the slots through which they call hooked functions are set to our stubs: exactly
//! what the loader would have put there without the flag. In every other object the slots hold that value already, or will when they
//! are bound.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::{loader, torch};
use crate::objects;

/// Objects loaded so far, as the loader counts them, at the last look.
static SEEN: AtomicU64 = AtomicU64::new(0);
static LOOKING: AtomicU32 = AtomicU32::new(0);
/// Where the objects that were looked at are loaded; 0: none, and no more behind it.
static DONE: [AtomicUsize; 2048] = [const { AtomicUsize::new(0) }; 2048];

/// Looks at objects that were loaded since the last look.
#[inline]
pub(super) fn look() {
    let loaded = objects::loaded_count();
    if loaded != SEEN.load(Ordering::Relaxed) && LOOKING.swap(1, Ordering::Acquire) == 0 {
        SEEN.store(loaded, Ordering::Relaxed);
        look_at_new();
        LOOKING.store(0, Ordering::Release);
    }
}

/// In [`DONE`]: there was an object, which has been unloaded.
const UNLOADED: usize = usize::MAX;

/// Objects have been unloaded: others may come to their places, or they themselves again.
#[cold]
pub(super) fn forget_unloaded() {
    // Who is looking finds an end soon. A signal handler that interrupted a look in this very thread does not wait for it.
    let mut turns = 0;
    while LOOKING.swap(1, Ordering::Acquire) != 0 {
        turns += 1;
        if turns > 1000 {
            return;
        }
        // SAFETY: no arguments.
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

/// Whether an object at this address has not been looked at; it has, from now on.
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

/// Stores into a slot of a global offset table, which may be read-only by now.
fn set(slot: *mut usize, stub: usize) {
    const PAGE: usize = 4096;
    // SAFETY: a slot of a loaded object, by its own relocations; words are aligned and written at once.
    unsafe {
        let shared = &*slot.cast::<AtomicUsize>();
        let bound = shared.load(Ordering::Relaxed);
        // Only a slot that leads to somebody else's function: one that is ours is right, one that leads back into its own object
        // waits to be bound, and will be, to ours.
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

/// Whether what a slot holds lies in another object than the slot: it is bound, and not to us.
fn leads_elsewhere(slot: usize, bound: usize) -> bool {
    let home = objects::containing(slot).map(|o| o.start);
    let there = objects::containing(bound).map(|o| o.start);
    there.is_some() && there != home
}

/// The protection of the page that `address` lies in, from /proc/self/maps.
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
