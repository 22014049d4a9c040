"""A server of two plain functions behind one that passes requests on. It names no ranges and has no steps.

Prints how often each function was called, and the bytes that each profile takes.
"""

import torch

TABLE = torch.randn(20000, 64, device="cuda")
POPULARITY = torch.rand(20000, device="cuda")
profiles = {}
calls = {"search": 0, "recommend": 0}


def search(query):
    calls["search"] += 1
    query = torch.nn.functional.normalize(query, dim=0)
    scores = TABLE @ query
    return scores.topk(10).indices.tolist()


def recommend(user):
    calls["recommend"] += 1
    if user not in profiles:
        profiles[user] = torch.randn(64, device="cuda")
    scores = TABLE @ profiles[user]
    ranked = scores * POPULARITY
    return ranked.topk(10).indices.tolist()


def handle(kind, argument):
    if kind == "search":
        return search(argument)
    return recommend(argument)


def main():
    for number in range(200):
        # Twice in a row, too.
        if number % 10 in (3, 4, 8):
            handle("recommend", number)
        else:
            handle("search", torch.randn(64, device="cuda"))


main()
for name, count in calls.items():
    print(name, count)
