"""A server that captures its model into a CUDA graph, then drops the model. It forgets the graph.

Prints, after each release, what the driver has in use, and the segments of private pools and of all pools as PyTorch's
snapshot has them.
"""

import torch


def report(name):
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    segments = torch.cuda.memory_snapshot()
    private = sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
    print(name, total - free, private, sum(one["total_size"] for one in segments), flush=True)


def capture(model, batch):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(batch)
    return graph, output


def main():
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda().eval()
    batch = torch.zeros(4096, 1024, device="cuda")
    graph, output = capture(model, batch)
    graph.replay()
    report("served")
    del model, batch, output
    torch.cuda.empty_cache()
    report("released")
    del graph
    torch.cuda.empty_cache()
    report("without the graph")


main()
