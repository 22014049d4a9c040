//! Redirects the calls between objects that are loaded already, and restores them.
//!
//! A preloaded library is found by name. In a process that runs already, the objects are bound. Then the slots through
//! which they call hooked functions get our functions, as [`super::deepbind`] does for single objects.
//!
//! The loader unloads no object meanwhile: `dl_iterate_phdr` holds its lock.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_stackwalk::loader::{Reading, barrier_in_all_threads, our_dynamic_section};
use memtrace_stackwalk::{Lock, page_size};

use super::shared_objects::import_slots;

/// A slot that was redirected.
#[derive(Clone, Copy)]
struct Redirected {
    slot: usize,
    before: usize,
    after: usize,
}

/// All slots that are redirected now.
static REDIRECTED: RedirectedSlots =
    RedirectedSlots { lock: Lock::new(), slots: std::cell::UnsafeCell::new(Vec::new()) };

struct RedirectedSlots {
    lock: Lock,
    slots: std::cell::UnsafeCell<Vec<Redirected>>,
}

// SAFETY: the slots are only used under the lock.
unsafe impl Sync for RedirectedSlots {}

/// Redirects all loaded objects. `replacement` selects functions by name and gives the replacement. Returns how many
/// slots were redirected.
pub(crate) fn redirect_all(replacement: fn(&[u8]) -> Option<usize>) -> usize {
    let Some(_locked) = REDIRECTED.lock.lock() else { return 0 };
    // SAFETY: this thread has the lock.
    let known = unsafe { &mut *REDIRECTED.slots.get() };
    let before = known.len();
    with_loader_lock(&mut || {
        let (reading, ours) = (Reading::begin(), our_dynamic_section());
        let mut slots = Vec::new();
        for object in reading.objects().filter(|object| object.dynamic_section() != ours) {
            slots.extend(import_slots(&reading, &object, replacement));
            // PyTorch's libraries call functions of their own in this way, too.
            object.for_each_called(&reading, |slot, name| slots.extend(replacement(name).map(|new| (slot, new))));
        }
        drop(reading);
        let protections = Protections::read();
        // Other threads call what they find in the slots, and have not synchronized with the thread that has loaded and
        // initialized this library.
        barrier_in_all_threads();
        for (slot, after) in slots {
            if let Some(before) = exchange(slot, after, &protections, None) {
                known.push(Redirected { slot, before, after });
            }
        }
    });
    known.len() - before
}

/// Restores all slots, except those of objects that are not loaded any more and those that somebody else has changed.
pub(crate) fn restore_all() {
    let Some(_locked) = REDIRECTED.lock.lock() else { return };
    // SAFETY: this thread has the lock.
    let known = unsafe { &mut *REDIRECTED.slots.get() };
    with_loader_lock(&mut || {
        let protections = Protections::read();
        for Redirected { slot, before, after } in known.drain(..) {
            exchange(slot, before, &protections, Some(after));
        }
    });
}

/// Calls `call` while no object is unloaded.
fn with_loader_lock(call: &mut dyn FnMut()) {
    unsafe extern "C" fn callback(_info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
        // SAFETY: `data` points to the closure that `with_loader_lock` borrows during the iteration.
        unsafe { (*data.cast::<&mut dyn FnMut()>())() };
        // Ends the iteration after the first object.
        1
    }
    let mut call = call;
    // SAFETY: the callback has this type, and the closure lives during the call.
    unsafe { libc::dl_iterate_phdr(Some(callback), (&raw mut call).cast()) };
}

/// Writes `new` into a slot, which may be read-only. Returns what it contained. Nothing happens to a slot that contains
/// `new`, or something else than `expected`.
fn exchange(slot: usize, new: usize, protections: &Protections, expected: Option<usize>) -> Option<usize> {
    let protection = protections.of(slot)?;
    let page_bytes = page_size();
    let page = std::ptr::with_exposed_provenance_mut::<c_void>(slot & !(page_bytes - 1));
    // SAFETY: an object's relocations name this address as a slot, and its page is mapped and readable. Slots are
    // aligned words.
    let shared = unsafe { &*std::ptr::with_exposed_provenance::<AtomicUsize>(slot) };
    let before = shared.load(Ordering::Relaxed);
    if before == new || expected.is_some_and(|expected| expected != before) {
        return None;
    }
    if protection & libc::PROT_WRITE != 0 {
        shared.store(new, Ordering::Release);
        return Some(before);
    }
    // SAFETY: the page belongs to the object, which is loaded. More is permitted for a moment, nothing less.
    unsafe {
        if libc::mprotect(page, page_bytes, protection | libc::PROT_WRITE) != 0 {
            return None;
        }
        shared.store(new, Ordering::Release);
        libc::mprotect(page, page_bytes, protection);
    }
    Some(before)
}

/// The protections of all mapped memory.
struct Protections(Vec<(usize, usize, i32)>);

impl Protections {
    fn read() -> Protections {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let parse = |line: &str| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let letters = rest.get(..4)?;
            let bit = |letter: char, bit: i32| if letters.contains(letter) { bit } else { 0 };
            let protection = bit('r', libc::PROT_READ) | bit('w', libc::PROT_WRITE) | bit('x', libc::PROT_EXEC);
            Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?, protection))
        };
        Protections(maps.lines().filter_map(parse).collect())
    }

    /// The protection at an address. `None` if it is not mapped or not readable.
    fn of(&self, address: usize) -> Option<i32> {
        let after = self.0.partition_point(|(start, ..)| *start <= address);
        let (_, end, protection) = *self.0.get(after.checked_sub(1)?)?;
        (address < end && protection & libc::PROT_READ != 0).then_some(protection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_on_a_read_only_page_is_exchanged_and_stays_read_only() {
        // SAFETY: a new mapping of one page, used as a slot.
        let page = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), page_size(), libc::PROT_READ, flags, -1, 0)
        };
        let slot = page.expose_provenance() + 64;
        let protections = Protections::read();
        // SAFETY: the slot is on the page, which is readable.
        let value = || unsafe { std::ptr::with_exposed_provenance::<usize>(slot).read_volatile() };
        assert_eq!(exchange(slot, 7, &protections, None), Some(0));
        assert_eq!((value(), exchange(slot, 7, &protections, None)), (7, None));
        assert_eq!((exchange(slot, 1, &protections, Some(8)), value()), (None, 7), "somebody else has changed it");
        assert_eq!((exchange(slot, 0, &protections, Some(7)), value()), (Some(7), 0));
        assert_eq!(Protections::read().of(slot), Some(libc::PROT_READ));
        assert_eq!(Protections(vec![(8, 16, libc::PROT_READ)]).of(16), None);
        // SAFETY: the page is ours.
        unsafe { libc::munmap(page, page_size()) };
    }
}
