//! The dynamic linker: the loaded objects, the original functions, and the objects that bind past preloaded libraries.
//!
//! Constraint: knows no hook and records nothing.

#[cfg(not(test))]
pub(crate) mod c_library;
pub(crate) mod deepbind;
#[cfg(not(test))]
mod lazy_symbol;
pub(crate) mod mapped_object;
pub(crate) mod original;
pub(crate) mod redirect;
mod sanitizer;
pub(crate) mod shared_objects;
mod startup;
