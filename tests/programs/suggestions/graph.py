"""Trains a message-passing network on graphs: messages along the edges, summed at the nodes with index_add."""
import changes
import torch
import torch.nn as nn
import torch.nn.functional as F

CHANGES = changes.parse("checkpoint-layers", "smaller-batches", "bfloat16-model", *changes.ADAM, *changes.FORWARD)
NODES, EDGES, WIDTH = 400, 2400, 128


class MessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.update = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, nodes, senders, receivers):
        pairs = torch.cat((nodes.index_select(0, senders), nodes.index_select(0, receivers)), dim=-1)
        messages = self.message(pairs)
        received = messages.new_zeros(len(nodes), WIDTH).index_add(0, receivers, messages)
        return nodes + F.relu(self.norm(self.update(torch.cat((nodes, received.to(nodes.dtype)), dim=-1))))


class GraphClassifier(nn.Module):
    def __init__(self, features=32, depth=5, classes=10):
        super().__init__()
        self.embed = nn.Linear(features, WIDTH)
        self.convs = nn.ModuleList([MessagePassing() for _ in range(depth)])
        self.readout = nn.Linear(WIDTH, classes)

    def forward(self, features, senders, receivers, graph_of_node, graphs):
        nodes = self.embed(features)
        for conv in self.convs:
            nodes = conv(nodes, senders, receivers)
        sums = nodes.new_zeros(graphs, WIDTH).index_add(0, graph_of_node, nodes)
        return self.readout(sums / NODES)


def joined_graphs(count):
    features = torch.randn(count * NODES, 32, device="cuda", dtype=CHANGES.dtype)
    senders = torch.zeros(count * EDGES, dtype=torch.long, device="cuda")
    receivers = torch.zeros(count * EDGES, dtype=torch.long, device="cuda")
    graph_of_node = torch.arange(count, device="cuda").repeat_interleave(NODES, output_size=count * NODES)
    return features, senders, receivers, graph_of_node, count


model = GraphClassifier().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("convs.*", model)
optimizer = CHANGES.optimizer(torch.optim.Adam, model, lr=1e-3, weight_decay=5e-4)
graphs, accumulate = CHANGES.batches(40)
for step in range(5):
    optimizer.zero_grad()
    for _ in range(accumulate):
        batch = joined_graphs(graphs)
        labels = torch.zeros(graphs, dtype=torch.long, device="cuda")
        with CHANGES.around_forward():
            loss = F.cross_entropy(model(*batch), labels) / accumulate
        loss.backward()
    optimizer.step()
changes.done()
