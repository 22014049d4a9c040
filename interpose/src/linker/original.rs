//! The original `dlsym` and `dlvsym`, and the addresses of original functions.
//!
//! Constraint: only [`next_for_dlsym`], [`dlsym_without_us`], [`dlvsym_without_us`] and [`load`] call the loader. The
//! first three are for the hooks of `dlsym` and `dlvsym` alone: the program itself waits for the loader's lock there.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use memtrace_stackwalk::loader::{NextSymbol, c_library_symbol, first_symbol, next_symbol};

use super::mapped_object::containing;
use super::startup::startup_object_count;

/// The `dlsym` that the program would call without us: the C library's, or that of another preloaded library. Null
/// before [`dlsym_address`] has found it.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The C library's `dlvsym`. Null before [`dlvsym_address`] has found it, and if the C library is not glibc.
pub(crate) static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// A function of the C library itself, whatever function of this name the program has. Null if there is none.
pub(crate) fn c_library_function(name: &CStr) -> *mut c_void {
    with_exposed_provenance_mut(c_library_symbol(name))
}

/// The value of [`DLVSYM`], which it searches for if necessary.
pub(crate) fn dlvsym_address() -> *mut c_void {
    if DLVSYM.load(Ordering::Relaxed).is_null() {
        DLVSYM.store(c_library_function(c"dlvsym"), Ordering::Relaxed);
    }
    DLVSYM.load(Ordering::Relaxed)
}

/// The result of the program's `dlvsym` without us.
pub(crate) fn dlvsym_without_us(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    // SAFETY: the pointer is null or the address of a function of this type.
    let dlvsym = unsafe { std::mem::transmute::<*mut c_void, Option<Dlvsym>>(dlvsym_address()) };
    // SAFETY: the program passed `handle` and `version`, and `name` is a C string.
    dlvsym.map_or(std::ptr::null_mut(), |dlvsym| unsafe { dlvsym(handle, name.as_ptr(), version) })
}

/// The value of [`DLSYM`], which it searches for if necessary.
pub(crate) extern "C" fn dlsym_address() -> *mut c_void {
    let known = DLSYM.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    let next = next_symbol(c"dlsym", None).map_or(0, |next| next.address);
    let next = if next == 0 { c_library_symbol(c"dlsym") } else { next };
    DLSYM.store(with_exposed_provenance_mut(next), Ordering::Relaxed);
    with_exposed_provenance_mut(next)
}

/// The result of the program's `dlsym` without us.
pub(crate) fn dlsym_without_us(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the program passed `handle`.
    unsafe { call_dlsym(dlsym_address(), handle, name) }
}

/// Calls a `dlsym`.
///
/// # Safety
///
/// `dlsym` is null or the address of a `dlsym`, and `handle` is valid for it.
unsafe fn call_dlsym(dlsym: *mut c_void, handle: *mut c_void, name: &CStr) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    // SAFETY: the caller guarantees null or a function of this type.
    let dlsym = unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(dlsym) };
    // SAFETY: the caller guarantees a valid handle, and `name` is a C string.
    dlsym.map_or(std::ptr::null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) })
}

/// The C library's `dlsym(RTLD_NEXT, name)`, for the hook of `dlsym`. Unlike [`next_at_startup`] it knows which objects
/// of `dlopen` are in the global scope. Null if there is no such symbol.
///
/// It does not look up names that no object after this one exports. On a failure the C library allocates an error
/// message, and the program's `malloc` may be in an inconsistent state at this moment.
pub(crate) fn next_for_dlsym(name: &CStr) -> *mut c_void {
    if next_symbol(name, None).is_none() {
        return std::ptr::null_mut();
    }
    // SAFETY: `RTLD_NEXT` is a valid handle. The caller is this library.
    clear_dlerror(unsafe { call_dlsym(c_library_function(c"dlsym"), libc::RTLD_NEXT, name) })
}

/// Clears the error message of a failure, so that the program's next `dlerror` does not return it.
fn clear_dlerror(found: *mut c_void) -> *mut c_void {
    if found.is_null() {
        // SAFETY: `dlerror` takes no arguments, and its result is not used.
        unsafe { libc::dlerror() };
    }
    found
}

/// The symbol of the first object after this one, of those that were loaded before the program started.
pub(crate) fn next_at_startup(name: &CStr) -> Option<NextSymbol> {
    next_symbol(name, startup_object_count())
}

/// A function that the program would call without us, of the objects after this one. Null if there is none.
pub(crate) fn next_function(name: &CStr) -> *mut c_void {
    with_exposed_provenance_mut(next_symbol(name, None).map_or(0, |next| next.address))
}

/// A symbol that any loaded object exports. Null if there is none.
pub(crate) fn global_address(name: &CStr) -> *mut c_void {
    with_exposed_provenance_mut(first_symbol(name))
}

/// [`global_address`] as a pointer of type `T`. `None` if there is no such symbol.
///
/// # Safety
///
/// `T` is a pointer type that matches the symbol.
pub(crate) unsafe fn global_symbol<T: Copy>(name: &CStr) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    let found = NonNull::new(global_address(name))?;
    // SAFETY: the caller guarantees the type, and `T` has the size of a pointer.
    Some(unsafe { std::mem::transmute_copy::<NonNull<c_void>, T>(&found) })
}

/// Loads an object. Loads an object, under the loader's lock. Null if that fails.
#[cfg(not(test))]
pub(crate) fn load(name: &CStr) -> *mut c_void {
    // SAFETY: `name` is a C string and names a library of the C library's own family.
    clear_dlerror(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) })
}

/// The address of an original function, found once.
///
/// The program may unload the object that contains the function. The `dlclose` hook then calls [`forget_unloaded`], and
/// the function is searched again. So no object is kept loaded, and the address need not be checked at each call.
pub(crate) struct OriginalFunction {
    address: AtomicPtr<c_void>,
    /// [`MappedObject::identity`](super::mapped_object::MappedObject::identity) of the function's object. 0 if there is
    /// none.
    object: AtomicUsize,
    /// Whether [`LISTED`] has this function.
    is_listed: AtomicBool,
    next: AtomicPtr<OriginalFunction>,
}

/// The first of all functions that have had an address. The list only grows.
static LISTED: AtomicPtr<OriginalFunction> = AtomicPtr::new(std::ptr::null_mut());

impl OriginalFunction {
    pub(crate) const fn new() -> OriginalFunction {
        OriginalFunction {
            address: AtomicPtr::new(std::ptr::null_mut()),
            object: AtomicUsize::new(0),
            is_listed: AtomicBool::new(false),
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// The address. If it is unknown, `find` searches for it; null is not stored as a result.
    #[inline]
    pub(crate) fn get_or_find(&'static self, find: impl FnOnce() -> *mut c_void) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let found = find();
        self.set(found);
        found
    }

    /// The address if it is known, otherwise null.
    #[inline]
    pub(crate) fn get(&self) -> *mut c_void {
        self.address.load(Ordering::Relaxed)
    }

    /// Stores the address, which may be null if it is still unknown.
    #[cold]
    pub(crate) fn set(&'static self, address: *mut c_void) {
        self.object.store(object_identity(address), Ordering::Relaxed);
        self.address.store(address, Ordering::Release);
        if address.is_null() || self.is_listed.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut first = LISTED.load(Ordering::Acquire);
        loop {
            self.next.store(first, Ordering::Relaxed);
            let this = std::ptr::from_ref(self).cast_mut();
            match LISTED.compare_exchange_weak(first, this, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }
}

/// Identifies the object that contains this address. 0 if there is none.
fn object_identity(address: *mut c_void) -> usize {
    if address.is_null() { 0 } else { containing(address.addr()).map_or(0, |object| object.identity()) }
}

/// Forgets the addresses of functions whose objects are not loaded any more.
#[cold]
pub(crate) fn forget_unloaded() {
    let mut next = LISTED.load(Ordering::Acquire);
    // SAFETY: the list contains only statics, which `set` has linked.
    while let Some(function) = unsafe { next.as_ref() } {
        let address = function.address.load(Ordering::Acquire);
        if object_identity(address) != function.object.load(Ordering::Relaxed) {
            // Another thread may have stored a new address meanwhile, which stays.
            let null = std::ptr::null_mut();
            let _ = function.address.compare_exchange(address, null, Ordering::AcqRel, Ordering::Relaxed);
        }
        next = function.next.load(Ordering::Acquire);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_an_unloaded_function_is_forgotten() {
        static STAYS: OriginalFunction = OriginalFunction::new();
        static GOES: OriginalFunction = OriginalFunction::new();
        static AGAIN: OriginalFunction = OriginalFunction::new();
        // SAFETY: a C string. The library is unloaded below, before its function could be called.
        let library = unsafe { libc::dlopen(c"libz.so.1".as_ptr(), libc::RTLD_NOW) };
        let find = || super::super::shared_objects::exported_by(b"libz.so.1", c"zlibVersion");
        let is_loaded = !find().is_null();
        assert!(is_loaded && !library.is_null(), "this test needs libz.so.1");
        STAYS.set(c_library_function(c"malloc"));
        let before = GOES.get_or_find(find);
        AGAIN.set(before);
        forget_unloaded();
        assert_eq!((GOES.get(), AGAIN.get()), (before, before), "nothing was unloaded");
        // SAFETY: the handle is valid and closed once.
        unsafe { libc::dlclose(library) };
        assert!(find().is_null(), "another test keeps the library loaded");
        forget_unloaded();
        assert!(GOES.get().is_null() && AGAIN.get().is_null() && !STAYS.get().is_null());
    }
}
