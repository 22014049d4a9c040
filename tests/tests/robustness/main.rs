//! Crashes, kills, hostile programs and environments, and load.
//!
//! No event is lost without being counted, no program is disturbed, and reading any run is safe.

mod cancellation;
mod cgroups;
mod clocks;
mod coroutines;
mod crash;
mod crash_bounds;
mod crash_matrix;
mod crash_seeds;
mod crash_support;
mod created_files;
mod first_allocation;
mod free_threaded;
mod full_disk;
mod hostile_children;
mod hostile_launcher;
mod hostile_process;
mod hostile_python;
mod hostile_support;
mod jumps;
#[path = "../launcher_support/mod.rs"]
mod launcher_support;
mod load;
mod loader_lock;
mod memory_cgroup;
mod other_users;
mod output_files;
mod printing;
mod process;
mod promises;
mod readers;
mod safety;
mod safety_clients;
mod sanitizers;
mod silent_loss;
mod stopped_launcher;
