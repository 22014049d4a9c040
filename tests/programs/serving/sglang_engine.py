"""Serves requests with the scheduler in sglang/: sglang_engine.py TOKENS [REQUESTS].

It prints the scheduler's own counters: the highest use in tokens, the requests then, the sum of the use over all
steps, the steps, and how often a request was retracted.
"""

import sys

from sglang.srt.managers.scheduler import Req, Scheduler


def main() -> None:
    scheduler, uses = Scheduler(int(sys.argv[1]), 8), []
    scheduler.waiting_queue += [Req(24, 40) for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 24)]
    while scheduler.waiting_queue or scheduler.running_batch.reqs:
        scheduler.step()
        reqs = scheduler.running_batch.reqs
        uses.append((scheduler.used(), len(reqs)))
        scheduler.runner.forward(len(reqs), reqs[0].pages)
        scheduler.process_batch_result()
    used, running = max(uses)
    print("cache_use", used, running, sum(used for used, _ in uses), len(uses), scheduler.retracted, flush=True)


if __name__ == "__main__":
    main()
