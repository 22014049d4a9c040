//! `cuGetExportTable`: returns the private table to the other simulated libraries, and "not supported" for every other
//! table.

use crate::copy::copy;
use crate::injection::{enable, subscribe};
use crate::module::launch;
use crate::state::{code, current_device, machine, monotonic_ns, nest};
use simcuda::bridge::{Bridge, ID, Processes};
use simcuda::config::Mig;
use simcuda::error::Error;
use simcuda::library_memory::Kernels;
use simcuda::out::Out;
use std::ffi::{CStr, c_char, c_int, c_void};

static BRIDGE: Bridge = Bridge {
    ledger_on,
    number,
    append,
    strikes,
    nest: nest_call,
    launch: launch_on,
    copy: copy_on,
    symbol,
    size_at,
    physical_devices,
    device_bytes,
    processes,
    name,
    attribute,
    nvlinks,
    has_peer_access,
    driver_version,
    library_memory,
    load,
    other_process_name,
    is_divided,
    reserved_bytes,
    stub,
    subscribe,
    enable_callbacks: enable,
};

extern "C" fn launch_on(stream: u64) -> c_int {
    launch(stream)
}

unsafe extern "C" fn copy_on(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: the caller guarantees that both ranges can be accessed.
    unsafe { copy(to, from, size, stream) }
}

extern "C" fn ledger_on() -> bool {
    machine().ledger.is_on()
}

extern "C" fn number() -> u64 {
    machine().ledger.number()
}

/// A string that another simulated library passed.
///
/// # Safety
/// `bytes` points to `length` bytes of UTF-8 text that outlive the result.
unsafe fn text<'a>(bytes: *const u8, length: usize) -> &'a str {
    // SAFETY: the caller guarantees `length` bytes of UTF-8 text that outlive the result.
    unsafe { std::str::from_utf8_unchecked(std::slice::from_raw_parts(bytes, length)) }
}

unsafe extern "C" fn append(number: u64, fields: *const u8, length: usize) {
    // SAFETY: the other simulated libraries are the only callers. They pass UTF-8 text of that length that outlives the
    // call.
    let fields = unsafe { text(fields, length) };
    machine().ledger.append(number, monotonic_ns(), fields);
}

unsafe extern "C" fn strikes(api: *const u8, length: usize) -> bool {
    // SAFETY: the other simulated libraries are the only callers. They pass UTF-8 text of that length that outlives the
    // call.
    let api = unsafe { text(api, length) };
    machine().config.faults.strikes(api, false)
}

extern "C" fn nest_call(enter: bool) {
    nest(enter);
}

extern "C" fn symbol(key: u64, size: u64) -> u64 {
    machine().symbol(key, size, current_device()).unwrap_or(0)
}

extern "C" fn size_at(address: u64) -> u64 {
    machine().pointee(address).filter(|p| p.base == address).map_or(0, |p| p.size)
}

extern "C" fn physical_devices() -> u32 {
    machine().config.physical
}

extern "C" fn device_bytes() -> u64 {
    machine().config.memory_bytes
}

extern "C" fn processes(physical: u32, out: Out<Processes>) {
    out.put(Processes::new(&machine().processes(physical)));
}

extern "C" fn name() -> *const c_char {
    machine().config.model.name.as_ptr()
}

extern "C" fn attribute(code: c_int) -> c_int {
    simcuda::attributes::attribute(code, 0, &machine().config.model)
}

extern "C" fn has_peer_access() -> bool {
    machine().config.model.has_peer_access()
}

extern "C" fn nvlinks() -> u32 {
    machine().config.model.nvlinks
}

extern "C" fn driver_version() -> c_int {
    machine().config.driver_version
}

extern "C" fn library_memory() -> bool {
    machine().config.library_memory
}

extern "C" fn load(number: u32) -> c_int {
    let Some(kernels) = Kernels::from_number(number) else { return Error::InvalidValue.code() };
    let device = current_device();
    code(machine().load(device, kernels))
}

unsafe extern "C" fn other_process_name(pid: u32, buffer: *mut c_char, length: usize) -> bool {
    let machine = machine();
    let Some(name) = machine.other_process_name(pid) else { return false };
    let kept = name.len().min(length.saturating_sub(1));
    if length > 0 {
        // SAFETY: the other simulated libraries are the only callers. Their buffer has `length` bytes, and `kept` and
        // the NUL are at most as many.
        unsafe {
            buffer.copy_from_nonoverlapping(name.as_ptr().cast(), kept);
            buffer.add(kept).write(0);
        }
    }
    true
}

extern "C" fn is_divided() -> bool {
    machine().config.mig != Mig::Off
}

extern "C" fn reserved_bytes() -> u64 {
    machine().config.reserved_bytes
}

unsafe extern "C" fn stub(name: *const c_char) {
    // SAFETY: the generated stubs pass string literals, which are NUL-terminated and live forever.
    let name = unsafe { CStr::from_ptr(name) };
    machine().stub(&name.to_string_lossy());
}

#[unsafe(no_mangle)]
extern "C" fn cuGetExportTable(table: Out<*const c_void>, id: Out<[u8; 16]>) -> c_int {
    if id.get() != Some(ID) || table.is_null() {
        machine().stub("cuGetExportTable");
        return Error::NotSupported.code();
    }
    table.put((&raw const BRIDGE).cast());
    0
}
