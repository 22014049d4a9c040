//! The entry stubs of hooked functions. They read the caller's address before anything else runs.
//!
//! An exported CUDA function is a stub. It stores its return address in a thread-local word
//! ([`crate::recording::thread_local`]) and jumps to the body, with the stack and all argument registers unchanged.
//!
//! The address of an exported function is that of the first library that exports its name, which may be another
//! preloaded one. So each stub has a second, hidden name, which is always its own.

use crate::recording::thread_local::{ThreadLocal, with_thread_local};

/// The offset of that word in a thread's block, in bytes.
pub(super) const CALLER_OFFSET: usize = std::mem::offset_of!(ThreadLocal, caller);

/// The return address of the stub that this thread entered last.
#[inline]
pub(super) fn caller() -> usize {
    with_thread_local(|t| t.caller.get())
}

/// Defines an exported stub `$name` that jumps to `$body`, and the function `$name::own` at the stub's own address.
macro_rules! entry {
    ($name:ident => $body:path) => {
        /// The exported stub.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        #[allow(non_snake_case)]
        pub(in crate::cuda) unsafe extern "C" fn $name() {
            $crate::arch::note_caller_and_jump!(
                concat!("memtrace_own_", stringify!($name)),
                $crate::cuda::entry::CALLER_OFFSET,
                $body
            )
        }

        /// The stub under its hidden name.
        #[allow(non_snake_case)]
        pub(in crate::cuda) mod $name {
            unsafe extern "C" {
                #[link_name = concat!("memtrace_own_", stringify!($name))]
                pub(in crate::cuda) fn own();
            }
        }
    };
}
pub(super) use entry;
