"""A small transformer under torch's MemTracker: prints a line of JSON for each module and step, with PyTorch's counts.

    path, step          the module and the step
    parameters          bytes of the parameters of the module and its submodules
    kept                the increase, by its forward, of what MemTracker calls activations
    begin_ns, end_ns    the time of that forward
"""

import json
import time

import torch
from torch.distributed._tools.mem_tracker import MemTracker

functional = torch.nn.functional


class Block(torch.nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(wide), torch.nn.Linear(wide, 3 * wide), torch.nn.Linear(wide, wide)
        self.mlp = torch.nn.Sequential(torch.nn.LayerNorm(wide), torch.nn.Linear(wide, 4 * wide), torch.nn.GELU(), torch.nn.Linear(4 * wide, wide))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out((q @ k.transpose(-2, -1)).softmax(dim=-1) @ v)
        return x + self.mlp(x)


class Model(torch.nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.front, self.blocks = torch.nn.Linear(96, wide), torch.nn.ModuleList(Block(wide) for _ in range(3))
        self.head = torch.nn.Linear(wide, 10)

    def forward(self, x):
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model(128).cuda()
optimizer = torch.optim.AdamW(model.parameters())
begin, end = {}, {}
for name, module in model.named_modules():
    module.register_forward_pre_hook(lambda _m, _x, name=name: begin.__setitem__(name, time.time_ns()))
    module.register_forward_hook(lambda _m, _x, _y, name=name: end.__setitem__(name, time.time_ns()))
tracker = MemTracker()
tracker.track_external(model, optimizer)
device = torch.device("cuda:0")
with tracker:
    for step in range(3):
        inputs = torch.randn(8, 64, 96).cuda()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for stats in tracker.memory_tracking.values():
            path = stats.mod_fqn.partition(".")[2]
            at = {state.name: snapshots[-1][device] for state, snapshots in stats.snapshots.items()}
            activations = {name: {getattr(k, "name", k): v for k, v in snapshot.items()} for name, snapshot in at.items()}
            print(json.dumps({"path": path, "step": step, "parameters": stats.parameter_mem, "begin_ns": begin[path], "end_ns": end[path],
                              "kept": activations["POST_FW"]["ACT"] - activations["PRE_FW"]["ACT"]}))
        tracker.reset_mod_stats()
