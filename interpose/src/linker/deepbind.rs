//! Hooks objects that were loaded with `RTLD_DEEPBIND`. They bind to their own dependencies before preloaded libraries,
//! so interposition by name reaches neither them nor a CUDA runtime that they load.
//!
//! After loading such an object the program calls `dlsym`, which we do intercept. Then new objects are scanned once.
//! The slots through which they call hooked functions are set to our stubs, as the loader would have done without the
//! flag. In all other objects these slots hold our stubs already, or get them on binding.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use memtrace_stackwalk::loader::{ListEnd, LoadedObject, Reading, our_dynamic_section};
use memtrace_stackwalk::page_size;

use super::mapped_object::containing;
use super::shared_objects::import_slots;

/// The last object of the loader's list at the last scan.
static LAST_SCANNED: ListEnd = ListEnd::new();
/// 1 while a thread scans.
static IS_SCANNING: AtomicU32 = AtomicU32::new(0);
/// The load addresses, plus one, of the objects that were scanned. 0 marks the end, [`UNLOADED`] a slot to reuse.
static SCANNED: [AtomicUsize; 2048] = [const { AtomicUsize::new(0) }; 2048];

/// The facts about hooks that a scan needs.
pub(crate) struct ScanRules {
    /// The stub for a function that an object imports. `None` if the name is not hooked.
    pub(crate) stub: fn(&[u8]) -> Option<usize>,
    /// Observes each new object and its file name.
    pub(crate) object_loaded: fn(&Reading, &LoadedObject, &[u8]),
}

/// Scans the objects that were loaded since the last scan.
#[inline]
pub(crate) fn scan_if_changed(rules: &ScanRules) {
    if !LAST_SCANNED.is_last() && IS_SCANNING.swap(1, Ordering::Acquire) == 0 {
        LAST_SCANNED.update();
        scan_new_objects(rules);
        IS_SCANNING.store(0, Ordering::Release);
    }
}

/// In [`SCANNED`]: an object was here and has been unloaded.
const UNLOADED: usize = usize::MAX;

/// Forgets objects that have been unloaded. Their addresses may be reused by others or by themselves.
#[cold]
pub(crate) fn forget_unloaded() {
    // A scan ends soon. But a signal handler may have interrupted a scan on this very thread, so the wait is bounded.
    let mut attempts = 0;
    while IS_SCANNING.swap(1, Ordering::Acquire) != 0 {
        attempts += 1;
        if attempts > 1000 {
            return;
        }
        // SAFETY: `sched_yield` takes no arguments and has no preconditions.
        unsafe { libc::sched_yield() };
    }
    LAST_SCANNED.forget();
    let reading = Reading::begin();
    let mut loaded: Vec<usize> = reading.objects().map(|object| object.bias.wrapping_add(1)).collect();
    drop(reading);
    loaded.sort_unstable();
    for entry in SCANNED.iter().take_while(|entry| entry.load(Ordering::Relaxed) != 0) {
        if loaded.binary_search(&entry.load(Ordering::Relaxed)).is_err() {
            entry.store(UNLOADED, Ordering::Relaxed);
        }
    }
    IS_SCANNING.store(0, Ordering::Release);
}

#[cold]
fn scan_new_objects(rules: &ScanRules) {
    let ours = our_dynamic_section();
    let mut slots = Vec::new();
    let reading = Reading::begin();
    for object in reading.objects() {
        if object.dynamic_section() != ours && mark_scanned(object.bias) {
            object.with_file_name(&reading, |name| (rules.object_loaded)(&reading, &object, name));
            slots.extend(import_slots(&reading, &object, rules.stub));
        }
    }
    drop(reading);
    for (slot, stub) in slots {
        redirect_slot(slot as *mut usize, stub);
    }
}

/// Whether an object at this address has not been scanned yet. Marks it as scanned.
fn mark_scanned(base: usize) -> bool {
    let mut free = None;
    for entry in &SCANNED {
        match entry.load(Ordering::Relaxed) {
            known if known == base.wrapping_add(1) => return false,
            UNLOADED => free = free.or(Some(entry)),
            0 => {
                free = free.or(Some(entry));
                break;
            }
            _ => {}
        }
    }
    if let Some(entry) = free {
        entry.store(base.wrapping_add(1), Ordering::Relaxed);
    }
    free.is_some()
}

/// Stores `stub` into a slot of a global offset table, which may be read-only.
///
/// Another thread that finds the stub there calls it. It sees all that this library needs: the library was initialized
/// before the program's threads began, or before [`super::redirect`] executed a barrier in all of them.
fn redirect_slot(slot: *mut usize, stub: usize) {
    let page_bytes = page_size();
    // SAFETY: the object's relocations name this address as a slot. Slots are aligned words, so an atomic store is
    // sound. The object is loaded, so the page stays mapped.
    unsafe {
        let shared = &*slot.cast::<AtomicUsize>();
        let target = shared.load(Ordering::Relaxed);
        // Replaces only a slot that is bound to another object's function. A slot with our stub is right already. A
        // slot that points into its own object is not bound yet and will bind to our stub.
        if target == stub || !is_bound(slot as usize, target) {
            return;
        }
        let page = (slot as usize & !(page_bytes - 1)) as *mut c_void;
        let Some(protection) = protection_of(slot as usize) else { return };
        if protection & libc::PROT_WRITE != 0 {
            shared.store(stub, Ordering::Release);
        } else if libc::mprotect(page, page_bytes, protection | libc::PROT_WRITE) == 0 {
            shared.store(stub, Ordering::Release);
            libc::mprotect(page, page_bytes, protection);
        }
    }
}

/// Whether a slot is bound, which is so if its value lies in another object than the slot.
fn is_bound(slot: usize, target: usize) -> bool {
    let slot_object = containing(slot).map(|o| o.start);
    let target_object = containing(target).map(|o| o.start);
    target_object.is_some() && target_object != slot_object
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
