"""The examples of docs/how-to/python-api.md, exactly as they are on the page, as one program."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from conftest import ROOT, environment, finished, memtrace


def program_of(page: str) -> str:
    text = (ROOT / "docs" / "how-to" / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S))


def test_the_examples_of_the_python_api(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(program_of("python-api.md"))
    folder = tmp_path / "run"
    result = finished([memtrace(), "--quiet", "-o", str(folder), "--", sys.executable, str(program)], environment(), folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "now.pickle").exists()
    assert {"build", "warm-up"} <= set(result.labels())
    head, tail = result.stdout[: result.stdout.index("Element type")], result.stdout[result.stdout.index("## train_step") :]
    assert "'parameter': 4198400" in head and "Adam.weight.exp_avg " in result.stdout
    assert re.search(r"512 B +0 B +\d+  +loss = model\(batch\).sum\(\)", tail), tail
    # The last part of the page leaves its allocations out.
    assert result.summary()["losses"]["events_dropped"] > 0
    (process,) = result.summary()["processes"]
    assert any("paused the recording" in notice["text"] for notice in process["notices"])
