"""Runs the model of the engine in worker.py, over paged keys and values and CUDA graphs."""

import torch
from vllm.v1.worker.workspace import WorkspaceManager


def reserved_by_graphs() -> int:
    """The bytes of all segments outside PyTorch's default pool."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0))


class KVCacheConfig:
    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks


class Experts(torch.nn.Module):
    """A layer whose kernel needs a workspace."""

    def __init__(self, workspace: WorkspaceManager):
        super().__init__()
        self.workspace = workspace

    def forward(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        workspace = self.workspace.get(hidden.shape)
        return hidden + torch.nn.functional.silu(workspace.copy_(layer(hidden)))


class GPUModelRunner:
    BLOCK_TOKENS = 16

    def __init__(self, model: torch.nn.Module, width: int, model_memory_usage: int):
        self.model, self.width = model, width
        self.model_memory_usage = model_memory_usage
        self.graphs: dict = {}
        self.captured: list = []
        self.experts = Experts(WorkspaceManager())
        self.leak = self.bound = 0
        self.left: list = []
        self.results: list = []

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.kv_cache_config = KVCacheConfig(num_blocks)
        shape = (2, num_blocks, self.BLOCK_TOKENS, self.width)
        self.kv_caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in self.model]

    def profile_run(self, tokens: int) -> None:
        self._forward(torch.zeros(tokens, self.width, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()

    def capture_model(self, sizes: list) -> None:
        pool = torch.cuda.graph_pool_handle()
        for size in sizes:
            inputs = torch.zeros(size, self.width, dtype=torch.bfloat16, device="cuda")
            graph, reserved = torch.cuda.CUDAGraph(), reserved_by_graphs()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self._forward(inputs)
            self.graphs[size] = (graph, inputs, outputs)
            self.captured.append((size, reserved_by_graphs() - reserved))

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.model:
            hidden = self.experts(layer, hidden)
        return hidden

    def execute(self, requests: list) -> None:
        """One step of requests: each is its block table and the number of its tokens."""
        tokens = sum(count for _, count in requests)
        hidden = torch.ones(tokens, self.width, dtype=torch.bfloat16, device="cuda")
        if tokens in self.graphs:
            graph, inputs, _ = self.graphs[tokens]
            inputs.copy_(hidden)
            graph.replay()
        else:
            self._forward(hidden)
        slots = torch.tensor([block for table, _ in requests for block in table], device="cuda")
        for cache in self.kv_caches:
            cache[:, slots] += 1

    def finish(self, requests: int) -> None:
        """Requests have ended. A leaking server keeps something of each, another one the results of the last ones."""
        for _ in range(requests):
            if self.leak:
                self.left.append(self.outputs(self.leak))
            if self.bound:
                self.results.append(self.outputs(256 << 10))
                if len(self.results) * (256 << 10) > self.bound:
                    self.results.pop(0)

    def outputs(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device="cuda")
