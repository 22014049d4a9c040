//! Crashes, kills, hostile programs and surroundings, load: nothing is lost silently, no program is disturbed, no run is unsafe to read.

mod crash;
mod crash_bounds;
mod crash_matrix;
mod crash_seeds;
mod crash_support;
mod hostile_children;
mod hostile_launcher;
mod hostile_python;
mod hostile_support;
mod hostile_target;
#[path = "../launcher_support/mod.rs"]
mod launcher_support;
mod load;
mod process;
mod safety;
mod safety_clients;
