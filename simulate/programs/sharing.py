"""Passes a tensor to another process through CUDA IPC."""
import torch
import torch.multiprocessing as mp


def child(inbox, outbox):
    x = inbox.get()
    assert x.is_cuda and torch.equal(x.cpu(), torch.arange(1000)), "the child sees the parent's memory"
    x.copy_(torch.arange(1000, 2000))
    torch.cuda.synchronize()
    del x
    outbox.put("done")


if __name__ == "__main__":
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(inbox, outbox))
    process.start()
    x = torch.arange(1000).cuda()
    inbox.put(x)
    assert outbox.get() == "done"
    process.join()
    assert process.exitcode == 0
    assert torch.equal(x.cpu(), torch.arange(1000, 2000)), "the parent sees what the child wrote"
