//! The purpose of each block and the code that allocated it: tensor names, modules, categories, steps, ranges, autograd
//! nodes. PyTorch's own answers are the oracle.

mod categories;
mod cycles;
mod determinism;
mod forward_frames;
mod grad_mode;
mod holders;
mod labels;
mod modules;
mod names;
mod steps;
