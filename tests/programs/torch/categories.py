"""Programs that print their memory's purpose: each line is an address, a time, and the category of the block there.

    categories.py training|mixed|alike|moved|assigned|loaded|safetensors|grown|preallocated|buffered|dynamic|static|appended|
                  cut_back|rollouts|joined_inside|kept_results|kept|recomputed|recorded|closure|cached|first_step|graph|buckets|sharded|gathered|
                  replicated|meta
"""

import os
import sys
import tempfile

import torch
from torch.utils.checkpoint import checkpoint

from purpose import note

functional = torch.nn.functional


def note_model(model):
    for parameter in model.parameters():
        note(parameter, "parameter")
    for buffer in model.buffers():
        note(buffer, "parameter")


def note_gradients(model):
    for parameter in model.parameters():
        note(parameter.grad, "gradient")


def note_state(optimizer):
    for state in optimizer.state.values():
        for tensor in state.values():
            if torch.is_tensor(tensor):
                note(tensor, "optimizer_state")


class Net(torch.nn.Module):
    def __init__(self, repeated=False):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(40, 80), torch.nn.BatchNorm1d(80), torch.nn.Linear(80, 40)
        self.deep = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.GELU(), torch.nn.Linear(80, 80), torch.nn.GELU())
        self.repeated = repeated

    def forward(self, x):
        hidden = self.norm(self.first(x))
        note(hidden, "activation")
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: note(gradient, "autograd_detail"))
        hidden = checkpoint(self.inside, hidden, use_reentrant=False) if self.repeated else self.inside(hidden)
        return self.last(hidden)

    def inside(self, hidden):
        for layer in self.deep:
            hidden = layer(hidden)
            # With checkpointing this runs twice: in the forward and in its recomputation.
            note(hidden, "activation")
        return hidden


def train(model, optimizer, set_to_none, batches=1, steps=3):
    for _ in range(steps):
        for _ in range(batches):
            x = torch.randn(64, 40).cuda()
            note(x, "input")
            loss = model(x).square().mean()
            loss.backward()
            note_gradients(model)
        note_model(model)
        optimizer.step()
        note_state(optimizer)
        note_gradients(model)
        optimizer.zero_grad(set_to_none=set_to_none)


def training():
    """Accumulation in place, gradients set to None and zero, all optimizer kinds, checkpointing, frozen layers."""
    for foreach, fused, batches, none in ((True, False, 3, True), (False, False, 1, False), (False, True, 2, False)):
        model = Net(repeated=fused).cuda()
        model.deep[0].requires_grad_(False)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), foreach=foreach, fused=fused)
        train(model, optimizer, none, batches)
        del model, optimizer


def mixed():
    """Autocast's copies of weights: saved for backward, in half precision, and with a weight's shape."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.Linear(80, 96)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}

    def pack(tensor):
        if tensor.dtype == torch.bfloat16 and (tuple(tensor.shape) in shapes or tuple(tensor.t().shape) in shapes):
            note(tensor, "autocast_cache")
        return tensor

    for _ in range(3):
        x = torch.randn(64, 40).cuda()
        note(x, "input")
        with torch.autocast("cuda", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).float().square().mean()
        loss.backward()
        note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def alike():
    """Autocast's casts of activations that are half as large as another layer's weight: activations."""
    layers = torch.nn.Linear(40, 160), torch.nn.LayerNorm(160), torch.nn.Linear(160, 96), torch.nn.Linear(96, 50)
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}

    def pack(tensor):
        if tensor.dtype == torch.bfloat16 and (tuple(tensor.shape) in shapes or tuple(tensor.t().shape) in shapes):
            note(tensor, "autocast_cache")
        if tensor.dtype == torch.bfloat16 and tuple(tensor.shape) == (30, 160):
            note(tensor, "activation")
        return tensor

    for _ in range(3):
        # The cast of the normalized activation has 30 * 160 values, as the last weight: 50 * 96.
        x = torch.randn(30, 40).cuda()
        with torch.autocast("cuda", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    note_model(model)


def moved():
    """Parameters that are moved, and moved again by .half(): the first copies were parameters too."""
    model = Net().cuda()
    note_model(model)
    model.half()
    note_model(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(64, 40).cuda().half()
            model(x)
    note_model(model)


def assigned():
    """Weights that plain code brings to the GPU and a model takes over. Its cast to half precision replaces them."""
    state = {name: torch.zeros(value.shape).to("cuda") for name, value in Net().state_dict().items()}
    for name in ("first.weight", "deep.0.weight", "last.weight"):
        note(state[name], "parameter")
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(state, assign=True)
    del state
    model.half()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(64, 40).cuda().half())
    note_model(model)


def loaded():
    """A checkpoint that is kept beside the model that it was loaded into."""
    model = Net()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt")
        torch.save(model.state_dict(), path)
        model.cuda()
        checkpoint_ = torch.load(path, map_location="cuda", weights_only=True)
    model.load_state_dict(checkpoint_)
    note_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, True)
    for tensor in checkpoint_.values():
        note(tensor, "checkpoint")
    note_model(model)


class Attention(torch.nn.Module):
    def __init__(self, preallocated):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.keys = self.values = None
        if preallocated:
            self.keys = torch.zeros(4, 128, 64, device="cuda")
            self.values = torch.zeros(4, 128, 64, device="cuda")

    def forward(self, x, at):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if at is None:
            self.keys = k if self.keys is None else torch.cat((self.keys, k), dim=1)
            self.values = v if self.values is None else torch.cat((self.values, v), dim=1)
            keys, values = self.keys, self.values
        else:
            self.keys[:, at : at + 1], self.values[:, at : at + 1] = k, v
            keys, values = self.keys[:, : at + 1], self.values[:, : at + 1]
        return (q @ keys.transpose(1, 2)).softmax(-1) @ values


def decode(preallocated):
    layers = torch.nn.ModuleList(Attention(preallocated) for _ in range(3)).cuda()
    head = torch.nn.Linear(64, 64).cuda()
    model = torch.nn.Sequential(*layers)
    model.forward = lambda x, at: head(run(layers, x, at))
    x = torch.randn(4, 1, 64, device="cuda")
    with torch.no_grad():
        for i in range(24):
            x = model(x, i if preallocated else None).tanh()
            if i > 3:
                for layer in layers:
                    note(layer.keys, "kv_cache")
                    note(layer.values, "kv_cache")
    note_model(layers)


def run(layers, x, at):
    for layer in layers:
        x = layer(x, at)
    return x


def grown():
    """Keys and values that grow by torch.cat."""
    decode(False)


def preallocated():
    """Keys and values that are allocated once and written into."""
    decode(True)


def buffered():
    """Keys and values in buffers, beside buffers that are no cache."""
    layers = torch.nn.ModuleList(Attention(False) for _ in range(3))
    for layer in layers:
        del layer.keys, layer.values
        layer.register_buffer("k", torch.zeros(4, 128, 64), persistent=False)
        layer.register_buffer("v", torch.zeros(4, 128, 64), persistent=False)
        layer.register_buffer("key", torch.zeros(128, 64))
    layers.cuda()
    x = torch.randn(4, 1, 64, device="cuda")
    with torch.no_grad():
        for i in range(24):
            for layer in layers:
                layer.keys, layer.values = layer.k, layer.v
                x = layer(x, i)
                del layer.keys, layer.values
    for layer in layers:
        note(layer.k, "kv_cache")
        note(layer.v, "kv_cache")
        note(layer.key, "parameter")


def meta():
    """Weights that the inner loop of a meta-learner computes (MAML): they belong to the graph."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        total = 0
        for _ in range(2):
            x = torch.randn(32, 64).cuda()
            note(x, "input")
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = torch.func.functional_call(model, fast, (x,)).square().mean()
                gradients = torch.autograd.grad(loss, fast.values(), create_graph=True)
                fast = {name: old - 0.01 * new for (name, old), new in zip(fast.items(), gradients)}
                for weight in fast.values():
                    note(weight, "activation")
            total = total + torch.func.functional_call(model, fast, (x,)).square().mean()
        total.backward()
        note_gradients(model)
        optimizer.step()
    note_model(model)
    note_state(optimizer)


class DynamicCache:
    """Keys and values of all layers, stored as in transformers: outside the model, grown by torch.cat."""

    def __init__(self):
        self.layers = []

    def update(self, keys, values, layer):
        if layer == len(self.layers):
            self.layers.append((keys.clone(), values.clone()))
        else:
            old_keys, old_values = self.layers[layer]
            self.layers[layer] = torch.cat((old_keys, keys), dim=1), torch.cat((old_values, values), dim=1)
        return self.layers[layer]


class StaticCache:
    """Keys and values of all layers, outside the model, allocated in advance and written into."""

    def __init__(self, layers, length):
        shape = 4, length, 64
        self.layers = [(torch.zeros(shape, device="cuda"), torch.zeros(shape, device="cuda")) for _ in range(layers)]
        self.at = 0

    def update(self, keys, values, layer):
        all_keys, all_values = self.layers[layer]
        self.at += layer == 0
        all_keys[:, self.at - 1 : self.at], all_values[:, self.at - 1 : self.at] = keys, values
        return all_keys[:, : self.at], all_values[:, : self.at]


class Decoder(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 3 * 64) for _ in range(layers))
        self.head = torch.nn.Linear(64, 64)

    def forward(self, x, cache):
        for place, layer in enumerate(self.layers):
            q, k, v = layer(x).chunk(3, dim=-1)
            keys, values = cache.update(k, v, place)
            x = x + (q @ keys.transpose(1, 2)).softmax(-1) @ values
        return self.head(x)


def generate(cache):
    model = Decoder(3).cuda().eval()
    x = torch.randn(4, 1, 64, device="cuda")
    with torch.no_grad():
        for i in range(24):
            x = model(x, cache).tanh()
            if i > 3:
                for keys, values in cache.layers:
                    note(keys, "kv_cache")
                    note(values, "kv_cache")
    note_model(model)


def dynamic():
    """A cache that is not part of the model and grows."""
    generate(DynamicCache())


def static():
    """A cache that is not part of the model and is allocated in advance."""
    generate(StaticCache(3, 24))


class Store:
    """Keys and values of each layer, under a name that shows nothing."""

    def __init__(self, layers):
        self.layers = [None] * layers

    def update(self, k, v, place):
        if self.layers[place] is not None:
            k, v = torch.cat((self.layers[place][0], k), dim=1), torch.cat((self.layers[place][1], v), dim=1)
        self.layers[place] = (k.contiguous(), v.contiguous())
        return self.layers[place]

    def cut(self, length):
        self.layers = [tuple(t[:, :length].contiguous() for t in layer) for layer in self.layers]

    def note(self):
        for keys, values in self.layers:
            note(keys, "kv_cache")
            note(values, "kv_cache")


def cut_back():
    """Speculative decoding: a model checks the tokens of a smaller one, and both caches are cut back."""
    model, draft = Decoder(3).cuda().eval(), Decoder(2).cuda().eval()
    kept, drafted = Store(3), Store(2)
    with torch.no_grad():
        for turn in range(12):
            x = torch.randn(4, 1, 64, device="cuda")
            for _ in range(4):
                draft(x, drafted)
            model(torch.randn(4, 5, 64, device="cuda"), kept)
            if turn > 4:
                kept.note()
            kept.cut(2 * turn + 2)
            drafted.cut(2 * turn + 2)
            if turn > 4:
                kept.note()
                drafted.note()
    note_model(model)
    note_model(draft)


def rollouts():
    """Texts that a model generates for its training, whose caches are kept until the training step."""
    model = Decoder(3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        stores = []
        with torch.no_grad():
            for _ in range(4):
                store, x = Store(3), torch.randn(4, 1, 64, device="cuda")
                for _ in range(12):
                    x = model(x, store).tanh()
                stores.append(store)
        if turn > 0:
            for store in stores:
                store.note()
        model(torch.randn(4, 12, 64, device="cuda"), Store(3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    note_model(model)


class Joined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.all = torch.nn.Linear(64, 256), None

    def forward(self, x):
        y = self.head(x)
        self.all = y if self.all is None else torch.cat((self.all, y))
        return y


def joined_inside():
    """A model that joins all its results: they grow like a cache, but alone."""
    model = Joined().cuda().eval()
    with torch.no_grad():
        for _ in range(24):
            model(torch.randn(8, 64, device="cuda"))
            note(model.all, "activation")
    note_model(model)


def cached():
    """A cache that the forward pass of a training fills belongs to its graph. The cache of a generation does not."""
    model = Decoder(3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        cache = DynamicCache()
        loss = model(torch.randn(4, 8, 64, device="cuda"), cache).square().mean()
        for keys, values in cache.layers:
            note(keys, "activation")
            note(values, "activation")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    generate(DynamicCache())


class Appending(torch.nn.Module):
    """Attention that keeps the keys and values of each call beside the earlier ones."""

    def __init__(self):
        super().__init__()
        self.k, self.v = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.kept = []

    def forward(self, x):
        self.kept.append((self.k(x), self.v(x)))
        return sum((x @ k.transpose(1, 2)).softmax(-1) @ v for k, v in self.kept)


class AppendingAttention(Appending):
    def forward(self, x):
        return super().forward(x)


def appended():
    """Keys and values in a list, one more with each call."""
    model = torch.nn.Sequential(AppendingAttention(), AppendingAttention()).cuda()
    x = torch.randn(4, 1, 64, device="cuda")
    with torch.no_grad():
        for i in range(12):
            x = model(x).tanh()
    for layer in model:
        for keys, values in layer.kept[:8]:
            note(keys, "kv_cache")
            note(values, "kv_cache")
    note_model(model)


class Scored(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.out(self.inner(x).tanh()).softmax(-1)


def kept_results():
    """The results of every batch, and a feature of each, kept in lists: no KV cache. Batches have different lengths."""
    model = Scored().cuda().eval()
    model.out.register_forward_hook(lambda module, args, result: features.append(result))
    results, features = [], []
    with torch.inference_mode():
        for length in (8, 12, 16, 20, 12, 8, 24, 32, 16, 8, 12, 40):
            results.append(model(torch.randn(length, 64, device="cuda")))
    for result in results[:9] + features[:9]:
        note(result, "kept_tensor")
    note_model(model)


def kept():
    """A replay buffer, averages of weights in a list, a bank that grows, and results of an evaluation. Samples of the buffer are inputs."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 40)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replay = torch.zeros(500, 40, device="cuda")
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    bank = torch.zeros(0, 40, device="cuda")
    for step in range(6):
        x = replay[torch.zeros(64, dtype=torch.long, device="cuda")]
        note(x, "input")
        result = model(x)
        with torch.no_grad():
            bank = torch.cat((bank, result[:8]))
        note(bank, "kept_tensor")
        result.square().mean().backward()
        note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters()):
                average.lerp_(parameter, 0.1)
    results = []
    with torch.no_grad():
        for _ in range(8):
            x = torch.zeros(64, 40, device="cuda")
            results.append(model(x))
    for tensor in [replay, *averages, *results[:4]]:
        note(tensor, "kept_tensor")
    note_model(model)
    note_state(optimizer)


def recomputed():
    """Text generation without a cache: each call has one token more and larger scores, which are no cache."""
    embedding, model = torch.nn.Embedding(50, 64).cuda(), Scored().cuda()
    text = torch.zeros(4, 1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        for i in range(24):
            scores = model(embedding(text))
            note(scores, "activation")
            text = torch.cat((text, scores[:, -1].argmax(-1, keepdim=True)), dim=1)
    note_model(model)


def recorded():
    """A penalty on a gradient: the first backward pass is recorded, for the second one."""
    layers = torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 80), torch.nn.Tanh(), torch.nn.Linear(80, 1)
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(64, 40).cuda().requires_grad_()
        note(x, "input")
        gradient, = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        note(gradient, "activation")
        loss = gradient.square().mean()
        loss.backward()
        note_gradients(model)
        note(x.grad, "gradient")
        optimizer.step()
        optimizer.zero_grad()
    note_model(model)


def closure():
    """LBFGS calls a closure several times in each step. What it makes between two calls is no state."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 40)).cuda()
    # No kernel writes the result of a comparison with a tolerance, so the memory that it reuses decides. All of it is zero.
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4, tolerance_grad=-1, tolerance_change=-1)
    gather = optimizer._gather_flat_grad

    def gathered():
        flat = gather()
        note(flat, "temporary")
        return flat

    optimizer._gather_flat_grad = gathered
    for _ in range(4):
        x = torch.zeros(64, 40).cuda()

        def loss():
            optimizer.zero_grad()
            result = model(x).square().mean()
            result.backward()
            note_gradients(model)
            return result

        optimizer.step(loss)
        for state in optimizer.state.values():
            for tensor in (state["d"], state["prev_flat_grad"], *state["old_dirs"], *state["old_stps"]):
                note(tensor, "optimizer_state")
    note_model(model)


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(512, 1024), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        hidden = self.norm(self.up(x))
        note(hidden, "activation")
        return self.down(hidden)


def first_step():
    """Out of memory in the first step. An activation is as large as cuBLAS's workspace: 8192 * 1024 floats."""
    model = Wide().cuda()
    try:
        result = model(torch.randn(8192, 512, device="cuda"))
        result.new_empty(1 << 40)
    except torch.OutOfMemoryError:
        print("out of memory")
    note_model(model)


def safetensors():
    """A safetensors file that stays on the GPU beside the model that it was copied into (needs the package)."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        save_file(Net().state_dict(), path)
        model = Net().cuda()
        state = load_file(path, device="cuda")
    model.load_state_dict(state)
    train(model, torch.optim.Adam(model.parameters()), True)
    for tensor in state.values():
        note(tensor, "checkpoint")
    note_model(model)


def gloo():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def sharded():
    """ZeroRedundancyOptimizer's buckets; the parameters are views of them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    gloo()
    model = Net().cuda()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True)
    train(model, optimizer, True)
    note_model(model)
    # FSDP's last callback is freed by the thread of the backward pass. While Python ends, that would abort the process.
    # This pass waits for it.
    torch.ones((), device="cuda", requires_grad=True).backward()
    torch.distributed.destroy_process_group()


def gathered():
    """FSDP's parameter shards, and the full parameters that it gathers temporarily."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = Net().cuda()
    inner = model.deep[0]
    fully_shard(inner)
    fully_shard(model)
    inner.register_forward_pre_hook(lambda module, _: note(module.weight, "communication_bucket"))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        model(torch.randn(64, 40, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            note(parameter.to_local(), "parameter")
            note(optimizer.state[parameter]["exp_avg"].to_local(), "optimizer_state")
    torch.distributed.destroy_process_group()


def replicated():
    """DataParallel's copies of the parameters on the second device, made for each forward."""
    model = Net().cuda()
    weight = model.first.weight
    parallel = torch.nn.DataParallel(model, [0, 1])
    optimizer = torch.optim.Adam(model.parameters())

    def note_copy(module, _):
        if module.weight is not weight:
            note(module.weight, "communication_bucket" if module.weight.device.index else "parameter")

    model.first.register_forward_pre_hook(note_copy)
    for _ in range(4):
        parallel(torch.randn(64, 40, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    note_model(model)


def graph():
    """A captured forward: its memory belongs to the graph. A pool of the program does not."""
    model = Net().cuda().eval()
    x = torch.randn(64, 40, device="cuda")
    with torch.no_grad():
        model.first(x)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = model.first(x)
            note(y, "graph_pool")
        for _ in range(3):
            captured.replay()
    note(y, "graph_pool")
    if hasattr(torch.cuda, "MemPool"):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            table = torch.zeros(100, 40, device="cuda")
        note(table, "memory_pool")
    note_model(model)


def buckets():
    """DistributedDataParallel's gradient buckets, which contain copies of the gradients."""
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = Net().cuda()
    before = torch.cuda.memory_allocated()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    print("buckets", torch.cuda.memory_allocated() - before)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), True)
    torch.distributed.destroy_process_group()


torch.manual_seed(0)
globals()[sys.argv[1]]()
print("peak", torch.cuda.max_memory_allocated())
