//! A simulated CUDA.
