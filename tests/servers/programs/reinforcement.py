"""A trainer beside vLLM in one process, which sleeps while the trainer works.

reinforcement.py MODEL LEVEL. It prints PyTorch's and the device's bytes at each change.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from torch import nn
from vllm import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": list(range(1, 1 + 32 * count))} for count in range(1, 9)]


def print_memory(when: str) -> None:
    free, total = torch.cuda.mem_get_info()
    figures = {"when": when, "allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(), "used": total - free}
    print("memory", json.dumps(figures), flush=True)
    torch.cuda.reset_peak_memory_stats()


def main(model: str, level: int) -> None:
    print_memory("start")
    engine = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, enable_sleep_mode=True, enforce_eager=True,
                 gpu_memory_utilization=0.4, max_model_len=2048)
    trained = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(trained.parameters())
    for step in range(3):
        if step > 0:
            engine.wake_up()
        engine.generate(PROMPTS, SamplingParams(max_tokens=8, detokenize=False), use_tqdm=False)
        print_memory("rollout")
        engine.sleep(level=level)
        print_memory("asleep")
        for _ in range(2):
            trained(torch.randn(8192, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print_memory("train")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
