//! Native stacks equal a debugger's and libgcc's, and native frames have symbol names.

mod against_gdb;
mod against_libgcc;
mod merged;
#[path = "../../../analysis/tests/native_objects/mod.rs"]
mod native_objects;
mod pytorch;
mod robust;
mod symbols;
