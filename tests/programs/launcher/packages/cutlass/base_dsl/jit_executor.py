class JitCompiledFunction:
    """As the result of a call of a `@cute.jit` function."""

    def __init__(self, function_name):
        self.function_name = function_name

    def __call__(self, *args):
        raise RuntimeError("Got Cuda Runtime Error: cudaErrorNotSupported")
