//! The library that is preloaded into the traced process.
//!
//! First invariant: the traced process must not notice it. A hook calls the original with the arguments it got and
//! returns the original's result, whatever happens in between. A process that never touches GPU memory pays only for
//! loading this library. Before the first allocation or event there is no mapping, no connection, no thread and no
//! lock.
//!
//! ```text
//! attach (all of them; `arch` is below all)
//! observers -> torch  -> recording -> linker
//!     |          ^          |
//!     |         cuda        \-> memtrace_stackwalk
//!     \-> cpython -> linker
//! ```

#![cfg_attr(test, allow(dead_code, reason = "hooks are reached through exports, which tests leave out"))]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::expect_used))]

mod arch;
mod attach;
mod cpython;
mod cuda;
mod linker;
mod observers;
mod recording;
mod torch;

use recording::observer::ObserverTable;

/// All features that the recording does not know, in the order in which they get its calls.
static OBSERVERS: ObserverTable = ObserverTable(&[
    cuda::device::OBSERVER,
    torch::tracker::OBSERVER,
    torch::autograd::OBSERVER,
    observers::inductor_lines::OBSERVER,
    observers::names::requests::OBSERVER,
    observers::cycles::callback::OBSERVER,
    observers::holders::requests::OBSERVER,
    observers::pools::OBSERVER,
    observers::engine::OBSERVER,
]);

// The symbol through which `recording::observer` reads the table.
arch::pointer_symbol!("memtrace_observers", OBSERVERS);
