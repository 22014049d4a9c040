"""Chooses the requests of a step, with the rules and the attributes of vLLM's Scheduler."""

from collections import deque

from vllm.v1.core.block_pool import KVCacheManager


class Request:
    def __init__(self, request_id: str, prompt: int, max_tokens: int):
        self.request_id, self.prompt, self.max_tokens = request_id, prompt, max_tokens
        self.num_tokens, self.num_computed_tokens, self.num_preemptions = prompt, 0, 0
        self.blocks: list = []


class Scheduler:
    def __init__(self, num_gpu_blocks: int, block_size: int, max_num_seqs: int):
        self.kv_cache_manager = KVCacheManager(num_gpu_blocks, block_size)
        self.max_num_seqs = max_num_seqs
        self.requests: dict = {}
        self.running: list = []
        self.waiting: deque = deque()
        self.preempted = 0

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> list:
        """The block table and the number of new tokens of each request of the next step."""
        for request in list(self.running):
            while request in self.running and not self.kv_cache_manager.allocate_slots(request):
                self._preempt_request(self.running.pop())
        while self.waiting and len(self.running) < self.max_num_seqs:
            if not self.kv_cache_manager.allocate_slots(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
        return [(list(r.blocks), r.num_tokens - r.num_computed_tokens) for r in self.running]

    def _preempt_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.preempted += 1
        self.waiting.appendleft(request)

    def update_from_output(self) -> int:
        """Each request of the step has one token more. Returns how many have ended."""
        before = len(self.requests)
        for request in list(self.running):
            request.num_computed_tokens = request.num_tokens
            request.num_tokens += 1
            if request.num_tokens > request.prompt + request.max_tokens:
                self.kv_cache_manager.free(request)
                self.running.remove(request)
                del self.requests[request.request_id]
        return before - len(self.requests)

    def used(self) -> int:
        pool = self.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.free_block_queue.num_free_blocks
