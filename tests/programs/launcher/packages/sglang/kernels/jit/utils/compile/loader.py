def load_jit(*names, cuda_files=None):
    """As SGLang compiles a module of kernels."""
    raise FileNotFoundError("No such file or directory: 'ninja'")
