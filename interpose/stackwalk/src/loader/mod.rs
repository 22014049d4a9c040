//! The loaded objects and their symbols, read from the loader's own structures.
//!
//! - [`r_debug`]: where the loader publishes its list of objects.
//! - [`unloads`]: detects when an object is being unloaded.
//! - [`visibility`]: makes what another thread has appended to the list visible to this one.
//! - [`reading`]: the right to read, and reads that cannot fault.
//! - [`objects`]: the list of loaded objects; [`headers`]: their program headers.
//! - [`symbols`]: looks up symbols by the rules of `dlsym`.
//! - [`find_object`], [`ranges`]: the object of an address.
//!
//! # No lock of the loader
//!
//! A hook must not wait for the loader. In glibc, `dlopen` and `dlclose` hold `_dl_load_lock` while they run
//! constructors and destructors (elf/dl-open.c, elf/dl-close.c). `dlsym`, `dlvsym` and `dladdr` take the same lock
//! (dlfcn/dlsym.c, elf/dl-addr.c). So if a constructor waits for a thread, and a hook on that thread calls one of them,
//! both wait for ever. `dl_iterate_phdr` takes `_dl_load_write_lock` (elf/dl-iteratephdr.c). A signal handler that
//! leaves a hook by `siglongjmp` would never release either.
//!
//! This module calls none of these functions. It also calls nothing that a sanitizer's runtime intercepts, except the
//! reads through the kernel that [`reading`] makes while an object is being unloaded.
//!
//! # What may change meanwhile
//!
//! Another thread may load an object: the loader appends it to the list, after it has filled in the record.
//! [`visibility`] explains why a reader sees the complete record. Another thread may unload an object: [`reading`]
//! and [`unloads`] explain why a reader does not fault. musl unloads nothing.

mod find_object;
mod headers;
mod objects;
mod r_debug;
mod ranges;
mod reading;
mod symbols;
#[cfg(test)]
mod symbols_tests;
mod unloads;
mod visibility;

pub use find_object::FoundObject;
pub use headers::ListEnd;
pub use objects::{LoadedObject, ObjectListMark};
pub use ranges::object_containing;
pub use reading::{Reading, permit_checked_reads};
pub use symbols::{
    NextSymbol, SymbolName, c_library_symbol, first_symbol, next_symbol, our_dynamic_section, set_loaded_late,
    symbol_of_object_and_dependencies,
};
pub(crate) use unloads::count as unload_count;
pub use unloads::{begin as unloading, end as unloaded};
pub use visibility::{barrier_in_all_threads, permit_barriers};
