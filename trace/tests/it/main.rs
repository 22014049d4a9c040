//! The trace file and everything that is encoded, from outside the crate.

mod file;
mod round_trips;
