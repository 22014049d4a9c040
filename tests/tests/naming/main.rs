//! What each block is for and who allocated it: tensor names, modules, categories, steps, ranges, autograd nodes, against PyTorch's own
//! answers.

mod categories;
mod cycles;
mod determinism;
mod forward_frames;
mod grad_mode;
mod labels;
mod modules;
mod names;
mod steps;
