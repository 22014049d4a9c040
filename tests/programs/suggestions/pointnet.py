"""Trains a PointNet on point clouds, and keeps the scores of each validation's points on the GPU for a metric."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "predictions-to-cpu",
                        "smaller-evaluation-batch", *changes.ADAM, *changes.FORWARD)
POINTS, PARTS = 3072, 50


def shared(*widths):
    pairs = zip(widths, widths[1:])
    return nn.Sequential(*(nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairs))


class Transform(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.size, self.points, self.matrix = size, shared(size, 64, 128, 512), nn.Linear(512, size * size)

    def forward(self, cloud):
        matrix = self.matrix(self.points(cloud).amax(dim=2)).view(-1, self.size, self.size)
        return torch.bmm(matrix + torch.eye(self.size, device=matrix.device, dtype=matrix.dtype), cloud)


class PartSegmentation(nn.Module):
    def __init__(self):
        super().__init__()
        self.align, self.local, self.deep = Transform(), shared(3, 64, 128), shared(128, 256, 1024)
        self.parts = nn.Sequential(*shared(1024 + 128, 256, 128), nn.Conv1d(128, PARTS, 1))

    def forward(self, cloud):
        local = self.local(self.align(cloud))
        whole = F.max_pool1d(self.deep(local), cloud.shape[2]).expand(-1, -1, cloud.shape[2])
        return self.parts(torch.cat((local, whole), dim=1))


def clouds(count):
    return torch.rand(count, 3, POINTS, device="cuda", dtype=CHANGES.dtype)


def validate(model, total=512):
    size = 16 if "smaller-evaluation-batch" in CHANGES else 64
    scores = []
    model.eval()
    with torch.inference_mode():
        for _ in range(total // size):
            score = model(clouds(size)).softmax(dim=1)
            scores.append(score.cpu() if "predictions-to-cpu" in CHANGES else score)
    model.train()
    return sum(len(score) for score in scores)


network = PartSegmentation().to(device="cuda", dtype=CHANGES.dtype)
CHANGES.checkpoint("[dp]*.*", network)
optimizer = CHANGES.optimizer(torch.optim.Adam, network, lr=1e-3)
batch, accumulate = CHANGES.batches(16)
for epoch in range(2):
    for _ in range(3):
        for _ in range(accumulate):
            labels = torch.zeros(batch, POINTS, dtype=torch.long, device="cuda")
            with CHANGES.around_forward():
                loss = F.cross_entropy(network(clouds(batch)), labels) / accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    validate(network)
changes.done()
