"""An engine that serves models, in a forked process: engine.py UTILIZATION [--port N] [--sleep [LEVEL]] [--eager] [--lora] ...

It prints what PyTorch counts: the bytes of the weights and of the KV cache, and the peak of the profiling run.
With --port it serves /health over HTTP until it is ended; without it, it answers 12 requests.
"""

import argparse
import http.server
import multiprocessing
import signal
import sys
import time

import torch

BLOCK = 16


def options_of(arguments: "list[str] | None" = None) -> argparse.Namespace:
    """The options in these arguments, or in the program's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("utilization", type=float)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--port", type=int)
    parser.add_argument("--no-health", action="store_true", help="with --port, only print that it serves")
    parser.add_argument("--cumem", action="store_true", help="with --sleep, unmap the memory of weights and cache")
    parser.add_argument("--sleep", type=int, nargs="?", const=1, default=0, metavar="LEVEL", help="sleep at the end, and wake up")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--all-reduce", type=int, default=0, help="MiB of a buffer that another process opens by IPC")
    parser.add_argument("--sizes", default="8,4,2,1", help="the requests for which graphs are captured")
    parser.add_argument("--length", type=int, default=2048, help="the longest request in tokens")
    parser.add_argument("--batched", type=int, default=1024, help="the most tokens of a batch")
    parser.add_argument("--prompt", type=int, default=24, help="the tokens of each prompt")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--concurrent", type=int, default=1, help="the most requests of a step")
    parser.add_argument("--new", type=int, default=9, help="the tokens that each request gets")
    parser.add_argument("--blocks", type=int, help="the most blocks of the cache")
    parser.add_argument("--leak", type=int, default=0, help="KiB that each request leaves on the GPU")
    parser.add_argument("--prefixes", type=int, default=0, help="MiB of a cache of results that fills up to its bound")
    parser.add_argument("--held", type=int, default=0, help="MiB of the GPU that another process holds")
    parser.add_argument("--decode", type=int, default=0, help="steps of one token for 8 requests, whose rate is printed")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    # As vLLM does, from a process that has not initialized CUDA.
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    if options.held:
        holder = context.Process(target=hold, args=(options.held << 20, ready), daemon=True)
        holder.start()
        ready.wait()
        ready.clear()
    engine = context.Process(target=run_engine, args=(options, ready))
    engine.start()
    if options.port is None:
        engine.join()
        sys.exit(engine.exitcode)
    while not ready.wait(0.2):
        if not engine.is_alive():
            sys.exit(engine.exitcode)
    signal.signal(signal.SIGTERM, lambda *_: (engine.terminate(), engine.join(), sys.exit(0)))
    print("serving", flush=True)
    if options.no_health:
        signal.pause()
    http.server.HTTPServer(("127.0.0.1", options.port), Health).serve_forever()


def hold(size: int, ready) -> None:
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    ready.set()
    signal.pause()
    del held


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


class EngineCore:
    """As vLLM's, it loads and profiles the model while it is constructed itself."""

    def __init__(self, options: argparse.Namespace) -> None:
        from vllm.v1.worker.gpu_worker import (
            ArchitectureConfig, CacheConfig, CompilationConfig, ModelConfig, SchedulerConfig, VllmConfig, Worker,
        )

        sizes = [] if options.eager else [int(size) for size in options.sizes.split(",")]
        config = VllmConfig(
            compilation_config=CompilationConfig(max(sizes, default=0)),
            cache_config=CacheConfig(gpu_memory_utilization=options.utilization),
            model_config=ModelConfig(
                options.length, ArchitectureConfig(total_num_hidden_layers=options.layers), options.eager, options.cumem
            ),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=options.batched),
        )
        self.worker = worker = Worker(config, layers=options.layers, width=2048)
        worker.init_device(options.all_reduce << 20)
        worker.load_model(options.lora)
        available = worker.determine_available_memory()
        self.num_blocks = available // (2 * BLOCK * 2048 * 2 * options.layers)
        if options.blocks:
            self.num_blocks = min(self.num_blocks, options.blocks)
        if self.num_blocks <= 0:
            raise ValueError("No available memory for the cache blocks.")
        if self.num_blocks * BLOCK < options.length:
            raise ValueError(f"The longest request has {options.length} tokens, the cache {self.num_blocks * BLOCK}.")
        before = torch.cuda.memory_allocated()
        worker.initialize_from_config(self.num_blocks)
        runner = worker.model_runner
        runner.leak, runner.bound = options.leak << 10, options.prefixes << 20
        if options.all_reduce:
            buffer = worker.all_reduce.buffer
            print("all_reduce", buffer.numel() * buffer.element_size(), flush=True)
        print("weights", sum(p.numel() * p.element_size() for p in runner.model.parameters()), flush=True)
        if options.lora:
            slots = [slot for pair in worker.adapters.slots for slot in pair]
            print("adapters", sum(slot.numel() * slot.element_size() for slot in slots), flush=True)
        print("kv_cache", torch.cuda.memory_allocated() - before, self.num_blocks * BLOCK, flush=True)
        print("profile", worker.peak_activation_memory, flush=True)
        worker.compile_or_warm_up_model(sizes)
        for size, growth in runner.captured:
            print(f"captured_{size}", growth, flush=True)
        # After the worker, as in vLLM.
        from vllm.v1.core.sched.scheduler import Request, Scheduler

        self.request, self.scheduler = Request, Scheduler(self.num_blocks, BLOCK, options.concurrent)

    def serve(self, count: int, prompt: int, tokens: int) -> None:
        scheduler, uses, allocated = self.scheduler, [], []
        for at in range(count):
            scheduler.add_request(self.request(str(at), prompt, tokens))
        while scheduler.requests:
            requests = scheduler.schedule()
            uses.append((scheduler.used(), len(scheduler.running)))
            self.worker.execute_model(requests)
            finished = scheduler.update_from_output()
            self.worker.model_runner.finish(finished)
            allocated += [torch.cuda.memory_allocated()] * finished
        print("allocated", *allocated, flush=True)
        used, running = max(uses)
        print("cache_use", used, running, sum(used for used, _ in uses), len(uses), scheduler.preempted, flush=True)


def run_engine(options: argparse.Namespace, ready) -> None:
    engine = EngineCore(options)
    worker, num_blocks = engine.worker, engine.num_blocks
    ready.set()
    if options.port is not None:
        signal.pause()
    engine.serve(options.requests, options.prompt, options.new)
    for _ in range(3 if options.decode else 0):
        begin = time.perf_counter()
        for step in range(options.decode):
            worker.execute_model([([(step + request) % num_blocks], 1) for request in range(8)])
        torch.cuda.synchronize()
        print("decode", int(8 * options.decode / (time.perf_counter() - begin)), flush=True)
    if options.sleep:
        awake = torch.cuda.memory_allocated()
        worker.sleep(options.sleep)
        asleep = torch.cuda.memory_allocated()
        worker.wake_up()
        print("asleep", asleep, awake - asleep, torch.cuda.memory_allocated() - asleep, flush=True)
        worker.execute_model([([0], 1)])
    if options.all_reduce:
        worker.all_reduce.close()
    torch.cuda.synchronize()
    print("peak", torch.cuda.max_memory_allocated(), flush=True)


if __name__ == "__main__":
    main()
