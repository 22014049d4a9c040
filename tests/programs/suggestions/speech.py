"""Fine-tunes a speech recognizer, convolutions in front of a transformer encoder, with CTC on log_softmax."""
import changes
import torch
from torch import nn
from torch.nn import functional

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "adapters", *changes.ADAM,
                        *changes.FORWARD)
MELS, WIDTH, HEADS, DEPTH, CHARACTERS = 80, 512, 8, 8, 512


class Subsampling(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv1d(MELS, WIDTH, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1), nn.GELU(),
        )


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        normed = self.attention_norm(x)
        q, k, v = self.split(self.query(normed)), self.split(self.key(normed)), self.split(self.value(normed))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.narrow(functional.silu(self.widen(self.feed_norm(x)))))


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.subsampling = Subsampling()
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(DEPTH))
        self.characters = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, spectrogram):
        x = self.subsampling(spectrogram).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return functional.log_softmax(self.characters(x).float(), dim=-1)


model = Recognizer().to("cuda", CHANGES.dtype)
CHANGES.adapt(model)
CHANGES.checkpoint("layers.*", model)
optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=2e-4, weight_decay=0.01)
batch, accumulate = CHANGES.batches(12)
for step in range(4):
    for _ in range(accumulate):
        spectrogram = torch.randn(batch, MELS, 1600, device="cuda", dtype=CHANGES.dtype)
        transcript = torch.zeros(batch, 60, dtype=torch.long, device="cuda")
        with CHANGES.around_forward():
            scores = model(spectrogram)
            frames, lengths = (scores.shape[1],) * batch, (60,) * batch
            loss = functional.ctc_loss(scores.transpose(0, 1), transcript, frames, lengths, blank=1) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
changes.done()
