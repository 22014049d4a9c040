"""The blocks of the cache of keys and values, counted as by vLLM's BlockPool."""


class FreeKVCacheBlockQueue:
    def __init__(self, num_blocks: int):
        self.blocks = list(range(num_blocks))
        self.num_free_blocks = num_blocks

    def popleft(self) -> int:
        self.num_free_blocks -= 1
        return self.blocks.pop(0)

    def append(self, block: int) -> None:
        self.num_free_blocks += 1
        self.blocks.append(block)


class BlockPool:
    def __init__(self, num_gpu_blocks: int):
        self.num_gpu_blocks = num_gpu_blocks
        self.free_block_queue = FreeKVCacheBlockQueue(num_gpu_blocks)
        self.null_block = self.free_block_queue.popleft()


class KVCacheManager:
    def __init__(self, num_gpu_blocks: int, block_size: int):
        self.block_pool, self.block_size = BlockPool(num_gpu_blocks), block_size

    def allocate_slots(self, request) -> bool:
        """The blocks that the request needs for its next token. False if there are not enough."""
        needed = -(-request.num_tokens // self.block_size) - len(request.blocks)
        if needed > self.block_pool.free_block_queue.num_free_blocks:
            return False
        request.blocks += [self.block_pool.free_block_queue.popleft() for _ in range(needed)]
        return True

    def free(self, request) -> None:
        for block in reversed(request.blocks):
            self.block_pool.free_block_queue.append(block)
        request.blocks = []
