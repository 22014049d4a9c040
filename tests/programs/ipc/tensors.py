"""CUDA tensors sent to another process (CUDA IPC, or file descriptors with expandable segments). The receiver uses the
sender's memory and allocates some itself.

tensors.py [DEVICE]: the receiver's current device, which may differ from the tensors' device.
"""

import gc
import os
import sys
from multiprocessing.connection import wait

import torch
import torch.multiprocessing as mp

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "torch"))


def recorder(role):
    if path := os.environ.get("MEMTRACE_TEST_ORACLE"):
        os.environ["MEMTRACE_TEST_ORACLE"] = f"{path.removesuffix('.sender')}.{role}"
    import oracle

    oracle.start()
    return oracle


def receive(inbox, outbox, device):
    oracle = recorder("receiver")
    torch.cuda.set_device(device)
    own = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        tensors = inbox.get()
        assert all(torch.equal(t.cpu(), torch.full_like(t, k, device="cpu")) for k, t in enumerate(tensors))
        more = [torch.empty_like(t) for t in tensors]
        tensors[0].copy_(torch.full((len(tensors[0]),), 9, dtype=torch.uint8))
        torch.cuda.synchronize()
        del tensors, more
        gc.collect()
        torch.cuda.ipc_collect()
        outbox.put("seen")
    inbox.get()
    os.write(1, f"receiver {os.getpid()}\n".encode())
    oracle.finish()


def main(device):
    oracle = recorder("sender")
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=receive, args=(inbox, outbox, device))
    process.start()
    for _ in range(2):
        # Two tensors in one small segment, and one in its own segment.
        tensors = [torch.full((size,), k, dtype=torch.uint8).cuda() for k, size in enumerate((4096, 8192, 24 << 20))]
        inbox.put(tensors)
        # A receiver that ends answers nothing.
        wait([outbox._reader, process.sentinel])
        assert not outbox.empty(), process.exitcode
        assert outbox.get() == "seen"
        assert tensors[0].cpu().unique().tolist() == [9], "what the receiver wrote"
        del tensors
        gc.collect()
        torch.cuda.ipc_collect()
    inbox.put(None)
    process.join()
    assert process.exitcode == 0, process.exitcode
    os.write(1, f"sender {os.getpid()}\n".encode())
    oracle.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
