//! `c10::reportMemoryUsageToProfiler`: libc10 and libc10_cuda call it through their PLT for every block that they
//! allocate or free.
//!
//! It has three uses:
//! - the rounded size of a block that the tracker has just reported;
//! - a fallback if the tracker cannot be attached;
//! - CPU tensors, which PyTorch reports only while `c10::memoryProfilingEnabled()` returns true.
//!
//! `c10::Device` is two bytes, type and index, passed in one register (c10/core/Device.h).

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::options::Cpu;

use super::flags::current_flags;
use super::libraries::{libc10, set_loaded};
use super::tracker::TRACKER;
use super::{gate, gc, record_function, workspaces};
use crate::linker::original::OriginalFunction;
use crate::recording::device_use;
use crate::recording::guard::Guard;
use crate::recording::process::session_options;

/// `c10::DeviceType::CPU` and `CUDA` (c10/core/DeviceType.h).
const CPU: u8 = 0;
const CUDA: u8 = 1;
/// An event with the allocator's totals follows every this many reports.
const TOTALS_EVERY: u32 = 1024;

const PROFILING_ENABLED: &CStr = c"_ZN3c1022memoryProfilingEnabledEv";
const REPORT_USAGE: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
const REPORT_OUT_OF_MEMORY: &CStr = c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE";

/// The names of the functions that this file replaces, and what replaces them.
pub(super) fn replacements() -> [(&'static CStr, *const ()); 3] {
    [
        (PROFILING_ENABLED, memory_profiling_enabled as *const ()),
        (REPORT_USAGE, report_memory_usage as *const ()),
        (REPORT_OUT_OF_MEMORY, report_out_of_memory as *const ()),
    ]
}

/// `bool c10::memoryProfilingEnabled()`.
#[cfg_attr(not(test), unsafe(export_name = "_ZN3c1022memoryProfilingEnabledEv"))]
extern "C-unwind" fn memory_profiling_enabled() -> bool {
    set_loaded();
    if records_cpu() {
        return true;
    }
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libc10(&ORIGINAL, PROFILING_ENABLED);
    if original.is_null() {
        return false;
    }
    // SAFETY: `original` is libc10's function of this symbol, which has this signature.
    unsafe {
        let original: unsafe extern "C-unwind" fn() -> bool = std::mem::transmute(original);
        original()
    }
}

/// Whether CPU tensors are recorded, by the options.
static MODE: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;

/// Forgets the options, because a recording with others begins.
pub(crate) fn forget_options() {
    MODE.store(UNKNOWN, Ordering::Relaxed);
}

/// Whether CPU tensors are recorded. This is decided without connecting to the launcher, so that a process which
/// imports torch and allocates nothing is not affected.
fn records_cpu() -> bool {
    const NO: u32 = 1;
    const AUTO: u32 = 2;
    const YES: u32 = 3;
    let mut mode = MODE.load(Ordering::Relaxed);
    if mode == UNKNOWN {
        mode = match session_options().map(|o| o.cpu) {
            None | Some(Cpu::Never) => NO,
            Some(Cpu::Auto) => AUTO,
            Some(Cpu::Always) => YES,
        };
        MODE.store(mode, Ordering::Relaxed);
    }
    match mode {
        YES => true,
        AUTO => !device_use::is_in_use(),
        _ => false,
    }
}

/// `void c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`.
#[cfg_attr(not(test), unsafe(export_name = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"))]
extern "C-unwind" fn report_memory_usage(
    address: *mut c_void,
    size: i64,
    allocated: usize,
    reserved: usize,
    device: u16,
) {
    set_loaded();
    let [kind, index] = device.to_le_bytes();
    match kind {
        CUDA => record_cuda_block(address as u64, size, allocated as u64, reserved as u64, i16::from(index as i8)),
        CPU if records_cpu() => record_cpu_block(address as u64, size),
        _ => {}
    }
    record_function::attach();
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libc10(&ORIGINAL, REPORT_USAGE);
    if original.is_null() {
        return;
    }
    // SAFETY: `original` is libc10's function of this symbol, and the arguments are the caller's.
    unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, u16) = std::mem::transmute(original);
        original(address, size, allocated, reserved, device);
    }
}

fn record_cuda_block(addr: u64, size: i64, allocated: u64, reserved: u64, device: i16) {
    if !gate::is_open() && !gate::admits(device) {
        return;
    }
    let Some(mut guard) = Guard::enter() else { return };
    let process = guard.process();
    if TRACKER.is_attached() {
        if size > 0 {
            if !guard.amend(addr, size as u64) {
                process.count(Counter::ReporterMismatches, 1);
            }
        } else {
            // The allocator calls this at the end of a free, so a later completion is a deferred one.
            guard.publish();
        }
        if TRACKER.count_report().is_multiple_of(TOTALS_EVERY) {
            emit_totals(&mut guard, allocated, reserved, device);
        }
    } else {
        record_block(&mut guard, Source::TorchReporter, addr, size, device);
    }
}

#[cold]
fn emit_totals(guard: &mut Guard, allocated: u64, reserved: u64, device: i16) {
    let flags = current_flags();
    guard.emit(Event {
        addr: allocated,
        size: reserved,
        action: Action::Totals,
        source: Source::Torch,
        device,
        flags,
        ..Event::EMPTY
    });
}

fn record_cpu_block(addr: u64, size: i64) {
    if let Some(mut guard) = Guard::enter() {
        record_block(&mut guard, Source::TorchCpu, addr, size, -1);
    }
}

fn record_block(guard: &mut Guard, source: Source, addr: u64, size: i64, device: i16) {
    let mut flags = current_flags();
    if size < 0 {
        flags = flags.with(gc::flag(guard));
    } else if source == Source::TorchReporter {
        flags = flags.with(workspaces::flag(guard, size.unsigned_abs()));
    }
    let (stack, context) = guard.stack_and_context();
    let action = if size >= 0 { Action::Alloc } else { Action::FreeCompleted };
    guard.emit(Event {
        addr,
        size: size.unsigned_abs(),
        stack,
        context,
        source,
        action,
        device,
        flags,
        ..Event::EMPTY
    });
}

/// `void c10::reportOutOfMemoryToProfiler(int64_t, size_t, size_t, c10::Device)`.
#[cfg_attr(not(test), unsafe(export_name = "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE"))]
extern "C-unwind" fn report_out_of_memory(size: i64, allocated: usize, reserved: usize, device: u16) {
    let [kind, index] = device.to_le_bytes();
    if kind == CUDA
        && let Some(mut guard) = Guard::enter()
        && !TRACKER.is_attached()
    {
        let flags = current_flags();
        let (stack, context) = guard.stack_and_context();
        guard.emit(Event {
            size: size.unsigned_abs(),
            stack,
            context,
            source: Source::TorchReporter,
            action: Action::Oom,
            device: i16::from(index as i8),
            flags,
            ..Event::EMPTY
        });
    }
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libc10(&ORIGINAL, REPORT_OUT_OF_MEMORY);
    if original.is_null() {
        return;
    }
    // SAFETY: `original` is libc10's function of this symbol, and the arguments are the caller's.
    unsafe {
        let original: unsafe extern "C-unwind" fn(i64, usize, usize, u16) = std::mem::transmute(original);
        original(size, allocated, reserved, device);
    }
}
