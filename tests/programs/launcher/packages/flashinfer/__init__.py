"""What a dry run uses of FlashInfer: its modules of kernels, which it compiles with nvcc."""
