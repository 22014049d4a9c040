"""The buffer of a custom all-reduce. Another process opens it by its CUDA IPC handle, as the other ranks of vLLM do."""

import torch
import torch.multiprocessing


def hold(handles, opened) -> None:
    buffer = handles.get()
    opened.put(buffer.numel())
    handles.get()


class CustomAllreduce:
    def __init__(self, max_size: int):
        self.buffer = torch.zeros(max_size, dtype=torch.uint8, device="cuda")
        context = torch.multiprocessing.get_context("spawn")
        self.handles, opened = context.Queue(), context.Queue()
        self.peer = context.Process(target=hold, args=(self.handles, opened))
        self.peer.start()
        self.handles.put(self.buffer)
        assert opened.get() == max_size

    def close(self) -> None:
        self.handles.put(None)
        self.peer.join()
