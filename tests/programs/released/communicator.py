"""One rank of a job that unloads its model and keeps its communicator."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = torch.nn.Linear(2048, 2048).cuda()
    for p in model.parameters():
        dist.all_reduce(p.data)
    del model, p
    torch.cuda.empty_cache()


main()
