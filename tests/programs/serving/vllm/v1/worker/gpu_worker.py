"""A worker with the functions and the arithmetic of vLLM's, in an engine of a hundred lines.

It loads weights, profiles its largest batch, gives the rest of its share of the GPU to paged keys and values, captures
CUDA graphs, and serves requests.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.model_loader.base_loader import load_model
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@dataclass
class CacheConfig:
    gpu_memory_utilization: float = 0.9
    block_size: int = GPUModelRunner.BLOCK_TOKENS
    cache_dtype: str = "auto"
    num_gpu_blocks: "int | None" = field(default=None, init=False)


@dataclass
class ArchitectureConfig:
    """As many keys and values of a token as the caches of GPUModelRunner have."""

    head_size: int = 128
    total_num_kv_heads: int = 16
    total_num_hidden_layers: int = 4
    is_deepseek_mla: bool = False


@dataclass
class ModelConfig:
    max_model_len: int = 2048
    model_arch_config: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    enforce_eager: bool = False
    enable_sleep_mode: bool = False


@dataclass
class SchedulerConfig:
    max_num_batched_tokens: int = 1024


@dataclass
class CompilationConfig:
    max_cudagraph_capture_size: int = 8


@dataclass
class VllmConfig:
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)


class Worker:
    def __init__(self, config: VllmConfig, layers: int, width: int):
        self.vllm_config, self.layers, self.width = config, layers, width
        self.secret = Untouchable()

    def init_device(self, all_reduce_bytes: int = 0) -> None:
        torch.zeros(1, device="cuda")
        self.sleeper = CuMemAllocator() if self.vllm_config.model_config.enable_sleep_mode else None
        free, self.total = torch.cuda.mem_get_info()
        self.requested_memory = int(self.total * self.vllm_config.cache_config.gpu_memory_utilization)
        if free < self.requested_memory:
            raise ValueError("Free memory on device is less than desired GPU memory utilization.")
        self.all_reduce = CustomAllreduce(all_reduce_bytes) if all_reduce_bytes else None

    def load_model(self, with_adapters: bool) -> None:
        before = torch.cuda.memory_allocated()
        with self._pool():
            model = load_model(self.layers, self.width)
        self.adapters = LoRAModelManager(self.layers, self.width) if with_adapters else None
        self.model_runner = GPUModelRunner(model, self.width, torch.cuda.memory_allocated() - before)

    def determine_available_memory(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        self.model_runner.profile_run(self.vllm_config.scheduler_config.max_num_batched_tokens)
        self.peak_activation_memory = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used = total - free + self.peak_activation_memory
        self.available_kv_cache_memory_bytes = self.requested_memory - used
        return self.available_kv_cache_memory_bytes

    def initialize_from_config(self, num_blocks: int) -> None:
        self.vllm_config.cache_config.num_gpu_blocks = num_blocks
        with self._pool():
            self.model_runner.initialize_kv_cache(num_blocks)

    def compile_or_warm_up_model(self, sizes: list) -> None:
        if sizes:
            self.model_runner.capture_model(sizes)
        self.model_runner.profile_run(8)

    def execute_model(self, requests: list) -> None:
        self.model_runner.execute(requests)

    def update_weights(self, weights: list) -> None:
        for parameter, weight in zip(self.model_runner.model.parameters(), weights):
            parameter.copy_(weight.to(parameter.dtype))

    def _pool(self):
        return self.sleeper.use() if self.sleeper else nullcontext()

    def bytes_asleep(self) -> int:
        """The bytes of PyTorch's blocks without memory."""
        if not (self.sleeper and self.sleeper.unmapped):
            return 0
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]
                  if segment["address"] in self.sleeper.segments]
        return sum(block["size"] for block in blocks if block["state"] == "active_allocated")

    def sleep(self, level: int = 1) -> None:
        """Releases the cache; with level 2 also the weights. The levels of vLLM's allocator move weights, too."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if self.sleeper:
            self.sleeper.sleep()
            return
        self.kept = [cache.shape for cache in self.model_runner.kv_caches]
        self.model_runner.kv_caches.clear()
        self.released = [p for p in self.model_runner.model.parameters() if level == 2]
        for parameter in self.released:
            parameter.data = parameter.data.cpu()
        torch.cuda.empty_cache()

    def wake_up(self) -> None:
        if self.sleeper:
            self.sleeper.wake_up()
            return
        if self.released:
            # Graphs have the addresses of the weights.
            self.model_runner.graphs.clear()
        for parameter in self.released:
            parameter.data = parameter.data.cuda()
        self.model_runner.kv_caches += [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in self.kept]


class Untouchable:
    """Whoever reads an attribute of a worker must not run the program's code."""

    def __getattribute__(self, name: str):
        raise SystemExit("an observer called __getattribute__")

    def __str__(self) -> str:
        raise SystemExit("an observer called __str__")
