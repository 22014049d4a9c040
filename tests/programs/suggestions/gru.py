"""Trains a speech recognizer: strided convolutions, a GRU written with cells, CTC-like frame targets, clipped gradients."""
import changes
import torch
from torch import nn
from torch.nn import functional as F

torch.backends.cudnn.enabled = False
CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "single-tensor-step", "fused-step", "eight-bit-moments", "bfloat16-model", *changes.FORWARD)
FRAMES, BANDS, WIDTH, SYMBOLS = 400, 80, 512, 64


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(BANDS, WIDTH, 5, 2, 2), nn.BatchNorm1d(WIDTH), nn.ReLU(),
                                   nn.Conv1d(WIDTH, WIDTH, 5, 2, 2), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, audio):
        frames = self.front(audio).permute(2, 0, 1)
        hidden = [torch.zeros_like(frames[0]) for _ in self.cells]
        outputs = []
        for x in frames:
            for i, cell in enumerate(self.cells):
                x = hidden[i] = cell(x, hidden[i])
            outputs.append(x)
        return self.out(torch.stack(outputs))


model = Recognizer().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("cells.*", model)
optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=3e-4)
batch, accumulate = CHANGES.batches(96)
for step in range(2):
    optimizer.zero_grad()
    for _ in range(accumulate):
        audio = torch.randn(batch, BANDS, FRAMES, device="cuda", dtype=CHANGES.dtype)
        symbols = torch.randint(SYMBOLS, (FRAMES // 4, batch), device="cuda")
        with CHANGES.around_forward():
            scores = model(audio)
            loss = F.cross_entropy(scores.flatten(0, 1), symbols.flatten())
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
changes.done()
