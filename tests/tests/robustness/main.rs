//! Crashes, kills, hostile programs and environments, and load.
//!
//! No event is lost without being counted, no program is disturbed, and reading any run is safe.

mod crash;
mod crash_bounds;
mod crash_matrix;
mod crash_seeds;
mod crash_support;
mod hostile_children;
mod hostile_launcher;
mod hostile_process;
mod hostile_python;
mod hostile_support;
#[path = "../launcher_support/mod.rs"]
mod launcher_support;
mod load;
mod process;
mod safety;
mod safety_clients;
