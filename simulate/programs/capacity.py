"""Processes that share devices through SIMCUDA_SHARED: one capacity, given back by a killed process, IPC counted once."""
import os
import signal
import subprocess
import sys

import torch
import torch.multiprocessing as mp

GIB = 1 << 30


def gib(count):
    return torch.empty(count * GIB, dtype=torch.uint8, device="cuda")


def free_gib():
    # Expandable segments grow by 20 MiB.
    return round(torch.cuda.mem_get_info()[0] / GIB, 1)


def runs_out(count):
    try:
        gib(count)
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


def child():
    """Uses the device that the parent uses too, then waits to be killed."""
    assert free_gib() == 3, free_gib()
    message = runs_out(4)
    assert message and f"Process {os.getppid()} has 5.00 GiB memory in use" in message, message
    own = gib(2)
    assert free_gib() == 1, free_gib()
    print("ready", flush=True)
    signal.pause()
    del own


def other_device():
    assert torch.cuda.device_count() == 1 and free_gib() == 8, free_gib()


def receiver(inbox, outbox):
    shared = inbox.get()
    outbox.put(free_gib())
    inbox.get()
    del shared


def start(role, **environment):
    return subprocess.Popen([sys.executable, __file__, role], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, **environment})


def main():
    own = gib(5)
    process = start("child")
    assert process.stdout.readline() == "ready\n"
    assert free_gib() == 1 and runs_out(2), free_gib()
    process.kill()
    # Nothing has waited for the process yet.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert free_gib() == 3, free_gib()
    more = gib(2)
    process.wait()
    del more
    torch.cuda.empty_cache()

    uuid = f"GPU-{torch.cuda.get_device_properties(1).uuid}"
    for device in ("1", uuid):
        assert start("other_device", CUDA_VISIBLE_DEVICES=device).wait() == 0

    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=receiver, args=(inbox, outbox))
    process.start()
    inbox.put(own)
    assert outbox.get() == 3, "the memory of the parent is counted once"
    inbox.put(None)
    process.join()
    assert process.exitcode == 0

    # The child of a fork does not give back what its parent uses.
    if (forked := os.fork()) == 0:
        del own
        torch._C._cuda_emptyCache()
        os._exit(0)
    os.waitpid(forked, 0)
    assert free_gib() == 3, free_gib()


if __name__ == "__main__":
    {"child": child, "other_device": other_device}.get("".join(sys.argv[1:]), main)()
