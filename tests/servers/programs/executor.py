"""vLLM with two ranks that an executor starts: executor.py MODEL mp|ray."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, gpu_memory_utilization=0.5,
                 max_model_len=2048, tensor_parallel_size=2, distributed_executor_backend=sys.argv[2])
    prompts = [{"prompt_token_ids": list(range(1, 1 + 32 * count))} for count in range(1, 9)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, detokenize=False), use_tqdm=False)
    print("answered", len(outputs), flush=True)
