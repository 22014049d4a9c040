//! Detects that a code object's memory is about to be freed.
//!
//! The address of its code object and the instruction identify a frame. That is exact only while the code object is
//! alive. Programs that `exec` generated code, and compilers such as torch.fx and Dynamo, free code objects, and the
//! allocator often returns the same address next. Comparing fields does not help: the next object's name, file name and
//! line table often have the same addresses too, and only their contents differ.
//!
//! So the type's `tp_dealloc` is replaced by a function that counts the free and calls the original. The program cannot
//! observe this. `tp_dealloc` is not visible from Python, the type cannot be subclassed, and a code object is freed as
//! before. One aligned pointer is exchanged, in memory that the interpreter wrote when it initialized the type. CPython
//! 3.12 has `PyCode_AddWatcher` for this purpose, but that needs the GIL and one of eight slots.
//!
//! Each free changes the generation of the bucket of its address, then the total. A free in the same bucket as a living
//! code object causes one more lookup of that object by text, which costs only time.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use super::super::digest::fold;
use super::reason::Reason;

const BUCKETS: usize = 1 << 14;

/// `destructor` of Include/object.h. It is "C-unwind" because a weak reference's callback runs Python code inside,
/// where `pthread_exit` may unwind this frame.
type Destructor = unsafe extern "C-unwind" fn(*mut c_void);

static ORIGINAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static FREED_COUNT: AtomicUsize = AtomicUsize::new(0);
static GENERATIONS: [AtomicU32; BUCKETS] = [const { AtomicU32::new(0) }; BUCKETS];

#[inline]
fn bucket(code: usize) -> &'static AtomicU32 {
    static UNUSED: AtomicU32 = AtomicU32::new(0);
    let index = fold(code as u64, 0x9E37_79B9_7F4A_7C15) as usize % BUCKETS;
    GENERATIONS.get(index).unwrap_or(&UNUSED)
}

/// How many code objects have been freed since [`watch`].
#[inline]
pub(super) fn freed_count() -> usize {
    FREED_COUNT.load(Acquire)
}

/// A number that changes whenever a code object at this address is freed.
#[inline]
pub(super) fn generation(code: usize) -> u32 {
    bucket(code).load(Acquire)
}

fn record(code: usize) {
    bucket(code).fetch_add(1, AcqRel);
    FREED_COUNT.fetch_add(1, AcqRel);
}

/// # Safety
///
/// The interpreter calls this in place of [`ORIGINAL`], with a code object to which no references are left.
unsafe extern "C-unwind" fn code_dealloc(code: *mut c_void) {
    record(code.addr());
    let original = ORIGINAL.load(Acquire);
    if original.is_null() {
        return; // Unreachable: `watch` stores the original before it installs this function.
    }
    // SAFETY: the pointer was read from `tp_dealloc` of the same type, so it is a destructor for this object.
    let original: Destructor = unsafe { std::mem::transmute(original) };
    // SAFETY: the interpreter passed this object for its destructor.
    unsafe { original(code) };
}

/// Starts to count. Further calls do nothing. The error is [`Reason::CodeType`] if the slot is not as expected.
///
/// # Safety
///
/// `slot` is the address of `PyCode_Type.tp_dealloc`.
pub(super) unsafe fn watch(slot: usize) -> Result<(), Reason> {
    let slot = ptr::with_exposed_provenance_mut::<*mut c_void>(slot);
    let ours = code_dealloc as Destructor as *mut c_void;
    // SAFETY: the caller guarantees the slot, an aligned pointer inside the type object. No code writes it once the
    // type is initialized.
    let slot = unsafe { AtomicPtr::from_ptr(slot) };
    let original = slot.load(Acquire);
    if original.is_null() {
        return Err(Reason::CodeType);
    }
    let stored = ORIGINAL.load(Acquire);
    // In the second case another tool has replaced our function and calls it. This does not apply if the slot still
    // holds the original: then a fork happened between the two stores below.
    if original == ours || (!stored.is_null() && stored != original) {
        return Ok(());
    }
    ORIGINAL.store(original, Release);
    match slot.compare_exchange(original, ours, AcqRel, Relaxed) {
        Ok(_) => Ok(()),
        Err(_) => {
            ORIGINAL.store(ptr::null_mut(), Release);
            Err(Reason::CodeType)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static FREED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C-unwind" fn free(code: *mut c_void) {
        FREED.store(code.addr(), Relaxed);
    }

    #[test]
    fn a_free_is_counted_before_the_original_runs_and_watching_twice_is_harmless() {
        let slot = AtomicPtr::new(free as Destructor as *mut c_void);
        let address = slot.as_ptr().expose_provenance();
        for _ in 0..2 {
            // SAFETY: the slot holds a destructor.
            unsafe { watch(address) }.unwrap();
        }
        let dealloc = slot.load(Relaxed);
        assert_ne!(dealloc, free as Destructor as *mut c_void);
        let (total, other, this) = (freed_count(), generation(0x2000), generation(0x1000));
        // SAFETY: the slot holds our destructor. It calls `free`, which accepts any address.
        unsafe { std::mem::transmute::<*mut c_void, Destructor>(dealloc)(ptr::without_provenance_mut(0x1000)) };
        assert_eq!(FREED.load(Relaxed), 0x1000);
        assert_eq!(super::freed_count(), total + 1);
        assert_eq!(generation(0x1000), this + 1);
        assert_eq!(generation(0x2000), other);
    }
}
