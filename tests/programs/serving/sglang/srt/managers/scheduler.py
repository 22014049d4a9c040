"""A scheduler whose counters have the places of SGLang's: an allocator of pages, a tree of prefixes, and requests.

A request leaves the pages of its prompt to the tree. When pages lack, the tree's are evicted, then a request is
retracted.
"""

import enum

import torch
from sglang.srt.model_executor.model_runner import ModelRunner


class ComponentType(enum.Enum):
    FULL = 0
    SWA = 1


class PagedTokenToKVPoolAllocator:
    def __init__(self, size: int, page_size: int):
        self.size, self.page_size = size, page_size
        self.free_pages = torch.arange(1, size // page_size + 1, dtype=torch.int64, device="cuda")
        self.release_pages = None
        self.staged_pages: list = []
        self.num_staged_pages = 0

    def alloc(self, pages: int) -> torch.Tensor:
        if pages > len(self.free_pages):
            self.free_pages = torch.cat((self.free_pages, *self.staged_pages))
            self.staged_pages, self.num_staged_pages = [], 0
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return taken

    def free(self, pages: torch.Tensor) -> None:
        self.staged_pages.append(pages)
        self.num_staged_pages += pages.numel()

    def available_size(self) -> int:
        return (len(self.free_pages) + self.num_staged_pages) * self.page_size


class TreeCore:
    def __init__(self):
        self.component_evictable_size_ = {ComponentType.FULL: 0, ComponentType.SWA: 7}
        self.prefixes: list = []


class UnifiedRadixCache:
    def __init__(self):
        self.tree_core = TreeCore()


class ReqToTokenPool:
    def __init__(self, size: int):
        self.size = size
        self.req_to_token = torch.zeros((size + 1, 64), dtype=torch.int32, device="cuda")
        self.free_slots = list(range(1, size + 1))


class ScheduleBatch:
    def __init__(self):
        self.reqs: list = []


class Req:
    def __init__(self, prompt: int, tokens: int):
        self.prompt, self.length, self.end, self.retraction_count = prompt, prompt, prompt + tokens, 0
        self.pages = torch.empty(0, dtype=torch.int64, device="cuda")


class Scheduler:
    def __init__(self, max_total_num_tokens: int, max_running_requests: int):
        self.runner = ModelRunner(max_total_num_tokens)
        self.max_total_num_tokens = max_total_num_tokens
        self.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(max_total_num_tokens, ModelRunner.PAGE)
        self.req_to_token_pool = ReqToTokenPool(max_running_requests)
        self.tree_cache = UnifiedRadixCache()
        self.running_batch, self.waiting_queue = ScheduleBatch(), []
        self.retracted = 0

    def used(self) -> int:
        evictable = self.tree_cache.tree_core.component_evictable_size_[ComponentType.FULL]
        return self.max_total_num_tokens - self.token_to_kv_pool_allocator.available_size() - evictable

    def _has(self, pages: int) -> bool:
        """Evicts prefixes until there are so many free pages."""
        tree, allocator = self.tree_cache.tree_core, self.token_to_kv_pool_allocator
        while tree.prefixes and allocator.available_size() < pages * allocator.page_size:
            evicted = tree.prefixes.pop(0)
            tree.component_evictable_size_[ComponentType.FULL] -= evicted.numel() * allocator.page_size
            allocator.free(evicted)
        return allocator.available_size() >= pages * allocator.page_size

    def _extend(self, req: Req) -> bool:
        pages = -(-req.length // ModelRunner.PAGE) - req.pages.numel()
        if pages > 0 and self._has(pages):
            req.pages = torch.cat((req.pages, self.token_to_kv_pool_allocator.alloc(pages)))
            pages = 0
        return pages <= 0

    def step(self) -> None:
        for req in list(self.running_batch.reqs):
            while req in self.running_batch.reqs and not self._extend(req):
                last = self.running_batch.reqs.pop()
                self.token_to_kv_pool_allocator.free(last.pages)
                self.req_to_token_pool.free_slots.append(0)
                last.pages, last.retraction_count = last.pages[:0], last.retraction_count + 1
                self.retracted += 1
                self.waiting_queue.insert(0, last)
        while self.waiting_queue and self.req_to_token_pool.free_slots and self._extend(self.waiting_queue[0]):
            self.req_to_token_pool.free_slots.pop()
            self.running_batch.reqs.append(self.waiting_queue.pop(0))

    def process_batch_result(self) -> None:
        tree, allocator = self.tree_cache.tree_core, self.token_to_kv_pool_allocator
        for req in list(self.running_batch.reqs):
            req.length += 1
            if req.length > req.end:
                kept = req.prompt // allocator.page_size
                tree.prefixes.append(req.pages[:kept])
                tree.component_evictable_size_[ComponentType.FULL] += kept * allocator.page_size
                allocator.free(req.pages[kept:])
                self.req_to_token_pool.free_slots.append(0)
                self.running_batch.reqs.remove(req)
