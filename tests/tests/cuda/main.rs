//! Every CUDA call of every kind of program is recorded, as the simulated CUDA's ledger has it, and no program notices.

mod host;
mod ipc;
mod ledger;
mod programs;
