//! Every CUDA call of every kind of program is recorded as in the simulated CUDA's ledger, and no program notices it.

mod contexts;
mod device_memory;
mod headers;
mod host;
mod ipc;
mod ledger;
mod limit;
mod programs;
mod refused;
mod rust;
