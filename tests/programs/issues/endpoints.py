# issue: leak
"""Two endpoints of a server of plain functions, each in a range. One keeps a history."""

import torch
from torch.profiler import record_function

TABLE = torch.randn(4096, 64, device="cuda")


class Server:
    def __init__(self):
        self.history = []

    def search(self, tokens):
        with record_function("search"):
            scores = TABLE[tokens] @ TABLE.T
            return scores.topk(16, dim=1).indices

    def recommend(self, tokens):
        with record_function("recommend"):
            profile = TABLE[tokens].mean(dim=0)
            scores = TABLE @ profile
            scores = scores.repeat(32)  # issue here
            self.history.append(scores)
            return scores.argmax()


server = Server()
for number in range(150):
    tokens = torch.randint(0, 4096, (64,), device="cuda")
    server.search(tokens)
    if number % 3 == 0:
        server.recommend(tokens)
