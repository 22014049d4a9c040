//! CPython's C API: one table of its functions and types, and safe access to the program's objects.
//!
//! - [`api`]: the table. A call needs no GIL only where it says so.
//! - [`gil`]: [`gil::GilToken`], the proof that this thread holds the GIL, and [`gil::PyOwned`], a reference of ours.
//! - `objects`: reads objects. Runs no Python code and changes no object.
//! - `references`: what objects reference. Runs no Python code and changes no object.
//! - `shared_names`: the names of attributes that an object stores without a dictionary.
//! - [`collector`]: pauses the garbage collector and lists its objects.
//! - [`calls`]: imports, calls and changes objects. May run Python code.
//!
//! Constraints: knows no feature and records nothing. A method that takes a [`api::PyObjectPtr`] needs a live object:
//! one that is borrowed from a live container, or that a [`gil::PyOwned`] holds.

pub(crate) mod api;
pub(crate) mod calls;
pub(crate) mod collector;
pub(crate) mod gil;
mod objects;
mod references;
mod shared_names;
