//! Every allocation is recorded as in PyTorch's own recorder and statistics: event by event, in the snapshot that
//! memtrace writes, under every allocator, in every process.

mod allocator_policy;
mod allocators;
mod compile;
mod cpu;
mod cuda_graphs;
mod distributed;
mod exhaustive;
mod functions;
mod golden_snapshots;
mod hosts;
mod preloads;
mod programs;
mod pytorch_snapshots;
mod tools;
mod workers;
