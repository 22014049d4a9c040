"""The parts of FlashInfer that a dry run uses: its modules of kernels, which it compiles with nvcc."""
