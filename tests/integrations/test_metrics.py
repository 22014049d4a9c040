"""`memtrace --metrics` with a real Prometheus: the scrape configuration and the queries of docs/how-to/metrics.md, and those of
the Grafana dashboard."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Callable, List

from conftest import ROOT, Workplace, blocks, memtrace, python

PAGE = ROOT / "docs" / "how-to" / "metrics.md"
DASHBOARD = ROOT / "docs" / "how-to" / "grafana-dashboard.json"
PROGRAM = ROOT / "tests" / "programs" / "launcher" / "served.py"
HANG = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()


def until(question: Callable[[], Any]) -> Any:
    """Asks again until there is an answer."""
    started = time.monotonic()
    while True:
        try:
            answer = question()
        except OSError:
            answer = None
        if answer:
            return answer
        assert time.monotonic() - started < HANG, "no answer"
        time.sleep(0.1)


def queries() -> List[str]:
    """The queries of the page and of the dashboard."""
    page = re.findall(r"^\| [^|]+\? \| `([^`]+)` \|$", PAGE.read_text(), flags=re.M)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    dashboard = [target["expr"].replace("$job", "memtrace") for panel in panels for target in panel["targets"]]
    assert len(page) == 5 and len(dashboard) == 7, (page, dashboard)
    return page + dashboard


def test_a_real_prometheus_scrapes_the_metrics(workplace: Workplace) -> None:
    command = [memtrace(), "--metrics", "127.0.0.1:0", "--no-snapshot", "-o", "run", "--", python(), str(PROGRAM)]
    pipe = subprocess.PIPE
    program = subprocess.Popen(
        command, env=workplace.environment, cwd=workplace.folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    url = re.search(r"metrics at (http://(\S+)/metrics)", program.stderr.readline())
    assert url is not None
    allocated, reserved = map(int, program.stdout.readline().split())
    checked = subprocess.run(["promtool", "check", "metrics"], input=get(url[1]), capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr

    (config,) = blocks("metrics.md", "yaml")
    config = config.replace("127.0.0.1:9400", url[2]).replace("5s", "1s")
    (workplace.folder / "prometheus.yml").write_text(config)
    port = free_port()
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    log = (workplace.folder / "prometheus.log").open("w")
    prometheus = subprocess.Popen(["prometheus", *options], cwd=workplace.folder, stdout=log, stderr=log)

    def query(text: str) -> List[Any]:
        parameters = urllib.parse.urlencode({"query": text})
        answer = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?{parameters}"))
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def has(text: str, value: int) -> Callable[[], List[Any]]:
        return lambda: [one for one in query(text) if float(one["value"][1]) == value]

    try:
        (found,) = until(has("memtrace_allocated_bytes", allocated))
        assert found["metric"]["device"] == "0" and found["metric"]["job"] == "memtrace"
        until(has('memtrace_device_memory_bytes{owner="PyTorch"}', reserved))
        until(has("sum(memtrace_allocated_by_category_bytes)", allocated))
        metadata = json.loads(get(f"http://127.0.0.1:{port}/api/v1/metadata"))["data"]
        # In OpenMetrics, which this Prometheus asks for or not, the name of a counter has no suffix here.
        (kind,) = metadata.get("memtrace_allocations") or metadata["memtrace_allocations_total"]
        assert kind["type"] == "counter" and kind["help"] == "Blocks that PyTorch has allocated."
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "out of memory\n"
        until(has("memtrace_out_of_memory_errors_total", 1))
        for text in queries():
            result = query(text)
            # A comparison with 0 has no result if nothing is above.
            assert result or text.endswith("> 0"), text
    finally:
        prometheus.terminate()
        prometheus.wait()
        program.communicate("\n")
    assert program.returncode == 0, Path(log.name).read_text()
