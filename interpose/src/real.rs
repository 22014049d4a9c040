//! The `dlsym` behind ours, and the originals found with it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::objects;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The `dlsym` that the program would call without us: the C library's, or that of another preloaded library. Null until
/// [`dlsym_address`] has found it.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The C library's `dlvsym`; null until [`dlvsym_address`] has found it, and over another library than glibc.
pub(crate) static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The C library's `dlsym`.
static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The objects that have the C library's `dlsym`: glibc's, the one it was in before 2.34, musl's.
const C_LIBRARY: &[&[u8]] = &[b"libc.so.", b"libdl.so.", b"ld-musl-"];

/// Finds the C library's `dlsym` in its own symbol table: the plain name is ours, and `dlvsym`, which tells names by version, too.
fn real_dlsym() -> Option<Dlsym> {
    let mut found = REAL.load(Ordering::Relaxed);
    if found.is_null() {
        found = objects::exported(b"dlsym", C_LIBRARY) as *mut c_void;
        REAL.store(found, Ordering::Relaxed);
    }
    // SAFETY: null, or the address of a function of this type.
    unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(found) }
}

/// See [`DLVSYM`].
pub(crate) fn dlvsym_address() -> *mut c_void {
    if DLVSYM.load(Ordering::Relaxed).is_null() {
        DLVSYM.store(objects::exported(b"dlvsym", C_LIBRARY) as *mut c_void, Ordering::Relaxed);
    }
    DLVSYM.load(Ordering::Relaxed)
}

/// What the program would be answered by `dlvsym` without us.
pub(crate) fn ask_version(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    // SAFETY: null, or the address of a function of this type.
    let dlvsym = unsafe { std::mem::transmute::<*mut c_void, Option<Dlvsym>>(dlvsym_address()) };
    // SAFETY: the program's own handle and version; the name is a C string.
    dlvsym.map_or(std::ptr::null_mut(), |dlvsym| unsafe { dlvsym(handle, name.as_ptr(), version) })
}

/// See [`DLSYM`].
pub(crate) extern "C" fn dlsym_address() -> *mut c_void {
    let known = DLSYM.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    let next = lookup(libc::RTLD_NEXT, c"dlsym");
    let next = if next.is_null() { REAL.load(Ordering::Relaxed) } else { next };
    DLSYM.store(next, Ordering::Relaxed);
    next
}

/// The C library's `dlsym(handle, name)`: for our own questions. Null when there is no such symbol.
///
/// What nobody exports is not asked for: the C library allocates the words for its failure, and the program's `malloc` may be in the
/// middle of something.
pub(crate) fn lookup(handle: *mut c_void, name: &CStr) -> *mut c_void {
    if !objects::is_exported(name.to_bytes()) {
        return std::ptr::null_mut();
    }
    // SAFETY: the handle is one of dlopen's or a special one; the name is a C string.
    forget_failure(real_dlsym().map_or(std::ptr::null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) }))
}

/// What all loaded objects export by this name, as a pointer of type `T`.
///
/// # Safety
/// `T` is the type of a pointer to what has this name.
pub(crate) unsafe fn global<T: Copy>(name: &CStr) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    let found = NonNull::new(lookup(libc::RTLD_DEFAULT, name))?;
    // SAFETY: as promised by the caller; a pointer's size was looked at.
    Some(unsafe { std::mem::transmute_copy::<NonNull<c_void>, T>(&found) })
}

/// Our own failed questions are not to be found by the program's next `dlerror`.
fn forget_failure(found: *mut c_void) -> *mut c_void {
    if found.is_null() {
        // SAFETY: no arguments; the message is not looked at.
        unsafe { libc::dlerror() };
    }
    found
}

/// What the program would be answered without us.
pub(crate) fn ask(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: null, or the address of a function of this type.
    let dlsym = unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(dlsym_address()) };
    // SAFETY: the program's own handle; the name is a C string.
    dlsym.map_or(std::ptr::null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) })
}

/// A handle of an object that is loaded already, or null. Whoever does not [`close`] it keeps the object from being unloaded.
pub(crate) fn loaded(path: &CStr) -> *mut c_void {
    const FLAGS: c_int = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: a C string; RTLD_NOLOAD loads nothing and runs nothing.
    forget_failure(unsafe { libc::dlopen(path.as_ptr(), FLAGS) })
}

/// The same, but loads it if need be.
#[cfg(not(test))]
pub(crate) fn load(name: &CStr) -> *mut c_void {
    // SAFETY: a C string; a library of the C library's own family.
    forget_failure(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) })
}

/// Gives a handle back, so that the program can unload the object.
pub(crate) fn close(handle: *mut c_void) {
    if !handle.is_null() {
        // SAFETY: a handle of `loaded`, given back once. The object is in use by the program, so this unloads nothing.
        unsafe { libc::dlclose(handle) };
    }
}

/// An original's address, found once.
pub(crate) struct Original {
    address: AtomicPtr<c_void>,
}

impl Original {
    pub(crate) const fn new() -> Original {
        Original { address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The address, or what `find` finds; null is asked for again next time.
    #[inline]
    pub(crate) fn get(&self, find: impl FnOnce() -> *mut c_void) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let found = find();
        self.set(found);
        found
    }

    /// What is known now.
    #[inline]
    pub(crate) fn peek(&self) -> *mut c_void {
        self.address.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, address: *mut c_void) {
        self.address.store(address, Ordering::Relaxed);
    }
}
