//! Intercepts lookups of CUDA functions that no object links with: `dlsym`, `dlvsym` and the driver's
//! `cuGetProcAddress`.
//!
//! `dlsym` is a stub. For the names of hooked functions it returns our entry. Otherwise it jumps to the original with
//! registers and stack unchanged, so that `RTLD_NEXT` and `RTLD_DEFAULT` see the program as the caller. `dlopen` is not
//! interposed, because that would lose the caller's RPATH.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_stackwalk::loader::{LoadedObject, ObjectListMark, Reading, SymbolName, unloaded, unloading};
use memtrace_trace::counters::Counter;

use super::call;
use super::driver::driver_symbol;
use super::entry::entry;
use super::hook::Hook;
use super::{registry, visible};
use crate::arch;
use crate::linker::deepbind::{self, ScanRules};
use crate::linker::mapped_object::is_searched_before_us;
use crate::linker::original::{self, OriginalFunction};
use crate::recording::errno::RestoreErrno;
use crate::recording::process::Process;
use crate::torch::libraries;

/// The exported `dlsym`. It jumps to [`hooked_dlsym`], because its own name may resolve to a `dlsym` of the executable.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlsym() {
    arch::jump_to!(hooked_dlsym)
}

#[unsafe(naked)]
unsafe extern "C" fn hooked_dlsym() {
    arch::replace_or_jump_2!(replacement, original::DLSYM)
}

/// The exported `dlvsym`: [`dlsym`] for names with a version. Tools with a `dlsym` of their own find the next one with
/// it.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlvsym() {
    arch::replace_or_jump_3!(versioned_replacement, original::DLVSYM)
}

/// `int dlclose(void *)`. After an unload, cached facts about code addresses are invalid. Nothing is kept loaded: the
/// program sees the same unloads as without us.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C-unwind" fn dlclose(handle: *mut c_void) -> c_int {
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = ORIGINAL.get_or_find(|| original::next_function(c"dlclose"));
    if original.is_null() {
        return -1;
    }
    let before = ObjectListMark::now();
    {
        let _errno = RestoreErrno::new();
        unloading();
    }
    // SAFETY: `original` is the `dlclose` that comes after ours, with this signature. It gets the program's argument,
    // and the library's destructors may unwind through this frame.
    let result = unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void) -> c_int = std::mem::transmute(original);
        original(handle)
    };
    // Another thread may have loaded an object meanwhile. Then facts are forgotten without need.
    let has_unloaded = ObjectListMark::now() != before;
    unloaded(has_unloaded);
    if has_unloaded {
        deepbind::forget_unloaded();
        original::forget_unloaded();
        call::forget_runtime_originals();
    }
    result
}

/// Our result for `dlsym(handle, name)`. Null means that the stub calls the original, which is known by then.
unsafe extern "C" fn replacement(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    const USE_ORIGINAL: *mut c_void = std::ptr::null_mut();
    if original::dlsym_address().is_null() || name.is_null() || handle == libc::RTLD_NEXT {
        return USE_ORIGINAL;
    }
    // SAFETY: `name` is not null, and `dlsym` takes a C string.
    let symbol = unsafe { CStr::from_ptr(name) };
    hooked_address(symbol, || original::dlsym_without_us(handle, symbol))
}

/// Our result for `dlvsym(handle, name, version)`, called from the address `caller`. Null means that the stub calls the
/// original, which is known by then.
unsafe extern "C" fn versioned_replacement(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> *mut c_void {
    const USE_ORIGINAL: *mut c_void = std::ptr::null_mut();
    if original::dlvsym_address().is_null() || name.is_null() || version.is_null() {
        return USE_ORIGINAL;
    }
    // SAFETY: `name` is not null, and `dlvsym` takes a C string.
    let symbol = unsafe { CStr::from_ptr(name) };
    if handle == libc::RTLD_NEXT {
        let is_next = symbol == c"dlsym" && is_searched_before_us(caller);
        return if is_next { hooked_dlsym as *mut c_void } else { USE_ORIGINAL };
    }
    hooked_address(symbol, || original::dlvsym_without_us(handle, symbol, version))
}

/// The address that a program gets for this name. `lookup_original` returns the address that it would get without us.
/// Null means that the stub calls the original.
fn hooked_address(symbol: &CStr, lookup_original: impl Fn() -> *mut c_void) -> *mut c_void {
    const USE_ORIGINAL: *mut c_void = std::ptr::null_mut();
    deepbind::scan_if_changed(&ScanRules { stub, object_loaded });
    if HAS_NEW_INTERPOSER.load(Ordering::Relaxed) && HAS_NEW_INTERPOSER.swap(false, Ordering::Relaxed) {
        find_interposers();
    }
    if !symbol.to_bytes().starts_with(b"cu") && !symbol.to_bytes().starts_with(b"nvml") {
        return USE_ORIGINAL;
    }
    if let Some((entry, original)) = unrecorded_entry(symbol.to_bytes()) {
        let found = lookup_original();
        if found.is_null() || found == entry {
            return found;
        }
        if original.get().is_null() {
            original.set(found);
        }
        // Another preloaded library has a function of this name, which calls the known one.
        return if original.get() == found { entry } else { found };
    }
    let Some(hook) = registry::by_symbol(symbol.to_bytes()) else { return USE_ORIGINAL };
    let entry = hook.entry as *mut c_void;
    let found = lookup_original();
    // A reference to the name in another preloaded library resolves to our entry.
    let is_ours = found.is_null() || found == entry;
    if !is_ours && set_original(hook, found) { entry } else { found }
}

/// Stores `found` as the hook's original. Returns `false` if the hook has another original already, or if programs link
/// with another runtime's function of this name.
///
/// In these cases the program gets the function that it asked for, without a hook. A runtime's calls are still recorded
/// in the driver.
fn set_original(hook: &'static Hook, found: *mut c_void) -> bool {
    let known = hook.original.get();
    if !known.is_null() {
        return known == found;
    }
    // Only `dlsym` returns the runtime's functions, so its hook is the caller here.
    let linked = if hook.is_runtime() { original::next_for_dlsym(hook.symbol) } else { found };
    let is_usable = linked.is_null() || linked == found;
    if is_usable {
        hook.original.set(found);
    }
    is_usable
}

/// Set when an object was loaded that exports a hooked function and is no CUDA library.
static HAS_NEW_INTERPOSER: AtomicBool = AtomicBool::new(false);

/// Observes each object that was loaded since the last `dlsym`.
fn object_loaded(reading: &Reading, object: &LoadedObject, file_name: &[u8]) {
    libraries::object_loaded(file_name);
    let exports = |hook: &&Hook| object.symbol(reading, &SymbolName::new(hook.symbol.to_bytes())).is_some();
    if !call::is_cuda_library(file_name) && registry::HOOKS.iter().any(exports) {
        HAS_NEW_INTERPOSER.store(true, Ordering::Relaxed);
    }
}

/// Finds functions that interpose hooked ones, in objects that the program has loaded with `RTLD_GLOBAL`. Only the
/// loader knows which those are. It is asked here, where the program is about to ask it too.
#[cold]
fn find_interposers() {
    for hook in registry::HOOKS {
        let found = original::next_for_dlsym(hook.symbol);
        if !found.is_null() && found != hook.entry as *mut c_void {
            hook.next.set(found);
        }
    }
}

/// The stub for a function that an object imports. `None` if the name is not hooked.
pub(crate) fn stub(name: &[u8]) -> Option<usize> {
    if name == b"dlsym" {
        // The exported symbol, as the loader would resolve it.
        return Some(dlsym as *const () as usize);
    }
    if name == b"dlclose" {
        return Some(dlclose as *const () as usize);
    }
    match name {
        b"cuGetProcAddress" => Some(cuGetProcAddress as *const () as usize),
        b"cuGetProcAddress_v2" => Some(cuGetProcAddress_v2 as *const () as usize),
        _ => match visible::by_symbol(name) {
            Some(answer) => Some(answer.exported as usize),
            None => registry::by_symbol(name).map(|hook| hook.exported as usize),
        },
    }
}

/// Our function of this exported name that records nothing, and the storage for its original.
fn unrecorded_entry(name: &[u8]) -> Option<(*mut c_void, &'static OriginalFunction)> {
    match name {
        b"cuGetProcAddress" => Some((cuGetProcAddress::own as *mut c_void, &GET_PROC_ADDRESS)),
        b"cuGetProcAddress_v2" => Some((cuGetProcAddress_v2::own as *mut c_void, &GET_PROC_ADDRESS_V2)),
        _ => visible::by_symbol(name).map(|answer| (answer.own as *mut c_void, answer.original)),
    }
}

static GET_PROC_ADDRESS: OriginalFunction = OriginalFunction::new();
static GET_PROC_ADDRESS_V2: OriginalFunction = OriginalFunction::new();

entry!(cuGetProcAddress => get_proc_address);
entry!(cuGetProcAddress_v2 => get_proc_address_v2);

/// The function that a program linked with this name would call without us. Null if there is none.
fn proc_address_original(cache: &'static OriginalFunction, name: &CStr) -> *mut c_void {
    cache.get_or_find(|| call::preloaded_function(name).unwrap_or_else(|| driver_symbol(name)))
}

/// `CUDA_ERROR_NOT_FOUND` of cuda.h.
const ERROR_NOT_FOUND: c_int = 500;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM` of cuda.h.
const PER_THREAD_STREAM: u64 = 1 << 1;

/// `cuGetProcAddress` as CUDA 11.3 to 11.8 export it.
unsafe extern "C-unwind" fn get_proc_address(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    let original = proc_address_original(&GET_PROC_ADDRESS, c"cuGetProcAddress");
    if original.is_null() {
        return ERROR_NOT_FOUND;
    }
    // SAFETY: this is the signature of `cuGetProcAddress` in cuda.h before CUDA 12.
    let original: unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int =
        unsafe { std::mem::transmute(original) };
    // SAFETY: the program passes these arguments for this function.
    let result = unsafe { original(name, out, version, flags) };
    if result == 0 {
        // SAFETY: the original has succeeded, so it has read `name` and written `out`.
        unsafe { hook_entry_point(name, out, version, flags) };
    }
    result
}

/// `cuGetProcAddress_v2`, from CUDA 12 on.
unsafe extern "C-unwind" fn get_proc_address_v2(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    let original = proc_address_original(&GET_PROC_ADDRESS_V2, c"cuGetProcAddress_v2");
    if original.is_null() {
        return ERROR_NOT_FOUND;
    }
    // SAFETY: this is the signature of `cuGetProcAddress_v2` in cuda.h from CUDA 12 on.
    let original: unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int =
        unsafe { std::mem::transmute(original) };
    // SAFETY: the program passes these arguments for this function.
    let result = unsafe { original(name, out, version, flags, status) };
    if result == 0 {
        // SAFETY: the original has succeeded, so it has read `name` and written `out`.
        unsafe { hook_entry_point(name, out, version, flags) };
    }
    result
}

/// Replaces an entry point that the driver has just returned by our stub, if the function is hooked.
///
/// # Safety
///
/// `name` and `out` are the arguments of a `cuGetProcAddress` that has succeeded.
unsafe fn hook_entry_point(name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) {
    if name.is_null() || out.is_null() {
        return;
    }
    // SAFETY: the caller guarantees that the driver has read `name` and written `out`. Neither is null.
    let (symbol, found) = unsafe { (CStr::from_ptr(name), *out) };
    if found.is_null() {
        return;
    }
    if symbol.to_bytes() == b"cuGetProcAddress" {
        let (entry, original) = if version >= 12000 {
            (cuGetProcAddress_v2::own as *mut c_void, &GET_PROC_ADDRESS_V2)
        } else {
            (cuGetProcAddress::own as *mut c_void, &GET_PROC_ADDRESS)
        };
        // Another library's `cuGetProcAddress` can return our entry for its own name.
        // SAFETY: the caller guarantees that the driver has written `out`.
        unsafe { replace(out, found, entry, original) };
        return;
    }
    if let Some(answer) = visible::by_entry_point(symbol.to_bytes(), version) {
        // SAFETY: the caller guarantees that the driver has written `out`.
        unsafe { replace(out, found, answer.own as *mut c_void, answer.original) };
        return;
    }
    let mut interfaces = registry::interfaces(symbol.to_bytes()).peekable();
    let hook = if interfaces.peek().is_none() {
        let by_version = registry::by_entry_point(symbol.to_bytes(), version, flags & PER_THREAD_STREAM != 0);
        let Some(hook) = by_version else { return };
        // Another library's `cuGetProcAddress` returns its own functions, whose names resolve to our entries.
        if found == hook.entry as *mut c_void {
            return;
        }
        Some(hook).filter(|_| !newer_interface(symbol, found))
    } else {
        if registry::interfaces(symbol.to_bytes()).any(|hook| found == hook.entry as *mut c_void) {
            return;
        }
        interfaces.find(|hook| call::driver_original(hook) == found)
    };
    let Some(hook) = hook.filter(|hook| set_original(hook, found)) else {
        if let Some(process) = Process::if_started() {
            process.count(Counter::UnwrappedEntryPoints, 1);
        }
        return;
    };
    // SAFETY: the caller guarantees that the driver has written `out`, so it is writable. The stub has the signature of
    // the function it replaces.
    unsafe { *out = hook.entry as *mut c_void };
}

/// Replaces the function `found` by ours, unless another one is known as its original.
///
/// # Safety
///
/// `out` is writable.
unsafe fn replace(out: *mut *mut c_void, found: *mut c_void, entry: *mut c_void, original: &'static OriginalFunction) {
    if found != entry && original.get().is_null() {
        original.set(found);
    }
    if original.get() == found {
        // SAFETY: the caller guarantees it.
        unsafe { *out = entry };
    }
}

/// Whether the driver returned an interface newer than those known here (`..._v3`). Its arguments may differ.
fn newer_interface(symbol: &CStr, found: *mut c_void) -> bool {
    ["_v3", "_v4", "_v5"].iter().any(|suffix| {
        let mut name = symbol.to_bytes().to_vec();
        name.extend_from_slice(suffix.as_bytes());
        std::ffi::CString::new(name).is_ok_and(|name| driver_symbol(&name) == found)
    })
}
