"""A model runner with the functions and the attributes of SGLang's that a recording reads."""

import torch


class KVCache:
    def __init__(self, tokens: int, width: int, layers: int):
        self.kv_buffer = [torch.zeros(tokens, 2 * width, device="cuda") for _ in range(layers)]


class ModelRunner:
    PAGE = 4
    LAYERS = 8

    def __init__(self, max_total_num_tokens: int, width: int = 256):
        self.max_total_num_tokens, self.page_size, self.width = max_total_num_tokens, self.PAGE, width
        self.mem_fraction_static, self.tp_size = 0.8, 1
        self.load_model()
        self.init_memory_pool()

    def load_model(self) -> None:
        self.model = torch.nn.Linear(self.width, self.width, device="cuda")

    def init_memory_pool(self) -> None:
        self.token_to_kv_pool = KVCache(self.max_total_num_tokens + self.PAGE, self.width, self.LAYERS)

    @torch.inference_mode()
    def forward(self, tokens: int, slots: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(tokens, self.width, device="cuda")
        for cache in self.token_to_kv_pool.kv_buffer:
            hidden = torch.nn.functional.silu(self.model(hidden))
            cache[slots] += 1
        return hidden
