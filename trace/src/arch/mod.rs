//! Facts about the processor architecture: the counter of time, and prefetching. One module for each architecture.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

// All other crates use this one.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("memtrace requires Linux on x86-64 or AArch64. A port begins with the folders `arch` of the crates.");
