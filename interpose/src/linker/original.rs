//! The original `dlsym` and `dlvsym`, and the original functions found with them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::shared_objects::{SharedObject, exported_address, find_by_name, is_exported};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The `dlsym` that the program would call without us: the C library's, or that of another preloaded library. Null
/// before [`dlsym_address`] has found it.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The C library's `dlvsym`. Null before [`dlvsym_address`] has found it, and if the C library is not glibc.
pub(crate) static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The C library's `dlsym`.
static LIBC_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The objects that contain the C library's `dlsym`: glibc's, libdl before glibc 2.34, and musl's.
const C_LIBRARY: &[&[u8]] = &[b"libc.so.", b"libdl.so.", b"ld-musl-"];

/// Finds the C library's `dlsym` in that library's symbol table. The name itself resolves to our own function, and so
/// does `dlvsym`, which could find it by version.
fn libc_dlsym() -> Option<Dlsym> {
    let mut found = LIBC_DLSYM.load(Ordering::Relaxed);
    if found.is_null() {
        found = exported_address(b"dlsym", C_LIBRARY) as *mut c_void;
        LIBC_DLSYM.store(found, Ordering::Relaxed);
    }
    // SAFETY: the pointer is null or the address of a function of this type.
    unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(found) }
}

/// The value of [`DLVSYM`], which it searches for if necessary.
pub(crate) fn dlvsym_address() -> *mut c_void {
    if DLVSYM.load(Ordering::Relaxed).is_null() {
        DLVSYM.store(exported_address(b"dlvsym", C_LIBRARY) as *mut c_void, Ordering::Relaxed);
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
    let next = lookup(libc::RTLD_NEXT, c"dlsym");
    let next = if next.is_null() { LIBC_DLSYM.load(Ordering::Relaxed) } else { next };
    DLSYM.store(next, Ordering::Relaxed);
    next
}

/// The C library's `dlsym(handle, name)`, for lookups of our own. Null if there is no such symbol.
///
/// It does not look up names that no object exports. On a failure the C library allocates an error message, and the
/// program's `malloc` may be in an inconsistent state at this moment.
pub(crate) fn lookup(handle: *mut c_void, name: &CStr) -> *mut c_void {
    if !is_exported(name.to_bytes()) {
        return std::ptr::null_mut();
    }
    // SAFETY: `handle` is a special one or comes from `dlopen`, and `name` is a C string.
    clear_dlerror(libc_dlsym().map_or(std::ptr::null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) }))
}

/// A symbol that any loaded object exports, as a pointer of type `T`. `None` if there is none.
///
/// # Safety
///
/// `T` is a pointer type that matches the symbol.
pub(crate) unsafe fn global_symbol<T: Copy>(name: &CStr) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    let found = NonNull::new(lookup(libc::RTLD_DEFAULT, name))?;
    // SAFETY: the caller guarantees the type, and `T` has the size of a pointer.
    Some(unsafe { std::mem::transmute_copy::<NonNull<c_void>, T>(&found) })
}

/// A symbol that the loaded object of this file name exports, never one of ours. Null if there is none.
pub(crate) fn exported_by(file_name: &[u8], name: &CStr) -> *mut c_void {
    find_by_name(file_name).map_or(std::ptr::null_mut(), |object| exported_by_object(&object, name))
}

/// A symbol that a loaded object or one of its dependencies exports. Null if there is none, and for the executable.
pub(crate) fn exported_by_object(object: &SharedObject, name: &CStr) -> *mut c_void {
    let handle = if object.path.is_empty() { std::ptr::null_mut() } else { open_loaded(&object.path) };
    if handle.is_null() { handle } else { lookup(handle, name) }
}

/// Clears the error message of a failed lookup, so that the program's next `dlerror` does not return it.
fn clear_dlerror(found: *mut c_void) -> *mut c_void {
    if found.is_null() {
        // SAFETY: `dlerror` takes no arguments, and its result is not used.
        unsafe { libc::dlerror() };
    }
    found
}

/// The result of the program's `dlsym` without us.
pub(crate) fn dlsym_without_us(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the pointer is null or the address of a function of this type.
    let dlsym = unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(dlsym_address()) };
    // SAFETY: the program passed `handle`, and `name` is a C string.
    dlsym.map_or(std::ptr::null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) })
}

/// A handle of an object that is already loaded, otherwise null. Without a [`close`] the object stays loaded for good.
pub(crate) fn open_loaded(path: &CStr) -> *mut c_void {
    const FLAGS: c_int = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: `path` is a C string. `RTLD_NOLOAD` loads nothing and runs no code of the object.
    clear_dlerror(unsafe { libc::dlopen(path.as_ptr(), FLAGS) })
}

/// A handle of an object, which is loaded if necessary. Null if that fails.
#[cfg(not(test))]
pub(crate) fn load(name: &CStr) -> *mut c_void {
    // SAFETY: `name` is a C string and names a library of the C library's own family.
    clear_dlerror(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) })
}

/// Releases a handle, so that the program can unload the object.
pub(crate) fn close(handle: *mut c_void) {
    if !handle.is_null() {
        // SAFETY: `handle` comes from `open_loaded` and is released once. The program still uses the object, so this
        // unloads nothing.
        unsafe { libc::dlclose(handle) };
    }
}

/// The address of an original function, found once.
pub(crate) struct OriginalFunction {
    address: AtomicPtr<c_void>,
}

impl OriginalFunction {
    pub(crate) const fn new() -> OriginalFunction {
        OriginalFunction { address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The address. If it is unknown, `find` searches for it; null is not stored as a result.
    #[inline]
    pub(crate) fn get_or_find(&self, find: impl FnOnce() -> *mut c_void) -> *mut c_void {
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
    pub(crate) fn set(&self, address: *mut c_void) {
        self.address.store(address, Ordering::Relaxed);
    }
}
