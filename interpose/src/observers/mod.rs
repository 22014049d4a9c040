//! Features that watch the recording from outside. The recording does not know them.

mod cache_use;
pub(crate) mod cycles;
pub(crate) mod engine;
pub(crate) mod holders;
pub(crate) mod inductor_lines;
pub(crate) mod names;
mod nvtx;
pub(crate) mod pools;
mod tensors;
