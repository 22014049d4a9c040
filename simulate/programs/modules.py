"""Common kinds of models with two optimizers and gradient clipping. They run, and their memory use becomes constant.

The arguments are kinds: names of functions below.
"""
import os
import sys

import torch
import torch.nn as nn

torch.backends.cudnn.enabled = os.environ.get("CUDNN", "0") == "1"


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 16, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).cuda()
    x = torch.randn(16, 3, 64, 64, device="cuda")
    return model, lambda: model(x).sum()


def encoder(dtype=None):
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).cuda()
    x = torch.randn(8, 128, 256, device="cuda")

    def forward():
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not None):
            return model(x).float().mean()

    return model, forward


def attention():
    model = nn.Linear(512, 512 * 3).cuda().to(torch.bfloat16)
    x = torch.randn(4, 256, 512, device="cuda", dtype=torch.bfloat16)

    def forward():
        q, k, v = model(x).view(4, 256, 3, 8, 64).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().sum()

    return model, forward


def recurrent():
    common = {"num_layers": 2, "dropout": 0.2, "batch_first": True}
    projected = {} if not torch.backends.cudnn.enabled else {"proj_size": 32}
    model = nn.ModuleList([nn.LSTM(64, 128, **common, **projected), nn.GRU(64, 128, bidirectional=True, **common), nn.RNN(64, 256, bias=False)]).cuda()
    x = torch.randn(8, 20, 64, device="cuda")
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.arange(20, 4, -2), batch_first=True)

    def forward():
        outputs = [layer(x)[0] for layer in model] + [layer(packed)[0].data for layer in model]
        assert outputs[0].shape == (8, 20, projected.get("proj_size", 128)) and outputs[1].shape == (8, 20, 256), [y.shape for y in outputs]
        assert outputs[3].shape[0] == sum(range(20, 4, -2))
        return sum(y.sum() for y in outputs)

    return model, forward


def embedding():
    model = nn.EmbeddingBag(1000, 64).cuda()
    x = torch.randint(0, 1000, (32, 10), device="cuda")
    return model, lambda: model(x).sum()


def small_beside(work):
    model = nn.Linear(4, 4).cuda()

    def forward():
        work()
        return model(torch.randn(2, 4, device="cuda")).sum()

    return model, forward


def selection():
    def work():
        t = torch.randn(100, 100, device="cuda")
        assert t.sort()[0].shape == (100, 100) and t.topk(5)[0].shape == (100, 5)
        assert t.cumsum(0).shape == (100, 100) and t[t > 0].dim() == 1
        assert t.nonzero().shape[1] == 2 and torch.unique(t).dim() == 1

    return small_beside(work)


def fourier():
    return small_beside(lambda: torch.fft.rfft(torch.randn(64, 64, device="cuda")))


def linear_algebra():
    def work():
        a = torch.eye(8, device="cuda")
        torch.linalg.inv(a)
        torch.linalg.svd(a)
        torch.linalg.cholesky(a)
        torch.linalg.qr(a)
        torch.linalg.eigh(a)
        torch.bmm(a[None], a[None])

    return small_beside(work)


KINDS = {
    "convolutions": convolutions, "encoder": encoder, "autocast": lambda: encoder(torch.bfloat16),
    "attention": attention, "recurrent": recurrent, "embedding": embedding, "selection": selection, "fourier": fourier,
    "linear_algebra": linear_algebra,
}
for kind in sys.argv[1:]:
    model, forward = KINDS[kind]()
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)):
        settled = []
        for _ in range(4):
            forward().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            settled.append(torch.cuda.memory_allocated())
        assert settled[-1] == settled[-2], f"{kind}: {settled}"
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_reserved(), kind
    assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() <= torch.cuda.memory_reserved(), kind
    print(f"{kind}: peak {torch.cuda.max_memory_allocated():,}")
