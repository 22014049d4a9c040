"""pytorch_memlab's own tests, with gpu_memtrace.memlab in its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import PROGRAMS, Recorded, Run, environment, finished, memtrace

VERSION = "0.3.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "memtrace")


@pytest.fixture(scope="session")
def memlab_tests() -> Path:
    """The folder of the tests in the source distribution, which is downloaded once."""
    folder = Path(os.environ.get("MEMTRACE_CACHE", CACHE), "pytorch_memlab")
    archive = folder / f"pytorch_memlab-{VERSION}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, f"pytorch-memlab=={VERSION}"], check=True, capture_output=True)
    tests = folder / f"pytorch_memlab-{VERSION}" / "test"
    if not tests.exists():
        with tarfile.open(archive) as tar:
            # Only the tests: the package itself is what the replacement stands for.
            members = [m for m in tar.getmembers() if f"-{VERSION}/test/" in m.name and m.isfile()]
            tar.extractall(folder, members)
    return tests


def run(tests: Path, tmp_path: Path, *options: str, recorded: bool = True) -> Recorded:
    command = [sys.executable, str(PROGRAMS / "memlab_tests.py"), str(tests), *options]
    if recorded:
        command = [memtrace(), "--quiet", "-o", str(tmp_path / "run"), "--", *command]
    env = environment(SIMCUDA_DEVICES="2")
    env["PYTHONPATH"] += os.pathsep + os.pathsep.join(p for p in sys.path if "packages" in p and "site" not in p)
    return finished(command, env, tmp_path / "run")


def test_its_tests_pass(memlab_tests: Path, tmp_path: Path) -> None:
    result = run(memlab_tests, tmp_path, "-k", "not interrupt", "-s")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\b17 passed", result.stdout), result.stdout
    assert " skipped" not in result.stdout
    # The tables that they print have figures.
    assert re.search(r"\d MiB +\d.* linear_2 = torch.nn.Linear\(100, 100\).cuda\(\)", result.stdout), result.stdout


def test_its_test_of_ctrl_c(memlab_tests: Path, tmp_path: Path) -> None:
    """The test ends pytest with KeyboardInterrupt. The lines are printed nevertheless."""
    result = run(memlab_tests, tmp_path, "-k", "interrupt", "-s")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "KeyboardInterrupt" in result.stdout
    at_end = result.stdout[result.stdout.rindex("KeyboardInterrupt") :]
    assert "test_line_report_profile_interrupt.<locals>.work on GPU 0" in at_end, result.stdout


def test_its_tests_pass_without_memtrace(memlab_tests: Path, tmp_path: Path) -> None:
    """Only the one that looks for a table fails: it has the help in its place."""
    result = run(memlab_tests, tmp_path, "-k", "not interrupt and not test_display", recorded=False)
    assert result.returncode == 0 and "16 passed" in result.stdout, result.stdout + result.stderr


def test_courtesy(alone: Run) -> None:
    assert alone("courtesy.py").stdout == "done\n"
