"""The magics, in real notebooks: their figures, what the recording has of the cells, and the rendered page in Chromium."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Callable, List

import pytest
from conftest import NOTEBOOKS, ROOT, TIMEOUT_S, Executed, memtrace

Execute = Callable[..., Executed]


def lines(*arguments: object) -> "dict[str, object]":
    done = subprocess.run([memtrace(), "lines", *map(str, arguments), "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def open_page(executed: Executed, *options: object) -> None:
    """Opens the notebook in Chromium, and checks every page of memtrace in it."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "chromium is needed (on Debian: apt-get install chromium)"
    subprocess.run([ROOT / "scripts" / "node-modules", ROOT / "web"], check=True)
    command = ["node", ROOT / "web" / "test" / "notebook.mjs", executed.page(), "--chromium", chromium, *options]
    if os.environ.get("MEMTRACE_TEST_PICTURES"):
        command += ["--out", os.environ["MEMTRACE_TEST_PICTURES"]]
    # Chromium ends with SIGTRAP if the path of its sockets is too long, as in the test's own folder.
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("installed")
def test_every_option(execute: Execute) -> None:
    # The cells check the figures. A cell that fails ends the notebook.
    executed = execute(NOTEBOOKS / "magics.ipynb")
    manifest = executed.manifest()
    losses = {name for name, count in manifest["losses"].items() if count and name != "events"}
    assert manifest["state"] == "ended" and not losses, manifest["losses"]
    assert manifest["unrecordable"] == [], "memtrace itself, run by the kernel, is not reported"
    found = json.loads((executed.folder / "run.json").read_text())
    run = executed.run_folder()
    assert Path(found["run"]) == run
    # After the end, the run has the same figures of the cell, and quotes the source of the cell that defined the function.
    executed.summary()
    (grow,) = lines(run, "--range", "In [3]", "--function", "grow")["functions"]
    assert grow["has_source"] and grow["lines"][0]["text"] == "def grow(count=1):"
    assert {row["text"].strip(): row["figures"] for row in grow["lines"] if "figures" in row} == found["grow"]
    # The range is a window of exports: the blocks of the cell, and those that were allocated before it.
    table = executed.folder / "blocks.csv"
    subprocess.run([memtrace(), "export", run, "--to", "csv", "--range", "In [3]", "-o", table], check=True, capture_output=True)
    with table.open(newline="") as file:
        assert sorted(int(row["size"]) for row in csv.DictReader(file)) == [2 << 20, *[4 << 20] * 3]
    command = [memtrace(), "export", run, "--to", "csv", "--range", "In [99]", "-o", table]
    unknown = subprocess.run(command, capture_output=True, text=True)
    assert unknown.returncode == 2 and "has no range In [99]" in unknown.stderr, unknown
    # The table of the report names the cells.
    ranges = {label["name"] for label in executed.summary()["processes"][0]["devices"][0]["labels"]}
    assert {"In [3]", "In [5]"} <= ranges, ranges
    open_page(executed, "--pages", executed.folder / "pages.json")


@pytest.mark.usefixtures("installed")
def test_errors(execute: Execute) -> None:
    executed = execute(NOTEBOOKS / "errors.ipynb")
    figures, error = executed.outputs("too_much")
    # The line that failed allocated nothing, so it has no figures.
    assert 'kept = torch.zeros(4 << 20, dtype=torch.uint8, device="cuda")' in figures.data["text/plain"]
    assert "<iframe" in figures.data["text/html"]
    assert error.ename == "OutOfMemoryError" and "too_much = torch.zeros" in "\n".join(error.traceback)
    assert "_notebook.py" not in "\n".join(error.traceback), "frames of the magic are hidden"
    (syntax,) = executed.outputs("if True:")
    assert syntax.ename in ("SyntaxError", "IndentationError", "_IncompleteInputError"), syntax
    assert len(executed.summary()["processes"][0]["devices"][0]["ooms"]) == 1


def test_a_kernel_that_is_not_recorded(execute: Execute) -> None:
    executed = execute(NOTEBOOKS / "not_recorded.ipynb", kernel_name="python3")
    messages = executed.texts()
    assert len(messages) == 2 and len(set(messages)) == 1, "one for the cell, one for the report, none with -q"
    assert messages[0].startswith("No figures: memtrace does not record this kernel; run `memtrace kernel install` once")
    assert sorted(path.name for path in executed.folder.iterdir()) == []


def test_a_recorder_and_dry_runs_in_any_kernel(execute: Execute) -> None:
    executed = execute(NOTEBOOKS / "recorder.ipynb", kernel_name="python3")
    (report,) = executed.outputs("recorder.stop()")
    assert "8.00 MiB" in report.data["text/plain"] and "<iframe" in report.data["text/html"]
    (row,) = json.loads(
        subprocess.run(
            [memtrace(), "lines", executed.folder / "run", "--function", "grow", "--json"], check=True, capture_output=True
        ).stdout
    )["functions"][0]["lines"][1:]
    assert row["text"].strip().startswith("return torch.zeros(5 << 20") and row["figures"]["allocated_bytes"] == 5 << 20
    printed, fits = executed.outputs("a100-40gb")
    assert printed.text == "in the dry run\n" and "8.00 GiB" in fits.data["text/plain"]
    error, too_large = executed.outputs("v100-16gb")
    assert "OutOfMemoryError" in error.text and "out of memory" in too_large.data["text/plain"]
    assert sorted(path.name for path in executed.folder.iterdir()) == ["run"]


def test_a_kernel_without_pytorch(execute: Execute, jupyter: Path) -> None:
    # The Python that the environment was made of has no packages of its own; the kernel's come from PYTHONPATH.
    python = Path(sys.base_prefix, "bin", "python%d.%d" % sys.version_info[:2])
    done = subprocess.run([memtrace(), "kernel", "install", "--python", python], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    executed = execute(NOTEBOOKS / "no_torch.ipynb")
    missing = f"PyTorch is not installed in {sys.base_prefix}"
    assert executed.texts() == [
        f"memtrace records this process. No GPU memory has been allocated yet; {missing}",
        f"No memory was allocated or freed in this cell; {missing}",
    ]


def code_of_page(page: Path) -> List[str]:
    blocks = page.read_text().split("```")[1::2]
    return [block[len("python\n") :].strip("\n") for block in blocks if block.startswith("python\n")]


@pytest.mark.usefixtures("installed")
def test_the_notebook_of_the_guide(execute: Execute) -> None:
    path = ROOT / "examples" / "notebook.ipynb"
    executed = execute(path)
    sources = [cell.source for cell in executed.notebook.cells if cell.cell_type == "code"]
    guide = code_of_page(ROOT / "docs" / "how-to" / "notebooks.md")
    assert guide and [block for block in guide if block not in sources] == [], "the page shows cells of the notebook"
    assert [cell for cell in executed.notebook.cells if cell.cell_type == "code" and cell.outputs] != []
    open_page(executed)
