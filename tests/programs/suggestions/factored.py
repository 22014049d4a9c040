"""Trains an encoder-decoder like T5, with its relative position bias, with Adafactor."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "single-tensor-step", "chunked-cross-entropy", "bfloat16-model",
                        "optimizer-in-backward", "scaled-dot-product-attention", *changes.FORWARD)
WIDTH, HEADS, VOCABULARY = 512, 8, 16000


class Attention(nn.Module):
    def __init__(self, biased):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Embedding(32, HEADS) if biased else None

    def forward(self, x, source=None):
        source = x if source is None else source
        split = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(source)), split(self.v(source))
        bias = None
        if self.bias is not None:
            place = torch.arange(x.shape[1], device=x.device)
            bias = self.bias((place[:, None] - place).clamp(-16, 15) + 16).permute(2, 0, 1).unsqueeze(0)
        if "scaled-dot-product-attention" in CHANGES:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        else:
            scores = q @ k.transpose(-1, -2)
            if bias is not None:
                scores = scores + bias
            y = F.softmax(scores, dim=-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention(True)
        self.norm2, self.cross = (nn.RMSNorm(WIDTH), Attention(False)) if decoder else (None, None)
        self.norm3, self.wi, self.wo = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2048, bias=False), nn.Linear(2048, WIDTH, bias=False)

    def forward(self, x, memory=None):
        x = x + self.attention(self.norm1(x))
        if self.cross is not None:
            x = x + self.cross(self.norm2(x), memory)
        return x + self.wo(F.relu(self.wi(self.norm3(x))))


class T5(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Layer(False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(True) for _ in range(depth))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, source, target):
        memory = self.shared(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.shared(target[:, :-1])
        for layer in self.decoder:
            x = layer(x, memory)
        return CHANGES.cross_entropy(self.lm_head, self.norm(x), target[:, 1:])


model = T5().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("*coder.*", model)
optimizer = CHANGES.optimizer(torch.optim.Adafactor, model, lr=1e-2)
batch, accumulate = CHANGES.batches(8)
for step in range(3):
    for _ in range(accumulate):
        source, target = torch.randint(VOCABULARY, (batch, 512)), torch.randint(VOCABULARY, (batch, 257))
        with CHANGES.around_forward():
            loss = model(source.cuda(), target.cuda())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
