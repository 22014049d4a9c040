//! How CUDA functions are reached that nobody links with: `dlsym` and the driver's own `cuGetProcAddress`.
//!
//! `dlsym` is a stub that jumps to the real one with everything as it came, so that `RTLD_NEXT` and `RTLD_DEFAULT` see their
//! caller; only for the names of hooked functions is the answer ours. `dlopen` is not interposed: the caller's RPATH
//! would be lost.

use std::ffi::{CStr, c_char, c_int, c_void};

use memtrace_trace::counters::Counter;

use super::call::{driver, driver_function};
use super::deepbind;
use super::entry::entry;
use super::registry::{self, Hook};
use crate::objects;
use crate::process::Process;
use crate::real::{self, Original};
use crate::stack::native::{unloaded, unloading};

/// The exported `dlsym`. Its own name may lead elsewhere: to the executable's, where that has one.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlsym() {
    std::arch::naked_asm!("jmp {ours}", ours = sym our_dlsym)
}

#[unsafe(naked)]
unsafe extern "C" fn our_dlsym() {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {replacement}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jne 2f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "je 2f",
        "jmp rax",
        "2:",
        "ret",
        replacement = sym replacement,
        real = sym real::DLSYM,
    )
}

/// The exported `dlvsym`: the same for names with a version, which is also how tools that have a `dlsym` of their own find the next one.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlvsym() {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rcx, qword ptr [rsp + 24]",
        "call {replacement}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jne 2f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "je 2f",
        "jmp rax",
        "2:",
        "ret",
        replacement = sym versioned_replacement,
        real = sym real::DLVSYM,
    )
}

/// `int dlclose(void *)`: what is remembered about addresses may no longer hold.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C-unwind" fn dlclose(handle: *mut c_void) -> c_int {
    static ORIGINAL: Original = Original::new();
    let original = ORIGINAL.get(|| real::lookup(libc::RTLD_NEXT, c"dlclose"));
    if original.is_null() {
        return -1;
    }
    let before = objects::unloaded_count();
    unloading();
    // SAFETY: the original of this symbol, with the argument as it came. The library's destructors run in it.
    let result = unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void) -> c_int = std::mem::transmute(original);
        original(handle)
    };
    let some = objects::unloaded_count() != before;
    unloaded(some);
    if some {
        deepbind::forget_unloaded();
    }
    result
}

/// Our answer to `dlsym(handle, name)`; null leaves it to the real one, which has been found by then.
unsafe extern "C" fn replacement(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    const NO: *mut c_void = std::ptr::null_mut();
    if real::dlsym_address().is_null() || name.is_null() || handle == libc::RTLD_NEXT {
        return NO;
    }
    // SAFETY: dlsym's name is a C string.
    let symbol = unsafe { CStr::from_ptr(name) };
    answer(symbol, || real::ask(handle, symbol))
}

/// Our answer to `dlvsym(handle, name, version)`, asked from `caller`; null leaves it to the real one, which has been found by then.
unsafe extern "C" fn versioned_replacement(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> *mut c_void {
    const NO: *mut c_void = std::ptr::null_mut();
    if real::dlvsym_address().is_null() || name.is_null() || version.is_null() {
        return NO;
    }
    // SAFETY: dlvsym's name is a C string.
    let symbol = unsafe { CStr::from_ptr(name) };
    if handle == libc::RTLD_NEXT {
        let is_next = symbol == c"dlsym" && objects::comes_before_us(caller);
        return if is_next { our_dlsym as *mut c_void } else { NO };
    }
    answer(symbol, || real::ask_version(handle, symbol, version))
}

/// What a program is given for this name, of which `ask` tells what it would be without us; null where that is the same.
fn answer(symbol: &CStr, ask: impl Fn() -> *mut c_void) -> *mut c_void {
    const NO: *mut c_void = std::ptr::null_mut();
    deepbind::look();
    if !symbol.to_bytes().starts_with(b"cu") {
        return NO;
    }
    if let Some((entry, original)) = proc_address_entry(symbol.to_bytes()) {
        let found = ask();
        if found.is_null() || found == entry {
            return found;
        }
        if original.peek().is_null() {
            original.set(found);
        }
        return entry;
    }
    let Some(hook) = registry::by_symbol(symbol.to_bytes()) else { return NO };
    let entry = hook.entry as *mut c_void;
    let found = ask();
    // Another preloaded library's own reference to the name leads to us.
    let ours = found.is_null() || found == entry;
    if !ours && adopt(hook, found) { entry } else { found }
}

/// Takes `found` for the hook's original. False when the hook has another one already, or when programs are linked with another
/// runtime's function of that name: then the program gets what it asked for, unhooked; a runtime's calls are still seen in the
/// driver.
fn adopt(hook: &Hook, found: *mut c_void) -> bool {
    let known = hook.original.peek();
    if !known.is_null() {
        return known == found;
    }
    let linked = if hook.is_runtime() { real::lookup(libc::RTLD_NEXT, hook.symbol) } else { found };
    let sound = linked.is_null() || linked == found;
    if sound {
        objects::keep(found as usize);
        hook.original.set(found);
    }
    sound
}

/// What an object that imports this name is to call: the stub, where the name is hooked.
pub(super) fn stub(name: &[u8]) -> Option<usize> {
    if name == b"dlsym" {
        // By its name: what the loader would give.
        return Some(dlsym as *const () as usize);
    }
    proc_address_entry(name)
        .map(|(entry, _)| entry as usize)
        .or_else(|| registry::by_symbol(name).map(|h| h.entry as usize))
}

/// Our own `cuGetProcAddress` of this exported name, and where its original is kept.
fn proc_address_entry(name: &[u8]) -> Option<(*mut c_void, &'static Original)> {
    match name {
        b"cuGetProcAddress" => Some((cuGetProcAddress as *mut c_void, &GET_PROC_ADDRESS)),
        b"cuGetProcAddress_v2" => Some((cuGetProcAddress_v2 as *mut c_void, &GET_PROC_ADDRESS_V2)),
        _ => None,
    }
}

static GET_PROC_ADDRESS: Original = Original::new();
static GET_PROC_ADDRESS_V2: Original = Original::new();

entry!(cuGetProcAddress => get_proc_address);
entry!(cuGetProcAddress_v2 => get_proc_address_v2);

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 500;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_STREAM: u64 = 1 << 1;

/// CUDA 11.3 to 11.8.
unsafe extern "C-unwind" fn get_proc_address(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    let original = driver_function(&GET_PROC_ADDRESS, c"cuGetProcAddress");
    if original.is_null() {
        return NOT_FOUND;
    }
    // SAFETY: cuda.h's signature before CUDA 12.
    let original: unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int =
        unsafe { std::mem::transmute(original) };
    // SAFETY: the program's own arguments.
    let result = unsafe { original(name, out, version, flags) };
    if result == 0 {
        // SAFETY: the original has read the name and written the pointer.
        unsafe { wrap(name, out, version, flags) };
    }
    result
}

/// CUDA 12 and later.
unsafe extern "C-unwind" fn get_proc_address_v2(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    let original = driver_function(&GET_PROC_ADDRESS_V2, c"cuGetProcAddress_v2");
    if original.is_null() {
        return NOT_FOUND;
    }
    // SAFETY: cuda.h's signature from CUDA 12 on.
    let original: unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int =
        unsafe { std::mem::transmute(original) };
    // SAFETY: the program's own arguments.
    let result = unsafe { original(name, out, version, flags, status) };
    if result == 0 {
        // SAFETY: the original has read the name and written the pointer.
        unsafe { wrap(name, out, version, flags) };
    }
    result
}

/// Replaces an entry point that the driver has just given out.
///
/// # Safety
/// `name` and `out` must be what a successful `cuGetProcAddress` was called with.
unsafe fn wrap(name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) {
    if name.is_null() || out.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let (symbol, found) = unsafe { (CStr::from_ptr(name), *out) };
    if found.is_null() {
        return;
    }
    if symbol.to_bytes() == b"cuGetProcAddress" {
        let (entry, original) = if version >= 12000 {
            (cuGetProcAddress_v2 as *mut c_void, &GET_PROC_ADDRESS_V2)
        } else {
            (cuGetProcAddress as *mut c_void, &GET_PROC_ADDRESS)
        };
        if original.peek().is_null() {
            original.set(found);
        }
        if original.peek() == found {
            // SAFETY: the caller's promise.
            unsafe { *out = entry };
        }
        return;
    }
    let Some(hook) = registry::by_entry_point(symbol.to_bytes(), version, flags & PER_THREAD_STREAM != 0) else {
        return;
    };
    if newer_interface(symbol, found) || !adopt(hook, found) {
        if let Some(process) = Process::if_started() {
            process.count(Counter::UnwrappedEntryPoints, 1);
        }
        return;
    }
    // SAFETY: the caller's promise; the stub has the interface of the function it stands for.
    unsafe { *out = hook.entry as *mut c_void };
}

/// Whether the driver gave out an interface newer than the ones we know (`..._v3`), whose arguments may differ.
fn newer_interface(symbol: &CStr, found: *mut c_void) -> bool {
    let driver = driver();
    if driver.is_null() {
        return false;
    }
    ["_v3", "_v4", "_v5"].iter().any(|suffix| {
        let mut name = symbol.to_bytes().to_vec();
        name.extend_from_slice(suffix.as_bytes());
        std::ffi::CString::new(name).is_ok_and(|name| real::lookup(driver, &name) == found)
    })
}
