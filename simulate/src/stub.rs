//! Reads what a generated stub passes: see `simulate/build/src/stubs.rs`.

use crate::arch::ARGUMENT_REGISTERS as REGISTERS;
use crate::out::Out;
use std::ffi::{CStr, c_void};

/// A stub that was called.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    record: *const u8,
    registers: *const Out<u8>,
    stack: *const Out<u8>,
}

impl Call {
    /// A call, from what [`stub_entry`](crate::stub_entry) passes.
    ///
    /// # Safety
    /// `record` is the record of a generated stub. `registers` are the argument registers of its caller, and
    /// `stack` is where the caller put further arguments.
    pub unsafe fn new(record: *const u8, registers: *const Out<u8>, stack: *const Out<u8>) -> Self {
        Call { record, registers, stack }
    }

    /// The stub's name.
    pub fn name(&self) -> &'static CStr {
        // SAFETY: the name and its NUL follow the outputs of a record, which is constant.
        unsafe { CStr::from_ptr(self.record.add(1 + 2 * usize::from(*self.record)).cast()) }
    }

    /// Writes the outputs: zeros, and `handle()` where an object is created.
    pub fn write_outputs(&self, handle: impl Fn() -> *mut c_void) {
        // SAFETY: a record begins with the number of outputs, and each has two bytes.
        let outputs =
            unsafe { std::slice::from_raw_parts(self.record.add(1).cast::<[u8; 2]>(), usize::from(*self.record)) };
        for [kind, number] in outputs {
            let number = usize::from(*number);
            // SAFETY: the caller of a function with this output passed that many arguments, the first ones in
            // registers.
            let argument = unsafe {
                if number < REGISTERS { *self.registers.add(number) } else { *self.stack.add(number - REGISTERS) }
            };
            match kind {
                0 => argument.cast::<i32>().put(0),
                1 => argument.cast::<usize>().put(0),
                _ => argument.cast().put(handle()),
            }
        }
    }
}

/// Defines `simcuda_stub`, to which the stubs of a library jump, and which calls `$called(Call)`. A stub returns the
/// status that this returns, of type `c_int`.
#[macro_export]
macro_rules! stub_entry {
    ($called:path) => {
        /// Called by `simcuda_stub`.
        ///
        /// # Safety
        /// See [`Call::new`]($crate::stub::Call::new).
        unsafe extern "C" fn stub_called(
            record: *const u8,
            registers: *const $crate::out::Out<u8>,
            stack: *const $crate::out::Out<u8>,
        ) -> usize {
            // SAFETY: the caller is `simcuda_stub`, which passes exactly these.
            let status: std::ffi::c_int = $called(unsafe { $crate::stub::Call::new(record, registers, stack) });
            status as usize
        }

        /// The entry of the stubs: the record is in a register of its own, the arguments are where the program put
        /// them.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn simcuda_stub() {
            $crate::call_with_record!(stub_called)
        }
    };
}
