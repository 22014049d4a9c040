//! `--check-stacks`: compares every native stack, frame by frame, with the result of `_Unwind_Backtrace` at the same
//! moment.
//!
//! That is libgcc's unwinder, which C++ exceptions use. It shares nothing with ours except the unwinding information.
//! This check is for tests and for diagnosis: it allocates memory and takes microseconds. A notice describes the first
//! difference.

use std::ffi::{c_int, c_void};
use std::fmt::Write;

use memtrace_trace::counters::Counter;

use super::process::Process;
use crate::linker::mapped_object::containing;
use memtrace_stackwalk::NativeStacks;

unsafe extern "C" {
    fn _Unwind_Backtrace(step: extern "C" fn(*mut c_void, *mut c_void) -> c_int, data: *mut c_void) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

extern "C" fn step(context: *mut c_void, frames: *mut c_void) -> c_int {
    // SAFETY: libgcc passes its context, and `frames` is the vector that `check` passes.
    unsafe { (*frames.cast::<Vec<usize>>()).push(_Unwind_GetIP(context)) };
    0
}

/// Compares the stack that was just captured with libgcc's, starting at the first frame outside this library. Returns a
/// description of a difference.
///
/// libgcc's stack may be shorter, because it stops at code without unwinding information.
#[cold]
#[inline(never)]
pub(crate) fn check(process: &Process, stacks: &NativeStacks) -> Option<String> {
    let mut libgcc: Vec<usize> = Vec::new();
    // SAFETY: `step` has the required type, and `libgcc` outlives the call.
    unsafe { _Unwind_Backtrace(step, (&raw mut libgcc).cast()) };
    let library = containing(check as *const () as usize).map(|object| object.start);
    let is_in_library = |ip: usize| containing(ip.wrapping_sub(1)).map(|object| object.start) == library;
    let libgcc: Vec<usize> = libgcc.into_iter().filter(|ip| *ip != 0).skip_while(|ip| is_in_library(*ip)).collect();
    let ours: Vec<usize> = stacks.frames().skip_while(|(_, library)| *library).map(|(ip, _)| ip).collect();
    process.count(Counter::UnwindChecks, 1);
    if ours.starts_with(&libgcc) && !libgcc.is_empty() {
        return None;
    }
    process.count(Counter::UnwindMismatches, 1);
    let same = ours.iter().zip(&libgcc).take_while(|(a, b)| a == b).count();
    let describe = |ip: Option<&usize>| match ip {
        None => String::from("the end"),
        Some(ip) => {
            let mut text = format!("{ip:#x}");
            if let Some(object) = containing(ip.wrapping_sub(1)) {
                let name = String::from_utf8_lossy(object.file_name()).into_owned();
                let _ = write!(text, " ({name}+{:#x})", ip.wrapping_sub(object.start));
            }
            text
        }
    };
    let before = same.checked_sub(1).and_then(|index| ours.get(index));
    Some(format!(
        "frame {same} of {} differs: after {}, memtrace found {} and libgcc {}",
        libgcc.len(),
        describe(before),
        describe(ours.get(same)),
        describe(libgcc.get(same))
    ))
}
