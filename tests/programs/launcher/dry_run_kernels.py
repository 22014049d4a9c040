"""Calls kernels that a dry run does not compile, and one of FlashInfer that is compiled. Prints the chosen tokens, and what failed."""

import json

import torch
from cutlass.base_dsl.compiler import CompileCallable
from cutlass.base_dsl.jit_executor import JitCompiledFunction
from flashinfer.jit import JitSpec
from sglang.jit_kernel.utils import load_jit as load_jit_of_old_version
from sglang.kernels.jit.utils.compile.loader import load_jit

assert JitSpec("compiled", compiled=7).build_and_load() == 7
probabilities = torch.rand(3, 1000, device="cuda")
tokens = torch.empty(3, dtype=torch.int32, device="cuda")
found = {}


class Gemm:
    """A kernel of the DSL: an instance of a class."""


CompileCallable()["opt-level=3"](Gemm(), probabilities).to(0)(probabilities)
JitCompiledFunction("reduce")(probabilities)
try:
    import deep_gemm
except ImportError:
    found["left_out"] = "deep_gemm"
try:
    module = JitSpec("sampling").build_and_load()
    for _ in range(2):
        module.top_p_sampling_from_probs(probabilities, tokens, None, 0.9)
    module.softmax(probabilities, probabilities)
    load_jit("fused", "rope", cuda_files=["rope.cuh"]).run(probabilities)
    load_jit_of_old_version("norm").run(probabilities)
    found["tokens"] = tokens.tolist()
except RuntimeError as error:
    found["error"] = str(error)
print(json.dumps(found))
