"""Runs notebooks in kernels under memtrace, over the simulated CUDA. `scripts/test notebooks` starts this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import nbclient
import nbconvert
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = Path(__file__).parent / "notebooks"
TIMEOUT_S = 300


def memtrace() -> str:
    """The binary of the release build, unless MEMTRACE_BIN names another one."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = Path(os.environ.get("MEMTRACE_BIN", target / "release" / "memtrace"))
    assert path.exists(), f"{path} is missing: run `cargo build --release`"
    return str(path)


def kernel(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs `memtrace kernel`."""
    command = [memtrace(), "kernel", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(autouse=True)
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives Jupyter folders of its own, and kernels this checkout's package. Returns the folder of this user's kernels."""
    packages = Path(nbconvert.__file__).parents[1]
    for name in ("DATA", "CONFIG", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / f"jupyter-{name.lower()}"))
    monkeypatch.setenv("JUPYTER_PATH", str(packages / "share" / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "launcher" / "python"), str(packages)]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("MEMTRACE_BIN", memtrace())
    monkeypatch.setenv("SIMCUDA_DEVICES", "2")
    # The sources of cells go there, and the files of connections.
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "jupyter-data" / "kernels"


@pytest.fixture
def installed(jupyter: Path) -> Path:
    """Installs the kernel `memtrace` of this Python."""
    done = kernel("install", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    return jupyter / "memtrace"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {TIMEOUT_S} s"
        time.sleep(0.02)


def summary_of(run: Path) -> Dict[str, Any]:
    path = run / "summary.json"
    wait_until(path.exists, str(path))
    return json.loads(path.read_text())


@dataclass
class Executed:
    """A notebook that has run."""

    notebook: Any
    folder: Path

    def outputs(self, part_of_source: str) -> List[Any]:
        """The outputs of the only cell that has this text."""
        (cell,) = [one for one in self.notebook.cells if one.cell_type == "code" and part_of_source in one.source]
        return list(cell.outputs)

    def texts(self) -> List[str]:
        """The texts of all results."""
        all_outputs = [output for cell in self.notebook.cells if cell.cell_type == "code" for output in cell.outputs]
        return [output.data["text/plain"] for output in all_outputs if output.output_type in ("execute_result", "display_data")]

    def run_folder(self) -> Path:
        """The only run folder, which is beside the notebook."""
        (found,) = [path for path in self.folder.iterdir() if path.name.startswith("memtrace-")]
        return found

    def manifest(self) -> Dict[str, Any]:
        return json.loads((self.run_folder() / "run.json").read_text())

    def summary(self) -> Dict[str, Any]:
        """The summary, which memtrace writes after the kernel has ended. It is the last file."""
        return summary_of(self.run_folder())

    def page(self) -> Path:
        """The notebook as HTML."""
        body, _ = nbconvert.HTMLExporter().from_notebook_node(self.notebook)
        path = self.folder / "notebook.html"
        path.write_text(body, encoding="utf-8")
        return path


@pytest.fixture
def execute(tmp_path: Path) -> Iterator[Callable[..., Executed]]:
    """Runs a notebook in a folder of its own."""

    def run(path: Path, kernel_name: str = "memtrace") -> Executed:
        folder = tmp_path / "work"
        folder.mkdir()
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(folder)}}
        client = nbclient.NotebookClient(notebook, kernel_name=kernel_name, timeout=TIMEOUT_S, resources=resources)
        client.execute()
        return Executed(notebook, folder)

    yield run
