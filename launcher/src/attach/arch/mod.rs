//! Facts about the processor architecture: registers, instructions, and what the kernel restores after a signal. They
//! are in one module for each architecture, with the same names, and nowhere else.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod frame;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::*;

pub(super) use frame::{Call, NT_PRSTATUS};

/// A thread that was interrupted between two instructions.
pub(super) type Interrupted = frame::Interrupted<Registers, ExtendedState>;
/// A call that a thread makes in passing, with the bytes for its stack.
pub(super) type Prepared = frame::Prepared<Registers>;
