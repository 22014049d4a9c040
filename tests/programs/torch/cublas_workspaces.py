"""Workspaces of cuBLAS, and tensors as large as they are. Each line is a block of either size: its address, its bytes and
whether PyTorch's own recorder has one of PyTorch's functions for workspaces among its C++ frames.

Workspaces of several streams, of a backward pass without modules, freed by a clearing and made again, beside results of
32 MiB on streams that multiply nothing and 1 MiB results of multiplications.
"""

import torch

SIZES = 1 << 20, 4 << 20, 8320 << 10, 32 << 20
FUNCTIONS = "getCurrentCUDABlasHandle", "getCUDABlasLtWorkspace"

torch.cuda.memory._record_memory_history(stacks="all")

# No cuBLAS runs here at all.
frames = []
for _ in range(4):
    with torch.cuda.stream(torch.cuda.Stream()):
        frames += [torch.zeros(8, 1024, 1024, device="cuda") for _ in range(2)]

model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).cuda()
optimizer = torch.optim.Adam(model.parameters())
with torch.no_grad():
    kept = [model(torch.randn(512, 512, device="cuda")) for _ in range(3)]
for _ in range(3):
    model(torch.randn(512, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.cuda.stream(torch.cuda.Stream()):
    kept.append(kept[0] @ kept[1])
torch._C._cuda_clearCublasWorkspaces()
kept.append(kept[0] @ kept[1])

scale = torch.zeros((), device="cuda", requires_grad=True)
matrix = scale.exp() * (kept[0] @ kept[1]) + torch.eye(512, device="cuda")
factor, _ = torch.linalg.cholesky_ex(matrix)
torch.cholesky_solve(kept[2], factor).sum().backward()

peak = torch.cuda.max_memory_allocated()
for event in torch.cuda.memory._snapshot()["device_traces"][0]:
    if event["action"] == "alloc" and event["size"] in SIZES:
        is_workspace = any(name in frame["name"] for frame in event["frames"] for name in FUNCTIONS)
        print(event["addr"], event["size"], "workspace" if is_workspace else "tensor")
