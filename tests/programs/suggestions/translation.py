"""Trains a translator, nn.Transformer between two vocabularies, in the loop of a small Trainer class with AdamW."""
import changes
import torch
from torch import nn

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", "chunked-cross-entropy",
                        "smaller-evaluation-batch", *changes.ADAM, *changes.FORWARD)
SOURCE_WORDS, TARGET_WORDS, WIDTH = 12000, 16000, 384


class Translator(nn.Module):
    def __init__(self, longest=128):
        super().__init__()
        self.source, self.target = nn.Embedding(SOURCE_WORDS, WIDTH), nn.Embedding(TARGET_WORDS, WIDTH)
        self.positions = nn.Parameter(torch.zeros(longest, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 6, 4, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.words = nn.Linear(WIDTH, TARGET_WORDS)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(longest))

    def forward(self, source, target):
        length = target.shape[1]
        source = self.source(source) + self.positions[: source.shape[1]]
        target = self.target(target) + self.positions[:length]
        return self.transformer(source, target, tgt_mask=self.causal[:length, :length], tgt_is_causal=True)


class Trainer:
    def __init__(self, model, size, evaluation_size):
        self.model = model
        self.batch, self.accumulate = CHANGES.batches(size)
        self.evaluation_batch = evaluation_size // 4 if "smaller-evaluation-batch" in CHANGES else evaluation_size
        self.evaluation_size = evaluation_size
        self.optimizer = CHANGES.optimizer(torch.optim.AdamW, model, lr=3e-4, betas=(0.9, 0.98))

    def sentences(self, count):
        return torch.zeros(2, count, 97, dtype=torch.long, device="cuda")

    def training_step(self):
        for _ in range(self.accumulate):
            source, target = self.sentences(self.batch)
            with CHANGES.around_forward():
                hidden = self.model(source, target[:, :-1])
                loss = CHANGES.cross_entropy(self.model.words, hidden, target[:, 1:]) / self.accumulate
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        for _ in range(self.evaluation_size // self.evaluation_batch):
            source, target = self.sentences(self.evaluation_batch)
            words = self.model.words(self.model(source, target[:, :-1])).log_softmax(dim=-1).argmax(dim=-1)
        self.model.train()
        return words.shape

    def train(self, steps):
        for step in range(1, steps + 1):
            self.training_step()
            if step % 2 == 0:
                self.evaluate()


translator = Translator().to(device="cuda", dtype=CHANGES.dtype)
CHANGES.checkpoint("transformer.*coder.layers.*", translator)
Trainer(translator, size=32, evaluation_size=96).train(steps=4)
changes.done()
